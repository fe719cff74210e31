"""Waiting without sleeping: each wait is woken by what it waits for, and fails the test at its deadline."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from megatron_recover.cluster.readiness import is_readable

_IN_MODIFY, _IN_CREATE = 0x2, 0x100


def until_files(condition: Callable[[], object], what: str, *folders: Path, deadline_s: float = 90.0) -> None:
    """Return when `condition()` holds; it is looked at whenever a file in one of `folders` is made or written (inotify(7))."""
    libc = ctypes.CDLL(None, use_errno=True)
    changes = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            assert libc.inotify_add_watch(changes, bytes(folder), _IN_MODIFY | _IN_CREATE) >= 0, os.strerror(ctypes.get_errno())
        until_readable(changes, lambda: _drained(changes, condition), what, deadline_s)
    finally:
        os.close(changes)


def _drained(changes: int, condition: Callable[[], object]) -> object:
    with contextlib.suppress(BlockingIOError):
        os.read(changes, 2**16)
    return condition()


def until_readable(descriptor: int, condition: Callable[[], object], what: str, deadline_s: float = 90.0) -> None:
    """Return when `condition()` holds; it is looked at whenever `descriptor` is readable, and has to read what is there."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert (left := end - time.monotonic()) > 0, f"not within {deadline_s:g} s: {what}"
        is_readable(descriptor, left)


def until_ended(processes: Iterable[psutil.Process], deadline_s: float = 90.0) -> None:
    """Return when all processes have ended; whether anybody has reaped them does not matter."""
    end = time.monotonic() + deadline_s
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if process.is_running():  # not another one with the same pid
                assert is_readable(descriptor, max(0.0, end - time.monotonic())), f"still there: {process}"
        finally:
            os.close(descriptor)
