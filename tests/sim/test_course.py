"""Which step of a simulated job comes next, after the records that were committed."""

from __future__ import annotations

import pytest

from megatron_recover.core.label import given_up
from megatron_recover.core.request import MISCOUNTED
from megatron_recover.core.values import Record
from megatron_recover.sim.timed.course import Course


@pytest.mark.parametrize("label", ["train 3", "save 3", "end 0", "evaluate 3/1"])
def test_a_step_that_is_given_up_ends_training_and_changes_nothing_else(label: str) -> None:
    before = Course(trained=3, agreed=2)
    record = Record(3, given_up(label), (), requests=(MISCOUNTED,))
    assert before.after(record, is_writer=True) == Course(trained=3, agreed=2, leaves=True)


def test_a_training_step_is_trained_and_a_save_is_agreed_on() -> None:
    trained = Course().after(Record(0, "train 0", ()), is_writer=True)
    assert trained == Course(trained=1)
    assert trained.after(Record(1, "save 1", ()), is_writer=True) == Course(trained=1, agreed=1, writes=1)
