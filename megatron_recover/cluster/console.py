"""The terminal of `megatron-recover run`: lines, and one live line below them.

The console runs in the recorder's process. A thread of its own writes to the terminal and touches
no other file. So a terminal that is slow, stopped or gone holds up nothing else. The narrator
makes the lines.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from megatron_recover.deadlines import Deadlines

_INTERVAL_S = 0.25
"""Seconds between two turns of the thread that writes."""
_MAX_LINES = 100_000
"""Maximum of lines that wait for a terminal; further lines are not shown."""


class Console:
    """The output of `megatron-recover run`."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        is_held: Callable[[], bool] = lambda: False,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Show lines on `stream`, by default stdout, and on stderr, after `start`.

        `quiet`: show only the end. While `is_held()` is true the shell has the terminal, and
        no news is written before `end` or `close`.
        """
        self._quiet, self._is_held, self._deadlines = quiet, is_held, deadlines or Deadlines.of()
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self.is_live = self._rich.is_terminal and not quiet
        self._errors = RichConsole(file=sys.stderr, highlight=False, soft_wrap=True)
        if self._errors.is_terminal and self.is_live:
            self._errors = self._rich  # one terminal: the live line stays below all others
        self.now = "starting"
        """The live line. Any thread may set it."""
        self._live: Live | None = None
        self._lines: queue.Queue[tuple[RichConsole, str]] = queue.Queue(_MAX_LINES)
        self._over = threading.Event()
        self._end: Iterable[str] = ()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def show(self, line: str) -> None:
        """Queue one line to be shown, or drop it if `_MAX_LINES` wait.

        Any thread may call this; it never blocks.
        """
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((self._rich, line))

    def show_error(self, line: str) -> None:
        """Queue one line to be shown on stderr, as `show` does for stdout."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((self._errors, line))

    def start(self) -> None:
        """Show lines from now on."""
        self._thread.start()

    def end(self, lines: Iterable[str]) -> None:
        """Show what is left to show and then `lines`, which a quiet console shows, too.

        This never blocks. Nothing is shown after `lines`.
        """
        self._end = lines
        self._over.set()

    def close(self) -> bool:
        """End the console; wait at most `screen_s`, and return True if nothing is left to write.

        Nothing is left to write to a terminal that is gone.
        """
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(self._deadlines.screen_s)
        return not self._thread.is_alive()

    # --- The console's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        if self.is_live:
            with contextlib.suppress(OSError):
                live = Live(Text(self.now), console=self._rich, auto_refresh=False, transient=True)
                live.start()
                self._live = live
        while not self._over.wait(_INTERVAL_S):
            if (self._live is not None or not self._lines.empty()) and not self._is_held():
                self._show_news()
        self._show_news()
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.stop()
            for line in self._end:
                self._rich.print(Text(line))

    def _show_news(self) -> None:
        while not self._lines.empty():
            self._print(*self._lines.get())
        if self._live is not None and not self._quiet:
            with contextlib.suppress(OSError):
                self._live.update(Text(self.now, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _print(self, console: RichConsole, text: str) -> None:
        if self._quiet:
            return
        try:
            console.print(Text(text))
        except OSError:
            self._quiet = True  # no reader (`... | head`, a closed terminal); the logs continue
