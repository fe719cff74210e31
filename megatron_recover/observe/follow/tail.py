"""Read new lines of a growing file, or of a growing trace over all its parts, without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megatron_recover.trace.event_files import EVENTS_FILE, open_part, reading


class Tail:
    """A reader that continues where it stopped. A line counts only once its newline is there."""

    def __init__(self, path: Path) -> None:
        """Follow a file from its beginning.

        `path`: any file, or the `events.jsonl` of a run, which represents all parts of the trace.
        """
        self._path = path
        self._is_trace = path.name == EVENTS_FILE
        self._number = 1
        """Number of the part of a trace that is read now."""
        self._position = 0

    def lines(self) -> Iterator[bytes]:
        """Yield every line, newline included, that was completed since the last call.

        Yield none while there is no such file. Raise `event_files.TraceError` if the file cannot be
        read.
        """
        while (opened := self._open()) is not None:
            file, place = opened
            with reading(place), file:
                file.seek(self._position)
                for line in file:
                    if not line.endswith(b"\n"):  # still being written: the next call reads it again, whole
                        return
                    self._position += len(line)
                    yield line
            if place == self._path:
                return
            self._number, self._position = self._number + 1, 0

    def _open(self) -> tuple[IO[bytes], Path] | None:
        try:
            if self._is_trace:
                return open_part(self._path.parent, self._number)
            with reading(self._path):
                return open(self._path, "rb"), self._path
        except FileNotFoundError:
            return None
