"""The end of freezes: a rank that a fault of kind `freeze` has stopped continues after its event.

The event is one of the trace, given by the fault. A stopped process cannot watch for an event, so
the launcher does. It decides nothing else here, and without such faults nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_recover import trace
from megatron_recover.faults import Fault, FaultKind
from megatron_recover.observe.follow.tail import Tail


class Thawing:
    """A reader of the run's trace that finds the ends of its freezes. It never waits."""

    def __init__(self, faults: Sequence[Fault], events: Path) -> None:
        """`events`: path of the run's trace. It is read only if a freeze is among the `faults`."""
        self._tail = Tail(events) if any(fault.kind is FaultKind.FREEZE for fault in faults) else None
        self._meant_for = {fault.replica for fault in faults if fault.kind is FaultKind.FREEZE}
        self._frozen: dict[tuple[int, int], str] = {}
        """Frozen rank (replica, rank) -> name of the event that ends the freeze."""
        self._due: list[tuple[int, int]] = []

    def due(self) -> list[tuple[int, int]]:
        """Return the ranks (replica, rank) whose event has come.

        A rank stays in the result until `done` is called for it or its replica is fenced, since its
        SIGSTOP may still be on its way. A trace that cannot be read any more adds no rank: the
        other replicas then have the frozen one fenced, as if its freeze had no end.
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
        """Return whether a freeze is meant for the replica.

        The fault defines when that freeze ends, so the detector does not judge the replica. The
        coordinator may still remove the replica if others wait for it in vain.
        """
        return replica in self._meant_for

    def done(self, replica: int, rank: int) -> None:
        """Forget a rank that continues or has ended."""
        self._due.remove((replica, rank))

    def _take(self, event: trace.AnyEvent) -> None:
        if isinstance(event, trace.Fault) and event.until is not None:
            self._frozen[event.replica, event.rank] = event.until
            return
        if isinstance(event, trace.Fenced):  # the replica is gone
            self._frozen = {key: until for key, until in self._frozen.items() if key[0] != event.replica}
            self._due = [key for key in self._due if key[0] != event.replica]
        name = trace.name_of(event)
        # A frozen replica may still write events of its earlier work, so its own events do not
        # count.
        author = getattr(event, "replica", None)
        for key in [key for key, until in self._frozen.items() if until == name and key[0] != author]:
            del self._frozen[key]
            self._due.append(key)
