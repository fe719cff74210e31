"""Kills from outside at random times, of whoever is there: members and newcomers.

They come to the ranks of a real job through its `joining_pretrain.py`, which leaves their process ids in the run directory. One
replica of the start is spared: a job of which nobody is left has no state any more.
"""

from __future__ import annotations

import contextlib
import pathlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import psutil

from tests.system.strikes import RANK


@dataclass(frozen=True, kw_only=True)
class Kills:
    """How many there are, and when."""

    number: int
    after_s: tuple[float, float]
    """Fewest and most seconds from one to the next, and from the first step of anybody to the first one."""
    seed: int

    def __str__(self) -> str:
        return f"{self.number} kills from outside, {self.after_s[0]:g} to {self.after_s[1]:g} s apart"


class Killer:
    """Kills rank after rank of one job, on a thread of its own."""

    def __init__(self, kills: Kills, run_dir: pathlib.Path, spared: int | None) -> None:
        self._kills, self._run_dir, self._spared = kills, run_dir, spared
        self._dice = random.Random(kills.seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer")
        self.killed: list[str] = []
        """REPLICA.RANK of each, in their order."""

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._trains():
            if self._over.wait(0.1):
                return
        while len(self.killed) < self._kills.number and not self._over.wait(self._dice.uniform(*self._kills.after_s)):
            found = list(self._living())
            if found:
                who, process = self._dice.choice(found)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    self.killed.append(who)

    def _trains(self) -> bool:
        """Whether a step was made: who dies before counts as one that has never come."""
        with contextlib.suppress(FileNotFoundError):
            return b'"event":"applied"' in (self._run_dir / "events.jsonl").read_bytes()
        return False

    def _living(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield the ranks that live, but those that are spared."""
        for file in sorted(self._run_dir.glob("pid.*")):
            who = file.name.removeprefix("pid.")
            if int(who.split(".")[0]) != self._spared:
                with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # its file is being written
                    process = psutil.Process(int(file.read_text()))
                    if is_rank(process):
                        yield who, process


def is_rank(process: psutil.Process) -> bool:
    """Return whether a process is a rank that has not ended."""
    return process.status() != psutil.STATUS_ZOMBIE and process.name().startswith(RANK)
