"""The hybrid logical clock (Kulkarni et al. 2014), which orders what happens on several nodes.

A *stamp* is one integer: milliseconds of a physical clock since 1970 in the upper bits, a counter
in the lower `COUNTER_BITS`. Stamps are compared as integers. A clock ticks for every event and
every frame, and takes over each larger stamp that it sees. So if one event can have caused
another, as far as frames show it, the other one has the larger stamp, however wrong the physical
clocks of the nodes are. While no clock is ahead of the own one, a stamp is the own physical time.

Note [One integer]. A stamp fits into one aligned word of memory, which one store writes and one
load reads. So the processes of a node can share one clock without a lock (`trace/node_clock.py`). A
counter of 21 bits may overflow on a node that is far behind another one. It then carries into the
milliseconds, and the stamps stay ordered.
"""

from __future__ import annotations

COUNTER_BITS = 21
"""Bits of the counter. 42 bits are left for the milliseconds in a signed word: until the year
2109."""
MAX_AHEAD_MS = 60_000
"""A stamp further ahead of the own physical clock than this is refused: one node with a wrong clock
would lead the clocks of all others for ever."""


def stamp_at(now_ms: int) -> int:
    """Return the smallest stamp of a physical time."""
    return now_ms << COUNTER_BITS


def milliseconds(stamp: int) -> int:
    """Return the physical part of a stamp: milliseconds since 1970."""
    return stamp >> COUNTER_BITS


def tick(newest: int, now_ms: int) -> int:
    """Return the stamp of the next event of a clock whose newest stamp is `newest`."""
    return max(newest + 1, stamp_at(now_ms))


def is_too_far_ahead(stamp: int, now_ms: int) -> bool:
    """Return whether a stamp that was seen is to be refused."""
    return milliseconds(stamp) > now_ms + MAX_AHEAD_MS
