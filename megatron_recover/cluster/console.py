"""What a person sees of a run: Megatron's log lines of the writer, what happens to replicas, one live line on a terminal.

It runs in the recorder's process, which gives it the events; it follows the log files itself. The thread that writes to the
terminal waits for no disk, and the thread that reads logs and writes `train.log` waits for no terminal. So a terminal that is
slow, stopped or gone, and a disk that stalls, hold up neither each other nor the recorder. It decides nothing.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from megatron_recover import trace
from megatron_recover.cluster.job import LOGS, TRAIN_LOG, log_file
from megatron_recover.core.values import ExitCode
from megatron_recover.observe.progress import Progress
from megatron_recover.observe.tail import Tail

_WORTH_SHOWING = re.compile(
    r"\biteration\s+\d+\s*/|validation loss|saving checkpoint|saved checkpoint|loading checkpoint|nothing was left to train"
)
_INTERVAL_S = 0.25
"""Between two looks at the logs; each costs half a millisecond of CPU, which is the job's."""
_LOGS_DEADLINE_S = 1.0
"""So long a look at the logs may hold up the terminal, once; then it shows them when the disk lets it."""
_LAST_WORDS_DEADLINE_S = 5.0
_MAX_EVENTS = 100_000
"""That wait for a terminal; more are not shown."""
_END_OF_LOG_BYTES = 64 * 2**10
"""So much of each log is read at the end of a run that failed."""


class Missing(enum.StrEnum):
    """What of the last words of a run was not shown in time."""

    NOTHING = ""
    LOGS = "logs"
    """How the run ended was shown, and the ends of the logs were not: the disk is slow."""
    EVERYTHING = "everything"
    """The terminal takes nothing."""


class Console:
    """The output of `megatron-recover run`."""

    WANTED = frozenset(
        {
            "run_started", "generation", "leader_silent", "plan", "committed", "applied", "fault", "waiting", "checkpoint",
            "rank_silent", "recovery", "run_finished",
        }
    )  # fmt: skip
    """Names of the events that make a difference here: those that a `case` of `_event` or of `Progress.take` names."""

    def __init__(
        self,
        run_dir: Path,
        *,
        num_replicas: int,
        num_ranks: int,
        quiet: bool = False,
        again: bool = False,
        roster: tuple[int, ...] = (),
        stream: TextIO | None = None,
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        """`quiet`: only how the run ends, if it does not end well; `stream`: instead of stdout.

        `again`: another console has shown the run until now; `roster` is the newest, if there is one. While `is_held()` nothing
        is written: the shell has the terminal.
        """
        self._run_dir, self._num_ranks, self._quiet, self._is_held = run_dir, num_ranks, quiet, is_held
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._events: queue.Queue[trace.AnyEvent] = queue.Queue(_MAX_EVENTS)
        self._over = threading.Event()
        self._exit: tuple[int, str] | None = None
        self._end_is_shown = False
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._logs = _Logs(run_dir, again=again)
        self._roster = roster or tuple(range(num_replicas))
        self._begun = bool(roster)
        """Whether there has been a generation."""
        self._repairing = 0
        """Newest generation that lost a replica, until the step in which it happened is committed."""
        self._labels: dict[int, str] = {}
        self._progress = Progress(num_replicas)

    def says(self, text: str) -> None:
        """One line of ours. Any thread; never blocks."""
        if not self._quiet:
            self._said.put(f"megatron-recover: {text}")

    def take(self, event: trace.AnyEvent) -> None:
        """Show the next event of the run. Any thread; never blocks."""
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(event)

    def follow(self, replica: int, rank: int) -> None:
        """Follow the log of a rank, if it is one of those that Megatron prints in."""
        if rank in (0, self._num_ranks - 1):
            self._logs.follow(replica, log_file(self._run_dir, replica, rank))

    def start(self) -> None:
        """Follow the run from now on."""
        self._thread.start()

    def finished(self, exit_code: int, reason: str) -> Missing:
        """Show how the run ended, and return what of that was not shown in time."""
        self._exit = (exit_code, reason)
        self.close()
        if not self._thread.is_alive():
            return Missing.NOTHING
        return Missing.LOGS if self._end_is_shown else Missing.EVERYTHING

    def close(self) -> None:
        """Show what is left to show; waits for the terminal to take it, but not for ever."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORDS_DEADLINE_S)

    # --- The console's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._rich.is_terminal and not self._quiet:
            with contextlib.suppress(OSError):
                live = Live(Text("starting"), console=self._rich, auto_refresh=False, transient=True)
                live.start()
                self._live = live
        while not self._over.wait(_INTERVAL_S):
            if not self._is_held():
                self._show_news()
        self._show_news()
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.stop()
            if self._exit is not None:
                self._show_end(*self._exit)

    def _show_news(self) -> None:
        # Logs first: what the writer wrote while it was the writer is shown before a newer roster names another.
        for line in self._logs.news(self._roster):
            self._print(line)
        while not self._events.empty():
            event = self._events.get()
            self._progress.take(event)
            self._event(event)
        while not self._said.empty():
            self._print(self._said.get())
        if self._live is not None and not self._quiet:
            with contextlib.suppress(OSError):
                self._live.update(Text(self.live_line(), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        try:
            self._rich.print(Text(text))
        except OSError:
            self._quiet = True  # nobody reads it (`... | head`, a terminal that was closed); train.log goes on

    def live_line(self) -> str:
        """What a terminal shows at its bottom; only what is known."""
        return self._progress.line()

    def _show_end(self, exit_code: int, reason: str) -> None:
        if exit_code == ExitCode.OK and self._quiet:
            return
        if exit_code == ExitCode.BAD_INPUT:  # said as the preflight says it; nothing is left to look at
            for line in reason.splitlines():
                print(f"megatron-recover run: {line}", file=sys.stderr)
            return
        what = f"exit code {exit_code} ({ExitCode.words(exit_code)}): {reason}"
        # Whose job is interrupted before it has begun finds its folder as it was.
        kept = f"; everything is in {self._run_dir}" if self._begun or exit_code != ExitCode.INTERRUPTED else ""
        self._rich.print(Text(f"megatron-recover: {what}{kept}"))
        self._end_is_shown = True
        if exit_code not in (ExitCode.OK, ExitCode.INTERRUPTED):  # last: a disk that is slow may keep these waiting for ever
            self._show_ends_of_logs()

    def _event(self, event: trace.AnyEvent) -> None:
        match event:
            case trace.Generation():
                self._begun, self._roster = True, event.roster
                self._repairing = event.generation if event.losses else 0
                if event.request is not None:
                    return
                if event.generation > 1 or event.losses:
                    lost = "; ".join(f"replica {loss.replica} lost: {loss.kind.value} {loss.detail}" for loss in event.losses)
                    self.says(f"generation {event.generation}: replicas {_names(event.roster)} ({lost or event.reason})")
                else:
                    self.says(f"generation {event.generation}: replicas {_names(event.roster)}")
            case trace.LeaderSilent(phase="began"):
                self.says(f"the leader of replica {event.member} has not answered for {event.seconds:.0f} s")
            case trace.Plan():
                self._labels[event.step] = event.label
                self._labels.pop(event.step - 2, None)  # members are at most one step apart
            case trace.Fault():
                where = "".join(
                    f" {name} {value}"
                    for name, value in (("microbatch", event.microbatch), ("bucket", event.bucket))
                    if value is not None
                )
                during = f" during {self._labels[event.step]}" if event.step in self._labels else ""
                self.says(f"FAULT {event.kind} of replica {event.replica} rank {event.rank} at {event.point}{where}{during}")
            case trace.Waiting():
                self.says(f"WARNING: waiting for replicas {_names(event.replicas)}: {event.reason}")
            case trace.Checkpoint(phase="failed"):
                self.says(f"WARNING: {event.detail}")
            case trace.Recovery(phase="commit", generation=generation) if generation == self._repairing:
                self._repairing = 0  # told once, by whoever is first
                label = self._labels.get(event.step, f"step {event.step}")
                self.says(f"{label} was finished without loss in generation {event.generation}")

    def _show_ends_of_logs(self) -> None:
        """The last lines of what failed, so that nobody has to look for them."""
        for path in sorted((self._run_dir / LOGS).glob("*.log")):
            try:
                lines = _end_of(path).strip().splitlines()
            except OSError:
                continue  # it is gone, or the disk has an error; the other logs may say more
            if any("Error" in line or "Traceback" in line or "Exception" in line for line in lines[-40:]):
                self._rich.print(Text(f"--- end of {path}"))
                for line in lines[-12:]:
                    self._rich.print(Text(f"    {line}"))


def _end_of(path: Path) -> str:
    """Return the last `_END_OF_LOG_BYTES` of a file. Raises OSError."""
    with open(path, "rb") as file:
        with contextlib.suppress(OSError):  # a FIFO has no end
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_OF_LOG_BYTES))
        return file.read(_END_OF_LOG_BYTES).decode(errors="replace")


class _Logs:
    """The thread that follows the logs of ranks and writes `train.log`. It works only when it is asked to."""

    def __init__(self, run_dir: Path, *, again: bool) -> None:
        """`again`: what is in the logs now was shown already."""
        self._run_dir, self._again = run_dir, again
        self._tails: list[tuple[int, Tail]] = []
        self._asked: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._is_busy = self._is_late = False
        self._train_log: TextIO | None = None
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def follow(self, replica: int, path: Path) -> None:
        """Follow one more log. Any thread."""
        self._tails = [*self._tails, (replica, Tail(path, at_end=self._again))]

    def news(self, roster: tuple[int, ...]) -> list[str]:
        """Return the new lines that are worth showing, of the writer of `roster`; none while the disk keeps them waiting."""
        if not self._is_busy:
            self._is_busy = True
            self._asked.put(roster)
        try:
            lines = self._found.get_nowait() if self._is_late else self._found.get(timeout=_LOGS_DEADLINE_S)
        except queue.Empty:
            self._is_late = True
            return []
        self._is_busy = self._is_late = False
        return lines

    # --- Its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._train_log = open(self._run_dir / TRAIN_LOG, "a" if self._again else "w", encoding="utf-8")  # noqa: SIM115
        except OSError:
            self._train_log = None  # lines are shown all the same
        while True:
            self._found.put(self._look(self._asked.get()))

    def _look(self, roster: tuple[int, ...]) -> list[str]:
        shown: list[str] = []
        for replica, tail in self._tails:
            try:
                lines = [line.rstrip(b"\n").decode(errors="replace") for line in tail.lines()]
            except OSError:
                continue  # the disk, or its server, has an error; the lines are there the next time
            if replica == min(roster, default=replica):
                self._write(lines)
                shown += [line.strip() for line in lines if _WORTH_SHOWING.search(line)]
        return shown

    def _write(self, lines: list[str]) -> None:
        try:
            if self._train_log is not None and lines:
                self._train_log.write("".join(f"{line}\n" for line in lines))
                self._train_log.flush()
        except OSError:
            # The disk is full: no more of `train.log`. Closing tries the rest once more, else it would be told as unraisable.
            assert self._train_log is not None
            with contextlib.suppress(OSError):
                self._train_log.close()
            self._train_log = None


def _names(roster: tuple[int, ...]) -> str:
    return " ".join(map(str, roster)) or "none"
