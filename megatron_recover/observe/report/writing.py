"""What a run leaves for its readers, made from its trace at any time: page, Perfetto trace, numbers, loss plot."""

from __future__ import annotations

from pathlib import Path

from megatron_recover.host.whole_file import replacing
from megatron_recover.observe import summary
from megatron_recover.observe.history import Line
from megatron_recover.observe.report import page, perfetto, plot
from megatron_recover.observe.report.timeline import Timeline
from megatron_recover.observe.verify.check import check


def write(run_dir: Path, against: Path | None = None, place: Path | None = None) -> tuple[tuple[Path, ...], tuple[Line, ...]]:
    """Write the page, the Perfetto trace, and numbers and loss plot again, all into the run directory.

    With a `place` elsewhere, write the page there and the Perfetto trace beside it under the page's name, nothing else: what
    lies there may be another run's. Returns the files, and the lines of the trace that were cut short.

    `against`: compare with this reference run, and draw its loss too. Raises FileNotFoundError or `trace.TraceError` where
    there is no readable trace, and OSError, with its name, where a file cannot be written; what stood there stays.
    """
    verdict = check(run_dir, against)
    history = verdict.history
    timeline, cuts = Timeline(history), tuple(line for line, _ in history.cuts)
    beside = run_dir / perfetto.TRACE_FILE if place is None else place.with_name(f"{place.stem}.{perfetto.TRACE_FILE}")
    is_whole = perfetto.write(history, timeline, beside)
    page_file = place or run_dir / page.PAGE_FILE
    text = page.render(verdict, timeline, is_whole=is_whole, perfetto_file=beside.name, links_to_logs=place is None)
    with replacing(page_file) as file:
        file.write(text.encode())
    if place is not None:
        return (page_file, beside), cuts
    return (page_file, beside, summary.save(run_dir, verdict.summary), plot.draw(run_dir, history, verdict.reference)), cuts
