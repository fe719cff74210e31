"""Every wait follows from the user's deadline, in an order that holds for all of its values; `explain` leaves none out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_recover
from megatron_recover.cli import explain
from megatron_recover.config import RecoverConfig
from megatron_recover.deadlines import LONGEST_S, ORDER, SHORTEST_S, Deadlines

NAMES = Deadlines.__struct_fields__


@given(st.floats(SHORTEST_S, LONGEST_S, exclude_max=True) | st.floats(SHORTEST_S, 4000.0))
def test_the_order_holds_for_every_deadline(deadline_s: float) -> None:
    deadlines = Deadlines.of(deadline_s)
    for inner, outer, why in ORDER:
        assert getattr(deadlines, inner) < getattr(deadlines, outer), f"{inner} < {outer}: {why}"
    assert all(0 < getattr(deadlines, name) <= deadline_s for name in NAMES), "nothing waits longer than the user's deadline"


@given(st.floats(SHORTEST_S, 1e5), st.floats(1.0, 9.0))
def test_no_wait_shrinks_when_the_deadline_grows(deadline_s: float, factor: float) -> None:
    one, other = Deadlines.of(deadline_s), Deadlines.of(deadline_s * factor)
    assert all(getattr(one, name) <= getattr(other, name) for name in NAMES)


def test_every_wait_is_in_the_order() -> None:
    assert {each for inner, outer, _ in ORDER for each in (inner, outer)} == set(NAMES)
    assert all(why for _, _, why in ORDER)
    # Each is bounded by the user's deadline through the pairs alone.
    outer_of: dict[str, set[str]] = {name: {outer for inner, outer, _ in ORDER if inner == name} for name in NAMES}
    assert [name for name in NAMES if not outer_of[name]] == ["deadline_s"]


def test_the_usual_and_the_short_ones() -> None:
    usual, short = Deadlines.of(), Deadlines.of(20.0)
    assert (usual.follow_s, usual.stall_s, usual.save_s, usual.deadline_s) == (10.0, 120.0, 1500.0, 1800.0)
    assert (short.follow_s, short.stall_s) == (1.0, 2.0)
    assert RecoverConfig(deadline_s=20.0).deadlines == short


@pytest.mark.parametrize("wrong", [0.0, -1.0, 19.9, 1e6, float("inf"), float("nan")])
def test_a_deadline_out_of_range_is_refused_with_the_range(wrong: float) -> None:
    with pytest.raises(ValueError, match="--recover-deadline-s is .*; it must be at least 20 and below 1000000 seconds"):
        Deadlines.of(wrong)


def test_explain_prints_every_wait_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["timeouts", "--recover-deadline-s", "60"]) == 0
    text = capsys.readouterr().out
    rows = dict(re.findall(r"^(\w+_s) +([\d.]+)  \S", text, re.MULTILINE))
    assert {name: float(seconds) for name, seconds in rows.items()} == pytest.approx(
        {name: getattr(Deadlines.of(60.0), name) for name in NAMES}, rel=1e-5
    )
    flat = " ".join(text.split())
    assert [name for name, meaning in explain.meanings().items() if meaning not in flat] == []
    assert list(explain.meanings()) == list(NAMES), "a wait without a docstring"
    assert [why for inner, outer, why in ORDER if f"{inner} < {outer}: {why}" not in text] == []


def test_explain_refuses_what_no_run_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explain.main(["timeouts", "--recover-deadline-s", "3"])
    assert "--recover-deadline-s is 3; it must be at least 20" in capsys.readouterr().err


def test_every_wait_is_used() -> None:
    """Except by tests: a wait that nothing waits for would be an explanation of nothing."""
    package = Path(megatron_recover.__file__).parent
    code = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "deadlines.py")
    assert [name for name in NAMES if not re.search(rf"deadlines\.{name}\b", code)] == []
