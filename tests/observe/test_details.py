"""Pictures of a trace that is too large to be kept: those of one that is, as far as room goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.observe.history import History
from megatron_recover.observe.report import details, timeline
from megatron_recover.observe.report import writing as report
from megatron_recover.observe.report.details import Window, collect
from megatron_recover.observe.report.lanes import picture
from megatron_recover.observe.report.timeline import Timeline
from tests.observe import traces


def long_run() -> traces.Run:
    """Many quiet steps around two deaths."""
    run = traces.Run(microbatches=12)
    for death in (None, 2, None, 0, None):
        for _ in range(10):
            run.quiet_step()
        if death is not None:
            run.step_with_kill_in_backward(death)
    return run.finish()


@pytest.mark.parametrize("run", [traces.faulty_run, long_run], ids=lambda run: run.__name__)
def test_the_pictures_of_a_large_trace_are_those_of_a_small_one(
    run: Callable[[], traces.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [  # phases as long as the clock of this trace has them
        msgspec.structs.replace(event, seconds=0.0008) if isinstance(event, trace.Recovery) else event for event in run().events
    ]
    history = History(enumerate(events, start=1))
    whole = Timeline(history)
    expected = [picture(history, whole, one) for one in whole.drawn]
    monkeypatch.setattr(timeline, "MAX_SPANS", 10)
    part = Timeline(history)
    assert whole.is_whole and not part.is_whole
    assert [picture(history, part, one) for one in part.drawn] == expected
    assert expected and part.rank_limit is None


def test_what_is_far_from_every_fault_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(enumerate(long_run().events, start=1))
    monkeypatch.setattr(timeline, "MAX_SPANS", 10)
    part = Timeline(history)
    steps = {span.step for spans in part.computing.values() for span in spans}
    struck = {one.step for one in part.drawn if one.step is not None}
    assert struck <= steps <= {step + more for step in struck for more in (-1, 0, 1)}


def test_no_more_is_kept_than_fits_and_the_page_shows_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = traces.write(tmp_path, long_run().events)
    monkeypatch.setattr(timeline, "MAX_SPANS", 10)
    monkeypatch.setattr(details, "MAX_EVENTS", 90)
    history = History.read(run_dir)
    part = Timeline(history)
    kept = [event for _, event in part._events]
    assert len(kept) <= 90 and part.rank_limit == 1
    places = {(event.replica, event.rank) for event in kept if isinstance(event, trace.MicrobatchFinished)}
    assert places <= {(0, 0), (1, 0), (2, 0), *part.struck_at}
    lanes = {lane.name for one in part.drawn for group in picture(history, part, one).groups for lane in group.lanes}
    assert lanes == {"rank 0", "rank 1"}, "rank 1 was struck, and so is shown"
    (page, *_), _ = report.write(run_dir)
    assert "the run has too many to show them all" in " ".join(page.read_text().split())


def test_where_one_rank_of_each_replica_is_too_much_a_window_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(enumerate(long_run().events, start=1))
    windows = [Window(0.0, 1e9), Window(0.0, 0.001)]
    monkeypatch.setattr(details, "MAX_EVENTS", 20)
    assert collect(history, windows, []).events == []
    assert 0 < len(collect(history, [Window(0.02, 0.03)], []).events) <= 20
