"""Lines on stderr, written by a thread of their own, for threads that must not wait for the reader.

The launcher's stderr is a terminal, which a user may have stopped, or a file on a disk that may
stall. A rank's stderr is memory (`cluster/output.py`), unless its script has replaced it by a file.
Threads that print share a lock, so one that waits for the reader makes the others wait too. Lines
for which there is no room are dropped.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading

_MAX_LINES = 100
"""Texts queued at most; further ones are dropped."""
_STDERR = 2


class Speaker:
    """A queue of texts for stderr. Any thread may use it."""

    def __init__(self) -> None:
        self._texts: queue.Queue[str] = queue.Queue(_MAX_LINES)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Queue a text, to be written with a line end, or drop it if the queue is full.

        Never waits for the reader, never raises.
        """
        with contextlib.suppress(queue.Full):
            self._texts.put_nowait(text)
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="speaker", daemon=True)
                with contextlib.suppress(RuntimeError):  # no room for a thread, or the interpreter is about to end
                    thread.start()
                    self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the queue to be written.

        Return whether nothing is left to write.

        A text that could not be written counts as done.
        """
        texts = self._texts
        with texts.all_tasks_done:
            return texts.all_tasks_done.wait_for(lambda: not texts.unfinished_tasks, seconds)

    def _run(self) -> None:
        while True:
            # Not by `sys.stderr`: at the end of the process the interpreter would wait for the lock
            # of a write that stalls.
            rest = memoryview(f"{self._texts.get()}\n".encode(errors="backslashreplace"))
            with contextlib.suppress(OSError):
                while rest:
                    rest = rest[os.write(_STDERR, rest) :]
            self._texts.task_done()
