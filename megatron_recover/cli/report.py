"""`megatron-recover report RUN_DIR`: makes the page and the other files of a run from its trace."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_recover.cli.run_dirs import no_trace, run_folder
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.flags import Parser
from megatron_recover.observe.report import plot
from megatron_recover.observe.report import writing as report
from megatron_recover.observe.report.page import PAGE_FILE
from megatron_recover.packages import Lacking
from megatron_recover.trace import EVENTS_FILE, TraceError, event_files


def main(argv: list[str]) -> int:
    """Write the files and print where they are."""
    parser = Parser(
        prog="megatron-recover report",
        description="Make report.html from the trace of a run, finished or not: one page that needs no network. Beside it "
        "perfetto.json, a timeline for ui.perfetto.dev; summary.json and loss.svg are written again.",
    )
    parser.add_argument("run_dir", type=run_folder, metavar="RUN_DIR", help="a directory with events.jsonl, or that file")
    parser.add_argument("--against", type=Path, metavar="REF_DIR", help="compare with this run, and draw its loss too")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the page here, the timeline beside it and nothing else (default: RUN_DIR/report.html)",
    )
    arguments = parser.parse_args(argv)
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}; make it, or give another place")
    if arguments.out is not None and arguments.out.is_dir():
        parser.error(f"--out: {arguments.out} is a folder; give the page's file, for example {arguments.out / PAGE_FILE}")
    try:
        if not event_files.exists(arguments.run_dir):
            parser.error(no_trace(arguments.run_dir / EVENTS_FILE))
        files, cuts = report.write(arguments.run_dir, arguments.against, arguments.out)
    except TraceError as error:
        parser.error(f"cannot read the trace: {error}")
    except Lacking as error:
        parser.error(f"--against: the checkpoints of the two runs cannot be compared: {error}")
    except OSError as error:
        place, against = Path(error.filename or arguments.run_dir), arguments.against
        if isinstance(error, FileNotFoundError) and against is not None and place in (against, against / EVENTS_FILE):
            parser.error(f"--against: {no_trace(place)}")
        parser.error(f"{place} cannot be read or written ({error.strerror}); make room for it, or write elsewhere by --out")
    for line in cuts:
        print(f"line {line} of the trace was cut short: its writer was killed in mid-write; the page says so", file=sys.stderr)
    if arguments.out is None and (left_out := plot.left_out()) is not None:
        print(f"megatron-recover report: {left_out}", file=sys.stderr)
    print(f"wrote {', '.join(map(str, files[:-1]))} and {files[-1]}")
    return ExitCode.OK
