"""The report's page: every part is there whatever became of the run, with the summary's numbers, and it needs nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.observe.report import charts, page, perfetto
from megatron_recover.observe.report import writing as report
from megatron_recover.observe.report.page import render
from megatron_recover.observe.report.timeline import Timeline
from megatron_recover.observe.verify.check import check
from megatron_recover.observe.verify.rules import RULES
from tests.observe import traces

PARTS = ["loss", "goodput", "faults", "standstills", "recoveries", "quotas", "verdict"]


class Page:
    """A page, parsed; parsing fails unless it is well-formed."""

    def __init__(self, html: str) -> None:
        self.html = html
        self.root = ElementTree.fromstring(html)

    def text(self, part: str | None = None) -> str:
        """All words of a part, or of the page without its style sheet."""
        found = self.root.find("body") if part is None else self.root.find(f".//*[@id='{part}']")
        assert found is not None, f"there is no part {part}"
        return " ".join(" ".join(found.itertext()).split())

    def all(self, part: str, what: str) -> list[ElementTree.Element]:
        found = self.root.find(f".//*[@id='{part}']")
        assert found is not None
        return found.findall(f".//{what}")


def page_of(tmp_path: Path, events: Iterable[trace.Event], tail: bytes = b"", against: Path | None = None) -> Page:
    run_dir = traces.write(tmp_path / "run", list(events))
    log = run_dir / trace.EVENTS_FILE
    log.write_bytes(log.read_bytes() + tail)
    return judged(run_dir, against)


def judged(run_dir: Path, against: Path | None = None) -> Page:
    verdict = check(run_dir, against)
    return Page(render(verdict, Timeline(verdict.history)))


def test_a_run_with_faults_has_every_part(tmp_path: Path) -> None:
    reference = traces.write(tmp_path / "reference", traces.quiet_run().events)
    shown = page_of(tmp_path, traces.faulty_run().events, against=reference)
    assert [section.get("id") for section in shown.root.iter("section")] == PARTS
    assert "All invariants hold" in shown.text()
    assert (
        "3 replicas of TP1 × PP2 at the start, determinism exact, seed 1; the run ended with exit code 0 (ok)" in shown.text()
    )
    assert [link.get("href") for link in shown.all("loss", "a")] == ["#fault-1", "#fault-2"]
    assert "the reference run" in shown.text("loss") and "parameters bit-identical" in shown.text("loss")
    faults = [item.get("id") for item in shown.all("faults", "li") if item.get("id")]
    assert faults == ["fault-1", "fault-2"]
    assert "replica 2 rank 1 killed at backward of microbatch 5" in shown.text("fault-1")
    assert "replica 0 rank 0 killed at reduce of bucket 1" in shown.text("fault-2")
    for number, lost in ((1, 2), (2, 0)):
        (figure,) = shown.all(f"fault-{number}", "figure")
        assert f"replica {lost} lost" in " ".join(" ".join(figure.itertext()).split())
        assert [one.get("aria-label") for one in figure.iter("svg") if one.get("role") == "img"][0].startswith(  # type: ignore[union-attr]
            f"What each rank did around the loss of replica {lost}: "
        )
    rows = [" ".join("".join(row.itertext()).split()) for row in shown.all("quotas", "tr")[1:]]
    assert [re.match(r"(\d) ?(train \d(?: to \d)?)", row).groups() for row in rows] == [  # type: ignore[union-attr]
        ("1", "train 1 to 2"), ("2", "train 2"), ("2", "train 3 to 4"), ("3", "train 4"), ("3", "train 5"),
    ]  # fmt: skip
    assert shown.text("verdict").count("✓ holds") == len(RULES)


def test_the_numbers_are_those_of_the_summary(tmp_path: Path) -> None:
    events = traces.faulty_run().events
    shown = page_of(tmp_path, events)
    summary = check(tmp_path / "run").summary
    tiles = [" ".join("".join(tile.itertext()).split()) for tile in shown.root.findall(".//ul[@class='tiles']/li")]
    assert summary.goodput is not None and summary.lost_to_faults_s is not None and summary.final_loss is not None
    slowest = max(one.total_s for one in summary.recoveries if one.total_s is not None)
    assert tiles == [
        f"{summary.steps}training steps committed",
        f"{summary.replicas_start} → {summary.replicas_end}replicas, in {summary.generations} generations; "
        f"{len(summary.faults)} faults",
        f"{summary.microbatches_lost}microbatches lost, {summary.microbatches_redone} computed again, "
        f"{summary.microbatches_wasted} wasted",
        f"{100 * summary.goodput:.1f} %goodput: {1000 * summary.lost_to_faults_s:.0f} ms lost to faults",
        f"{1000 * slowest:.0f} msslowest recovery, from the fault to the commit of its step",
        f"{summary.final_loss:.4f}loss of the last training step",
    ]
    for row, one in zip(shown.all("recoveries", "tbody/tr"), summary.recoveries, strict=True):
        cells = ["".join(cell.itertext()).strip() for cell in row]
        assert cells[0] == str(one.generation) and cells[2] == one.label
        phases = [one.detect_s, one.agree_s, one.redeal_s, one.recompute_s, one.reduce_s, one.commit_s, one.total_s]
        for cell, seconds in zip(cells[3:10], phases, strict=True):
            assert seconds is not None and float(cell) == pytest.approx(1000 * seconds, abs=0.5)


def test_the_page_needs_nothing_outside_itself(tmp_path: Path) -> None:
    html = page_of(tmp_path, traces.faulty_run().events).html
    assert re.findall(r"(?:src|srcset|data|action|poster)\s*=", html) == []
    assert [link for link in re.findall(r"href=\"([^\"]*)\"", html) if not link.startswith("#")] == []
    assert re.findall(r"url\([^#]|@import|https?:|<script|<link|<iframe|\son\w+=", html) == []
    assert "default-src 'none'" in html
    ids = re.findall(r"\sid=\"([^\"]+)\"", html)
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in re.findall(r"href=\"([^\"]*)\"", html)} <= set(ids)


def test_what_the_trace_says_is_text_and_never_markup(tmp_path: Path) -> None:
    run = traces.Run()
    run.quiet_step()
    run.step_with_kill_in_backward(2)
    events = [
        msgspec.structs.replace(event, reason="<script>alert(1)</script>") if isinstance(event, trace.Generation) else event
        for event in run.finish().events
    ]
    shown = page_of(tmp_path, events)
    assert "<script>alert(1)</script>" in shown.text("recoveries") and "<script" not in shown.html


def test_a_trace_that_ends_in_the_middle_of_a_line_is_reported_and_said(tmp_path: Path) -> None:
    events = traces.faulty_run().events
    cut = msgspec.json.encode(events[-20])[:30]
    shown = page_of(tmp_path, events[:-20], cut)
    assert f"The trace ends in the middle of line {len(events) - 19}" in shown.text()
    assert "The run has not ended in this trace" in shown.text() and "All invariants hold so far" in shown.text()
    assert [section.get("id") for section in shown.root.iter("section")] == PARTS


def test_every_place_at_which_a_trace_can_be_cut_gives_a_page(tmp_path: Path) -> None:
    events = traces.Run()
    events.quiet_step()
    events.step_with_kill_in_backward(2)
    whole = b"".join(msgspec.json.encode(event) + b"\n" for event in events.finish().events)
    log = tmp_path / trace.EVENTS_FILE
    for size in [*range(0, 400, 133), *range(400, len(whole), 2999)]:
        log.write_bytes(whole[:size])
        shown = judged(tmp_path)
        cut = size > 0 and whole[size - 1 : size] != b"\n"
        assert (f"in the middle of line {whole[:size].count(10) + 1}" in shown.text()) == cut


def test_a_writer_that_was_killed_in_mid_write_is_said_and_nothing_is_missing(tmp_path: Path) -> None:
    events = traces.faulty_run().events
    lines = [msgspec.json.encode(event) + b"\n" for event in events]
    lines[40] = lines[40][:25] + lines[40]
    (tmp_path / trace.EVENTS_FILE).write_bytes(b"".join(lines))
    text = judged(tmp_path).text()
    assert "Line 41 of the trace is cut short" in text and "ends in the middle" not in text
    assert "All invariants hold" in text


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    shown = page_of(tmp_path, traces.faulty_run().events[:-1])
    assert (
        "the run has not ended" in shown.text() and "it still goes on, or its launcher was killed, or its disk" in shown.text()
    )
    assert "middle of line" not in shown.text()


def test_a_run_without_a_fault(tmp_path: Path) -> None:
    shown = page_of(tmp_path, traces.quiet_run().events)
    assert "Nothing failed." in shown.text("faults") and "None was needed" in shown.text("recoveries")
    assert "100.0 %" in shown.text() and shown.all("loss", "a") == []


def test_with_many_faults_the_slowest_are_drawn(tmp_path: Path) -> None:
    run = traces.Run(replicas=13, microbatches=13)
    for victim in range(12):
        run.step_with_kill_in_backward(victim)
    shown = page_of(tmp_path, run.finish().events)
    figures = [number for number in range(1, 13) if shown.all(f"fault-{number}", "figure")]
    # Every recovery of this trace is as long as its members are many: each event takes a millisecond.
    assert figures == list(range(1, page.MAX_PICTURES + 1))
    assert "over after" in shown.text("fault-12")
    assert "No more than 8 are drawn, those that took longest" in shown.text("faults")


def test_very_many_faults_are_listed_on_demand(tmp_path: Path) -> None:
    run = traces.Run(replicas=27, microbatches=27)
    for victim in range(26):
        run.step_with_kill_in_backward(victim)
    shown = page_of(tmp_path, run.finish().events)
    (folded,) = shown.all("faults", "details")
    listed = [item.get("id") for item in folded.iter("li") if item.get("id")]
    assert listed == [f"fault-{number}" for number in range(page.MAX_PICTURES + 1, 27)]
    assert f"{26 - page.MAX_PICTURES} more faults" in " ".join("".join(folded.itertext()).split())
    assert shown.all("loss", "a") == [], "their numbers would hide each other"


def test_a_fault_that_nothing_answered_has_the_picture_of_its_step(tmp_path: Path) -> None:
    run = traces.Run()
    run.quiet_step()
    run.add(trace.Fault, replica=1, rank=0, point="forward", kind="stop", step=1, microbatch=2)
    run.quiet_step()
    shown = page_of(tmp_path, run.finish().events)
    assert "replica 1 rank 0 stopped at forward of microbatch 2" in shown.text("fault-1")
    assert "nothing had to be recovered" in shown.text("fault-1")
    assert len(shown.all("fault-1", "figure")) == 1, "the step that it struck"


def test_a_fault_that_was_survived_has_the_picture_of_what_answered_it(tmp_path: Path) -> None:
    run = traces.Run()
    run.quiet_step()
    run.plan(run.deal(range(6)), traces.BUCKETS)
    run.add(trace.Fault, replica=1, rank=0, point="forward", kind="freeze", step=1, microbatch=1, until="generation")
    run.generation += 1
    run.add(trace.Generation, generation=2, roster=run.roster, reason="replica 0: no progress from replicas [1]")
    run.add(trace.Thawed, replica=1, rank=0)
    run.statuses({}, lambda replica: ())
    run.quiet_step()
    shown = page_of(tmp_path, run.finish().events)
    assert "replica 1 rank 0 frozen at forward of microbatch 1" in shown.text("fault-1")
    assert "in generation 2" in shown.text("fault-1")
    (figure,) = shown.all("fault-1", "figure")
    labels = [one.get("aria-label") or "" for one in figure.iter("svg")]
    assert any(label.startswith("What each rank did around the fault") for label in labels)


def test_who_was_computing_what_is_told(tmp_path: Path) -> None:
    run = traces.Run()
    run.quiet_step()
    run.step_with_kill_in_backward(2)
    fault = next(index for index, event in enumerate(run.events) if isinstance(event, trace.Fault))
    for rank in (0, 1):
        begun = trace.MicrobatchStarted(t=run.events[fault].t, replica=2, rank=rank, generation=1, step=1, microbatch=5)
        run.events.insert(fault, begun)
    shown = page_of(tmp_path, run.finish().events)
    assert "Being computed when generation 2 was announced: replica 2: 5." in shown.text("fault-1")


def test_a_run_that_only_evaluated(tmp_path: Path) -> None:
    events = [
        msgspec.structs.replace(event, label=f"evaluate 0/{event.step + 1}")
        if isinstance(event, trace.Plan | trace.Committed | trace.Applied) else event
        for event in traces.quiet_run(3).events
    ]  # fmt: skip
    shown = page_of(tmp_path, events)
    assert "No training step was committed" in shown.text("loss") and "the run only evaluated" in shown.text("loss")
    assert "No training step was planned" in shown.text("quotas")


def test_a_run_that_came_to_no_step(tmp_path: Path) -> None:
    shown = page_of(tmp_path, traces.Run().finish(1).events)
    assert "Not proven" in shown.text() and "no step was committed" in shown.text("verdict")
    assert "exit code 1 (failed)" in shown.text()


def test_a_broken_invariant_is_on_the_page_with_its_line(tmp_path: Path) -> None:
    events = list(traces.faulty_run().events)
    vote = next(index for index, event in enumerate(events) if isinstance(event, trace.Voted))
    commit = next(index for index, event in enumerate(events) if isinstance(event, trace.Committed))
    del events[vote]
    shown = page_of(tmp_path, events)
    assert "Broken: INV-2" in shown.text()
    assert f"line {commit}:" in shown.text("verdict") and "✗ broken" in shown.text("verdict")


def test_a_long_run_of_many_replicas_is_still_a_small_page(tmp_path: Path) -> None:
    run = traces.Run(replicas=40, microbatches=40)
    run.quiet_step()
    first = len(run.events)
    run.quiet_step()
    period = [event for event in run.events[first:] if isinstance(event, trace.Plan | trace.Committed | trace.Applied)]
    events = list(run.events)
    for step in range(2, 1500):
        for event in period:
            if event.replica in (0, 39):
                changes = {"step": step, "label": f"train {step + 1}", "t": 1.0 + 0.01 * step}
                if isinstance(event, trace.Applied) and event.loss is not None:
                    changes["loss"] = 9.0 if step == 777 else 5.0
                events.append(msgspec.structs.replace(event, **changes))
    run_dir = traces.write(tmp_path / "run", events)
    shown = judged(run_dir)
    assert len(shown.html) < 300_000
    speed = shown.all("goodput", "svg/svg/path")[1].get("d") or ""
    assert speed.count(" ") < 4 * charts.MAX_POINTS + 10
    curve = shown.all("loss", "svg/svg/path")[0].get("d") or ""
    assert curve.count(" ") < 2 * charts.MAX_POINTS + 10
    assert "train 1 to 1500" in shown.text("quotas") and "1 each of 40 replicas" in shown.text("quotas")
    lowest = min(float(place.split()[1]) for place in re.findall(r"[\d.e-]+ [\d.e-]+", curve))
    assert lowest < 10, "the one peak is drawn"


def test_faults_that_are_near_each_other_stay_readable() -> None:
    assert charts.rows([1.0, 2.0, 3.0, 30.0]) == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (1, 14, True, ["2", "4", "6", "8", "10", "12", "14"]),
        (0.0, 1.0, False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (5.412, 5.431, False, ["5.415", "5.420", "5.425", "5.430"]),
        (1, 3, True, ["1", "2", "3"]),
        (0, 12000, True, ["0", "2,000", "4,000", "6,000", "8,000", "10,000", "12,000"]),
        (4, 4, True, ["4"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, whole: bool, expected: list[str]) -> None:
    assert [tick.text for tick in charts.ticks(charts.Scale(low, high), 7, whole=whole)] == expected


def test_thinning_keeps_every_peak() -> None:
    points = [(float(x), 100.0 if x == 4321 else -50.0 if x == 1234 else x % 7 / 10) for x in range(10_000)]
    thinned = charts.thinned(points)
    assert len(thinned) <= charts.MAX_POINTS + 2 and list(thinned) == sorted(thinned)
    assert (4321.0, 100.0) in thinned and (1234.0, -50.0) in thinned
    assert charts.thinned(points[:50]) == points[:50]


def test_the_report_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", traces.faulty_run().events)
    place = tmp_path / "elsewhere" / "page.html"
    place.parent.mkdir()
    files, _ = report.write(run_dir, place=place)
    assert files == (place, place.with_name("page.perfetto.json"))
    assert sorted(path.name for path in run_dir.iterdir()) == [trace.EVENTS_FILE]
    (first, *_), _ = report.write(run_dir)
    assert first == run_dir / page.PAGE_FILE
    assert "perfetto.json beside this page has every forward" in judged(run_dir).text()


def test_the_page_says_when_the_perfetto_file_has_only_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "MAX_SPANS", 50)
    run_dir = traces.write(tmp_path, traces.faulty_run().events)
    (place, *_), _ = report.write(run_dir)
    assert "the run has too many to show them all" in Page(place.read_text()).text()


def test_an_installed_package_has_the_templates(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=60)
    place = Path("megatron_recover") / "observe" / "report" / "templates"
    assert {path.name for path in (tmp_path / place).iterdir()} == {path.name for path in (root / place).iterdir()}
