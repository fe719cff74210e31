"""A stderr that stalls, as a terminal that somebody has stopped."""

from __future__ import annotations

import contextlib
import io
import os
import select
import threading
from collections.abc import Callable

_PATIENCE_S = 40.0


class StalledStderr:
    """A stderr that takes nothing before `release`: a pipe that is full, and a file of Python's that waits."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._filled += os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        self._before, self._goes_on = os.dup(2), threading.Event()
        os.dup2(writer, 2)
        os.close(writer)
        self._released = False

    def release(self, is_all: Callable[[str], bool] = lambda text: True) -> str:
        """Let everything be written, and return what was: at least so much that `is_all(text)`."""
        self._released = True
        self._goes_on.set()
        data, poll = b"", select.poll()
        poll.register(self._reader, select.POLLIN)
        while len(data) < self._filled or not is_all(data[self._filled :].decode()):
            assert poll.poll(_PATIENCE_S * 1000), f"no more came than {data[self._filled :]!r}"
            data += os.read(self._reader, 2**20)
        while poll.poll(0):
            data += os.read(self._reader, 2**20)
        os.dup2(self._before, 2)
        return data[self._filled :].decode()

    def close(self) -> None:
        """Put stderr back. Threads that still write get an error."""
        if not self._released:
            self.release()
        os.close(self._before)
        os.close(self._reader)

    def file(self) -> io.TextIOBase:
        """Return what stands for `sys.stderr` meanwhile."""
        goes_on = self._goes_on

        class Waiting(io.StringIO):
            def write(self, text: str) -> int:
                goes_on.wait(60)
                return len(text)

        return Waiting()
