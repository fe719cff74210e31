"""Find where a trace lacks events and which steps that touches; `check` does not judge those steps.

A gap (`trace.Gap`) names the writer of the missing events and a period. It touches:

- every step that was under way in that period;
- the steps from the last one that the writer named before the gap to the first one that it names
  after the gap; if it named none before, only the first one after;
- for a rank that names no step after the gap, the steps from the last one that it named before, or
  else from the newest that had begun, to one after the newest that had begun;
- for a gap of the launcher, also the step before each step that was under way, and all steps with
  an event that names a generation whose announcement is missing.

A gap of the agent of another node than node 0 touches no step, since agents record no step. A node
whose trace is absent or cut short has a gap for each of its ranks, until the loss of the replica.

The missing events can concern no other step. A trace with a gap and without any `joined` has all
steps touched.
"""

from __future__ import annotations

from collections import defaultdict

from megatron_recover import trace
from megatron_recover.observe.history import History

LAUNCHER = -1
"""Replica number of a gap in the events of launcher, coordinator and agent. In a merged trace, the
rank is negative for the agent of another node than node 0."""
_ABOUT_A_RANK = (trace.Fault, trace.RankSilent, trace.RankMoved)
"""Events that do not show which of its events a rank has recorded: faults, and those that the agent
writes about a rank."""


def _is_of_launcher(gap: trace.Gap) -> bool:
    return gap.replica == LAUNCHER and gap.rank >= 0


class Gaps:
    """The gaps of a history, and the steps that they touch."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.events = [event for _, event in history.of(trace.Gap)]
        self.hides_later = False
        """True if steps after the last one in the trace may be missing: a rank of a replica that
        was not lost names no step after its gap."""
        self.of_launcher = any(_is_of_launcher(event) for event in self.events)
        """True if announcements, losses, fences or the end of the run may be missing."""
        self.of_agents = any(event.replica == LAUNCHER and event.rank < 0 for event in self.events)
        """True if failures and fences on other nodes than node 0 may be missing."""
        self.touched: frozenset[int] = frozenset(self._touched()) if self.events else frozenset()
        """Steps of which events are missing or may be missing."""

    def __bool__(self) -> bool:
        return bool(self.events)

    def _touched(self) -> set[int]:
        history, found = self._history, set[int]()
        if history.first(trace.Joined) is None:  # without bucket_ranks nothing shows which rank holds which bucket
            return set(history.steps)
        about_steps = [gap for gap in self.events if gap.replica != LAUNCHER or _is_of_launcher(gap)]
        for gap in about_steps:
            under_way = {number for number, facts in history.steps.items() if facts.begin <= gap.t and facts.end >= gap.since}
            found |= under_way
            # A lost announcement may name an outvoted replica, whose parameters before the step
            # differ.
            if gap.replica == LAUNCHER:
                found |= {number - 1 for number in under_way} & history.steps.keys()
        before: dict[tuple[int, int], int] = {}
        open_since: dict[tuple[int, int], int | None] = {}
        places = {(gap.replica, gap.rank) for gap in about_steps}
        announced, launcher = history.generations, self.of_launcher
        for _, event in history.events:
            if isinstance(event, trace.Gap):
                open_since.setdefault((event.replica, event.rank), before.get((event.replica, event.rank)))
                continue
            step = getattr(event, "step", None)
            if step is None or isinstance(event, _ABOUT_A_RANK):
                continue
            generation = getattr(event, "generation", None)
            if launcher and generation is not None and generation not in announced:
                found.add(step)
            # An event without a rank is the leader's, which is rank 0.
            place = (getattr(event, "replica", LAUNCHER), getattr(event, "rank", 0))
            if place not in places:
                continue
            if place in open_since:
                since = open_since.pop(place)
                found.update(range(min(step, step if since is None else since), step + 1))
            before[place] = max(step, before.get(place, step))
        for (replica, rank), since in open_since.items():
            if replica == LAUNCHER:
                continue
            # This rank never named a step again. It was at most one step ahead of the newest step
            # that had begun.
            until = max(gap.t for gap in self.events if (gap.replica, gap.rank) == (replica, rank))
            begun = max((number for number, facts in history.steps.items() if facts.begin <= until), default=-1)
            found.update({*range(begun if since is None else since, begun + 2)} & history.steps.keys())
            self.hides_later |= replica not in history.lost_at
        return found

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the first and last step of each unbroken row of touched steps."""
        found: list[tuple[int, int]] = []
        for number in sorted(self.touched):
            if found and found[-1][1] == number - 1:
                found[-1] = found[-1][0], number
            else:
                found.append((number, number))
        return tuple(found)

    def explain(self, replica: int, since: float, until: float) -> bool:
        """Return whether an event of a leader or of the launcher may be missing in a period.

        The leader is that of `replica`. `since` and `until` are in seconds since the start of the
        run.
        """
        return any(
            (gap.replica, gap.rank) in ((replica, 0), (LAUNCHER, gap.rank)) and gap.since <= until and gap.t >= since
            for gap in self.events
        )

    def fill(self, first: int, last: int) -> bool:
        """Return whether gaps touch all steps from `first` to `last`."""
        return bool(self.events) and all(number in self.touched for number in range(first, last + 1))

    def by_rank(self) -> dict[tuple[int, int], int]:
        """Return the number of missing events by (replica, rank), in that order.

        Events that are missing with the trace of a node are left out.
        """
        found: dict[tuple[int, int], int] = defaultdict(int)
        for gap in (event for event in self.events if event.num_events):
            found[gap.replica, gap.rank] += gap.num_events
        return dict(sorted(found.items()))
