"""Leaving on request, and the loss of a node: who may go, when, and what the coordinator tells."""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.core import policy, rank, replica
from megatron_recover.core.coordinator import (
    Announce,
    Ask,
    CoordinatorState,
    Dismiss,
    EndJob,
    ExitAsked,
    Fence,
    LeaveAsked,
    LeaveJudged,
    MembershipSettings,
    NodeLost,
)
from megatron_recover.core.coordinator_state import Refusal
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.leaving import leavers
from megatron_recover.core.membership_messages import Hello, Loss, LossKind, ReplicaFailing, ReplicaFinished, ReplicaLeaving
from megatron_recover.core.plan import fresh_plan
from megatron_recover.core.rank_messages import Apply, Begun, Stop
from megatron_recover.core.request import leave_of
from megatron_recover.core.values import Record, Shape, Work
from tests.core.test_coordinator import announced, died, ended, feed, started


def asked(*replicas: int) -> LeaveAsked:
    return LeaveAsked(replicas, "drain")


def refused(state: CoordinatorState, *replicas: int) -> dict[int, str]:
    after, effects = feed(state, asked(*replicas))
    (judged,) = (effect for effect in effects if isinstance(effect, LeaveJudged))
    if not judged.replicas:
        assert (after, effects) == (state, [judged]), "a refused request has no effect"
    return {refusal.replica: refusal.why for refusal in judged.refused}


# --- Who may leave ----------------------------------------------------------------------------------------------------


def test_a_request_goes_to_one_leader_and_makes_no_generation() -> None:
    state, effects = feed(started(4), asked(3, 1))
    requests = ("leave: 1", "leave: 3")
    assert effects == [LeaveJudged((1, 3), (), "drain"), Ask(1, requests)]
    assert (state.generation, state.requests) == (1, requests)
    _, effects = feed(state, died(1))
    assert announced(effects).requests == requests, "the leader that was asked may be lost with the request"


def test_who_cannot_leave_is_told_why() -> None:
    assert refused(CoordinatorState(MembershipSettings(2)), 1) == {1: "training has not begun"}
    state, _ = feed(started(4), died(3), asked(2), ReplicaFinished(1, 0))
    why = refused(state, 1, 2, 3, 4)
    assert why == {
        1: "it has finished training",
        2: "it was asked to leave before",
        3: "it is lost already",
        4: "there is no such replica: the run has replicas 0 to 3",
    }


def test_a_node_is_drained_as_a_whole_or_not_at_all() -> None:
    too_few = "1 would stay, and --recover-min-replicas is 2"
    assert refused(started(3, min_replicas=2), 1, 2) == {1: too_few, 2: too_few}
    assert refused(started(2), 0, 1) == dict.fromkeys((0, 1), "no replica would stay")
    state, effects = feed(started(3), died(2), asked(1, 2))
    assert LeaveJudged((1,), (Refusal(2, "it is lost already"),), "drain") in effects, "one that is gone already is no obstacle"
    assert refused(state, 0) == {0: "no replica would stay"}, "what was accepted before counts"


# --- When they leave --------------------------------------------------------------------------------------------------


def test_all_that_leave_go_in_one_generation_and_end_with_code_0() -> None:
    state, _ = feed(started(4), asked(0, 3))
    state, effects = feed(state, ReplicaLeaving(3, 1))
    assert effects == []
    state, effects = feed(state, ReplicaLeaving(0, 1))
    new = announced(effects)
    assert (new.generation, new.roster, new.left, new.losses) == (2, (1, 2), (0, 3), ())
    assert [effect for effect in effects if isinstance(effect, Dismiss | Fence)] == [Dismiss(0), Dismiss(3)]
    assert feed(state, died(0))[1] == [], "the end of a rank that left is no loss"
    assert refused(state, 0) == {0: "it has left already"}


def test_a_report_of_an_older_generation_lets_nobody_leave() -> None:
    state, _ = feed(started(3), asked(2), died(1))
    assert feed(state, ReplicaLeaving(2, 1))[1] == []
    assert announced(feed(state, ReplicaLeaving(2, 2))[1]).left == (2,)


def test_one_that_was_not_asked_does_not_leave() -> None:
    assert feed(started(3), ReplicaLeaving(2, 1))[1] == []


def test_a_replica_stays_if_a_loss_makes_it_indispensable() -> None:
    state, _ = feed(started(2), asked(1))
    state, effects = feed(state, died(0))
    stays = LeaveJudged((), (Refusal(1, "it is needed since a loss, and stays in the job"),), "process ended")
    assert stays in effects and announced(effects).roster == (1,)
    assert feed(state, ReplicaLeaving(1, 2))[1] == []
    state, _ = feed(started(4, min_replicas=2), asked(2, 3), died(0))
    state, effects = feed(state, ReplicaLeaving(3, 2))
    assert announced(effects).roster == (1, 2), "of the two one can still go"


def test_a_loss_while_it_leaves_is_a_loss() -> None:
    state, _ = feed(started(3), asked(2))
    state, effects = feed(state, died(2))
    assert announced(effects).losses == (died(2).loss,) and Fence(2) in effects
    assert refused(state, 2) == {2: "it is lost already"}


def test_the_job_ends_where_those_that_stay_have_finished() -> None:
    state, _ = feed(started(2), asked(1), ReplicaFinished(0, 0), ReplicaLeaving(1, 1))
    assert state.over
    _, effects = feed(started(2), asked(1), ReplicaFinished(0, 0), ReplicaLeaving(1, 1))
    assert ended(effects) == EndJob(0, "training finished") and effects[-1] == ended(effects)


def test_an_exit_and_a_leave_may_be_asked_for_together() -> None:
    state, effects = feed(started(3), asked(2), ExitAsked("SIGTERM"))
    assert announced(effects).requests == ("exit: SIGTERM", "leave: 2")
    state, effects = feed(state, ReplicaLeaving(2, 2), ReplicaFinished(0, 15), ReplicaFinished(1, 15))
    assert ended(effects).exit_code == ExitCode.INTERRUPTED


# --- Who leaves, as a pure function ------------------------------------------------------------------------------------

REPLICAS = tuple(range(5))


@given(st.sets(st.sampled_from(REPLICAS)), st.sets(st.sampled_from(REPLICAS), min_size=1), st.integers(0, 5))
def test_enough_members_stay_and_a_loss_never_makes_a_leaver(wanted: set[int], roster: set[int], least: int) -> None:
    """Nor does a request for another member: so the coordinator lets nobody go that another member deals something to."""
    requests, members = tuple(map(leave_of, wanted)), tuple(sorted(roster))
    out = leavers(requests, members, least)
    assert out <= wanted & roster
    assert not out or len(roster - out) >= max(1, least)
    assert out == wanted & roster or len(roster - out) <= max(1, least), "nobody stays without need"
    for lost in roster:
        assert leavers(requests, tuple(sorted(roster - {lost})), least) <= out
    for num in range(len(wanted)):
        for some in combinations(wanted, num):
            assert out & {*some} <= leavers(tuple(map(leave_of, some)), members, least)


def test_a_leaver_takes_part_with_nothing() -> None:
    work = Work("train 1", 7, (0,))
    plans = [fresh_plan(replica, 1, (0, 1, 2), 0, work, leavers={1}) for replica in range(3)]
    assert {plan.quotas for plan in plans} == {(4, 0, 3)}
    assert plans[1].computes == () and plans[1].reduces == (0,)
    assert [i for plan in plans for compute in plan.computes for i in compute.microbatches] == list(range(7))


@pytest.mark.parametrize(("stays", "num_microbatches", "may_leave"), [(False, 4, True), (True, 4, False), (False, 0, False)])
def test_a_leaver_reports_at_the_beginning_of_a_step_unless_it_saves_or_all_agree_on_a_save(
    stays: bool, num_microbatches: int, may_leave: bool
) -> None:
    record = Record(0, "train 0", (), (leave_of(1),))
    state = replica.ReplicaState(
        1, Shape(1, ((0,),)), phase=replica.ReplicaPhase.IDLE, generation=3, roster=(0, 1), step=1, committed=record
    )  # fmt: skip
    begun = Begun(0, 1, Work("train 1", num_microbatches, (0,)), stays=stays)
    _, effects = replica.step(state, begun)
    reports = [effect.message for effect in effects if isinstance(effect, replica.ToCoordinator)]
    assert reports == ([ReplicaLeaving(1, 3)] if may_leave else [])
    _, effects = replica.step(replace(state, roster=(1,)), begun)
    assert not any(isinstance(effect, replica.ToCoordinator) for effect in effects), "the last one is needed"


@pytest.mark.parametrize(("code", "queue"), [(0, (Apply, Stop)), (1, (Stop,))])
def test_only_an_order_to_stop_with_code_0_lets_a_rank_finish_its_step(code: int, queue: tuple[type, ...]) -> None:
    """The ranks of a replica that leaves apply the same steps: their collectives would hang otherwise."""
    state, _ = rank.step(rank.RankState(0, 0, ()), Apply(Record(0, "train 1", ()), 1))
    state, effects = rank.step(state, Stop(code, "it leaves"))
    assert tuple(map(type, state.queue)) == queue and effects == (rank.Retire(1),)
    assert not rank.may_run(state, 0)
    assert rank.step(state, Apply(Record(1, "train 2", ()), 1))[0] == state


# --- The loss of a node ------------------------------------------------------------------------------------------------


def node_lost(*replicas: int) -> NodeLost:
    return NodeLost(replicas, "node 1: silent for 10 s")


def test_a_lost_node_with_three_replicas_makes_one_generation() -> None:
    state, effects = feed(started(5), node_lost(3, 1, 4))
    new = announced(effects)
    losses = tuple(Loss(replica, LossKind.NODE_LOST, "node 1: silent for 10 s") for replica in (1, 3, 4))
    assert (new.generation, new.roster, new.losses) == (2, (0, 2), losses)
    assert [effect for effect in effects if isinstance(effect, Fence)] == [Fence(1), Fence(3), Fence(4)]
    assert new.reason == "node lost: node 1: silent for 10 s"
    assert feed(state, node_lost(1, 3, 4), died(3)) == (state, []), "once lost is enough"


def test_replicas_of_a_node_that_are_lost_already_are_not_lost_again() -> None:
    _, effects = feed(started(4), died(1), node_lost(1, 2))
    assert [effect.generation.losses for effect in effects if isinstance(effect, Announce)][1:] == [
        (Loss(2, LossKind.NODE_LOST, "node 1: silent for 10 s"),)
    ]


def test_a_node_that_is_lost_before_generation_1_is_not_waited_for() -> None:
    state, effects = feed(CoordinatorState(MembershipSettings(3)), Hello(0, "same"), Hello(1, "same"), node_lost(1, 2))
    assert announced(effects).roster == (0,)


def test_the_last_node_ends_the_job() -> None:
    _, effects = feed(started(2), node_lost(0, 1))
    assert ended(effects).exit_code == ExitCode.NO_REPLICA_LEFT


def test_what_a_loss_costs_does_not_grow_with_the_square_of_all_failures_of_a_job_that_heals() -> None:
    num = 20_000
    failing = [ReplicaFailing(replica, f"train {replica}", (4,), "it broke") for replica in range(num)]
    lost = [Loss(replica, LossKind.EXCEPTION) for replica in range(num)]
    since = time.monotonic()
    assert policy.poisoned(failing, lost) is None
    assert time.monotonic() - since < 5, "all failures compared with each other take half a minute"


def test_no_microbatch_is_charged_with_the_loss_of_a_node() -> None:
    raising: list[Any] = [ReplicaFailing(replica, "train 1", (4,), "it broke") for replica in (1, 2)]
    lost = [Loss(1, LossKind.NODE_LOST), Loss(2, LossKind.NODE_LOST)]
    assert policy.poisoned(raising, lost) is None
    assert policy.poisoned(raising, [Loss(1, LossKind.EXCEPTION), Loss(2, LossKind.EXCEPTION)]) is not None
    _, effects = feed(started(4), *raising, node_lost(1, 2))
    assert announced(effects).roster == (0, 3)
