"""Buckets with equal contributions together: nothing is lost by it, plans stay the same, and cost does not follow buckets."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.core.contribution import added, by_bucket, grouped, missing
from megatron_recover.core.recovery import Recovery, recover
from megatron_recover.core.values import Compute, Contribution, Work
from tests.core.build import complete, status

ids = st.sets(st.integers(0, 7), max_size=8)
held_by_bucket = st.dictionaries(st.integers(0, 5), st.one_of(ids, st.sampled_from([{0, 1}, {0, 1, 2}])))


@given(held_by_bucket)
def test_grouping_loses_nothing(held: dict[int, set[int]]) -> None:
    groups = grouped({bucket: tuple(each) for bucket, each in held.items()})
    assert by_bucket(groups) == {bucket: tuple(sorted(each)) for bucket, each in held.items() if each}
    assert len({each.microbatches for each in groups}) == len(groups), "equal contributions are together"
    assert grouped(by_bucket(groups)) == groups
    assert all(each.buckets == tuple(sorted(each.buckets)) and each.buckets and each.microbatches for each in groups)


@given(held_by_bucket, st.lists(st.tuples(ids, st.sets(st.integers(0, 5))), max_size=4))
def test_what_a_plan_computes_is_added_to_each_of_its_buckets(held: dict[int, set[int]], dealt: list[Any]) -> None:
    computes = [Compute(tuple(sorted(each)), tuple(sorted(into))) for each, into in dealt]
    found = by_bucket(added(grouped({bucket: tuple(each) for bucket, each in held.items()}), computes))
    for bucket in range(6):
        expected = held.get(bucket, set()).union(*(each for each, into in dealt if bucket in into))
        assert found.get(bucket, ()) == tuple(sorted(expected))


@given(st.lists(held_by_bucket, max_size=4), st.permutations(range(6)), st.integers(0, 6), st.integers(0, 9))
def test_what_is_missing_is_found_bucket_by_bucket(
    members: list[dict[int, set[int]]], order: list[int], num_buckets: int, num_microbatches: int
) -> None:
    """Against the rule without groups."""
    buckets = tuple(order[:num_buckets])
    expected: dict[int, tuple[int, ...]] = {}
    for bucket in buckets:
        for microbatch in range(num_microbatches):
            if not any(microbatch in held.get(bucket, ()) for held in members):
                expected[microbatch] = (*expected.get(microbatch, ()), bucket)
    contributions = [grouped({bucket: tuple(each) for bucket, each in held.items()}) for held in members]
    assert missing(contributions, buckets, num_microbatches) == expected


def _operations(num_buckets: int, num_complete: int) -> int:
    """How many bytecodes a recovery of 8 members takes: a measure of its work that is the same on every machine."""
    work = Work("train 0", 256, tuple(range(num_buckets)))
    done = tuple(complete(bucket) for bucket in range(num_complete))
    statuses = [
        status(replica, work=work, contributions=(tuple(range(replica * 28, replica * 28 + 28)),) * num_buckets, complete=done)
        for replica in range(8)
    ]
    counted = 0

    def count(code: CodeType, offset: int) -> None:
        nonlocal counted
        counted += 1

    watching, tool = sys.monitoring, 4
    watching.use_tool_id(tool, "operations")
    try:
        watching.register_callback(tool, watching.events.INSTRUCTION, count)
        watching.set_events(tool, watching.events.INSTRUCTION)
        found = recover(statuses, 0)
    finally:
        watching.set_events(tool, 0)
        watching.free_tool_id(tool)
    assert counted > 0 and isinstance(found, Recovery) and len(found.dealt) == (32 if num_complete < num_buckets else 0)
    return counted


def test_the_work_of_a_recovery_does_not_multiply_buckets_by_microbatches() -> None:
    """It did: each bucket was compared with all microbatches, and each complete one searched for in all statuses."""
    assert _operations(400, 0) < 4 * _operations(20, 0)
    assert _operations(400, 200) < 7 * _operations(40, 20), "linear in buckets, not quadratic"


def test_a_status_has_one_group_where_all_buckets_are_alike() -> None:
    assert grouped(dict.fromkeys(range(401), (0, 1, 2))) == (Contribution(tuple(range(401)), (0, 1, 2)),)
