"""Which nodes a coordinator removes for silence: none while it may itself be the one that is cut off."""

from __future__ import annotations

import itertools

from megatron_recover.core.node_silence import OWN, is_cut_off, to_remove

SEEN_S, LIMIT_S = 1.5, 10.0
HEARD, SILENT, LONG = 0.0, 5.0, 11.0


def removed(*silent_s: float) -> tuple[int, ...]:
    return to_remove(dict(enumerate(silent_s)), seen_s=SEEN_S, limit_s=LIMIT_S)


def test_a_node_is_removed_after_its_time_and_not_before() -> None:
    assert removed(HEARD, SILENT) == ()
    assert removed(HEARD, LONG) == (1,)
    assert removed(HEARD, LIMIT_S) == (1,)
    assert removed(HEARD, HEARD, LONG, LONG) == (2, 3)


def test_fewer_than_half_remove_nobody_nor_do_others_than_the_own_node() -> None:
    assert removed(HEARD, LONG, LONG) == ()
    assert removed(HEARD, LONG, LONG, HEARD) == (1, 2)
    assert removed(LONG, HEARD, HEARD) == (), "the agent beside the coordinator is silent: it may be stopped with its machine"
    assert removed(LONG) == ()


def test_silent_nodes_without_ranks_hold_up_no_removal_and_end_no_job_however_many_they_are() -> None:
    members, spares = {0: HEARD, 1: LONG}, dict.fromkeys(range(2, 12), LONG)
    assert to_remove(members, spares, seen_s=SEEN_S, limit_s=LIMIT_S) == (1, *spares)
    assert to_remove({0: HEARD, 1: HEARD}, spares, seen_s=SEEN_S, limit_s=LIMIT_S) == tuple(spares)
    heard = dict.fromkeys(spares, HEARD)
    assert to_remove({0: HEARD, 1: LONG, 2: LONG}, heard, seen_s=SEEN_S, limit_s=LIMIT_S) == (), "nor do they help"
    assert to_remove({0: HEARD, 1: LONG, 2: LONG}, spares, seen_s=SEEN_S, limit_s=LIMIT_S) == ()


def test_of_two_sides_of_a_cut_only_that_of_the_coordinator_removes_and_only_with_half() -> None:
    """INV-6 for each cut of five nodes: there is one coordinator, so a minority around it must remove nobody."""
    for here in itertools.product([True, False], repeat=5):
        silent = {node: HEARD if is_here else LONG for node, is_here in enumerate(here)}
        gone = to_remove(silent, seen_s=SEEN_S, limit_s=LIMIT_S)
        if gone:
            assert here[OWN] and 2 * sum(here) >= len(here)
            assert gone == tuple(node for node, is_here in enumerate(here) if not is_here)


def test_an_agent_that_has_ended_is_not_counted_and_the_own_one_may_have_ended() -> None:
    assert to_remove({1: HEARD, 2: LONG}, seen_s=SEEN_S, limit_s=LIMIT_S) == (2,)
    assert to_remove({}, seen_s=SEEN_S, limit_s=LIMIT_S) == ()


def test_the_side_of_the_coordinator_ends_only_if_it_is_the_one_that_is_cut_off() -> None:
    def is_cut(*silent_s: float) -> bool:
        return is_cut_off(dict(enumerate(silent_s)), seen_s=SEEN_S, limit_s=LIMIT_S)

    assert is_cut(HEARD, 20.0, 20.0) and is_cut(HEARD, 20.0, SILENT)
    assert not is_cut(HEARD, LONG, LONG), "it may heal"
    assert not is_cut(HEARD, HEARD, 20.0), "that node is removed"
    assert not is_cut(20.0, HEARD, HEARD), "its own agent is stopped"
    assert not is_cut(20.0, 20.0, 20.0), "so it may be, with the network"


def test_a_coordinator_whose_own_agent_has_ended_ends_once_it_hears_too_few() -> None:
    silent_s = {1: 2 * LIMIT_S, 2: 2 * LIMIT_S, 3: 0.0}
    assert is_cut_off(silent_s, seen_s=SEEN_S, limit_s=LIMIT_S), "without an agent nobody else would end it"
    assert not is_cut_off({**silent_s, 2: 0.0}, seen_s=SEEN_S, limit_s=LIMIT_S)
    assert not is_cut_off({**silent_s, OWN: 2 * LIMIT_S}, seen_s=SEEN_S, limit_s=LIMIT_S), "it may have been frozen"
