"""Long work that Ctrl-C may end at any time, through the main process, which ends its workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.pool import Pool
from types import FrameType
from typing import NoReturn

CTRL_C_CODE = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C has ended."""


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT, and ignore the later ones.

    So nothing disturbs what the command has left to do and to print. Where SIGINT is ignored
    before, as for a background command of a script, it stays ignored.
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
    """Yield a pool of `number` worker processes, all of which block SIGINT.

    With `tasks_each` a process is replaced after so many tasks, which frees its memory.

    A terminal sends Ctrl-C to all processes. The workers block it from their first instruction on,
    replacements included: all that the pool starts inherits the signal mask of the thread that
    makes it. So do the pool's own threads.
    """
    resource_tracker.ensure_running()  # else the pool would start the tracker, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Not forked: a forked child would wait for locks that threads of this process hold.
        with multiprocessing.get_context("spawn").Pool(number, maxtasksperchild=tasks_each) as pool:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield pool
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def of_seeds[T](judge: Callable[[int], T], seeds: Iterable[int], jobs: int) -> Iterator[T]:
    """Yield what `judge(seed)` returns for all seeds, in their order, from `jobs` processes."""
    if jobs == 1:
        yield from map(judge, seeds)
        return
    with workers(jobs) as pool:
        yield from pool.imap(judge, seeds, chunksize=50)
