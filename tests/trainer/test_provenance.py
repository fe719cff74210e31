"""Provenance counts each id where its gradient is, and one comparison finds any id that is not there exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.trainer.provenance import Counts, is_once, wrong_ids

CPU = torch.device("cpu")


@given(st.integers(1, 30), st.lists(st.integers(0, 29), max_size=80), st.integers(1, 3))
def test_a_result_is_good_exactly_where_each_id_counts_once_a_lane(num_microbatches: int, added: list[int], lanes: int) -> None:
    counts = Counts(num_microbatches)
    added = [microbatch for microbatch in added if microbatch < num_microbatches]
    for microbatch in added:
        counts.add(microbatch)
    counts.raise_bound(1.5)
    provenance = counts.tensor(CPU)
    expected = [added.count(microbatch) for microbatch in range(num_microbatches)]
    assert provenance.tolist() == [*expected, 1.5]
    assert counts.counted() == [microbatch for microbatch, count in enumerate(expected) if count]
    assert wrong_ids(provenance, lanes) == [microbatch for microbatch, count in enumerate(expected) if count != lanes]
    assert is_once(provenance, lanes) == (wrong_ids(provenance, lanes) == [])


@pytest.mark.parametrize("wrong", [0.0, 2.0, -1.0, float("nan"), float("inf"), 1.0 + 2**-50])
@pytest.mark.parametrize("at", [0, 4095, 8191])
def test_a_single_miscount_among_many_is_found(at: int, wrong: float) -> None:
    provenance = torch.ones(8193, dtype=torch.float64)
    assert is_once(provenance, 1)
    provenance[at] = wrong
    assert not is_once(provenance, 1) and wrong_ids(provenance, 1) == [at]


def test_what_is_summed_is_a_copy_and_the_bound_is_not_compared() -> None:
    counts = Counts(2)
    counts.add(0)
    counts.add(1)
    summed = counts.tensor(CPU)
    summed += 1
    counts.raise_bound(7.0)
    assert is_once(counts.tensor(CPU), 1) and counts.bound == 7.0


@pytest.mark.parametrize("microbatch", [-1, 2, 99])
def test_an_id_that_the_step_has_not_is_refused(microbatch: int) -> None:
    """The element behind the last id is the bound."""
    with pytest.raises(IndexError):
        Counts(2).add(microbatch)
