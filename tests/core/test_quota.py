"""Properties of quotas and of dealing: all is given out, nobody could be spared, the optimum is met."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quotas import major_minor, over_recover
from megatron_recover.core import quota
from megatron_recover.core.values import Pipeline
from scripts.draw.timeline import undisturbed

paces = st.lists(st.integers(1, 4000), min_size=1, max_size=6)
pipelines = st.builds(Pipeline, st.integers(1, 4), st.just(1)) | st.builds(Pipeline, st.integers(2, 4), st.integers(2, 3))


def every(num: int, num_members: int) -> Iterator[tuple[int, ...]]:
    """All quotas there are."""
    return (each for each in itertools.product(range(num + 1), repeat=num_members) if sum(each) == num)


@given(st.integers(0, 60), paces, pipelines)
def test_inv_1_quotas_sum_to_the_batch(num: int, pace: list[int], pipeline: Pipeline) -> None:
    quotas = quota.balanced(num, tuple(pace), pipeline)
    assert sum(quotas) == num and min(quotas) >= 0 and len(quotas) == len(pace)


@given(st.integers(1, 9), st.lists(st.integers(1, 60), min_size=1, max_size=4), pipelines)
def test_no_other_quotas_have_a_smaller_makespan(num: int, pace: list[int], pipeline: Pipeline) -> None:
    best = min(quota.makespan(each, pace, pipeline) for each in every(num, len(pace)))
    assert quota.makespan(quota.balanced(num, tuple(pace), pipeline), pace, pipeline) == best


@given(st.integers(0, 60), pipelines)
def test_a_longer_pass_takes_longer(num: int, pipeline: Pipeline) -> None:
    assert quota.ticks(num, pipeline) < quota.ticks(num + 1, pipeline)
    assert quota._most(quota.ticks(num, pipeline), pipeline) == num
    assert quota._most(quota.ticks(num + 1, pipeline) - 1, pipeline) == num


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4))
def test_equal_speeds_give_even_quotas(num: int, num_members: int, num_stages: int) -> None:
    small, extra = divmod(num, num_members)
    even = tuple(small + (position < extra) for position in range(num_members))
    assert quota.balanced(num, (5,) * num_members, Pipeline(num_stages)) == even


def test_a_member_too_slow_for_a_single_microbatch_gets_none() -> None:
    assert quota.balanced(12, (10, 10, 1000)) == (6, 6, 0)
    assert quota.balanced(12, (10, 10, 50)) == (6, 5, 1)
    assert quota.share((6, 6, 0), (3, 4, 5), 5) == ()


def test_an_empty_pass_takes_no_time_and_a_full_one_its_bubble() -> None:
    assert [quota.ticks(num, Pipeline(4)) for num in range(4)] == [0, 4, 5, 6]
    # Note [What a pass takes]: 8 of 2 chunks each, and the fill; the last 3 leave the last slot out.
    assert [quota.ticks(num, Pipeline(4, 2)) for num in (3, 4, 8, 11)] == [10, 11, 19, 26]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_a_pass_takes_what_the_schedule_takes(num_stages: int, num_chunks: int) -> None:
    """Against the timeline of the schedules (docs/design/schedule.md): equal for whole groups, never less, hardly more."""
    if num_stages == 1 and num_chunks > 1:
        pytest.skip("virtual stages need a pipeline")
    for num in range(1, 17):
        takes = undisturbed(Pipeline(num_stages, num_chunks), num).end / 3 * num_chunks
        reckoned = quota.ticks(num, Pipeline(num_stages, num_chunks))
        assert takes <= reckoned * 1.0001 and reckoned <= 1.1 * takes, (num, takes, reckoned)
        if num_chunks == 1 or not num % num_stages:
            assert reckoned == pytest.approx(takes)


def test_virtual_stages_leave_no_group_hardly_begun() -> None:
    assert quota.balanced(24, (10, 10, 10), Pipeline(4, 2)) == (8, 8, 8)
    assert quota.balanced(32, (10, 10, 25), Pipeline(4, 2)) == (14, 14, 4)


def test_recovers_table_of_wasted_work_is_reproduced() -> None:
    """B = 8192: (quota, majors, minor quota), and what is computed and zeroed; ours waste nothing and take as many rounds."""
    rules = {world: major_minor(8192, world) for world in (64, 63, 60, 48, 40, 32)}
    assert {world: rule[:3] for world, rule in rules.items()} == {
        64: (128, 64, 0), 63: (131, 62, 70), 60: (137, 59, 109), 48: (171, 47, 155), 40: (205, 39, 197), 32: (256, 32, 0),
    }  # fmt: skip
    assert [round(100 * rule.zeroed / 8192, 2) for rule in rules.values()] == [0.0, 0.74, 0.34, 0.2, 0.1, 0.0]
    for world, rule in rules.items():
        quotas = quota.balanced(8192, (7,) * world)
        assert sum(quotas) == 8192 and max(quotas) == rule.quota


@given(st.integers(1, 300), st.lists(st.integers(1, 400), min_size=1, max_size=9), pipelines)
def test_no_step_takes_longer_than_by_recovers_rule(num: int, pace: list[int], pipeline: Pipeline) -> None:
    assert over_recover(num, pace, pipeline) <= 1


def test_a_roster_without_members_has_no_quotas() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        quota.balanced(3, ())


# --- Dealing -------------------------------------------------------------------------------------------------------------


members = st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=6)


@given(st.sets(st.integers(0, 30)), members, pipelines)
def test_inv_7_dealing_covers_every_lost_id_and_nobody_could_be_spared(
    lost: set[int], state: dict[int, tuple[int, int]], pipeline: Pipeline
) -> None:
    loads, pace = ({member: item[index] for member, item in state.items()} for index in (0, 1))
    dealt = quota.deal(lost, loads, pace, pipeline)
    assert set(dealt) == lost
    after = {replica: load + list(dealt.values()).count(replica) for replica, load in loads.items()}
    for receiver, other in itertools.product(set(dealt.values()), loads):
        assert quota.ticks(after[receiver], pipeline) * pace[receiver] <= quota.ticks(after[other] + 1, pipeline) * pace[other]
