"""The coordinator's side of joining: forms newcomers, announces them, and removes the unproven.

These are handlers of the machine of membership (`core/coordinator.py`). `core/joining.py` has the
rules, and the side of the replicas.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from megatron_recover.core import generations, leaving
from megatron_recover.core.alike import described, differences
from megatron_recover.core.blame import without_reports
from megatron_recover.core.coordinator_state import Arm, CoordinatorState, Form, FormAsked, Refuse, RoomKnown
from megatron_recover.core.excuses import without_evidence
from megatron_recover.core.generations import Step
from megatron_recover.core.joining import refused
from megatron_recover.core.membership_messages import (
    Hello,
    Loss,
    LossKind,
    NewcomerReady,
    NewcomersProven,
    TurnedAway,
)
from megatron_recover.core.request import RequestKind, details
from megatron_recover.core.values import ReplicaId
from megatron_recover.core.wording import named, verb


def on_form_asked(state: CoordinatorState, asked: FormAsked) -> Step:
    """Give each newcomer an id that was never used. There are none before generation 1."""
    if not state.generation or asked.num_newcomers < 1:
        return state, ()
    first = state.policy.num_replicas + state.num_newcomers
    ids = tuple(range(first, first + asked.num_newcomers))
    state = replace(state, num_newcomers=state.num_newcomers + asked.num_newcomers, forming=(*state.forming, *ids))
    return state, tuple(Form(replica) for replica in ids)


def on_room_known(state: CoordinatorState, known: RoomKnown) -> Step:
    """Note whether newcomers can be formed. Too few members no longer wait once none can be."""
    return generations.end_wait_for_newcomers(state, replace(state, has_room=known.has_room))


def on_hello(state: CoordinatorState, hello: Hello) -> Step:
    """Record a newcomer that is formed. Remove one that does not start like the members."""
    if hello.replica not in state.forming or hello.replica in {item.replica for item in state.hellos}:
        return state, ()
    first = state.hellos[0]
    if hello.fingerprint != first.fingerprint:
        found = differences(first.parts, hello.parts) or [("the fingerprint", first.fingerprint, hello.fingerprint)]
        detail = f"does not start like replica {first.replica}: {described(first.replica, hello.replica, found)}"
        return generations.remove(state, (Loss(hello.replica, LossKind.ENDED_EARLY, detail),), detail)
    return replace(state, hellos=tuple(sorted((*state.hellos, hello), key=lambda item: item.replica))), ()


def on_ready(state: CoordinatorState, told: NewcomerReady) -> Step:
    """Keep a claim for which a member vouches until `gather` runs out; refuse it if it cannot join.

    The report of a generation that is over counts for nothing, and its newcomer is refused, too.
    """
    claim = told.claim
    if claim.replica not in state.forming or claim.replica in {each.claim.replica for each in state.ready}:
        return state, ()
    if why := why_not_now(state, told):
        return state, (Refuse(refused(claim, why), told.replica),)
    armed = () if state.ready else (Arm(f"gather {state.generation}", "gather_s"),)
    ready = tuple(sorted((*state.ready, told), key=lambda each: each.claim.replica))
    # One try a step: between two joins a step is committed.
    return replace(state, ready=ready, joins_from=max(state.joins_from, told.step + 1)), armed


def why_not_now(state: CoordinatorState, ready: NewcomerReady) -> str:
    """Return why no generation with a newcomer is made now; empty if one may be made."""
    if ready.generation != state.generation or ready.replica not in generations.members(state):
        return f"generation {ready.generation} is over, or replica {ready.replica} is no member of it"
    if state.joins:
        return "other newcomers are in their first step"
    if not state.ready and ready.step < state.joins_from:
        return f"the next join may begin in step {state.joins_from}, and this is step {ready.step}"
    if any(each.claim.label != ready.claim.label for each in state.ready):
        return "a newcomer for another step is about to join"
    if state.saves or state.finished:
        return "a save is in progress" if state.saves else "training ends"
    if state.reason or state.trouble or state.fruitless or state.evidence.pairs:
        return "the members have trouble in this step"
    leavers = leaving.leavers(state.requests, state.roster, state.policy.min_replicas)
    if details(state.requests, RequestKind.EXIT) or leavers:
        return "the job, or a member, was asked to end"
    return ""


def gathered(state: CoordinatorState) -> Step:
    """Make a generation with all newcomers that are ready. Nothing else may have happened since."""
    if state.saves or state.finished or state.reason:
        return generations.refuse_ready(state, "a save, the end, or a request came in between")
    claims = tuple(each.claim for each in state.ready)
    newcomers = {claim.replica for claim in claims}
    state = replace(
        state,
        roster=tuple(sorted({*state.roster, *newcomers})),
        forming=tuple(replica for replica in state.forming if replica not in newcomers),
        joins=claims,
        ready=(),
    )
    what = f"{named(sorted(newcomers))} {verb(len(newcomers), 'is', 'are')} to join"
    return generations.announce(state, (), what)


def on_turned_away(state: CoordinatorState, told: TurnedAway) -> Step:
    """Drop newcomers that the common plan has not admitted, without a generation.

    One that reports itself cannot enter the generation: then it is lost, and the others get one
    without it.
    """
    out = {*told.newcomers} & {claim.replica for claim in state.joins}
    if told.generation != state.generation or not out:
        return state, ()
    if out == {told.replica}:
        return generations.remove(state, (Loss(told.replica, LossKind.SUSPECTED, told.reason),), told.reason)
    if told.replica not in generations.members(state):
        return state, ()
    claims = tuple(claim for claim in state.joins if claim.replica in out)
    state = replace(
        generations.without(_unheard(state, out), out),
        forming=tuple(sorted({*state.forming, *out})),
        entered=tuple(replica for replica in state.entered if replica not in out),
    )
    if {item.replica for item in state.finished} >= set(state.roster):
        return generations.finish(state)
    return state, tuple(Refuse(refused(claim, told.reason, told.generation, is_fault=True)) for claim in claims)


def _unheard(state: CoordinatorState, out: Collection[ReplicaId]) -> CoordinatorState:
    """Return the state without what newcomers have reported since they were announced.

    Members end their links to those that they do not admit, which these report as a failure.
    """
    waits = tuple(each for each in state.waits if each.accuser not in out)
    state = replace(state, evidence=without_reports(state.evidence, out), waits=waits)
    if state.reason_by not in out:
        return state
    return replace(state, reason="", reason_by=-1, reason_excused_by=())


def on_proven(state: CoordinatorState, told: NewcomersProven) -> Step:
    """Take newcomers with whose votes a step was committed for members like any other."""
    if told.generation != state.generation or told.replica not in state.roster:
        return state, ()
    proven = {*told.newcomers} & {claim.replica for claim in state.joins}
    joins = tuple(claim for claim in state.joins if claim.replica not in proven)
    entered = tuple(sorted({*state.entered, *proven}))  # or they could not have voted in it
    after = replace(state, joins=joins, entered=entered, num_setbacks=state.num_setbacks if joins else 0)
    return generations.end_wait_for_newcomers(state, after)


def without_unproven(state: CoordinatorState) -> Step:
    """Make a generation without the unproven newcomers, for one of which members may wait in vain.

    They are fenced: they may have begun to train. The wait is no evidence against a member.
    """
    why = f"replica {state.joins[0].replica} was new, and the members did not get on: {state.reason}"
    losses = tuple(Loss(claim.replica, LossKind.SUSPECTED, why) for claim in state.joins)
    return generations.remove(replace(without_evidence(state), reason="", reason_by=-1), losses, why)
