"""Newcomers: who is vouched for, announced, admitted, turned away and removed, and what that does to the members."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.core import coordinator, replica
from megatron_recover.core.blame import Evidence
from megatron_recover.core.coordinator import (
    Announce,
    Arm,
    Ask,
    CoordinatorState,
    EndJob,
    Fence,
    Form,
    FormAsked,
    LeaveAsked,
    LeaveJudged,
    MembershipSettings,
    Progressed,
    Refuse,
    RoomKnown,
    TimerFired,
)
from megatron_recover.core.digest import combined, commitment
from megatron_recover.core.excuses import AT_WORK
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.forwarding import direct_peers
from megatron_recover.core.holding import held_label
from megatron_recover.core.invariants import (
    Committed,
    Fact,
    Formed,
    InvariantViolation,
    Planned,
    StateGiven,
    StateKnown,
    Voted,
    check,
)
from megatron_recover.core.membership_messages import (
    Diverged,
    Entered,
    Hello,
    JoinRefused,
    NewcomerReady,
    NewcomersProven,
    NewGeneration,
    ReplicaBlocked,
    ReplicaFinished,
    ReplicaLeaving,
    ReplicaSaving,
    TurnedAway,
)
from megatron_recover.core.rank_messages import (
    Begun,
    Close,
    CloseAsked,
    EnterTraining,
    Plan,
    Promise,
    Promised,
    StateDigested,
    Stop,
)
from megatron_recover.core.replica import (
    Admission,
    AskHold,
    HoldAsked,
    HoldExpired,
    ReplicaPhase,
    SendClaim,
    ToCoordinator,
    ToPeers,
    ToRanks,
    waiting_for,
)
from megatron_recover.core.request import TOO_FEW, exit_for, leave_of
from megatron_recover.core.speed import Estimate, Speeds
from megatron_recover.core.values import Claim, Compute, Statuses, Work
from megatron_recover.sim.explore.explorer import Explorer
from megatron_recover.sim.explore.scenario import CONFIGS, NEWCOMER, Scenario
from tests.core.build import SHAPE, WORK, complete, holds, lead, record, status, vote, working
from tests.core.test_coordinator import announced, died, ended, feed, started

DIGEST = combined([5])
CLAIM = Claim(3, "train 0", DIGEST)
DIGESTED = StateDigested(0, "train 0", 5)


def ready(claim: Claim = CLAIM, *, member: int = 0, generation: int = 1, step: int = 0) -> NewcomerReady:
    return NewcomerReady(member, generation, step, claim)


def formed(number: int = 1, **settings: Any) -> CoordinatorState:
    """Three members train, and the newcomers 3, 4, ... are formed."""
    state, _ = feed(started(**settings), FormAsked(number), *(Hello(3 + each, "same") for each in range(number)))
    return state


def joined(**settings: Any) -> CoordinatorState:
    """Newcomer 3 is announced in generation 2."""
    state, effects = feed(formed(**settings), ready(), TimerFired("gather 1"))
    assert announced(effects).joins == (CLAIM,)
    return state


# --- The coordinator: forming ------------------------------------------------------------------------------------------------


def test_an_id_is_given_once_also_after_its_newcomer_is_lost() -> None:
    state, effects = feed(started(), FormAsked(2))
    assert effects == [Form(3), Form(4)]
    _, effects = feed(state, died(4), FormAsked(1))
    assert effects == [Fence(4), Form(5)]


def test_nobody_is_formed_before_training_and_nobody_greets_unasked() -> None:
    assert feed(CoordinatorState(MembershipSettings(2)), FormAsked(1))[1] == []
    state = started()
    assert feed(state, Hello(3, "same")) == (state, [])


def test_a_newcomer_that_does_not_start_like_the_members_is_lost_without_a_generation() -> None:
    state, effects = feed(started(), FormAsked(1), Hello(3, "other", (("argument seed", "2"),)))
    assert effects == [Form(3), Fence(3)] and state.roster == (0, 1, 2)
    assert "does not start like replica 0" in state.losses[-1].detail


def test_a_newcomer_that_dies_while_it_forms_changes_nothing_for_the_members() -> None:
    before, _ = feed(formed(), ReplicaBlocked(0, 1, "late", (1,)), TimerFired("grace 1"), ReplicaBlocked(0, 2, "late", (1,)))
    after, effects = feed(before, died(3))
    assert effects == [Fence(3)], "a generation was made for a loss outside the roster"
    kept = ("generation", "roster", "evidence", "evidence_from", "fruitless", "reason", "trouble", "patience", "waits")
    assert before.fruitless and before.evidence.pairs
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]


# --- The coordinator: announcing -------------------------------------------------------------------------------------------


def test_all_newcomers_that_are_ready_go_in_together() -> None:
    other = Claim(4, "train 0", DIGEST)
    state, effects = feed(formed(2), ready(other), ready())
    assert effects == [Arm("gather 1", "gather_s")]
    state, effects = feed(state, TimerFired("gather 1"))
    assert announced(effects) == NewGeneration(2, (0, 1, 2, 3, 4), (), "replicas 3 4 are to join", joins=(CLAIM, other))
    assert state.joins == (CLAIM, other) and not state.ready and not state.forming


@pytest.mark.parametrize(
    ("said", "before", "why"),
    [
        (ready(generation=2), (), "is over"),
        (ready(member=3), (), "no member"),
        (ready(step=0), (ready(), TimerFired("gather 1"), TurnedAway(0, 2, (3,), "late")), "generation 1 is over"),
        (ready(), (ReplicaSaving(1, False),), "a save is in progress"),
        (ready(), (ReplicaFinished(1, 0),), "training ends"),
        (ready(), (ReplicaBlocked(1, 1, "late"),), "trouble"),
        (ready(generation=2), (coordinator.ExitAsked("SIGTERM"),), "was asked to end"),
        (ready(), (LeaveAsked((2,), "drain"),), "was asked to end"),
    ],
)
def test_a_claim_that_cannot_join_now_is_refused_by_name(said: NewcomerReady, before: Any, why: str) -> None:
    state, _ = feed(formed(), *before)
    after, effects = feed(state, said)
    [refuse] = effects
    assert isinstance(refuse, Refuse) and refuse.refused.newcomer == 3 and why in refuse.refused.reason, effects
    assert (after.roster, after.ready) == (state.roster, ())


def test_a_newcomer_may_join_once_a_member_that_was_asked_to_leave_has_left() -> None:
    state, effects = feed(formed(), LeaveAsked((2,), "drain"), ReplicaLeaving(2, 1))
    assert announced(effects).left == (2,)
    assert feed(state, ready(generation=2))[1] == [Arm("gather 2", "gather_s")]


def test_a_newcomer_may_join_where_a_member_that_was_asked_to_leave_is_needed() -> None:
    state, _ = feed(formed(), LeaveAsked((2,), "drain"), died(0), died(1))
    assert state.roster == (2,)
    assert feed(state, ready(generation=3, member=2))[1] == [Arm("gather 3", "gather_s")]


def test_between_two_joins_a_step_is_committed() -> None:
    state, _ = feed(joined(), TurnedAway(0, 2, (3,), "late"))
    _, [refused] = feed(state, ready(generation=2))
    assert isinstance(refused, Refuse) and "may begin in step 1" in refused.refused.reason
    _, effects = feed(state, ready(Claim(3, "train 1", DIGEST), generation=2, step=1))
    assert effects == [Arm("gather 2", "gather_s")]


def test_what_a_newcomer_missed_before_it_was_turned_away_makes_no_generation() -> None:
    broke = ReplicaBlocked(3, 2, "the link to the leader of replica 0 broke")
    state, effects = feed(joined(), broke, TurnedAway(0, 2, (3,), "late"), TimerFired("grace 2"))
    assert state.generation == 2 and not any(isinstance(effect, Announce) for effect in effects), effects
    own = ReplicaBlocked(1, 2, "the link to the leader of replica 0 broke")
    state, effects = feed(joined(), own, TurnedAway(0, 2, (3,), "late"), TimerFired("grace 2"))
    assert announced(effects).generation == 3, "that of a member counts"


def test_a_loss_while_newcomers_gather_refuses_them_and_they_may_ask_again() -> None:
    state, effects = feed(formed(), ready(), died(2))
    assert announced(effects).joins == () and Refuse(JoinRefused(3, "train 0", "generation 2 was made before"), 0) in effects
    assert feed(state, TimerFired("gather 1"))[1] == [] and state.forming == (3,)


def test_joining_takes_nothing_from_a_job_that_is_about_to_save() -> None:
    _, effects = feed(formed(), ready(), ReplicaSaving(0, False), TimerFired("gather 1"))
    assert not [effect for effect in effects if isinstance(effect, Announce)]
    assert [effect.refused.newcomer for effect in effects if isinstance(effect, Refuse)] == [3]


# --- The coordinator: until it is proven -----------------------------------------------------------------------------------


def test_a_newcomer_that_is_turned_away_is_dropped_without_a_generation_and_may_ask_again() -> None:
    state, effects = feed(joined(), TurnedAway(1, 2, (3,), "late"))
    assert effects == [Refuse(JoinRefused(3, "train 0", "late", 2, is_fault=True))]
    assert (state.generation, state.roster, state.joins, state.forming) == (2, (0, 1, 2), (), (3,))
    assert feed(state, TurnedAway(0, 2, (3,), "late")) == (state, []), "every member reports it"


def test_what_a_newcomer_reported_before_it_was_turned_away_makes_no_generation_and_accuses_nobody() -> None:
    """Members end their links to it, which it may report before they report that they do not admit it."""
    lost = ReplicaBlocked(3, 2, "the link broke", (0,))
    state, effects = feed(joined(), lost, TurnedAway(1, 2, (3,), "late"), TimerFired("grace 2"))
    assert not [effect for effect in effects if isinstance(effect, Announce)]
    assert (state.reason, state.evidence) == ("", Evidence())
    state, effects = feed(
        joined(), lost, ReplicaBlocked(0, 2, "late", (1,)), TurnedAway(1, 2, (3,), "late"), TimerFired("grace 2")
    )
    assert announced(effects).reason == "replica 0: late", "a member's request stands"
    _, effects = feed(joined(), lost, ReplicaBlocked(0, 2, "late", (1,)), TimerFired("grace 2"))
    assert [loss.replica for loss in announced(effects).losses] == [3], "it is removed, whoever has asked"


def test_a_job_whose_members_have_finished_does_not_wait_for_a_newcomer_that_was_turned_away() -> None:
    state, _ = feed(joined(), *(ReplicaFinished(number, 0) for number in range(3)))
    assert not state.over
    assert ended(feed(state, TurnedAway(0, 2, (3,), "late"))[1]).exit_code == ExitCode.OK


def test_every_generation_repeats_the_claim_until_a_step_is_committed_with_the_newcomer() -> None:
    state, effects = feed(joined(), died(2))
    assert announced(effects).roster == (0, 1, 3) and announced(effects).joins == (CLAIM,)
    state, _ = feed(state, NewcomersProven(1, 2, (3,)))
    assert state.joins == (CLAIM,), "the report is of a generation that is over"
    state, _ = feed(state, NewcomersProven(1, 3, (3,)))
    assert state.joins == () and announced(feed(state, died(1))[1]).joins == ()


def test_a_proven_newcomer_has_entered_the_generation_in_which_it_joined() -> None:
    state, _ = feed(joined(), *(Entered(each, 2, 0) for each in (0, 1, 2, 3)), NewcomersProven(0, 2, (3,)))
    assert feed(state, TimerFired("follow 2")) == (state, []), "it was removed as one that did not enter"


def test_a_newcomer_may_be_asked_to_leave_once_it_is_proven_and_does_not_count_as_who_stays_before() -> None:
    _, effects = feed(formed(), LeaveAsked((3,), "drain"))
    assert "it is not a member yet" in str(effects)
    _, effects = feed(joined(), LeaveAsked((0, 1, 2), "drain"))
    assert "no replica would stay" in str(effects)
    state, _ = feed(joined(), NewcomersProven(0, 2, (3,)))
    assert feed(state, LeaveAsked((3,), "drain"))[1] == [LeaveJudged((3,), (), "drain"), Ask(3, (leave_of(3),))]
    assert "there is no such replica" in str(feed(state, LeaveAsked((4,), "drain"))[1])


def test_a_member_that_waits_in_vain_gets_a_generation_without_the_newcomer_and_nobody_is_blamed() -> None:
    state, _ = feed(joined(), ReplicaBlocked(0, 2, "the sum stalled", (1,), stalled=True))
    state, effects = feed(state, TimerFired("grace 2"))
    assert Fence(3) in effects and announced(effects).roster == (0, 1, 2) and announced(effects).joins == ()
    assert not state.evidence.pairs and not state.fruitless and not state.trouble
    late = ReplicaBlocked(2, 2, "the sum stalled", (1,), stalled=True)
    assert not feed(state, late)[0].evidence.pairs, "a wait for the newcomer is evidence against a member"


def test_a_bad_member_is_found_although_newcomers_come_and_go() -> None:
    state, _ = feed(joined(), ReplicaBlocked(0, 2, "late", (1,)), TimerFired("grace 2"))
    for _ in range(4):
        number = state.generation
        state, _ = feed(state, FormAsked(1), *(ReplicaBlocked(each, number, "late", (1,)) for each in (0, 2)))
        newcomer = max(state.forming)
        state, effects = feed(state, Hello(newcomer, "same"), ready(Claim(newcomer, "train 0", 0), generation=number))
        assert isinstance(effects[-1], Refuse), "another newcomer came in between"
        state, effects = feed(state, TimerFired(f"grace {number}"))
        if 1 not in state.roster:
            break
        state, _ = feed(state, *[TimerFired(state.trouble)] if state.trouble else [])
    assert state.losses[-1].replica == 1 and "at fault" in state.losses[-1].detail


def test_the_work_of_a_newcomer_excuses_nobody_and_that_of_a_member_keeps_it() -> None:
    at_work = coordinator.AtWork((1,))
    state, effects = feed(joined(), at_work, ReplicaBlocked(0, 2, "late"), TimerFired("grace 2"))
    assert announced(effects).roster == (0, 1, 2, 3) and AT_WORK in [getattr(each, "reason", "") for each in effects]
    state, effects = feed(joined(), coordinator.AtWork((3,)), ReplicaBlocked(0, 2, "late"), TimerFired("grace 2"))
    assert announced(effects).roster == (0, 1, 2)


def test_the_entry_and_the_step_of_a_newcomer_count_for_nothing() -> None:
    state = joined()
    assert feed(state, Entered(3, 2, 5), Progressed(3, 5)) == (state, [])
    _, effects = feed(state, Entered(3, 2, 0), TimerFired("follow 2"))
    assert not [effect for effect in effects if isinstance(effect, Fence)], "members are late for a newcomer"
    _, effects = feed(state, *(Entered(number, 2, 0) for number in range(3)), TimerFired("follow 2"))
    assert effects == [], "nobody waits for the entry of a newcomer"


def test_later_joins_back_off_after_each_newcomer_that_had_to_be_removed() -> None:
    state, starts = joined(), []
    for newcomer in range(4, 8):
        state, _ = feed(state, died(newcomer - 1), FormAsked(1), Hello(newcomer, "same"))
        starts.append(state.joins_from)
        claim = Claim(newcomer, f"train {state.joins_from}", 0)
        state, _ = feed(
            state, Progressed(0, state.joins_from), ready(claim, generation=state.generation, step=state.joins_from)
        )
        state, _ = feed(state, TimerFired(f"gather {state.generation}"))
    assert [later - before for before, later in zip(starts, starts[1:], strict=False)] == [3, 5, 9]
    state, _ = feed(state, NewcomersProven(0, state.generation, (7,)))
    assert state.num_setbacks == 0


def test_a_newcomer_that_cannot_enter_is_lost_and_without_members_the_job_ends() -> None:
    state, effects = feed(joined(), TurnedAway(3, 2, (3,), "it has given up"))
    assert Fence(3) in effects and announced(effects).roster == (0, 1, 2)
    state, _ = feed(joined(), died(0), died(1), died(2))
    assert state.roster == (3,)
    assert ended(feed(state, TurnedAway(3, 5, (3,), "it was never admitted"))[1]).exit_code == ExitCode.NO_REPLICA_LEFT


def test_an_outvoted_newcomer_is_removed() -> None:
    _, effects = feed(joined(), Diverged(0, 2, 0, (3,), "they differ"))
    assert announced(effects).roster == (0, 1, 2) and announced(effects).trusted_from == 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_job_with_too_few_members_ends_unless_it_waits_for_newcomers(waits: bool) -> None:
    state, effects = feed(formed(min_replicas=3, waits_for_newcomers=waits), died(2))
    assert (TOO_FEW in announced(effects).requests) is not waits
    if not waits:
        return
    _, effects = feed(state, died(3))
    assert effects == [Fence(3), Ask(0, (TOO_FEW,))], "the next record carries the request, without a generation"
    state, effects = feed(state, ready(generation=2), TimerFired("gather 2"))
    assert announced(effects).requests == ()
    state, effects = feed(state, died(3))
    assert announced(effects).requests == (TOO_FEW,), "the last newcomer is lost"


def test_too_few_members_wait_for_newcomers_that_can_be_formed_until_none_can() -> None:
    state, _ = feed(started(min_replicas=3, waits_for_newcomers=True), RoomKnown(True))
    state, effects = feed(state, died(2))
    assert announced(effects).requests == (), "the slots are not free yet"
    state, effects = feed(state, FormAsked(1), died(3))
    assert effects == [Form(3), Fence(3)], "there will be another one"
    state, effects = feed(state, RoomKnown(False), RoomKnown(False))
    assert effects == [Ask(0, (TOO_FEW,))] and state.requests == (TOO_FEW,)


def test_without_the_flag_nobody_waits_for_room() -> None:
    state, _ = feed(started(min_replicas=3), RoomKnown(True))
    state, effects = feed(state, died(2))
    assert announced(effects).requests == (TOO_FEW,)
    assert feed(state, RoomKnown(False))[1] == []


def test_the_lowest_id_among_the_older_members_gets_the_grant() -> None:
    state, _ = feed(joined(), died(0), died(1), coordinator.FenceConfirmed(0))
    assert state.grants.open is not None and state.grants.open.writer == 2


# --- A member ----------------------------------------------------------------------------------------------------------------


def test_a_member_vouches_for_an_equal_digest_while_it_computes_the_step() -> None:
    state, effects = lead(working(), DIGESTED, CLAIM)
    assert effects == [ToCoordinator(NewcomerReady(0, 1, 0, CLAIM))]


@pytest.mark.parametrize(
    ("before", "claim", "why"),
    [
        ((), CLAIM, "does not know its digest"),
        ((DIGESTED,), replace(CLAIM, digest=6), f"is {DIGEST}"),
        ((DIGESTED,), replace(CLAIM, label="train 1"), "does not compute train 1"),
        ((StateDigested(0, "train 1", 5),), CLAIM, "does not know its digest"),
        ((DIGESTED, CloseAsked(0, 0)), CLAIM, "too late"),
        ((DIGESTED, replica.CoordinatorLost()), CLAIM, "in no position"),
        ((DIGESTED, holds()), CLAIM, "does not compute"),
        ((DIGESTED, Begun(0, 0, WORK, (exit_for("SIGTERM"),))), CLAIM, "about to end"),
    ],
)
def test_a_member_refuses_what_it_cannot_vouch_for(before: Any, claim: Claim, why: str) -> None:
    state, _ = lead(working(), *before)
    _, [refused] = lead(state, claim)
    assert isinstance(refused, ToPeers) and refused.peers == (3,)
    assert isinstance(refused.message, JoinRefused) and why in refused.message.reason


def test_an_evaluation_is_no_step_to_join_in() -> None:
    work = Work("evaluate 1/1", 3, (0,))
    _, [refused] = lead(working(work=work), StateDigested(0, work.label, 5), replace(CLAIM, label=work.label))
    assert isinstance(refused, ToPeers) and "is no training step" in refused.message.reason  # type: ignore[union-attr]


def exchanging(number: int = 0, members: int = 2, above: int = 64) -> replica.ReplicaState:
    """A member whose ranks have promised the generation 2 with newcomer 3; it misses the statuses of the others."""
    state = replace(working(number, tuple(range(members))), tree_above=above)
    claim = replace(CLAIM, replica=max(3, members))
    news = NewGeneration(2, (*range(members), claim.replica), joins=(claim,))
    state, effects = lead(state, DIGESTED, news, Promised(0, 2))
    assert not [each for each in effects if isinstance(each, ToPeers) and claim.replica in each.peers]
    return state


def theirs(number: int, **fields: Any) -> Any:
    return status(number, contributions=((number,),), **fields)


def test_nobody_waits_for_a_newcomer_and_the_first_member_sends_it_the_plan() -> None:
    state = exchanging()
    assert waiting_for(state) == (1,)
    state, effects = lead(state, theirs(1))
    [(peers, admission)] = [(each.peers, each.message) for each in effects if isinstance(each, ToPeers)]
    assert peers == (3,) and isinstance(admission, Admission)
    assert admission.plan.roster == (0, 1, 3) and admission.plan.computes == () and admission.plan.reduces == (0,)
    assert state.roster == (0, 1, 3) and state.joins == (CLAIM,) and state.phase is ReplicaPhase.WORKING
    other, effects = lead(exchanging(1), theirs(0, state_digest=DIGEST))
    assert other.roster == (0, 1, 3) and not [each for each in effects if isinstance(each, ToPeers)]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"complete": (complete(),)}, "is reduced already"),
        ({"state_digest": 9}, "its state digest is"),
        ({"step": 1, "work": None, "committed": record()}, "is not begun"),
        ({"step": 1, "work": Work("train 1", 3, (0,)), "committed": record()}, "the step is train 1"),
    ],
)
def test_a_newcomer_that_does_not_fit_is_turned_away_and_awaited_by_nobody(fields: Any, why: str) -> None:
    state = exchanging()
    if "committed" in fields:  # else this member could not adopt the record
        state = replace(state, held=((holds().held[0],),))
    state, effects = lead(state, theirs(1, **fields))
    [told] = [each.message for each in effects if isinstance(each, ToCoordinator)]
    assert isinstance(told, TurnedAway) and told.newcomers == (3,) and why in told.reason
    assert "replica 3" not in told.reason, "the message names it already"
    assert state.roster == (0, 1) and state.joins == ()


def test_without_any_digest_of_a_member_a_newcomer_is_turned_away() -> None:
    state, _ = lead(exchanging(1), theirs(0))
    assert state.roster == (0, 1, 3), "this member knows its digest"
    state = replace(exchanging(), statuses=tuple(replace(each, state_digest=None) for each in exchanging().statuses))
    state, _ = lead(state, theirs(1))
    assert state.roster == (0, 1)


@pytest.mark.parametrize("admits", [True, False])
def test_at_the_limit_of_the_tree_the_exchange_is_direct_and_votes_follow_the_working_roster(admits: bool) -> None:
    state, effects = lead(exchanging(members=64), *(theirs(n) for n in range(1, 63)))
    assert waiting_for(state) == (63,) and len(direct_peers(state)) == 63
    state, effects = lead(state, replace(theirs(63), state_digest=DIGEST if admits else 9))
    assert len(state.roster) == 64 + admits and len(direct_peers(state)) == (0 if admits else 63)


def test_a_newcomers_vote_is_part_of_no_majority_and_makes_it_the_minority() -> None:
    state, _ = lead(exchanging(), theirs(1), holds(version=2))
    votes = [vote(number, generation=2, of=record(0, complete(version=2, checksum=7 + (number == 3)))) for number in (1, 3)]
    _, effects = lead(state, *votes)
    [diverged] = [each.message for each in effects if isinstance(each, ToCoordinator)]
    assert isinstance(diverged, Diverged) and diverged.minority == (3,)
    wrong = [vote(number, generation=2, of=record(0, complete(version=2, checksum=8))) for number in (1, 3)]
    _, effects = lead(state, *wrong)
    [diverged] = [each.message for each in effects if isinstance(each, ToCoordinator)]
    assert isinstance(diverged, Diverged) and diverged.minority == (), "two members and a newcomer have no majority"


def test_a_step_that_is_committed_with_its_vote_proves_a_newcomer() -> None:
    state, _ = lead(exchanging(), theirs(1), holds(version=2))
    of = record(0, complete(version=2))
    state, effects = lead(state, vote(1, generation=2, of=of), vote(3, generation=2, of=of))
    assert ToCoordinator(NewcomersProven(0, 2, (3,))) in effects and state.joins == () and state.roster == (0, 1, 3)
    state, [plan] = lead(state, Begun(0, 1, Work("train 1", 3, (0,))))
    assert isinstance(plan, ToRanks) and plan.order.quotas == (1, 1, 1)  # type: ignore[union-attr]


# --- A hold ------------------------------------------------------------------------------------------------------------------

CLOSE = ToRanks(Close(0))


def holding(*before: Any) -> replica.ReplicaState:
    """A member that has vouched for newcomer 3 and keeps the end of its pass back."""
    state, effects = lead(working(), DIGESTED, CLAIM, CloseAsked(0, 0), *before)
    assert CLOSE not in effects[:2] and effects[0] == ToCoordinator(NewcomerReady(0, 1, 0, CLAIM))
    return state


def test_a_member_that_vouches_keeps_the_end_of_its_pass_back() -> None:
    state = holding()
    assert held_label(state) == "train 0" and state.close_waits and not state.is_closed
    other = replace(CLAIM, replica=4)
    after, effects = lead(state, other)
    assert effects == [ToCoordinator(NewcomerReady(0, 1, 0, other))], "another newcomer is not too late yet"
    assert after.hold is not None and after.hold.newcomers == (3, 4)


@pytest.mark.parametrize(
    "end",
    [
        HoldExpired("train 0"),
        JoinRefused(3, "train 0", "a save is in progress"),
        replica.LinkLost(3),
        replica.CoordinatorLost(),
        replace(CLAIM, digest=6),
    ],
    ids=lambda end: type(end).__name__,
)
def test_the_pass_ends_as_soon_as_nothing_keeps_it_open(end: Any) -> None:
    state, effects = lead(holding(), end)
    assert CLOSE in effects and state.hold is None and state.is_closed and not state.close_waits
    again, effects = lead(state, end)
    assert CLOSE not in effects, "it ended twice"
    again, _ = lead(again, HoldAsked(3, "train 0"))
    assert again.hold is None, "a step is held once"


def test_a_generation_ends_a_hold_after_its_ranks_have_promised() -> None:
    """Else they could begin a sum of the generation that is over, whose result would turn the newcomer away."""
    news = NewGeneration(2, (0, 1, 2, 3), joins=(CLAIM,))
    state, effects = lead(holding(), news)
    assert effects == [ToRanks(Promise(2, (0, 1, 2, 3))), CLOSE] and state.hold is None
    assert lead(working(), DIGESTED, CLAIM, news)[1][-1] == ToRanks(Promise(2, (0, 1, 2, 3))), "the pass is not at its end"


@pytest.mark.parametrize(
    "other",
    [HoldExpired("train 1"), JoinRefused(4, "train 0", ""), JoinRefused(3, "train 1", ""), HoldAsked(4, "train 1")],
    ids=str,
)
def test_nothing_else_ends_a_hold(other: Any) -> None:
    assert lead(holding(), other) == (holding(), [])


def test_a_hold_for_two_newcomers_ends_when_neither_needs_it() -> None:
    state, _ = lead(holding(), HoldAsked(4, "train 0"))
    state, effects = lead(state, JoinRefused(3, "train 0", "late"))
    assert effects == [] and state.hold is not None and state.hold.released == (3,)
    assert lead(state, HoldAsked(3, "train 0"), JoinRefused(3, "train 0", "late")) == (state, []), "it needs it once"
    assert lead(state, JoinRefused(4, "train 0", "late"))[1] == [CLOSE]


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ((CloseAsked(0, 0),), "its sums may be over at any time"),
        ((replica.CoordinatorLost(),), "nobody will join"),
        ((Begun(0, 0, WORK, (exit_for("SIGTERM"),)),), "the job is about to end"),
        ((holds(),), "it has voted"),
    ],
)
def test_a_pass_that_is_over_or_that_nobody_may_enter_is_not_held(before: Any, why: str) -> None:
    state, _ = lead(working(), *before)
    assert lead(state, HoldAsked(3, "train 0")) == (state, []), why


def test_a_member_without_a_microbatch_has_no_pass_to_hold() -> None:
    state, _ = lead(working(2, (0, 1, 2), work=Work("train 0", 2, (0,))), HoldAsked(3, "train 0"))
    assert state.plan is not None and not state.plan.computes and state.hold is None


def committed(*said: Any) -> replica.ReplicaState:
    """The only member, which has committed step 0, in which it heard this."""
    state, _ = lead(working(0, (0,)), *said, CloseAsked(0, 0), HoldExpired("train 0"), holds())
    assert state.step == 1 and state.phase is ReplicaPhase.IDLE
    return state


def test_a_hold_that_is_asked_for_before_its_step_begins_with_it() -> None:
    state, _ = lead(committed(HoldAsked(3, "train 1")), Begun(0, 1, Work("train 1", 3, (0,))))
    assert held_label(state) == "train 1"
    state, effects = lead(state, CloseAsked(0, 1))
    assert effects == [] and lead(state, HoldExpired("train 1"))[1] == [ToRanks(Close(1))]


@pytest.mark.parametrize(("label", "stays"), [("evaluate 1/1", True), ("train 2", False)])
def test_a_hold_waits_for_no_other_training_step(label: str, stays: bool) -> None:
    buckets = (0,)
    state, _ = lead(committed(HoldAsked(3, "train 1")), Begun(0, 1, Work(label, 3, buckets)))
    assert (state.hold is not None) == stays and held_label(state) == ""
    assert lead(state, CloseAsked(0, 1))[1] == [ToRanks(Close(1))], "another step is held"


def test_a_hold_of_a_step_that_never_begins_ends_with_the_generation() -> None:
    state, effects = lead(working(), HoldAsked(3, "train 1"), NewGeneration(2, (0, 1, 2)))
    assert state.hold is None and effects == [ToRanks(Promise(2, (0, 1, 2)))]


def test_a_newcomer_asks_for_a_hold_before_it_joins_alone() -> None:
    ask = AskHold(1, "train 5")
    assert lead(replica.ReplicaState(3, SHAPE), ask)[1] == [ToPeers((1,), HoldAsked(3, "train 5"))]
    assert lead(working(), ask)[1] == []


def test_a_refusal_of_the_coordinator_goes_to_the_member_that_holds_too() -> None:
    _, effects = feed(formed(), ReplicaSaving(1, False), ready(member=2))
    assert [each.member for each in effects if isinstance(each, Refuse)] == [2]
    _, effects = feed(formed(), ready(member=1), ReplicaSaving(1, False), TimerFired("gather 1"))
    assert [each.member for each in effects if isinstance(each, Refuse)] == [1]


# --- The newcomer ------------------------------------------------------------------------------------------------------------


def claimed() -> replica.ReplicaState:
    state, effects = lead(replica.ReplicaState(3, SHAPE), SendClaim(0), DIGESTED, SendClaim(0))
    assert effects == [ToPeers((0,), CLAIM)], "it claims nothing before its ranks have read"
    return state


ANNOUNCED = NewGeneration(2, (0, 1, 3), joins=(CLAIM,))
SPEEDS = Speeds(4, (Estimate(0, 7, 3),), ((0, 7),))


def admission(generation: int = 2) -> Admission:
    """The admission that member 0 sends; the job is at step 4."""
    _, effects = lead(exchanging(), theirs(1))
    [sent] = [each.message for each in effects if isinstance(each, ToPeers)]
    assert isinstance(sent, Admission)
    plan = replace(sent.plan, step=4, generation=generation)
    return replace(sent, generation=generation, plan=plan, committed=commitment(record(3)), speeds=SPEEDS)


@pytest.mark.parametrize("is_early", [False, True])
def test_an_admitted_newcomer_enters_training_with_what_the_members_know(is_early: bool) -> None:
    news = [ANNOUNCED, Promised(0, 2), admission()]
    state, effects = lead(claimed(), *([news[2], *news[:2]] if is_early else news))
    assert effects[-1] == ToRanks(EnterTraining(4)) and ToCoordinator(Entered(3, 2, 0)) in effects
    assert (state.step, state.speeds, state.roster, state.phase) == (4, SPEEDS, (0, 1, 3), ReplicaPhase.IDLE)
    state, effects = lead(state, Begun(0, 4, WORK))
    assert isinstance(effects[0], ToRanks) and effects[0].order.computes == ()  # type: ignore[union-attr]
    assert state.contributions == () and state.phase is ReplicaPhase.WORKING


@pytest.mark.parametrize("above", [64, 2])
def test_a_newcomer_that_waits_needs_its_link_to_the_first_of_the_older_members_alone(above: int) -> None:
    news = NewGeneration(2, (0, 1, 2, 3), joins=(CLAIM,))
    for messages in ((news,), (news, Promised(0, 2))):
        state, _ = lead(replace(claimed(), tree_above=above), *messages)
        assert lead(state, replica.LinkLost(1))[1] == lead(state, replica.LinkLost(2))[1] == []
        [told] = lead(state, replica.LinkLost(0))[1]
        assert isinstance(told, ToCoordinator) and isinstance(told.message, ReplicaBlocked) and told.message.suspects == (0,)


def test_a_newcomer_that_begins_other_work_calls_itself_the_minority() -> None:
    state, _ = lead(claimed(), ANNOUNCED, Promised(0, 2), admission())
    _, [told] = lead(state, Begun(0, 4, Work("train 9", 3, (0,))))
    assert isinstance(told, ToCoordinator) and isinstance(told.message, Diverged) and told.message.minority == (3,)


def test_an_admission_is_taken_by_nobody_else() -> None:
    state = exchanging(1)
    assert lead(state, admission()) == (state, [])


def test_a_refused_newcomer_may_read_a_later_state_and_one_that_trains_ends() -> None:
    refused = JoinRefused(3, "train 0", "late")
    state, effects = lead(claimed(), refused)
    assert effects == [] and (state.claim, state.served, state.phase) == (None, (), ReplicaPhase.JOINING)
    waits, _ = lead(claimed(), ANNOUNCED, Promised(0, 2))
    assert lead(waits, refused) == (waits, []), "once it is announced, only the coordinator refuses it"
    state, effects = lead(waits, replace(refused, generation=2))
    assert effects == [] and state.phase is ReplicaPhase.JOINING and state.generation == 2
    state, effects = lead(waits, admission(), replace(refused, generation=2))
    assert (
        effects == [ToRanks(Stop(ExitCode.FAILED, "this newcomer is turned away: late"))] or state.phase is ReplicaPhase.STOPPED
    )


def test_a_newcomer_does_not_enter_with_a_state_that_it_has_given_up() -> None:
    state, _ = lead(claimed(), JoinRefused(3, "train 0", "late"))
    state, [told] = lead(state, ANNOUNCED)
    assert isinstance(told, ToCoordinator) and isinstance(told.message, TurnedAway) and told.message.newcomers == (3,)
    assert state.phase is ReplicaPhase.JOINING and lead(state, ANNOUNCED)[1] == []


def test_each_generation_admits_anew_and_what_was_held_counts_for_nothing() -> None:
    state, _ = lead(claimed(), ANNOUNCED, Promised(0, 2), admission(), Begun(0, 4, WORK))
    state, effects = lead(state, replace(ANNOUNCED, generation=3), Promised(0, 3))
    assert waiting_for(state) == (0,) and not [each for each in effects if isinstance(each, ToPeers)]
    state, effects = lead(state, admission(3))
    assert state.phase is ReplicaPhase.WORKING and state.held == ((),), "it was not at the step any more"


def test_without_older_members_only_who_was_admitted_just_before_goes_on() -> None:
    alone = NewGeneration(3, (3,), joins=(CLAIM,))
    state, effects = lead(claimed(), ANNOUNCED, Promised(0, 2), alone, Promised(0, 3))
    assert isinstance(effects[-1], ToCoordinator) and isinstance(effects[-1].message, TurnedAway)
    admitted, _ = lead(claimed(), ANNOUNCED, Promised(0, 2), admission(), Begun(0, 4, WORK))
    state, _ = lead(admitted, alone, Promised(0, 3))
    assert state.phase is ReplicaPhase.WORKING and state.roster == (3,) and state.contributions
    after, effects = lead(state, holds(version=3, step=4))
    assert ToCoordinator(NewcomersProven(3, 3, (3,))) in effects and after.joins == (), "nobody could ever join it"
    state, effects = lead(admitted, replace(alone, generation=4), Promised(0, 4))
    assert isinstance(effects[-1], ToCoordinator) and isinstance(effects[-1].message, TurnedAway), "others may have committed"


def test_a_newcomer_that_cannot_go_on_does_not_plan_with_the_statuses_of_others_in_a_tree() -> None:
    claims = tuple(replace(CLAIM, replica=each) for each in (3, 4))
    state, _ = lead(replace(claimed(), tree_above=1), NewGeneration(2, (0, 3, 4), joins=claims))
    state, _ = lead(state, NewGeneration(3, (3, 4), joins=claims), Promised(0, 3))
    said = replace(status(4, generation=3), step=4, work=WORK)
    assert lead(state, Statuses(4, 3, (said,)))[1] == [], "it is the root, and has heard from all others"


def test_a_pass_is_closed_for_newcomers_only_in_its_own_step() -> None:
    state, effects = lead(working(0, (0,)), CloseAsked(0, 0), holds())
    assert ToRanks(Close(0)) in effects and state.step == 1 and not state.is_closed


# --- The exploration ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [{}, {"crashes": 1}, {"alarms": 1}, {"suspicions": 1}], ids=str)
def test_the_explored_newcomers_are_admitted_turned_away_proven_and_lost(faults: dict[str, int]) -> None:
    explorer = Explorer(Scenario("newcomer", **NEWCOMER, **faults))
    report = explorer.run()
    assert report.found is None, report.found
    leaders = [explorer.nodes[number].leader for number in range(1, len(explorer.nodes) + 1)]
    assert {bool(leader.admitted_in) for leader in leaders if leader.replica == 1} == {False, True}
    assert max(leader.step for leader in leaders if leader.replica == 1) == 2
    ends = [explorer.coordinators[number] for number in range(1, len(explorer.coordinators) + 1)]
    assert any(state.over and 1 in state.roster for state in ends), "no job ended with the newcomer"
    assert any(state.over and 1 not in state.roster for state in ends)


def test_newcomers_are_explored_beside_every_kind_of_fault() -> None:
    names = [scenario.name for config in CONFIGS.values() for scenario in config if scenario.newcomers]
    for word in ("crash", "suspicion", "lost message", "save", "leave", "drift", "miscount", "evaluation", "speed", "links"):
        assert any(word in name for name in names), word


def test_an_ended_job_forms_nobody() -> None:
    state, effects = feed(joined(), died(0), died(1), died(2), died(3))
    assert [type(effect) for effect in effects if isinstance(effect, EndJob)] == [EndJob]
    assert feed(state, FormAsked(1))[1] == []


def test_inv_6_a_newcomer_comes_back_only_if_it_never_took_up_its_admission() -> None:
    facts: list[Fact] = [Formed(1, (0,)), Entered(0, 1, 0), StateKnown(0, 0, 0, 5), StateKnown(3, 0, 0, 5)]
    facts += [Formed(2, (0, 3), newcomers=(3,)), Entered(0, 2, 0), Entered(3, 2, 0), StateGiven(0, 2, 0, DIGEST)]
    plans = [Planned(each, Plan(0, 2, (0, 3), WORK, (3, 0), (), (), (0,))) for each in (0, 3)]
    back = [Formed(3, (0,)), Formed(4, (0, 3), newcomers=(3,))]
    check(SHAPE, [*facts, plans[0], *back])
    with pytest.raises(InvariantViolation, match=r"INV-6: replicas \[3\] come back"):
        check(SHAPE, [*facts, *plans, *back])


def test_inv_7_a_proven_newcomer_computes_although_a_newer_announcement_does_not_know_it_yet() -> None:
    facts: list[Fact] = [Formed(1, (0,)), Entered(0, 1, 0), StateKnown(0, 0, 0, 5), StateKnown(3, 0, 0, 5)]
    facts += [Formed(2, (0, 3), newcomers=(3,)), Entered(0, 2, 0), Entered(3, 2, 0), StateGiven(0, 2, 0, DIGEST)]
    facts += [Planned(each, Plan(0, 2, (0, 3), replace(WORK, buckets=()), (3, 0), (), (), ())) for each in (0, 3)]
    empty = replace(record(0), versions=())
    facts += [*(Voted(each, 2, empty) for each in (0, 3)), Committed(3, 2, empty, False)]
    computes = Planned(3, Plan(1, 2, (0, 3), WORK, (2, 1), (), (Compute((0,), (0,)),), (0,)))
    newer = Formed(3, (0, 3), newcomers=(3,))
    check(SHAPE, [*facts, newer, computes])
    with pytest.raises(InvariantViolation, match="INV-7: replica 3 computes in step 1, where it is new"):
        known = [StateKnown(each, 0, 1, 6) for each in (0, 3)]
        plan, given = replace(computes.plan, generation=3), StateGiven(0, 3, 1, combined([6]))
        check(SHAPE, [*facts, newer, Entered(3, 3, 1), Entered(0, 3, 1), *known, given, replace(computes, plan=plan)])
