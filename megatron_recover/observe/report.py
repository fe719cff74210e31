"""What a run leaves for its readers beside the trace, made from the trace at any time: page, numbers, loss plot."""

from __future__ import annotations

from pathlib import Path

from megatron_recover.observe import page, plot, summary
from megatron_recover.observe.check import check
from megatron_recover.observe.history import History


def write(run_dir: Path, against: Path | None = None, place: Path | None = None) -> tuple[Path, ...]:
    """Write the page to `place` (default: into the run directory) and the other files beside it; returns their paths.

    `against`: compare with this reference run, and draw its loss too. Raises FileNotFoundError or `trace.TraceError` where
    there is no readable trace, and OSError where a file cannot be written.
    """
    verdict = check(run_dir, against)
    reference = History.read(against) if against else None
    place = place or run_dir / page.PAGE_FILE
    place.write_text(page.render(verdict, reference), encoding="utf-8")
    return place, summary.save(place.parent, verdict.summary), plot.draw(place.parent, verdict.history, reference)
