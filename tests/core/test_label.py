"""The names of steps: what is written is read again, and what nobody wrote names no iteration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.core.label import Label, StepKind, given_up, label_of

LABELS = st.builds(
    Label, st.sampled_from(StepKind), st.integers(0, 10**9), st.none() | st.integers(0, 10**6), st.booleans()
)  # fmt: skip


@given(LABELS)
def test_a_label_that_was_written_is_read_again(label: Label) -> None:
    assert label_of(str(label)) == label


@given(LABELS)
def test_a_step_has_one_kind_and_none_when_it_is_given_up(label: Label) -> None:
    kinds = [label.is_training, label.is_evaluation, label.is_agreement]
    assert sum(kinds) == (not label.is_given_up)
    assert label_of(given_up(str(label._replace(is_given_up=False)))) == label._replace(is_given_up=True)


@pytest.mark.parametrize("text", ["", "train", "train x", "train -1", "train 1.5", "save after 3", "end 1/", "end 1/x"])
def test_a_text_that_nobody_wrote_counts_as_an_evaluation_without_an_iteration(text: str) -> None:
    assert label_of(text) == Label(StepKind.EVALUATE, -1)
