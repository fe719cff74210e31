"""What tests of the control plane share: partners that the test plays, and an address that is free."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from megatron_recover.collectives.wire import address_of, listen
from megatron_recover.config import describe_descriptors
from tests.collectives.partners import Partner


@pytest.fixture
def partner() -> Iterator[Partner]:
    """The other end of the link under test: the leader of a rank, or the coordinator of a leader."""
    played = Partner()
    yield played
    played.close()


@pytest.fixture
def other_leader() -> Iterator[Partner]:
    """The leader of another replica."""
    played = Partner()
    yield played
    played.close()


@pytest.fixture
def hand_down(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with names and descriptors, which this process then finds as a rank finds what the launcher handed down."""
    return lambda **named: [monkeypatch.setenv(*each) for each in describe_descriptors(named).items()]  # type: ignore[return-value]


@pytest.fixture
def free() -> str:
    """An address at which nobody listens."""
    listener = listen("127.0.0.1:0")
    address = address_of(listener)
    listener.close()
    return address


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

    def release(self) -> str:
        """Let everything be written, and return what was."""
        self._released = True
        self._goes_on.set()
        text, seconds = b"", 0.5
        os.set_blocking(self._reader, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                text += os.read(self._reader, 2**20)
                self._wait(seconds)
        os.dup2(self._before, 2)
        return text[self._filled :].decode()

    def _wait(self, seconds: float) -> None:
        """Wait until something is there to read, at most so long."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        poll.poll(seconds * 1000)

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


@pytest.fixture
def stalled_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], StalledStderr]]:
    """Have stderr of this process stall from the call on. (pytest would put it back between this fixture and the test.)"""
    made: list[StalledStderr] = []

    def stall() -> StalledStderr:
        made.append(StalledStderr())
        monkeypatch.setattr(sys, "stderr", made[0].file())
        return made[0]

    yield stall
    for each in made:
        each.close()
