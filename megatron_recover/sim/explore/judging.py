"""Whom the coordinator may remove for being late or at fault, judged by what is true in the explored world.

The coordinator knows evidence; the explorer knows who reads, since when the deadline has passed, which channels are broken and
which timer it has fired. So each removal is judged by its cause, at the instant at which it is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recover.core.coordinator import CoordinatorState, Input, TimerFired
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.values import Loss, LossKind, ReplicaId
from megatron_recover.sim import channels
from megatron_recover.sim.explore.network import World
from megatron_recover.sim.explore.scenario import Scenario


def judged(scenario: Scenario, world: World, before: CoordinatorState, after: CoordinatorState, cause: Input) -> World:
    """Return the world after what the coordinator made of an input: whom the others wait for, and who is overdue.

    Raises InvariantViolation where it has removed a replica that is not at fault, or the last ones for being late.
    """
    losses = after.losses[len(before.losses) :]
    if not losses and after.step == before.step:
        return world
    suspected = [loss.replica for loss in losses if loss.kind is LossKind.SUSPECTED]
    if suspected and isinstance(cause, TimerFired):
        if not after.roster:
            raise InvariantViolation(9, f"a timeout removed the last members: {losses[-1].detail}")
        if cause.timer == before.follow:
            _is_late(world, losses)
        elif not before.patience:
            raise InvariantViolation(9, f"replicas {suspected} were fenced for what need not last: {losses[-1].detail}")
        else:
            world = _is_blamed(scenario, world, suspected, after.roster)
    # What was waited for is over: the time of those that are still reading begins anew.
    return world._replace(reading=tuple(each for each in world.reading if each in after.roster), overdue=None)


def _is_late(world: World, losses: Sequence[Loss]) -> None:
    """Those that have not entered a generation in time must not be at work that is excused."""
    for loss in losses:
        if loss.replica in world.reading and world.overdue is None:
            raise InvariantViolation(9, f"replica {loss.replica} was only at work: {loss.detail}")


def _is_blamed(scenario: Scenario, world: World, fenced: Sequence[ReplicaId], roster: Sequence[ReplicaId]) -> World:
    """Those that evidence names must have kept the others waiting beyond the deadline, or be at fault for a broken channel."""
    blamed = (*world.blamed, *(each for each in fenced if each not in (world.overdue or ())))
    if blamed != world.blamed and channels.innocent(blamed, roster, scenario.broken):
        only_at_work = "only at work" if set(blamed) & set(world.reading) else "not at fault"
        raise InvariantViolation(9, f"of {list(blamed)}, which were fenced, one was {only_at_work}")
    return world._replace(blamed=blamed)
