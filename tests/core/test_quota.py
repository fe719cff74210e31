"""Properties of quotas that follow the measured speed of each replica."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.core import quota

paces = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


@given(st.integers(0, 60), paces, st.integers(1, 4))
def test_all_microbatches_are_given_out_and_nobody_is_left_idle(num: int, seconds: list[float], num_stages: int) -> None:
    quotas = quota.balanced(num, seconds, num_stages=num_stages)
    assert sum(quotas) == num
    assert min(quotas) >= 1 or num < len(seconds)


@given(st.integers(1, 9), st.lists(st.floats(0.1, 3.0), min_size=1, max_size=4), st.integers(1, 4))
def test_no_other_quotas_have_a_smaller_makespan(num: int, seconds: list[float], num_stages: int) -> None:
    floor = 1 if num >= len(seconds) else 0
    every = (each for each in itertools.product(range(floor, num + 1), repeat=len(seconds)) if sum(each) == num)
    best = min(quota.makespan(each, seconds, num_stages=num_stages) for each in every)
    found = quota.makespan(quota.balanced(num, seconds, num_stages=num_stages), seconds, num_stages=num_stages)
    if floor:
        assert found == pytest.approx(best)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4))
def test_equal_speeds_give_even_quotas(num: int, num_members: int, num_stages: int) -> None:
    assert quota.balanced(num, [0.5] * num_members, num_stages=num_stages) == quota.even(num, num_members)


@given(st.integers(0, 1000), st.integers(2, 6), st.integers(6, 60))
def test_noise_changes_no_quotas(seed: int, num_members: int, num: int) -> None:
    chance = random.Random(seed)
    current = quota.even(num, num_members)
    for _ in range(20):
        seconds = [chance.uniform(0.98, 1.02) for _ in range(num_members)]
        assert quota.rebalanced(current, seconds) == current


def test_a_straggler_gets_less_and_gets_it_back() -> None:
    current = quota.even(12, 3)
    slowed = quota.rebalanced(current, [1.0, 2.0, 1.0])
    assert slowed == (5, 2, 5)
    assert quota.rebalanced(slowed, [1.0, 2.0, 1.0]) == slowed
    assert quota.rebalanced(slowed, [1.0, 1.0, 1.0]) == current
