"""`megatron-recover report RUN_DIR`: rebuilds summary.json and loss.svg of a run from its trace."""

from __future__ import annotations

from pathlib import Path

from megatron_recover.cli.check import no_trace
from megatron_recover.core.values import ExitCode
from megatron_recover.flags import Parser
from megatron_recover.observe import plot, report, summary
from megatron_recover.trace import EVENTS_FILE, TraceError


def main(argv: list[str]) -> int:
    """Write both files and say where they are."""
    parser = Parser(
        prog="megatron-recover report",
        description="Rebuild summary.json and the loss plot of a run directory from its trace.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a directory with events.jsonl")
    parser.add_argument("--against", type=Path, metavar="REF_DIR", help="compare with this run, and draw its loss too")
    arguments = parser.parse_args(argv)
    if not (arguments.run_dir / EVENTS_FILE).is_file():
        parser.error(no_trace(arguments.run_dir / EVENTS_FILE))
    try:
        report.write(arguments.run_dir, arguments.against)
    except FileNotFoundError as error:
        parser.error(f"--against: {no_trace(Path(error.filename))}")
    except TraceError as error:
        parser.error(f"cannot read the trace: {error}")
    except OSError as error:
        parser.error(f"{error.filename} cannot be written ({error.strerror}); make room for it")
    print(f"wrote {arguments.run_dir / summary.SUMMARY_FILE} and {arguments.run_dir / plot.PLOT_FILE}")
    return ExitCode.OK
