"""The entrance of a replica into a generation: promise, statuses, the common plan, admission.

These are parts of the machine of one replica (`core/replica.py`). All functions are pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.admission import admissions, commitment_of, entered_training, with_working_roster
from megatron_recover.core.bucket import by_version
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.forwarding import direct_peers, forwarded, heard_from, newest_of_each, waiting_for
from megatron_recover.core.holding import ended, released
from megatron_recover.core.joining import state_digest, unproven
from megatron_recover.core.membership_messages import Entered, JoinRefused, NewGeneration, TurnedAway
from megatron_recover.core.own_record import adopted, held_complete
from megatron_recover.core.plan import plan_of
from megatron_recover.core.rank_messages import EnterTraining, Promise, Promised, Stop
from megatron_recover.core.recovery import recover
from megatron_recover.core.replica_reports import diverged, on_stop
from megatron_recover.core.replica_state import (
    Admission,
    Decided,
    ReplicaPhase,
    ReplicaState,
    Step,
    ToCoordinator,
    ToPeers,
    ToRanks,
)
from megatron_recover.core.replica_step import commit, start
from megatron_recover.core.values import Journal, ReplicaId, Status, Statuses
from megatron_recover.core.vote import Disagreement, unite


def on_generation(state: ReplicaState, new: NewGeneration) -> Step:
    """Leave the older generation for good, and order the ranks to promise the new one.

    Ignore the new one if a vote of this replica has said that it has no coordinator. A newcomer
    does not enter one with a claim that it has given up, and reports that.
    """
    if new.generation <= state.generation or state.replica not in new.roster or state.is_last:
        return state, ()
    claims = tuple(claim for claim in new.joins if claim.replica == state.replica)
    if state.phase is ReplicaPhase.JOINING and claims and state.claim not in claims:
        why = f"replica {state.replica} has given up the state that it had read for this"
        told = TurnedAway(state.replica, new.generation, (state.replica,), why)
        return replace(state, generation=new.generation), (ToCoordinator(told),)
    begun = state.work is not None
    state, closes = ended(state)
    entered = replace(
        state,
        phase=ReplicaPhase.PROMISING,
        waited_for=waiting_for(state) or state.waited_for,
        generation=new.generation,
        roster=new.roster,
        joins=new.joins,
        requests=unite((state.requests, new.requests)),
        trusted_from=new.trusted_from,
        promised=(),
        # Without `work` no rank has the waiting plan, so nothing of it was computed or is held.
        plan=state.plan if begun else None,
        statuses=tuple(status for status in state.statuses if status.generation >= new.generation),
        votes=(),
        blocked=False,
    )
    entered = _voided(entered, new)
    return entered, (ToRanks(Promise(new.generation, new.roster)), *closes)


def _voided(state: ReplicaState, new: NewGeneration) -> ReplicaState:
    """Give up what this replica has of the step that `new.void` names, once for each `Void`.

    With `gives_up` also replace the work of the step.
    """
    if new.void is None or new.void == state.void:
        return state
    if state.work is None or new.void.step != state.step:
        return replace(state, void=new.void)
    work = state.work.given_up() if new.void.gives_up else state.work
    return replace(state, void=new.void, must_void=True, work=work, contributions=(), held=())


def on_promised(state: ReplicaState, report: Promised) -> Step:
    """Enter the generation once the last rank has promised: send `Entered` and the status."""
    if report.generation != state.generation or report.rank in state.promised:
        return state, ()
    state = replace(state, promised=tuple(sorted((*state.promised, report.rank))))
    if report.rank == 0 and state.work is not None:  # else it may be of the step before
        state = replace(state, journal=Journal() if state.must_void else report.journal)
    if len(state.promised) < state.shape.num_ranks:
        return state, ()
    # Not before: a rank that has not promised could still add an older result (INV-5).
    planned = state.plan is not None and state.plan.generation == state.generation - 1  # with the last status
    entered = Entered(state.replica, state.generation, state.step, state.waited_for, planned and bool(state.waited_for))
    state = replace(state, waited_for=())
    if state.replica in {claim.replica for claim in state.joins}:
        state, effects = _newcomer_promised(state)
    else:
        state, effects = _send_status(state)
    return state, (ToCoordinator(entered), *effects)


def _send_status(state: ReplicaState) -> Step:
    """Send this replica's status, and begin to wait for those of the others."""
    status = Status(
        state.replica,
        state.generation,
        state.step,
        state.work,
        state.contributions,
        by_version(held_complete(state)),
        commitment_of(state),
        state.journal,
        state_digest(state) if state.joins else None,
    )
    before = heard_from(state)
    state = replace(state, phase=ReplicaPhase.EXCHANGING, statuses=newest_of_each(state.statuses, (status,)))
    peers = direct_peers(state)
    state, effects = _exchange(state, before)
    return state, (ToPeers(peers, status), *effects)


def _newcomer_promised(state: ReplicaState) -> Step:
    """Wait for the admission; without older members go on like a member, or report otherwise."""
    if unproven(state):
        state = replace(state, phase=ReplicaPhase.EXCHANGING)
        return on_admission(state, state.admission) if state.admission is not None else (state, ())
    # In any other generation since, an older member may have gone on without this newcomer.
    if state.admitted_in and state.admitted_in == state.generation - 1:
        return _send_status(replace(state, admitted_in=state.generation))
    why = f"no member is left, and replica {state.replica} was not admitted in generation {state.generation - 1}"
    # It stays in this phase, in which it stores the statuses of others and never plans with them.
    return state, (ToCoordinator(TurnedAway(state.replica, state.generation, (state.replica,), why)),)


def on_status(state: ReplicaState, message: Status | Statuses) -> Step:
    """Keep the newest statuses; when EXCHANGING forward them in a tree, and plan with the last."""
    if message.generation < state.generation:
        return state, ()
    if message.generation == state.generation and state.phase not in (ReplicaPhase.PROMISING, ReplicaPhase.EXCHANGING):
        return state, ()
    before = heard_from(state)
    state = replace(
        state, statuses=newest_of_each(state.statuses, message.statuses if isinstance(message, Statuses) else (message,))
    )
    return _exchange(state, before) if state.phase is ReplicaPhase.EXCHANGING else (state, ())


def _exchange(state: ReplicaState, before: frozenset[ReplicaId]) -> Step:
    """Forward the statuses if a subtree is complete since `before`; plan once none is missing.

    A replica that is behind first adopts the record of its step. The plan waits in phase IDLE until
    the step has begun. If the statuses disagree, report that instead.
    """
    statuses = tuple(status for status in state.statuses if status.generation == state.generation)
    effects = forwarded(state, before, Statuses(state.replica, state.generation, statuses))
    if waiting_for(state):
        return state, effects
    recovery = recover(
        statuses, state.trusted_from, speeds=state.speeds, pipeline=state.shape.pipeline, min_replicas=state.min_replicas,
        claims=state.joins if unproven(state) else (),
    )  # fmt: skip
    if isinstance(recovery, Disagreement):
        return diverged(state, recovery, effects)
    state = replace(
        state, phase=ReplicaPhase.IDLE, statuses=tuple(s for s in state.statuses if s.generation > state.generation)
    )
    if recovery.step > state.step:
        if recovery.adopt is None:
            raise ValueError(f"step {state.step} is committed elsewhere without a record")
        state, more = commit(state, adopted(state, recovery.adopt), adopted=True)
        effects += more
    state, turned_away = with_working_roster(state, recovery)
    effects += turned_away
    if recovery.work is not None:
        decided = tuple((item.bucket, item.version, item.source) for item in recovery.decisions)
        effects += (Decided(recovery.step, state.generation, decided, recovery.dealt, recovery.reason),)
        state = replace(state, plan=plan_of(recovery, state.replica, state.generation, state.roster))
        effects += admissions(state, recovery)
    else:
        state = replace(state, plan=None)
    state, more = start(state)
    return state, effects + more


def on_admission(state: ReplicaState, admission: Admission) -> Step:
    """Enter training at the step of the plan. Nothing that this newcomer did before counts.

    Keep an admission that comes before all ranks have promised its generation.
    """
    plan = admission.plan
    if state.claim is None or state.replica not in plan.roster:
        return state, ()
    is_early = admission.generation > state.generation or state.phase is ReplicaPhase.PROMISING
    if is_early and admission.generation >= state.generation:
        return replace(state, admission=admission), ()
    is_meant = admission.generation == state.generation and state.replica in unproven(state)
    if not is_meant or state.phase is not ReplicaPhase.EXCHANGING:
        return state, ()
    if state.admitted_in and plan.step != state.step:
        raise ValueError(f"newcomer {state.replica} is admitted to step {plan.step}, and is at step {state.step}")
    state = entered_training(state, admission)
    state, effects = start(state)
    return state, (ToRanks(EnterTraining(plan.step)), *effects)


def on_join_refused(state: ReplicaState, refused: JoinRefused) -> Step:
    """Give the claim up, so that a later state is read; end if training has begun already.

    Once the claim is announced, only the coordinator refuses it. A member that has vouched for the
    claim holds its pass for it no longer.
    """
    if state.replica != refused.newcomer:
        return released(state, refused.newcomer, refused.label)
    if state.claim is None or (refused.newcomer, refused.label) != (state.replica, state.claim.label):
        return state, ()
    if refused.generation != (state.generation if state.phase is not ReplicaPhase.JOINING else 0):
        return state, ()
    if state.admitted_in:
        return on_stop(state, Stop(ExitCode.FAILED, f"this newcomer is turned away: {refused.reason}"))
    return replace(state, phase=ReplicaPhase.JOINING, claim=None, served=(), served_label="", roster=(), joins=()), ()
