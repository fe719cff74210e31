"""Makes generations, gives their writers grants, and ends a job that has no members left.

These functions are the moves of the machine of membership: every other part of it changes the
roster through them alone. They are pure, and take and return what a handler of
`core/coordinator.py` does.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from megatron_recover.core import grants
from megatron_recover.core.alike import described, differences
from megatron_recover.core.coordinator_state import (
    Announce,
    Arm,
    CoordinatorState,
    Effect,
    EndJob,
    Fence,
    Give,
    LeaveJudged,
    Setting,
)
from megatron_recover.core.excuses import after_progress, are_waits_excused, with_waits
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.leaving import kept
from megatron_recover.core.membership_messages import Loss, NewGeneration
from megatron_recover.core.policy import all_finished, nobody_left, poisoned
from megatron_recover.core.request import TOO_FEW
from megatron_recover.core.values import ReplicaId
from megatron_recover.core.vote import unite

Step = tuple[CoordinatorState, tuple[Effect, ...]]
"""The next state and the effects."""


def arm_start(state: CoordinatorState, kind: str, setting: Setting) -> Step:
    """Arm `start` or `load`, in place of the one that was armed before."""
    # Between two of a kind a replica was lost: the first that was ready.
    name = f"{kind} {len(state.losses)}" if state.losses else kind
    return replace(state, start=name), (Arm(name, setting),)


def start_when_complete(state: CoordinatorState) -> Step:
    """Make generation 1 once every replica is ready or lost; end the job if it cannot start."""
    if len(state.hellos) + len(state.losses) < state.policy.num_replicas:
        return state, ()
    if not state.hellos:
        return _nobody_left(state)
    first = state.hellos[0]
    for other in state.hellos[1:]:
        if other.fingerprint != first.fingerprint:
            found = differences(first.parts, other.parts) or [("the fingerprint", first.fingerprint, other.fingerprint)]
            return end(
                state,
                ExitCode.FAILED,
                f"replicas {first.replica} and {other.replica} do not start alike: "
                f"{described(first.replica, other.replica, found)}; use the same script, flags, packages, data and checkpoint",
            )
    if len(state.hellos) < state.policy.min_replicas:
        detail = f"{len(state.hellos)} of {state.policy.num_replicas} replicas started, {state.policy.min_replicas} are needed"
        return end(state, ExitCode.TOO_FEW_REPLICAS, detail)
    return announce(replace(state, roster=tuple(item.replica for item in state.hellos)), state.losses, "start")


def announce(state: CoordinatorState, losses: tuple[Loss, ...], reason: str, left: tuple[ReplicaId, ...] = ()) -> Step:
    """Make the next generation, or end the job if the roster is empty or has finished.

    With fewer members than `min_replicas`, the generation requests the exit.
    """
    if not state.roster:
        return _nobody_left(state)
    if {item.replica for item in state.finished} >= set(state.roster):
        return finish(state)
    if len(state.roster) < state.policy.min_replicas:
        state = replace(state, requests=unite((state.requests, (TOO_FEW,))))
    generation, follow = state.generation + 1, f"follow {state.generation + 1}"
    state = replace(
        with_waits(state),
        generation=generation,
        entered=(),
        leaving=(),
        follow=follow,
        all_late=False,
        reason="",
        reason_excused_by=(),
        excused=bool(losses or left or state.reason_excused_by) or are_waits_excused(state),
    )
    new = NewGeneration(generation, state.roster, losses, reason, state.requests, state.trusted_from, state.void, left)
    state, gift = give_next(state, state.grants)
    return state, (Announce(new), Arm(follow, "follow_s"), *gift)


def remove(state: CoordinatorState, losses: tuple[Loss, ...], reason: str) -> Step:
    """Remove replicas for good, fence them, and make a generation without them or end the job.

    Ignore replicas that are lost already. Drop all evidence. Before generation 1, wait until every
    other replica is ready or lost.
    """
    gone = {loss.replica for loss in state.losses} | {*state.left}
    done = {item.replica for item in state.finished}
    losses = tuple(loss for loss in losses if loss.replica not in gone)
    if not losses:
        return state, ()
    out = {loss.replica for loss in losses}
    fences: tuple[Effect, ...] = tuple(Fence(loss.replica) for loss in losses)
    fences += lease_of(state, out)
    state = replace(
        state,
        losses=(*state.losses, *losses),
        hellos=tuple(item for item in state.hellos if item.replica not in out),
        evidence_from=state.generation + 1,
    )
    state = after_progress(state)
    if not state.generation:
        state, effects = start_when_complete(state)
        return state, fences + effects
    before, state = state, without(state, out)
    verdict = poisoned(state.failing, state.losses, state.policy.samples)
    if verdict:
        state, effects = end(state, *verdict)
        return state, fences + effects
    if stays := kept(before, state):
        fences += (LeaveJudged((), stays, reason),)
    # A replica that has finished is not announced as a loss: its training is complete.
    state, effects = announce(state, tuple(loss for loss in losses if loss.replica not in done), reason)
    return state, fences + effects


def without(state: CoordinatorState, out: Collection[ReplicaId]) -> CoordinatorState:
    """Return the state with these replicas removed from the roster, and their saves forgotten."""
    return replace(
        state,
        roster=tuple(replica for replica in state.roster if replica not in out),
        saves=tuple(save for save in state.saves if save.replica not in out),
    )


def give_next(state: CoordinatorState, ledger: grants.Ledger) -> Step:
    """Give the writer the next grant if none is open in `ledger`, which the state stores."""
    after = grants.given(ledger, state.generation, state.roster)
    given = (Give(after.open),) if after.open is not None and after.num_given != ledger.num_given else ()
    return replace(state, grants=after), given


def lease_of(state: CoordinatorState, gone: Collection[ReplicaId]) -> tuple[Effect, ...]:
    """Return the timer for the lease of a grant whose holder is among the replicas that go."""
    if state.grants.open is None or state.grants.open.writer not in gone:
        return ()
    return (Arm(state.grants.lease, "lapse_s"),)


def _nobody_left(state: CoordinatorState) -> Step:
    """End the job without members. If one had finished before it was lost, all was committed."""
    if state.finished:
        return finish(state)
    return end(state, *nobody_left(state.failing, state.losses, state.miscount))


def finish(state: CoordinatorState) -> Step:
    """End the job whose members have all finished."""
    return end(state, *all_finished(state.finished, state.miscount, state.requests))


def end(state: CoordinatorState, exit_code: int, reason: str) -> Step:
    """End the job with an exit code and the reason for it."""
    return replace(state, over=True), (EndJob(int(exit_code), reason),)
