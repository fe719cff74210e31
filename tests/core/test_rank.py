"""The machine of one rank: which results count, what is reported, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.core import rank
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.plan import Operation, operations
from megatron_recover.core.rank import (
    AskClose,
    Begin,
    Block,
    Fail,
    Finish,
    Hold,
    MicrobatchFinished,
    MicrobatchStarted,
    RankState,
    Retire,
    Save,
    Take,
    TimePass,
    ToLeader,
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
from megatron_recover.core.values import Compute, Held, Journal, Transfer, Work
from tests.core.build import complete, record

WORK = Work("train 0", 3, (0, 1))
PLAN = Plan(0, 1, (0, 1), WORK, (2, 1), (), (Compute((0, 1), (0, 1)),), (0, 1))


def feed(state: RankState, *messages: rank.Input) -> tuple[RankState, list[rank.Effect]]:
    effects: list[rank.Effect] = []
    for message in messages:
        state, more = rank.step(state, message)
        effects += more
    return state, effects


def at_plan(plan: Plan = PLAN) -> RankState:
    state, _ = feed(RankState(0, 1, (0, 1)), Promise(1, (0, 1)), Begin(WORK), plan, Take())
    assert state.taken == plan
    return state


def test_all_results_of_a_plan_are_one_report() -> None:
    state, effects = feed(at_plan(), Hold(Held(0, 1, 5)))
    assert effects == [] and state.held == (Held(0, 1, 5),)
    _, effects = feed(state, Hold(Held(1, 1, 6)))
    assert effects == [ToLeader(Holds(1, 0, (Held(0, 1, 5), Held(1, 1, 6))))]


def test_the_journal_rides_in_the_promise_and_ends_with_the_step() -> None:
    state, effects = feed(at_plan(), MicrobatchStarted(0), MicrobatchStarted(1), MicrobatchFinished(0))
    assert effects == []
    assert state.journal == Journal((0, 1), (0,)) and state.journal.computing == (1,)
    state, effects = feed(state, Promise(2, (0,)))
    assert effects == [Retire(2), ToLeader(Promised(1, 2, Journal((0, 1), (0,))))]
    record_held = record(0, complete(0), complete(1))
    held = replace(state, held=(Held(0, 1, 7), Held(1, 1, 7)))
    state, _ = feed(held, Apply(record_held, 2, (0,)), Take())
    assert state.journal == Journal()


def test_a_journal_that_a_plan_voids_rides_in_no_promise_whenever_the_plan_is_taken() -> None:
    state, _ = feed(at_plan(), MicrobatchStarted(0), MicrobatchFinished(0), Promise(2, (0, 1)))
    state, effects = feed(state, replace(PLAN, generation=2, voids=True), MicrobatchStarted(1), Promise(3, (0,)))
    assert effects[-1] == ToLeader(Promised(1, 3, Journal())), "the training thread had not taken the plan yet"


def test_a_plan_that_voids_a_step_ends_the_journal_when_it_is_taken() -> None:
    """What was journaled between the promise and then belongs to the void step."""
    state, _ = feed(at_plan(), Promise(2, (0, 1)), Close(0), replace(PLAN, generation=2, voids=True))
    state, _ = feed(state, MicrobatchStarted(0), MicrobatchFinished(0), Take(), Take(), MicrobatchStarted(1))
    _, effects = feed(state, Promise(3, (0,)))
    assert effects[-1] == ToLeader(Promised(1, 3, Journal((1,))))


def test_a_measurement_goes_to_the_leader() -> None:
    assert feed(at_plan(), TimePass(4, 1000))[1] == [ToLeader(PassTimed(1, 4, 1000))]


def test_a_promise_retires_then_reports_then_acknowledges() -> None:
    state, _ = feed(at_plan(), Hold(Held(0, 1, 5)))
    state, effects = feed(state, Promise(2, (0,)))
    assert effects == [Retire(2), ToLeader(Holds(1, 0, (Held(0, 1, 5),))), ToLeader(Promised(1, 2))]
    assert feed(state, Promise(2, (0,)), Promise(1, (0, 1))) == (state, [])


def test_inv_5_nothing_counts_or_runs_after_the_promise() -> None:
    state, _ = feed(at_plan(), Promise(2, (0,)))
    assert not rank.may_run(state, 1)
    after, effects = feed(state, Hold(Held(0, 1, 5)), Block(1, "revoked"))
    assert after.held == () and effects == []


@pytest.mark.parametrize("held", [Held(0, 2, 5), Held(7, 1, 5)])
def test_a_result_that_the_plan_did_not_ask_for_does_not_count(held: Held) -> None:
    assert feed(at_plan(), Hold(held))[0].held == ()


def test_a_result_counts_once() -> None:
    state, _ = feed(at_plan(), Hold(Held(0, 1, 5)))
    assert feed(state, Hold(Held(0, 1, 6)))[0].held == (Held(0, 1, 5),)


def test_a_failure_is_reported_with_its_suspects() -> None:
    _, effects = feed(at_plan(), Block(1, "no progress", (1,)))
    assert effects == [ToLeader(RankBlocked(1, 1, "no progress", (1,)))]
    state = replace(at_plan(), step=7)
    _, effects = feed(state, Block(1, "bucket 3", miscounted=True))
    assert effects == [ToLeader(RankBlocked(1, 1, "bucket 3", miscounted=7))]


def test_taking_a_plan_gives_up_what_it_replaces() -> None:
    state, _ = feed(at_plan(), Hold(Held(0, 1, 5)), Promise(2, (0, 1)))
    fetch = Plan(0, 2, (0, 1), WORK, (2, 1), (Transfer(0, 1, 1, (0,)),), (), (1,))
    state, _ = feed(state, fetch)
    assert state.held == (Held(0, 1, 5),), "not before the training thread gets there"
    state, _ = feed(state, Take())
    assert state.held == ()
    state, effects = feed(state, Hold(Held(0, 1, 5)), Hold(Held(1, 2, 6)))
    assert effects == [ToLeader(Holds(1, 0, (Held(0, 1, 5), Held(1, 2, 6))))]


def test_an_apply_ends_the_step() -> None:
    state, _ = feed(at_plan(), Hold(Held(0, 1, 5)), Hold(Held(1, 1, 6)))
    both = record(0, complete(0), complete(1))
    state, effects = feed(state, Apply(both, 1, (0, 1)), Take())
    assert (state.step, state.held, effects) == (1, (), [])


def test_inv_2_applying_a_result_that_is_not_here_is_a_defect() -> None:
    state, _ = feed(at_plan(), Hold(Held(0, 1, 5)))
    with pytest.raises(InvariantViolation, match="INV-2.*bucket 1 version 1.*holds version None") as caught:
        feed(state, Apply(record(0, complete(0), complete(1)), 1, (0, 1)))
    assert caught.value.invariant == 2


def test_buckets_of_other_stages_are_none_of_its_business() -> None:
    state, _ = feed(RankState(0, 1, (1,)), Promise(1, (0, 1)), Begin(WORK), PLAN, Take(), Hold(Held(1, 1, 6)))
    state, _ = feed(state, Apply(record(0, complete(0), complete(1)), 1, (0, 1)))
    assert state.queue


def test_orders_are_taken_in_their_order() -> None:
    apply = Apply(record(0, complete(0), complete(1)), 1, (0, 1))
    state, _ = feed(at_plan(), Hold(Held(0, 1, 5)), Hold(Held(1, 1, 6)), apply, PLAN, Take())
    assert state.taken == apply
    assert feed(state, Take())[0].taken == PLAN
    with pytest.raises(ValueError, match="no order to take"):
        feed(feed(state, Take())[0], Take())


def test_a_stop_overtakes_everything_and_nothing_follows_it() -> None:
    state, effects = feed(at_plan(), PLAN, Stop(11, "poisoned"))
    assert effects == [Retire(2)] and state.queue == (Stop(11, "poisoned"),)
    assert not rank.may_run(state, 1)
    state, _ = feed(state, PLAN, Take())
    assert state.taken == Stop(11, "poisoned") and state.queue == ()


def test_the_training_thread_reports_where_it_is() -> None:
    _, effects = feed(at_plan(), Begin(WORK, ("exit: SIGTERM",)), Fail((1,), "NaN"), Finish())
    assert effects == [
        ToLeader(Begun(1, 0, WORK, ("exit: SIGTERM",))),
        ToLeader(RankFailing(1, 0, "train 0", (1,), "NaN")),
        ToLeader(RankFinished(1)),
    ]


def test_rank_0_says_that_its_replica_saves() -> None:
    for rank_number, said in ((0, [ToLeader(RankSaving(0, False)), ToLeader(RankSaving(0, True))]), (1, [])):
        state = RankState(0, rank_number, (0, 1))
        assert feed(state, Save(over=False), Save(over=True)) == (state, said)


def test_a_follower_has_nothing_to_say_on_arriving_but_its_requests() -> None:
    assert feed(RankState(0, 1, (0,)), Begin(WORK))[1] == []
    assert feed(RankState(0, 0, (0,)), Begin(WORK))[1] == [ToLeader(Begun(0, 0, WORK))]


inputs = st.one_of(
    st.builds(Promise, st.integers(1, 4), st.just((0, 1))),
    st.integers(1, 4).map(lambda generation: Plan(0, generation, (0, 1), WORK, (2, 1), (), (), (0, 1))),
    st.just(Take()),
    st.builds(lambda bucket, version: Hold(Held(bucket, version, 0)), st.integers(0, 1), st.integers(1, 4)),
    st.builds(Block, st.integers(1, 4), st.just("stuck")),
)


@given(st.lists(inputs, max_size=40))
def test_inv_5_and_8_hold_for_any_order_of_inputs(messages: list[rank.Input]) -> None:
    state = RankState(0, 0, (0, 1))
    unreported: set[Held] = set()
    for message in messages:
        if isinstance(message, Take) and not state.queue:
            continue
        before = state
        state, effects = rank.step(state, message)
        assert state.promised >= before.promised
        new = set(state.held) - set(before.held)
        assert not new or isinstance(before.taken, Plan) and before.taken.generation == before.promised
        unreported |= new
        for index, effect in enumerate(effects):
            if isinstance(effect, ToLeader) and isinstance(effect.report, Holds):
                unreported -= set(effect.report.held)
            if isinstance(effect, ToLeader) and isinstance(effect.report, Promised):
                assert Retire(effect.report.generation) in effects[:index], "acknowledged before transports were retired"
                assert not unreported, "acknowledged before its results were reported"
            if isinstance(effect, ToLeader) and isinstance(effect.report, RankBlocked):
                assert effect.report.generation == state.promised


def rank_0_at_plan() -> RankState:
    return feed(RankState(0, 0, (0, 1)), Promise(1, (0, 1)), Begin(WORK), PLAN, Take())[0]


def test_a_pass_ends_at_the_same_place_in_the_stream_on_every_rank() -> None:
    newer = Plan(0, 2, (0,), WORK, (3,), (), (Compute((2,), (0, 1)),), (0, 1))
    state, _ = feed(at_plan(), Promise(2, (0,)), newer, Close(0))
    assert state.queue == (newer, Close(0)), "the plan that came before belongs to the pass, the end comes behind it"
    state, _ = feed(state, Take())
    assert state.taken == newer and state.in_pass
    state, effects = feed(state, Take())
    assert (state.taken, state.queue, effects) == (newer, (), []), "what is reduced after the pass is the newest plan"
    assert not state.in_pass


def test_rank_0_asks_once_for_the_end_of_a_pass() -> None:
    state, effects = feed(rank_0_at_plan(), AskClose(), AskClose())
    assert effects == [ToLeader(CloseAsked(0, 0))]
    newer = Plan(0, 2, (0,), WORK, (3,), (), (Compute((2,), (0, 1)),), (0, 1))
    state, effects = feed(state, Promise(2, (0,)), newer, Take(), AskClose())
    assert not any(isinstance(effect, ToLeader) and isinstance(effect.report, CloseAsked) for effect in effects), (
        "the end is on its way behind what came meanwhile"
    )
    state, _ = feed(state, Close(0), Take())
    again = Plan(0, 3, (0,), WORK, (3,), (), (Compute((2,), (0, 1)),), (0, 1))
    assert feed(state, AskClose())[1] == [], "no pass runs"
    assert feed(state, Promise(3, (0,)), again, Take(), AskClose())[1][-1] == ToLeader(CloseAsked(0, 0)), "another pass"
    assert feed(at_plan(), AskClose())[1] == [], "rank 0 speaks for all"


def test_a_pass_that_nobody_opened_is_not_closed() -> None:
    nothing_to_compute = Plan(0, 1, (0, 1), WORK, (2, 1), (), (), (0, 1))
    with pytest.raises(ValueError, match="none is open"):
        feed(at_plan(nothing_to_compute), Close(0), Take())


def test_copies_go_before_sums_and_only_to_those_that_take_part() -> None:
    plan = Plan(0, 2, (0, 1, 2), WORK, (1, 1, 1), (Transfer(1, 1, 0, (2,)),), (), (0, 2))
    copy, sums = Operation(2, 0, 1, 1, 0, (0, 2)), [Operation(2, 0, bucket, 2, None, (0, 1, 2)) for bucket in (2, 0)]
    assert operations(plan, 0, (2, 1, 0)) == operations(plan, 2, (2, 1, 0)) == (copy, *sums)
    assert operations(plan, 1, (2, 1, 0)) == tuple(sums)
    assert operations(plan, 2, (0,)) == (sums[1],), "of other stages' buckets nothing"
