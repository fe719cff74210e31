"""The interface of a log, the log for use without a recorder, and the events of one rank."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from megatron_recover.trace.event import Event


class Log(Protocol):
    """Interface of an object that records the events of a process."""

    def record(self, event: Event) -> None:
        """Stamp the event with the time and keep it, unless this log leaves it out or drops it."""


class EventLog:
    """Appends events to a file that other processes append to, where no recorder runs (`ring`).

    Each event is one `write` of a whole line to a descriptor opened with O_APPEND. So lines of
    several threads and processes never mix, and a recorded event survives the end of its process,
    SIGKILL included. Nothing is synced to disk: a power failure may lose the newest events.
    """

    def __init__(self, path: str | Path, started_at: float) -> None:
        """Open the log file at `path`, and create it if it is missing.

        `started_at` is the launcher's `time.monotonic()` at the start of the run, where the log's
        clock is 0.
        """
        self._path = str(path)
        self._started_at = started_at
        self._encode = msgspec.json.Encoder().encode
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def record(self, event: Event) -> None:
        """Stamp the event with the time and append it.

        Raises OSError if the line cannot be written whole.
        """
        seconds = round(time.monotonic() - self._started_at, 6)
        line = self._encode(msgspec.structs.replace(event, t=seconds)) + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(errno.ENOSPC, "the event log took only a part of a line; is the disk full?", self._path)

    def close(self) -> None:
        """Close the descriptor. The log cannot be used after that."""
        os.close(self._file)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RankTrace:
    """Records the events of one rank, each with its replica and rank.

    Without a log it records nothing.
    """

    def __init__(self, log: Log | None, *, replica: int, rank: int) -> None:
        self._log, self._replica, self._rank = log, replica, rank

    def __call__(self, event: Callable[..., Event], **fields: object) -> None:
        """Record an event of this rank with `fields`."""
        if self._log is not None:
            self._log.record(event(replica=self._replica, rank=self._rank, **fields))
