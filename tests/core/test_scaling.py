"""Another number of replicas: what a request leads to, and why one is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.core.coordinator_state import (
    CoordinatorState,
    ExitAsked,
    FormAsked,
    Input,
    LeaveAsked,
    LeaveJudged,
    MembershipSettings,
    NewcomerReady,
    TimerFired,
)
from megatron_recover.core.membership_messages import Hello, NewcomersProven, ReplicaFinished, ReplicaLeaving
from megatron_recover.core.scaling import Change, scaled, wanted
from megatron_recover.core.values import Claim
from tests.core.test_coordinator import announced, died, feed, started


def asked(state: CoordinatorState, number: int, *, grown: int = 0, room: int | None = 9) -> Change:
    change = scaled(state, number, grown=grown, room=room)
    assert not change.refused or change == Change(change.refused, grown=grown), "a refused request has no effect"
    return change


def left(state: CoordinatorState, *replicas: int) -> CoordinatorState:
    """After these have left as requested."""
    state, _ = feed(state, LeaveAsked(replicas, "drain"))
    return feed(state, *(ReplicaLeaving(each, state.generation) for each in replicas))[0]


def with_one_in_its_first_step() -> CoordinatorState:
    claim = Claim(3, "train 1", 7)
    state, _ = feed(
        started(3), FormAsked(1), Hello(3, "same"), NewcomerReady(0, 1, 1, claim), TimerFired("gather 1")
    )  # fmt: skip
    assert state.joins == (claim,)
    return state


def test_growing_forms_what_is_missing_and_concerns_no_member() -> None:
    change = asked(started(2), 4)
    assert change == Change(num_missing=2, grown=2)
    assert change.text == "2 replicas are formed while the others train"
    assert wanted(started(2), change.grown) == 4


def test_shrinking_has_the_highest_ids_leave_and_never_the_writer() -> None:
    state = started(4)
    change = asked(state, 2)
    assert (change.leaving, change.text) == ((2, 3), "replicas 2 3 leave after a common step")
    state, effects = feed(state, LeaveAsked(change.leaving, "scale"))
    assert LeaveJudged((2, 3), (), "scale") in effects
    assert wanted(state, change.grown) == 2, "before they have left"
    assert asked(state, 2, grown=change.grown).text == "the job wants 2 replicas already"
    assert asked(state, 1, grown=change.grown).leaving == (1,), "those that were asked before count as gone"


def test_drain_lowers_the_wanted_number_and_scale_raises_it_again() -> None:
    state = left(started(3), 1)
    assert wanted(state, 0) == 2
    change = asked(state, 3)
    assert (change.num_missing, change.grown) == (1, 1)
    assert wanted(state, change.grown) == 3
    assert wanted(left(state, 2), change.grown) == 2


def test_a_replica_that_is_lost_before_it_leaves_is_not_wanted_either() -> None:
    state, _ = feed(started(3), LeaveAsked((2,), "drain"), died(2))
    assert wanted(state, 0) == 2


def test_a_lost_replica_is_missing_until_fewer_are_wanted() -> None:
    state, _ = feed(started(3), died(2))
    assert wanted(state, 0) == 3 and asked(state, 3).num_missing == 1
    assert asked(state, 3).text == "the job wants 3 replicas already; 1 replica is formed while the others train"
    change = asked(state, 2)
    assert (change.leaving, change.text, wanted(state, change.grown)) == ((), "nothing has to change", 2)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_shrinking_below_a_newcomer_in_its_first_step_is_refused(number: int) -> None:
    """Or it would become a member that is one too many, for good."""
    assert asked(with_one_in_its_first_step(), number).refused == "replica 3 is in its first step; ask again"


def test_a_newcomer_in_its_first_step_is_in_the_way_of_no_number_that_has_room_for_it() -> None:
    assert not asked(with_one_in_its_first_step(), 4).refused


def test_newcomers_that_are_still_formed_go_before_members() -> None:
    state, _ = feed(started(3), FormAsked(2))
    change = asked(state, 4, grown=2)
    assert (change.dropped, change.leaving, change.text) == ((4,), (), "replica 4 is not formed any more")
    change = asked(state, 2, grown=2)
    assert (change.dropped, change.leaving) == ((3, 4), (2,))
    assert change.text == "replica 2 leaves after a common step; replicas 3 4 are not formed any more"


def test_nobody_leaves_while_a_newcomer_is_in_its_first_step_and_more_may_be_asked_for() -> None:
    state = with_one_in_its_first_step()
    assert asked(state, 2, grown=1).refused == "replica 3 is in its first step; ask again"
    assert asked(state, 5, grown=1).num_missing == 1
    state, _ = feed(state, NewcomersProven(0, state.generation, (3,)))
    assert asked(state, 2, grown=1).leaving == (2, 3)


BATCH = {"samples": (10, 2), "least_microbatches": 5}
SCHEDULED = {"least_microbatches": 4}
"""A batch size that changes: the number of samples of a step is unknown."""


@pytest.mark.parametrize(
    ("state", "number", "room", "why"),
    [
        (started(3), 0, 9, "0 replicas cannot train; ask for 1 or more, or end the job by SIGTERM to its launcher"),
        (started(3), -1, 9, "-1 replicas cannot train"),
        (started(3, min_replicas=2), 1, 9, "--recover-min-replicas is 2; ask for 2 or more"),
        (started(3, **BATCH), 6, 9, "a training step has 5 microbatches, fewer than 6 replicas; ask for 5 or fewer, or start"),
        (started(3), 5, 4, "there are slots for 4 replicas; ask for 4 or fewer, or start with more --spares or processes"),
        (started(1), 2, 1, "there are slots for 1 replica; ask for 1 or fewer"),
        (started(3, **SCHEDULED), 5, 9, "smallest batch of --step-batch-size-schedule has 4 microbatches, fewer than 5"),
        (started(3, **SCHEDULED), 5, 9, "ask for 4 or fewer, or start with larger batches in --step-batch-size-schedule"),
        (started(1, samples=(2, 2), least_microbatches=1), 2, 9, "has 1 microbatch, fewer than 2 replicas; ask for 1 or fewer"),
        (started(3), 4, None, "in this job (--recover-heal off excludes it); start it again with --replicas 4"),
        (started(3, not_healed_by=("--one", "--two")), 4, None, "in this job (--one and --two exclude it); start it again"),
        (CoordinatorState(MembershipSettings(3)), 4, 9, "training has not begun; ask again once it has"),
        (feed(started(3), ExitAsked("SIGTERM"))[0], 2, 9, "the job ends; start it again with --replicas"),
        (feed(started(3), ReplicaFinished(1, 0))[0], 4, 9, "the job ends"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused_with_the_remedy(
    state: CoordinatorState, number: int, room: int | None, why: str
) -> None:
    assert why in asked(state, number, room=room).refused


def test_a_job_that_forms_nobody_may_shrink() -> None:
    assert asked(started(3), 2, room=None).leaving == (2,)
    assert asked(started(3), 3, room=None).text == "the job wants 3 replicas already"


def test_newcomers_join_again_once_a_leaver_has_left() -> None:
    def ready(state: CoordinatorState) -> tuple[CoordinatorState, list[Any]]:
        claim = Claim(3, "train 1", 7)
        inputs: list[Input] = [FormAsked(1), Hello(3, "same"), NewcomerReady(0, state.generation, 1, claim)]
        return feed(state, *inputs, TimerFired(f"gather {state.generation}"))

    state, _ = feed(started(3), LeaveAsked((1,), "drain"))
    assert "was asked to end" in str(ready(state)[1])
    _, effects = ready(left(started(3), 1))
    assert announced(effects).roster == (0, 2, 3)


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.integers(1, 8), max_size=4), st.sets(st.integers(0, 5), max_size=3))
def test_after_any_requests_the_wanted_number_is_the_newest_and_enough_members_stay(
    start: int, least: int, numbers: list[int], lost: set[int]
) -> None:
    state = started(start, min_replicas=min(least, start))
    grown = 0
    for number in numbers:
        change = scaled(state, number, grown=grown, room=9)
        grown = change.grown
        before = state
        if change.leaving:
            assert min(state.roster) not in change.leaving
            state, effects = feed(state, LeaveAsked(change.leaving, "scale"))
            assert any(isinstance(each, LeaveJudged) and not each.refused for each in effects)
        assert wanted(state, grown) == (wanted(before, grown) if change.refused else number)
        for replica in sorted(lost):
            if replica in state.roster and len(state.roster) > max(1, least):
                state, _ = feed(state, died(replica))
