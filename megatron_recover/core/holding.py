"""A member keeps its pass open for a newcomer, for a bounded time, so that short steps admit one.

These are parts of the machine of one replica (`core/replica.py`). All functions are pure.

Note [Hold]
    A plan admits a newcomer only if nobody holds a result of the step (`core/joining.py`). Between
    the claim and the announcement of the generation that admits it, messages take their time, and
    the coordinator gathers further claims. A short step is reduced meanwhile, so that newcomers
    would never get in.

    - So a member that vouches keeps the *end of its pass* back: it does not order `Close`, although
      rank 0 asks for it. Each sum needs the gradient of every member. So one member that holds is
      enough: nobody has a result, and nobody votes. To keep only its vote back would not help: the
      sums of the step would be over, and the plan would turn the newcomer away.
    - A newcomer on its last try asks for a hold ahead (`HoldAsked`): of the next training step,
      before that begins. So the window in which it reads the state stays open, too. With a quota of
      1 the end of the pass is asked for as the pass begins. There only such a hold is early enough.
    - A hold needs an open pass: in phase WORKING, with microbatches of the step dealt to this
      member, and before `Close`. After `Close` the sums may be over at any time, so a hold would
      only cost time.
    - A hold ends with a newer generation, with `HoldExpired`, once no newcomer needs it (the claim
      is refused, or the link to the newcomer broke), and if the coordinator is lost. `Close` then
      follows at once, if it is due; after `Promise`, if a generation ends the hold, so that no sum
      of the older generation begins.
    - A step is held once, and the time counts from the moment at which `Close` would have been
      ordered. So the others wait for `hold_s` at most, which is shorter than any wait
      that leads to blame or to a request.

    To the rest of the job a hold is a pass that lasts longer. So no rule of safety depends on it.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.label import label_of
from megatron_recover.core.rank_messages import Close, CloseAsked
from megatron_recover.core.replica_state import (
    AskHold,
    Hold,
    HoldAsked,
    HoldExpired,
    ReplicaPhase,
    ReplicaState,
    Step,
    ToPeers,
    ToRanks,
)
from megatron_recover.core.request import RequestKind, details
from megatron_recover.core.values import ReplicaId


def held_label(state: ReplicaState) -> str:
    """Return the label of the step whose pass this member keeps open now; empty: none."""
    is_now = state.hold is not None and state.work is not None and state.hold.label == state.work.label
    return state.hold.label if is_now and state.hold is not None else ""


def held_for(state: ReplicaState, newcomer: ReplicaId, label: str, *, is_asked: bool) -> ReplicaState:
    """Return the state with a hold of the step `label` for a newcomer, if one may begin or stands.

    A hold that stands is not extended. A step that has not begun can be held only if that was
    asked.
    """
    if state.hold is not None:
        if state.hold.label != label:
            return state
        newcomers = tuple(sorted({*state.hold.newcomers, newcomer}))
        return replace(state, hold=replace(state.hold, newcomers=newcomers))
    is_running = state.work is not None and state.work.label == label
    if not (_may_hold(state) if is_running else is_asked and not state.is_alone and label_of(label).is_training):
        return state
    return replace(state, hold=Hold(label, state.generation, (newcomer,), is_asked))


def _may_hold(state: ReplicaState) -> bool:
    """Return whether the pass of the step that has begun is open, and nothing speaks against it."""
    is_open = state.phase is ReplicaPhase.WORKING and bool(state.contributions) and not state.is_closed
    is_hindered = state.joins or state.is_alone or state.blocked or details(state.requests, RequestKind.EXIT)
    return is_open and not state.was_held and not is_hindered


def at_start(state: ReplicaState) -> ReplicaState:
    """Return the state of a member that begins a step: an asked hold begins, or is dropped.

    It is dropped by a training step that it does not name, or that this member cannot hold.
    """
    if state.hold is None or state.work is None or not label_of(state.work.label).is_training:
        return state
    return state if held_label(state) and _may_hold(state) else replace(state, hold=None)


def ended(state: ReplicaState) -> Step:
    """End the hold, and order `Close` if it is due."""
    if state.hold is None:
        return state, ()
    order = (ToRanks(Close(state.step)),) if state.close_waits else ()
    state = replace(
        state, hold=None, close_waits=False, was_held=state.was_held or bool(held_label(state)),
        is_closed=state.is_closed or state.close_waits,
    )  # fmt: skip
    return state, order


def released(state: ReplicaState, newcomer: ReplicaId, label: str = "") -> Step:
    """End the hold if this newcomer was the last that needs it; `label`: of its claim, if any."""
    if state.hold is None or newcomer not in state.hold.newcomers or label not in ("", state.hold.label):
        return state, ()
    over = tuple(sorted({*state.hold.released, newcomer}))
    return ended(state) if over == state.hold.newcomers else (replace(state, hold=replace(state.hold, released=over)), ())


def on_close_asked(state: ReplicaState, report: CloseAsked) -> Step:
    """Order `Close`, so that the pass ends at the same place in the orders of all ranks.

    While the pass is held, keep it back.
    """
    if report.step != state.step:
        return state, ()
    if held_label(state):
        return replace(state, close_waits=True), ()
    return replace(state, is_closed=True), (ToRanks(Close(state.step)),)


def on_hold_asked(state: ReplicaState, asked: HoldAsked) -> Step:
    """Hold the step that a newcomer names, if that is possible; no answer follows."""
    return held_for(state, asked.replica, asked.label, is_asked=True), ()


def on_hold_expired(state: ReplicaState, expired: HoldExpired) -> Step:
    """End the hold that keeps `Close` back since `hold_s`, unless another one stands by now."""
    return ended(state) if expired.label == held_label(state) else (state, ())


def on_ask_hold(state: ReplicaState, order: AskHold) -> Step:
    """Ask a member to hold the step whose state this newcomer is about to read."""
    return state, (ToPeers((order.member,), HoldAsked(state.replica, order.label)),)
