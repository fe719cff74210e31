"""`megatron-recover check RUN_DIR`: prints the verdict of `observe.verify.check` on a run.

The exit code is 14 if an invariant is broken, two exact runs differ, the run ended without a step,
the trace lacks its start, or a trace with its end cannot be compared with the reference. Otherwise
it is 3 if the run has not ended, or if part of it could not be judged. On bad input, such as no
readable trace, it is 2.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_recover.cli.run_dirs import no_trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.flags import Parser
from megatron_recover.observe.verify.check import Verdict, check, describe, how_it_ended
from megatron_recover.packages import Lacking
from megatron_recover.trace import TraceError


def _json(verdict: Verdict) -> str:
    content = {
        "holds": verdict.holds,
        "finished": verdict.is_finished,
        "ended": how_it_ended(verdict.history),
        "whole": verdict.is_whole,
        "not_judged": verdict.not_judged,
        "violations": [
            {"invariant": one.invariant, "line": one.line, "message": one.message} for one in verdict.violations
        ],
        "problems": verdict.problems,
        "summary": verdict.summary,
    }  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def main(argv: list[str]) -> int:
    """Judge one run, print the verdict and return the exit code; exit with 2 on bad input."""
    parser = Parser(
        prog="megatron-recover check",
        description="Verify the invariants of a run from its trace alone, and compare it with a reference run.",
        epilog=f"Exit code 0: all hold. {ExitCode.UNFINISHED:d}: all that was judged holds, but the run still goes on or was "
        "cut off, or the trace lacks events, so that part of it was not judged (it says which). "
        f"{ExitCode.INVARIANT_VIOLATED:d}: an invariant is broken, two exact runs differ, the run ended without a step, the "
        "trace lacks its start, or a trace with its end cannot be compared with the reference. "
        f"{ExitCode.BAD_INPUT:d}: no readable trace.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a directory with events.jsonl, or such a file")
    parser.add_argument("--against", type=Path, metavar="REF_DIR", help="compare losses and parameters with this run")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    arguments = parser.parse_args(argv)
    try:
        verdict = check(arguments.run_dir, arguments.against)
    except FileNotFoundError as error:
        parser.error(no_trace(Path(error.filename)))
    except TraceError as error:
        parser.error(f"cannot read the trace: {error}")
    except Lacking as error:
        parser.error(f"--against: the checkpoints of the two runs cannot be compared: {error}")
    except OSError as error:
        parser.error(f"{error.filename or 'a checkpoint'} cannot be read ({error.strerror}); make it readable")
    print(_json(verdict) if arguments.json else describe(verdict))
    if not verdict.holds:
        return ExitCode.INVARIANT_VIOLATED
    return ExitCode.OK if verdict.is_finished and verdict.is_whole else ExitCode.UNFINISHED
