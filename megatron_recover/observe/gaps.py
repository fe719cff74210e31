"""Where events are missing from a trace, and which steps that touches: of those `check` says nothing, neither good nor bad.

A gap tells whose events are missing, and a time (`trace.Gap`). It touches every step that was under way in that time, and those
from the last step of which its rank had written to the first of which it wrote again: what is missing can be of no other.
"""

from __future__ import annotations

from collections import defaultdict

from megatron_recover import trace
from megatron_recover.observe.history import History

LAUNCHER = -1
"""The "replica" of a gap in what launcher, coordinator and agent have written."""


class Gaps:
    """The gaps of a history."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.events = [event for _, event in history.of(trace.Gap)]
        self.hides_later = False
        """Whether steps may be missing whole that came after all that the trace has: a rank never wrote again."""
        self.touched: frozenset[int] = frozenset(self._touched()) if self.events else frozenset()
        """Steps of which events are missing, or may be."""
        self.of_launcher = any(event.replica == LAUNCHER for event in self.events)
        """Whether announcements, losses, fences or the end may be missing."""

    def __bool__(self) -> bool:
        return bool(self.events)

    def _touched(self) -> set[int]:
        history, found = self._history, set[int]()
        if history.first(trace.Joined) is None:  # nobody knows which rank holds which bucket
            return set(history.steps)
        for gap in self.events:
            under_way = {number for number, facts in history.steps.items() if facts.begin <= gap.t and facts.end >= gap.since}
            found |= under_way
            if gap.replica == LAUNCHER:  # it may have told that a replica was outvoted, for its parameters before that step
                found |= {number - 1 for number in under_way} & history.steps.keys()
        before: dict[tuple[int, int], int] = {}
        open_since: dict[tuple[int, int], int | None] = {}
        places = {(gap.replica, gap.rank) for gap in self.events}
        announced, launcher = history.generations, any(gap.replica == LAUNCHER for gap in self.events)
        for _, event in history.events:
            if isinstance(event, trace.Gap):
                open_since.setdefault((event.replica, event.rank), before.get((event.replica, event.rank)))
                continue
            step = getattr(event, "step", None)
            if step is None or isinstance(event, trace.Fault):
                continue
            if launcher and getattr(event, "generation", None) not in announced:
                found.add(step)
            place = (getattr(event, "replica", LAUNCHER), getattr(event, "rank", 0))  # a leader is rank 0
            if place not in places:
                continue
            if place in open_since:
                since = open_since.pop(place)
                found.update(range(min(step, step if since is None else since), step + 1))
            before[place] = max(step, before.get(place, step))
        for (replica, rank), since in open_since.items():
            if replica == LAUNCHER:
                continue
            # It never wrote again. It was no more than one step ahead of what the others had begun.
            until = max(gap.t for gap in self.events if (gap.replica, gap.rank) == (replica, rank))
            begun = max((number for number, facts in history.steps.items() if facts.begin <= until), default=-1)
            found.update({*range(begun if since is None else since, begun + 2)} & history.steps.keys())
            self.hides_later |= replica not in history.lost_at
        return found

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and last of each row of touched steps."""
        found: list[tuple[int, int]] = []
        for number in sorted(self.touched):
            if found and found[-1][1] == number - 1:
                found[-1] = found[-1][0], number
            else:
                found.append((number, number))
        return tuple(found)

    def explain(self, replica: int, since: float, until: float) -> bool:
        """Whether an event may be missing that the leader of a replica, or the launcher, wrote between two times."""
        return any(
            (gap.replica, gap.rank) in ((replica, 0), (LAUNCHER, gap.rank)) and gap.since <= until and gap.t >= since
            for gap in self.events
        )

    def fill(self, first: int, last: int) -> bool:
        """Whether each of the steps from `first` to `last` is touched."""
        return bool(self.events) and all(number in self.touched for number in range(first, last + 1))

    def by_rank(self) -> dict[tuple[int, int], int]:
        """How many events of each rank are missing."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for gap in self.events:
            found[gap.replica, gap.rank] += gap.num_events
        return dict(sorted(found.items()))
