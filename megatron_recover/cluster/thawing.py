"""When ranks that a fault of kind `freeze` has stopped go on: as soon as the trace says that what they wait for has happened.

A stopped process cannot watch for anything, so the launcher does; it decides nothing else, and nothing without such faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_recover import trace
from megatron_recover.faults import Fault, FaultKind
from megatron_recover.observe.follow.tail import Tail


class Thawing:
    """Follows the trace of a run for the ends of its freezes. It never waits."""

    def __init__(self, faults: Sequence[Fault], events: Path) -> None:
        """`events`: the trace of the run. Without a freeze among its `faults` it is not read."""
        self._tail = Tail(events) if any(fault.kind is FaultKind.FREEZE for fault in faults) else None
        self._meant_for = {fault.replica for fault in faults if fault.kind is FaultKind.FREEZE}
        self._frozen: dict[tuple[int, int], str] = {}
        """(replica, rank) -> the event that it waits for."""
        self._due: list[tuple[int, int]] = []

    def due(self) -> list[tuple[int, int]]:
        """The ranks (replica, rank) whose event has come; a rank is named until `done`, since its stop may be on its way.

        A trace that cannot be read any more ends no freeze: the others fence who is frozen, as without an end of it.
        """
        try:
            for line in self._tail.lines() if self._tail is not None else ():
                event, _ = trace.parse(line)
                if event is not None:
                    self._take(event)
        except trace.TraceError:
            self._tail = None
        return list(self._due)

    def concerns(self, replica: int) -> bool:
        """Return whether a freeze is meant for the replica: the fault says when it ends, so nobody may end it before."""
        return replica in self._meant_for

    def done(self, replica: int, rank: int) -> None:
        """The rank goes on, or is gone."""
        self._due.remove((replica, rank))

    def _take(self, event: trace.AnyEvent) -> None:
        if isinstance(event, trace.Fault) and event.until is not None:
            self._frozen[event.replica, event.rank] = event.until
            return
        if isinstance(event, trace.Fenced):  # it is gone
            self._frozen = {key: until for key, until in self._frozen.items() if key[0] != event.replica}
            self._due = [key for key in self._due if key[0] != event.replica]
        name = trace.name_of(event)
        # Its own replica may still write what it was at.
        author = getattr(event, "replica", None)
        for key in [key for key, until in self._frozen.items() if until == name and key[0] != author]:
            del self._frozen[key]
            self._due.append(key)
