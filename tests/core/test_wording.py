"""Numbers, nouns and verbs of messages agree."""

from __future__ import annotations

import pytest

from megatron_recover.core.wording import counted, named, verb


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 steps were"), (1, "1 step was"), (2, "2 steps were"), (1000, "1000 steps were")]
)
def test_a_number_has_its_noun_and_its_verb(number: int, said: str) -> None:
    assert f"{counted(number, 'step')} {verb(number, 'was', 'were')}" == said


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    assert [counted(number, "process", "processes") for number in (1, 3)] == ["1 process", "3 processes"]


def test_replicas_are_named_by_their_numbers() -> None:
    assert [named(numbers) for numbers in ((), (2,), (0, 2), {7: ""})] == [
        "no replica",
        "replica 2",
        "replicas 0 2",
        "replica 7",
    ]
    assert named([1, 3, 4], between=", ") == "replicas 1, 3, 4"
