"""What a person sees of a run: Megatron's log lines of the writer, what happens to replicas, one live line on a terminal.

It follows the ranks' log files and the trace, so a slow terminal can never hold a rank up. It decides nothing.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from megatron_recover import trace
from megatron_recover.cluster.job import TRAIN_LOG, Job
from megatron_recover.core.values import ExitCode

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\b")
_LOSS = re.compile(r"\blm loss:\s*([-+.\dEe]+)")
_WORTH_SHOWING = re.compile(r"\biteration\s+\d+\s*/|validation loss|saving checkpoint|saved checkpoint|loading checkpoint")
_INTERVAL_S = 0.1


class _Tail:
    """New lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> Iterator[str]:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._position)
            text = file.read()
        self._position += len(text)
        *complete, self._rest = (self._rest + text).split(b"\n")
        for line in complete:
            yield line.decode(errors="replace")


class Console:
    """The output of `megatron-recover run`."""

    def __init__(self, job: Job, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        """`quiet`: only what ends the run; `stream`: stderr by default is not used, all goes to stdout."""
        self._job, self._quiet = job, quiet
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        if self._rich.is_terminal and not quiet:
            self._live = Live(Text("starting"), console=self._rich, refresh_per_second=8, transient=True)
            self._live.start()
        self._events = _Tail(job.run_dir / trace.EVENTS_FILE)
        shown = sorted({0, job.num_ranks - 1})
        self._logs = {
            (replica, rank): _Tail(job.log_of(replica, rank)) for replica in range(job.num_replicas) for rank in shown
        }
        self._train_log = open(job.run_dir / TRAIN_LOG, "w", encoding="utf-8")  # noqa: SIM115 - closed by `finished`
        self._roster: tuple[int, ...] = tuple(range(job.num_replicas))
        self._generation = 0
        self._quotas: tuple[int, ...] = ()
        self._labels: dict[int, str] = {}
        self._progress = "starting"
        self._last_iteration = 0
        self._last_poll = 0.0

    def says(self, text: str) -> None:
        """One line of ours."""
        if not self._quiet:
            self._rich.print(Text(f"megatron-recover: {text}"))

    def poll(self, *, now: bool = False) -> None:
        """Show what is new; cheap when called often."""
        if not now and time.monotonic() - self._last_poll < _INTERVAL_S:
            return
        self._last_poll = time.monotonic()
        # Logs first: what the writer wrote while it was the writer is shown before a newer roster names another.
        for (replica, _), tail in self._logs.items():
            for line in tail.lines():
                if replica == min(self._roster, default=replica):
                    self._show(line)
        for line in self._events.lines():
            event, _ = trace.parse(f"{line}\n".encode())  # a killed rank may leave a line torn, and this must not end the run
            if event is not None:
                self._event(event)
        self._train_log.flush()
        if self._live is not None:
            quotas = " ".join(map(str, self._quotas))
            self._live.update(
                Text(
                    f"{self._progress} | generation {self._generation} | "
                    f"replicas {len(self._roster)}/{self._job.num_replicas} | quotas {quotas}"
                )  # fmt: skip
            )

    def finished(self, exit_code: int, reason: str) -> None:
        """The last words."""
        self.poll(now=True)
        if self._live is not None:
            self._live.stop()
        self._train_log.close()
        if exit_code == ExitCode.OK and self._quiet:
            return
        if exit_code not in (ExitCode.OK, ExitCode.INTERRUPTED):
            self._show_ends_of_logs()
        name = ExitCode(exit_code).name.lower().replace("_", " ") if exit_code in list(ExitCode) else "killed"
        self._rich.print(
            Text(f"megatron-recover: exit code {exit_code} ({name}): {reason}; everything is in {self._job.run_dir}")
        )

    # --- Inside ------------------------------------------------------------------------------------------------------

    def _show(self, line: str) -> None:
        self._train_log.write(line + "\n")
        found = _ITERATION.search(line)
        if found:
            iteration, total = int(found[1]), int(found[2])
            loss = _LOSS.search(line)
            self._progress = f"iteration {iteration}/{total}" + (f" | loss {float(loss[1]):.4f}" if loss else "")
        if _WORTH_SHOWING.search(line) and not self._quiet:
            self._rich.print(Text(line.strip()))

    def _event(self, event: trace.AnyEvent) -> None:
        match event:
            case trace.Generation():
                self._roster, self._generation = event.roster, event.generation
                if event.generation > 1 or event.losses:
                    lost = "; ".join(f"replica {loss.replica} lost: {loss.kind.value} {loss.detail}" for loss in event.losses)
                    self.says(f"generation {event.generation}: replicas {_names(event.roster)} ({lost or event.reason})")
                else:
                    self.says(f"generation {event.generation}: replicas {_names(event.roster)}")
            case trace.Plan():
                self._labels[event.step] = event.label
                self._labels.pop(event.step - 2, None)  # members are at most one step apart
                if event.replica == min(event.roster):
                    self._quotas = event.quotas
            case trace.Fault():
                where = "".join(
                    f" {name} {value}"
                    for name, value in (("microbatch", event.microbatch), ("bucket", event.bucket))
                    if value is not None
                )
                during = f" during {self._labels[event.step]}" if event.step in self._labels else ""
                self.says(f"FAULT {event.kind} of replica {event.replica} rank {event.rank} at {event.point}{where}{during}")
            case trace.Recovery(phase="commit") if event.replica == min(self._roster, default=-1):
                label = self._labels.get(event.step, f"step {event.step}")
                self.says(f"{label} was finished without loss in generation {event.generation}")

    def _show_ends_of_logs(self) -> None:
        """The last lines of what failed, so that nobody has to look for them."""
        for path in sorted((self._job.run_dir / "logs").glob("*.log")):
            lines = path.read_text(errors="replace").strip().splitlines()
            if any("Error" in line or "Traceback" in line or "Exception" in line for line in lines[-40:]):
                self._rich.print(Text(f"--- end of {path}"))
                for line in lines[-12:]:
                    self._rich.print(Text(f"    {line}"))


def _names(roster: tuple[int, ...]) -> str:
    return " ".join(map(str, roster)) or "none"
