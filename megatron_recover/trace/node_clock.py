"""The hybrid logical clock of a node, which all its processes share (`core/hybrid_clock.py`).

The clock is a file in memory with one word for each process: the newest stamp of the process. Only
the process writes its word, and the clock's newest stamp is the largest of all words. The file
outlives its processes, so no stamp is lost with a process that is killed.

Note [One clock a node]. The lines of a node's trace are in the order of CLOCK_MONOTONIC. If each
process had a clock of its own, two events of two processes could be in one order in the file, and
in the other order by their stamps. The traces of several nodes could then not be merged without
moving an effect before its cause. With one clock, a process that begins to record an event after
another process has recorded one gets the larger stamp (`trace/ring.py`, Note [Stamps]). Words are
written and read without a lock or a barrier. A store is visible to other processes within
microseconds, which is less than a process takes from one event to its next frame.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable

from megatron_recover.config import RankContext, clock_offset_ms, inherited_descriptor
from megatron_recover.core import hybrid_clock
from megatron_recover.host import memory_file

DESCRIPTOR = "clock"
"""Name under which a rank inherits the clock."""
AGENT, COORDINATOR, FIRST_RANK = 0, 1, 2
"""Places of the processes of a node in the memory of its clock. Rank number `n` of the node has the
place `FIRST_RANK + n`."""
_TELL_S = 60.0
"""Least number of seconds between two reports of refused stamps."""
_WORD_BYTES = 8


def create(num_ranks: int, *, offset_ms: int | None = None) -> int:
    """Create the memory of a node's clock, and return its descriptor, which is not inheritable.

    The clock has places for an agent, a coordinator and `num_ranks` ranks. `offset_ms` is added to
    the physical clock, for tests with wrong clocks; None: that of `config.clock_offset_ms`. Raises
    OSError.
    """
    if offset_ms is None:
        offset_ms = clock_offset_ms()
    descriptor = memory_file.create_sized("megatron-recover-clock", _WORD_BYTES * (1 + FIRST_RANK + num_ranks))
    os.pwrite(descriptor, offset_ms.to_bytes(_WORD_BYTES, "little", signed=True), 0)
    return descriptor


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class NodeClock:
    """The clock of a node as one of its processes uses it. Any thread may use it."""

    def __init__(self, memory: int | None, place: int = AGENT, *, physical_ms: Callable[[], int] = _wall_ms) -> None:
        """Map the memory of a clock, whose descriptor the caller may then close.

        - `memory` is the descriptor; None: a clock of this process alone.
        - `place` is this process's own. No other living process has it.
        - `physical_ms` returns the milliseconds since 1970 by this node's own clock.
        """
        size = _WORD_BYTES * (1 + FIRST_RANK)
        words = memoryview(mmap.mmap(-1, size) if memory is None else mmap.mmap(memory, 0)).cast("q")
        self._offset_ms, self._words, self._place = words[0], words[1:], place
        self._physical_ms = physical_ms
        self._lock = threading.Lock()
        self._report: Callable[[float], None] | None = None
        self._told_at = float("-inf")

    @classmethod
    def inherited(cls, context: RankContext) -> NodeClock:
        """Return the clock that this rank inherited, and close its descriptor.

        Called once in a process. Without a launcher the clock is this process's own.
        """
        descriptor = inherited_descriptor(DESCRIPTOR)
        if descriptor is None:
            return cls(None)
        clock = cls(descriptor, context.clock_place)
        os.close(descriptor)
        return clock

    @property
    def now_ms(self) -> int:
        """Return the physical time of this node, in milliseconds since 1970."""
        return self._physical_ms() + self._offset_ms

    def tick(self) -> int:
        """Return the stamp of an event or frame, larger than every stamp of this node before it."""
        with self._lock:
            words = self._words
            stamp = words[self._place] = hybrid_clock.tick(max(words), self._physical_ms() + self._offset_ms)
            return stamp

    def see(self, stamp: int) -> None:
        """Take over a stamp of another node, whose sender has proven itself.

        A stamp more than `MAX_AHEAD_MS` ahead of the physical time is ignored, and reported.
        """
        now_ms = self.now_ms
        if hybrid_clock.is_too_far_ahead(stamp, now_ms):
            self._refused((hybrid_clock.milliseconds(stamp) - now_ms) / 1e3)
            return
        with self._lock:
            if stamp > self._words[self._place]:
                self._words[self._place] = stamp

    def report_refused(self, report: Callable[[float], None]) -> None:
        """Call `report(seconds)` for a refused stamp, so many seconds ahead of this node's clock.

        The call is made in the thread that saw the stamp, at most every `_TELL_S` seconds.
        """
        self._report = report

    def _refused(self, ahead_s: float) -> None:
        if self._report is not None and time.monotonic() - self._told_at >= _TELL_S:
            self._told_at = time.monotonic()
            self._report(ahead_s)
