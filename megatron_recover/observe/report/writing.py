"""Write the files of a run for its readers: page, Perfetto trace, summary and loss plot.

All of them are made from the trace and can be made again at any time.
"""

from __future__ import annotations

from pathlib import Path

from megatron_recover.host.whole_file import replacing
from megatron_recover.observe import summary
from megatron_recover.observe.facts import Line
from megatron_recover.observe.report import page, perfetto, plot
from megatron_recover.observe.report.timeline import Timeline
from megatron_recover.observe.verify.check import check


def write(run_dir: Path, against: Path | None = None, place: Path | None = None) -> tuple[tuple[Path, ...], tuple[Line, ...]]:
    """Write page, Perfetto trace, summary and loss plot into the run directory.

    The plot is left out where its package is missing (`plot.left_out`).

    With a `place`, only the page is written to that file, and the Perfetto trace beside it under
    the page's name. Other files there may belong to another run.

    `against`: a reference run to compare with, whose loss is drawn, too.

    Return the written files, and the lines of the trace that were cut short.

    Raise what `check` raises. Raise OSError with the file's name if a file cannot be written; an
    older file of that name is kept.
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
    files = [page_file, beside, summary.save(run_dir, verdict.summary)]
    if plot.left_out() is None:
        files.append(plot.draw(run_dir, history, verdict.reference))
    return tuple(files), cuts
