"""Reports of a leader to the coordinator: requests for a generation, and the end of the replica.

These are parts of the machine of one replica (`core/replica.py`). All functions are pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.forwarding import waiting_for
from megatron_recover.core.holding import ended, released
from megatron_recover.core.joining import talkers, unproven
from megatron_recover.core.membership_messages import (
    Diverged,
    Miscounted,
    ReplicaBlocked,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaSaving,
)
from megatron_recover.core.policy import exit_code, untrained
from megatron_recover.core.rank_messages import RankBlocked, RankFailing, RankFinished, RankSaving, Stop
from megatron_recover.core.replica_state import (
    CoordinatorLost,
    Effect,
    LinkLost,
    ReplicaPhase,
    ReplicaState,
    Step,
    ToCoordinator,
    ToRanks,
    WaitExpired,
)
from megatron_recover.core.request import SAVED
from megatron_recover.core.tree import neighbours
from megatron_recover.core.values import ReplicaId
from megatron_recover.core.vote import Disagreement


def diverged(state: ReplicaState, conflict: Disagreement, effects: tuple[Effect, ...] = ()) -> Step:
    """Report that members disagree, at most once in a generation; `effects` come before that."""
    if state.blocked:
        return state, effects
    report = Diverged(state.replica, state.generation, state.step, conflict.minority, conflict.reason)
    return replace(state, blocked=True), (*effects, ToCoordinator(report))


def on_blocked(state: ReplicaState, report: RankBlocked) -> Step:
    """Report a miscount of this attempt; else request a generation once, and report every stall."""
    if report.miscounted is not None:
        # A late report is about an attempt that is over: it must not make the present one void.
        if (report.generation, report.miscounted) != (state.generation, state.step) or state.phase is not ReplicaPhase.WORKING:
            return state, ()
        miscounted = Miscounted(state.replica, state.generation, state.step, report.reason)
        return replace(state, blocked=True), (ToCoordinator(miscounted),)
    if report.generation == state.generation and state.phase is ReplicaPhase.WORKING and not state.blocked:
        return _request(state, report.reason, report.suspects, stalled=report.stalled)
    if report.generation > state.generation or not report.stalled:
        return state, ()
    evidence = ReplicaBlocked(state.replica, report.generation, report.reason, report.suspects, True)
    return state, (ToCoordinator(evidence),)


def on_link_lost(state: ReplicaState, lost: LinkLost) -> Step:
    """Request a newer generation if the peer is a neighbour: messages on the link may be lost.

    A newcomer needs only the link to the member that will admit it. A hold for the peer ends.
    """
    state, closes = released(state, lost.peer)
    waits = state.phase in (ReplicaPhase.PROMISING, ReplicaPhase.EXCHANGING) and state.replica in unproven(state)
    peers = talkers(state)[:1] if waits else neighbours(talkers(state), state.replica, state.tree_above)
    if lost.peer not in peers:
        return state, closes
    why = f"the link to the leader of replica {lost.peer} broke {lost.detail}".rstrip()
    state, effects = _request(state, why, (lost.peer,))
    return state, (*closes, *effects)


def on_expired(state: ReplicaState, expired: WaitExpired) -> Step:
    """Request a newer generation, unless the wait is over; `Entered` later names the missing."""
    missing = waiting_for(state)
    if not missing or (expired.generation, expired.step) != (state.generation, state.step):
        return state, ()
    what = "status" if state.phase is ReplicaPhase.EXCHANGING else "vote"
    return _request(state, f"no {what} came from replica {', '.join(map(str, missing))}", ())


def _request(state: ReplicaState, reason: str, suspects: tuple[ReplicaId, ...], *, stalled: bool = False) -> Step:
    """Request a newer generation, at most once in a generation."""
    if state.blocked:
        return state, ()
    request = ReplicaBlocked(state.replica, state.generation, reason, suspects, stalled)
    return replace(state, blocked=True), (ToCoordinator(request),)


def on_failing(state: ReplicaState, report: RankFailing) -> Step:
    """Report a rank's exception to the coordinator, with the microbatches at fault, if any."""
    return state, (ToCoordinator(ReplicaFailing(state.replica, report.label, report.microbatches, report.error)),)


def on_saving(state: ReplicaState, report: RankSaving) -> Step:
    """Report the beginning or end of this replica's save to the coordinator."""
    return state, (ToCoordinator(ReplicaSaving(state.replica, report.over)),)


def on_finished(state: ReplicaState, report: RankFinished) -> Step:
    """Report `ReplicaFinished` once the last rank has ended its training loop; keep answering."""
    if report.rank in state.ended:
        return state, ()
    state = replace(state, ended=tuple(sorted((*state.ended, report.rank))))
    # All ranks, not the leader alone: the job must not end before each has applied the last step.
    if len(state.ended) < state.shape.num_ranks:
        return state, ()
    requests = state.committed.requests if state.committed is not None else ()
    finished = ReplicaFinished(state.replica, exit_code(requests), SAVED in requests, untrained(requests))
    state, stop = _ends_alone(state)
    return state, (ToCoordinator(finished), *stop)


def on_coordinator_lost(state: ReplicaState, lost: CoordinatorLost) -> Step:
    """Say so in the next vote. If training is over already, end now: no `Stop` will come.

    A hold ends, since no newcomer will join.
    """
    state, closes = (state, ()) if lost.is_over else ended(state)
    state, effects = _ends_alone(replace(state, is_alone=not lost.is_over))
    return state, (*closes, *effects)


def _ends_alone(state: ReplicaState) -> Step:
    """Order the ranks to stop if they all have ended their training and there is no coordinator."""
    if not state.is_alone or len(state.ended) < state.shape.num_ranks:
        return state, ()
    code = exit_code(state.committed.requests if state.committed is not None else ())
    return on_stop(state, Stop(code, "training is over, and there is no coordinator"))


def on_stop(state: ReplicaState, stop: Stop) -> Step:
    """Order the ranks to stop, and ignore every later input."""
    return replace(state, phase=ReplicaPhase.STOPPED, hold=None, close_waits=False), (ToRanks(stop),)
