"""The placement of ranks: golden cases that can be read, and properties of all others.

After a change that is meant, `pytest tests/core/test_placement.py --update` rewrites placements.txt; read the difference.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_recover.core.placement import Placement, Slot, left_over_line, most_replicas, place

GOLDEN = Path(__file__).with_name("placements.txt")
_CASE = re.compile(r"([\d ]+): (\d+) of (\d+) ranks(?:, tp (\d+))?")


def drawn(case: str) -> Iterator[str]:
    """What a case of the golden file is followed by."""
    found = _CASE.fullmatch(case)
    assert found is not None, case
    slots, num_replicas, num_ranks, tp = [*map(int, found[1].split())], int(found[2]), int(found[3]), int(found[4] or 1)
    try:
        placement = place(slots, num_replicas=num_replicas, num_ranks=num_ranks, tp=tp)
    except ValueError as error:
        yield f"refused: {error}"
        return
    for replica, places in enumerate(placement.replicas):
        parts = [(node, [slot.slot for slot in group]) for node, group in itertools.groupby(places, lambda slot: slot.node)]
        yield f"replica {replica}: " + ", ".join(f"node {node} slots {slots[0]}-{slots[-1]}" for node, slots in parts)
    if (line := left_over_line(placement, num_ranks)) is not None:
        yield line


def test_placements_are_those_of_the_golden_file(pytestconfig: pytest.Config) -> None:
    text = GOLDEN.read_text()
    now = []
    for line in text.splitlines():
        if not line.startswith("  "):
            now.append(line)
            if line and not line.startswith("#"):
                now += [f"  {each}" for each in drawn(line)]
    if pytestconfig.getoption("--update"):
        GOLDEN.write_text("\n".join(now) + "\n")
    assert now == GOLDEN.read_text().splitlines(), "if this change is meant, run this test with --update"


nodes = st.lists(st.integers(0, 9), min_size=1, max_size=6)
shapes = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 4), (12, 4)])


@st.composite
def fitting(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Slots, number of replicas, ranks of a replica and TP that fit."""
    slots, (num_ranks, tp) = draw(nodes), draw(shapes)
    assume(most := most_replicas(slots, num_ranks))
    return slots, draw(st.integers(1, most)), num_ranks, tp


def made(job: tuple[list[int], int, int, int]) -> Placement:
    slots, num_replicas, num_ranks, tp = job
    return place(slots, num_replicas=num_replicas, num_ranks=num_ranks, tp=tp)


def replicas_on(placement: Placement, node: int) -> list[int]:
    """Replicas that the loss of a node ends."""
    return [replica for replica in range(len(placement.replicas)) if node in placement.nodes_of(replica)]


def divided(placement: Placement, tp: int) -> int:
    """Number of tensor-parallel groups on several nodes."""
    groups = (each[at : at + tp] for each in placement.replicas for at in range(0, len(each), tp))
    return sum(len({slot.node for slot in group}) > 1 for group in groups)


@given(fitting())
def test_every_slot_has_one_rank_or_is_left_over(job: tuple[list[int], int, int, int]) -> None:
    slots, num_replicas, num_ranks, _ = job
    placement = made(job)
    assert [len(each) for each in placement.replicas] == [num_ranks] * num_replicas
    all_slots = [Slot(node, slot) for node, num in enumerate(slots) for slot in range(num)]
    assert sorted([*itertools.chain(*placement.replicas), *placement.left_over]) == all_slots
    assert list(placement.left_over) == sorted(placement.left_over)


@given(fitting())
def test_ranks_that_follow_each_other_are_on_one_node_and_in_its_order(job: tuple[list[int], int, int, int]) -> None:
    placement = made(job)
    for replica, places in enumerate(placement.replicas):
        groups = [[*group] for _, group in itertools.groupby(places, lambda slot: slot.node)]
        assert tuple(group[0].node for group in groups) == placement.nodes_of(replica), "a node is not left and entered again"
        for group in groups:
            assert [slot.slot for slot in group] == [*range(group[0].slot, group[0].slot + len(group))]
    assert [each[0].node for each in placement.replicas] == sorted(each[0].node for each in placement.replicas)


@given(fitting())
def test_no_group_is_divided_that_need_not_be(job: tuple[list[int], int, int, int]) -> None:
    slots, num_replicas, num_ranks, tp = job
    if sum(num // tp for num in slots) >= num_replicas * num_ranks // tp:
        assert divided(made(job), tp) == 0


def pairs(placement: Placement) -> int:
    """Number of pairs (replica, node): how often a node's loss is a replica's."""
    return sum(len(placement.nodes_of(replica)) for replica in range(len(placement.replicas)))


def fewest_pairs(slots: Sequence[int], num_replicas: int, num_ranks: int) -> int:
    """The least such number of any placement, by trying all."""

    def least(free: tuple[int, ...], left: int) -> int:
        if not left:
            return 0
        found = []
        for share in itertools.product(*(range(min(each, num_ranks) + 1) for each in free)):
            if sum(share) == num_ranks:
                after = tuple(sorted(each - part for each, part in zip(free, share, strict=True)))
                found.append(sum(map(bool, share)) + least(after, left - 1))
        return min(found)

    return least(tuple(sorted(slots)), num_replicas)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
def test_on_equal_nodes_no_placement_is_on_fewer_nodes(num_slots: int, num_nodes: int, num_ranks: int, wanted: int) -> None:
    slots = [num_slots] * num_nodes
    num_replicas = min(wanted, most_replicas(slots, num_ranks))
    if num_replicas:
        assert pairs(made((slots, num_replicas, num_ranks, 1))) == fewest_pairs(slots, num_replicas, num_ranks)


@given(nodes, st.integers(1, 12), st.integers(1, 6))
def test_each_replica_in_its_turn_is_on_as_few_nodes_as_can_be(slots: list[int], num_ranks: int, wanted: int) -> None:
    """In the order of making, which is by the number of nodes: what is left for one replica is not used up by a later one."""
    num_replicas = min(wanted, most_replicas(slots, num_ranks))
    placement = made((slots, num_replicas, num_ranks, 1))
    on_one = [replica for replica in range(num_replicas) if len(placement.nodes_of(replica)) == 1]
    assert len(on_one) >= min(num_replicas, sum(each // num_ranks for each in slots))
    first_divided = [each for each in range(num_replicas) if each not in on_one][:1]
    if first_divided and len(on_one) + 1 == num_replicas:
        rest = sorted((each % num_ranks for each in slots), reverse=True)
        least = next(num for num in range(len(rest) + 1) if sum(rest[:num]) >= num_ranks)
        assert len(placement.nodes_of(first_divided[0])) == least


@given(fitting())
def test_replicas_that_leave_room_are_spread(job: tuple[list[int], int, int, int]) -> None:
    """The loss of a node costs at most one replica more than that of any other that has room for one more."""
    slots, num_replicas, num_ranks, tp = job
    whole = [num // tp // (num_ranks // tp) for num in slots]
    assume(num_replicas <= sum(whole) and sum(num // tp for num in slots) >= num_replicas * num_ranks // tp)
    free = [room - len(replicas_on(made(job), node)) for node, room in enumerate(whole)]
    taken = [room - left for room, left in zip(whole, free, strict=True)]
    assert min(free) >= 0 and all(left <= 1 or left <= max(free) for left in free)
    assert max((f for f, t in zip(free, taken, strict=True) if t), default=0) + 1 >= max(free)


@given(nodes, st.integers(1, 12), st.integers(0, 5))
def test_more_slots_never_hold_fewer_replicas_and_one_more_than_fits_is_refused(
    slots: list[int], num_ranks: int, node: int
) -> None:
    more = [each + (at == node % len(slots)) for at, each in enumerate(slots)]
    most = most_replicas(slots, num_ranks)
    assert most <= most_replicas(more, num_ranks) <= most + 1
    assert len(made((slots, most, num_ranks, 1)).left_over) < num_ranks
    with pytest.raises(ValueError, match=f"needs? {(most + 1) * num_ranks} slots?, and the nodes have {sum(slots)} "):
        made((slots, most + 1, num_ranks, 1))


def test_a_thousand_nodes_are_placed_at_once() -> None:
    placement = place([8] * 1024, num_replicas=512, num_ranks=16, tp=8)
    assert pairs(placement) == 1024 and placement.left_over == ()


def test_slots_without_a_rank_are_spares_where_lost_replicas_are_replaced() -> None:
    placement = place([3, 3], num_replicas=2, num_ranks=2)
    assert left_over_line(placement, 2, are_spares=True) == (
        "2 slots have no rank (nodes 0 to 1: 1 each): spares for replicas that are lost"
    )
    placement = place([3], num_replicas=1, num_ranks=2)
    assert left_over_line(placement, 2, are_spares=True) == (
        "1 slot has no rank (node 0: 1): a spare for replicas that are lost"
    )
    assert left_over_line(place([2], num_replicas=1, num_ranks=1), 1) == (
        "1 slot has no rank (node 0: 1): give a larger --replicas to use it"
    )
