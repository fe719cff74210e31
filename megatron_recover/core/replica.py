"""The machine of one replica, run by its leader: orders to its ranks, messages to other leaders.

`step(state, input) -> (state, effects)` is pure and deterministic, and accepts every input in every
phase. It ignores inputs that do not fit, so late, repeated and reordered messages do no harm. It
never blocks: `waiting_for(state)` names the members whose message it needs.

Caller's contract (docs/design/protocol.md has all of it)
--------------------------------------------------
* Feed every input. Carry out its effects in order before the next input.
* `ToRanks`: send to every rank of this replica, the leader's own included, over one FIFO link each.
* `ToPeers`: send to these leaders over FIFO links. When a link breaks, feed `LinkLost(peer)`, and
  never resend. Feed a status at once, even if its generation was not announced yet.
* `ToCoordinator`: send to the coordinator.
* Feed `WaitExpired(generation, step)` when `waiting_for(state)` was not empty for `stall_s` without
  a change of `state.phase`, `state.generation` or `state.step`. Messages do not extend that time.
* Feed `HoldExpired(label)` when `state.close_waits` has lasted for `hold_s`; `label` is
  `held_label(state)`.
* `Decided`, `Voted`, `Committed` and the messages themselves are the source of the trace.

Here is the table of the machine. Its handlers are in `replica_generation.py`, `replica_step.py` and
`replica_reports.py`, and those for newcomers in `admission.py` and `holding.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_recover.core.admission import on_claim, on_send_claim, on_state_digested
from megatron_recover.core.forwarding import waiting_for
from megatron_recover.core.holding import held_label, on_ask_hold, on_close_asked, on_hold_asked, on_hold_expired
from megatron_recover.core.membership_messages import AddRequests, JoinRefused, NewGeneration
from megatron_recover.core.rank_messages import (
    Begun,
    CloseAsked,
    Holds,
    PassTimed,
    Promised,
    RankBlocked,
    RankFailing,
    RankFinished,
    RankSaving,
    StateDigested,
    Stop,
)
from megatron_recover.core.replica_generation import on_admission, on_generation, on_join_refused, on_promised, on_status
from megatron_recover.core.replica_reports import (
    on_blocked,
    on_coordinator_lost,
    on_expired,
    on_failing,
    on_finished,
    on_link_lost,
    on_saving,
    on_stop,
)
from megatron_recover.core.replica_state import (
    Admission,
    AskHold,
    Committed,
    CoordinatorLost,
    Decided,
    Effect,
    HoldAsked,
    HoldExpired,
    Input,
    LinkLost,
    PeerMessage,
    ReplicaPhase,
    ReplicaState,
    SendClaim,
    Step,
    ToCoordinator,
    ToPeers,
    ToRanks,
    Voted,
    WaitExpired,
)
from megatron_recover.core.replica_step import on_add_requests, on_begun, on_holds, on_pass_timed, on_vote
from megatron_recover.core.values import Claim, Status, Statuses, Vote, Votes

__all__ = [
    "Admission", "AskHold", "Committed", "CoordinatorLost", "Decided", "Effect", "HoldAsked", "HoldExpired", "Input",
    "LinkLost", "PeerMessage", "ReplicaPhase", "ReplicaState", "SendClaim", "Step", "ToCoordinator", "ToPeers", "ToRanks",
    "Voted", "WaitExpired", "held_label", "step", "waiting_for",
]  # fmt: skip


def step(state: ReplicaState, message: Input) -> Step:
    """Apply one input. Ignore an input that `TABLE` does not list for the phase of the state.

    A defect raises ValueError or InvariantViolation.
    """
    row = TABLE[state.phase].get(type(message))
    if row is None:
        return state, ()
    after, effects = row.handler(state, message)
    if after.phase not in row.leads_to:
        raise ValueError(f"{state.phase} leads to {after.phase} on {type(message).__name__}, which the table does not list")
    return after, effects


# --- The table ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The handler of one input in one phase, and the phases that it may lead to."""

    handler: Callable[[ReplicaState, Any], Step]
    leads_to: frozenset[ReplicaPhase]
    """Phases that the state may be in afterwards."""


_Answer = tuple[type, Callable[[ReplicaState, Any], Step], tuple[ReplicaPhase, ...]]
"""An input type, its handler, and the phases that it may lead to besides the present one."""


def _statuses(leads_to: tuple[ReplicaPhase, ...] = ()) -> tuple[_Answer, ...]:
    return (Status, on_status, leads_to), (Statuses, on_status, leads_to)


def _votes(leads_to: tuple[ReplicaPhase, ...] = ()) -> tuple[_Answer, ...]:
    return (Vote, on_vote, leads_to), (Votes, on_vote, leads_to)


def _rows(phase: ReplicaPhase, *extra: _Answer) -> dict[type, Row]:
    """Return the rows of a phase: the inputs that every phase but STOPPED answers, and `extra`."""
    rows: dict[type, Row] = {
        NewGeneration: Row(on_generation, frozenset({phase, ReplicaPhase.PROMISING})),
        Begun: Row(on_begun, frozenset({phase})),
        CloseAsked: Row(on_close_asked, frozenset({phase})),
        PassTimed: Row(on_pass_timed, frozenset({phase})),
        RankFailing: Row(on_failing, frozenset({phase})),
        RankSaving: Row(on_saving, frozenset({phase})),
        RankBlocked: Row(on_blocked, frozenset({phase})),
        RankFinished: Row(on_finished, frozenset({phase, ReplicaPhase.STOPPED})),
        AddRequests: Row(on_add_requests, frozenset({phase})),
        StateDigested: Row(on_state_digested, frozenset({phase})),
        Claim: Row(on_claim, frozenset({phase})),
        Admission: Row(on_admission, frozenset({phase})),
        JoinRefused: Row(on_join_refused, frozenset({phase, ReplicaPhase.JOINING, ReplicaPhase.STOPPED})),
        CoordinatorLost: Row(on_coordinator_lost, frozenset({phase, ReplicaPhase.STOPPED})),
        Stop: Row(on_stop, frozenset({ReplicaPhase.STOPPED})),
    }
    for kind, handler, leads_to in extra:
        rows[kind] = Row(handler, frozenset({phase, *leads_to}))
    return rows


# One input can lead through several phases: with the last status a replica may plan and vote, and
# one whose vote is the last commits at once.
_AFTER_EXCHANGE = (ReplicaPhase.IDLE, ReplicaPhase.WORKING, ReplicaPhase.VOTED)

TABLE: Mapping[ReplicaPhase, Mapping[type, Row]] = {
    ReplicaPhase.JOINING: _rows(
        ReplicaPhase.JOINING,
        *_statuses(),
        (SendClaim, on_send_claim, ()),
        (AskHold, on_ask_hold, ()),
    ),
    ReplicaPhase.PROMISING: _rows(
        ReplicaPhase.PROMISING,
        *_statuses(),
        (Holds, on_holds, ()),
        (Promised, on_promised, (ReplicaPhase.EXCHANGING, *_AFTER_EXCHANGE)),
        (LinkLost, on_link_lost, ()),
    ),
    ReplicaPhase.EXCHANGING: _rows(
        ReplicaPhase.EXCHANGING,
        *_statuses(_AFTER_EXCHANGE),
        (Admission, on_admission, _AFTER_EXCHANGE),
        *_votes(),
        (LinkLost, on_link_lost, ()),
        (WaitExpired, on_expired, ()),
    ),
    ReplicaPhase.IDLE: _rows(
        ReplicaPhase.IDLE,
        *_statuses(),
        (Begun, on_begun, (ReplicaPhase.WORKING,)),
        (HoldAsked, on_hold_asked, ()),
        *_votes(),
        (LinkLost, on_link_lost, ()),
    ),
    ReplicaPhase.WORKING: _rows(
        ReplicaPhase.WORKING,
        *_statuses(),
        (Begun, on_begun, (ReplicaPhase.VOTED, ReplicaPhase.IDLE)),
        (Holds, on_holds, (ReplicaPhase.VOTED, ReplicaPhase.IDLE)),
        (HoldAsked, on_hold_asked, ()),
        (HoldExpired, on_hold_expired, ()),
        *_votes(),
        (LinkLost, on_link_lost, ()),
    ),
    ReplicaPhase.VOTED: _rows(
        ReplicaPhase.VOTED,
        *_statuses(),
        (HoldAsked, on_hold_asked, ()),
        *_votes((ReplicaPhase.IDLE,)),
        (LinkLost, on_link_lost, ()),
        (WaitExpired, on_expired, ()),
    ),
    ReplicaPhase.STOPPED: {},
}
