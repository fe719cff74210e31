"""A whole job on a virtual clock: the production machines, and models of the time in between.

    job = TimedJob(scenario.job, Timing(...), timers_s, ...)
    job.run()

`core` makes every decision. `sim/timed/models.py` says what takes time, and how much. A control
thread handles one message at a time: of many to send the last one is late, and so is what a thread
sends after many that it receives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_recover.core import coordinator, invariants, replica
from megatron_recover.core.joining import older, talkers
from megatron_recover.core.label import label_of
from megatron_recover.core.membership_messages import Hello, Loss, LossKind, NewGeneration
from megatron_recover.core.rank_messages import Apply, Plan, Report, Stop
from megatron_recover.core.tree import TREE_ABOVE, neighbours
from megatron_recover.core.values import MicrobatchId, ReplicaId, Work
from megatron_recover.faults import Fault, FaultKind, FaultPoint, Passages
from megatron_recover.sim.channels import Channels
from megatron_recover.sim.timed.account import Deals, JobAccount, RecoveryAccount, StepAccount
from megatron_recover.sim.timed.actors import Actor, TimedCoordinator, TimedReplica
from megatron_recover.sim.timed.clock import Clock
from megatron_recover.sim.timed.meetings import Meetings
from megatron_recover.sim.timed.memory import Memory
from megatron_recover.sim.timed.models import JobTable, Timing, shape_of
from megatron_recover.sim.timed.rank import TimedRank
from megatron_recover.sim.timed.sizes import MessageSizes

MOST_SOURCES = 8
"""Most members from which a rank of a newcomer reads its state."""


class TimedJob:
    """A job that runs. Subclasses add what can go wrong between its parts (`sim/timed/fuzz.py`)."""

    replica_type = TimedReplica
    coordinator_type = TimedCoordinator

    def __init__(
        self,
        table: JobTable,
        timing: Timing,
        timers_s: Mapping[str, float],
        *,
        detect_s: float,
        stall_s: float,
        faults: Sequence[Fault] = (),
        min_replicas: int = 1,
        tree_above: int = TREE_ABOVE,
        waits_for_newcomers: bool = False,
    ) -> None:
        """Build a job. `timers_s`: seconds by `Setting`; `tree_above`: as in `ReplicaState`."""
        self.table, self.timing, self.detect_s, self.stall_s = table, timing, detect_s, stall_s
        self.clock = Clock()
        self.shape = shape_of(table)
        self.buckets_of = [
            tuple(bucket for bucket, holders in enumerate(self.shape.bucket_ranks) if position in holders)
            for position in range(table.ranks)
        ]
        self.forward_share = timing.compute.forward_share
        self.memory = Memory()
        self.history: invariants.History | None = None
        """History that the invariants judge; None: no checks (`Memory` observes no facts)."""
        self.broken: Channels = frozenset()
        """Channels of the data plane that deliver nothing from now on."""
        self.meetings = Meetings(self)
        self.account = JobAccount()
        self.num_steps = table.steps
        self.save_interval = 0
        """Training steps from one checkpoint to the next, with one more when training ends or is
        requested to end; 0: no saves."""
        self.save_s = 0.0
        """Seconds that a save takes each rank of the replica that writes."""
        self.durable: set[int] = set()
        """Numbers of training steps after which the state was saved."""
        self.tree_above, self.min_replicas = tree_above, min_replicas
        self.newcomers_ask = True
        """True if a newcomer asks for a hold after tries that failed."""
        self.answer_s = stall_s
        """Seconds after which a newcomer gives up a claim that nobody answers."""
        self.replicas = [self.replica_type(self, number, tree_above, min_replicas) for number in range(table.replicas)]
        policy = coordinator.MembershipSettings(table.replicas, min_replicas, waits_for_newcomers=waits_for_newcomers)
        self.coordinator = self.coordinator_type(self, policy, timers_s)
        self.struck: list[Fault] = []
        """Exact faults in the order in which they struck."""
        self.unstruck: list[Fault] = []
        """Exact faults that have not struck."""
        self._passages: dict[tuple[ReplicaId, int], Passages] = {}
        """Passages of the living ranks that have exact faults, by (replica, rank)."""
        self.undiscovered: set[ReplicaId] = set()
        """Replicas with a dead rank that no generation has left out yet."""
        self._deaths: dict[ReplicaId, float] = {}
        self._dead: dict[ReplicaId, set[int]] = {}
        for fault in faults:
            self.add_fault(fault)
        self._works: dict[int, Work] = {}
        self._sizes = MessageSizes(lambda: len(older(self.coordinator.state.roster, self.coordinator.state.joins)))
        self._waits: dict[ReplicaId, tuple[object, ...]] = {}
        self.hold_s = min(1.0, 0.2 * stall_s)
        """Seconds for which a member holds a step for newcomers at most."""
        self._holds: dict[ReplicaId, str] = {}
        """Label of the step of which each member keeps `Close` back now."""
        self._deals = Deals()
        self._num_computing = 0
        """Number of members of the newest generation in which a plan dealt microbatches."""
        self._behind: set[ReplicaId] = set()
        """Members that have not committed the newest step that anybody has committed."""

    # --- running ---

    def run(self, *, max_events: int = 2**62, until_s: float = float("inf")) -> JobAccount:
        """Run the job to its end.

        Raise RuntimeError if it does not end within a limit, or if nothing can happen any more.
        """
        self.coordinator.feed(coordinator.Launched())
        for one in self.replicas:
            self.coordinator.feed(self.hello(one.number))
        while self.account.exit_code is None:
            if not self.clock.step():
                raise RuntimeError(f"nothing can happen any more at {self.clock.now:.3f} s, and the job is not over")
            if self.clock.num_events > max_events or self.clock.now > until_s:
                raise RuntimeError(f"no end after {self.clock.num_events} events and {self.clock.now:.3f} s")
        return self.account

    def work(self, step: int, label: str) -> Work:
        """Return the work of a step: training, or comparing all state (for saves and the end)."""
        if step not in self._works or self._works[step].label != label:
            buckets = tuple(range(len(self.shape.bucket_ranks)))
            trains = label_of(label).is_training
            work = Work(label, self.table.microbatches, buckets) if trains else Work(label, 0, buckets[-1:], digests=True)
            self._works = {step: work}
        return self._works[step]

    def saving_s(self, rank: TimedRank) -> float:
        """Return the seconds for which a rank saves a checkpoint before its next step.

        Return 0 if the rank has nothing to save, or saves already.
        """
        return self.save_s if rank.course.writes is not None and not rank.saving else 0.0

    def reading_s(self, rank: TimedRank) -> float:
        """Return a rank's extra seconds of reading before its next step; asked again until 0."""
        return 0.0

    @property
    def readers(self) -> Collection[ReplicaId]:
        """Return the replicas with a rank that reads so long that others may give up waiting."""
        return ()

    # --- newcomers ---

    def hello(self, number: ReplicaId) -> Hello:
        """Return the greeting of a replica."""
        return Hello(number, "same")

    def form(self, number: ReplicaId) -> None:
        """Start the ranks of a newcomer."""
        assert number == len(self.replicas)
        one = self.replica_type(self, number, self.tree_above, self.min_replicas, is_newcomer=True)
        self.replicas.append(one)
        one.newcomer.form()

    def begun(self) -> None:
        """Let newcomers see that a rank has begun a step."""
        for one in self.replicas[self.table.replicas :]:
            self.clock.after(self.timing.latency_s(), one.newcomer.look, one.ranks[0])

    def sources(self, serving: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
        """Return from which of those that serve a state a rank of a newcomer reads it."""
        return serving[:MOST_SOURCES]

    def asked(self, sources: Sequence[ReplicaId]) -> ReplicaId:
        """Return the member that a newcomer asks, which has read from `sources`."""
        return sources[0]

    def is_stopped(self, rank: TimedRank) -> bool:
        """Return whether a rank stands still."""
        return False

    @property
    def awaits_next_window(self) -> bool:
        """Return whether a newcomer that was refused waits for the next step, as in production."""
        return False

    def reached(self, one: TimedReplica, phase: str) -> None:
        """Do nothing; called when a newcomer is formed, is ready, reads, asks or is admitted."""

    def refused(self, one: TimedReplica, reason: str, *, is_fault: bool) -> None:
        """Do nothing; called when a try of a newcomer came to nothing (`JoinRefused`)."""

    def turned_away(self, number: ReplicaId) -> None:
        """Let the ranks of a newcomer end that has trained and is turned away."""
        self.clock.after(self.timing.local_latency_s(), self.fence, number)
        lost = coordinator.ReplicaLost(Loss(number, LossKind.EXCEPTION, "it was turned away"))
        self.clock.after(self.detect_s, self.coordinator.feed, lost)

    def judge(
        self, before: coordinator.CoordinatorState, message: coordinator.Input, after: coordinator.CoordinatorState
    ) -> None:
        """Do nothing; a subclass can judge what the coordinator has decided."""

    def may_write(self, rank: TimedRank, order: Apply) -> None:
        """Do nothing; a subclass can check the state that a rank is about to save, by agreement."""

    def saved(self, rank: TimedRank, trained: int) -> None:
        """Note that a rank has saved its state after `trained` training steps; rank 0's counts."""
        if rank.position == 0:
            self.durable.add(trained)

    # --- messages ---

    def send(self, source: Actor, destination: TimedReplica | TimedCoordinator, departs: float, message: Any) -> None:
        """Send a message between leaders, or between a leader and the coordinator."""
        self.account.messages += 1
        self.clock.at(departs + self.timing.latency_s(), destination.receive, message)

    def order(self, one: TimedReplica, order: Any) -> None:
        """Send an order from a leader to all its ranks."""
        self.clock.at(max(one.free_at, self.clock.now) + self.timing.local_latency_s(), self._obey, one, order)

    def _obey(self, one: TimedReplica, order: Any) -> None:
        for each in one.ranks:
            each.obey(order)

    def deliver_locally(self, one: TimedReplica, position: int, report: Report) -> None:
        """Send a report from a rank to its leader."""
        self.clock.after(self.timing.local_latency_s(), one.feed, report)

    def size_of(self, message: replica.Input) -> float:
        """Return the bytes of a message on the wire, as far as they grow with the job."""
        return self._sizes.of(message)

    def watch(self, one: TimedReplica) -> None:
        """Feed `WaitExpired` to a leader that waits `stall_s` for statuses or for votes (INV-8).

        Also end a hold that has kept `Close` back for `hold_s`.
        """
        waiting = (one.state.phase, one.state.generation, one.state.step)
        if self._waits.get(one.number) != waiting:
            self._waits[one.number] = waiting
            if one.state.phase in (replica.ReplicaPhase.EXCHANGING, replica.ReplicaPhase.VOTED):
                self.clock.after(self.stall_s, self._stalled, one, waiting)
        label = replica.held_label(one.state) if one.state.close_waits else ""
        if label and self._holds.get(one.number) != label:
            self.clock.after(self.hold_s, self._hold_over, one, label)
        self._holds[one.number] = label

    def _hold_over(self, one: TimedReplica, label: str) -> None:
        if one.leader_alive:
            one.feed(replica.HoldExpired(label))

    def _stalled(self, one: TimedReplica, waiting: tuple[object, ...]) -> None:
        if one.leader_alive and self._waits.get(one.number) == waiting and replica.waiting_for(one.state):
            one.feed(replica.WaitExpired(one.state.generation, one.state.step))

    # --- faults ---

    @property
    def awaits_faults(self) -> bool:
        """True if an exact fault may still strike."""
        return bool(self._passages)

    def awaits_fault(self, rank: TimedRank) -> bool:
        """Return whether an exact fault may still strike this rank."""
        return (rank.replica.number, rank.position) in self._passages

    def pass_fault(
        self, rank: TimedRank, point: FaultPoint, *, step: int | None = None, bucket: int | None = None, at: float | None = None
    ) -> None:
        """Count that a rank passes a fault point; a fault that is due kills it now or `at` a time.

        `step` None: the current step of the rank. Raise ValueError if the fault is no kill.
        """
        passages = self._passages.get((rank.replica.number, rank.position))
        if passages is None:
            return
        due = passages.take(point, step=rank.machine.step if step is None else step, bucket=bucket)
        if due is not None:
            if due.kind is not FaultKind.KILL:
                raise ValueError(f"a fault of kind {due.kind.value} is not simulated")
            self.clock.at(self.clock.now if at is None else at, self._strike, due)

    def _strike(self, fault: Fault) -> None:
        if not self.is_dead(fault.replica, fault.rank):
            self.unstruck.remove(fault)
            self.struck.append(fault)
            self.kill(fault.replica, fault.rank)

    def add_fault(self, fault: Fault) -> None:
        """Add an exact fault. On a rank that is dead it never strikes."""
        self.unstruck.append(fault)
        if not self.is_dead(fault.replica, fault.rank):
            self._passages.setdefault((fault.replica, fault.rank), Passages()).add(fault)

    def kill(self, number: ReplicaId, position: int = 0) -> None:
        """Kill one rank (SIGKILL). The coordinator loses its replica `detect_s` later."""
        if self.is_dead(number, position):
            return
        self._deaths.setdefault(number, self.clock.now)
        self.bury(number, position)
        lost = coordinator.ReplicaLost(Loss(number, LossKind.PROCESS_ENDED, f"rank {position}: SIGKILL"))
        self.clock.after(self.detect_s, self.coordinator.feed, lost)

    def fence(self, number: ReplicaId) -> None:
        """Kill what is left of a replica."""
        for position in range(self.table.ranks):
            self.bury(number, position)

    def is_dead(self, number: ReplicaId, position: int) -> bool:
        """Return whether that rank is dead."""
        return number in self._dead and position in self._dead[number]

    def bury(self, number: ReplicaId, position: int) -> None:
        """Make a rank dead, without a report to the coordinator.

        The ranks that meet it for a sum or copy notice it, and of rank 0 also the linked leaders.
        """
        if self.is_dead(number, position):
            return
        self._dead.setdefault(number, set()).add(position)
        self._passages.pop((number, position), None)
        self.undiscovered.add(number)
        self.replicas[number].ranks[position].die()
        self.meetings.broken(number, position)
        state = self.replicas[number].state
        if position == 0 and number in state.roster:
            rosters = [state.roster, talkers(state)]  # in a tree the two have other neighbours
            for peer in dict.fromkeys(each for members in rosters for each in neighbours(members, number, state.tree_above)):
                self.clock.after(self.timing.latency_s(), self.replicas[peer].receive, replica.LinkLost(number))

    # --- what is noted ---

    def observe(self, fact: invariants.Fact) -> None:
        """Check a fact, if there is a history. Raise InvariantViolation if it breaks a rule."""
        if self.history is not None:
            self.history = invariants.observe(self.history, fact)

    def announced(self, new: NewGeneration) -> None:
        """Account for a generation that the coordinator has made."""
        self._not_behind(self._behind - set(new.roster))  # the lost never will
        self.undiscovered &= {*new.roster, *self.coordinator.state.forming}
        if new.generation > 1:
            deaths = [self._deaths[loss.replica] for loss in new.losses if loss.replica in self._deaths]
            now = self.clock.now
            self.account.recoveries[new.generation] = RecoveryAccount(min(deaths, default=now), announced=now)
            self.meetings.forget(new.generation - 2)
            self._sizes.forget()

    def planned(self, one: TimedReplica, plan: Plan) -> None:
        """Account for a plan that a leader sends its ranks."""
        self.observe(invariants.Planned(one.number, plan))
        self._deals.add(plan)
        if plan.computes:
            self._num_computing = len(plan.roster)
        recovery = self.account.recoveries.get(plan.generation)
        if recovery is not None and recovery.step is None:
            recovery.step = plan.step
        if recovery is not None and recovery.step == plan.step:
            recovery.planned = self.clock.now

    def computed(self, plan: Plan, microbatches: Collection[MicrobatchId], *, in_schedule: bool) -> None:
        """Account for microbatches of a plan that a rank 0 has finished, if they are redone.

        `in_schedule`: the plan was added to a pass that ran.
        """
        recovery = self.account.recoveries.get(plan.generation)
        if recovery is not None:
            count = self._deals.num_redone(plan, microbatches)
            recovery.redone += count
            recovery.in_schedule += count if in_schedule else 0

    def committed(self, one: TimedReplica, effect: replica.Committed) -> None:
        """Account for a step that a leader has committed."""
        if self.history is not None:
            self.observe(invariants.Committed(one.number, effect.generation, effect.record, effect.adopted))
        step, steps = effect.record.step, self.account.steps
        if step not in steps:
            steps[step] = StepAccount(num_members=self._num_computing)
            self._behind = set(one.state.roster) & set(self.coordinator.state.roster)
        steps[step].ended = self.clock.now
        self._not_behind({one.number})

    def _not_behind(self, members: set[ReplicaId]) -> None:
        """Note that these have committed the newest step, or never will."""
        if self._behind:
            self._behind -= members
            if not self._behind:
                self.step_ended(next(reversed(self.account.steps)))

    def step_ended(self, step: int) -> None:
        """Do nothing; called when each member has committed `step` or is lost, or the job ends."""

    def end(self, exit_code: int, reason: str) -> None:
        """End the job, as the coordinator has decided."""
        self._not_behind(self._behind)
        self.account.exit_code, self.account.reason = exit_code, reason
        for one in self.replicas:
            if one.leader_alive:
                self.clock.after(self.timing.latency_s(), one.receive, Stop(exit_code, reason))
