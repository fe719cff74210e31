"""The run in the launcher's process: dry run, start of all ranks here, watch over them, exit code.

The launcher joins the agent (processes), the membership (the link to the coordinator, which
decides), the recording (trace and console) and the monitoring (metrics and events). Coordinator,
recorder and monitor have a process of their own each. At its end the launcher kills every process
of a rank that is left. The core decides what a loss does to the job. The launcher itself decides
about:

- imports and a dry run that fail, take too long or are interrupted;
- bad input, found in the dry run or by a rank before generation 1;
- a fork server that is lost;
- a second Ctrl-C;
- how long a process may take to end when it was requested to.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from megatron_recover import config as settings
from megatron_recover import trace
from megatron_recover.authentication import key as keys
from megatron_recover.cluster import status
from megatron_recover.cluster.agent import Agent, descriptors_needed
from megatron_recover.cluster.environment import environment_of_workers, environment_warnings, nccl_line
from megatron_recover.cluster.job import Job, sharing_a_gpu, write_description
from megatron_recover.cluster.membership import Joined, alone
from megatron_recover.cluster.monitoring import Monitoring, Wanted
from megatron_recover.cluster.node import Node, NodeLost, ProcessEnd, Undying
from megatron_recover.cluster.other_nodes import OtherNodes
from megatron_recover.cluster.output import Output
from megatron_recover.cluster.recording import Recording
from megatron_recover.cluster.signals import Answer, EndRequest, is_at_terminal
from megatron_recover.cluster.thawing import Thawing
from megatron_recover.cluster.watch import Watch, explaining_first
from megatron_recover.config import BAD_ARGUMENTS, CONTEXT_VARIABLE, FOR_CONSOLE, RankContext
from megatron_recover.control_plane import listening, rendezvous
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    AskPart,
    DismissReplica,
    DrainAnswer,
    DrainAsked,
    EndAsked,
    FenceDone,
    FenceReplica,
    Idle,
    JobEnds,
    JobState,
    KillAsked,
    Launch,
    Met,
    NodeAtWork,
    NodeFailed,
    NodeLaunched,
    NodeReady,
    ReplicaGone,
    Roster,
    TellKnown,
)
from megatron_recover.control_plane.wire import Message, listen
from megatron_recover.core import policy
from megatron_recover.core.coordinator import MembershipSettings
from megatron_recover.core.values import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import ANY_PORT, address_of, format_address, parse_address
from megatron_recover.host.reachable import interface_of, interfaces
from megatron_recover.observe.files import LOGS
from megatron_recover.trace import node_clock
from megatron_recover.trace.node_clock import NodeClock

_DRY_RUN = -1
"""Replica number that the agent gets for the dry run, which belongs to no replica."""
_NUM_DRY_RUNS = 1
"""Warm processes that become no rank."""
_POLL_S = 0.1
"""Seconds between two looks at the recorder and at every rank: /proc entry, page and output.

A message, such as the report of a broken link, is followed by a look at once. Without any other
sign a death is seen after half of this time on average (`agent.py`, Note [Seeing a death]).
"""
_ANSWERS = 16
"""Number of answers to requests that are kept for who asked."""
_KILLED = 128
"""Added to the number of a signal: the exit code of a run that was killed on request."""
_CALLS_PRETRAIN = (
    "called Megatron's pretrain; call parse_and_validate_args and pretrain of megatron.training, as upstream's "
    "pretrain_gpt.py does"
)


class Launcher:
    """One run. The main thread calls `run` and does everything."""

    def __init__(
        self,
        job: Job,
        *,
        quiet: bool = False,
        deadlines: Deadlines | None = None,
        wanted: Wanted | None = None,
        joined: Joined | None = None,
    ) -> None:
        """Prepare the run of `job`; `run` starts it.

        `quiet`: show only the end of the run, and only if its exit code is not 0. `deadlines`: for
        tests, replaces the job's. `wanted`: metrics and notices; None: there is no monitor.
        `joined`: this node has met the others; None: the job has no other node.
        """
        self._job, self._quiet = job, quiet
        self._deadlines = deadlines or job.config.deadlines
        self._joined = joined
        self._loop = Loop() if joined is None else joined.loop
        self._key = keys.make_key() if joined is None else joined.key
        self._sealed_key = keys.sealed(self._key)
        with descriptors_needed():
            self._clock_memory = node_clock.create(job.num_ranks_here) if joined is None else joined.clock_memory
        self._clock = NodeClock(self._clock_memory) if joined is None else joined.clock
        self._started_at = time.monotonic()
        self._thawing = Thawing(job.faults, job.run_dir / trace.EVENTS_FILE)
        self._outputs: dict[tuple[int, int], Output] = {}
        self._fencing: set[int] = set()
        self._set_aside: set[tuple[int, int]] = set()
        """Killed ranks (replica, rank) that do not end."""
        self._gone: set[int] = set()
        """Replicas that were fenced, or whose fencing has begun."""
        self._told_gone: set[int] = set()
        """Replicas that have left, and whose end the coordinator was told."""
        self._dismissed: dict[int, float] = {}
        """Replicas that leave, and the time of the loop's clock until which their ranks may end by
        themselves."""
        self._ending: tuple[int, str] | None = None
        self._end_by = 0.0
        """Time of the loop's clock until which processes may end by themselves."""
        self._stood_still_s = 0.0
        self._end_request = EndRequest(job.signals)
        self._kill: tuple[float, int] | None = None
        """Time of the loop's clock at which everything is killed, and the signal that began it."""
        self.is_recorded = False
        """True if the recorder has confirmed that the whole trace is written. Known after `run`."""
        self._recording: Recording
        self._wanted = wanted
        self._monitoring: Monitoring | None = None
        self._generation = 0
        self._others: OtherNodes | None = None
        """None: the job has one node."""
        """Newest generation that the coordinator has announced."""
        self._leaders: dict[int, str] = {}
        """Replica -> address of its leader, once the ranks may be started."""
        self._stores: dict[int, str] = {}
        """Replica -> address of its store, if the replica spans nodes."""
        self._listeners: dict[int, dict[str, socket.socket]] = {}
        """Replica -> listening sockets that its rank 0 inherits, by name, until it is started."""
        self._answers: tuple[status.Answer, ...] = ()
        """Answers to the newest requests."""
        self._state: JobState | None = None
        """Newest state of the job that the coordinator has sent."""
        self._is_cut_off = False
        """True once the coordinator was reported as silent, until it is heard again."""
        self._orphaned = ""
        """The loss of the coordinator in words; empty while the link to it lives."""
        self._node: Node
        self._ranks: Watch

    def run(self) -> int:
        """Run the job to its end; return its exit code.

        The code is one of `core.values.ExitCode`, or 128 + signal if the job was killed on request.
        Raises OSError if the run directory accepts no description or no trace, or if the system
        refuses what the launcher needs, such as memory or a process.
        """
        job = self._job
        write_description(job)
        raise_descriptor_limit()  # first: the recorder inherits the limit, and has 3 to 5 descriptors for each rank
        self._recording = Recording(
            job, self._started_at, self._clock, has_stamps=bool(job.nodes), quiet=self._quiet, deadlines=self._deadlines,
            coordinator=self._joined.events if self._joined is not None else None,
        )  # fmt: skip
        self._clock.report_refused(
            lambda ahead_s: self._recording.record(trace.ClockRefused(replica=-1, rank=-1, ahead_s=round(ahead_s, 3)))
        )
        self._recording.record(
            trace.RunStarted(
                replicas=job.num_replicas,
                layout=job.layout,
                determinism=job.config.determinism,
                seed=job.seed,
                argv=job.argv,
                min_replicas=job.config.min_replicas,
                num_microbatches=job.num_microbatches,
                level=job.trace_level,
            )  # fmt: skip
        )
        if job.nodes:
            self._recording.record(
                trace.NodeStarted(node=job.node, name=job.nodes[job.node].name, clock=self._recording.clock_base)
            )
        try:
            if self._wanted is not None:
                self._monitoring = Monitoring(
                    self._wanted, job.run_dir, self._started_at, self._deadlines,
                    signals=job.signals, says=self._recording.says,
                )  # fmt: skip
            with self._end_request.received(lambda number: self._loop.post(lambda: self._signalled(number))):
                exit_code = self._run()
            reason = self._ending[1] if self._ending else ""
            self._recording.record(trace.RunFinished(exit_code=exit_code, reason=reason))
            self._keep_status(None, exit_code, reason)
            self.is_recorded = self._recording.finish(exit_code, reason)
            if self._monitoring is not None:
                self._monitoring.finish(exit_code, reason, self.is_hurried)
        finally:
            self._recording.close()  # so that a traceback comes after the console's lines, on a restored terminal
            if self._monitoring is not None:
                self._monitoring.close()
        return exit_code

    def release_signals(self) -> None:
        """Restore the signal handlers from before `run`.

        If the end was requested by a signal, only that of SIGINT is restored, and the other signals
        stay ignored. Between the end of `run` and this call, signals do not change the exit code.
        """
        self._end_request.release()

    def is_hurried(self) -> bool:
        """Return whether a signal came after the exit code was known.

        What is left to do then should end early. If the end was requested by a signal, only SIGINT
        counts.
        """
        return self._end_request.is_hurried

    @property
    def reason(self) -> str:
        """Return why the run has ended; empty while it has not."""
        return self._ending[1] if self._ending else ""

    @property
    def has_begun(self) -> bool:
        """Return whether training has begun: the job has had a generation."""
        return self._generation > 0

    def _run(self) -> int:
        job = self._job
        num_ranks = job.num_ranks_here
        given, on_gpus = settings.inherited_environment(), job.rank_start == "warm"
        interface = interface_of(job.address, interfaces()) if job.nodes else None
        environment = environment_of_workers(
            given, self._deadlines, on_gpus=on_gpus, **({} if interface is None else {"interface": interface})
        )
        if job.nodes and on_gpus:
            self._recording.says(nccl_line(environment, interfaces(), job.address))
        for line in environment_warnings(environment, self._deadlines, on_gpus=on_gpus):
            self._recording.says(line)
        self._node = Agent(
            preload=job.preload, environment=environment, deadlines=self._deadlines,
            output=self._recording.output(job.run_dir / LOGS / "forkserver.log"),
            num_warm=num_ranks + _NUM_DRY_RUNS if job.rank_start == "warm" else 0, ignored=job.signals,
        )  # fmt: skip
        if job.nodes:
            spanning = frozenset(replica for replica in job.replicas_here if job.spans_nodes(replica))
            self._others = OtherNodes(self._send, num_members=job.num_replicas, spanning=spanning)
        self._ranks = Watch(
            self._node, deadlines=self._deadlines, log_of=job.log_of,
            record=self._recording.record, says=self._recording.says,
            at_work=lambda replicas: self._send(NodeAtWork(replicas)), others=self._others,
        )  # fmt: skip
        try:
            self._join()
            modules = ", ".join(name for name in job.preload if ":" not in name) or "nothing"
            how = "once for" if job.rank_start == "fork" else "in each of"
            self._recording.says(f"importing {modules} {how} {num_ranks} ranks")
            if self._wait_for_imports() and self._dry_run() and self._may_launch():
                self._spawn_all()
                self._watch()
        except NodeLost as error:
            self._fail(ExitCode.FAILED, str(error))
        finally:
            for process in self._node.close():
                self._give_up(process)
            for sockets in self._listeners.values():
                for listener in sockets.values():
                    listener.close()
            if self._joined is not None:
                self._joined.close(self._deadlines)
            self._recording.coordinator_ended()
            self._loop.close()
            os.close(self._sealed_key)
            os.close(self._clock_memory)
        assert self._ending is not None
        return self._ending[0]

    # --- The coordinator --------------------------------------------------------------------------

    def _join(self) -> None:
        """Start a coordinator for this node alone, unless the node has met others."""
        if self._joined is None:
            self._joined = alone(
                self._key, clock=self._clock, clock_memory=self._clock_memory, loop=self._loop,
                deadlines=self._deadlines, level=self._job.trace_level,
                slots=self._job.num_ranks_here, run_id=self._job.run_id, ignored=self._job.signals,
            )  # fmt: skip
            assert self._joined.events is not None
            self._recording.follow_coordinator(self._joined.events)
        self._joined.membership.handle(self._from_coordinator, self._coordinator_gone)

    def _send(self, message: Message) -> None:
        assert self._joined is not None
        self._joined.membership.send(message)

    def _from_coordinator(self, message: Message) -> None:
        match message:
            case Met():
                pass  # this node knew its place before it was given a job
            case Launch(leaders, stores):
                self._leaders, self._stores = dict(leaders), dict(stores)
            case Roster(generation, roster, losses, reason):
                self._generation = generation
                if self._others is not None:
                    self._others.num_members = len(roster)
                lost = tuple(trace.Loss(replica=loss.replica, kind=loss.kind, detail=loss.detail) for loss in losses)
                seconds = time.monotonic() - self._started_at
                self._recording.announced(
                    trace.Generation(t=seconds, generation=generation, roster=roster, losses=lost, reason=reason)
                )
            case FenceReplica(replica):
                self._fence(replica)
            case DismissReplica(replica):
                self._dismiss(replica)
            case AskPart() | TellKnown() if self._others is not None:
                self._others.handle(message)
            case JobEnds(exit_code, reason, at_once):
                self._end(exit_code, reason)
                if at_once:
                    self._end_by = 0.0
            case DrainAnswer(request, refused):
                self._answer(request, "; ".join(f"replica {replica} does not leave: {why}" for replica, why in refused))
            case JobState():
                self._keep_status(message)
            case Idle(reason):
                self._recording.says(f"{reason}: this node waits for the end of the job")
            case _:
                raise NodeLost(f"the coordinator sent a {type(message).__name__}")

    def _keep_status(self, state: JobState | None, exit_code: int | None = None, reason: str = "") -> None:
        """Have the state of the job written, on node 0. None: the newest one."""
        self._state = state = state or self._state
        if state is None or self._job.node:
            return
        account = self._recording.account
        self._recording.keep(
            status.Status(
                at=time.time(), replicas=self._job.num_replicas, roster=state.roster, generation=state.generation,
                step=state.step, losses=len(account.lost), saved=account.saved, exit_code=exit_code, reason=reason,
                answers=self._answers,
                nodes=tuple(status.NodeStatus(each.number, each.name, each.state, each.replicas) for each in state.nodes),
            ),
        )  # fmt: skip

    def _coordinator_gone(self, why: str) -> None:
        """Leave the ranks to themselves: they end at the next save point. Before training, end."""
        if self._ending is not None:
            return
        self._orphaned = f"the coordinator is gone ({why})"
        if not self._generation:
            self._end(ExitCode.FAILED, f"{self._orphaned} before training began")
            return
        self._recording.says(f"{self._orphaned}: training goes on to the next save point, and ends there")

    def _look_at_coordinator(self) -> None:
        """Report a coordinator that is silent, and that it is heard again; end without one at last.

        On another node than its own, a coordinator that is silent for `--node-timeout` counts as
        gone until it is heard again. Without living ranks a node waits only for `JobEnds`: no
        longer for a coordinator that is gone.
        """
        if self._ending is not None or self._joined is None or not self._job.nodes:
            return
        silent_s = self._joined.membership.silent_s()
        if (silent_s >= self._deadlines.silence_s) != self._is_cut_off:
            self._is_cut_off = not self._is_cut_off
            if self._is_cut_off:
                self._recording.says(f"nothing was heard of the coordinator for {silent_s:.0f} s: this node may be cut off")
            else:
                self._recording.says("the coordinator is heard again")
        if not self._joined.membership.is_lost and self._job.node:
            limit_s = self._job.node_s or self._deadlines.node_s
            self._orphaned = f"nothing was heard of the coordinator for {silent_s:.0f} s" if silent_s >= limit_s else ""
        if self._generation and self._orphaned and self._node.num_living() <= len(self._set_aside):
            self._end(ExitCode.NO_REPLICA_LEFT, f"{self._orphaned}, and no rank of this node is left")

    def _ended_alone(self, end: ProcessEnd) -> None:
        """Handle the end of a rank without a coordinator: nobody can make a generation any more."""
        if end.status not in policy.ENDED_TOGETHER:
            self._end(
                ExitCode.NO_REPLICA_LEFT,
                f"{self._orphaned}, and replica {end.replica} rank {end.rank} ended by {end.cause}: the others cannot go on "
                "without it",
            )
        elif self._node.num_living() <= len(self._set_aside):
            self._end(end.status, f"{self._orphaned}; the ranks of this node ended together")

    def _fail(self, exit_code: int, reason: str) -> None:
        """End the run on this node, and report to the coordinator why it cannot take part."""
        if self._ending is None and self._joined is not None:
            self._send(NodeFailed(exit_code, reason))
        self._end(exit_code, reason)

    # --- Start ------------------------------------------------------------------------------------

    def _until[Answer](self, answer: Callable[[], Answer], deadline_s: float, late: Callable[[], str]) -> Answer | None:
        """Return the first truthy result of `answer`.

        Return None if a signal, the deadline or the end of the job is first. Then the run ends.
        `late()` is the reason if the deadline has passed.
        """
        deadline = self._loop.time() + deadline_s
        while not self._end_request.is_made:
            if self._ending is not None:
                return None
            if found := answer():
                return found
            self._wake_server()
            self._poll_helpers()
            if self._loop.time() > deadline:
                self._fail(ExitCode.FAILED, late())
                return None
            self._loop.run_once(_POLL_S)
        self._end(ExitCode.INTERRUPTED, "interrupted before training began")
        return None

    def _wait_for_imports(self) -> bool:
        """Return whether the modules are imported.

        False if a signal or the deadline ended the wait. Raises `NodeLost` if an import fails.
        """
        said_at, said = self._loop.time(), ""

        def are_imported() -> bool:
            nonlocal said_at, said
            if self._node.is_ready():
                return True
            if self._loop.time() - said_at >= self._deadlines.fork_s and (text := self._node.importing()) != said:
                self._recording.says(f"still importing: {text}")
                said_at, said = self._loop.time(), text
            return False

        def late() -> str:
            return f"importing took more than {self._deadlines.deadline_s:.0f} s: {self._node.importing()}"

        if not self._until(are_imported, self._deadlines.deadline_s, late):
            return False
        self._loop.watch_readable(self._node.fileno(), lambda: None)
        return True

    def _dry_run(self) -> bool:
        """Return whether the script accepts its arguments.

        One process runs the script with its own parser and Megatron's, and ends before it trains.
        If the script accepts, show its lines for the console. Otherwise, or if a signal or the
        deadline comes first, the run ends.
        """
        script = self._job.script
        with descriptors_needed():
            output = self._recording.output(self._job.run_dir / LOGS / "dry-run.log")
        environment = self._environment(0, 0, leader=ANY_PORT, dry_run=True)
        self._node.spawn(
            _DRY_RUN, 0, argv=self._job.command, environment=environment, output=output, descriptors=self._handed_down
        )
        late = f"in {self._deadlines.deadline_s:.0f} s {script} never {_CALLS_PRETRAIN}; see {output.log}"
        ends = self._until(self._node.poll, self._deadlines.deadline_s, lambda: late)
        if not ends:
            return False
        [end] = ends
        if end.status == ExitCode.BAD_INPUT:
            self._fail(ExitCode.BAD_INPUT, _refusal(output))
        elif end.status == ExitCode.OK:
            self._fail(ExitCode.BAD_INPUT, f"{script} never {_CALLS_PRETRAIN}")
        elif end.status != settings.DRY_RUN_PASSED:
            self._fail(ExitCode.FAILED, f"{script} ended by {end.cause} before it trained; see {output.log}")
        else:
            for line in output.end().splitlines():
                if line.startswith(FOR_CONSOLE):
                    self._recording.says(line.removeprefix(FOR_CONSOLE))
        return end.status == settings.DRY_RUN_PASSED

    def _may_launch(self) -> bool:
        """Report this node ready; return whether all nodes are, once that is known."""
        job = self._job
        with descriptors_needed():
            for replica in job.replicas_here:
                if 0 in job.slots(replica):
                    names = [listening.LEADER, *([listening.STORE] if job.spans_nodes(replica) else [])]
                    where = format_address(job.address, 0)
                    self._listeners[replica] = {name: listen(where, job.ports) for name in names}
        membership = MembershipSettings(
            num_replicas=job.num_replicas, min_replicas=job.config.min_replicas, samples=_samples(job)
        )  # fmt: skip
        leaders, stores = (
            tuple((replica, address_of(sockets[name])) for replica, sockets in self._listeners.items() if name in sockets)
            for name in (listening.LEADER, listening.STORE)
        )
        self._send(NodeReady(membership, job.replicas_here, leaders, stores))
        late = f"not all nodes were ready {self._deadlines.deadline_s:.0f} s after this one"
        return self._until(lambda: self._leaders, self._deadlines.deadline_s, lambda: late) is not None

    def _spawn_all(self) -> None:
        for replica in self._job.replicas_here:
            # The launcher closes its copies as soon as the ranks are started: a copy would keep the
            # port of a dead leader answering.
            with contextlib.ExitStack() as stack:
                sockets = self._listeners.pop(replica, {})
                for each in sockets.values():
                    stack.enter_context(each)
                self._spawn_replica(replica, sockets)
        self._loop.waited_elsewhere()  # the thread waited for the fork server, once for each rank
        self._send(NodeLaunched())

    def _spawn_replica(self, replica: int, sockets: Mapping[str, socket.socket]) -> None:
        """Start this node's ranks of a replica, each with a descriptor of the replica's one store.

        The ranks of a replica that spans nodes get an address of the store instead. Rank 0 also
        gets descriptors of the listening `sockets`.
        """
        if replica in self._stores:
            self._spawn_ranks(replica, sockets, {})
            return
        with descriptors_needed():
            store = rendezvous.create_store()
        try:
            self._spawn_ranks(replica, sockets, {rendezvous.DESCRIPTOR: store})
        finally:
            os.close(store)

    def _spawn_ranks(self, replica: int, sockets: Mapping[str, socket.socket], store: dict[str, int]) -> None:
        job = self._job
        for rank in job.slots(replica):
            environment = self._environment(replica, rank, leader=self._leaders[replica])
            with descriptors_needed():
                handed_down = self._handed_down | store | self._recording.descriptors(replica, rank)
                output = self._outputs[replica, rank] = self._recording.output_of_rank(replica, rank)
            if rank == 0:
                handed_down |= {name: each.fileno() for name, each in sockets.items()}
            self._node.spawn(
                replica, rank, argv=job.command, environment=environment, output=output, descriptors=handed_down
            )  # fmt: skip
            self._ranks.watches(replica, rank)

    @property
    def _handed_down(self) -> dict[str, int]:
        """Return the descriptors that the dry run and every rank inherit, by name."""
        return {keys.DESCRIPTOR: self._sealed_key, node_clock.DESCRIPTOR: self._clock_memory}

    def _environment(self, replica: int, rank: int, *, leader: str, dry_run: bool = False) -> dict[str, str]:
        """Return the variables that a rank's process gets beside the inherited environment.

        `dry_run`: the process is the dry run, which gets no faults.
        """
        job = self._job
        mine = tuple(
            msgspec.json.encode(fault).decode() for fault in job.faults if (fault.replica, fault.rank) == (replica, rank)
        )
        assert self._joined is not None
        place, shared = job.place_of(replica, rank), job.config.ranks_per_gpu
        slot = 0 if dry_run else job.slots(replica)[rank]
        context = RankContext(
            replica=replica, rank=rank, num_ranks=job.num_ranks, num_replicas=job.num_replicas,
            coordinator=self._joined.membership.address, leader=leader, store=self._stores.get(replica, ""),
            run_dir=str(job.run_dir),
            started_at=self._started_at, faults=() if dry_run else mine, gpu=slot // shared,
            numa_binding=job.numa_binding, clock_place=node_clock.FIRST_RANK + slot, node_s=job.node_s, dry_run=dry_run,
            address=job.address, ports=job.ports,
        )  # fmt: skip
        # RANK and WORLD_SIZE are those of the replica's own world. LOCAL_RANK picks a device of
        # this node, which the replicas share. MASTER_* are for scripts that read these variables:
        # torch's rendezvous is not used, and the port is occupied.
        host, port = parse_address(leader)
        return (sharing_a_gpu(place) if shared > 1 else {}) | {
            CONTEXT_VARIABLE: msgspec.json.encode(context).decode(),
            "RANK": str(rank),
            "WORLD_SIZE": str(job.num_ranks),
            "LOCAL_RANK": str(context.gpu),
            "LOCAL_WORLD_SIZE": str(job.num_ranks_here),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            # What torchrun tells of its nodes and restarts: nobody is ever restarted.
            "GROUP_RANK": str(job.node),
            "GROUP_WORLD_SIZE": str(max(1, len(job.nodes))),
            "ROLE_NAME": job.streams.role,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(job.num_ranks),
            "TORCHELASTIC_RUN_ID": job.run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # For scripts that want to know their place in the job.
            "MEGATRON_RECOVER_REPLICA": str(replica),
            "MEGATRON_RECOVER_REPLICAS": str(job.num_replicas),
            "MEGATRON_RECOVER_GLOBAL_RANK": str(place),
        }

    # --- Watching ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not (self._ending is not None and self._is_over()):
            self._loop.run_once(_POLL_S)
            self._say_if_it_stood_still()
            self._kill_if_late()
            self._look_at_coordinator()
            self._wake_server()
            self._poll_helpers()
            ends = self._node.poll()
            if ends:
                # A dying rank's messages arrived before its end was seen, so they are processed
                # first.
                self._loop.run_once(0.0)
            for end in explaining_first(ends):
                self._ended(end)
            self._look_for_hangs()
            self._fence_dismissed()
            self._carry_out_requests()
            for replica, rank in self._thawing.due():
                if self._node.is_stopped(replica, rank):
                    self._thawing.done(replica, rank)
                    self._recording.record(trace.Thawed(replica=replica, rank=rank))  # before the rank can write anything
                    self._node.thaw(replica, rank)
            self._follow_fences()

    def _follow_fences(self) -> None:
        """Record the ends of ranks of fenced replicas.

        Set the ranks aside that SIGKILL does not end.
        """
        for replica, rank in [each for each in self._set_aside if self._node.has_ended(*each)]:
            self._set_aside.discard((replica, rank))
            self._recording.record(trace.Fenced(replica=replica, ranks=(rank,)))
            self._confirm_fence(replica)
        for process in self._node.undying():
            self._give_up(process)
        for replica in [each for each in self._fencing if self._node.is_fenced(each, but=self._set_aside)]:
            self._fencing.discard(replica)
            ranks = tuple(rank for rank in self._job.slots(replica) if (replica, rank) not in self._set_aside)
            self._recording.record(trace.Fenced(replica=replica, ranks=ranks))
            self._confirm_fence(replica)

    def _confirm_fence(self, replica: int) -> None:
        """Confirm a fence once no process of the replica is left here, set-aside ones included."""
        if replica not in self._fencing and replica not in {each for each, _ in self._set_aside}:
            self._send(FenceDone(replica))

    def _give_up(self, process: Undying) -> None:
        """Report a process that SIGKILL does not end, and wait for it no longer; once per process.

        The process keeps its place (replica, rank), in which no other one is ever started.
        """
        if (process.replica, process.rank) in self._set_aside:
            return
        self._set_aside.add((process.replica, process.rank))
        if process.replica >= 0:
            self._recording.ended(process.replica, process.rank)  # it runs no further instruction, and writes nothing more
            self._recording.record(
                trace.SetAside(
                    replica=process.replica, rank=process.rank, pid=process.pid, state=process.state, wchan=process.wchan
                )  # fmt: skip
            )
        self._recording.says(
            f"{process} does not end although it was killed; the run does not wait for it. It keeps its memory and devices: "
            "see `dmesg` for the disk or device that hangs"
        )

    def _look_for_hangs(self) -> None:
        if self._ending is not None:
            return
        judged = {
            replica for replica in self._job.replicas_here if replica not in self._gone and not self._thawing.concerns(replica)
        }
        for loss, failing in self._ranks.look(self._generation, judged):
            self._send(ReplicaGone(loss, failing))

    def _poll_helpers(self) -> None:
        """Exchange messages with recorder and monitor, and start another one where one has died."""
        self._recording.poll()
        if self._monitoring is not None:
            self._monitoring.poll()

    def _wake_server(self) -> None:
        if self._node.wake_server():
            self._recording.says("somebody stopped the fork server: continued it, since it starts ranks and reports their ends")

    def _say_if_it_stood_still(self) -> None:
        """Report, once this process continues, that it was stopped (Ctrl-Z, SIGSTOP).

        A stop shorter than `Deadlines.silence_s` is not reported.
        """
        gap_s, self._stood_still_s = self._loop.stood_still_s - self._stood_still_s, self._loop.stood_still_s
        if gap_s >= self._deadlines.silence_s:
            self._recording.says(f"the launcher stood still for {gap_s:.0f} s; its deadlines are extended by that time")

    def _is_over(self) -> bool:
        return self._node.num_living() <= len(self._set_aside) or self._loop.time() > self._end_by

    def _ended(self, end: ProcessEnd) -> None:
        self._recording.ended(end.replica, end.rank)
        if self._ending is not None or end.replica in self._fencing or (end.replica, end.rank) in self._set_aside:
            return  # the job is ending, or the launcher has killed this rank
        if end.replica in self._dismissed and end.status == ExitCode.OK:
            return
        if self._orphaned and end.status in policy.ENDED_TOGETHER:
            self._ended_alone(end)
            return
        self._recording.record(trace.Failure(replica=end.replica, rank=end.rank, cause=end.cause))
        if self._orphaned:
            self._ended_alone(end)
            return
        if end.status == ExitCode.BAD_INPUT and not self._generation:
            # All ranks refuse what one rank refuses: there is no point in waiting for the others.
            self._fail(ExitCode.BAD_INPUT, _refusal(self._outputs[end.replica, end.rank]))
            return
        said = self._outputs[end.replica, end.rank].end
        loss, failing = self._ranks.loss(end, started=self._generation > 0, said=said)
        self._send(ReplicaGone(loss, failing))

    def _fence(self, replica: int) -> None:
        self._fencing.add(replica)
        self._gone.add(replica)
        self._node.fence(replica)
        if self._job.nodes and self._gone.issuperset(self._job.replicas_here):
            self._recording.says("all replicas with ranks on this node are lost: the node waits for the end of the job")

    def _dismiss(self, replica: int) -> None:
        """Expect that all ranks of a replica end with exit code 0: the replica leaves the job."""
        self._gone.add(replica)
        self._dismissed[replica] = self._loop.time() + self._deadlines.end_s

    def _fence_dismissed(self) -> None:
        """Report the end of replicas that leave; kill those whose ranks have not ended in time."""
        for replica, end_by in list(self._dismissed.items()):
            if all(self._node.has_ended(replica, rank) for rank in self._job.slots(replica)):
                if replica not in self._told_gone:
                    self._told_gone.add(replica)
                    self._send(FenceDone(replica))
            elif self._loop.time() > end_by and replica not in self._fencing:
                self._fence(replica)

    def _carry_out_requests(self) -> None:
        """Give the coordinator the requests that were left in the run directory of node 0."""
        for request in self._recording.requests():
            replicas = (int(request.drain),) if request.drain.isdecimal() else self._replicas_on(request.drain)
            if replicas:
                self._send(DrainAsked(replicas, f"drain {request.drain} of {request.by}", request.id))
            else:
                self._answer(request.id, f"the job has no replica and no node {request.drain}")

    def _replicas_on(self, name: str) -> tuple[int, ...]:
        """Return the members of the roster that have ranks on the node `name`."""
        state = self._state
        on_node = {replica for node in state.nodes if node.name == name for replica in node.replicas} if state else set()
        return tuple(replica for replica in state.roster if replica in on_node) if state else ()

    def _answer(self, request: str, refused: str) -> None:
        self._answers = (*self._answers, status.Answer(request, refused))[-_ANSWERS:]
        self._keep_status(None)

    def _end(self, exit_code: int, reason: str) -> None:
        if self._ending is not None:
            return
        self._ending = (exit_code, reason)
        began = self._generation > 0
        timeout_s = self._job.shutdown_s
        stop_s = self._deadlines.stop_s if timeout_s is None else timeout_s
        end_s = self._deadlines.end_s if timeout_s is None or exit_code == ExitCode.OK else timeout_s
        patience_s = end_s if exit_code in policy.ENDED_TOGETHER else stop_s
        self._end_by = self._loop.time() + patience_s * (began or exit_code == ExitCode.OK)

    # --- Signals ----------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        """React to one signal, which `cluster.signals` interprets (Note [One request])."""
        name, at_terminal = signal.Signals(number).name, is_at_terminal()
        timeout_s = self._job.shutdown_s
        if timeout_s is not None and not self._end_request.is_made:
            self._kill = self._loop.time() + timeout_s, number
        at_once = "a second Ctrl-C" if at_terminal else f"`kill -9 {os.getpid()}`"
        match self._end_request.take(number, at_terminal=at_terminal):
            case Answer.END if not self._generation:
                self._recording.says(f"{name}: ending before training has begun")
                self._ask_exit(name)
            case Answer.END:
                self._recording.says(
                    f"{name}: all replicas end after the same step, with a checkpoint if --save is set; {at_once} kills "
                    "everything at once, and nothing is saved"
                    + (f"; so does the end of --shutdown-timeout, in {timeout_s} s" if timeout_s is not None else "")
                )
                self._ask_exit(name)
            case Answer.KNOWN:
                self._recording.says(f"{name}: the end was requested before; {at_once} kills everything at once")
            case Answer.KILL:
                self._recording.says(f"{name} again: killing everything")
                self._kill_all(_KILLED + number, f"killed on request ({name})")

    def _ask_exit(self, name: str) -> None:
        if self._joined is not None:  # before, no rank is started
            self._send(EndAsked(name))

    def _kill_all(self, exit_code: int, reason: str) -> None:
        """Kill everything at once, on all nodes, whatever the job does meanwhile."""
        self._ending, self._end_by = (exit_code, reason), 0.0
        if self._joined is not None:
            self._send(KillAsked(exit_code, reason))

    def _kill_if_late(self) -> None:
        """Kill everything if a signal has requested the end `--shutdown-timeout` ago."""
        if self._kill is None or self._loop.time() < self._kill[0]:
            return
        (_, number), self._kill = self._kill, None
        self._end_by = 0.0
        if self._ending is None:
            name = signal.Signals(number).name
            why = f"the job did not end within --shutdown-timeout ({self._job.shutdown_s} s) of {name}"
            self._recording.says(f"{why}: killing everything")
            self._kill_all(_KILLED + number, why)


def _refusal(output: Output) -> str:
    """Return why a process did not accept its arguments.

    The reason is its `BAD_ARGUMENTS` lines. Without any it is the last line, less what argparse
    writes before the reason. Without output it is a fixed text.
    """
    lines = output.end().strip().splitlines() or ["the training script refused its arguments"]
    said = [line.removeprefix(BAD_ARGUMENTS) for line in lines if line.startswith(BAD_ARGUMENTS)]
    return "\n".join(said) or re.sub(r"^\S+: error: (argument )?", "", lines[-1])


def _samples(job: Job) -> tuple[int, int] | None:
    """Return the samples of a training step and of a microbatch; None unless both are known."""
    if job.num_microbatches is None or job.microbatch_samples is None:
        return None
    return job.num_microbatches * job.microbatch_samples, job.microbatch_samples


def raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors, for this process and its children, to the maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
