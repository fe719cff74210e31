"""Decides what a signal to the launcher means: the request to end the job, a repetition of that request, or kill at once.

Note [One request]. A scheduler sends several signals for one end of a job: `--signal`'s USR1 or USR2 ahead of a time limit,
then SIGTERM twice in a row on every node. All of these are one request. Only a person at a terminal can kill everything at
once, with a second Ctrl-C. A terminal sends SIGINT to its foreground process group, so a SIGINT counts as Ctrl-C if this
process has a controlling terminal and belongs to that terminal's foreground group. Any other SIGINT (`scancel --signal=INT`,
a wrapper script without a terminal) counts like SIGTERM. Who has no terminal and must kill at once sends SIGKILL to the
launcher: everything that it started dies with it.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_recover.cluster.forkserver import TOLD_TO_ALL


class Answer(enum.Enum):
    """What the launcher does about a signal."""

    END = "end"
    """Ask all replicas to end after a common step."""
    KNOWN = "known"
    """Nothing: the end was requested before."""
    KILL = "kill"
    """Kill everything at once."""


class EndRequest:
    """The one request to end the job, made of all signals that arrive."""

    def __init__(self) -> None:
        self._is_made = False
        self._num_ctrl_c = 0
        self._before: list[tuple[int, Callable[..., object] | int | None]] = []
        self.is_hurried = False
        """Whether a signal came after the end of `received`: the exit code is known, and what is left to do is to end early."""

    @property
    def is_made(self) -> bool:
        """Whether any signal has arrived."""
        return self._is_made

    def take(self, number: int, *, at_terminal: bool) -> Answer:
        """Return the answer to one signal. `at_terminal` says whether a SIGINT now is a Ctrl-C (Note [One request])."""
        if number == signal.SIGINT and at_terminal:
            self._num_ctrl_c += 1
        if self._num_ctrl_c > 1:
            return Answer.KILL
        if self._is_made:
            return Answer.KNOWN
        self._is_made = True
        return Answer.END

    @contextmanager
    def received(self, on_signal: Callable[[int], None]) -> Iterator[None]:
        """Call `on_signal(number)`, from a signal handler, for every signal that asks for the job's end.

        SIGHUP, which a terminal that is closed sends, is left alone where whoever started this process has it ignored (nohup).
        After this context the process is about to end, and no signal must change its exit code or leave anything behind. So
        until `release` a signal only sets `is_hurried`. Where the end was requested, not even that: later signals of a
        scheduler belong to that request and are ignored, but for SIGINT.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            on_signal(number)

        self._before = [
            (number, signal.signal(number, handle))
            for number in TOLD_TO_ALL
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]
        try:
            yield
        finally:
            for number, _ in self._before:
                signal.signal(number, signal.SIG_IGN if self._is_made and number != signal.SIGINT else self._hurry)

    def release(self) -> None:
        """Have signals do again what they did before `received`, but for those that are ignored (see there)."""
        for number, handler in self._before:
            if signal.getsignal(number) == self._hurry:
                signal.signal(number, handler)
        self._before = []

    def _hurry(self, number: int, frame: FrameType | None) -> None:
        self.is_hurried = True


def is_at_terminal() -> bool:
    """Return whether this process belongs to the foreground process group of a controlling terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # ENXIO: there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
