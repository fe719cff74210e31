"""New lines of a file that others append to, and of a trace over all its parts. It never waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megatron_recover.trace.event_files import EVENTS_FILE, open_part, reading


class Tail:
    """Reads on where it stopped the last time; a line is there when its end is."""

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        """`path`: any file, or the `events.jsonl` of a run, which stands for the parts that were put aside as well.

        `at_end`: leave out what is there already.
        """
        self._path = path
        self._is_trace = path.name == EVENTS_FILE
        self._number = 1
        """Of a trace: its part that is read."""
        self._position = path.stat().st_size if at_end and path.is_file() else 0

    def lines(self) -> Iterator[bytes]:
        """Every line, newline included, that was completed since the last call; none while there is no such file.

        Raises `event_files.TraceError` for what cannot be read.
        """
        while (opened := self._open()) is not None:
            file, place = opened
            with reading(place), file:
                file.seek(self._position)
                for line in file:
                    if not line.endswith(b"\n"):  # still being written: it is read again, whole, the next time
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
