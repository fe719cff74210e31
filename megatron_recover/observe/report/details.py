"""Keep the events around some instants of a trace that is too large to be kept whole.

At most `MAX_EVENTS` are kept (about 200 MB). If there are more, each replica keeps only its first
ranks and those that faults struck, and half as many each time. If the first rank alone is too much,
the last window is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_recover import trace
from megatron_recover.observe.history import History, Numbered

MAX_EVENTS = 400_000
_DRAWN = (trace.MicrobatchStarted, trace.MicrobatchFinished, trace.Reduced, trace.Applied)
"""Types of events of ranks, which are most of a trace."""


@dataclass(frozen=True)
class Window:
    """A period in seconds since the start of the run."""

    begin: float
    end: float


@dataclass(frozen=True)
class Details:
    """The kept events, in the order of their lines."""

    events: Sequence[Numbered]
    rank_limit: int | None
    """First rank of a replica that was left out, with all higher ranks; None: none was. Ranks that
    faults struck are kept."""


def collect(history: History, windows: Sequence[Window], struck: Collection[tuple[int, int]]) -> Details:
    """Read a trace once more and keep the events of some windows.

    `windows`: the most important one first, since the last one is dropped first.
    """
    keeping = _Keeping(history, list(windows), struck)
    for line, event in history.events:
        keeping.take(line, event)
        keeping.make_room()
    return Details(sorted(keeping.events, key=lambda one: one[0]), keeping.rank_limit)


class _Keeping:
    def __init__(self, history: History, windows: list[Window], struck: Collection[tuple[int, int]]) -> None:
        self._history, self._windows, self._struck = history, windows, frozenset(struck)
        self._steps = self._overlapping()
        self._begun: set[tuple[int, ...]] = set()
        """Keys of microbatches whose start is kept. Their end is kept as well, however late."""
        self._waiting: dict[tuple[int, ...], Numbered] = {}
        """Starts outside all windows, of microbatches that may end in a window."""
        self.rank_limit: int | None = None
        self.events: list[Numbered] = []

    def _overlapping(self) -> frozenset[int]:
        """Return the steps that were under way in a window."""
        return frozenset(
            number for number, facts in self._history.steps.items()
            if any(facts.begin <= one.end and facts.end >= one.begin for one in self._windows)
        )  # fmt: skip

    def take(self, line: int, event: trace.AnyEvent) -> None:
        """Keep an event of a window, if it is a plan, a phase of a recovery, or of `_DRAWN`.

        Plans of all steps that were under way in a window are kept. Ranks from `rank_limit` on that
        no fault struck are left out. A start is kept with its end.
        """
        if isinstance(event, trace.Plan):
            wanted = event.step in self._steps
        elif isinstance(event, trace.Recovery):
            wanted = self._overlaps(event.t - event.seconds, event.t)
        elif not isinstance(event, _DRAWN) or event.step not in self._steps or self._is_left_out(event.replica, event.rank):
            wanted = False
        elif isinstance(event, trace.MicrobatchStarted):
            wanted = self._overlaps(event.t, event.t)
            if wanted:
                self._begun.add(_key(event))
            else:
                self._waiting[_key(event)] = line, event
        elif isinstance(event, trace.MicrobatchFinished):
            key = _key(event)
            before = self._waiting.pop(key, None)
            wanted = key in self._begun or self._overlaps(before[1].t if before else event.t - event.seconds, event.t)
            self._begun.discard(key)
            if wanted and before is not None:
                self.events.append(before)
        else:
            wanted = self._overlaps(event.t - (0.0 if isinstance(event, trace.Applied) else event.seconds), event.t)
        if wanted:
            self.events.append((line, event))

    def _overlaps(self, begin: float, end: float) -> bool:
        return any(begin <= one.end and end >= one.begin for one in self._windows)

    def _is_left_out(self, replica: int, rank: int) -> bool:
        return self.rank_limit is not None and rank >= self.rank_limit and (replica, rank) not in self._struck

    def make_room(self) -> None:
        """Keep fewer ranks of each window, or fewer windows, while there are too many events."""
        while len(self.events) > MAX_EVENTS and self._windows:
            if self.rank_limit == 1:
                self._windows.pop()
                self._steps = self._overlapping()
            else:
                ranks = [event.rank for _, event in self.events if isinstance(event, _DRAWN)]
                self.rank_limit = max(1, (self.rank_limit or max(ranks, default=0) + 1) // 2)
            before, waiting, self.events = self.events, self._waiting, []
            self._begun, self._waiting = set(), {}
            for line, event in sorted([*before, *waiting.values()], key=lambda one: one[0]):
                self.take(line, event)


def _key(event: trace.MicrobatchStarted | trace.MicrobatchFinished) -> tuple[int, ...]:
    return event.replica, event.rank, event.step, event.generation, event.microbatch, event.chunk
