"""What is held against members while no step is committed, and what excuses them: pure functions of the coordinator's state.

`core/coordinator.py` asks them; its Note [Waiting for one at work] has the rules, and `core/blame.py` says who is at fault.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.blame import Evidence, heard, own_deadlines
from megatron_recover.core.coordinator_state import Arm, CoordinatorState, Effect, Waits
from megatron_recover.core.values import ReplicaId

AT_WORK = "it reads data, compiles or computes, and no wait for it is held against anybody until a step is committed"
"""Why the job waits for a member that is excused, in words."""


def are_waits_excused(state: CoordinatorState) -> bool:
    """Return whether waits are held against nobody now: a member saves, or is at work, and has the time for it."""
    return bool(state.saves) or bool(working(state))


def working(state: CoordinatorState) -> tuple[ReplicaId, ...]:
    """Return the members that are at work, as long as that excuses anybody."""
    return () if state.is_excuse_over else tuple(replica for replica in state.at_work if replica in state.roster)


def excuse(state: CoordinatorState, members: tuple[ReplicaId, ...]) -> tuple[CoordinatorState, tuple[Effect, ...]]:
    """Give those that are at work their time, once, and say so of each; forget what was held against anybody meanwhile.

    What a member has missed of its own is not forgotten: it has nothing to do with the work of others.
    """
    new = tuple(replica for replica in members if replica not in state.excused_for)
    effects: tuple[Effect, ...] = (Waits(new, AT_WORK, "deadline_s"),) if new else ()
    if not state.excuse:
        effects += (Arm(f"excuse {state.generation}", "deadline_s"),)
    own = own_deadlines(state.evidence)
    state = replace(state, evidence=own, waits=()) if own.pairs else without_evidence(state)
    return replace(
        state,
        excuse=state.excuse or f"excuse {state.generation}",
        excused_for=(*state.excused_for, *new),
        evidence_from=state.generation,  # who reports late has waited for them as well
    ), effects


def without_evidence(state: CoordinatorState) -> CoordinatorState:
    """Forget what was held against members, and for how long it was waited for something to come of it."""
    return replace(state, evidence=Evidence(), waits=(), trouble="", patience=0, undecided="")


def fruitful(state: CoordinatorState) -> CoordinatorState:
    """A step was committed or a replica lost: what is tried from now on is tried for the first time."""
    return replace(without_evidence(state), fruitless=0, excuse="", excused_for=(), is_excuse_over=False)


def with_waits(state: CoordinatorState) -> CoordinatorState:
    """Add whom members waited for to the evidence."""
    evidence = state.evidence
    for replica, awaited in state.waits:
        evidence = heard(evidence, replica, awaited)
    return replace(state, evidence=evidence, waits=())


def at_work_for_too_long(state: CoordinatorState) -> ReplicaId | None:
    """Return a member that others wait for and that is at work though the time for that is over: of several the highest id."""
    accused = {accused for _, accused in state.evidence.pairs}
    return max(accused & set(state.at_work) & set(state.roster), default=None) if state.is_excuse_over else None
