"""The events of the trace that the coordinator writes about the roster and its newcomers.

The core's values become events. `CoordinatorDriver` records them before their effect can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_recover import trace
from megatron_recover.core.coordinator_state import CoordinatorState, Input
from megatron_recover.core.membership_messages import JoinRefused, NewcomersProven, NewGeneration, TurnedAway


def generation(new: NewGeneration) -> trace.Generation:
    """Return the event of an announcement."""
    return trace.Generation(
        generation=new.generation,
        roster=new.roster,
        losses=tuple(trace.Loss(replica=loss.replica, kind=loss.kind, detail=loss.detail) for loss in new.losses),
        left=new.left,
        reason=new.reason,
        void=(new.void.step, new.void.since) if new.void is not None else None,
        gives_up=new.void is not None and new.void.gives_up,
        newcomers=tuple(claim.replica for claim in new.joins),
    )


def judgements(before: CoordinatorState, after: CoordinatorState, told: Input) -> Iterator[trace.TurnedAway | trace.Proven]:
    """Yield the event for the newcomers on which a report of a member has decided, if there are.

    `before` and `after` are the coordinator's states around the report. A newcomer that is lost by
    it yields nothing: the next generation names it.
    """
    if not isinstance(told, TurnedAway | NewcomersProven) or before.losses != after.losses:
        return
    decided = {claim.replica for claim in before.joins} - {claim.replica for claim in after.joins}
    newcomers = tuple(sorted(decided))
    if newcomers and isinstance(told, TurnedAway):
        yield trace.TurnedAway(generation=before.generation, newcomers=newcomers, reason=told.reason)
    elif newcomers:
        yield trace.Proven(generation=before.generation, newcomers=newcomers)


def lost_outside(before: CoordinatorState, after: CoordinatorState) -> Iterator[trace.NewcomerLost]:
    """Yield the event for each newcomer that was lost between two states of the coordinator.

    There is none for one in the roster: the next generation names it.
    """
    for loss in after.losses[len(before.losses) :]:
        if loss.replica in before.forming:
            yield trace.NewcomerLost(newcomer=loss.replica, kind=loss.kind, detail=loss.detail)


def refusal(refused: JoinRefused) -> Iterator[trace.ClaimRefused]:
    """Yield the event of a refusal by the coordinator.

    There is none for a newcomer that was announced: `TurnedAway` names it.
    """
    if not refused.generation:
        yield trace.ClaimRefused(newcomer=refused.newcomer, label=refused.label, reason=refused.reason)
