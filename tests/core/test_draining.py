"""A node that is given back: what a request leads to, why one is refused, and what becomes of one."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from megatron_recover.core.coordinator_state import (
    CoordinatorState,
    ExitAsked,
    FormAsked,
    LeaveAsked,
    MembershipSettings,
    RoomKnown,
)
from megatron_recover.core.draining import Drain, drained
from megatron_recover.core.membership_messages import Hello
from tests.core.test_coordinator import died, feed, started
from tests.core.test_scaling import left, with_one_in_its_first_step


def drain(
    state: CoordinatorState, hosted: Collection[int], *, is_drained: bool = False, forms: bool = True, room: int = 9
) -> Drain:
    found = drained(state, "n5", hosted, is_drained=is_drained, room=room if forms else None)
    assert not found.refused or found == Drain(found.refused), "a refused request has no effect"
    return found


def test_members_leave_and_newcomers_are_dropped_with_their_node() -> None:
    state, _ = feed(started(4), FormAsked(2))
    found = drain(state, {1, 3, 5})
    assert (found.leaving, found.dropped) == ((1, 3), (5,))
    assert found.text == (
        "no new replica is formed on n5 any more; replicas 1 3 leave after a common step; "
        "replica 5 is not formed there any more"
    )


def test_a_node_without_ranks_is_drained_where_replicas_are_formed_and_nowhere_else() -> None:
    assert drain(started(2), ()) == Drain(node="n5")
    assert "none has to leave" in drain(started(2), (), forms=False).refused


def test_a_member_that_was_asked_before_is_no_reason_to_refuse_the_others() -> None:
    state, _ = feed(started(4), LeaveAsked((2,), "drain"))
    found = drain(state, {2, 3})
    assert (found.leaving, found.asked_before) == ((3,), (2,))
    assert "replica 3 leaves after a common step; replica 2 was asked to leave before" in found.text


def test_a_node_is_not_free_while_a_member_that_was_asked_before_is_there() -> None:
    state, _ = feed(started(3), LeaveAsked((2,), "drain"))
    found = drain(state, {2})
    assert (found.refused, found.leaving, found.asked_before) == ("", (), (2,))


@pytest.mark.parametrize(
    ("state", "hosted", "why"),
    [
        (CoordinatorState(MembershipSettings(num_replicas=2)), {1}, "training has not begun; ask again once it has"),
        (feed(started(2), ExitAsked("a signal"))[0], {1}, "the job ends, and gives all nodes back"),
        (started(2), {0, 1}, "replica 0 does not leave: no replica would stay"),
        (with_one_in_its_first_step(), {3}, "replica 3 is in its first step; ask again"),
        (with_one_in_its_first_step(), {0, 3}, "replica 3 is in its first step; ask again"),
    ],
    ids=["start", "end", "the last", "first step", "first step of one of two"],
)
def test_a_request_is_refused_as_a_whole(state: CoordinatorState, hosted: set[int], why: str) -> None:
    assert drain(state, hosted).refused == why


def test_a_node_that_a_waiting_job_needs_stays() -> None:
    settings = MembershipSettings(3, min_replicas=3, waits_for_newcomers=True)
    hellos = [Hello(replica, "same") for replica in range(3)]
    state, _ = feed(CoordinatorState(settings), *hellos, RoomKnown(True), died(2), FormAsked(1))
    assert state.roster == (0, 1) and not state.requests, "it waits"
    for hosted in ((), {3}):
        assert drain(state, hosted, room=2).refused == (
            "the job waits for 1 more replica, and without node n5 there are slots for 2 replicas in all; add slots first, or "
            "end the job by SIGTERM to its launcher"
        )
    assert drain(state, {3}, room=3).dropped == (3,), "there is room elsewhere"


def test_who_asks_again_reads_what_has_become_of_it() -> None:
    asked, _ = feed(started(3, min_replicas=2), LeaveAsked((2,), "drain"))
    assert drain(asked, {2}, is_drained=True).refused == "node n5 is drained already: replica 2 still leaves"
    assert drain(asked, {2}, forms=False).refused == "node n5 is drained already: replica 2 still leaves"
    gone = left(started(3), 2)
    assert "no replica has a rank there" in drain(gone, {2}, is_drained=True).refused
    needed, _ = feed(asked, died(1))
    assert drain(needed, {2}, is_drained=True).refused == (
        "node n5 is drained already, but replica 2 stays, which the job needs since a loss"
    )
