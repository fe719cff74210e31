"""Long work that Ctrl-C may end at any time: once, and in this process alone, whose workers go with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.pool import Pool
from types import FrameType
from typing import NoReturn

CTRL_C_CODE = 128 + signal.SIGINT
"""The exit code of a command that Ctrl-C has ended."""


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """The first SIGINT raises KeyboardInterrupt as usual; those that follow do not disturb what is left to do and to say.

    Where SIGINT is ignored (a command of a script's that goes on in the background) it stays so.
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def workers(number: int, tasks_each: int | None = None) -> Iterator[Pool]:
    """A pool of so many; with `tasks_each`, a process is replaced after so many tasks, so that its memory is free again.

    A terminal sends Ctrl-C to all of them. They block it from their first instruction on, those that come later included:
    what the pool starts, its own threads as well, has the signal mask of the thread that makes it.
    """
    resource_tracker.ensure_running()  # which would take SIGINT out of the mask, if the pool started it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Not forked: whoever imports this may have threads, whose locks a forked child would wait for.
        with multiprocessing.get_context("spawn").Pool(number, maxtasksperchild=tasks_each) as pool:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield pool
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
