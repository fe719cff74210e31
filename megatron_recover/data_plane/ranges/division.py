"""The division of ranges among sources. Pure: no thread, clock or socket.

Each source begins with a part of its own, of about equal size. A source that is done takes ranges
from the end of the largest part that is left. So a slow source does less, and a fast one more. When
all ranges are asked for, a source that is idle asks once more for one that another source keeps
waiting, after twice the time that it needs for a range itself. So the last ranges do not wait for
a source that stalls. A range that comes twice is taken once.
"""

from __future__ import annotations

from collections import deque

from megatron_recover.data_plane.ranges.contract import Range


class Division:
    """The ranges of one memory, divided among sources 0, 1, ..."""

    def __init__(self, num_bytes: int, num_sources: int, chunk_bytes: int) -> None:
        """Cut the bytes 0 to `num_bytes` into ranges of `chunk_bytes`; the last may be shorter."""
        ranges = [Range(start, min(start + chunk_bytes, num_bytes)) for start in range(0, num_bytes, chunk_bytes)]
        self._parts = [
            deque(ranges[source * len(ranges) // num_sources : (source + 1) * len(ranges) // num_sources])
            for source in range(num_sources)
        ]
        """Ranges that nobody is asked for, by the source that begins with them."""
        self._asked: dict[Range, dict[int, float]] = {}
        """Sources that are asked for a range, with the time since when, for each range that is
        asked for and has not arrived."""
        self._typical_s = [0.0] * num_sources
        """Longest recent time from the request of a range to its arrival, by source."""
        self._left = len(ranges)

    @property
    def is_complete(self) -> bool:
        """Return whether all ranges have arrived."""
        return not self._left

    def take(self, source: int, now: float, *, is_idle: bool) -> Range | None:
        """Return a range to ask `source` for now, or None.

        Only an idle source gets a range that another one is asked for (`steals_at`).
        """
        part = self._parts[source] or max(self._parts, key=len)
        if part:
            wanted = part.popleft() if part is self._parts[source] else part.pop()
            self._asked[wanted] = {source: now}
            return wanted
        if not is_idle or (stolen := self._slowest(source)) is None or now < self._steals_at(source, stolen):
            return None
        self._asked[stolen][source] = now
        return stolen

    def steals_at(self, source: int) -> float | None:
        """Return the time from which `take` gives an idle `source` another one's range.

        Return None if there is none.
        """
        stolen = self._slowest(source)
        return None if stolen is None else self._steals_at(source, stolen)

    def arrived(self, source: int, got: Range, now: float) -> bool:
        """Record that `source` has sent a range, intact; return whether it is the first."""
        asked = self._asked.pop(got, None)
        if asked is None:
            return False
        if source in asked:
            self._typical_s[source] = max(now - asked[source], self._typical_s[source] / 2)
        self._left -= 1
        return True

    def failed(self, source: int, lost: Range) -> None:
        """Record that `source` will not send a range; it is asked of another, or again."""
        if (asked := self._asked.get(lost)) is None or asked.pop(source, None) is None or asked:
            return
        del self._asked[lost]
        min(self._parts, key=len).appendleft(lost)

    def gone(self, source: int) -> None:
        """Record that `source` sends nothing more."""
        for lost in [each for each, asked in self._asked.items() if source in asked]:
            self.failed(source, lost)

    def _slowest(self, source: int) -> Range | None:
        """Return the range that was asked for first, and not of `source`."""
        others = [(min(asked.values()), len(asked), each) for each, asked in self._asked.items() if source not in asked]
        return min(others)[2] if others else None

    def _steals_at(self, source: int, stolen: Range) -> float:
        return max(self._asked[stolen].values()) + 2 * self._typical_s[source]
