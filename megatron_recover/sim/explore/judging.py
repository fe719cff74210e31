"""Judgement of the replicas that the coordinator removes for being late or at fault.

The coordinator has evidence only. The explorer knows the truth of its world:

- which members read, and which of them beyond the deadline;
- whose save is overdue;
- which channels are broken;
- which timer it has fired.

So it judges each removal that follows a timer, at the instant at which the coordinator makes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recover.core.coordinator import CoordinatorState, Input, TimerFired
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.membership_messages import Loss, LossKind
from megatron_recover.core.replica_state import ReplicaPhase, ReplicaState
from megatron_recover.core.request import RequestKind, details
from megatron_recover.core.values import ReplicaId
from megatron_recover.sim import channels
from megatron_recover.sim.explore.network import JobState
from megatron_recover.sim.explore.scenario import Scenario

LASTS = 2
"""Generations without a committed step after which `trouble` has run out at the latest."""


def judged(scenario: Scenario, world: JobState, before: CoordinatorState, after: CoordinatorState, cause: Input) -> JobState:
    """Return the world after the coordinator's reaction to an input, without waits that it ends.

    Raise InvariantViolation in these cases:

    - The coordinator has removed, after a timer, a replica that is not at fault.
    - It has removed the last members after a timer, or lets them leave.
    - It keeps a replica whose save is overdue for longer than any trouble that passes.
    - It makes a generation for the loss of replicas that are not in the roster.
    - It announces newcomers of a job that was asked to end, or twice in one step.
    - It forgets, because of the loss of newcomers alone, how long the members have got nowhere.
    """
    world = _joins_rightly(scenario, world, before, after)
    losses = after.losses[len(before.losses) :]
    lost = {loss.replica for loss in losses}
    if 0 < before.generation < after.generation and lost and lost.isdisjoint(before.roster):
        raise InvariantViolation(9, f"generation {after.generation} is made for replicas {sorted(lost)}, which are no members")
    if after.left != before.left and len(after.roster) < scenario.min_replicas:
        raise InvariantViolation(9, f"replicas {after.left} have left, and only {after.roster} stay")
    if not losses and after.step == before.step:
        _is_not_excused(world, after)
        return world
    newcomers = {claim.replica for claim in before.joins}  # nobody has to prove that one is at fault
    suspected = [loss.replica for loss in losses if loss.kind is LossKind.SUSPECTED and loss.replica not in newcomers]
    if suspected and isinstance(cause, TimerFired):
        if not after.roster:
            raise InvariantViolation(9, f"a timeout removed the last members: {losses[-1].detail}")
        if cause.timer == before.follow:
            _is_late(world, losses)
        elif not before.patience:
            raise InvariantViolation(9, f"replicas {suspected} were fenced for what need not last: {losses[-1].detail}")
        else:
            world = _is_blamed(scenario, world, suspected, after.roster)
    # The wait is over. For members that still read, the deadline begins anew.
    return world._replace(reading=tuple(each for each in world.reading if each in after.roster), overdue=None, late_saves=())


def _joins_rightly(scenario: Scenario, world: JobState, before: CoordinatorState, after: CoordinatorState) -> JobState:
    """Return the world with the newest join; raise InvariantViolation if newcomers keep the job.

    Between two joins a step has to be committed, and newcomers that come and go must not hide a
    member at fault. Or a crash loop would keep the job from its steps for ever.
    """
    lost = {loss.replica for loss in after.losses[len(before.losses) :]}
    outside = {*before.forming, *(claim.replica for claim in before.joins)}
    was_stuck = after.fruitless < before.fruitless or bool(before.trouble) > bool(after.trouble)
    if lost and lost <= outside and was_stuck:
        raise InvariantViolation(
            9, f"the loss of newcomers {sorted(lost)} hides that {before.fruitless} generations came without a step"
        )
    known = {claim.replica for claim in before.joins}
    fresh = [claim for claim in after.joins if claim.replica not in known]
    if not fresh:
        return world
    what = f"generation {after.generation} is to take newcomers {[claim.replica for claim in fresh]} in {fresh[0].label}"
    if details(before.requests, RequestKind.EXIT):
        raise InvariantViolation(9, f"{what}, and the job was asked to end")
    if fresh[0].label == world.joined:
        raise InvariantViolation(9, f"{what}, in which others joined before")
    return world._replace(joined=fresh[0].label) if scenario.newcomer_crashes else world


def held_rightly(leader: ReplicaState) -> None:
    """Raise InvariantViolation if a hold outlives its generation or its step, or has no effect.

    It also must not keep back what no hold may: while a pass is open, nobody has results.
    """
    hold, label = leader.hold, leader.work.label if leader.work is not None else ""
    if hold is not None and hold.generation != leader.generation:
        raise InvariantViolation(8, f"a hold of generation {hold.generation} stands in generation {leader.generation}")
    if leader.close_waits and (hold is None or hold.label != label):
        raise InvariantViolation(8, f"the pass of {label or 'no step'} is kept open for {hold}")
    is_over = leader.phase is not ReplicaPhase.WORKING or leader.is_closed or any(leader.held)
    if hold is not None and hold.label == label and is_over:
        raise InvariantViolation(8, f"replica {leader.replica} holds {label} in phase {leader.phase.value}, after its pass")


def _is_not_excused(world: JobState, after: CoordinatorState) -> None:
    """Raise InvariantViolation if an overdue save is excused for over `LASTS` generations."""
    for replica, since in world.late_saves:
        if after.generation - since > LASTS:
            made = f"{after.generation - since} generations without a step"
            raise InvariantViolation(9, f"replica {replica} was excused, whose save was overdue for {made}")


def _is_late(world: JobState, losses: Sequence[Loss]) -> None:
    """Raise InvariantViolation if a member fenced for not entering was at work that is excused."""
    for loss in losses:
        if loss.replica in world.reading and world.overdue is None:
            raise InvariantViolation(9, f"replica {loss.replica} was only at work: {loss.detail}")


def _is_blamed(scenario: Scenario, world: JobState, fenced: Sequence[ReplicaId], roster: Sequence[ReplicaId]) -> JobState:
    """Return the world with those that evidence names; raise InvariantViolation if one is innocent.

    A replica may be fenced for work beyond the deadline, for an overdue save, or for a broken
    channel.
    """
    at_fault = {*(world.overdue or ()), *(replica for replica, _ in world.late_saves)}
    blamed = (*world.blamed, *(each for each in fenced if each not in at_fault))
    if blamed != world.blamed and channels.innocent(blamed, roster, scenario.broken):
        only_at_work = "only at work" if set(blamed) & set(world.reading) else "not at fault"
        raise InvariantViolation(9, f"of {list(blamed)}, which were fenced, one was {only_at_work}")
    return world._replace(blamed=blamed)
