"""Decides which newcomers enter the roster: nobody waits for one, and no member takes its word.

A *newcomer* is a replica that is formed while the others train, under an id that was never used. It
is *unproven* from the announcement of its first generation until a step is committed with its own
vote. The *older members* of a generation are those that are not unproven. All functions are pure.

Note [Joining]
    1. The newcomer reads the state with which a training step begins, from live members, while they
       compute that step. Each of its ranks digests what it has read (`StateDigested`). Its leader
       combines the digests to a `Claim`, which names the step by its label.
    2. The leader sends the claim to a member. That member vouches for it (`NewcomerReady`) only
       while its own replica computes the step of the claim, and only if its own digest of that
       state is equal. Otherwise it refuses (`JoinRefused`), and the newcomer reads a later state.
       Until the next generation it keeps its pass open (`core/holding.py`, Note [Hold]).
    3. The coordinator makes a generation with all newcomers for which a member has vouched
       (`NewGeneration.joins`), if nothing speaks against it (`why_not_now`). A join begins in a
       later step than the join before; after a newcomer was removed, several steps later.
    4. Only the older members exchange statuses. They all make the same plan, which admits a
       newcomer or turns it away (`judged`). A newcomer is admitted only if its claim is about the
       step of the plan, some member has begun that step, and nobody holds a result of it. At least
       one older member has to give its digest, and all that are given must equal the claim's. The
       older member with the lowest id sends the plan to each newcomer that it admits (`Admission`).
    5. The **working roster** is the announced one without the newcomers that were turned away.
       Votes, sums and plans use it. The coordinator learns it from `TurnedAway`, without a
       generation.
    6. In its first step the newcomer has the quota 0. It takes part in the sums with nothing, and
       votes. Then it is proven (`NewcomersProven`).

    Until then the claim stands in for its status. Each newer generation repeats the claim and
    judges it anew: what the newcomer holds, and whether it has committed, counts for nothing. If
    older members disagree with it, it is the minority, and it is part of no majority. A member that
    waits in vain gets a generation without the unproven ones, which are fenced: the wait is no
    evidence against a member. A newcomer that was admitted once and is then turned away ends, since
    its training has begun. One that was never admitted may try again.

    If no older member is left, each newcomer that was admitted in the generation just before sends
    its own status, and they go on as members: nobody can have committed anything without them. Any
    other newcomer cannot go on, and reports that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_recover.core.digest import combined
from megatron_recover.core.label import label_of
from megatron_recover.core.membership_messages import JoinRefused
from megatron_recover.core.replica_state import ReplicaPhase, ReplicaState
from megatron_recover.core.request import RequestKind, details
from megatron_recover.core.values import Claim, Generation, ReplicaId, Status, Value, Work

MAX_SOURCES = 8
"""Members from which a newcomer reads state at most."""


class Admissions(Value, frozen=True):
    """The judgement of the claims of a generation."""

    admitted: tuple[ReplicaId, ...] = ()
    turned_away: tuple[ReplicaId, ...] = ()
    """Both ascending."""
    reason: str = ""
    """The reason for each newcomer that is turned away; empty if none is."""


def judged(claims: Sequence[Claim], statuses: Sequence[Status], work: Work | None) -> Admissions:
    """Return which newcomers a common plan admits (Note [Joining], 4).

    `statuses` are those of all older members that are at the plan's step, of which `work` is the
    work; None if nobody has begun the step.
    """
    admitted: list[ReplicaId] = []
    reasons: dict[ReplicaId, str] = {}
    known = {status.state_digest for status in statuses if status.state_digest is not None}
    for claim in claims:
        if work is None or work.label != claim.label:
            why = f"the step is {work.label if work is not None else 'not begun'}, not {claim.label}"
        elif any(status.complete for status in statuses):
            why = f"{claim.label} is reduced already"
        elif not known:
            why = f"no member that is left has a digest of the state with which {claim.label} begins"
        elif known != {claim.digest}:
            why = f"its state digest is {claim.digest}, that of members {sorted(known)}"
        else:
            admitted.append(claim.replica)
            continue
        reasons[claim.replica] = why
    told = reasons.values() if len(reasons) == 1 else (f"replica {replica}: {why}" for replica, why in reasons.items())
    return Admissions(tuple(admitted), tuple(reasons), "; ".join(told))


def older(roster: Sequence[ReplicaId], joins: Collection[Claim]) -> tuple[ReplicaId, ...]:
    """Return the older members of a roster, or all of it if nobody is an older member."""
    if not joins:
        return tuple(roster)
    newcomers = {claim.replica for claim in joins}
    return tuple(replica for replica in roster if replica not in newcomers) or tuple(roster)


def unproven(state: ReplicaState) -> tuple[ReplicaId, ...]:
    """Return the newcomers of the state's roster that are unproven; none without older members."""
    if not state.joins:  # the usual case, asked for with each vote
        return ()
    members = frozenset(older(state.roster, state.joins))
    return tuple(replica for replica in state.roster if replica not in members)


def talkers(state: ReplicaState) -> tuple[ReplicaId, ...]:
    """Return those that exchange messages now: for statuses the older members, else the roster."""
    exchanges = state.phase in (ReplicaPhase.PROMISING, ReplicaPhase.EXCHANGING)
    return older(state.roster, state.joins) if exchanges else state.roster


def state_digest(state: ReplicaState) -> int | None:
    """Return the digest of the state that the step begins with; None if it is not known."""
    if state.work is None:
        return None
    for label, digests in ((state.work.label, state.digests), (state.served_label, state.served)):
        if label == state.work.label and len(digests) == state.shape.num_ranks:
            return combined([of_rank for _, of_rank in digests])
    return None


def refused(claim: Claim, reason: str, generation: Generation = 0, *, is_fault: bool = False) -> JoinRefused:
    """Return the answer to a claim that does not join; the rest is as in `JoinRefused`."""
    return JoinRefused(claim.replica, claim.label, reason, generation, is_fault)


def refusal(state: ReplicaState, claim: Claim) -> JoinRefused | None:
    """Return the answer of a member that does not vouch for a claim; None if it does."""
    if state.work is None or state.phase is not ReplicaPhase.WORKING or state.work.label != claim.label:
        return refused(claim, f"replica {state.replica} does not compute {claim.label}", is_fault=True)
    if not label_of(claim.label).is_training:
        return refused(claim, f"{claim.label} is no training step")
    if state.joins or state.is_alone or state.blocked:
        return refused(claim, f"replica {state.replica} is in no position to vouch for a newcomer")
    if state.is_closed:
        return refused(claim, f"it is too late in {claim.label}", is_fault=True)
    if details(state.requests, RequestKind.EXIT):
        return refused(claim, "the job is about to end")
    digest = state_digest(state)
    if digest is None:
        return refused(claim, f"replica {state.replica} does not know its digest of the state with which {claim.label} begins")
    if digest != claim.digest:
        return refused(claim, f"the digest of replica {state.replica} for {claim.label} is {digest}", is_fault=True)
    return None
