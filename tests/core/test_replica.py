"""The machine of one replica: what each input does at each moment, as sequences of inputs and effects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.core import rank, replica, replica_reports
from megatron_recover.core.digest import combined
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import (
    Diverged,
    Entered,
    Miscounted,
    NewGeneration,
    ReplicaBlocked,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaSaving,
    Void,
)
from megatron_recover.core.rank_messages import (
    Apply,
    Begun,
    Close,
    CloseAsked,
    Holds,
    PassTimed,
    Plan,
    Promise,
    Promised,
    RankBlocked,
    RankFailing,
    RankFinished,
    RankSaving,
    Stop,
)
from megatron_recover.core.replica import (
    Committed,
    Decided,
    LinkLost,
    ReplicaPhase,
    ToCoordinator,
    ToPeers,
    ToRanks,
    Voted,
    WaitExpired,
)
from megatron_recover.core.request import MISCOUNTED, SAVED, nothing_trained
from megatron_recover.core.values import Compute, Contribution, Held, HeldVersion, Journal, Pipeline, Shape, Transfer, Work
from tests.core.build import SHAPE, WORK, complete, holds, lead, record, status, vote, working

TWO_RANKS = Shape(2, ((0, 1),))


def test_a_fault_free_step_is_one_order_and_one_vote() -> None:
    state, effects = lead(replica.ReplicaState(1, SHAPE), NewGeneration(1, (0, 1, 2)))
    assert effects == [ToRanks(Promise(1, (0, 1, 2)))]
    state, effects = lead(state, Promised(0, 1))
    own = status(1, generation=1, work=None)
    assert effects == [ToCoordinator(Entered(1, 1, 0)), ToPeers((0, 2), own)]
    state, effects = lead(state, status(0, generation=1, work=None), status(2, generation=1, work=None))
    assert effects == [] and state.phase is ReplicaPhase.IDLE
    state, effects = lead(state, Begun(0, 0, WORK))
    assert effects == [ToRanks(Plan(0, 1, (0, 1, 2), WORK, (1, 1, 1), (), (Compute((1,), (0,)),), (0,)))]
    state, effects = lead(state, holds())
    assert effects == [Voted(record(), 1), ToPeers((0, 2), vote(1))]
    state, effects = lead(state, vote(0), vote(2))
    assert effects == [Committed(record(), 1, False), ToRanks(Apply(record(), 1, (0, 1, 2)))]
    assert (state.step, state.phase, state.work, state.committed) == (1, ReplicaPhase.IDLE, None, record())


# --- The state digest ----------------------------------------------------------------------------------------------------

DIGESTED = Work("save 7", 0, (0,), digests=True)


def begun(rank: int, digest: int | None, step: int = 0) -> Begun:
    return Begun(rank, step, DIGESTED, digest=digest)


def ready_to_begin() -> replica.ReplicaState:
    """Replica 0 of two ranks, in generation 1 with replica 1, before its first step."""
    messages = (NewGeneration(1, (0, 1)), Promised(0, 1), Promised(1, 1), status(1, generation=1, work=None))
    return lead(replica.ReplicaState(0, TWO_RANKS), *messages)[0]


@pytest.mark.parametrize("late", ["the digest of a follower", "the digest of a follower, before the leader", "a result"])
def test_the_vote_waits_for_the_digests_of_all_ranks_and_carries_them_in_rank_order(late: str) -> None:
    results = [holds(rank=0), holds(rank=1)]
    messages = {
        "the digest of a follower": [begun(0, 5), *results, begun(1, 6)],
        "the digest of a follower, before the leader": [begun(1, 6), begun(0, 5), *results],
        "a result": [begun(0, 5), begun(1, 6), *results],
    }[late]
    state, effects = lead(ready_to_begin(), *messages[:-1])
    assert not [effect for effect in effects if isinstance(effect, ToPeers)], "it voted without the digest of every rank"
    state, effects = lead(state, messages[-1])
    [voted] = [effect for effect in effects if isinstance(effect, Voted)]
    assert voted.record.state_digest == combined([5, 6]) != combined([6, 5])
    [sent] = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    state, effects = lead(state, replace(sent, replica=1))
    assert state.step == 1 and not state.digests, "the next step would carry the digest of this one"


def test_a_digest_of_another_step_does_not_count() -> None:
    state, effects = lead(ready_to_begin(), begun(1, 6, step=1), begun(0, 5), holds(rank=0), holds(rank=1))
    assert state.phase is ReplicaPhase.WORKING and dict(state.digests) == {0: 5}


def test_digests_outlive_a_generation_within_their_step() -> None:
    state, _ = lead(ready_to_begin(), begun(0, 5), begun(1, 6), NewGeneration(2, (0, 1)), Promised(0, 2), Promised(1, 2))
    state, effects = lead(state, status(1, work=DIGESTED, contributions=((),)), holds(2, rank=0), holds(2, rank=1))
    [voted] = [effect for effect in effects if isinstance(effect, Voted)]
    assert (voted.generation, voted.record.state_digest) == (2, combined([5, 6]))


def test_a_step_without_a_due_digest_carries_none_and_waits_for_nobody() -> None:
    state, effects = lead(ready_to_begin(), Begun(0, 0, WORK), holds(rank=0), holds(rank=1))
    [voted] = [effect for effect in effects if isinstance(effect, Voted)]
    assert voted.record.state_digest is None


def test_a_replica_of_another_digest_is_outvoted_and_a_tie_ends_the_job() -> None:
    mine = record(requests=())
    for roster, minority in (((0, 1, 2), (2,)), ((0, 2), ())):
        state, _ = lead(working(roster=roster), holds())
        votes = [vote(peer, of=mine if peer == 1 else replace(mine, state_digest=3)) for peer in roster[1:]]
        _, effects = lead(state, *votes)
        [told] = [effect.message for effect in effects if isinstance(effect, ToCoordinator)]
        assert isinstance(told, Diverged) and told.minority == minority


# --- Faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recovering", [False, True])
def test_a_pass_is_closed_for_all_ranks_at_once_also_in_a_recovery(recovering: bool) -> None:
    state = working()
    if recovering:
        state, _ = lead(state, NewGeneration(2, (0, 1)))
    after, effects = lead(state, CloseAsked(0, 0))
    assert (replace(after, is_closed=False), effects) == (state, [ToRanks(Close(0))])
    assert lead(state, CloseAsked(0, 7)) == (state, []), "of another step"


def test_the_status_waits_for_the_promise_of_every_rank() -> None:
    state, _ = lead(replica.ReplicaState(0, TWO_RANKS), NewGeneration(1, (0,)))
    state, effects = lead(state, Promised(1, 1), Promised(1, 1), Promised(0, 0))
    assert effects == [] and state.phase is ReplicaPhase.PROMISING
    _, effects = lead(state, Promised(0, 1))
    assert [type(effect) for effect in effects] == [ToCoordinator, ToPeers]


def test_a_result_that_was_reported_before_the_promise_counts() -> None:
    state = working(shape=TWO_RANKS)
    state, _ = lead(state, NewGeneration(2, (0, 1)), holds(rank=1), Promised(1, 2), holds(rank=0), Promised(0, 2))
    (own,) = (item for item in state.statuses if item.replica == 0)
    assert own.complete == (HeldVersion(1, (0,)),)


def test_a_result_that_is_reported_after_the_promise_does_not() -> None:
    state = working(shape=TWO_RANKS)
    state, _ = lead(state, NewGeneration(2, (0, 1)), holds(rank=1), Promised(0, 2), holds(rank=0), Promised(1, 2))
    (own,) = (item for item in state.statuses if item.replica == 0)
    assert own.complete == ()


@pytest.mark.parametrize("report", [holds(version=2), holds(bucket=1), holds(step=1)], ids=["version", "bucket", "step"])
def test_a_result_that_the_plan_does_not_bring_is_not_held(report: Holds) -> None:
    state = working()
    assert lead(state, report) == (state, [])


def test_lost_microbatches_are_dealt_and_computed_into_undecided_buckets() -> None:
    state = working()
    state, effects = lead(state, NewGeneration(2, (0, 1)), Promised(0, 2), status(1, contributions=((1,),)))
    decided, order = effects[-2:]
    assert isinstance(decided, Decided) and decided.dealt == ((0, 2, (0,)),) and "microbatches [2]" in decided.reason
    assert order == ToRanks(Plan(0, 2, (0, 1), WORK, (2, 1), (), (Compute((2,), (0,)),), (0,)))
    assert state.contributions == (Contribution((0,), (0, 2)),)


def test_lost_microbatches_go_to_whoever_is_done_first_by_the_journals() -> None:
    """Both hold three; this replica has one of them left, the other all."""
    work = Work("train 0", 9, (0,))
    own, others = Journal((0, 1, 2), (0, 1)), Journal((3,), ())
    state, effects = lead(
        working(work=work),
        NewGeneration(2, (0, 1)),
        Promised(0, 2, own),
        status(1, work=work, contributions=((3, 4, 5),), journal=others),
    )
    (sent,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    assert sent.journal == own
    (decided,) = [effect for effect in effects if isinstance(effect, Decided)]
    assert decided.dealt == tuple((0, microbatch, (0,)) for microbatch in (6, 7, 8))


def test_a_journal_of_the_step_before_is_not_that_of_this_one() -> None:
    """Rank 0 has not taken the order to apply when it promises."""
    state, _ = lead(working(roster=(0,)), holds())
    state, effects = lead(state, NewGeneration(2, (0,)), Promised(0, 2, Journal((0, 1, 2), (0, 1, 2))))
    (sent,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    assert (sent.step, sent.journal) == (1, Journal())


def test_a_pace_rides_in_the_vote_of_a_training_step() -> None:
    shape = Shape(1, ((0,), (0,)), Pipeline(3))
    training, evaluation = Work("train 0", 3, (0, 1)), Work("evaluate 0", 3, (1,))
    both = Holds(0, 0, (Held(0, 1, 7), Held(1, 1, 7)))
    state, effects = lead(working(shape=shape, work=training, roster=(0,)), PassTimed(0, 3, 1000), both)
    (said,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    assert said.paces == ((0, 200),), "3 microbatches on 3 stages take 5 slots"
    state, effects = lead(state, Begun(0, 1, evaluation), holds(step=1, bucket=1))
    (said,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    assert said.paces == ()
    state, effects = lead(state, Begun(0, 2, Work("train 1", 3, (0, 1))), Holds(0, 2, both.held))
    (said,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    assert said.paces == ((0, 200),), "the last that is known, where a pass is measured too late"


def test_who_has_computed_nothing_of_a_step_votes_no_pace() -> None:
    """The last that is known would be believed for ever: others may have left it without work because of it."""
    for number, paces in ((0, ((0, 200),)), (1, ())):
        state = replace(working(number, (0, 1), work=Work("train 0", 1, (0,))), pace_ns=200)
        _, effects = lead(state, holds())
        (said,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
        assert said.paces == paces


def test_a_decided_bucket_is_fetched_and_nothing_is_computed() -> None:
    state = working()
    _, effects = lead(state, NewGeneration(2, (0, 1)), Promised(0, 2), status(1, contributions=((1,),), complete=(complete(),)))
    assert effects[-1] == ToRanks(Plan(0, 2, (0, 1), WORK, (1, 1), (Transfer(0, 1, 1, (0,)),), (), ()))


def test_with_everything_decided_and_held_the_replica_votes_at_once() -> None:
    state, _ = lead(working(), holds())
    assert state.phase is ReplicaPhase.VOTED
    state, effects = lead(state, NewGeneration(2, (0, 1)), Promised(0, 2), status(1, complete=(complete(),)))
    assert state.phase is ReplicaPhase.VOTED
    assert effects[-1] == ToPeers((1,), vote(0, generation=2))


def test_inv_2_what_was_held_before_the_trusted_generation_is_reduced_again() -> None:
    """Everything is held by everyone, but a replica that was outvoted took part in it."""
    state, _ = lead(working(), holds())
    outvoted = NewGeneration(2, (0, 1), trusted_from=2)
    state, effects = lead(state, outvoted, Promised(0, 2), status(1, contributions=((1,),), complete=(complete(),)))
    decided, order = effects[-2:]
    assert isinstance(decided, Decided) and decided.decided == ()
    assert order == ToRanks(Plan(0, 2, (0, 1), WORK, (2, 1), (), (Compute((2,), (0,)),), (0,)))
    state, effects = lead(state, holds(2))
    mine = record(0, complete(version=2))
    assert effects == [Voted(mine, 2), ToPeers((1,), vote(0, generation=2, of=mine))]
    state, effects = lead(state, NewGeneration(3, (0,), trusted_from=2), Promised(0, 3))
    assert isinstance(effects[-2], Committed) and effects[-2].record == record(0, complete(version=2)), "it is trusted again"


def test_a_member_that_is_behind_adopts_and_keeps_the_plan_until_it_begins() -> None:
    state, _ = lead(working(), holds(), NewGeneration(2, (0, 1)), Promised(0, 2))
    next_work = Work("train 1", 3, (0,))
    ahead = status(1, step=1, work=next_work, contributions=((1,),), committed=record())
    state, effects = lead(state, ahead)
    assert effects[:2] == [Committed(record(), 2, True), ToRanks(Apply(record(), 2, (0, 1)))]
    assert state.phase is ReplicaPhase.IDLE and state.step == 1
    state, effects = lead(state, Begun(0, 1, next_work))
    assert effects == [ToRanks(Plan(1, 2, (0, 1), next_work, (2, 1), (), (Compute((0, 2), (0,)),), (0,)))]


def test_a_plan_that_waits_is_dropped_when_a_newer_generation_comes() -> None:
    waiting = status(1, work=WORK, contributions=((1,),))
    state, _ = lead(replica.ReplicaState(0, SHAPE), NewGeneration(2, (0, 1)), Promised(0, 2), waiting)
    assert state.plan is not None and state.phase is ReplicaPhase.IDLE
    state, _ = lead(state, NewGeneration(3, (0, 1)), Promised(0, 3))
    assert state.plan is None
    (own,) = (item for item in state.statuses if item.replica == 0)
    assert own.work is None and own.contributions == ()


def test_inv_5_votes_of_another_generation_or_step_are_dropped() -> None:
    state, _ = lead(working(), holds())
    same, effects = lead(state, vote(1, generation=2), vote(1, of=record(1)), vote(7))
    assert effects == [] and same == state
    entered, _ = lead(state, vote(1), NewGeneration(2, (0, 1, 2)))
    after, effects = lead(entered, vote(1), vote(2))
    assert effects == [] and after.step == 0


def test_inv_5_a_status_of_an_older_generation_is_dropped() -> None:
    state, _ = lead(working(), NewGeneration(2, (0, 1)), Promised(0, 2))
    assert lead(state, status(1, generation=1)) == (state, [])


def test_an_early_status_is_kept_for_the_generation_to_come() -> None:
    state, effects = lead(working(), status(1, contributions=((1,),)))
    assert effects == [] and state.phase is ReplicaPhase.WORKING
    state, _ = lead(state, NewGeneration(2, (0, 1)), Promised(0, 2))
    assert state.phase is ReplicaPhase.WORKING and state.generation == 2


def test_requests_ride_in_the_vote_and_are_united() -> None:
    state, _ = lead(
        replica.ReplicaState(0, SHAPE), NewGeneration(1, (0, 1), requests=("exit: too few replicas",)), Promised(0, 1)
    )
    state, _ = lead(state, status(1, generation=1, work=None), Begun(0, 0, WORK, ("exit: SIGTERM",)))
    state, effects = lead(state, holds())
    both = ("exit: SIGTERM", "exit: too few replicas")
    assert effects == [Voted(record(requests=both), 1), ToPeers((1,), vote(0, of=record(requests=both)))]
    state, effects = lead(state, vote(1, of=record(requests=("checkpoint",))))
    assert state.committed == record(requests=("checkpoint", *both))
    _, effects = lead(state, RankFinished(0))
    assert effects == [ToCoordinator(ReplicaFinished(0, 10))]


def test_a_request_outlives_whoever_asked() -> None:
    state, _ = lead(working(roster=(0, 1)), holds(), vote(1, of=record(requests=("exit: SIGTERM",))))
    assert state.committed == record(requests=("exit: SIGTERM",))
    state, _ = lead(state, Begun(0, 1, Work("train 1", 3, (0,))), NewGeneration(2, (0,)), Promised(0, 2), holds(2, step=1))
    assert state.step == 2
    assert lead(state, RankFinished(0))[1] == [ToCoordinator(ReplicaFinished(0, ExitCode.INTERRUPTED))]


def test_a_request_of_a_follower_is_committed_whenever_it_comes() -> None:
    _, (asked,) = rank.step(rank.RankState(0, 1, (0,)), rank.Begin(WORK, ("exit: SIGTERM",)))
    assert isinstance(asked, rank.ToLeader)
    for before, after in ([asked.report], []), ([], [asked.report]):
        state, _ = lead(working(roster=(0, 1), shape=TWO_RANKS), *before, holds(rank=0), holds(rank=1), *after)
        (own,) = [each for each in state.votes if 0 in each.voters]
        assert own.requests == (("exit: SIGTERM",) if before else ())
        state, effects = lead(state, replace(vote(1), digest=own.digest))
        assert isinstance(effects[0], Committed) and effects[0].record.requests == own.requests
        state, _ = lead(state, Begun(0, 1, Work("train 1", 3, (0,))), holds(rank=0, step=1), holds(rank=1, step=1))
        assert [each.requests for each in state.votes] == [("exit: SIGTERM",)]


@pytest.mark.parametrize("phase", [phase for phase in ReplicaPhase if phase is not ReplicaPhase.STOPPED])
@pytest.mark.parametrize("number", [0, 1])
def test_no_request_is_lost_in_any_phase(phase: ReplicaPhase, number: int) -> None:
    before = replace(working(shape=TWO_RANKS), phase=phase)
    state, effects = lead(before, Begun(number, 0, WORK, ("exit: SIGTERM",)))
    assert effects == [] and state == replace(before, requests=("exit: SIGTERM",))


def test_a_step_that_is_not_the_one_that_others_have_begun_is_reported_and_not_computed() -> None:
    """The others' step is known from the plan of the recovery before this replica begins its own."""
    messages = (NewGeneration(1, (0, 1)), Promised(0, 1), status(1, generation=1, work=None), NewGeneration(2, (0, 1)))
    state, _ = lead(replica.ReplicaState(0, SHAPE), *messages, Promised(0, 2), status(1, contributions=((1,),)))
    assert state.plan is not None and state.plan.work == WORK
    _, effects = lead(state, Begun(0, 0, replace(WORK, label="evaluate 0")))
    [reported] = [effect.message for effect in effects if isinstance(effect, ToCoordinator)]
    assert isinstance(reported, Diverged) and "begins" in reported.reason
    assert not [effect for effect in effects if isinstance(effect, ToRanks)]


@pytest.mark.parametrize(("mine", "others", "minority"), [(7, (8, 8), (0,)), (7, (7, 8), (2,)), (7, (8, 9), ())])
def test_differing_checksums_are_reported_and_not_committed(
    mine: int, others: tuple[int, int], minority: tuple[int, ...]
) -> None:
    state, _ = lead(working(), holds(checksum=mine))
    votes = [vote(number, of=record(0, complete(checksum=checksum))) for number, checksum in enumerate(others, start=1)]
    state, effects = lead(state, *votes)
    (effect,) = effects
    assert isinstance(effect, ToCoordinator) and isinstance(effect.message, Diverged)
    assert effect.message.minority == minority and state.step == 0


@pytest.mark.parametrize(
    ("event", "suspects"),
    [
        (RankBlocked(0, 1, "no progress", (2,)), (2,)),
        (RankBlocked(0, 1, "its own links may be broken"), ()),
        (LinkLost(2, "reset"), (2,)),
    ],
)
def test_whatever_blocks_asks_once_for_a_newer_generation(event: replica.Input, suspects: tuple[int, ...]) -> None:
    state, effects = lead(working(), event, event, LinkLost(1))
    (effect,) = effects
    assert isinstance(effect, ToCoordinator) and isinstance(effect.message, ReplicaBlocked)
    assert (effect.message.generation, effect.message.suspects) == (1, suspects)
    assert not lead(state, NewGeneration(2, (0, 1)))[0].blocked


MISCOUNT = RankBlocked(0, 1, "bucket 0", miscounted=0)
"""Of step 0, in generation 1."""


def test_a_late_report_of_a_miscount_makes_no_other_attempt_and_no_other_step_void() -> None:
    anew, _ = lead(working(), MISCOUNT, NewGeneration(2, (0, 1, 2), void=Void(0, 2)))
    assert lead(anew, MISCOUNT) == (anew, []), "its ranks promise"
    anew, _ = lead(anew, Promised(0, 2))
    assert anew.phase is ReplicaPhase.EXCHANGING and lead(anew, MISCOUNT) == (anew, [])
    anew, _ = lead(anew, *(status(peer) for peer in (1, 2)))
    assert anew.phase is ReplicaPhase.WORKING and lead(anew, MISCOUNT) == (anew, []), "it is of the attempt before"
    voted, _ = lead(working(), holds())
    assert voted.phase is ReplicaPhase.VOTED and lead(voted, MISCOUNT) == (voted, []), "all its sums were right"
    done, _ = lead(voted, vote(1), vote(2))
    assert done.phase is ReplicaPhase.IDLE and lead(done, MISCOUNT) == (done, []), "the step is committed"
    assert lead(done, replace(MISCOUNT, miscounted=1)) == (done, []), "nobody has begun that step"
    following, _ = lead(done, Begun(0, 1, WORK))
    assert following.phase is ReplicaPhase.WORKING and lead(following, MISCOUNT) == (following, []), "it is of the step before"
    assert lead(following, replace(MISCOUNT, miscounted=1))[1] == [ToCoordinator(Miscounted(0, 1, 1, "bucket 0"))]


@pytest.mark.parametrize("digests", [False, True])
def test_a_step_that_is_given_up_still_compares_the_state_where_its_record_was_to(digests: bool) -> None:
    work = Work("train 4", 3, (0,), digests)
    assert work.given_up() == Work("give up train 4", 0, (), digests)


def test_a_miscount_is_told_as_what_it_is_and_its_step_begins_anew_once() -> None:
    state, effects = lead(working(), MISCOUNT, MISCOUNT)
    told = ToCoordinator(Miscounted(0, 1, 0, "bucket 0"))
    assert effects == [told, told] and state.contributions, "the coordinator takes the first"
    state, effects = lead(state, NewGeneration(2, (0, 1, 2), void=Void(0, 2)), Promised(0, 2, Journal((0,), (0,))))
    (said,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    assert (said.contributions, said.complete, said.journal) == ((), (), Journal())
    state, effects = lead(state, *(status(peer) for peer in (1, 2)))
    (plan,) = [effect.order for effect in effects if isinstance(effect, ToRanks)]
    assert plan.voids and plan.computes and plan.reduces == (0,)
    state, effects = lead(state, NewGeneration(3, (0, 1, 2), void=Void(0, 2)), Promised(0, 3))
    (said,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    dealt = tuple(i for one in plan.computes for i in one.microbatches)
    assert said.contributions == (Contribution((0,), dealt),), "what it has since counts"


def test_a_step_that_is_given_up_is_committed_by_all_without_a_result() -> None:
    given_up = NewGeneration(2, (0, 1, 2), requests=(MISCOUNTED,), void=Void(0, 2, gives_up=True))
    state, effects = lead(working(), holds(), given_up, Promised(0, 2, Journal((0,), (0,))))
    said, work = next(effect.message for effect in effects[::-1] if isinstance(effect, ToPeers)), WORK.given_up()
    assert (said.work, said.contributions, said.complete, said.journal) == (work, (), (), Journal())
    state, effects = lead(state, *(status(peer, work=work, contributions=((),)) for peer in (1, 2)))
    (plan,) = [effect.order for effect in effects if isinstance(effect, ToRanks)]
    assert plan.voids and (plan.work, plan.computes, plan.reduces, plan.transfers) == (work, (), (), ())
    (voted,) = [effect for effect in effects if isinstance(effect, Voted)]
    assert (voted.record.gives_up, voted.record.versions, voted.record.paces) == (True, (), ())
    state, effects = lead(state, *(vote(peer, generation=2, of=voted.record) for peer in (1, 2)))
    (apply,) = [effect.order for effect in effects if isinstance(effect, ToRanks)]
    assert apply.record == replace(voted.record, requests=(MISCOUNTED,)) and state.step == 1 and state.work is None
    assert lead(state, RankFinished(0))[1] == [ToCoordinator(ReplicaFinished(0, ExitCode.INVARIANT_VIOLATED))]
    saved = replace(state, committed=replace(apply.record, requests=(MISCOUNTED, SAVED)))
    assert lead(saved, RankFinished(0))[1] == [ToCoordinator(ReplicaFinished(0, ExitCode.INVARIANT_VIOLATED, is_saved=True))]
    loaded = replace(state, committed=replace(apply.record, requests=(MISCOUNTED, nothing_trained("what was loaded from X"))))
    said = ReplicaFinished(0, ExitCode.INVARIANT_VIOLATED, untrained="what was loaded from X")
    assert lead(loaded, RankFinished(0))[1] == [ToCoordinator(said)]


def test_an_expired_wait_asks_and_whom_it_waited_for_is_said_on_entering() -> None:
    state, _ = lead(working(), holds(), vote(1))
    assert replica.waiting_for(state) == (2,)
    assert lead(state, WaitExpired(1, 1), WaitExpired(2, 0))[1] == []
    _, effects = lead(state, WaitExpired(1, 0))
    assert effects == [ToCoordinator(ReplicaBlocked(0, 1, "no vote came from replica 2"))]
    state, effects = lead(state, NewGeneration(2, (0, 1)), NewGeneration(3, (0, 1)), Promised(0, 3))
    assert effects[2] == ToCoordinator(Entered(0, 3, 0, waited_for=(2,)))
    assert state.waited_for == ()
    assert replica.waiting_for(state) == (1,)
    assert replica.waiting_for(working()) == ()
    assert lead(working(), WaitExpired(1, 0))[1] == []


def test_errors_of_older_generations_and_of_strangers_ask_for_nothing() -> None:
    state = working(roster=(0, 1))
    assert lead(state, RankBlocked(0, 0, "late"), LinkLost(9))[1] == []


def test_a_computation_that_raises_is_reported_with_its_microbatch() -> None:
    _, effects = lead(working(), RankFailing(0, 0, "train 0", (0, 2), "NaN"))
    assert effects == [ToCoordinator(ReplicaFailing(0, "train 0", (0, 2), "NaN"))]


@pytest.mark.parametrize("phase", [phase for phase in ReplicaPhase if phase is not ReplicaPhase.STOPPED])
def test_a_save_is_reported_in_every_phase(phase: ReplicaPhase) -> None:
    state = replace(working(), phase=phase)
    assert lead(state, RankSaving(0, False)) == (state, [ToCoordinator(ReplicaSaving(0, False))])


def test_a_replica_that_finished_goes_on_answering() -> None:
    state, _ = lead(working(), holds(), vote(1), vote(2), RankFinished(0))
    state, effects = lead(state, NewGeneration(2, (0, 1)), Promised(0, 2))
    assert effects[-1] == ToPeers((1,), status(0, step=1, work=None, committed=record()))


def test_a_replica_has_finished_when_all_its_ranks_have() -> None:
    state, effects = lead(working(shape=TWO_RANKS), RankFinished(1), RankFinished(1))
    assert effects == [], "the others could be stopped before a rank has applied the last step"
    state, effects = lead(state, RankFinished(0))
    assert effects == [ToCoordinator(ReplicaFinished(0, 0))]
    assert lead(state, RankFinished(1), RankFinished(0))[1] == []


def test_stop_is_final() -> None:
    state, effects = lead(working(), Stop(12, "diverged"))
    assert effects == [ToRanks(Stop(12, "diverged"))]
    after, effects = lead(state, NewGeneration(2, (0, 1)), vote(1), holds())
    assert effects == [] and after == state


def test_a_roster_of_one_commits_alone() -> None:
    state = working(roster=(0,))
    state, effects = lead(state, holds())
    assert effects == [
        Voted(record(), 1),
        ToPeers((), vote(0)),
        Committed(record(), 1, False),
        ToRanks(Apply(record(), 1, (0,))),
    ]


def test_a_replica_outside_the_roster_does_not_enter() -> None:
    state = working()
    assert lead(state, NewGeneration(2, (1, 2)), NewGeneration(1, (0, 1, 2))) == (state, [])


inputs = st.one_of(
    st.builds(NewGeneration, st.integers(1, 4), st.sampled_from([(0, 1, 2), (0, 1), (0,), (1, 2)])),
    st.builds(Promised, st.integers(0, 1), st.integers(0, 4)),
    st.builds(
        lambda number, generation, begun: status(number, generation=generation, work=WORK if begun else None),
        st.integers(1, 2), st.integers(1, 4), st.booleans(),
    ),
    st.builds(lambda number, generation: vote(number, generation=generation), st.integers(1, 2), st.integers(1, 4)),
    st.builds(Begun, st.integers(0, 1), st.integers(0, 1), st.just(WORK)),
    st.builds(lambda rank, version: holds(version, rank=rank), st.integers(0, 1), st.integers(1, 4)),
    st.builds(RankBlocked, st.integers(0, 1), st.integers(0, 4), st.just("stuck")),
    st.builds(LinkLost, st.integers(0, 3)),
    st.builds(WaitExpired, st.integers(0, 4), st.integers(0, 1)),
    st.builds(RankFailing, st.integers(0, 1), st.just(0), st.just("train 0"), st.just(()), st.just("boom")),
    st.builds(RankFinished, st.integers(0, 1)),
    st.builds(RankSaving, st.just(0), st.booleans()),
)  # fmt: skip


@given(st.lists(inputs, max_size=40))
def test_no_order_of_inputs_upsets_the_machine(messages: list[replica.Input]) -> None:
    """Whole table: every input in every phase, in any order; what comes out obeys the promise (INV-5)."""
    state = replica.ReplicaState(0, TWO_RANKS)
    for message in messages:
        before = state
        state, effects = replica.step(state, message)
        assert state.generation >= before.generation and state.step >= before.step
        assert replica.step(before, message) == (state, effects), "not deterministic"
        for effect in effects:
            if isinstance(effect, ToPeers):
                assert effect.message.generation == state.generation
                assert state.promised == (0, 1), "spoke to peers before all ranks promised"
            if isinstance(effect, ToRanks) and isinstance(effect.order, Plan | Apply | Promise):
                assert effect.order.generation == state.generation
        if len(effects) and state.phase is ReplicaPhase.PROMISING and before.phase is not ReplicaPhase.PROMISING:
            assert state.promised == ()


@pytest.mark.parametrize("phase", list(ReplicaPhase))
def test_inputs_that_the_table_does_not_list_are_dropped(phase: ReplicaPhase) -> None:
    state = replace(working(), phase=phase)
    listed = replica.TABLE[phase]
    for message in (
        status(1),
        vote(1),
        holds(),
        Begun(0, 0, WORK),
        RankBlocked(0, 1, ""),
        WaitExpired(1, 0),
        Promised(0, 1),
        LinkLost(1),
    ):
        if type(message) not in listed:
            assert replica.step(state, message) == (state, ())


def test_a_handler_that_leaves_its_row_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replica.Row(replica_reports.on_stop, frozenset({ReplicaPhase.WORKING}))
    monkeypatch.setitem(replica.TABLE[ReplicaPhase.WORKING], Stop, row)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table does not list"):
        replica.step(working(), Stop(0, ""))
