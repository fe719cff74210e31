"""The meaning of a signal to the launcher: end the job, a repetition of that request, or kill.

Note [One request]. A scheduler sends several signals for one end of a job: `--signal`'s USR1 or
USR2 ahead of a time limit, then SIGTERM twice in a row on every node. All of these are one request.
Only a person at a terminal can kill everything at once, with a second Ctrl-C. A terminal sends
SIGINT to its foreground process group. So a SIGINT counts as Ctrl-C if this process has a
controlling terminal and belongs to that terminal's foreground group. Any other SIGINT (`scancel
--signal=INT`, a wrapper script without a terminal) counts like SIGTERM. Without a terminal, send
SIGKILL to the launcher to kill at once: all ranks die with it.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megatron_recover.cluster.rank_process import TOLD_TO_ALL


class Answer(enum.Enum):
    """The launcher's reaction to a signal."""

    END = "end"
    """Request all replicas to end after a common step."""
    KNOWN = "known"
    """Do nothing: the end was requested before."""
    KILL = "kill"
    """Kill everything at once."""


class EndRequest:
    """The one request to end the job, made of all signals that arrive."""

    def __init__(self, numbers: Sequence[int] = TOLD_TO_ALL) -> None:
        """`numbers`: the signals that request the end."""
        self._numbers = numbers
        self._is_made = False
        self._num_ctrl_c = 0
        self._before: list[tuple[int, Callable[..., object] | int | None]] = []
        self._on_signal: Callable[[int], None] | None = None
        self._kept: list[int] = []
        """Signals that came after `keep` and before `received`."""
        self.is_hurried = False
        """True if a signal that was not ignored came after the end of `received`. The exit code is
        known by then, and what is left to do should end early."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the signals that request the end."""
        return tuple(self._numbers)

    @property
    def kept(self) -> str:
        """Return the name of the first signal that came after `keep`; empty if none came."""
        return signal.Signals(self._kept[0]).name if self._kept else ""

    @property
    def is_made(self) -> bool:
        """Return whether `take` has counted any signal."""
        return self._is_made

    def take(self, number: int, *, at_terminal: bool) -> Answer:
        """Count one signal and return what to do.

        The first signal is END, each Ctrl-C from the second on is KILL, all others are KNOWN.
        `at_terminal`: a SIGINT now is a Ctrl-C (Note [One request]).
        """
        if number == signal.SIGINT and at_terminal:
            self._num_ctrl_c += 1
            if self._num_ctrl_c > 1:
                return Answer.KILL
        if self._is_made:
            return Answer.KNOWN
        self._is_made = True
        return Answer.END

    def keep(self) -> None:
        """Keep each signal from now on, for `received`: a node that waits for others has no job.

        A terminal that is closed sends SIGHUP. If this process was started with SIGHUP ignored
        (nohup), SIGHUP stays ignored.
        """
        if self._before:
            return
        self._before = [
            (number, signal.signal(number, self._handle))
            for number in self._numbers
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]

    @contextmanager
    def received(self, on_signal: Callable[[int], None]) -> Iterator[None]:
        """Call `on_signal(number)`, from a signal handler, for every signal that requests the end.

        Signals that were kept come first (`keep`).

        After this context the process is about to end. No signal may then change its exit code or
        leave anything behind. So until `release` a signal only sets `is_hurried`. If the end was
        requested before, every signal but SIGINT is ignored: further signals of a scheduler belong
        to that request.
        """
        self._on_signal = on_signal
        self.keep()
        for number in self._kept:
            on_signal(number)
        try:
            yield
        finally:
            for number, _ in self._before:
                signal.signal(number, signal.SIG_IGN if self._is_made and number != signal.SIGINT else self._hurry)

    def release(self) -> None:
        """Restore the handlers from before, except of signals that `received` left ignored."""
        for number, handler in self._before:
            if signal.getsignal(number) in (self._handle, self._hurry):
                signal.signal(number, handler)
        self._before = []

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._on_signal is None:
            self._kept.append(number)
        else:
            self._on_signal(number)

    def _hurry(self, number: int, frame: FrameType | None) -> None:
        self.is_hurried = True


def is_at_terminal() -> bool:
    """Return whether this process is in the foreground process group of a terminal.

    The terminal is the controlling terminal of this process.
    """
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
