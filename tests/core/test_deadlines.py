"""Every wait follows from the user's deadline, in an order that holds for all of its values; `explain` leaves none out."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_recover
from megatron_recover.cli import explain
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane.node_watch import SEEN_BEATS
from megatron_recover.core import node_silence
from megatron_recover.core.coordinator_state import Setting
from megatron_recover.deadlines import LONGEST_S, NCCL_CONNECTS_S, ORDER, SHORTEST_S, Deadlines, figure, shortest_on_gpu_s
from megatron_recover.sim.timed.models import FailuresTable

NAMES = Deadlines.__struct_fields__


@given(st.floats(SHORTEST_S, LONGEST_S, exclude_max=True) | st.floats(SHORTEST_S, 4000.0))
def test_the_order_holds_for_every_deadline(deadline_s: float) -> None:
    deadlines = Deadlines.of(deadline_s)
    for inner, outer, why in ORDER:
        assert getattr(deadlines, inner) < getattr(deadlines, outer), f"{inner} < {outer}: {why}"
    assert all(0 < getattr(deadlines, name) <= deadline_s for name in NAMES), "nothing waits longer than the user's deadline"


@given(st.floats(SHORTEST_S, LONGEST_S, exclude_max=True), st.floats(0.5, 1000.0), st.data())
def test_nobody_is_removed_where_the_coordinator_is_cut_off_however_short_the_node_timeout(
    deadline_s: float, node_s: float, data: st.DataObject
) -> None:
    """All other nodes fall silent at once, each up to a beat after its last sign of life; INV-6."""
    deadlines = Deadlines.of(deadline_s).with_node(node_s)
    phases = data.draw(st.lists(st.floats(0.0, deadlines.beat_s), min_size=2, max_size=5))
    silent_s = {0: 0.0} | {number: node_s + phase - max(phases) for number, phase in enumerate(phases, start=1)}
    assert node_silence.to_remove(silent_s, seen_s=SEEN_BEATS * deadlines.beat_s, limit_s=node_s) == ()


@given(st.floats(SHORTEST_S, 1e5), st.floats(1.0, 9.0))
def test_no_wait_shrinks_when_the_deadline_grows(deadline_s: float, factor: float) -> None:
    one, other = Deadlines.of(deadline_s), Deadlines.of(deadline_s * factor)
    assert all(getattr(one, name) <= getattr(other, name) for name in NAMES)


@given(st.floats(SHORTEST_S, LONGEST_S, exclude_max=True) | st.floats(SHORTEST_S, 4000.0))
def test_waits_that_follow_each_other_are_together_within_the_outer_one(deadline_s: float) -> None:
    each = Deadlines.of(deadline_s)
    assert each.stopped_s + each.gap_s + each.stacks_s < 1.2, "a stopped rank is gone within 1 s, give or take one look"
    assert each.hung_s + each.gap_s + each.stacks_s < 3.0, "so is an endless loop within 3 s"
    assert each.slowest_s + each.probe_s < each.stall_s, "a sum that probes its peers at the end names who is slow first"
    recorder_s = 2 * each.store_s + each.screen_s + each.replies_s
    assert recorder_s < each.terminal_s, "the recorder ends by itself before the launcher gives it up"
    orphan_s = each.orphan_s + each.trace_s + 2 * each.store_s + each.screen_s
    assert orphan_s < each.abandoned_s < 30.0, "so does one that was not asked for the end, whose launcher raised"
    assert each.trace_s + each.terminal_s < min(30.0, each.deadline_s), "the end is shown before a scheduler kills"
    monitor_s = each.last_events_s + each.store_s + 2 * each.command_s
    assert monitor_s < each.monitor_s, "the monitor has given the end, behind a command that hangs, before it is given up"
    assert each.close_s + each.stop_s < each.deadline_s


def test_a_wait_that_does_not_grow_says_why() -> None:
    usual, long = Deadlines.of(), Deadlines.of(LONGEST_S / 2)
    capped = {"beat_s", "silence_s", "words_s", "sigkill_s", "follow_s", "reap_s", "close_s", "stop_s", "end_s", "fork_s"}
    capped |= {"slots_s", "lock_s", "hold_s", "offer_s", "probe_s", "renew_s"}
    fixed = {name for name in NAMES if getattr(usual, name) == getattr(long, name) == getattr(Deadlines.of(SHORTEST_S), name)}
    assert {name for name in NAMES if getattr(usual, name) == getattr(long, name)} == fixed | capped
    assert {name for name, meaning in explain.meanings().items() if "Fixed:" in meaning} == fixed


@given(st.floats(1.0, 1000.0))
def test_a_run_on_a_gpu_leaves_nccl_time_to_connect_and_not_more_than_that(factor: float) -> None:
    shortest_s = shortest_on_gpu_s()
    assert Deadlines.of(shortest_s * factor).connect_s > NCCL_CONNECTS_S - 1e-9
    assert Deadlines.of(shortest_s - 1.0).connect_s < NCCL_CONNECTS_S
    assert f"a deadline below {shortest_s:g} s" in (meaning := explain.meanings()["connect_s"])
    assert f"less than {NCCL_CONNECTS_S:g} s" in meaning


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
        {name: getattr(Deadlines.of(60.0), name) for name in NAMES}, rel=0.005
    )
    flat = " ".join(text.split())
    assert [name for name, meaning in explain.meanings().items() if meaning not in flat] == []
    assert list(explain.meanings()) == list(NAMES), "a wait without a docstring"
    assert [why for inner, outer, why in ORDER if f"{inner} < {outer}: {why}" not in text] == []


@given(st.floats(0.01, LONGEST_S))
def test_a_figure_is_short_and_near_enough(seconds: float) -> None:
    shown = figure(seconds)
    assert re.fullmatch(r"\d+(\.\d{1,2})?", shown) and len(shown) <= 7
    assert float(shown) == pytest.approx(seconds, rel=0.005, abs=0.005 + 1e-9)  # 0.125 is shown as 0.12


def test_figures_of_waits_that_are_no_round_numbers() -> None:
    assert [figure(each) for each in (5 / 3, 32 / 15, 96.0, 1350.0, 999999.0, 0.2, 12.34)] == [
        "1.67", "2.13", "96", "1350", "999999", "0.2", "12.3",
    ]  # fmt: skip


def test_explain_alone_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explain.main([])
    assert capsys.readouterr().err == "megatron-recover explain: explain what? There is: timeouts, packages\n"


def test_explain_refuses_what_no_run_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explain.main(["timeouts", "--recover-deadline-s", "3"])
    assert "--recover-deadline-s is 3; it must be at least 20" in capsys.readouterr().err


def test_every_wait_is_used() -> None:
    """Except by tests: a wait that nothing waits for would be an explanation of nothing. The coordinator's are read by name."""
    package = Path(megatron_recover.__file__).parent
    code = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "deadlines.py")
    ways = r"deadlines\.{0}\b|\b{1}\b|= \"{0}\""  # from an object, as a constant, as the name of a part of a sum
    unused = [name for name in NAMES if not re.search(ways.format(name, name.upper()), code)]
    assert set(unused) <= set(typing.get_args(Setting))


def test_a_timer_of_the_coordinator_runs_as_long_as_the_wait_of_its_name() -> None:
    """One name each: what `explain` prints is what the protocol and the docs say."""
    assert set(typing.get_args(Setting)) <= set(NAMES)
    table = {each for each in FailuresTable.__struct_fields__ if each.endswith("_s")}
    assert {"follow_s", "stall_s", "save_s", "grace_s"} <= table & set(NAMES)
    package = Path(megatron_recover.__file__).parent
    texts = [*package.rglob("*.py"), *(package.parent / "docs").rglob("*.md")]
    assert [path.name for path in texts if re.search(r"\b[a-z]+_timeout_s\b", path.read_text())] == []
