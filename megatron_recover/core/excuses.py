"""Decides which waits are evidence while no step is committed, and what excuses members.

Pure functions of the coordinator's state. The rules are in `core/lateness.py`,
Note [Waiting for one at work]. `core/blame.py` decides who is at fault.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.blame import Evidence, own_deadlines, with_report
from megatron_recover.core.coordinator_state import Arm, CoordinatorState, Effect, Waits
from megatron_recover.core.joining import older
from megatron_recover.core.values import ReplicaId

AT_WORK = "it reads data, compiles or computes, which excuses all waits until a step is committed"
"""The reason of `Waits`: why the job waits for a member that is excused."""


def are_waits_excused(state: CoordinatorState) -> bool:
    """Return whether waits are no evidence now: a member saves or works within its time."""
    return bool(state.saves) or bool(working(state))


def working(state: CoordinatorState) -> tuple[ReplicaId, ...]:
    """Return the members that are at work; none while `is_excuse_over`.

    The work of an unproven newcomer excuses nobody (`core/joining.py`).
    """
    members = older(state.roster, state.joins)
    return () if state.is_excuse_over else tuple(replica for replica in state.at_work if replica in members)


def excuse(state: CoordinatorState, members: tuple[ReplicaId, ...]) -> tuple[CoordinatorState, tuple[Effect, ...]]:
    """Excuse `members`, which are at work: start their time and announce each, once; drop evidence.

    A member's own missed deadline stays evidence: the work of others does not explain it. Without
    such evidence the timers of judging are forgotten, too.
    """
    new = tuple(replica for replica in members if replica not in state.excused_for)
    effects: tuple[Effect, ...] = (Waits(new, AT_WORK, "deadline_s"),) if new else ()
    if not state.excuse:
        effects += (Arm(f"excuse {state.generation}", "deadline_s"),)
    own = own_deadlines(state.evidence)
    state = replace(state, evidence=own, waits=()) if own.overdue else without_evidence(state)
    return replace(
        state,
        excuse=state.excuse or f"excuse {state.generation}",
        excused_for=(*state.excused_for, *new),
        evidence_from=state.generation,  # late reports are about waits for these members, too
    ), effects


def without_evidence(state: CoordinatorState) -> CoordinatorState:
    """Return the state without evidence, and with the timers of judging not yet started."""
    return replace(state, evidence=Evidence(), waits=(), trouble="", patience=0, undecided="")


def after_progress(state: CoordinatorState) -> CoordinatorState:
    """Return the state after a committed step or a loss: no evidence, no retries, a new `excuse`.

    Members that are still at work can be excused and announced again.
    """
    return replace(without_evidence(state), fruitless=0, excuse="", excused_for=(), is_excuse_over=False)


def with_waits(state: CoordinatorState) -> CoordinatorState:
    """Return the state with the waits of the previous generation moved to the evidence."""
    evidence = state.evidence
    for accuser, generation, for_votes, accused in state.waits:
        evidence = with_report(evidence, accuser, accused, generation, for_votes=for_votes)
    return replace(state, evidence=evidence, waits=())


def at_work_for_too_long(state: CoordinatorState) -> ReplicaId | None:
    """Return the member at work that others accuse after the timer `excuse` ran out, or None.

    Of several, return the one with the highest id.
    """
    accused = {accused for _, accused in state.evidence.pairs}
    return max(accused & set(state.at_work) & set(state.roster), default=None) if state.is_excuse_over else None
