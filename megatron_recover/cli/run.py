"""`megatron-recover run`: checks a command line, runs the job, and leaves a run directory.

`run_flags.py` has the flags, and `describing.py` what a command line becomes.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_recover import trace
from megatron_recover.cli import (
    command_line,
    describing,
    finish,
    launch_line,
    monitor_flags,
    node_checks,
    run_dirs,
    run_flags,
    several_nodes,
    training_script,
)  # fmt: skip
from megatron_recover.cluster import chaos
from megatron_recover.cluster.job import Job, leaves_files, link_logs
from megatron_recover.cluster.joining import NotMet, refuse
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.membership import Joined
from megatron_recover.cluster.monitoring import Wanted
from megatron_recover.cluster.save_lock import SaveLock
from megatron_recover.core.exit_code import GOES_ON_ELSEWHERE, ExitCode
from megatron_recover.flags import misplaced, split, taken_for_values, unknown, value_of
from megatron_recover.host.descriptor_limit import raise_descriptor_limit
from megatron_recover.host.in_use import InUse
from megatron_recover.host.reachable import NoAnswer
from megatron_recover.megatron.launch.arguments import recover_flags
from megatron_recover.megatron.launch.preflight import FLAGS
from megatron_recover.observe import ending, stop_mark, summary
from megatron_recover.observe.report import plot

_NO_SCRIPT = (
    "the training script is missing; write it and its flags behind those of run, for example: scripts/pretrain_gpt.py ..."
)
_REFUSED = "the examination of the nodes found:"
"""Heads the lines about all nodes, which one may hear of another before it has found them."""
_NO_PROCESS = "this node cannot be examined ({}); see to its limits of memory and of processes (`ulimit -u`)"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Errors of a folder that accepts no more data."""


class _Examined(ValueError):
    """The examination of the nodes has found what no run can work with, and has printed it."""


def main(argv: list[str], *, goes_on: bool = False) -> int:
    """Run a job to its end and return its exit code.

    `goes_on`: this process goes on after the job, with its signal handlers from before. Otherwise
    the process ends, and no signal changes the exit code any more.
    """
    parser = run_flags.parser()
    ours, command = split(argv, parser)
    try:
        code = _main(parser, ours, command, goes_on=goes_on)
        while code is None:
            code = _main(parser, ours, command, goes_on=goes_on, is_again=True)
        return code
    except SystemExit as end:
        if "--chained" in ours and parser.refusal:
            _leave_mark(command, int(end.code or 0), parser.refusal, None)
        raise


def _main(
    parser: run_flags.RunParser, ours: list[str], command: list[str], *, goes_on: bool, is_again: bool = False
) -> int | None:
    """Run a job as `main` does; exit with 2 if the command line is refused.

    Returns None if this node was lost and is to meet the others of its job anew (`is_again`).
    """
    arguments = _read(parser, ours, command)
    arguments.is_again = is_again
    raise_descriptor_limit()  # before nodes meet: the coordinator has two connections for each node, or more
    existed = run_dirs.exists(arguments.run_dir)
    told = _behind(parser, command)
    wanted, job, chaos_text, joined = _described(parser, arguments, command, told)
    with contextlib.ExitStack() as held:
        try:
            if refusals := node_checks.refusals(job, joined):
                raise _Examined("\n".join((_REFUSED, *refusals)))
            link_logs(job)
            save_lock = _locked_save(job, joined)
        except (NotMet, ValueError, OSError) as error:
            said = _NO_PROCESS.format(error.strerror) if isinstance(error, OSError) else str(error)
            code = error.exit_code if isinstance(error, NotMet) else ExitCode.BAD_INPUT
            _withdraw(job, joined, said, code, existed=existed)
            _end_refused(parser, error, said, ends_for_others=job.node == 0)
        if save_lock is not None:
            held.callback(save_lock.release, job.config.deadlines.store_s)
        try:
            if chaos_text:
                (job.run_dir / chaos.CHAOS_FILE).write_text(chaos_text)
                if not arguments.quiet and not Path(arguments.chaos).is_file():
                    print(chaos_text)
            launcher = Launcher(job, quiet=arguments.quiet, wanted=wanted, joined=joined)
            if save_lock is not None:
                save_lock.tell(launcher.ask_end)
            exit_code = _run(launcher)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return _without_room(job, error, existed=existed)
        is_refused = exit_code == ExitCode.BAD_INPUT
        if exit_code in ending.STOPS and job.node == 0 and (arguments.chained or not is_refused):
            _leave_mark(command, exit_code, launcher.reason, None if is_refused else job.run_dir)
        code = _ended(launcher, job, exit_code, existed=existed, quiet=arguments.quiet)
        if is_refused:
            for line in _behind(parser, command, launcher.reason):
                if line not in told:
                    print(f"megatron-recover run: {line}", file=sys.stderr)
        starts_anew = launcher.starts_anew
        if starts_anew or goes_on:
            held.callback(launcher.release_signals)
        return None if starts_anew else code


def _read(parser: run_flags.RunParser, ours: Sequence[str], command: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of the launcher; exit with 2 where the words themselves are wrong."""
    taken = taken_for_values(ours, parser)
    if found := misplaced(ours, [*FLAGS, *recover_flags()]) or unknown(ours, parser, parser.elsewhere):
        parser.error("\n".join([*found, *taken]))
    arguments = parser.parse_args(ours)
    if not command:
        parser.error("\n".join([_NO_SCRIPT, *taken]))
    if (why := training_script.launcher(command[0], "run", is_module=arguments.module is not None)) is not None:
        parser.error(why)
    return arguments


def _without_room(job: Job, error: OSError, *, existed: bool) -> int:
    """Tell that the run's descriptions or its trace could not be written; return the exit code.

    Both must exist before training.
    """
    print(
        f"megatron-recover run: --run-dir {job.run_dir}: {error.strerror}; the run could not be started. "
        "Make room there, or give another folder.",
        file=sys.stderr,
    )  # fmt: skip
    events = job.run_dir / trace.EVENTS_FILE
    if not events.exists() or not events.stat().st_size:
        _discard(job, existed=existed)
    return ExitCode.FAILED


def _described(
    parser: run_flags.RunParser, arguments: argparse.Namespace, command: Sequence[str], told: Sequence[str]
) -> tuple[Wanted | None, Job, str, Joined | None]:
    """Return the metrics and notices that are wanted, and what `describing.job_of` returns.

    Print the lines `told` behind what else is printed about the command line. Exit with 2 if the
    command line is refused, or as the meeting of the nodes has ended.
    """
    try:
        described = monitor_flags.read(arguments), *describing.job_of(arguments, command)
    except (NotMet, ValueError) as error:
        is_mine = not isinstance(error, NotMet) or error.is_of_owner
        said = "\n".join([*str(error).splitlines(), *_behind(parser, command, str(error))])
        _end_refused(parser, error, said, ends_for_others=is_mine)
    except OSError as error:
        _end_refused(parser, error, several_nodes.mistake_of(error))
    for line in told:
        print(f"megatron-recover run: {line}", file=sys.stderr)
    return described


def _behind(parser: run_flags.RunParser, command: Sequence[str], refused: str = "") -> list[str]:
    """Return a line for each flag behind the script that may be meant for the launcher.

    `refused` is as in `launch_line.behind_script`.
    """
    return [
        f"{words} behind {command[0]} is the script's; if it is for the launcher, write: megatron-recover run {words} ... "
        f"{command[0]} ..."
        for words in launch_line.behind_script(command, parser, refused)
    ]


def _end_refused(parser: run_flags.RunParser, error: Exception, said: str, *, ends_for_others: bool = True) -> NoReturn:
    """Print `said` and exit, after bad input with 2, or as the meeting of the nodes has ended.

    Bad input ends a chain of jobs, unless it may pass by itself. So do jobs of an array of which
    too few have met: the next array would wait as long. `ends_for_others`: this node ends the chain
    also for what another node has found. The node of the coordinator alone does so: the others
    cannot know whether what it has found may pass.
    """
    if isinstance(error, NotMet):
        if error.stops and ends_for_others:
            parser.refusal = str(error)
        parser.exit(error.exit_code, several_nodes.last_words(error))
    if isinstance(error, _Examined):
        parser.refusal = said
        parser.exit(ExitCode.BAD_INPUT)
    if isinstance(error, (InUse, NoAnswer)):
        parser.error_for_now(said)
    parser.error(said)


def _withdraw(job: Job, joined: Joined | None, reason: str, exit_code: int, *, existed: bool) -> None:
    """Tell the other nodes why this one cannot run the job, and leave nothing of it here."""
    if joined is not None:
        refuse(joined, reason, job.config.deadlines, exit_code)
    _discard(job, existed=existed)


def _leave_mark(command: Sequence[str], exit_code: int, reason: str, run_dir: Path | None) -> None:
    """Leave a mark in the folder of `--save`, if it is given, after an end that repeats itself."""
    save = value_of(command, "--save")
    if save is None:
        return
    try:
        stop_mark.leave(Path(save), exit_code, reason, run_dir)
    except OSError as error:
        print(f"megatron-recover run: no mark {stop_mark.STOP_MARK} in --save {save}: {error.strerror}", file=sys.stderr)


def _locked_save(job: Job, joined: Joined | None) -> SaveLock | None:
    """Lock the folder of `--save`, if there is one, so that no second job saves there.

    The node of the coordinator does so for all nodes. Its signs of life go on meanwhile: a look at
    a job of another host takes 15 s, and a slow disk longer.

    Raises ValueError with the remedy.
    """
    if job.save is None or job.node:
        return None
    coordinator = joined.coordinator if joined is not None and len(job.nodes) > 1 else None
    try:
        with contextlib.nullcontext() if joined is None else joined.membership.kept():
            return SaveLock(job.save, job.run_dir, coordinator.process.pid if coordinator is not None else None)
    except OSError as error:
        raise ValueError(f"--save {job.save} cannot be locked ({error.strerror}); give another folder") from error


def _run(launcher: Launcher) -> int:
    """Run the job and return its exit code.

    After an exception, restore signal handlers as `Launcher.release_signals` does.
    """
    try:
        return launcher.run()
    except BaseException:
        launcher.release_signals()
        raise


def _ended(launcher: Launcher, job: Job, exit_code: int, *, existed: bool, quiet: bool) -> int:
    """Write the files that a run leaves at its end, or discard its folder; return its exit code.

    The folder is discarded after bad input, and after a signal before training began. After a run
    that was killed on request nothing is written.
    """
    interrupted = exit_code == ExitCode.INTERRUPTED or exit_code > 128
    if exit_code == ExitCode.BAD_INPUT or (interrupted and not launcher.has_begun):
        _discard(job, existed=existed)
    elif not launcher.knows_end:
        whole = job.run_dir.parent.parent if job.node else job.run_dir
        print(
            "megatron-recover run: no summary and no plot: other nodes may train on; when they have ended, "
            f"`{command_line('report', str(whole))}` makes them",
            file=sys.stderr,
        )  # fmt: skip
    elif leaves_files(exit_code, has_begun=launcher.has_begun) and not job.node:
        for line in launcher.untraced:
            print(f"megatron-recover run: {line}; summary and report lack its events", file=sys.stderr)
        _report(job, launcher)
    elif leaves_files(exit_code, has_begun=launcher.has_begun) and not quiet:
        folder = job.run_dir.parent.parent
        are = "will be" if launcher.reason.endswith(GOES_ON_ELSEWHERE) else "are"
        print(f"megatron-recover run: summary and report of all nodes {are} on {job.nodes[0].name}, in {folder}")
    return exit_code


def _discard(job: Job, *, existed: bool) -> None:
    """Empty the run directory, and remove it if this command made it; parents stay.

    Also remove the folder of links to the logs, if there is one. Nothing was trained, and the same
    command needs the run directory empty.
    """
    run_dir = job.run_dir
    if job.log_links is not None:
        shutil.rmtree(job.log_links)
    if job.node:
        run_dirs.remove_part(run_dir, existed=existed)
        return
    run_dirs.remove(run_dir, existed=existed)
    done = "emptied" if existed else "removed"
    print(f"megatron-recover run: nothing was trained, so {run_dir} was {done} again", file=sys.stderr)


def _report(job: Job, launcher: Launcher) -> None:
    """Make `summary.json` and the loss plot, or print why there are none.

    Once they are made, print the faults of the run that never struck.
    """
    run_dir = job.run_dir
    why: str | None = "the end of the trace could not be written"  # no second wait for a disk that did not answer
    if launcher.is_recorded:
        why = finish.failure(run_dir, job.config.deadlines, launcher.is_hurried)
    if why is None and (left_out := plot.left_out()) is not None:
        print(f"megatron-recover run: {left_out}", file=sys.stderr)
    if why is not None:  # the run is over and has reported its end
        remedy = f"`{command_line('report', str(run_dir))}` makes them"
        if not launcher.is_recorded or any(os.strerror(number) in why for number in _NO_ROOM):
            remedy = f"see to the disk of {run_dir} first (if it is full, make room there); then {remedy}"
        print(f"megatron-recover run: no summary and no plot: {why}; {remedy}", file=sys.stderr)
    if why is not None or not job.faults:  # the disk may have been the reason, so it is not read again
        return
    try:
        told = summary.load(run_dir)
    except (OSError, ValueError):
        return
    for number, fault in chaos.unstruck(job.faults, [(one.replica, one.rank, one.point) for one in told.faults]):
        print(
            f"megatron-recover run: [[fault]] {number} of {run_dir / chaos.CHAOS_FILE} never struck (replica "
            f"{fault.replica}, rank {fault.rank}, {fault.point.value}): the rank did not reach it so often, or had ended",
            file=sys.stderr,
        )
