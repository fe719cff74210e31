"""`megatron-recover scale RUN_DIR --replicas N`: has a running job grow or shrink.

The request is left in the run directory, where node 0 of the job reads it.
"""

from __future__ import annotations

import time
from pathlib import Path

from megatron_recover.cli.drain import WAIT_S, ask
from megatron_recover.cli.run_dirs import add_job_arguments, folder_of_job
from megatron_recover.cluster import status
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted, named, verb
from megatron_recover.flags import Parser

_LOOK_S = 0.5


def main(argv: list[str]) -> int:
    """Ask a job for another number of replicas, and wait until it has that many."""
    parser = Parser(
        prog="megatron-recover scale",
        description="Have a running job grow or shrink to N replicas. New ones are formed in free slots (--spares, and what "
        "`megatron-recover drain` has given back) while the others train. To shrink, the replicas with the highest ids leave "
        "after a common step. No microbatch is lost.",
        epilog=f"Exit code {ExitCode.OK:d}: the job has N replicas. {ExitCode.FAILED:d}: one that was to leave was lost first. "
        f"{ExitCode.BAD_INPUT:d}: the job refuses, or there is none. "
        f"{ExitCode.UNFINISHED:d}: it has another number after the wait, wants another one by now, or has not answered.",
    )
    add_job_arguments(parser)
    parser.add_argument("--replicas", type=int, required=True, metavar="N", help="number of replicas that the job is to have")
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="S", help=f"longest wait for them, in seconds (default: {WAIT_S:g})"
    )
    arguments = parser.parse_args(argv)
    if arguments.replicas < 1:
        parser.error(f"--replicas is {arguments.replicas}; ask for 1 or more, or end the job by SIGTERM to its launcher")
    if arguments.replicas > status.MOST_REPLICAS:
        parser.error(f"--replicas is {arguments.replicas}, which no job can have; ask for fewer")
    try:
        run_dir = folder_of_job(arguments)
        now = status.read(run_dir)
        if now is None or now.exit_code is not None:
            parser.error(f"no job trains in {run_dir}; `megatron-recover status {run_dir}` says more")
        asked = ask(run_dir, parser, replicas=arguments.replicas)
        return _await(run_dir, asked, arguments.replicas, arguments.wait, parser)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _await(run_dir: Path, asked: str, number: int, wait_s: float, parser: Parser) -> int:
    """Tell the job's answer, wait until the job has `number` replicas; return the exit code."""
    until = time.monotonic() + wait_s
    answer: status.Answer | None = None
    reached_at: int | None = None
    """The step at which the job had `number` replicas for the first time."""
    while time.monotonic() < until:
        now = status.read(run_dir)
        if now is not None:
            if answer is None and (answer := _answer(now, asked)) is not None:
                if answer.refused:
                    parser.error(answer.refused)
                print(answer.text, flush=True)
            if answer is not None and (lost := tuple(sorted({*answer.leaving} & {*now.lost}))):
                how = verb(len(lost), "was lost before it left", "were lost before they left")
                print(f"{named(lost)} {how}; {_here(now)}")
                return ExitCode.FAILED
            if answer is not None and now.wanted not in (None, number):
                print(f"the job wants {counted(now.wanted, 'replica')} by now, not {number}; {_here(now)}")
                return ExitCode.UNFINISHED
            if answer is not None and len(now.roster) == number:
                reached_at = now.step if reached_at is None else reached_at
                if now.step > reached_at:  # a step is committed with all of them
                    print(_here(now))
                    return ExitCode.OK
            else:
                reached_at = None  # a newcomer was turned away
            if now.exit_code is not None:
                parser.error(f"the job has ended with exit code {now.exit_code}: {now.reason}")
        time.sleep(_LOOK_S)
    if answer is None:
        print(
            f"the job has not answered within {wait_s:g} s; the request stays in {run_dir / status.REQUESTS}, and "
            f"`megatron-recover status {run_dir}` says when the job has last written its state"
        )
    else:
        print(f"the job does not have {counted(number, 'replica')} after {wait_s:g} s; it goes on to that number by itself")
    return ExitCode.UNFINISHED


def _answer(now: status.Status, asked: str) -> status.Answer | None:
    return next((answer for answer in now.answers if answer.id == asked), None)


def _here(now: status.Status) -> str:
    number = len(now.roster)
    return f"{counted(number, 'replica')} {verb(number, 'trains', 'train')} ({' '.join(map(str, now.roster))})"
