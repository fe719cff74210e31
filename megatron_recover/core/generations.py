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
    Ask,
    CoordinatorState,
    Effect,
    EndJob,
    Fence,
    Give,
    LeaveJudged,
    Refuse,
    Setting,
)
from megatron_recover.core.excuses import after_progress, are_waits_excused, with_waits, without_evidence
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.joining import older, refused
from megatron_recover.core.leaving import kept
from megatron_recover.core.membership_messages import Loss, NewGeneration
from megatron_recover.core.policy import all_finished, nobody_left, poisoned
from megatron_recover.core.request import TOO_FEW
from megatron_recover.core.values import ReplicaId
from megatron_recover.core.vote import unite
from megatron_recover.core.wording import counted

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
        if (other.fingerprint, other.beginning) != (first.fingerprint, first.beginning):
            found = differences((*first.parts, *first.beginning), (*other.parts, *other.beginning))
            found = found or [("the fingerprint", first.fingerprint, other.fingerprint)]
            return end(
                state,
                ExitCode.FAILED,
                f"replicas {first.replica} and {other.replica} do not start alike: "
                f"{described(first.replica, other.replica, found)}; use the same script, flags, packages, data and checkpoint",
            )
    if len(state.hellos) < state.policy.min_replicas:
        policy = state.policy
        detail = (
            f"{len(state.hellos)} of {counted(policy.num_replicas, 'replica')} started; "
            f"--recover-min-replicas is {policy.min_replicas}"
        )
        return end(state, ExitCode.TOO_FEW_REPLICAS, detail)
    return announce(replace(state, roster=tuple(item.replica for item in state.hellos)), state.losses, "start")


def announce(state: CoordinatorState, losses: tuple[Loss, ...], reason: str, left: tuple[ReplicaId, ...] = ()) -> Step:
    """Make the next generation, or end the job if the roster is empty or has finished.

    With fewer members than `min_replicas`, the generation requests the exit, unless the job waits
    for a newcomer. Claims that wait are refused: they are of the generation before.
    """
    if not state.roster:
        return _nobody_left(state)
    if {item.replica for item in state.finished} >= set(state.roster):
        return finish(state)
    if len(older(state.roster, state.joins)) < state.policy.min_replicas and not _may_grow(state):
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
        reason_by=-1,
        reason_excused_by=(),
        excused=bool(losses or left or state.reason_excused_by) or are_waits_excused(state),
    )
    new = NewGeneration(
        generation, state.roster, losses, reason, state.requests, state.trusted_from, state.void, left, state.joins
    )
    state, gift = give_next(state, state.grants)
    state, refusals = refuse_ready(state, f"generation {generation} was made before")
    return state, (Announce(new), Arm(follow, "follow_s"), *gift, *refusals)


def refuse_ready(state: CoordinatorState, reason: str) -> Step:
    """Refuse all claims that wait: their newcomers may claim a later state."""
    refusals = tuple(Refuse(refused(each.claim, reason), each.replica) for each in state.ready)
    return replace(state, ready=()), refusals


def _may_grow(state: CoordinatorState) -> bool:
    """Return whether a job with too few members waits for newcomers, and there are or will be."""
    return state.policy.waits_for_newcomers and bool(state.forming or state.joins or state.has_room)


def end_wait_for_newcomers(before: CoordinatorState, state: CoordinatorState) -> Step:
    """Request the exit of a job with too few members that has no more newcomers to wait for."""
    if _may_grow(before) and not _may_grow(state) and len(state.roster) < state.policy.min_replicas:
        # Nobody has to enter a generation for this: the next record carries the request.
        state = replace(state, requests=unite((state.requests, (TOO_FEW,))))
        return state, (Ask(state.roster[0], (TOO_FEW,)),)
    return state, ()


def remove(state: CoordinatorState, losses: tuple[Loss, ...], reason: str) -> Step:
    """Remove replicas for good, fence them, and make a generation without them or end the job.

    Ignore replicas that are lost already. Drop all evidence. Before generation 1, wait until every
    other replica is ready or lost. Newcomers alone change nothing for the members, and outside the
    roster make no generation.
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
    )
    if out <= {*state.forming, *(claim.replica for claim in state.joins)}:
        state, effects = _remove_newcomers(state, losses, reason)
        return state, fences + effects
    state = after_progress(replace(state, evidence_from=state.generation + 1))
    if not state.generation:
        state, effects = start_when_complete(state)
        return state, fences + effects
    if out & {claim.replica for claim in state.joins}:
        state = set_back(state)
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


def _remove_newcomers(state: CoordinatorState, losses: tuple[Loss, ...], reason: str) -> Step:
    """Remove newcomers alone; make a generation if one of them is in the roster.

    Nothing that is known of the members changes, and what they request is still open. Later joins
    back off.
    """
    before, state = state, without(state, {loss.replica for loss in losses})
    if before.roster != state.roster:
        # There was no trouble when they joined, so what was reported since is about them.
        state = replace(set_back(without_evidence(state)), evidence_from=state.generation + 1)
        return announce(state, losses, reason)
    return end_wait_for_newcomers(before, state)


def members(state: CoordinatorState) -> tuple[ReplicaId, ...]:
    """Return the members that are judged: without the unproven newcomers, if there are others."""
    return older(state.roster, state.joins)


def set_back(state: CoordinatorState) -> CoordinatorState:
    """Return the state after unproven newcomers were removed: later joins back off."""
    wait = 2 ** min(state.num_setbacks, _MOST_DOUBLINGS)
    return replace(state, num_setbacks=state.num_setbacks + 1, joins_from=max(state.joins_from, state.step + 1) + wait)


_MOST_DOUBLINGS = 6
"""After each setback in a row joins wait twice as many steps, up to 2 to the power of this."""


def without(state: CoordinatorState, out: Collection[ReplicaId]) -> CoordinatorState:
    """Return the state with these replicas removed from the roster, and their saves forgotten."""
    return replace(
        state,
        roster=tuple(replica for replica in state.roster if replica not in out),
        saves=tuple(save for save in state.saves if save.replica not in out),
        forming=tuple(replica for replica in state.forming if replica not in out),
        joins=tuple(claim for claim in state.joins if claim.replica not in out),
        ready=tuple(each for each in state.ready if each.claim.replica not in out),
    )


def give_next(state: CoordinatorState, ledger: grants.Ledger) -> Step:
    """Give the writer the next grant if none is open in `ledger`, which the state stores."""
    after = grants.given(ledger, state.generation, members(state))  # an unproven newcomer may never train
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
