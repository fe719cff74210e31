"""Prints the wall clock, and what the shortest and the longest of several waits of 0.1 s took."""

from __future__ import annotations

import ctypes
import threading
import time


def _wait_on_the_wall_clock() -> None:
    """Wait as C programs do that have no other clock."""
    semaphore, until = ctypes.create_string_buffer(64), time.time_ns() + 10**8
    libc = ctypes.CDLL(None)
    libc.sem_init(semaphore, 0, 0)
    libc.sem_timedwait(semaphore, (ctypes.c_long * 2)(until // 10**9, until % 10**9))


def main() -> None:
    """Wait in several ways."""
    lock = threading.Lock()
    lock.acquire()
    waits = (
        lambda: time.sleep(0.1),
        lambda: threading.Event().wait(0.1),
        lambda: lock.acquire(timeout=0.1),
        _wait_on_the_wall_clock,
    )
    seconds = []
    for wait in waits:
        since = time.monotonic()
        wait()
        seconds.append(time.monotonic() - since)
    print(time.time(), min(seconds), max(seconds))


if __name__ == "__main__":
    main()
