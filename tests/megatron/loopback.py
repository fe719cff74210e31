"""A whole job in one process: every rank of every replica is a thread, with the real core, the real schedule and toy models.

`Job` carries the effects of the real machines (`core.replica`, `core.rank`) between the threads, plays the coordinator, and
kills a replica by ending its threads at a fault point. `MemoryTransport` is a data plane in shared memory. Everything else is
the product's: `CommitLoop`, `Schedule`, `Reduction`, upstream's schedules and its gradient buffers.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_recover.core import rank as rank_machine
from megatron_recover.core import replica as replica_machine
from megatron_recover.core.membership_messages import Diverged, Miscounted, NewGeneration, Void
from megatron_recover.core.quota import ticks
from megatron_recover.core.rank_messages import Apply, Close, Plan, Stop
from megatron_recover.core.request import MISCOUNTED
from megatron_recover.core.values import Held, Record, Shape, Work
from megatron_recover.data_plane.transport import PeerLost, Probe, Revoked
from megatron_recover.faults import FaultPoint

DEADLINE_S = 30.0
"""A wait longer than this is a hang: the test fails."""


class Killed(BaseException):
    """This thread's replica is dead. No `except Exception` of the code under test may see it."""


class MemoryTransport:
    """One generation's data plane between the same-position ranks of its members."""

    def __init__(self, job: Job, generation: int, members: tuple[int, ...], me: int, position: int) -> None:
        self.job, self.generation, self.members, self.me, self.position = job, generation, members, me, position

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, probe: Probe | None = None) -> None:
        probe = probe or (lambda instant: None)
        for result in results:
            result.fill_(-7)  # what a failed operation leaves behind has no defined value
        probe("begin")
        posted = self._board(tag)
        with self.job.changed:
            assert self.me not in posted, f"tag {tag} is used twice"
            posted[self.me] = [source.clone() for source in sources]
            self.job.changed.notify_all()
        probe("sent")
        probe("middle")
        self._wait(lambda: len(posted) == len(self.members))
        for index, result in enumerate(results):
            total = posted[self.members[0]][index].clone()
            for member in self.members[1:]:
                total += posted[member][index]
            result.copy_(total)
        probe("end")

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, targets: Sequence[int], tag: int) -> None:
        posted = self._board(tag)
        if self.me == source:
            with self.job.changed:
                posted[source] = [tensor.clone() for tensor in tensors]
                self.job.changed.notify_all()
        elif self.me in targets:
            self._wait(lambda: source in posted)
            for tensor, value in zip(tensors, posted[source], strict=True):
                tensor.copy_(value)

    def _board(self, tag: int) -> dict[int, list[Tensor]]:
        with self.job.changed:
            return self.job.boards.setdefault((self.generation, self.position, tag), {})

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Until ready; or fail as sockets do: by a peer's death, by a newer generation, and not alike on all survivors."""
        job = self.job
        with job.changed:
            job.wait_for(lambda: ready() or self._failure() is not None, self.me)
            failure = self._failure()
            if failure is not None and (not ready() or job.random.random() < 0.5):
                raise failure

    def _failure(self) -> Exception | None:
        if self.job.promised(self.me, self.position) > self.generation:
            return Revoked("a newer generation was promised")
        lost = [member for member in self.members if member in self.job.dead]
        return PeerLost(lost[0], "killed") if lost else None


class LoopbackDriver:
    """`control_plane.rank_driver.RankDriver` over shared memory."""

    def __init__(self, job: Job, replica: int, rank: int) -> None:
        self.job, self.replica, self.rank, self.num_ranks = job, replica, rank, job.num_ranks
        self.generation = 0
        self.roster: tuple[int, ...] = tuple(range(job.num_replicas))

    def is_writer(self) -> bool:
        return self.replica == min(self.roster)

    def join(self, shape: Shape, fingerprint: str, parts: Any = (), beginning: Any = (), state_address: str = "") -> None:
        self.job.join(self.replica, self.rank, shape)

    def begin(self, work: Work, requests: Sequence[str] = (), digest: int | None = None) -> int:
        job = self.job
        with job.changed:
            step = job.ranks[self.replica, self.rank].step
            job.feed_rank(self.replica, self.rank, rank_machine.Begin(work, tuple(requests), digest))
            return step

    def next_order(self) -> Plan | Apply:
        job, key = self.job, (self.replica, self.rank)
        with job.changed:
            job.wait_for(lambda: bool(job.ranks[key].queue), self.replica)
            job.feed_rank(*key, rank_machine.Take())
            order = job.ranks[key].taken
            assert isinstance(order, Plan | Apply), order
            self.generation, self.roster = order.generation, order.roster if isinstance(order, Plan) else self.roster
        return order

    def more_work(self) -> Plan | None:
        job, key = self.job, (self.replica, self.rank)
        with job.changed:
            job.wait_for(lambda: bool(job.ranks[key].queue), self.replica)
            if isinstance(job.ranks[key].queue[0], Close):
                job.feed_rank(*key, rank_machine.Take())
                return None
        order = self.next_order()
        assert isinstance(order, Plan), order
        return order

    def has_order(self) -> bool:
        with self.job.changed:
            return bool(self.job.ranks[self.replica, self.rank].queue)

    def pass_ended(self, generation: int) -> None:
        pass

    def started(self, microbatch: int) -> None:
        self._feed(rank_machine.MicrobatchStarted(microbatch))

    def finished(self, microbatch: int) -> None:
        self._feed(rank_machine.MicrobatchFinished(microbatch))

    def pass_timed(self, num_microbatches: int, elapsed_ns: int) -> None:
        assert elapsed_ns > 0
        timed = self.replica, self.job.ranks[self.replica, self.rank].step
        assert timed not in self.job.timed, "another pass than the first of its step was timed"
        self.job.timed.append(timed)
        elapsed = ticks(num_microbatches, self.job.leaders[self.replica].shape.pipeline) * self.job.paces[self.replica]
        self._feed(rank_machine.TimePass(num_microbatches, elapsed))

    def _feed(self, message: Any) -> None:
        with self.job.changed:
            self.job.feed_rank(self.replica, self.rank, message)

    def ask_close(self) -> None:
        if self.rank == 0:
            with self.job.changed:
                self.job.await_loss(self.replica)
                self.job.feed_rank(self.replica, self.rank, rank_machine.AskClose())
                self.job.closed.add((self.replica, self.job.ranks[self.replica, 0].step))
                self.job.changed.notify_all()

    def overlap_refusal(self, generation: int, operands: object) -> str:
        return ""

    def transport(self, generation: int) -> MemoryTransport:
        with self.job.changed:
            state = self.job.ranks[self.replica, self.rank]
            if not rank_machine.may_run(state, generation):
                raise Revoked("a newer generation was promised")
            return MemoryTransport(self.job, generation, self.roster, self.replica, self.rank)

    def hold(self, held: Held) -> bool:
        job, key = self.job, (self.replica, self.rank)
        with job.changed:
            job.feed_rank(*key, rank_machine.Hold(held))
            return held in job.ranks[key].held

    def blocked(self, generation: int, error: BaseException) -> None:
        with self.job.changed:
            miscounted = getattr(error, "miscounted", False)
            failed = rank_machine.Block(generation, str(error), miscounted=miscounted)
            self.job.feed_rank(self.replica, self.rank, failed)

    def failing(self, microbatches: Sequence[int], error: BaseException) -> None:
        self.job.raised.append((tuple(microbatches), error))


class Strike:
    """A fault: end `replica` when its rank passes `point`. Stands for `faults.FaultInjector` in this process."""

    def __init__(
        self, replica: int, rank: int, point: FaultPoint, *, step: int, microbatch: int | None = None,
        bucket: int | None = None, occurrence: int = 1, when: Literal["any", "open", "closed"] = "any",
    ) -> None:  # fmt: skip
        """`occurrence`: which passage that matches. `when`: whether the others' passes of the step can still be extended."""
        self.replica, self.rank, self.point = replica, rank, point
        self.step, self.microbatch, self.bucket, self.occurrence, self.when = step, microbatch, bucket, occurrence, when
        self.struck = False

    def matches(self, replica: int, rank: int, point: FaultPoint, step: int | None, **where: int | None) -> bool:
        if (
            (self.replica, self.rank, self.point, self.step) != (replica, rank, point, step)
            or self.microbatch not in (None, where["microbatch"])
            or self.bucket not in (None, where["bucket"])
        ):
            return False
        self.occurrence -= 1
        return self.occurrence == 0

    def __repr__(self) -> str:
        where = f"microbatch {self.microbatch}" if self.microbatch is not None else f"bucket {self.bucket}"
        where += f", passage {self.occurrence}, passes {self.when}"
        return f"replica {self.replica} rank {self.rank} at {self.point.value}, step {self.step}, {where}"


class _Injector:
    """The fault injector of one rank."""

    def __init__(self, job: Job, replica: int, rank: int) -> None:
        self.job, self.replica, self.rank = job, replica, rank

    def at(
        self, point: FaultPoint, *, step: int | None = None, microbatch: int | None = None, bucket: int | None = None
    ) -> None:
        self.job.check_alive(self.replica)
        for strike in self.job.strikes:
            if not strike.struck and strike.matches(self.replica, self.rank, point, step, microbatch=microbatch, bucket=bucket):
                self.job.await_passes(strike)
                with self.job.changed:
                    strike.struck = True
                    self.job.kill(self.replica)
                raise Killed

    def stretch(self, step: int, seconds: float) -> float:
        """Nobody is slow."""
        return seconds


class Job:
    """All replicas, their machines and the messages between them, under one lock."""

    def __init__(self, num_replicas: int, num_ranks: int, strikes: Sequence[Strike] = (), seed: int = 0) -> None:
        self.num_replicas, self.num_ranks, self.strikes = num_replicas, num_ranks, list(strikes)
        self.random = random.Random(seed)
        self.changed = threading.Condition(threading.RLock())
        self.boards: dict[tuple[int, int, int], dict[int, list[Tensor]]] = {}
        self.ranks: dict[tuple[int, int], rank_machine.RankState] = {}
        self.leaders: dict[int, replica_machine.ReplicaState] = {}
        self.dead: set[int] = set()
        self.roster = tuple(range(num_replicas))
        self.generation = 0
        self.void: Void | None = None
        self.records: dict[int, list[Record]] = {}
        """What each replica committed, in order."""
        self.timed: list[tuple[int, int]] = []
        """(replica, step) of passes whose length was told."""
        self.raised: list[tuple[tuple[int, ...], BaseException]] = []
        self.errors: list[BaseException] = []
        self.diverged: list[Diverged] = []
        """What the coordinator was told of; it takes the minority out, or, where there is none, everybody."""
        self.trusted_from = 0
        self._inbox: deque[tuple[str, Any, Any]] = deque()
        self._pumping = False
        self._gathered: dict[tuple[int, int], Any] = {}
        self.closed: set[tuple[int, int]] = set()
        """(replica, step) of the passes that are closed, or will be."""
        self.paces: tuple[int, ...] = ()
        """What each replica measures, in nanoseconds a microbatch, whatever its passes take."""
        self.channels: dict[tuple[int, int, int], Channel] = {}
        """By replica, source and target: activations and their gradients on the way between stages."""

    # --- threads ---------------------------------------------------------------------------------------------------------

    def run(self, life: Callable[[LoopbackDriver, _Injector], None]) -> None:
        """Run `life` as every rank; returns when all have ended. Raises what the first failing rank raised."""

        def thread(replica: int, rank: int) -> None:
            try:
                life(LoopbackDriver(self, replica, rank), _Injector(self, replica, rank))
            except Killed:
                pass
            except BaseException as error:
                with self.changed:
                    self.errors.append(error)
                    self.changed.notify_all()

        threads = [
            threading.Thread(target=thread, args=(replica, rank), daemon=True, name=f"replica {replica} rank {rank}")
            for replica in range(self.num_replicas)
            for rank in range(self.num_ranks)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(DEADLINE_S * 2)
        if self.errors:
            raise self.errors[0]
        assert not any(each.is_alive() for each in threads), "a rank hangs"

    def wait_for(self, ready: Callable[[], bool], replica: int) -> None:
        """Wait under the lock. Raises Killed when the waiter's replica dies, AssertionError for a hang."""
        done = self.changed.wait_for(lambda: replica in self.dead or bool(self.errors) or ready(), DEADLINE_S)
        self.check_alive(replica)
        if self.errors:
            raise Killed
        assert done, f"replica {replica} waits for ever: {self.leaders}"

    def check_alive(self, replica: int) -> None:
        if replica in self.dead:
            raise Killed

    def promised(self, replica: int, rank: int) -> int:
        return self.ranks[replica, rank].promised

    # --- the coordinator -------------------------------------------------------------------------------------------------

    def join(self, replica: int, rank: int, shape: Shape) -> None:
        with self.changed:
            buckets = tuple(bucket for bucket, ranks in enumerate(shape.bucket_ranks) if rank in ranks)
            self.ranks[replica, rank] = rank_machine.RankState(replica, rank, buckets)
            self.leaders.setdefault(replica, replica_machine.ReplicaState(replica, shape))
            if len(self.ranks) == self.num_replicas * self.num_ranks:
                self._announce()
            self.changed.notify_all()
            self.wait_for(lambda: self.ranks[replica, rank].promised > 0, replica)

    def gather(self, replica: int, rank: int, value: Any) -> list[Any]:
        """All-gather inside a replica (once in its life)."""
        with self.changed:
            self._gathered[replica, rank] = value
            self.changed.notify_all()
            keys = [(replica, other) for other in range(self.num_ranks)]
            self.wait_for(lambda: all(key in self._gathered for key in keys), replica)
            return [self._gathered[key] for key in keys]

    def kill(self, replica: int) -> None:
        """SIGKILL to all ranks of a replica, and the coordinator's answer."""
        with self.changed:
            if replica in self.dead:
                return
            self.dead.add(replica)
            self.roster = tuple(member for member in self.roster if member != replica)
            if self.roster:
                self._announce()
            self.changed.notify_all()

    def _announce(self) -> None:
        self.generation += 1
        for member in self.roster:
            requests = (MISCOUNTED,) if self.void is not None and self.void.gives_up else ()
            new = NewGeneration(self.generation, self.roster, (), "", requests, self.trusted_from, self.void)
            self._post("leader", member, new)
        self._pump()

    def _outvote(self, told: Diverged) -> None:
        if told.generation != self.generation:
            return
        self.diverged.append(told)
        self.trusted_from = self.generation + 1
        self.dead |= set(told.minority or self.roster)
        self.roster = tuple(member for member in self.roster if member not in self.dead)
        if self.roster:
            self._announce()

    def await_loss(self, replica: int) -> None:
        """Keep this replica's pass open until it knows of the deaths that are to find it open; under the lock."""
        step = self.ranks[replica, 0].step
        ahead = [strike for strike in self.strikes if strike.when == "open" and strike.step == step]
        if not ahead or replica in {strike.replica for strike in ahead}:
            return

        def are_known() -> bool:
            state = self.ranks[replica, 0]
            newest = [state.taken, *state.queue][-1]
            return all(strike.struck for strike in ahead) and getattr(newest, "generation", 0) == self.generation

        self.wait_for(are_known, replica)

    def await_passes(self, strike: Strike) -> None:
        """Put a death off until it finds the others' passes as it is to find them."""

        def are_ready() -> bool:
            others = [replica for replica in self.roster if replica != strike.replica]
            if strike.when == "closed":
                return all((replica, strike.step) in self.closed for replica in others)
            taken = [self.ranks[replica, 0].taken for replica in others]
            return strike.when == "any" or all(isinstance(each, Plan) and each.step == strike.step for each in taken)

        with self.changed:
            self.wait_for(are_ready, strike.replica)

    # --- messages --------------------------------------------------------------------------------------------------------

    def feed_rank(self, replica: int, rank: int, message: Any) -> None:
        """An input of a rank's machine; under the lock."""
        self.check_alive(replica)
        self._step_rank((replica, rank), message)
        self._pump()

    def _post(self, kind: str, to: Any, message: Any) -> None:
        self._inbox.append((kind, to, message))

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._inbox:
                kind, to, message = self._inbox.popleft()
                replica = to if kind == "leader" else to[0]
                if replica in self.dead:
                    continue
                if kind == "leader":
                    self._step_leader(replica, message)
                else:
                    self._step_rank(to, message)
        finally:
            self._pumping = False
            self.changed.notify_all()

    def _step_rank(self, key: tuple[int, int], message: Any) -> None:
        self.ranks[key], effects = rank_machine.step(self.ranks[key], message)
        for effect in effects:
            if isinstance(effect, rank_machine.ToLeader):
                self._post("leader", key[0], effect.report)

    def _step_leader(self, replica: int, message: Any) -> None:
        self.leaders[replica], effects = replica_machine.step(self.leaders[replica], message)
        for effect in effects:
            match effect:
                case replica_machine.ToRanks(order):
                    assert not isinstance(order, Stop), order
                    for rank in range(self.num_ranks):
                        self._post("rank", (replica, rank), order)
                case replica_machine.ToPeers(peers, sent):
                    for peer in peers:
                        self._post("leader", peer, sent)
                case replica_machine.ToCoordinator(Miscounted() as miscounted) if miscounted.generation == self.generation:
                    is_second = self.void is not None and self.void.step == miscounted.step
                    self.void = Void(miscounted.step, self.generation + 1, is_second)
                    self._announce()
                case replica_machine.ToCoordinator(Diverged() as told):
                    self._outvote(told)
                case replica_machine.Committed(record):
                    self.records.setdefault(replica, []).append(record)


class Channel:
    """What one stage sends to another, as gloo does: the n-th send meets the n-th receive, and neither is over before."""

    def __init__(self, job: Job, replica: int) -> None:
        self._job, self._replica = job, replica
        self._sent: list[Tensor] = []
        self._num_received = 0

    def send(self, tensor: Tensor) -> Handle:
        with self._job.changed:
            self._sent.append(tensor.detach().clone())
            number = len(self._sent)
            self._job.changed.notify_all()
        return Handle(self._job, self._replica, lambda: self._num_received >= number)

    def receive(self) -> Handle:
        with self._job.changed:
            number, self._num_received = self._num_received, self._num_received + 1
            self._job.changed.notify_all()
        into = torch.full((1,), math.nan).requires_grad_()
        return Handle(
            self._job, self._replica, lambda: len(self._sent) > number, into, lambda: into.data.copy_(self._sent[number])
        )


class Handle:
    """A send or a receive that is on its way. What is received is in `tensor` after `wait`."""

    def __init__(
        self, job: Job, replica: int, is_over: Callable[[], bool], tensor: Tensor | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._job, self._replica, self._is_over, self.tensor, self._then = job, replica, is_over, tensor, then

    def wait(self) -> None:
        with self._job.changed:
            self._job.wait_for(self._is_over, self._replica)
            self._then()


class Link:
    """Upstream's `P2PCommunicator` for a stage that is a thread: what the two pipelines call. The stages are a ring."""

    def __init__(self, job: Job, replica: int, stage: int, num_stages: int, config: Any) -> None:
        self.job, self.replica, self.config = job, replica, config
        self.current_stage, self.total_stages = stage, num_stages
        self.is_pp_first_stage, self.is_pp_last_stage = stage == 0, stage == num_stages - 1

    def _channel(self, source: int, target: int) -> Channel:
        ends = (self.replica, source % self.total_stages, target % self.total_stages)
        with self.job.changed:
            return self.job.channels.setdefault(ends, Channel(self.job, self.replica))

    def _post(self, send: Any, to: int, receives: bool, source: int) -> dict[str, Handle]:
        """Start a send (of a tensor, a list of one, or None) and a receive, of and to stages counted from this one."""
        [tensor] = send if isinstance(send, list) else [send]
        me, handles = self.current_stage, {}
        if tensor is not None:
            handles["send_next" if to > 0 else "send_prev"] = self._channel(me, me + to).send(tensor)
        if receives:
            handles["recv_next" if source > 0 else "recv_prev"] = self._channel(me + source, me).receive()
        return handles

    def _exchange(self, send: Any, to: int, receives: bool, source: int, *, overlap: bool = False) -> Any:
        handles = self._post(send, to, receives, source)
        received = handles["recv_next" if source > 0 else "recv_prev"].tensor if receives else None
        if overlap:
            return received, handles
        for handle in handles.values():
            handle.wait()
        return received

    def recv_forward(self, shapes: Any, is_first_stage: bool) -> Any:
        received = self._exchange(None, +1, not is_first_stage, -1)
        return received if isinstance(shapes[0], int) else [received]

    def recv_backward(self, shapes: Any, is_last_stage: bool) -> Any:
        received = self._exchange(None, -1, not is_last_stage, +1)
        return received if isinstance(shapes[0], int) else [received]

    def send_forward(self, tensors: Any, is_last_stage: bool) -> None:
        self._exchange(None if is_last_stage else tensors, +1, False, -1)

    def send_backward(self, tensors: Any, is_first_stage: bool) -> None:
        self._exchange(None if is_first_stage else tensors, -1, False, +1)

    def send_forward_recv_backward(self, tensors: Any, shapes: Any, is_last_stage: bool) -> list[Tensor | None]:
        return [self._exchange(None if is_last_stage else tensors, +1, not is_last_stage, +1)]

    def send_backward_recv_forward(self, tensors: Any, shapes: Any, is_first_stage: bool) -> list[Tensor | None]:
        return [self._exchange(None if is_first_stage else tensors, -1, not is_first_stage, -1)]

    def send_forward_recv_forward(self, output: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False) -> Any:
        return self._exchange(output, +1, recv_prev, -1, overlap=overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        return self._exchange(input_tensor_grad, -1, recv_next, +1, overlap=overlap_p2p_comm)
