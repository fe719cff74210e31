"""`megatron-recover top RUN_DIR`: shows a run live, from its trace, until the run ends.

It only reads: nothing in the run depends on it, and it can be started and ended at any time.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_recover import trace
from megatron_recover.cli.run_dirs import no_trace, run_folder
from megatron_recover.cluster.job import LAUNCHER_LOG
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.flags import Parser
from megatron_recover.observe.files import LOGS
from megatron_recover.observe.follow import launcher
from megatron_recover.observe.follow.progress import RunProgress
from megatron_recover.observe.follow.tails import Tails
from megatron_recover.trace import event_files

INTERVAL_S = 0.25
"""Seconds between two reads of the trace."""
SILENCE_S = 30.0
"""Seconds without an event after which the line also shows what the launcher does. The run may
hang, or its launcher may be stopped or dead."""

_WAITING = "waiting for the run to start"


class Gone(Exception):
    """The trace has been removed: the run was refused, or ended before it trained."""


def main(argv: list[str]) -> int:
    """Show a run until its trace has the end of the run, which a killed launcher does not write."""
    parser = Parser(
        prog="megatron-recover top",
        description="Follow a run: newest step, its loss and time, generation, replicas, recoveries, quotas. On a terminal one "
        "line that is rewritten, else one line a step. It ends with the run, or by Ctrl-C, which leaves the run alone. After a "
        "killed launcher only Ctrl-C ends it.",
        epilog=f"Exit code 0: the run has ended, with whatever exit code, or Ctrl-C. {ExitCode.BAD_INPUT:d}: there is no run, "
        "or its trace cannot be read or has gone.",
    )
    parser.add_argument(
        "run_dir",
        type=run_folder,
        metavar="RUN_DIR",
        help="the folder of a run, or its events.jsonl; if the folder is empty, wait for the run to start",
    )
    run_dir = parser.parse_args(argv).run_dir
    place = run_dir / trace.EVENTS_FILE
    try:
        if not event_files.exists(run_dir) and not _may_start(run_dir):
            parser.error(no_trace(place))
        follow(place, sys.stdout, time.sleep, time.monotonic)
    except KeyboardInterrupt:  # the usual way to end; rich has restored the terminal
        return ExitCode.OK
    except Gone:
        parser.error(
            f"{place} has gone: the run was refused, or ended before it trained; read what its `megatron-recover run` printed"
        )
    except trace.TraceError as error:
        parser.error(f"cannot read the trace: {error}")
    except ValueError as error:
        parser.error(f"cannot read the trace: {place}: {error}")
    return ExitCode.OK


def _end(event: trace.RunFinished, run_dir: Path) -> str:
    """Return how a run ended; after a bad end with a log, also the command that shows why."""
    end = f"ended with exit code {event.exit_code} ({ExitCode.words(event.exit_code)}) after {event.t:.0f} s"
    log = run_dir / LAUNCHER_LOG
    if event.exit_code == ExitCode.OK or not log.is_file():  # the log is elsewhere if only the trace was copied
        return end
    return f"{end}; `{shlex.join(['tail', '-n', '3', str(log)])}` shows why, and what to do next"


def _may_start(run_dir: Path) -> bool:
    """Return whether a folder without a trace may be that of a run which begins."""
    with event_files.reading(run_dir):
        return run_dir.is_dir() and ((run_dir / LOGS).is_dir() or not any(run_dir.iterdir()))


def follow(place: Path, stream: TextIO, wait: Callable[[float], None], clock: Callable[[], float]) -> None:
    """Show the run whose trace is or will be at `place` until it ends; see `watch`.

    On a terminal one line is rewritten. Any other `stream` gets a line for each step, and one if
    the run has not started or its trace is silent. The last line says how the run ended.
    """
    console = Console(file=stream, highlight=False, soft_wrap=True)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        for kind, line in watch(place, wait, clock):
            if live is not None and kind == "now":
                live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            elif live is None and kind == "news":
                print(line, file=stream, flush=True)
    print(line, file=stream, flush=True)


Kind = Literal["news", "now", "end"]
"""The kind of a line: something new (a step is done, the run has not started, the trace is silent),
the state after a read of the trace, or the end of the run."""


def watch(place: Path, wait: Callable[[float], None], clock: Callable[[], float]) -> Iterator[tuple[Kind, str]]:
    """Yield lines about the run whose trace is or will be at `place`, the last of kind "end".

    `wait(seconds)` waits between two reads. Raises:

    - `Gone` if a trace that was there has been removed,
    - ValueError for a line of the trace that is no event,
    - `trace.TraceError` if the trace cannot be read.
    """
    tail, progress = Tails(place), RunProgress()
    seen, news_at, was_silent = event_files.exists(place.parent), clock(), False
    if not seen:
        yield "news", _WAITING
    while True:
        seen |= event_files.exists(place.parent)
        for line in tail.lines():
            event, _ = trace.parse(line)
            told = progress.take(event) if event is not None else None
            news_at = clock()
            if told is not None:
                yield "news", told
            if isinstance(event, trace.RunFinished):
                yield "now", progress.line()
                yield "end", _end(event, place.parent)
                return
        if seen and not event_files.exists(place.parent):
            raise Gone
        silent_s = clock() - news_at
        is_silent = seen and silent_s >= SILENCE_S
        now = progress.line(silent_s, launcher.about(place.parent)) if is_silent else progress.line()
        if is_silent and not was_silent:
            yield "news", now
        was_silent = is_silent
        yield "now", now if seen else _WAITING
        wait(INTERVAL_S)
