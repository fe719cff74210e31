"""The control threads of a job on a virtual clock: the leader of each replica, the coordinator.

Each drives its machine of `core`, as `control_plane/replica_driver.py` and `coordinator_driver.py`
do in production. `sim/timed/job.py` carries their effects from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_recover.core import coordinator, invariants, replica
from megatron_recover.core.membership_messages import AddRequests, Entered, JoinRefused, LeaderMessage, NewGeneration
from megatron_recover.core.rank_messages import Plan, Report, Stop
from megatron_recover.core.values import ReplicaId, Status
from megatron_recover.sim.timed.course import Course
from megatron_recover.sim.timed.newcomer import Newcomer
from megatron_recover.sim.timed.rank import TimedRank

if TYPE_CHECKING:
    from megatron_recover.sim.timed.job import TimedJob

_DISMISSED_S = 1.0
"""Seconds in which the ranks of a replica that leaves end."""


class Actor:
    """A control thread, busy with one message at a time."""

    def __init__(self, job: TimedJob) -> None:
        self.job = job
        self.free_at = 0.0

    def occupied(self, num_bytes: float = 0.0) -> float:
        """Spend the time of one more message to send; return when it is sent."""
        return self._spend(self.job.timing.message_s(num_bytes))

    def read(self, num_bytes: float = 0.0) -> None:
        """Spend the time of one more message that has come."""
        self._spend(self.job.timing.reading_s(num_bytes))

    def _spend(self, seconds: float) -> float:
        self.free_at = max(self.free_at, self.job.clock.now) + seconds
        return self.free_at


class TimedReplica(Actor):
    """One replica: its leader's machine and its ranks."""

    def __init__(
        self, job: TimedJob, number: ReplicaId, tree_above: int, min_replicas: int, *, is_newcomer: bool = False
    ) -> None:
        super().__init__(job)
        self.number, self.is_newcomer = number, is_newcomer
        self.state = replica.ReplicaState(number, job.shape, tree_above, min_replicas)
        self.ranks = [TimedRank(job, self, position) for position in range(job.table.ranks)]
        self.newcomer = Newcomer(job, self)
        """Its part before training; without use unless `is_newcomer`."""

    @property
    def leader_alive(self) -> bool:
        """True if its leader is alive."""
        return self.ranks[0].alive

    @property
    def read_course(self) -> Course:
        """Return the position of the training loop that a newcomer has read."""
        return self.newcomer.course

    def served_step(self) -> int:
        """Return the training step whose state newcomers can read from all ranks, or -1."""
        steps = {each.served_step() for each in self.ranks}
        return steps.pop() if len(steps) == 1 else -1

    def receive(self, message: replica.Input) -> None:
        """Receive a message of another leader or of the coordinator."""
        if self.leader_alive:
            self.read(self.job.size_of(message))
            if isinstance(message, JoinRefused):
                self.job.refused(self, message.reason, is_fault=message.is_fault)
            self.feed(message)

    def reported(self, position: int, report: Report) -> None:
        """Receive a report of a rank: at once from rank 0, later from others."""
        if position == 0:
            self.feed(report)
        else:
            self.job.deliver_locally(self, position, report)

    def feed(self, message: replica.Input) -> None:
        """Feed one input to the machine, and carry out its effects."""
        if not self.leader_alive:
            return
        self.state, effects = replica.step(self.state, message)
        for effect in effects:
            self.carry_out(effect)
        self.job.watch(self)
        if self.is_newcomer:
            self.newcomer.follow()

    def carry_out(self, effect: replica.Effect) -> None:
        """Carry out one effect of the machine."""
        job = self.job
        if isinstance(effect, replica.ToRanks):
            if isinstance(effect.order, Plan):
                job.planned(self, effect.order)
            job.order(self, effect.order)
            if self.is_newcomer and isinstance(effect.order, Stop) and effect.order.exit_code:
                job.turned_away(self.number)
        elif isinstance(effect, replica.Voted):
            job.observe(invariants.Voted(self.number, effect.generation, effect.record))
        elif isinstance(effect, replica.ToPeers):
            self._to_peers(effect)
        elif isinstance(effect, replica.ToCoordinator):
            if isinstance(effect.message, Entered):
                job.observe(effect.message)
            job.send(self, job.coordinator, self.occupied(), effect.message)
        elif isinstance(effect, replica.Committed):
            job.committed(self, effect)

    def _to_peers(self, effect: replica.ToPeers) -> None:
        job, message = self.job, effect.message
        if isinstance(message, Status) and message.state_digest is not None:
            job.observe(invariants.StateGiven(self.number, message.generation, message.step, message.state_digest))
        num_bytes = job.size_of(message)
        for peer in effect.peers:
            job.send(self, job.replicas[peer], self.occupied(num_bytes), message)


class TimedCoordinator(Actor):
    """The coordinator's machine and its driver."""

    def __init__(self, job: TimedJob, policy: coordinator.MembershipSettings, timers_s: Mapping[str, float]) -> None:
        super().__init__(job)
        self.state = coordinator.CoordinatorState(policy)
        self.timers_s = timers_s

    def receive(self, message: LeaderMessage) -> None:
        """Receive a message of a leader."""
        self.read()
        self.feed(message)

    def feed(self, message: coordinator.Input) -> None:
        """Feed one input to the machine, and carry out its effects."""
        before = self.state
        self.state, effects = coordinator.step(before, message)
        self.job.judge(before, message, self.state)
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: coordinator.Effect) -> None:
        """Carry out one effect of the machine."""
        job = self.job
        if isinstance(effect, coordinator.Announce):
            self._announce(effect.generation)
        elif isinstance(effect, coordinator.Fence):
            job.fence(effect.replica)
        elif isinstance(effect, coordinator.Ask):
            job.send(self, job.replicas[effect.replica], self.occupied(), AddRequests(effect.requests))
        elif isinstance(effect, coordinator.Form):
            job.form(effect.replica)
        elif isinstance(effect, coordinator.Refuse):
            for number in (effect.refused.newcomer, *((effect.member,) if effect.member is not None else ())):
                job.send(self, job.replicas[number], self.occupied(), effect.refused)
        elif isinstance(effect, coordinator.Dismiss):
            job.send(self, job.replicas[effect.replica], self.occupied(), Stop(0, "it leaves"))
            job.clock.after(_DISMISSED_S, job.fence, effect.replica)
        elif isinstance(effect, coordinator.Arm):
            job.clock.after(self.timers_s[effect.setting], self.feed, coordinator.TimerFired(effect.timer))
        elif isinstance(effect, coordinator.EndJob):
            job.end(effect.exit_code, effect.reason)

    def _announce(self, new: NewGeneration) -> None:
        job = self.job
        job.observe(invariants.formed(new))
        job.announced(new)
        num_bytes = job.size_of(new)
        for number in new.roster:
            job.send(self, job.replicas[number], self.occupied(num_bytes), new)
