"""A rank on the virtual clock: its machine, and its training thread, whose work takes time.

The rules are those of `core/rank.py`. Here is only the caller that its contract requires. The
caller knows when a pass runs out of microbatches, when it ends, and when an operation across
replicas is over.

Note [Time of a pass]
    1F1B over q microbatches on p stages (Narayanan et al. 2021, section 2.2). A forward takes f
    seconds, a backward b; t = f + b. On stage s (from 0), in seconds after the begin of the pass:

    - forward k begins at s f + k f while the pipeline fills (k < p - s), then at s f + k t;
    - backward k ends at p f + (p - s) b + k t, so the stage is done at s f + (q - 1 + p - s) t.

    A microbatch that arrives before forward q would begin becomes forward q, and costs no bubble.
    Rank 0 requests the end of the pass when it begins the last forward that it knows of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from megatron_recover.core import rank
from megatron_recover.core.label import StepKind, label_of
from megatron_recover.core.plan import Operation, microbatches_of, operations
from megatron_recover.core.rank_messages import Apply, Close, EnterTraining, Order, Plan, Promise, Stop
from megatron_recover.core.request import SAVED
from megatron_recover.core.values import Generation, Held, MicrobatchId, ReplicaId
from megatron_recover.faults import FaultPoint
from megatron_recover.sim.timed.course import Course, is_writer
from megatron_recover.sim.timed.models import stage_of
from megatron_recover.sim.timed.world import JobParts, Replica


class Pass:
    """A pass of the schedule that runs. See Note [Time of a pass]."""

    __slots__ = (
        "base", "began", "forward_s", "microbatches", "num_finished", "num_started", "plans", "slot_s", "stage", "stages",
    )  # fmt: skip

    def __init__(self, base: float, slot_s: float, forward_share: float, stage: int, stages: int) -> None:
        self.began = self.base = base
        self.slot_s, self.forward_s = slot_s, slot_s * forward_share
        self.stage, self.stages = stage, stages
        self.microbatches: list[MicrobatchId] = []
        """Microbatches of `plans`, in the order of the plans."""
        self.plans: list[Plan] = []
        self.num_started = self.num_finished = 0
        """Microbatches that the journal has as started, and as finished."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches that are known so far."""
        return len(self.microbatches)

    def forward_begins(self, index: int) -> float:
        """Return when the forward of microbatch `index` (from 0) begins, unless it comes late."""
        filling = index < self.stages - self.stage
        return self.base + self.stage * self.forward_s + index * (self.forward_s if filling else self.slot_s)

    def backward_begins(self, index: int) -> float:
        """Return when the backward of microbatch `index` begins."""
        backward_s = self.slot_s - self.forward_s
        filled = self.stages * self.forward_s + (self.stages - self.stage - 1) * backward_s
        return self.base + filled + index * self.slot_s

    def extend(self, microbatches: Sequence[MicrobatchId], now: float) -> None:
        """Add microbatches. One that comes after its time moves all times of the pass."""
        late = now - self.forward_begins(self.num_microbatches)
        if self.num_microbatches and late > 0:
            self.base += late
        self.microbatches += microbatches

    def backward_ends(self, index: int) -> float:
        """Return when the backward of microbatch `index` ends."""
        return self.backward_begins(index) + self.slot_s - self.forward_s

    def ends(self) -> float:
        """Return when the last backward ends."""
        return self.backward_ends(self.num_microbatches - 1)


def key_of(operation: Operation) -> tuple[int | None, ...]:
    """Return an operation without its members, of which there may be many."""
    return operation.generation, operation.step, operation.bucket, operation.version, operation.source


class TimedRank:
    """One rank. While `busy` is True, its training thread takes orders in `_prepare` only."""

    __slots__ = (
        "alive", "begun", "busy", "course", "has_entered", "job", "label", "machine", "operations", "passes", "passing",
        "plans_taken", "position", "replica", "saving", "served", "stage", "turn",
    )  # fmt: skip

    def __init__(self, job: JobParts, replica: Replica, position: int) -> None:
        self.job, self.replica, self.position = job, replica, position
        self.stage = stage_of(job.table, position)
        self.machine = rank.RankState(replica.number, position, job.buckets_of[position])
        self.has_entered = not replica.is_newcomer
        """True once the rank may train: at once, or by the order to a newcomer."""
        self.alive, self.busy = True, self.has_entered
        self.passing: Pass | None = None
        self.operations: deque[Operation] = deque()
        self.plans_taken = 0
        self.passes: list[Pass] = []
        """All passes of this step, ended ones included."""
        self.saving = False
        """True while the rank saves a checkpoint."""
        self.course = Course()
        self.begun, self.label = -1, ""
        """The newest training step that the training thread has begun (-1: none), and its label."""
        self.served = -1
        """The newest step whose state was digested for newcomers."""
        self.turn = 0
        """Number of the training thread's activity; events of older activities are ignored."""

    def die(self) -> None:
        """End the rank, and the pass that runs."""
        self._account()
        self.alive = False

    # --- control thread ---

    def obey(self, order: Order) -> None:
        """Receive an order of the leader."""
        if self.alive:
            starts = self.has_entered and not self.machine.promised
            if isinstance(order, Promise):
                self._journal()
            self.feed(order)
            if starts:
                self.job.clock.at(self.job.clock.now + self.job.timing.optimizer_s(), self.begin)
            self.wake()

    def feed(self, message: rank.Input) -> None:
        """Feed one input to the machine, and carry out its effects."""
        self.machine, effects = rank.step(self.machine, message)
        for effect in effects:
            if isinstance(effect, rank.Retire):
                self._retire(effect.generation)
            else:
                self.replica.reported(self.position, effect.report)

    def served_step(self) -> int:
        """Return the training step whose state newcomers can read (it is not applied), or -1."""
        return self.begun if self.alive and self.begun == self.machine.step else -1

    def serve(self, step: int) -> None:
        """Digest the state with which a step begins, for newcomers, if this is still the state."""
        if self.served_step() == step and self.served < step:
            self.served = step
            self.job.clock.after(self.job.timing.digest_s(), self._digest, step)

    def _digest(self, step: int) -> None:
        if self.served_step() == step:
            self.feed(rank.Digest(self.label, self.job.memory.known_state(self, step)))

    def _journal(self) -> None:
        """Record what rank 0 has started and finished. A promise is about to report it."""
        for running in self.passes if self.position == 0 else ():
            for index in range(running.num_started, running.num_microbatches):
                if running.forward_begins(index) > self.job.clock.now:
                    break
                self.feed(rank.MicrobatchStarted(running.microbatches[index]))
                running.num_started += 1
            for index in range(running.num_finished, running.num_started):
                if running.backward_begins(index + 1) > self.job.clock.now:
                    break
                self.feed(rank.MicrobatchFinished(running.microbatches[index]))
                running.num_finished += 1

    def _retire(self, generation: Generation) -> None:
        """Let operations across replicas fail; the training thread leaves the rest of its plan."""
        if self.operations and self.operations[0].generation < generation:
            self.job.meetings.leave(self, self.operations[0])
            self._leave()

    # --- training thread ---

    def begin(self) -> None:
        """Arrive at the next step of the training loop, or at its end.

        If the rank has to read or to save first, it does so and arrives later.
        """
        if not self.alive:
            return
        if reads_s := self.job.reading_s(self):
            self._until(self.job.clock.now + reads_s, self.begin)
            return
        pause_s = self.job.saving_s(self)
        if pause_s and not self.saving:
            self.saving = True
            self.feed(rank.Save(over=False))
            self._until(self.job.clock.now + pause_s, self.begin)
            return
        if self.saving:
            self.saving = False
            self.feed(rank.Save(over=True))
        if self.course.writes is not None:
            self.job.saved(self, self.course.writes)
            self.course = replace(self.course, writes=None)
        self.busy, self.plans_taken = False, 0
        label = self.course.next_label(self.job.num_steps, self.job.save_interval)
        if label is None:
            self.feed(rank.Finish())
        else:
            work = self.job.work(self.machine.step, label)
            requests = (SAVED,) if label_of(label).kind is StepKind.END and self.course.agreed in self.job.durable else ()
            self.feed(rank.Begin(work, requests, self.job.memory.state_digest(self) if work.digests else None))
            if label_of(label).is_training:
                self.begun, self.label = self.machine.step, label
                self.job.begun()
        self.wake()

    def wake(self) -> None:
        """Take orders for as long as the training thread is free."""
        while self.alive and not self.busy and self.machine.queue:
            self._take()

    def _take(self) -> None:
        order = self.machine.queue[0]
        self.feed(rank.Take())
        if isinstance(order, Plan):
            self._take_in(order)
        elif isinstance(order, Close):
            self._close()
        elif isinstance(order, Apply):
            self._apply(order)
        elif isinstance(order, EnterTraining):
            self._enter()
        elif isinstance(order, Stop):
            self.busy = True

    def _enter(self) -> None:
        """Begin training with the state that was read, unless this rank has begun already."""
        if not self.has_entered:
            self.has_entered, self.course = True, self.replica.read_course
            self._until(self.job.clock.now + self.job.timing.optimizer_s(), self.begin)

    def _take_in(self, plan: Plan) -> None:
        """Compute all of a plan: in the pass that runs, or in one that begins with it."""
        job = self.job
        job.memory.compute(self, plan)
        self.plans_taken += 1
        for older in self.passes if plan.voids else ():  # the journal has begun anew
            older.num_started = older.num_finished = older.num_microbatches
        microbatches = microbatches_of(plan)
        if not microbatches:
            if not self.machine.in_pass:
                self._operate()
            return
        if self.passing is None:
            slot_s = job.timing.microbatch_s(self.replica.number, plan.step)
            self.passing = Pass(job.clock.now, slot_s, job.forward_share, self.stage, job.table.stages)
            self.passes.append(self.passing)
        running = self.passing
        running.plans.append(plan)
        running.extend(microbatches, job.clock.now)
        self._until(running.forward_begins(running.num_microbatches), self._exhausted)
        job.clock.at(running.forward_begins(running.num_microbatches - 1), self._prepare, running, running.num_microbatches)
        if job.awaits_fault(self):
            self._pass_points(running, len(microbatches))

    def _pass_points(self, running: Pass, count: int) -> None:
        """Pass the fault points of the last `count` microbatches of a pass.

        They are sure to be computed, unless the rank dies.
        """
        forward = FaultPoint.FORWARD if self.plans_taken == 1 else FaultPoint.RECOMPUTE
        for index in range(running.num_microbatches - count, running.num_microbatches):
            self.job.pass_fault(self, forward, at=running.forward_begins(index))
            self.job.pass_fault(self, FaultPoint.BACKWARD, at=running.backward_begins(index))

    def _prepare(self, running: Pass, num_microbatches: int) -> None:
        """Begin the last known forward: add what plans bring, or request the end of the pass."""
        while (
            self.alive and self.machine.in_pass and self.passing is running and running.num_microbatches == num_microbatches
        ):  # fmt: skip
            if self.machine.queue and isinstance(self.machine.queue[0], Plan | Close):
                self._take()
            else:
                self.feed(rank.AskClose())
                break

    def _exhausted(self) -> None:
        """Take the orders that have come, as no known microbatch is left, or wait for one."""
        self.busy = False
        self.wake()

    def _close(self) -> None:
        assert self.passing is not None
        self._until(self.passing.ends(), self._pass_ended)

    def _pass_ended(self) -> None:
        running = self.passing
        assert running is not None
        self._account()
        self.busy, self.passing = False, None
        if self.position == 0 and len(self.passes) == 1:
            elapsed_ns = round((self.job.clock.now - running.began) * 1e9)
            self.feed(rank.TimePass(running.num_microbatches, elapsed_ns))
        self._operate()
        self.wake()

    def _account(self) -> None:
        """Account for what rank 0 has finished of the pass that runs; it ends now."""
        running, begin = self.passing, 0
        if running is None or self.position != 0:
            return
        for plan in running.plans:
            microbatches = microbatches_of(plan)
            ends = map(running.backward_ends, range(begin, begin + len(microbatches)))
            finished = [one for one, end in zip(microbatches, ends, strict=True) if end <= self.job.clock.now]
            self.job.computed(plan, finished, in_schedule=begin > 0)
            begin += len(microbatches)

    def _operate(self) -> None:
        """Begin the operations across replicas of the newest plan: the pass is over.

        There are none after a newer promise, or if the next order is `Stop`.
        """
        plan = self.machine.taken
        if not isinstance(plan, Plan):
            return
        self.job.pass_fault(self, FaultPoint.BEFORE_REDUCE)
        if rank.may_run(self.machine, plan.generation):
            self.operations.extend(operations(plan, self.replica.number, self.machine.buckets))
            self._advance()

    def _advance(self) -> None:
        """Arrive at the next operation."""
        self.busy = bool(self.operations)
        if self.operations:
            self.turn += 1
            self.job.meetings.arrive(self, self.operations[0])

    def completed(self, operation: Operation, checksum: int | None) -> None:
        """Note that this rank's operation has delivered a result, unless the rank has left it.

        `checksum` None: the rank only sent one.
        """
        if not self.alive or not self.operations or key_of(self.operations[0]) != key_of(operation):
            return
        self.operations.popleft()
        if checksum is not None:
            self.feed(rank.Hold(Held(operation.bucket, operation.version, checksum)))
        self._advance()
        self.wake()

    def report_stall(self, operation: Operation, accused: tuple[ReplicaId, ...]) -> None:
        """Report the replicas for which an operation has waited that is over now."""
        self.feed(rank.Block(operation.generation, "no progress", accused, stalled=True))

    def failed(
        self,
        operation: Operation,
        reason: str,
        suspects: tuple[ReplicaId, ...],
        *,
        stalled: bool = False,
        miscounted: bool = False,
    ) -> None:
        """Report that this rank's operation has failed here, unless the rank has left it."""
        if not self.alive or not self.operations or key_of(self.operations[0]) != key_of(operation):
            return
        self._leave()
        self.feed(rank.Block(operation.generation, reason, suspects, stalled, miscounted))
        self.wake()

    def _leave(self) -> None:
        self.operations.clear()
        self.busy = False
        self.turn += 1

    def _apply(self, order: Apply) -> None:
        self.job.memory.apply(self, order)
        self.passes = []
        self.course = self.course.after(order.record, is_writer=is_writer(self.replica.number, order.roster))
        if self.course.writes is not None:
            self.job.may_write(self, order)
        self.job.pass_fault(self, FaultPoint.OPTIMIZER, step=order.record.step)
        self._until(self.job.clock.now + self.job.timing.optimizer_s(), self.begin)

    def _until(self, time: float, then: object) -> None:
        """Keep the training thread busy until `time`, then call `then`."""
        self.busy = True
        self.turn += 1
        self.job.clock.at(time, self._if_still, self.turn, then)

    def _if_still(self, turn: int, then: object) -> None:
        if self.alive and self.turn == turn:
            then()  # type: ignore[operator]
