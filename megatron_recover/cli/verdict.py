"""`megatron-recover verdict RUN_DIR`: prints what a batch system is to do after a run."""

from __future__ import annotations

import msgspec

from megatron_recover.cli.run_dirs import run_folder
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.flags import Parser
from megatron_recover.observe import outcome
from megatron_recover.trace import TraceError


def main(argv: list[str]) -> int:
    """Print the verdict on one run; exit with 2 if its trace cannot be read."""
    parser = Parser(
        prog="megatron-recover verdict",
        description="Print one word and the exit code of a run, from the end of its trace: finished, requeue (start the same "
        "command again), stop (a person has to look first), or unknown (the trace has no end: the run goes on, was killed, or "
        "never began; no exit code). docs/reference/exit_codes.md says which code is which.",
        epilog=f"Exit code 0, whatever the verdict. {ExitCode.BAD_INPUT:d}: the trace cannot be read.",
    )
    parser.add_argument("run_dir", type=run_folder, metavar="RUN_DIR", help="the folder of a run, or its events.jsonl")
    parser.add_argument("--json", action="store_true", help="print verdict, exit code and reason as JSON")
    arguments = parser.parse_args(argv)
    try:
        found = outcome.outcome(arguments.run_dir)
    except TraceError as error:
        parser.error(f"cannot read the trace: {error}")
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print(found.verdict if found.exit_code is None else f"{found.verdict} {found.exit_code}")
    return ExitCode.OK
