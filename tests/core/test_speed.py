"""What members believe of each other's speed: the same from the same records, still under noise, quick where it matters."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.core.digest import commitment
from megatron_recover.core.plan import fresh_plan
from megatron_recover.core.quota import balanced
from megatron_recover.core.recovery import Recovery, recover
from megatron_recover.core.speed import FAR, MEMORY, TOLERANCE, Speeds, learn, paces, reported_paces
from megatron_recover.core.values import Pipeline, Record, Status, Work
from tests.core.build import record

MS = 1_000_000


def trained(step: int, pace_ns: Sequence[int]) -> Record:
    """The record of a training step whose voters 0, 1, ... said this of themselves."""
    return replace(record(step), paces=tuple(enumerate(pace_ns)))


def learned(*measured: Sequence[int]) -> Speeds:
    """After so many steps."""
    speeds = Speeds()
    for step, pace_ns in enumerate(measured):
        speeds = learn(speeds, trained(step, pace_ns))
    return speeds


def quotas(speeds: Speeds, num: int, num_members: int) -> tuple[int, ...]:
    return balanced(num, paces(speeds, range(num_members)))


def test_nobody_is_told_apart_before_two_measurements_agree() -> None:
    assert quotas(learned(), 12, 3) == (4, 4, 4)
    assert quotas(learned((10, 20, 10)), 12, 3) == (4, 4, 4)
    assert quotas(learned((10, 20, 10), (10, 20, 10)), 12, 3) == (5, 2, 5)


def test_a_straggler_loses_its_share_in_two_steps_and_gets_it_back_in_two() -> None:
    alike, slow = (10 * MS,) * 3, (10 * MS, 20 * MS, 10 * MS)
    before = [alike] * 20
    assert quotas(learned(*before, slow), 12, 3) == (4, 4, 4)
    assert quotas(learned(*before, slow, slow), 12, 3) == (5, 2, 5)
    assert quotas(learned(*before, *[slow] * 20, alike), 12, 3) == (5, 2, 5)
    assert quotas(learned(*before, *[slow] * 20, alike, alike), 12, 3) == (4, 4, 4)


def test_a_pause_of_one_step_is_no_straggler() -> None:
    alike = (10 * MS,) * 3
    paused = [alike] * 5 + [(10 * MS, 900 * MS, 10 * MS)] + [alike] * 5
    assert all(quotas(learned(*paused[:count]), 12, 3) == (4, 4, 4) for count in range(len(paused)))


def test_all_slowing_down_together_changes_nothing() -> None:
    slow = (10 * MS, 20 * MS, 10 * MS)
    twice = tuple(2 * pace for pace in slow)
    assert quotas(learned(*[slow] * 5, *[twice] * 5), 12, 3) == (5, 2, 5)


@pytest.mark.parametrize(("noise", "most"), [(0.05, 0), (0.10, 2)])
@pytest.mark.parametrize(("num_members", "num"), [(3, 12), (8, 256), (64, 8192)])
@pytest.mark.parametrize("slowest", [1.0, 1.5, 2.0])
def test_noise_changes_no_quotas(noise: float, most: int, num_members: int, num: int, slowest: float) -> None:
    """Each measurement is off by up to +-5 or 10 %, another each step: once settled, quotas change never, or next to never."""
    chance = random.Random(num)
    true = [1.0 + (slowest - 1) * position / num_members for position in range(num_members)]
    speeds, seen, changes = Speeds(), None, []
    for step in range(400):
        measured = [int(10 * MS * pace * chance.uniform(1 - noise, 1 + noise)) for pace in true]
        speeds = learn(speeds, trained(step, measured))
        now = quotas(speeds, num, num_members)
        if now != seen:
            changes.append(step)
        seen = now
    assert sum(step > 2 * MEMORY for step in changes) <= most, changes
    # And they are right: no member is done more than 10 % (the tolerance, and one microbatch) after the harmonic ideal.
    assert seen is not None
    ideal = num / sum(1 / pace for pace in true)
    assert max((quota - 1) * pace for quota, pace in zip(seen, true, strict=True)) <= 1.1 * ideal


def test_a_small_lasting_difference_is_used_when_the_noise_is_averaged_out() -> None:
    chance = random.Random(5)
    measured = [[int(MS * pace * chance.uniform(0.9, 1.1)) for pace in (1.0, 1.0, 1.15)] for _ in range(40)]
    assert quotas(learned(*measured), 300, 3)[2] in range(86, 96)  # ideal 90.7; even would be 100


def test_a_member_that_computes_nothing_is_tried_again_and_caught_by_one_measurement() -> None:
    """Note [Members that compute nothing]."""
    slow = 100 * MS
    speeds, steps = learned(*[(10 * MS, 10 * MS, slow)] * 3), []
    for step in range(3, 400):
        mine = quotas(speeds, 12, 3)
        if mine[2]:
            steps.append(step)
        measured = (10 * MS, 10 * MS, slow if mine[2] else 0)
        speeds = learn(speeds, trained(step, measured))
    assert steps and all(later - earlier > 20 for earlier, later in zip(steps, steps[1:], strict=False)), steps
    back = learn(speeds, trained(400, (10 * MS,) * 3))
    for step in range(401, 500):
        back = learn(back, trained(step, (10 * MS, 10 * MS, 10 * MS if quotas(back, 12, 3)[2] else 0)))
    assert quotas(back, 12, 3) == (4, 4, 4)


def test_a_pair_that_replaces_an_estimate_counts_as_two_measurements() -> None:
    """What the old estimate was made of is gone: the next measurement counts for a third, not for a sixteenth."""
    [before] = learned(*[(10 * MS,)] * 20).estimates
    [odd] = learned(*[(10 * MS,)] * 20, (20 * MS,)).estimates
    [replaced] = learned(*[(10 * MS,)] * 20, (20 * MS,), (22 * MS,)).estimates
    [later] = learned(*[(10 * MS,)] * 20, (20 * MS,), (22 * MS,), (24 * MS,)).estimates
    assert (before.num, before.pace_ns) == (MEMORY, 10 * MS)
    assert (odd.num, odd.pace_ns, odd.odd_ns) == (MEMORY, 10 * MS, 20 * MS)
    assert (replaced.num, replaced.pace_ns, replaced.odd_ns) == (2, 21 * MS, 0)
    assert (later.num, later.pace_ns) == (3, 22 * MS)


def test_what_was_forgotten_weighs_no_more_than_one_measurement() -> None:
    """Of a member that computed nothing: the first measurement near what is left of its estimate counts for half."""
    slow = 100 * MS
    [known] = learned(*[(slow,)] * 20, *[(0,)] * 3).estimates
    assert known.pace_ns < slow and known.odd_ns == slow
    [measured] = learned(*[(slow,)] * 20, *[(0,)] * 3, (known.pace_ns - 10 * MS,)).estimates
    assert (measured.num, measured.pace_ns) == (2, known.pace_ns - 5 * MS)


def test_a_member_without_a_microbatch_says_so_in_its_votes_and_comes_back() -> None:
    """Its silence would leave its estimate as it is, and itself without work for the rest of the run."""
    speeds, shares = Speeds(), []
    for step in range(150):
        mine = quotas(speeds, 6, 3)
        shares.append(mine)
        measured = (10 * MS, 10 * MS, (90 if step < 20 else 10) * MS)
        votes = [reported_paces(speeds, member, measured[member] if mine[member] else 0) for member in range(3)]
        speeds = learn(speeds, replace(record(step), paces=tuple(pace for vote in votes for pace in vote)))
    assert shares[19] == (3, 3, 0) and shares[149] == (2, 2, 2)


def test_an_evaluation_teaches_nothing() -> None:
    speeds = learned((10, 20), (10, 20))
    after = learn(speeds, record(2))
    assert after == replace(speeds, num_steps=3)


def test_who_is_unknown_is_as_fast_as_the_usual() -> None:
    speeds = learned((10, 20, 10), (10, 20, 10))
    assert paces(speeds, (0, 1, 2, 7)) == (10, 20, 10, 10)
    assert paces(speeds, (7,)) == (1,)


def test_those_who_are_left_are_alike_when_the_straggler_is_lost() -> None:
    assert paces(learned(*[(1000, 2000, 1010)] * 2), (0, 2)) == (1, 1)


measurements = st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), max_size=12)


@given(measurements, st.integers(0, 12))
def test_inv_2_who_adopts_believes_the_same(measured: list[list[int]], at: int) -> None:
    """A record is learned from once, however often it is taken in, and in whatever order its paces are said."""
    once = learned(*measured)
    again = Speeds()
    for step, pace_ns in enumerate(measured):
        turned = replace(trained(step, pace_ns), paces=tuple(reversed(tuple(enumerate(pace_ns)))))
        again = learn(again, turned)
        if step == at:
            again = learn(learn(again, trained(step, pace_ns)), trained(0, measured[0]))
    assert again == once


def test_the_tolerances_leave_room_for_each_other() -> None:
    assert FAR < TOLERANCE, "a measurement within the tolerance must never be far"


def test_plans_and_recoveries_take_paces_and_pipeline_into_account() -> None:
    """The same paces mean other quotas where a pass has to fill a pipeline first."""
    speeds, roster = learned(*[(10 * MS, 20 * MS, 10 * MS)] * 2), (0, 1, 2)
    work = Work("train 3", 28, (0,))
    fresh = [fresh_plan(0, 1, roster, 2, work, speeds=speeds, pipeline=Pipeline(num_stages)) for num_stages in (1, 4)]
    assert [plan.quotas for plan in fresh] == [(12, 5, 11), (12, 4, 12)]
    work = Work("train 3", 3, (0,))
    statuses = [Status(number, 2, 2, work, (), (), commitment(record(1))) for number in (0, 1)]
    found = [recover(statuses, 0, speeds=speeds, pipeline=Pipeline(num_stages)) for num_stages in (1, 4)]
    assert [[owner for owner, _, _ in each.dealt] for each in found if isinstance(each, Recovery)] == [[0, 0, 1], [0, 0, 0]]
