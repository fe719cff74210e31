"""The texts of job-wide requests: what is written is read again, by its kind alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.core.request import (
    MISCOUNTED,
    SAVED,
    TOO_FEW,
    UNSAVED,
    RequestKind,
    details,
    exit_for,
    missing,
    nothing_trained,
)


@given(st.lists(st.text(min_size=1)), st.lists(st.integers(0)))
def test_the_details_of_a_kind_are_those_that_were_written(reasons: list[str], iterations: list[int]) -> None:
    requests = [*map(exit_for, reasons), SAVED, UNSAVED, *map(missing, iterations), nothing_trained("what was loaded")]
    assert details(requests, RequestKind.EXIT) == reasons
    assert details(requests, RequestKind.MISSING) == [str(iteration) for iteration in iterations]
    assert details(requests, RequestKind.UNTRAINED) == ["what was loaded"]
    assert details(requests, RequestKind.SAVED) == [], "it has none"


def test_what_the_coordinator_asks_for_ends_training() -> None:
    assert len(details((TOO_FEW, MISCOUNTED), RequestKind.EXIT)) == 2
