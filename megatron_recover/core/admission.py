"""The replicas' part in a join: members vouch and admit, the newcomer claims and enters.

These are parts of the machine of one replica (`core/replica.py`). `core/joining.py` has the rules.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.digest import combined, commitment
from megatron_recover.core.holding import held_for, released
from megatron_recover.core.joining import older, refusal, unproven
from megatron_recover.core.membership_messages import NewcomerReady, TurnedAway
from megatron_recover.core.plan import plan_of
from megatron_recover.core.rank_messages import StateDigested
from megatron_recover.core.recovery import Recovery
from megatron_recover.core.replica_state import (
    Admission,
    Effect,
    ReplicaPhase,
    ReplicaState,
    SendClaim,
    Step,
    ToCoordinator,
    ToPeers,
)
from megatron_recover.core.values import Claim, Commitment
from megatron_recover.core.vote import unite


def on_state_digested(state: ReplicaState, report: StateDigested) -> Step:
    """Store the digest of a rank's state, and forget those of another step."""
    known = dict(state.served) if report.label == state.served_label else {}
    served = tuple(sorted((known | {report.rank: report.digest}).items()))
    return replace(state, served_label=report.label, served=served), ()


def on_send_claim(state: ReplicaState, order: SendClaim) -> Step:
    """Ask a member to vouch for what all ranks of this newcomer have read of one step."""
    if len(state.served) < state.shape.num_ranks:
        return state, ()
    claim = Claim(state.replica, state.served_label, combined([of_rank for _, of_rank in state.served]))
    return replace(state, claim=claim), (ToPeers((order.member,), claim),)


def on_claim(state: ReplicaState, claim: Claim) -> Step:
    """Vouch for a newcomer to the coordinator, and keep the pass open meanwhile; or refuse."""
    if (answer := refusal(state, claim)) is not None:
        state, effects = released(state, claim.replica, claim.label)
        return state, (ToPeers((claim.replica,), answer), *effects)
    state = held_for(state, claim.replica, claim.label, is_asked=False)
    return state, (ToCoordinator(NewcomerReady(state.replica, state.generation, state.step, claim)),)


def with_working_roster(state: ReplicaState, recovery: Recovery) -> Step:
    """Return the state with the working roster, and report which newcomers are not in it."""
    if not unproven(state):
        return state, ()
    out = recovery.admissions.turned_away
    state = replace(
        state,
        roster=tuple(member for member in state.roster if member not in out),
        joins=tuple(claim for claim in state.joins if claim.replica in recovery.admissions.admitted),
    )
    if not out:
        return state, ()
    return state, (ToCoordinator(TurnedAway(state.replica, state.generation, out, recovery.admissions.reason)),)


def admissions(state: ReplicaState, recovery: Recovery) -> tuple[Effect, ...]:
    """Return the messages with which the first of the older members admits newcomers."""
    if not unproven(state) or state.replica != older(state.roster, state.joins)[0]:
        return ()
    return tuple(
        ToPeers(
            (claim.replica,),
            Admission(
                state.replica,
                state.generation,
                plan_of(recovery, claim.replica, state.generation, state.roster),
                commitment_of(state),
                state.speeds,
            ),
        )
        for claim in state.joins
    )


def commitment_of(state: ReplicaState) -> Commitment | None:
    """Return the record of the step before as a status and an admission carry it."""
    if state.committed is None:
        return None
    return Commitment(state.committed, state.committed_digest) if state.committed_digest else commitment(state.committed)


def entered_training(state: ReplicaState, admission: Admission) -> ReplicaState:
    """Return the state of a newcomer at the step of the plan, with what all members know."""
    plan = admission.plan
    committed = admission.committed.record if admission.committed is not None else None
    return replace(
        state,
        phase=ReplicaPhase.IDLE,
        roster=plan.roster,
        joins=tuple(claim for claim in state.joins if claim.replica in plan.roster),
        step=plan.step,
        plan=plan,
        contributions=(),
        held=(),
        committed=committed,
        committed_digest=admission.committed.digest if admission.committed is not None else b"",
        requests=unite((state.requests, committed.requests if committed is not None else ())),
        speeds=admission.speeds,
        admitted_in=state.generation,
        admission=None,
    )
