"""What a person sees of a run: Megatron's log lines of the writer, what happens to replicas, one live line on a terminal.

It follows the ranks' log files and the trace in a thread of its own: a terminal that is slow, stopped or gone holds up neither
a rank nor the launcher. It decides nothing.
"""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from megatron_recover import trace
from megatron_recover.cluster.job import LOGS, TRAIN_LOG, Job
from megatron_recover.core.values import ExitCode
from megatron_recover.observe.progress import Progress
from megatron_recover.observe.tail import Tail

_WORTH_SHOWING = re.compile(
    r"\biteration\s+\d+\s*/|validation loss|saving checkpoint|saved checkpoint|loading checkpoint|nothing was left to train"
)
_INTERVAL_S = 0.25
"""Between two looks at the logs; each costs half a millisecond of CPU, which is the job's."""


class Console:
    """The output of `megatron-recover run`."""

    def __init__(self, job: Job, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        """`quiet`: only how the run ends, if it does not end well; `stream`: instead of stdout."""
        self._job, self._quiet = job, quiet
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._over = threading.Event()
        self._exit: tuple[int, str] | None = None
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._events = Tail(job.run_dir / trace.EVENTS_FILE)
        shown = sorted({0, job.num_ranks - 1})
        self._logs = {(replica, rank): Tail(job.log_of(replica, rank)) for replica in range(job.num_replicas) for rank in shown}
        self._roster: tuple[int, ...] = tuple(range(job.num_replicas))
        self._begun = False
        """Whether there has been a generation."""
        self._repairing = 0
        """Newest generation that lost a replica, until the step in which it happened is committed."""
        self._labels: dict[int, str] = {}
        self._progress = Progress(job.num_replicas)

    def says(self, text: str) -> None:
        """One line of ours. Any thread; never blocks."""
        if not self._quiet:
            self._said.put(f"megatron-recover: {text}")

    def start(self) -> None:
        """Follow the run from now on."""
        self._thread.start()

    def finished(self, exit_code: int, reason: str) -> None:
        """The last words."""
        self._exit = (exit_code, reason)
        self.close()

    def close(self) -> None:
        """Show what is left to show; waits for the terminal to take it, but not for ever."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(self._job.config.deadlines.words_s)

    # --- The console's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with open(self._job.run_dir / TRAIN_LOG, "w", encoding="utf-8") as self._train_log:
                if self._rich.is_terminal and not self._quiet:
                    self._live = Live(Text("starting"), console=self._rich, refresh_per_second=8, transient=True)
                    self._live.start()
                while not self._over.wait(_INTERVAL_S):
                    self._show_news()
                self._show_news()
        except OSError:
            # The disk is full. The run goes on; its logs and its trace are written by others, who say so if they cannot.
            self._over.wait()
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.stop()
            if self._exit is not None:
                self._show_end(*self._exit)

    def _show_news(self) -> None:
        # Logs first: what the writer wrote while it was the writer is shown before a newer roster names another.
        for (replica, _), tail in self._logs.items():
            for line in tail.lines():
                if replica == min(self._roster, default=replica):
                    self._show(line.rstrip(b"\n").decode(errors="replace"))
        for line in self._events.lines():
            event, _ = trace.parse(line)  # a killed rank may leave a line torn, and this must not end the run
            if event is not None:
                self._progress.take(event)
                self._event(event)
        while not self._said.empty():
            self._print(self._said.get())
        self._train_log.flush()
        if self._live is not None and not self._quiet:
            self._live.update(Text(self.live_line(), no_wrap=True, overflow="ellipsis"))

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
        if exit_code not in (ExitCode.OK, ExitCode.INTERRUPTED):
            self._show_ends_of_logs()
        what = f"exit code {exit_code} ({ExitCode.words(exit_code)}): {reason}"
        # Whose job is interrupted before it has begun finds its folder as it was.
        kept = f"; everything is in {self._job.run_dir}" if self._begun or exit_code != ExitCode.INTERRUPTED else ""
        self._rich.print(Text(f"megatron-recover: {what}{kept}"))

    def _show(self, line: str) -> None:
        self._train_log.write(line + "\n")
        if _WORTH_SHOWING.search(line):
            self._print(line.strip())

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
        for path in sorted((self._job.run_dir / LOGS).glob("*.log")):
            lines = path.read_text(errors="replace").strip().splitlines()
            if any("Error" in line or "Traceback" in line or "Exception" in line for line in lines[-40:]):
                self._rich.print(Text(f"--- end of {path}"))
                for line in lines[-12:]:
                    self._rich.print(Text(f"    {line}"))


def _names(roster: tuple[int, ...]) -> str:
    return " ".join(map(str, roster)) or "none"
