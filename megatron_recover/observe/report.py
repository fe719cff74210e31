"""What a run leaves for its readers, made from its trace at any time: page, Perfetto trace, numbers, loss plot."""

from __future__ import annotations

from pathlib import Path

from megatron_recover.observe import page, perfetto, plot, summary
from megatron_recover.observe.check import check
from megatron_recover.observe.history import History
from megatron_recover.observe.timeline import Timeline


def write(run_dir: Path, against: Path | None = None, place: Path | None = None) -> tuple[Path, ...]:
    """Write the page to `place` (default: into the run directory) and the other files beside it; returns their paths.

    `against`: compare with this reference run, and draw its loss too. Raises FileNotFoundError or `trace.TraceError` where
    there is no readable trace, and OSError where a file cannot be written.
    """
    verdict = check(run_dir, against)
    history, reference = verdict.history, History.read(against) if against else None
    timeline = Timeline(history)
    place = place or run_dir / page.PAGE_FILE
    beside = place.parent / perfetto.TRACE_FILE
    is_whole = perfetto.write(history, timeline, beside)
    place.write_text(page.render(verdict, timeline, reference, is_whole=is_whole), encoding="utf-8")
    return place, beside, summary.save(place.parent, verdict.summary), plot.draw(place.parent, history, reference)
