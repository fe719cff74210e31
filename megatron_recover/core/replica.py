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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from megatron_recover.core.admission import (
    admissions,
    commitment_of,
    entered_training,
    on_claim,
    on_send_claim,
    on_state_digested,
    with_working_roster,
)
from megatron_recover.core.bucket import by_version
from megatron_recover.core.contribution import added
from megatron_recover.core.digest import differences, summarize
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.forwarding import direct_peers, forwarded, heard_from, newest_of_each, waiting_for
from megatron_recover.core.holding import (
    at_start,
    ended,
    held_label,
    on_ask_hold,
    on_close_asked,
    on_hold_asked,
    on_hold_expired,
    released,
)
from megatron_recover.core.joining import older, state_digest, talkers, unproven
from megatron_recover.core.leaving import leavers
from megatron_recover.core.membership_messages import (
    AddRequests,
    Diverged,
    Entered,
    JoinRefused,
    Miscounted,
    NewcomersProven,
    NewGeneration,
    ReplicaBlocked,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaLeaving,
    ReplicaSaving,
    TurnedAway,
)
from megatron_recover.core.own_record import adopted, held_complete, own_record
from megatron_recover.core.plan import fresh_plan, plan_of, results
from megatron_recover.core.policy import exit_code, untrained
from megatron_recover.core.quota import ticks
from megatron_recover.core.rank_messages import (
    Apply,
    Begun,
    CloseAsked,
    EnterTraining,
    Holds,
    PassTimed,
    Promise,
    Promised,
    RankBlocked,
    RankFailing,
    RankFinished,
    RankSaving,
    StateDigested,
    Stop,
)
from megatron_recover.core.recovery import recover
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
from megatron_recover.core.request import SAVED, coordinator_lost
from megatron_recover.core.speed import learn, reported_paces
from megatron_recover.core.tree import neighbours
from megatron_recover.core.values import Claim, Journal, Record, ReplicaId, Status, Statuses, Vote, Votes
from megatron_recover.core.vote import Disagreement, ballot_of, gather, tally, unite

__all__ = [
    "Admission", "AskHold", "Committed", "CoordinatorLost", "Decided", "Effect", "HoldAsked", "HoldExpired", "Input",
    "LinkLost", "PeerMessage", "ReplicaPhase", "ReplicaState", "SendClaim", "Step", "ToCoordinator", "ToPeers", "ToRanks",
    "Voted", "WaitExpired", "held_label", "step", "waiting_for",
]  # fmt: skip

# --- The machine ----------------------------------------------------------------------------------


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


def _on_generation(state: ReplicaState, new: NewGeneration) -> Step:
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


def _on_promised(state: ReplicaState, report: Promised) -> Step:
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
        return _on_admission(state, state.admission) if state.admission is not None else (state, ())
    # In any other generation since, an older member may have gone on without this newcomer.
    if state.admitted_in and state.admitted_in == state.generation - 1:
        return _send_status(replace(state, admitted_in=state.generation))
    why = f"no member is left, and replica {state.replica} was not admitted in generation {state.generation - 1}"
    # It stays in this phase, in which it stores the statuses of others and never plans with them.
    return state, (ToCoordinator(TurnedAway(state.replica, state.generation, (state.replica,), why)),)


def _on_status(state: ReplicaState, message: Status | Statuses) -> Step:
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
        return _diverged(state, recovery, effects)
    state = replace(
        state, phase=ReplicaPhase.IDLE, statuses=tuple(s for s in state.statuses if s.generation > state.generation)
    )
    if recovery.step > state.step:
        if recovery.adopt is None:
            raise ValueError(f"step {state.step} is committed elsewhere without a record")
        state, more = _commit(state, adopted(state, recovery.adopt), adopted=True)
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
    state, more = _start(state)
    return state, effects + more


def _on_admission(state: ReplicaState, admission: Admission) -> Step:
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
    state, effects = _start(state)
    return state, (ToRanks(EnterTraining(plan.step)), *effects)


def _on_join_refused(state: ReplicaState, refused: JoinRefused) -> Step:
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
        return _on_stop(state, Stop(ExitCode.FAILED, f"this newcomer is turned away: {refused.reason}"))
    return replace(state, phase=ReplicaPhase.JOINING, claim=None, served=(), served_label="", roster=(), joins=()), ()


def _on_begun(state: ReplicaState, report: Begun) -> Step:
    """Store requests and digest; rank 0 begins the step. Then order the plan or vote, if due."""
    # A signal may reach one follower alone, and late: its request is then part of the next vote.
    state = replace(state, requests=unite((state.requests, report.requests)))
    if report.step != state.step:
        return state, ()
    if report.digest is not None:
        state = replace(state, digests=tuple(sorted((dict(state.digests) | {report.rank: report.digest}).items())))
    if report.rank == 0 and state.work is None:
        state = replace(state, work=report.work, stays=report.stays)
        return _start(state) if state.phase is ReplicaPhase.IDLE else (state, ())
    # This digest may be the last that the vote was waiting for.
    return _vote(state) if state.phase is ReplicaPhase.WORKING else (state, ())


def _on_pass_timed(state: ReplicaState, report: PassTimed) -> Step:
    """Store this replica's pace in nanoseconds per microbatch, for its votes on training steps."""
    pipeline = state.shape.pipeline
    pace = report.elapsed_ns * pipeline.num_chunks // ticks(report.num_microbatches, pipeline)
    return replace(state, pace_ns=max(1, pace)), ()


def _start(state: ReplicaState) -> Step:
    """Order the waiting plan, or a fresh one, if the step has begun. Needs phase IDLE.

    If the waiting plan is of other work, report that instead. If nothing is missing, also vote. A
    replica that leaves reports so (`core/leaving.py`, Note [Leaving]).
    """
    if state.work is None:
        return state, ()
    requests = state.committed.requests if state.committed is not None else ()
    out = leavers(requests, older(state.roster, state.joins), state.min_replicas)
    plan = state.plan or fresh_plan(
        state.replica, state.generation, state.roster, state.step, state.work,
        speeds=state.speeds, pipeline=state.shape.pipeline, leavers=out,
    )  # fmt: skip
    if plan.work != state.work:
        outvoted = (state.replica,) if state.replica in unproven(state) else ()
        conflict = Disagreement(outvoted, f"replica {state.replica} begins {state.work}, others {plan.work}")
        return _diverged(state, conflict)
    plan = replace(plan, voids=state.must_void) if state.must_void else plan
    replaced = results(plan, state.replica)
    state = replace(
        state,
        phase=ReplicaPhase.WORKING,
        plan=plan,
        must_void=False,
        contributions=added(state.contributions, plan.computes),
        held=tuple(
            tuple(item for item in items if item.bucket not in replaced)
            for items in state.held or ((),) * state.shape.num_ranks
        ),
    )
    state = at_start(state)
    may_leave = state.replica in out and plan.work.num_microbatches and not state.contributions and not state.stays
    leaving = (ToCoordinator(ReplicaLeaving(state.replica, state.generation)),) if may_leave else ()
    state, effects = _vote(state)
    return state, (ToRanks(plan), *leaving, *effects)


def _on_holds(state: ReplicaState, report: Holds) -> Step:
    """Store results of the plan; when WORKING vote once no result and no digest is missing."""
    if state.plan is None or report.step != state.step or not state.held:
        return state, ()
    if state.phase is ReplicaPhase.PROMISING and report.rank in state.promised:
        return state, ()
    expected = results(state.plan, state.replica)
    fresh = {item.bucket: item for item in report.held if expected.get(item.bucket) == item.version}
    merged = {item.bucket: item for item in state.held[report.rank]} | fresh
    items = tuple(merged[bucket] for bucket in sorted(merged))
    state = replace(state, held=(*state.held[: report.rank], items, *state.held[report.rank + 1 :]))
    return _vote(state) if state.phase is ReplicaPhase.WORKING else (state, ())


def _vote(state: ReplicaState) -> Step:
    """Vote once all ranks hold all results and, with `work.digests`, have sent their digests."""
    complete = held_complete(state)
    if state.work is None or len(complete) < len(state.work.buckets):
        return state, ()
    if state.work.digests and len(state.digests) < state.shape.num_ranks:
        return state, ()
    trains = len(state.work.buckets) == len(state.shape.bucket_ranks)
    if state.is_alone:  # others may rely on this vote, so this replica enters no newer generation
        state = replace(state, is_last=True, requests=unite((state.requests, (coordinator_lost(state.replica),))))
    paces = reported_paces(state.speeds, state.replica, state.pace_ns if state.contributions else 0) if trains else ()
    record = replace(own_record(state), requests=state.requests, paces=paces)
    summary, before = summarize(record), heard_from(state)
    vote = Vote(state.replica, state.generation, state.step, summary.digest, summary.outline, record.requests, record.paces)
    state, effects = _count(replace(state, phase=ReplicaPhase.VOTED, votes=gather(state.votes, (ballot_of(vote),))), before)
    return state, (Voted(record, state.generation), ToPeers(direct_peers(state), vote), *effects)


def _on_vote(state: ReplicaState, message: Vote | Votes) -> Step:
    """Keep the votes; when VOTED forward them in a tree, and commit once all votes are equal."""
    # Votes of a newer generation or of the next step cannot have been cast: the former need this
    # replica's status, the latter its local gradient, which exists only after this commit.
    if isinstance(message, Vote):
        message = Votes(message.replica, message.generation, message.step, (ballot_of(message),))
    if (message.generation, message.step) != (state.generation, state.step) or message.replica not in state.roster:
        return state, ()
    before = heard_from(state)
    state = replace(state, votes=gather(state.votes, message.ballots))
    return _count(state, before) if state.phase is ReplicaPhase.VOTED else (state, ())


def _count(state: ReplicaState, before: frozenset[ReplicaId]) -> Step:
    """Forward the votes if a subtree is complete since `before`; commit once none is missing.

    If the votes disagree, report that instead.
    """
    effects = forwarded(state, before, Votes(state.replica, state.generation, state.step, state.votes))
    outcome = tally(state.votes, state.roster, unproven(state))
    if outcome is None:
        return state, effects
    if isinstance(outcome, Disagreement):
        where = differences(own_record(state), (ballot.outline for ballot in state.votes))
        return _diverged(state, replace(outcome, reason=f"{outcome.reason}; {where}"), effects)
    record = replace(own_record(state), requests=outcome.requests, paces=outcome.paces)
    state, more = _commit(state, record, adopted=False)
    return state, effects + more


def _commit(state: ReplicaState, record: Record, *, adopted: bool) -> Step:
    """Commit the step: order `Apply`, learn the paces, and forget all that belonged to it.

    A step that is committed by votes has the votes of the newcomers, too: they are proven, also
    where they went on without older members.
    """
    proven = tuple(claim.replica for claim in state.joins) if not adopted else ()
    told = (ToCoordinator(NewcomersProven(state.replica, state.generation, proven)),) if proven else ()
    state = replace(
        state,
        phase=ReplicaPhase.IDLE,
        step=state.step + 1,
        work=None,
        contributions=(),
        held=(),
        must_void=False,
        digests=(),
        plan=None,
        votes=(),
        # The last record decides how the job ends, and the replica that asked may be lost by then.
        requests=unite((state.requests, record.requests)),
        committed=record,
        committed_digest=b"",
        speeds=learn(state.speeds, record),
        journal=Journal(),
        is_closed=False,
        was_held=False,
        joins=() if proven else state.joins,
    )
    apply = Apply(record, state.generation, older(state.roster, state.joins))
    return state, (Committed(record, state.generation, adopted), ToRanks(apply), *told)


def _diverged(state: ReplicaState, conflict: Disagreement, effects: tuple[Effect, ...] = ()) -> Step:
    if state.blocked:
        return state, effects
    report = Diverged(state.replica, state.generation, state.step, conflict.minority, conflict.reason)
    return replace(state, blocked=True), (*effects, ToCoordinator(report))


def _on_blocked(state: ReplicaState, report: RankBlocked) -> Step:
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


def _on_link_lost(state: ReplicaState, lost: LinkLost) -> Step:
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


def _on_expired(state: ReplicaState, expired: WaitExpired) -> Step:
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


def _on_failing(state: ReplicaState, report: RankFailing) -> Step:
    """Report a rank's exception to the coordinator, with the microbatches at fault, if any."""
    return state, (ToCoordinator(ReplicaFailing(state.replica, report.label, report.microbatches, report.error)),)


def _on_saving(state: ReplicaState, report: RankSaving) -> Step:
    """Report the beginning or end of this replica's save to the coordinator."""
    return state, (ToCoordinator(ReplicaSaving(state.replica, report.over)),)


def _on_finished(state: ReplicaState, report: RankFinished) -> Step:
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


def _on_coordinator_lost(state: ReplicaState, lost: CoordinatorLost) -> Step:
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
    return _on_stop(state, Stop(code, "training is over, and there is no coordinator"))


def _on_add_requests(state: ReplicaState, asked: AddRequests) -> Step:
    """Add requests of the coordinator to all votes from now on."""
    return replace(state, requests=unite((state.requests, asked.requests))), ()


def _on_stop(state: ReplicaState, stop: Stop) -> Step:
    """Order the ranks to stop, and ignore every later input."""
    return replace(state, phase=ReplicaPhase.STOPPED, hold=None, close_waits=False), (ToRanks(stop),)


# --- The table ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The handler of one input in one phase, and the phases that it may lead to."""

    handler: Callable[[ReplicaState, Any], Step]
    leads_to: frozenset[ReplicaPhase]
    """Phases that the state may be in afterwards."""


_Answer = tuple[type, Callable[[ReplicaState, Any], Step], tuple[ReplicaPhase, ...]]
"""An input type, its handler, and the phases that it may lead to besides the present one."""


def _statuses(leads_to: tuple[ReplicaPhase, ...] = ()) -> tuple[_Answer, ...]:
    return (Status, _on_status, leads_to), (Statuses, _on_status, leads_to)


def _votes(leads_to: tuple[ReplicaPhase, ...] = ()) -> tuple[_Answer, ...]:
    return (Vote, _on_vote, leads_to), (Votes, _on_vote, leads_to)


def _rows(phase: ReplicaPhase, *extra: _Answer) -> dict[type, Row]:
    """Return the rows of a phase: the inputs that every phase but STOPPED answers, and `extra`."""
    rows: dict[type, Row] = {
        NewGeneration: Row(_on_generation, frozenset({phase, ReplicaPhase.PROMISING})),
        Begun: Row(_on_begun, frozenset({phase})),
        CloseAsked: Row(on_close_asked, frozenset({phase})),
        PassTimed: Row(_on_pass_timed, frozenset({phase})),
        RankFailing: Row(_on_failing, frozenset({phase})),
        RankSaving: Row(_on_saving, frozenset({phase})),
        RankBlocked: Row(_on_blocked, frozenset({phase})),
        RankFinished: Row(_on_finished, frozenset({phase, ReplicaPhase.STOPPED})),
        AddRequests: Row(_on_add_requests, frozenset({phase})),
        StateDigested: Row(on_state_digested, frozenset({phase})),
        Claim: Row(on_claim, frozenset({phase})),
        Admission: Row(_on_admission, frozenset({phase})),
        JoinRefused: Row(_on_join_refused, frozenset({phase, ReplicaPhase.JOINING, ReplicaPhase.STOPPED})),
        CoordinatorLost: Row(_on_coordinator_lost, frozenset({phase, ReplicaPhase.STOPPED})),
        Stop: Row(_on_stop, frozenset({ReplicaPhase.STOPPED})),
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
        (Holds, _on_holds, ()),
        (Promised, _on_promised, (ReplicaPhase.EXCHANGING, *_AFTER_EXCHANGE)),
        (LinkLost, _on_link_lost, ()),
    ),
    ReplicaPhase.EXCHANGING: _rows(
        ReplicaPhase.EXCHANGING,
        *_statuses(_AFTER_EXCHANGE),
        (Admission, _on_admission, _AFTER_EXCHANGE),
        *_votes(),
        (LinkLost, _on_link_lost, ()),
        (WaitExpired, _on_expired, ()),
    ),
    ReplicaPhase.IDLE: _rows(
        ReplicaPhase.IDLE,
        *_statuses(),
        (Begun, _on_begun, (ReplicaPhase.WORKING,)),
        (HoldAsked, on_hold_asked, ()),
        *_votes(),
        (LinkLost, _on_link_lost, ()),
    ),
    ReplicaPhase.WORKING: _rows(
        ReplicaPhase.WORKING,
        *_statuses(),
        (Begun, _on_begun, (ReplicaPhase.VOTED, ReplicaPhase.IDLE)),
        (Holds, _on_holds, (ReplicaPhase.VOTED, ReplicaPhase.IDLE)),
        (HoldAsked, on_hold_asked, ()),
        (HoldExpired, on_hold_expired, ()),
        *_votes(),
        (LinkLost, _on_link_lost, ()),
    ),
    ReplicaPhase.VOTED: _rows(
        ReplicaPhase.VOTED,
        *_statuses(),
        (HoldAsked, on_hold_asked, ()),
        *_votes((ReplicaPhase.IDLE,)),
        (LinkLost, _on_link_lost, ()),
        (WaitExpired, _on_expired, ()),
    ),
    ReplicaPhase.STOPPED: {},
}
