"""A virtual clock: makes calls in order of their times, and equal times in order of scheduling.

Nothing here waits: a run of hours is over as soon as its calls are made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """A clock that makes each scheduled call when its time has come."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start of the simulation."""
        self.num_events = 0
        """Number of calls made so far."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule `call(*arguments)` for `time`, or for now if that is past."""
        self._asked += 1
        heapq.heappush(self._queue, (max(time, self.now), self._asked, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule `call(*arguments)` for `seconds` from now."""
        self.at(self.now + seconds, call, *arguments)

    def step(self) -> bool:
        """Make the next call; return False if there is none."""
        if not self._queue:
            return False
        self.now, _, call, arguments = heapq.heappop(self._queue)
        self.num_events += 1
        call(*arguments)
        return True
