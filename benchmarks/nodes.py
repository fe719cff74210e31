"""The control plane at size: CPU-seconds and bytes a leader of jobs of 256 and of 1024 leaders.

    python -m benchmarks.run --only nodes

The coordinator is that of production, a process of its own. Agents (`Membership`) and leaders
(`ReplicaDriver`) are those of production too, many in one process, over real sockets on loopback.
What is played is what they lead: each replica has one rank, which computes nothing. A node has 8
replicas. Leaders send statuses and votes along the tree.

- *Start*: from the first connection until all leaders are in the first generation.
- *Step*: a step of training without a fault. The coordinator takes no part.
- *Loss*: SIGKILL to a process with one node's agent and leaders, in a step, until all other leaders
  have their plan.
- *Beats*: a second in which nothing happens.

Agents and leaders send no beats in a job that measures the other three. CPU time is that of the
scheduler's clock for each process, so time in which others have the processor does not count. Bytes
are those of TCP's payload, handshakes included. Every leader computes its plans by itself, as in a
process of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import psutil
from msgspec.structs import replace

from benchmarks.common import Row, row
from megatron_recover.authentication.handshake import KEY_BYTES
from megatron_recover.cluster.membership import CoordinatorProcess, Membership
from megatron_recover.config import RankContext, RecoverConfig
from megatron_recover.control_plane.job_start import NodesSettings
from megatron_recover.control_plane.leader_messages import Enter, RankHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.naming import NamingRight
from megatron_recover.control_plane.node_messages import (
    FenceDone,
    FenceReplica,
    JobEnds,
    Launch,
    Met,
    NodeHello,
    NodeLaunched,
    NodeReady,
)
from megatron_recover.control_plane.replica_driver import ReplicaDriver
from megatron_recover.control_plane.wire import Link, Message
from megatron_recover.core.coordinator import MembershipSettings
from megatron_recover.core.memo import newest_kept
from megatron_recover.core.rank_messages import Apply, Begun, Holds, PassTimed, Plan, Promised, Report
from megatron_recover.core.values import Held, Shape, Work
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import parse_address
from megatron_recover.trace import node_clock, ring
from megatron_recover.trace.node_clock import NodeClock
from tests.cluster.strangers import raise_descriptor_limit

REPLICAS_A_NODE = 8
MICROBATCHES_A_REPLICA = 4
RUNS = {256: 5, 1024: 3}
"""Number of jobs of each size."""
STEPS, LOSSES = 5, 2
"""Steps and losses of each job."""
PLAYERS = 4
"""Processes that play nodes, besides one for each node that is lost."""
BEATS_S, QUIET_S = 8.0, 4.0
"""Seconds for which beats are measured, and seconds before that for the start to be over."""
NEVER_S, PATIENCE_S = 1e5, 900.0
PORT = 20_000
"""Port of the first leader of a node; each node has an address of 127.0.0.0/8."""
SHAPE = Shape(1, ((0,), (0,), (0,)))
BUCKETS = tuple(range(len(SHAPE.bucket_ranks)))
_ACKED_AND_RECEIVED, _AT, _INFO_BYTES = "=QQ", 120, 256
"""Where `tcpi_bytes_acked` and `tcpi_bytes_received` are in the kernel's `tcp_info`."""


class Used(NamedTuple):
    """The CPU time and the bytes that the parts of a job have used since its begin."""

    coordinator_s: float
    """CPU-seconds."""
    leaders_s: float
    from_coordinator: float
    """Bytes."""
    to_coordinator: float
    between_leaders: float

    def since(self, before: Used) -> Used:
        """Return what was used after `before`."""
        return Used(*(now - then for now, then in zip(self, before, strict=True)))


# --- A process that plays nodes -------------------------------------------------------------------


class _CountingLoop(Loop):
    """A loop that counts the bytes of its links, also of those that are gone."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._gone = [0, 0, 0]

    def drop(self, link: Link) -> None:
        self._count(link, self._gone)
        super().drop(link)

    def moved(self) -> tuple[int, ...]:
        """Return the bytes from the coordinator, to the coordinator, and to other leaders."""
        found = list(self._gone)
        for link in self._links:
            self._count(link, found)
        return tuple(found)

    def _count(self, link: Link, into: list[int]) -> None:
        if link not in self._links or link.fileno() < 0:
            return
        info = link.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        acked, received = struct.unpack_from(_ACKED_AND_RECEIVED, info, _AT)
        try:
            peers_port = link.connection.getpeername()[1]
        except OSError:
            return
        if peers_port == self._port:
            into[0] += received
            into[1] += acked
        else:
            into[2] += acked


class _Leader:
    """A leader, and the only rank of its replica, which computes nothing."""

    def __init__(self, town: _Town, replica: int, address: str) -> None:
        self._town = town
        self.generation = self.planned = self.step = 0
        self._until = 0
        self._held_back: Plan | None = None
        context = RankContext(
            replica=replica, rank=0, num_ranks=1, num_replicas=town.num_leaders, coordinator=town.coordinator, leader=address,
            run_dir="", started_at=0.0,
        )  # fmt: skip
        self._driver = ReplicaDriver(
            context, RecoverConfig(), RankHello(0, SHAPE, "alike", address), key=town.key, loop=town.loop,
            clock=town.clock, naming=NamingRight(town.deadlines.lease_s), deliver=self._deliver, fail=self._fail,
            record=lambda event: None, faults=None, deadlines=town.deadlines,
        )  # fmt: skip

    def train(self, until: int) -> None:
        """Train until so many steps are committed, and no further than the sums of the next one."""
        self._until = until
        if self._held_back is None:
            self._begin()
        else:
            self._finish(self._held_back)

    def _begin(self) -> None:
        step = self.step
        work = Work(f"train {step + 1}", MICROBATCHES_A_REPLICA * self._town.num_leaders, BUCKETS)
        self._driver.report(Begun(0, step, work))

    def _deliver(self, order: Message) -> None:
        self._town.loop.post(lambda: self._obey(order))  # the machine has not finished its step

    def _obey(self, order: Message) -> None:
        match order:
            case Enter(promise):
                self.generation = promise.generation
                self._report(Promised(0, promise.generation))
            case Plan():
                self.planned = order.generation
                self._finish(order)
            case Apply(record):
                self.step = record.step + 1
                self._begin()

    def _finish(self, plan: Plan) -> None:
        """Report what was computed and summed, unless the job is to stop in this step."""
        self._held_back = plan if plan.step >= self._until else None
        if self._held_back is None:
            count = sum(len(each.microbatches) for each in plan.computes)
            self._report(PassTimed(0, count, count * 10**9))
            self._report(Holds(0, plan.step, tuple(Held(bucket, plan.generation, 7) for bucket in plan.reduces)))

    def _report(self, report: Report) -> None:
        self._driver.report(report)

    def _fail(self, reason: str, exit_code: int = 1) -> None:
        raise RuntimeError(f"a leader ended with {exit_code}: {reason}")


class _Town:
    """Some nodes of a job, with their leaders, in one process."""

    def __init__(self, orders: Connection, coordinator: str, key: bytes, num_leaders: int, beat_s: float) -> None:
        self.coordinator, self.key, self.num_leaders = coordinator, key, num_leaders
        self.deadlines = _deadlines(beat_s)
        self.clock = NodeClock(None)
        self.loop = _CountingLoop(parse_address(coordinator)[1])
        self._orders = orders
        self._agents: list[Membership] = []
        self._leaders: list[_Leader] = []
        self._num_expected = 0
        self._is_over = False
        self._spent_s = 0.0
        self.loop.watch_readable(orders, self._ordered)

    def run(self) -> None:
        """Play until the job is over."""
        while not self._is_over:
            self.loop.run_once(1.0)
        self.loop.close()

    def _ordered(self) -> None:
        what, argument = self._orders.recv()
        if what == "join":
            self._num_expected = len(argument) * REPLICAS_A_NODE
            self._spent_s = time.process_time()
            for number, owner in argument:
                self._join(number, owner)
        elif what == "train":
            for leader in self._leaders:
                leader.train(argument)
        elif what == "where":
            complete = len(self._leaders) == self._num_expected
            self._orders.send([min(getattr(one, name) for one in self._leaders) if complete else -1 for name in argument])
        elif what == "used":
            self._orders.send((time.process_time() - self._spent_s, *self.loop.moved()))
        else:
            self._is_over = True

    def _join(self, number: int, identity: int) -> None:
        hello = NodeHello(identity, f"node{number}", REPLICAS_A_NODE, node_rank=number, address="127.0.0.1", alike=_ALIKE)
        agent = Membership(
            self.coordinator, hello, key=self.key, clock=self.clock, loop=self.loop, deadlines=self.deadlines,
            patience_s=PATIENCE_S,
        )  # fmt: skip
        host = f"127.{1 + os.getppid() % 200}.{number // 250}.{1 + number % 250}"
        mine = {number * REPLICAS_A_NODE + each: f"{host}:{PORT + each}" for each in range(REPLICAS_A_NODE)}

        def take(message: Message) -> None:
            match message:
                case Met():
                    agent.send(NodeReady(MembershipSettings(self.num_leaders), tuple(mine), tuple(mine.items())))
                case Launch():
                    self._leaders += [_Leader(self, replica, address) for replica, address in mine.items()]
                    agent.send(NodeLaunched())
                case FenceReplica(replica):
                    agent.send(FenceDone(replica))
                case JobEnds(exit_code, reason):
                    raise RuntimeError(f"the job ended with {exit_code}: {reason}")

        agent.handle(take, lambda why: None)
        self._agents.append(agent)


_ALIKE = tuple((f"--flag-{number}", str(number)) for number in range(60))
"""As many values to compare as a usual launch line has."""


def _play(orders: Connection, coordinator: str, key: bytes, num_leaders: int, beat_s: float) -> None:
    """Run the process that plays nodes."""
    raise_descriptor_limit()
    _share_nothing()
    _Town(orders, coordinator, key, num_leaders, beat_s).run()


def _share_nothing() -> None:
    """Have no leader use what another leader in this process has computed (`core/memo.py`)."""
    call = newest_kept.__call__

    def afresh(function: newest_kept[..., object], *args: object, **named: object) -> object:
        function.forget()
        return call(function, *args, **named)

    setattr(newest_kept, "__call__", afresh)  # noqa: B010 - a method cannot be assigned to


def _deadlines(beat_s: float) -> Deadlines:
    """Return deadlines under which nobody is late, however busy the machine is."""
    limits = dict.fromkeys(("follow_s", "stall_s", "blame_s", "start_s", "leader_s"), PATIENCE_S)
    return replace(Deadlines.of(2 * PATIENCE_S), beat_s=beat_s, silence_s=max(3 * beat_s, PATIENCE_S), **limits)


# --- A job, and what it uses ----------------------------------------------------------------------


class Job:
    """A job of `num_leaders` leaders, of which nothing else than the protocol runs."""

    def __init__(self, num_leaders: int, beat_s: float) -> None:
        """Start the processes; no node has connected yet."""
        raise_descriptor_limit()
        self.num_leaders = num_leaders
        num_nodes = num_leaders // REPLICAS_A_NODE
        key, owner = secrets.token_bytes(KEY_BYTES), 1
        settings = NodesSettings(
            owner=owner, least=num_nodes, most=num_nodes, join_s=PATIENCE_S, last_call_s=0.0, node_silence_s=PATIENCE_S,
            deadlines=_deadlines(beat_s),
        )  # fmt: skip
        self._events = ring.create(level="steps")
        self._clock = node_clock.create(0)
        self._coordinator = CoordinatorProcess(settings, key, events=self._events, clock=self._clock)
        self.pid = self._coordinator.process.pid
        spawn = multiprocessing.get_context("spawn")
        self._players: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        for _ in range(PLAYERS + LOSSES):
            here, there = spawn.Pipe()
            process = spawn.Process(
                target=_play, args=(there, self._coordinator.address, key, num_leaders, beat_s), daemon=True
            )  # fmt: skip
            process.start()
            there.close()
            self._players.append((process, here))
        # Lost nodes are in the middle of the roster, so that the tree changes.
        lost = [num_nodes // 2 + each for each in range(LOSSES)]
        left = [number for number in range(num_nodes) if number not in lost]
        self._num_steps = 0
        self._nodes = [*(left[each::PLAYERS] for each in range(PLAYERS)), *([each] for each in lost)]

    def start(self) -> Used:
        """Have all nodes join, and wait for the first generation; return what that used."""
        idle_s = self._settled_s()
        self.join()
        return self.used().since(Used(idle_s, 0.0, 0.0, 0.0, 0.0))

    def join(self) -> None:
        """Have all nodes join, and wait for the first generation."""
        for (_, orders), nodes in zip(self._players, self._nodes, strict=True):
            orders.send(("join", [(number, 1 + number) for number in nodes]))
        self._until(generation=1)

    def train(self, steps: int) -> Used:
        """Have all leaders commit so many more steps, and begin one; return what that used.

        All begin a step together, since a sum needs the gradients of all.
        """
        before = self.used()
        for _ in range(steps):
            self._num_steps += 1
            for _, orders in self._players:
                orders.send(("train", self._num_steps))
            self._until(step=self._num_steps)
        return self.used().since(before)

    def lose_a_node(self) -> Used:
        """Kill a node, and wait until all others have their plan; return what these used."""
        process, orders = self._players.pop()
        before, generation = self.used(), self.generation()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        orders.close()
        self._until(planned=generation + 1)
        return self.used().since(before)

    def generation(self) -> int:
        """Return the newest generation that all leaders have entered."""
        return min(int(self._ask(orders, "where", ("generation",))[0]) for _, orders in self._players)

    def used(self) -> Used:
        """Return what the coordinator and the living players have used so far."""
        self._settled_s()
        return self._used()

    def _used(self) -> Used:
        parts = list(zip(*(self._ask(orders, "used", None) for _, orders in self._players), strict=True))
        return Used(self._coordinator_s(), *(float(sum(part)) for part in parts))

    def idle(self, seconds: float) -> Used:
        """Let so much time pass; return what it used."""
        time.sleep(QUIET_S)
        before, began = self._used(), time.monotonic()
        time.sleep(seconds)
        after, took_s = self._used(), time.monotonic() - began
        return Used(*(value * seconds / took_s for value in after.since(before)))

    def memory(self) -> int:
        """Return the resident bytes of the coordinator."""
        found: int = psutil.Process(self.pid).memory_info().rss
        return found

    def close(self) -> None:
        """End all processes."""
        for process, _ in self._players:
            process.kill()
            process.join()
        self._coordinator.process.kill()
        self._coordinator.process.wait()
        os.close(self._events)
        os.close(self._clock)

    def _ask(self, orders: Connection, what: str, argument: object) -> Sequence[float]:
        orders.send((what, argument))
        found: Sequence[float] = orders.recv()
        return found

    def _until(self, **least: int) -> None:
        """Wait until all leaders have come so far."""
        until = time.monotonic() + PATIENCE_S
        while True:
            found = [self._ask(orders, "where", tuple(least)) for _, orders in self._players]
            if all(min(column) >= limit for column, limit in zip(zip(*found, strict=True), least.values(), strict=True)):
                return
            if time.monotonic() > until:
                raise TimeoutError(f"{self.num_leaders} leaders came only to {found}, and not to {least}")
            time.sleep(0.1)

    def _coordinator_s(self) -> float:
        return cpu_s(self.pid)

    def _settled_s(self) -> float:
        """Wait until no process of the job does anything; return the coordinator's CPU seconds."""
        pids = [self.pid, *(process.pid or 0 for process, _ in self._players)]
        quiet = 0
        last_s = sum(map(cpu_s, pids))
        while quiet < 2:
            time.sleep(0.4)
            now_s = sum(map(cpu_s, pids))
            quiet = quiet + 1 if now_s - last_s < 0.01 else 0
            last_s = now_s
        return cpu_s(self.pid)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, as clock_getcpuclockid(3) counts them."""
    return time.clock_gettime(~pid << 3 | 2)


# --- The rows -------------------------------------------------------------------------------------

_UNITS = {
    "coordinator_s": ("CPU of the coordinator", "us a leader", 1e6),
    "leaders_s": ("CPU of a leader", "ms", 1e3),
    "from_coordinator": ("bytes from the coordinator", "a leader", 1.0),
    "to_coordinator": ("bytes to the coordinator", "a leader", 1.0),
    "between_leaders": ("bytes to other leaders", "a leader", 1.0),
}
"""Name and unit of each part of `Used`, with its factor. Those of an agent are its leaders'."""


def measure(num_leaders: int) -> dict[tuple[str, str], list[float]]:
    """Return the figures of one job of so many leaders, by what happened and by name."""
    found: dict[tuple[str, str], list[float]] = {}

    def add(what: str, used: Used, times: float = 1.0) -> None:
        for name, value in used._asdict().items():
            found.setdefault((what, name), []).append(value / times / num_leaders)

    with contextlib.closing(Job(num_leaders, beat_s=NEVER_S)) as job:
        add("start", job.start())
        found["start", "memory"] = [job.memory() / 2**20]
        job.train(1)  # the first one makes the links of the tree
        add("step", job.train(STEPS), STEPS)
        for _ in range(LOSSES):
            generation = job.generation()
            add("loss", job.lose_a_node())
            found.setdefault(("loss", "generations"), []).append(job.generation() - generation)
    with contextlib.closing(Job(num_leaders, beat_s=1.0)) as job:
        job.join()
        add("beats", job.idle(BEATS_S), BEATS_S)
    return found


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    small, large = RUNS
    found = {size: [measure(size) for _ in range(number)] for size, number in RUNS.items()}
    for what, name in found[small][0]:
        of_size = {size: [each for run in found[size] for each in run[what, name]] for size in RUNS}
        if name not in _UNITS:
            unit = {"memory": "MiB", "generations": ""}[name]
            for size in RUNS:
                yield row(f"{what}: {name} ({size} leaders)", of_size[size], unit)
            continue
        title, unit, factor = _UNITS[name]
        if not any(of_size[small]):
            continue
        for size in RUNS:
            yield row(f"{what}: {title} ({size} leaders)", [factor * each for each in of_size[size]], unit)
        usual = statistics.median(of_size[small])
        ratios = [each / usual for each in of_size[large]]
        yield row(f"{what}: {title}, {large} over the median of {small} leaders", ratios, "ratio")
