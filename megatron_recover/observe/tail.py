"""New lines of a file that others append to. It never waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


class Tail:
    """Reads on where it stopped the last time; a line is there when its end is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def lines(self) -> Iterator[bytes]:
        """Every line, newline included, that was completed since the last call; none while there is no such file."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return
        with file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # still being written: it is read again, whole, the next time
                    return
                self._position += len(line)
                yield line
