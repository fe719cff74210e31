"""A virtual clock: what happens next, in order of time, and of being asked for where times are equal.

Nothing here waits: a run of hours is over as soon as its events are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls what was asked for when its time has come."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start of the simulation."""
        self.num_events = 0
        """Calls made so far."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call `call(*arguments)` at `time`, or now where that is past."""
        self._asked += 1
        heapq.heappush(self._queue, (max(time, self.now), self._asked, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call `call(*arguments)` in so many seconds."""
        self.at(self.now + seconds, call, *arguments)

    def step(self) -> bool:
        """Make the next call; False where there is none."""
        if not self._queue:
            return False
        self.now, _, call, arguments = heapq.heappop(self._queue)
        self.num_events += 1
        call(*arguments)
        return True
