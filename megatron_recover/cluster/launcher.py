"""The run in the launcher's process: start of all ranks here, watch over them, exit code.

The launcher joins the agent (processes), the membership (the link to the coordinator, which
decides), the recording (trace and console) and the monitoring (metrics and events). Coordinator,
recorder and monitor have a process of their own each. At its end the launcher kills every process
of a rank that is left.

The core decides what a loss does to the job. The launcher itself decides about bad input that a
rank finds before generation 1, and about a fork server that is lost. `preparing.py` decides about
imports and the dry run, `run_end.py` about signals and how long a process may take to end. This
module is long because it makes all parts of a node and connects them; each part is elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import time

from megatron_recover import config as settings
from megatron_recover import trace
from megatron_recover.authentication import key as keys
from megatron_recover.cluster import dry_run
from megatron_recover.cluster import slot_check as slot_checks
from megatron_recover.cluster.agent import Agent, descriptors_needed
from megatron_recover.cluster.coordinator_loss import CoordinatorLoss
from megatron_recover.cluster.environment import environment_of_workers, environment_warnings, nccl_line
from megatron_recover.cluster.fences import Fences
from megatron_recover.cluster.gathering import Collector, Handover
from megatron_recover.cluster.job import Job, leaves_files, write_description
from megatron_recover.cluster.membership import Joined, Membership, alone
from megatron_recover.cluster.monitoring import Monitoring, Wanted
from megatron_recover.cluster.newcomers import Newcomers
from megatron_recover.cluster.node import Node, NodeLost, ProcessEnd
from megatron_recover.cluster.other_nodes import OtherNodes
from megatron_recover.cluster.preparing import Preparation
from megatron_recover.cluster.recording import Recording
from megatron_recover.cluster.requests import Requests
from megatron_recover.cluster.run_end import RunEnd
from megatron_recover.cluster.seats import Seats
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.cluster.starting import Starting
from megatron_recover.cluster.thawing import Thawing
from megatron_recover.cluster.watch import Watch, explaining_first
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    AskPart,
    DismissReplica,
    DrainAnswer,
    FenceReplica,
    FormReplica,
    GivesUp,
    JobEnds,
    JobState,
    Launch,
    Met,
    NodeAtWork,
    NodeGone,
    NodeLaunched,
    NotAdmitted,
    Roster,
    Say,
    ScaleAnswer,
    StartAnew,
    StartReplica,
    TellKnown,
    TraceDone,
    TraceEnds,
    TraceNext,
    TraceOffer,
    TracePart,
)
from megatron_recover.control_plane.wire import Message
from megatron_recover.core import policy
from megatron_recover.core.exit_code import GOES_ON_ELSEWHERE, ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.descriptor_limit import raise_descriptor_limit
from megatron_recover.host.reachable import interface_of, interfaces
from megatron_recover.observe.files import LOGS
from megatron_recover.trace import node_clock
from megatron_recover.trace.node_clock import NodeClock

_NUM_DRY_RUNS = 1
"""Warm processes that become no rank."""
_POLL_S = 0.1
"""Seconds between two looks at the recorder and at every rank: /proc entry, page and output.

A message, such as the report of a broken link, is followed by a look at once. Without any other
sign a death is seen after half of this time on average (`agent.py`, Note [Seeing a death]).
"""


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
        slot_check: slot_checks.Check = slot_checks.check,
    ) -> None:
        """Prepare the run of `job`; `run` starts it.

        `quiet`: show only the end of the run, and only if its exit code is not 0. `deadlines`: for
        tests, replaces the job's. `wanted`: metrics and notices; None: there is no monitor.
        `joined`: this node has met the others; None: the job has no other node. `slot_check` judges
        slots before a newcomer is started in them.
        """
        self._job, self._quiet, self._seats = job, quiet, Seats(job)
        self._deadlines = (deadlines or job.config.deadlines).with_node(job.node_s)
        self._joined, self._slot_check = joined, slot_check
        self._loop = Loop() if joined is None else joined.loop
        self._key = keys.make_key() if joined is None else joined.key
        self._sealed_key = keys.sealed(self._key)
        with descriptors_needed():
            self._clock_memory = node_clock.create(job.num_slots_here) if joined is None else joined.clock_memory
        self._clock = NodeClock(self._clock_memory) if joined is None else joined.clock
        self._started_at = time.monotonic()
        self._thawing = Thawing(job.faults, job.run_dir / trace.EVENTS_FILE)
        self._end = RunEnd(
            job, loop=self._loop, deadlines=self._deadlines, says=lambda line: self._recording.says(line),
            send=self._send_if_joined, has_begun=lambda: self.has_begun, promise=self._promise,
            is_alone=lambda: self._fences.is_out_of_job,
            request=(joined.request if joined is not None else None) or EndRequest(job.signals),
        )  # fmt: skip
        self._stood_still_s = 0.0
        self.is_recorded = False
        """True if the recorder has confirmed that the whole trace is written. Known after `run`."""
        self.untraced: list[str] = []
        """A line for each other node whose trace is missing here, on node 0. Known after `run`."""
        self._gathering: Collector | Handover | None = None
        """None: the job has one node."""
        self._is_closed = False
        self._recording: Recording
        self._wanted = wanted
        self._monitoring: Monitoring | None = None
        self._generation = 0
        """Newest generation that the coordinator has announced."""
        self._roster: tuple[int, ...] = ()
        """Newest roster that the coordinator has announced."""
        self._learns_since = 0
        """Newest generation that was not made for newcomers alone: since then the watch learns."""
        self._others: OtherNodes | None = None
        """None: the job has one node."""
        self._node: Node
        self._ranks: Watch
        self._starting: Starting
        self._fences: Fences
        self._newcomers: Newcomers
        self._requests: Requests
        self._loss: CoordinatorLoss
        self._starts_anew = False
        self._why_lost = ""
        """Reason why the coordinator has given up; empty: it has not."""

    def run(self) -> int:
        """Run the job to its end; return its exit code.

        The code is an `ExitCode`, or 128 + signal if the job was killed on request.
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
            with self._end.received():
                exit_code = self._run()
            reason = self._end.reason
            if self.knows_end:
                self._recording.record(trace.RunFinished(exit_code=exit_code, reason=reason))
                self._requests.keep(None, exit_code, reason)
            self.is_recorded = self._recording.finish(exit_code, reason)
            if self._monitoring is not None:
                self._monitoring.finish(exit_code, reason, self.is_hurried)
            has_files = self.knows_end and leaves_files(exit_code, has_begun=self.has_begun)
            has_files &= not self._has_given_up_start  # without a coordinator no trace comes, and nothing was trained
            if self._gathering is not None and self.is_recorded and has_files:
                self._loop.waited_elsewhere()
                if self._joined is not None:
                    self._joined.membership.listen_anew()
                self.untraced = self._gathering.finish(self._has_nobody_to_wait_for)
        finally:
            self._hang_up()
            self._recording.close()  # so that a traceback comes after the console's lines, on a restored terminal
            if self._monitoring is not None:
                self._monitoring.close()
        return exit_code

    def ask_end(self, why: str) -> None:
        """Request the end of the job, as `RunEnd.ask` does. Any thread may ask."""
        self._end.ask(why)

    def release_signals(self) -> None:
        """Restore the signal handlers from before `run`, as `RunEnd.release_signals` does."""
        self._end.release_signals()

    def is_hurried(self) -> bool:
        """Return whether what is left to do should end early (`RunEnd.is_hurried`)."""
        return self._end.is_hurried()

    def _has_nobody_to_wait_for(self) -> bool:
        """Return whether no traces can be gathered: nobody answers, or the end is hurried."""
        return self.is_hurried() or (self._job.node > 0 and not self._hears_coordinator())

    def _hears_coordinator(self) -> bool:
        if self._joined is None or self._loss.why:
            return False
        membership = self._joined.membership
        return not membership.is_lost and membership.silent_s() < self._deadlines.node_s

    def _promise(self) -> str:
        """Return what becomes of a signal in training, for the user who sent it."""
        return "this node ends, and the job goes on" if self._fences.is_out_of_job else self._loss.promise()

    @property
    def starts_anew(self) -> bool:
        """Return whether this node is to meet the others anew: it was lost, and nobody ends it."""
        return self._starts_anew and not (self._end.is_requested or self._end.is_hurried())

    @property
    def reason(self) -> str:
        """Return why the run has ended; empty while it has not."""
        return self._end.reason

    @property
    def knows_end(self) -> bool:
        """Return whether the end of this run is that of the job, as far as one can know.

        Node 0 may end while others train on (`other_ends.py`). Another node that has waited for a
        silent coordinator before its ranks started knows nothing of the others.
        """
        return self._loss.knows_end and not (self._job.node and self._has_given_up_start)

    @property
    def _has_given_up_start(self) -> bool:
        """Return whether this run has ended before its ranks, and the coordinator was silent."""
        return self._joined is not None and self._joined.membership.has_given_up

    @property
    def has_begun(self) -> bool:
        """Return whether training has begun: the job has had a generation."""
        return self._generation > 0

    def _make_agent(self) -> Agent:
        """Return the agent, which begins to import; show what is notable in its environment."""
        job = self._job
        given, on_gpus, heals = settings.inherited_environment(), job.rank_start == "warm", job.config.heal != "off"
        of_spares = min(job.num_ranks, len(job.spares))
        interface = interface_of(job.address, interfaces()) if job.nodes else None
        environment = environment_of_workers(
            given, self._deadlines, on_gpus=on_gpus, **({} if interface is None else {"interface": interface})
        )
        if job.nodes and on_gpus:
            self._recording.says(nccl_line(environment, interfaces(), job.address))
        for line in environment_warnings(environment, self._deadlines, on_gpus=on_gpus):
            self._recording.says(line)
        return Agent(
            preload=job.preload, environment=environment, deadlines=self._deadlines,
            output=self._recording.output(job.run_dir / LOGS / "forkserver.log"),
            num_warm=job.num_ranks_here + _NUM_DRY_RUNS if on_gpus else 0,
            num_ready=max((len(job.slots(replica)) for replica in job.replicas_here), default=of_spares) if heals else 0,
            ignored=job.signals, waits=self._beat,
        )  # fmt: skip

    def _make_parts(self) -> None:
        job = self._job
        self._node = self._make_agent()
        if job.nodes:
            spanning = frozenset(replica for replica in job.replicas_here if job.spans_nodes(replica))
            self._others = OtherNodes(self._send, num_members=job.num_replicas, spanning=spanning)
            role = Handover if job.node else Collector
            self._gathering = role(job, loop=self._loop, deadlines=self._deadlines, send=self._send)
        self._ranks = Watch(
            self._node, deadlines=self._deadlines, log_of=job.log_of,
            record=self._recording.record, says=self._recording.says,
            at_work=lambda replicas: self._send(NodeAtWork(replicas)), others=self._others,
        )  # fmt: skip
        self._starting = Starting(
            job, self._seats, self._node, self._recording, coordinator=self._address,
            started=self._rank_started, started_at=self._started_at, patience_s=self._deadlines.end_s,
            handed_down={keys.DESCRIPTOR: self._sealed_key, node_clock.DESCRIPTOR: self._clock_memory},
        )  # fmt: skip
        self._fences = Fences(
            job, self._seats, self._node, self._recording, loop=self._loop, deadlines=self._deadlines, send=self._send
        )  # fmt: skip
        self._newcomers = Newcomers(
            job, self._node, self._seats, recording=self._recording, starting=self._starting, fences=self._fences,
            loop=self._loop, deadlines=self._deadlines, send=self._send, check=self._slot_check,
        )  # fmt: skip
        self._requests = Requests(job, self._recording, self._send, why_lost=lambda: self._loss.why)
        self._loss = CoordinatorLoss(
            job, self._recording, self._fences, loop=self._loop, deadlines=self._deadlines, end=self._end.begin,
            hosts=self._requests.hosts, num_signals=lambda: self._end.num_signals,
        )  # fmt: skip

    def _run(self) -> int:
        """Run the job with all parts of this node, and return its exit code."""
        self._make_parts()
        try:
            membership = self._join()
            preparation = Preparation(
                self._job, self._node, self._starting, self._recording, loop=self._loop, deadlines=self._deadlines,
                end=self._end, membership=membership, turn=self._turn,
            )  # fmt: skip
            if preparation.may_launch():
                self._spawn_all()
                self._watch()
        except NodeLost as error:
            self._end.fail(ExitCode.FAILED, str(error))
        finally:
            with contextlib.suppress(KeyError):  # it is watched only once it has imported
                self._loop.forget_readable(self._node.fileno())
            for process in self._node.close():
                self._fences.give_up(process)
            if self._loss.why and self._end.has_come and self._end.exit_code == ExitCode.NO_REPLICA_LEFT:
                self._fences.end_alone()
            has_given_up = self._loss.has_given_up or self._has_given_up_start
            if has_given_up and self._joined is not None and self._joined.coordinator is not None:
                self._joined.coordinator.process.kill()  # it is stopped, and would never end by itself
            self._starting.close()
            if self._gathering is None:
                self._hang_up()
            self._recording.coordinator_ended()
        return self._end.exit_code

    def _hang_up(self) -> None:
        """Leave the coordinator, and give back what the control plane holds; once."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._joined is not None:
            self._joined.close(self._deadlines)
        self._loop.close()
        os.close(self._sealed_key)
        os.close(self._clock_memory)

    # --- The coordinator --------------------------------------------------------------------------

    def _join(self) -> Membership:
        """Return the link to the coordinator.

        Start one for this node alone, unless the node has met others.
        """
        if self._joined is None:
            self._joined = alone(
                self._key, clock=self._clock, clock_memory=self._clock_memory, loop=self._loop,
                deadlines=self._deadlines, level=self._job.trace_level,
                slots=self._job.num_ranks_here, run_id=self._job.run_id, ignored=self._job.signals,
            )  # fmt: skip
            assert self._joined.events is not None
            self._recording.follow_coordinator(self._joined.events)
        self._joined.membership.handle(self._from_coordinator, self._coordinator_gone)
        return self._joined.membership

    def _address(self) -> str:
        """Return the address of the coordinator."""
        assert self._joined is not None
        return self._joined.membership.address

    def _send(self, message: Message) -> None:
        assert self._joined is not None
        self._joined.membership.send(message)

    def _send_if_joined(self, message: Message) -> None:
        """Send a message to the coordinator, if there is one: before, no rank is started."""
        if self._joined is not None:
            self._send(message)

    def _from_coordinator(self, message: Message) -> None:
        match message:
            case Met():
                pass  # this node knew its place before it was given a job
            case Launch():
                self._starting.may_start(message)
            case Roster(generation, roster, losses, reason, left, newcomers):
                self._generation = generation
                if self._others is not None:
                    self._others.num_members = len(roster)
                if not self._roster or losses or left or not {*roster} > {*self._roster}:
                    self._learns_since = generation
                lost = tuple(trace.Loss(replica=loss.replica, kind=loss.kind, detail=loss.detail) for loss in losses)
                self._roster = roster
                self._newcomers.announced(newcomers)
                seconds = time.monotonic() - self._started_at
                self._recording.announced(
                    trace.Generation(
                        t=seconds,
                        generation=generation,
                        roster=roster,
                        losses=lost,
                        reason=reason,
                        left=left,
                        newcomers=newcomers,
                    )  # fmt: skip
                )
            case NotAdmitted(replica):
                self._roster = tuple(member for member in self._roster if member != replica)
                if self._others is not None:
                    self._others.num_members = len(self._roster)
            case FenceReplica(replica):
                self._starting.forget(replica)
                self._fences.fence(replica)
            case FormReplica() | StartReplica():
                if isinstance(message, FormReplica) and message.spans_nodes and self._others is not None:
                    self._others.spans(message.replica)
                self._newcomers.handle(message)
            case Say(text):
                self._recording.says(text)
            case DismissReplica(replica):
                self._fences.dismiss(replica)
            case AskPart() | TellKnown() if self._others is not None:
                self._others.handle(message)
            case JobEnds(exit_code, reason, at_once):
                self._look_at_coordinator()  # it is heard again
                self._end.begin(exit_code, reason, at_once=at_once)
                self._newcomers.end(self._roster)
            case StartAnew():
                self._starts_anew = not self._end.has_come
                self._end.begin(ExitCode.OK, f"this node was lost, and meets the others anew; {GOES_ON_ELSEWHERE}")
            case DrainAnswer() | ScaleAnswer():
                self._requests.answered(message)
            case NodeGone() | TraceOffer() | TracePart() | TraceEnds() | TraceNext() | TraceDone() if (
                self._gathering is not None
            ):
                self._gathering.handle(message)
            case JobState():
                self._requests.keep(message)
                if isinstance(self._gathering, Collector):
                    self._gathering.note(message.nodes)
            case GivesUp(reason):
                self._why_lost = reason
            case _:
                raise NodeLost(f"the coordinator sent a {type(message).__name__}")

    def _coordinator_gone(self, why: str) -> None:
        self._newcomers.end(self._roster)  # nobody can admit them any more
        if not self._end.has_come:
            self._loss.begin(self._why_lost or why, has_begun=self.has_begun)

    def _look_at_coordinator(self) -> None:
        if not self._end.has_come and self._joined is not None:
            membership = self._joined.membership
            own = self._joined.coordinator
            self._loss.look(
                membership.silent_s(), is_gone=membership.is_lost, has_begun=self.has_begun,
                own_pid=None if own is None else own.process.pid,
            )  # fmt: skip

    def _spawn_all(self) -> None:
        self._starting.ranks(self._fences.gone)  # another node may be lost since `Launch`, with ranks of these replicas
        self._loop.waited_elsewhere()  # the thread waited for the fork server, once for each rank
        self._send(NodeLaunched())

    def _rank_started(self, replica: int, rank: int) -> None:
        self._ranks.watches(replica, rank)
        self._beat()

    def _beat(self) -> None:
        """Show that this node lives: the loop does not run until the last rank is started."""
        if self._joined is not None:
            self._joined.membership.beat()

    # --- Watching ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not (self._end.has_come and self._is_over()):
            self._loop.run_once(_POLL_S)
            self._say_if_it_stood_still()
            self._end.kill_if_late()
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
            if not self._end.has_come:
                self._loss.end_alone(has_begun=self.has_begun)
            self._look_for_hangs()
            self._fences.fence_late()
            self._requests.carry_out()
            for replica, rank in self._thawing.due():
                if self._node.is_stopped(replica, rank):
                    self._thawing.done(replica, rank)
                    self._recording.record(trace.Thawed(replica=replica, rank=rank))  # before the rank can write anything
                    self._node.thaw(replica, rank)
            self._fences.follow()

    def _look_for_hangs(self) -> None:
        if self._end.has_come:
            return
        forming = self._newcomers.forming(self._roster)
        judged = {
            replica
            for replica in self._seats.replicas_here
            if replica not in self._fences.gone and not self._thawing.concerns(replica)
        }
        for loss, failing in self._ranks.look(self._learns_since, judged - forming, judged & forming):
            self._send(self._ranks.gone(loss, failing))

    def _turn(self) -> None:
        """Wait for messages for a moment, while no rank is started."""
        self._wake_server()
        self._poll_helpers()
        self._loop.run_once(_POLL_S)

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
        return self._fences.is_nobody_left or self._end.is_late

    def _ended(self, end: ProcessEnd) -> None:
        self._recording.ended(end.replica, end.rank)
        output = self._starting.outputs.pop((end.replica, end.rank))
        if self._end.has_come or self._fences.explain(end.replica, end.rank):
            return  # the job is ending, or the launcher has killed this rank
        if end.replica in self._fences.dismissed and end.status == ExitCode.OK:
            return
        is_forming = end.replica in self._newcomers.forming(self._roster)  # the others train on without it
        if self._loss.why and end.status in policy.ENDED_TOGETHER and not is_forming:
            self._loss.ended(end, has_begun=self.has_begun)
            return
        self._recording.record(trace.Failure(replica=end.replica, rank=end.rank, cause=end.cause))
        if self._loss.why and not is_forming:
            if not self._newcomers.may_be_outside(end):
                self._loss.ended(end, has_begun=self.has_begun)
            return
        if end.status == ExitCode.BAD_INPUT and not self._generation:
            # All ranks refuse what one rank refuses: there is no point in waiting for the others.
            self._end.fail(ExitCode.BAD_INPUT, dry_run.refusal(output))
            return
        loss, failing = self._ranks.loss(end, started=self.has_begun and not is_forming, said=output.end)
        self._send(self._ranks.gone(loss, failing, end.rank))
