"""A step at a leader: its plan, the results of the ranks, the votes, and the commit.

These are parts of the machine of one replica (`core/replica.py`). All functions are pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.contribution import added
from megatron_recover.core.digest import differences, summarize
from megatron_recover.core.forwarding import direct_peers, forwarded, heard_from
from megatron_recover.core.holding import at_start
from megatron_recover.core.joining import older, unproven
from megatron_recover.core.leaving import leavers
from megatron_recover.core.membership_messages import AddRequests, NewcomersProven, ReplicaLeaving
from megatron_recover.core.own_record import held_complete, own_record
from megatron_recover.core.plan import fresh_plan, results
from megatron_recover.core.quota import ticks
from megatron_recover.core.rank_messages import Apply, Begun, Holds, PassTimed
from megatron_recover.core.replica_reports import diverged
from megatron_recover.core.replica_state import (
    Committed,
    ReplicaPhase,
    ReplicaState,
    Step,
    ToCoordinator,
    ToPeers,
    ToRanks,
    Voted,
)
from megatron_recover.core.request import coordinator_lost
from megatron_recover.core.speed import learn, reported_paces
from megatron_recover.core.values import Journal, Record, ReplicaId, Vote, Votes
from megatron_recover.core.vote import Disagreement, ballot_of, gather, tally, unite


def on_begun(state: ReplicaState, report: Begun) -> Step:
    """Store requests and digest; rank 0 begins the step. Then order the plan or vote, if due."""
    # A signal may reach one follower alone, and late: its request is then part of the next vote.
    state = replace(state, requests=unite((state.requests, report.requests)))
    if report.step != state.step:
        return state, ()
    if report.digest is not None:
        state = replace(state, digests=tuple(sorted((dict(state.digests) | {report.rank: report.digest}).items())))
    if report.rank == 0 and state.work is None:
        state = replace(state, work=report.work, stays=report.stays)
        return start(state) if state.phase is ReplicaPhase.IDLE else (state, ())
    # This digest may be the last that the vote was waiting for.
    return _vote(state) if state.phase is ReplicaPhase.WORKING else (state, ())


def on_pass_timed(state: ReplicaState, report: PassTimed) -> Step:
    """Store this replica's pace in nanoseconds per microbatch, for its votes on training steps."""
    pipeline = state.shape.pipeline
    pace = report.elapsed_ns * pipeline.num_chunks // ticks(report.num_microbatches, pipeline)
    return replace(state, pace_ns=max(1, pace)), ()


def on_add_requests(state: ReplicaState, asked: AddRequests) -> Step:
    """Add requests of the coordinator to all votes from now on."""
    return replace(state, requests=unite((state.requests, asked.requests))), ()


def start(state: ReplicaState) -> Step:
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
        return diverged(state, conflict)
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


def on_holds(state: ReplicaState, report: Holds) -> Step:
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


def on_vote(state: ReplicaState, message: Vote | Votes) -> Step:
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
        return diverged(state, replace(outcome, reason=f"{outcome.reason}; {where}"), effects)
    record = replace(own_record(state), requests=outcome.requests, paces=outcome.paces)
    state, more = commit(state, record, adopted=False)
    return state, effects + more


def commit(state: ReplicaState, record: Record, *, adopted: bool) -> Step:
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
