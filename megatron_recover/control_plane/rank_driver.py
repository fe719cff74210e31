"""The driver of the rank machine (`core/rank.py`): a rank's interface to the rest of the job.

It joins the threads of a rank. The control thread reads the links and answers `Promise` at once.
The training thread begins steps and obeys orders. With overlap, `recover-reduce` reports results.
All feed the machine under one lock. The lock also makes `hold` and `Promise` exclude each other.
The class is long, but not split: all that its threads share is thus in one place, under that lock.
The driver makes no decision of the protocol and never looks into a tensor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from megatron_recover import trace
from megatron_recover.config import RankContext, RecoverConfig
from megatron_recover.control_plane.leader_link import LeaderLink
from megatron_recover.control_plane.leader_messages import Enter, Heard, RankHello, ReadFrom
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.naming import NamingRight
from megatron_recover.control_plane.replica_driver import ReplicaDriver
from megatron_recover.control_plane.wire import Message
from megatron_recover.core import rank as machine
from megatron_recover.core.alike import Parts
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.grants import is_last_generation, writer_of
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.label import StepKind, label_of
from megatron_recover.core.membership_messages import JoinRefused
from megatron_recover.core.progress import Phase
from megatron_recover.core.rank_messages import Apply, Close, EnterTraining, Holds, Plan, RankFailing, Report, Stop
from megatron_recover.core.values import Held, Shape, Work
from megatron_recover.data_plane.transport import Endpoint, Operand, Revoked, Transport, TransportError
from megatron_recover.deadlines import Deadlines
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.host.speaker import Speaker
from megatron_recover.progress_page import ProgressPage
from megatron_recover.trace.node_clock import NodeClock


class JobStopped(SystemExit):
    """Raised in the training thread when this replica has to end.

    The job is over, or cannot continue in this replica. This is a `SystemExit`, so that no ``except
    Exception`` of a training script keeps a stopped replica alive. If nobody catches it, the
    process ends with `exit_code`.
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class RankDriver:
    """A rank's part in the job, from `join` to `close`."""

    def __init__(
        self,
        context: RankContext,
        config: RecoverConfig,
        endpoint: Endpoint,
        *,
        key: bytes,
        clock: NodeClock,
        record: Callable[[trace.Event], None],
        faults: FaultInjector | None = None,
        page: ProgressPage | None = None,
        end_process: Callable[[int], None] = os._exit,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Make the driver of one rank; nothing runs before `join`.

        - `key` is the job's (`key.inherited_key`); `clock` is that of this node.
        - `page` is the rank's progress page; None: nobody reads a page. The driver writes the step,
          the generation, and the times in which the training thread waits for orders or saves.
        - `end_process(exit_code)` is called in the control thread if the training thread does not
          end in time.
        """
        self.replica, self.rank, self.num_ranks = context.replica, context.rank, context.num_ranks
        self.generation = 0
        """Generation of the newest `Plan` or `Apply` that the training thread took; 0 before the
        first."""
        self.roster: tuple[int, ...] = tuple(range(context.num_replicas))
        """Members of `generation`, ascending; before the first, all replicas of the run."""
        self.step = -1
        """The newest step that this rank has begun; -1 before the first."""
        self.quotas: tuple[int, ...] = ()
        """Quotas of the newest `Plan` that the training thread took, in the order of its roster."""
        self.requests: frozenset[str] = frozenset()
        """All requests in the records of the `Apply` orders that the training thread took; equal on
        every replica after the same step."""
        self.stays = False
        """True while this replica must not leave the job, even if that is requested: it writes a
        checkpoint in the background. The trainer sets it; the next `begin` reports that of rank
        0."""
        self._context, self._config, self._endpoint, self._key = context, config, endpoint, key
        self._clock, self._record, self._faults, self._end_process = clock, record, faults, end_process
        self._deadlines = (deadlines or config.deadlines).with_node(context.node_s)
        self._naming = NamingRight(self._deadlines.lease_s)
        self._page = page or ProgressPage()
        self._changed = threading.Condition(threading.RLock())
        """Guards what several threads use below. Notified when the training thread may have
        something to do."""
        self._state = machine.RankState(context.replica, context.rank, ())
        self._sources: tuple[tuple[int, str], ...] = ()
        """Members from which this newcomer may read state, and where."""
        self._refusal: JoinRefused | None = None
        """The answer to the newest claim of this newcomer, if it was refused."""
        self._is_admitted = False
        """True once this newcomer has the order to begin training, or has begun."""
        self._known_addresses: dict[int, str] = {}
        """Replica -> data address of its rank at this rank's position, for all replicas ever
        announced."""
        self._transport: Transport | None = None
        self._unsaid: list[str] = []
        self._has_agreed_to_save = False
        """True if the newest step is a `SAVE` step."""
        self._failure: JobStopped | None = None
        self._has_raised = self._heard = False
        self._closed = False
        self._outbox: deque[Report] = deque()
        self._loop = Loop()
        self._speaker = Speaker()
        self._leader: ReplicaDriver | None = None
        self._link: LeaderLink | None = None
        self._control = threading.Thread(target=self._run_control, name="recover-control", daemon=True)

    def is_writer(self) -> bool:
        """Return whether this replica has the lowest id of the roster.

        It then logs, saves and writes TensorBoard.
        """
        return self.replica == writer_of(self.roster)

    def is_last_generation(self) -> bool:
        """Return whether a record says that no member has a coordinator any more.

        Equal on every replica after the same step. See `core/grants.py`, Note [Last generation].
        """
        return is_last_generation(self.requests, self.roster)

    def naming_refusal(self) -> str:
        """Return why this replica must not name a checkpoint now; "" if it may (rank 0 only)."""
        return self._naming.refusal(is_last=self.is_last_generation())

    def begin_naming(self) -> str:
        """Begin an attempt to name a checkpoint, which uses up the coordinator's grant.

        Return why not, as `naming_refusal` does, or "". Then call `end_naming`. Rank 0 only.
        """
        return self._naming.begin(is_last=self.is_last_generation())

    def end_naming(self) -> int | None:
        """End the attempt, if one has begun, so that the coordinator gives the next grant.

        Return the number of the grant that the attempt has used up; None if none has begun.
        """
        leader, number = self._leader, self._naming.end()
        if leader is not None and number is not None:
            self._loop.post(lambda: leader.named(number))
        return number

    # --- The life of a training thread, in order -------------------------------------------------

    def join(self, shape: Shape, fingerprint: str, parts: Parts = (), beginning: Parts = (), state_address: str = "") -> None:
        """Start the control thread, report this rank ready, and wait for the first generation.

        Called once, when the rank's buckets are known. A rank of a newcomer waits for nothing: it
        reads state (`sources`), and asks to join (`ask_to_join`).

        - `fingerprint` covers all that has to be equal in the same rank of every replica, also of a
          newcomer: configuration, software, data.
        - `parts` has the same by name and value, for the message that reports a difference.
        - `beginning` has what has to be equal at the start only: the initial state.
        - `state_address`: where newcomers read the state of this rank; empty if they cannot.

        Raises `JobStopped` if the job ends, or this rank fails, before the job has begun.
        """
        if self._faults is not None:
            self._faults.at(FaultPoint.START_UP)
        buckets = tuple(bucket for bucket, ranks in enumerate(shape.bucket_ranks) if self.rank in ranks)
        self._state = machine.RankState(self.replica, self.rank, buckets)
        hello = RankHello(
            self.rank, shape, f"{shape} {fingerprint}", self._endpoint.address, parts, beginning, state_address
        )  # fmt: skip
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: driver.close_in_child() if (driver := itself()) is not None else None)
        self._loop.post(lambda: self._introduce(hello))
        self._control.start()
        with self._changed:
            if not self._context.newcomer:
                self._wait_until(lambda: self._state.promised > 0 or self._stopped_by() is not None)
            self._raise_if_stopped()

    def sources(self, known: tuple[tuple[int, str], ...] = ()) -> tuple[tuple[int, str], ...]:
        """Return the members from which this newcomer can read state, once there are any.

        Each is (replica, address of its rank at this rank's position). If the members are still
        those `known`, from none of which it can read, wait for others, for `stall_s` at most.
        Raises `JobStopped`.
        """
        with self._changed:
            self._wait_until(lambda: bool(self._sources) or self._stopped_by() is not None)
            if known:
                self._changed.wait_for(
                    lambda: self._sources != known or self._stopped_by() is not None, self._deadlines.stall_s
                )  # fmt: skip
            self._raise_if_stopped()
            return self._sources

    def digested(self, label: str, digest: int) -> None:
        """Report the digest of the state of this rank with which the training step `label` begins.

        A newcomer has read that state, a member serves it. Any thread may call this.
        """
        with self._changed:
            self._feed(machine.Digest(label, digest))

    def ask_to_join(self, member: int) -> JoinRefused | None:
        """Have a member vouch for what all ranks of this newcomer have read and digested.

        Wait for the answer: None once the members have admitted this newcomer, else why not. Rank 0
        only. Raises `JobStopped`.
        """
        leader = self._leader
        assert leader is not None, "rank 0 alone asks"
        with self._changed:
            self._refusal = None
            self._loop.post(lambda: leader.ask(member))
            self._wait_until(lambda: self._is_admitted or self._refusal is not None or self._stopped_by() is not None)
            self._raise_if_stopped()
            return None if self._is_admitted else self._refusal

    def ask_hold(self, member: int, label: str) -> None:
        """Ask a member to keep the pass of the step `label` open, which begins soon. Rank 0 only.

        Then the state of that step is served for longer, and the step is not over before the
        members know of this newcomer. There is no answer.
        """
        leader = self._leader
        assert leader is not None, "rank 0 alone asks"
        with self._changed:
            self._loop.post(lambda: leader.ask_hold(member, label))

    def enter(self) -> int:
        """Wait for the order to begin training, in a newcomer that is admitted; return the step.

        Raises `JobStopped`.
        """
        with self._changed:
            self._wait_until(lambda: self._is_admitted or self._stopped_by() is not None)
            self._raise_if_stopped()
            self._feed(machine.Take())
            assert isinstance(self._state.taken, EnterTraining), self._state.taken
            return self._state.step

    def begin(self, work: Work, requests: Sequence[str] = (), digest: int | None = None) -> int:
        """Begin the next step and return its number.

        - `requests` become part of this replica's vote, with those of `request`.
        - `digest` is the digest of all state of this rank if `work.digests`, else None.

        Raises `JobStopped`.
        """
        with self._changed:
            self._raise_if_stopped()
            asked = tuple(sorted({*requests, *self._unsaid}))
            self._unsaid.clear()
            self.step = self._state.step
            self._endpoint.deadlines = self._waits_in(label_of(work.label).kind)
            self._page.begin_step(self.step, work.label)
            self._feed(machine.Begin(work, asked, digest, self.stays))
            return self.step

    def _waits_in(self, kind: StepKind) -> Deadlines:
        """Return the waits of the data plane in the next step, which is of this kind.

        The writer saves after a `SAVE` step, so the others wait for it in the step that follows,
        whatever that is. It may also save before any `END` step.
        """
        may_save, self._has_agreed_to_save = self._has_agreed_to_save or kind is StepKind.END, kind is StepKind.SAVE
        return self._deadlines.while_the_last_writer_saves() if may_save and self.is_last_generation() else self._deadlines

    def next_order(self) -> Plan | Apply:
        """Wait for the next plan or `Apply`, take it and return it.

        Store its generation and roster, and the quotas of a plan or the requests of a record.
        Raises `JobStopped` at a `Stop`, or if this rank has failed.
        """
        with self._changed:
            self._wait_until(lambda: bool(self._state.queue) or self._failure is not None)
            if self._failure is not None:
                raise self._last_words_written(self._failure)
            self._feed(machine.Take())
            order = self._state.taken
            if isinstance(order, Stop):
                raise JobStopped(order.exit_code, order.reason)
            assert isinstance(order, Plan | Apply)
            self.generation, self.roster = order.generation, order.roster
            self._page.obey(order.generation)
        if isinstance(order, Apply):
            self.requests |= frozenset(order.record.requests)
            return order
        self.quotas = order.quotas
        if self._leader is not None:
            self._leader.clock.taken(order.generation)
        return order

    def more_work(self) -> Plan | None:
        """Return the next plan of the running pass, or None when the pass is closed.

        Waits for either. Called when the pass has run out of microbatches. Raises `JobStopped`.
        """
        with self._changed:
            self._wait_until(lambda: bool(self._state.queue) or self._failure is not None)
            closed = self._failure is None and isinstance(self._state.queue[0], Close)
            if closed:
                self._feed(machine.Take())
                return None
        order = self.next_order()
        assert isinstance(order, Plan), order
        return order

    def has_order(self) -> bool:
        """Return whether `more_work` would return or raise without waiting for an order."""
        with self._changed:
            return bool(self._state.queue) or self._failure is not None

    def ask_close(self) -> None:
        """Request the end of the pass; only the first call of rank 0 in a pass has an effect.

        Plans that come before `Close` still belong to the pass.
        """
        with self._changed:
            self._feed(machine.AskClose())

    def started(self, microbatch: int) -> None:
        """Note that rank 0 begins the forward of a microbatch.

        The journal has it, so that after a loss all members know which microbatches each one has
        begun.
        """
        with self._changed:
            self._feed(machine.MicrobatchStarted(microbatch))

    def finished(self, microbatch: int) -> None:
        """Note that rank 0 has ended the backward of a microbatch (in evaluation its forward)."""
        with self._changed:
            self._feed(machine.MicrobatchFinished(microbatch))

    def pass_timed(self, num_microbatches: int, elapsed_ns: int) -> None:
        """Note how long the first pass of a training step took at rank 0.

        This replica's next vote on a training step carries the pace to all members, if the replica
        computes in that step.
        """
        with self._changed:
            self._feed(machine.TimePass(num_microbatches, elapsed_ns))

    def transport(self, generation: int) -> Transport:
        """Return the transport of `generation`, the generation of the plan that is being obeyed.

        The first call of a generation opens the transport and closes the one before. Call it when
        the pass is closed. Raises `Revoked` if a newer generation was promised or the job stops,
        and `TransportError` if no transport can be opened.
        """
        with self._changed:
            if not machine.may_run(self._state, generation):
                raise Revoked(f"generation {self._state.promised} has been promised")
            retired = None
            if self._transport is None or self._transport.generation != generation:
                retired = self._transport
                # Those of the plan: newcomers that it turns away take part in no sum.
                addresses = {replica: self._known_addresses[replica] for replica in self.roster}
                self._transport = self._endpoint.open(generation, self.replica, addresses)
            transport = self._transport
        if retired is not None:
            retired.close()
        return transport

    def overlap_refusal(self, generation: int, operands: Collection[Operand]) -> str:
        """Return why sums of `operands` must not run beside a backward; empty: they may."""
        return self._endpoint.overlap_refusal(generation, operands)

    def pass_ended(self, generation: int) -> None:
        """Note at rank 0 that a pass is over whose newest plan is of `generation`.

        Only the measured times of a recovery depend on this.
        """
        if self._leader is not None:
            self._leader.clock.computed(generation)

    def hold(self, held: Held) -> bool:
        """Store a complete result. Return whether the result counts.

        Otherwise nothing is stored: a newer generation was promised, the job stops, or the plan
        does not ask for the result.
        """
        with self._changed:
            self._feed(machine.Hold(held))
            return held in self._state.held

    def blocked(self, generation: int, error: BaseException) -> None:
        """Report to the leader that a reduction or transfer of `generation` failed.

        Report nothing if nothing had stalled and a newer generation is promised or the job stops.
        The caller leaves the rest of the plan undone.
        """
        known = error if isinstance(error, TransportError) else TransportError()
        failed = machine.Block(
            generation, trace.reason_of(error), known.peers, known.stalled, known.miscounted
        )  # fmt: skip
        with self._changed:
            self._feed(failed)

    def failing(self, microbatches: Sequence[int], error: BaseException) -> None:
        """Report an exception, and wait up to `words_s` until the leader has forwarded the report.

        The process has to end after that. Computing one of `microbatches` raised `error`; if empty,
        something else did. Only the first report counts: its caller knows the microbatch, and later
        callers see the same exception propagate.
        """
        if self._has_raised or not self._control.is_alive():
            return
        self._has_raised = True
        with self._changed:
            self._feed(machine.Fail(tuple(microbatches), trace.reason_of(error)))
            self._changed.wait_for(lambda: self._heard or self._failure is not None, self._deadlines.words_s)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose a checkpoint save, on all ranks of the replica.

        During the save, for at most `save_s`, the coordinator excuses that other replicas wait for
        this one. After an exception the end of the save is not reported.
        """
        with self._changed:
            self._feed(machine.Save(over=False))
        with self._page.within(Phase.SAVE):
            yield
        # Not after an exception: the replica is about to end, and its end explains more.
        with self._changed:
            self._feed(machine.Save(over=True))

    def request(self, request: str) -> None:
        """Add `request` ("exit: SIGTERM", ...) to this rank's next `begin`; a vote then carries it.

        Any thread may call this.
        """
        with self._changed:
            self._unsaid.append(request)

    def close(self) -> None:
        """End a finished training loop: serve the others until the job ends, then close everything.

        Raises `JobStopped` if the job does not end well, or if this rank fails before. Further
        calls have no effect.
        """
        with self._changed:
            if self._closed:
                return
            if self._control.is_alive():
                self._feed(machine.Finish())
                self._wait_until(lambda: self._stopped_by() is not None)
            stopped = self._stopped_by()
            self._closed = True
            transport, self._transport = self._transport, None
            self._loop.post(lambda: None)  # under the lock: the control thread closes the loop only after this
        if self._control.is_alive():
            self._control.join()
        if transport is not None:
            transport.close()
        self._endpoint.close()
        if stopped is not None and stopped.exit_code != ExitCode.OK:
            raise self._last_words_written(stopped)

    def close_in_child(self) -> None:
        """Close the control sockets that a forked child (of the script or a data set) inherited.

        The interpreter calls this in the child after every fork. While a child holds copies of the
        sockets, the connections of a dead rank stay open.
        """
        self._loop.close_in_child()

    # --- Waiting, under the lock -----------------------------------------------------------------

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        # No deadline here. Every wait for another party is ended by the leader's stall timer, by
        # the coordinator's follow timer, or by the agent, which watches every process. If the
        # leader is lost, the control thread ends this wait (INV-8).
        if not condition():
            with self._page.within(Phase.ORDERS):
                self._changed.wait_for(condition)

    def _stopped_by(self) -> JobStopped | None:
        if self._failure is not None:
            return self._failure
        for order in (self._state.taken, *self._state.queue):
            if isinstance(order, Stop):
                return JobStopped(order.exit_code, order.reason)
        return None

    def _raise_if_stopped(self) -> None:
        stopped = self._stopped_by()
        if stopped is not None:
            raise self._last_words_written(stopped)

    # --- The machine, under the lock -------------------------------------------------------------

    def _feed(self, event: machine.Input) -> None:
        self._state, effects = machine.step(self._state, event)
        for effect in effects:
            match effect:
                case machine.Retire(generation):
                    if self._transport is not None and self._transport.generation < generation:
                        self._transport.revoke()
                case machine.ToLeader(report):
                    # Posted, never sent from here: a leader carries out all effects of one input
                    # before the next input.
                    self._outbox.append(report)
                    self._loop.post(self._send_reports)
        self._changed.notify_all()

    # --- Control thread --------------------------------------------------------------------------

    def _run_control(self) -> None:
        try:
            while not self._closed:
                self._loop.run_once()
            if self._leader is not None:
                self._leader.see_ranks_off()
        except BaseException as error:
            # Every error counts: without this thread the rank neither promises nor receives `Stop`.
            self._speaker.say(traceback.format_exc().rstrip())
            code = ExitCode.INVARIANT_VIOLATED if isinstance(error, InvariantViolation) else ExitCode.FAILED
            self._fail(f"{type(error).__name__}: {error}", code)
            while not self._closed:
                self._loop.run_once()
        finally:
            if self._leader is not None:
                self._leader.close()
            with self._changed:
                self._loop.close()

    def _introduce(self, hello: RankHello) -> None:
        """Link to the leader, or become it at rank 0."""
        if self.rank == 0:
            self._leader = ReplicaDriver(
                self._context, self._config, hello, key=self._key, clock=self._clock, loop=self._loop, deliver=self._deliver,
                fail=self._fail, record=self._record, faults=self._faults, deadlines=self._deadlines, naming=self._naming,
                refused=self._refused,
            )  # fmt: skip
            return
        self._link = LeaderLink(
            self._context, hello, key=self._key, clock=self._clock, loop=self._loop, deadlines=self._deadlines,
            deliver=self._deliver, fail=self._fail, is_stopped=lambda: self._stopped_by() is not None,
        )  # fmt: skip

    def _deliver(self, message: Message) -> None:
        """Feed the machine an order of the leader, or note `Heard`; fail at any other message."""
        match message:
            case Enter(promise, data_addresses):
                if self._faults is not None:
                    self._faults.at(FaultPoint.PROMISE, step=self._state.step)
                with self._changed:
                    if promise.generation > self._state.promised:
                        self._known_addresses |= dict(data_addresses)
                    self._feed(promise)
                if self._link is not None:
                    self._link.has_order()
            case EnterTraining():  # repeated by each generation in which this newcomer is judged anew
                with self._changed:
                    if not self._is_admitted:
                        self._is_admitted = True
                        self._feed(message)
            case Plan() | Close() | Apply() | Stop():
                with self._changed:
                    self._feed(message)
            case ReadFrom(sources):
                with self._changed:
                    self._sources = sources
                    self._changed.notify_all()
                if self._link is not None:
                    self._link.has_order()
            case Heard():
                with self._changed:
                    self._heard = True
                    self._changed.notify_all()
            case _:
                self._fail(f"the leader sent a {type(message).__name__}")

    def _refused(self, answer: JoinRefused) -> None:
        with self._changed:
            self._refusal = answer
            self._changed.notify_all()

    def _send_reports(self) -> None:
        while self._outbox:
            report = self._outbox.popleft()
            is_follower = self._leader is None
            if is_follower and self._faults is not None and isinstance(report, Holds):
                self._faults.at(FaultPoint.BEFORE_VOTE, step=report.step)
            if self._leader is not None:
                self._leader.report(report)
            elif self._link is not None:
                self._link.send(report)
            if isinstance(report, RankFailing) and self._leader is not None:
                self._deliver(Heard())
            if is_follower and self._faults is not None and isinstance(report, Holds):
                self._faults.at(FaultPoint.AFTER_VOTE, step=report.step)

    def _fail(self, reason: str, exit_code: int = ExitCode.FAILED) -> None:
        """End this rank: stop its training thread, or the process if that thread does not end.

        The process then ends after `follow_s`. Only the first call has an effect.
        """
        with self._changed:
            if self._failure is not None:
                return
            self._failure = JobStopped(exit_code, reason)
            if self._transport is not None:
                self._transport.revoke()
            self._loop.after(self._deadlines.follow_s, lambda: self._end_process(exit_code))
            # Not printed: stderr may block, and this thread must serve its timers and messages.
            self._speaker.say(f"megatron-recover: replica {self.replica} rank {self.rank} ends: {reason}")
            self._changed.notify_all()

    def _last_words_written(self, stopped: JobStopped) -> JobStopped:
        """Return `stopped` once all queued texts are written to stderr, or `words_s` have passed.

        `_fail` has queued the reason of a failure of this rank. No reason of a `Stop` is queued.
        """
        self._speaker.wait(self._deadlines.words_s)
        return stopped
