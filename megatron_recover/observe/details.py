"""The events around some instants of a trace that is too large to be kept: what a picture of them needs, and no more than fits.

At most `MAX_EVENTS` are kept (about 200 MB). Where there would be more, every replica keeps the ranks that were struck and the
first few, half as many each time; where its first rank alone is too much, the last of the windows is given up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_recover import trace
from megatron_recover.observe.history import History, Numbered

MAX_EVENTS = 400_000
_DRAWN = (trace.MicrobatchStarted, trace.MicrobatchFinished, trace.Reduced, trace.Applied)
"""What ranks do; it is most of a trace."""


@dataclass(frozen=True)
class Window:
    """A stretch of time, in seconds since the start of the run, and the replicas that were lost in it."""

    begin: float
    end: float
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Details:
    """Events in the order of their lines."""

    events: Sequence[Numbered]
    rank_limit: int | None
    """Ranks of a replica from this one on were left out, where they are not among those that were struck; None: none was."""


def collect(history: History, windows: Sequence[Window], struck: Collection[tuple[int, int]]) -> Details:
    """Read a trace once more and keep what happened in some windows, the most important of which comes first."""
    keeping = _Keeping(history, list(windows), struck)
    for line, event in history.events:
        if keeping.wants(event):
            keeping.add(line, event)
    return Details(keeping.events, keeping.rank_limit)


class _Keeping:
    def __init__(self, history: History, windows: list[Window], struck: Collection[tuple[int, int]]) -> None:
        self._history, self._windows, self._struck = history, windows, frozenset(struck)
        self._steps = self._overlapping()
        self._open: set[tuple[int, ...]] = set()
        """Microbatches whose beginning is kept: their end is, too, however late."""
        self.rank_limit: int | None = None
        self.events: list[Numbered] = []

    def _overlapping(self) -> frozenset[int]:
        """Steps that were under way in a window."""
        return frozenset(
            number for number, facts in self._history.steps.items()
            if any(facts.begin <= one.end and facts.end >= one.begin for one in self._windows)
        )  # fmt: skip

    def wants(self, event: trace.AnyEvent) -> bool:
        """Whether an event belongs into a window."""
        if isinstance(event, trace.Plan):
            return event.step in self._steps
        if isinstance(event, trace.Recovery):
            return any(event.t - event.seconds <= one.end and event.t >= one.begin for one in self._windows)
        if not isinstance(event, _DRAWN) or event.step not in self._steps:
            return False
        limit = self.rank_limit
        if limit is not None and event.rank >= limit and (event.replica, event.rank) not in self._struck:
            return False
        if isinstance(event, trace.MicrobatchStarted):
            is_inside = any(one.begin <= event.t <= one.end for one in self._windows)
            if is_inside:
                self._open.add(_key(event))
            return is_inside
        if isinstance(event, trace.MicrobatchFinished) and (key := _key(event)) in self._open:
            self._open.discard(key)
            return True
        seconds = 0.0 if isinstance(event, trace.Applied) else event.seconds
        return any(event.t - seconds <= one.end and event.t >= one.begin for one in self._windows)

    def add(self, line: int, event: trace.AnyEvent) -> None:
        """Keep an event; make room where there are too many."""
        self.events.append((line, event))
        while len(self.events) > MAX_EVENTS and self._windows:
            if self.rank_limit == 1:
                self._windows.pop()
                self._steps = self._overlapping()
            else:
                ranks = [event.rank for _, event in self.events if isinstance(event, _DRAWN)]
                self.rank_limit = max(1, (self.rank_limit or max(ranks, default=0) + 1) // 2)
            self._open.clear()  # filled again by what is still wanted
            self.events = [(at, one) for at, one in self.events if self.wants(one)]


def _key(event: trace.MicrobatchStarted | trace.MicrobatchFinished) -> tuple[int, ...]:
    return event.replica, event.rank, event.step, event.generation, event.microbatch, event.chunk
