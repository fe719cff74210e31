"""Provenance counts each id where its gradient is, and one comparison finds any id that is not there exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.trainer.provenance import Counts, counts_of, summary

CPU = torch.device("cpu")
FINITE, NOT_FINITE = torch.tensor(True), torch.tensor(False)


@given(st.integers(1, 30), st.lists(st.integers(0, 29), max_size=80), st.integers(1, 3), st.booleans())
def test_a_result_is_good_exactly_where_each_id_counts_once_a_lane(
    num_microbatches: int, added: list[int], lanes: int, is_finite: bool
) -> None:
    counts = Counts(num_microbatches)
    added = [microbatch for microbatch in added if microbatch < num_microbatches]
    for microbatch in added:
        counts.add(microbatch)
    provenance = counts.provenance(CPU, bound=torch.tensor(1.5, dtype=torch.float64), is_finite=torch.tensor(is_finite))
    expected = [added.count(microbatch) for microbatch in range(num_microbatches)]
    assert provenance.tolist() == [*expected, 1.5, not is_finite]
    assert counts.each() == counts_of(provenance) == tuple(expected)
    assert counts.counted() == [microbatch for microbatch, count in enumerate(expected) if count]
    assert summary(provenance, lanes).tolist() == [all(count == lanes for count in expected), 1.5, not is_finite]


@pytest.mark.parametrize("wrong", [0.0, 2.0, -1.0, float("nan"), float("inf"), 1.0 + 2**-50])
@pytest.mark.parametrize("at", [0, 4095, 8191])
def test_a_single_miscount_among_many_is_found(at: int, wrong: float) -> None:
    provenance = torch.ones(8194, dtype=torch.float64)
    assert summary(provenance, 1)[0] == 1
    provenance[at] = wrong
    assert summary(provenance, 1)[0] == 0


def test_what_is_summed_is_a_copy_and_only_the_counts_are_compared() -> None:
    counts = Counts(2)
    counts.add(0)
    counts.add(1)
    summed = counts.provenance(CPU, bound=torch.tensor(7.0), is_finite=NOT_FINITE)
    summed += 1
    assert summary(counts.provenance(CPU, bound=torch.tensor(7.0), is_finite=NOT_FINITE), 1).tolist() == [1, 7, 1]
    assert (
        summary(counts.provenance(CPU), 1).tolist()
        == summary(counts.provenance(CPU, is_finite=FINITE), 1).tolist()
        == [1, 0, 0]
    )


@pytest.mark.parametrize("microbatch", [-1, 2, 99])
def test_an_id_that_the_step_has_not_is_refused(microbatch: int) -> None:
    """The elements behind the last id are no counts."""
    with pytest.raises(IndexError):
        Counts(2).add(microbatch)
