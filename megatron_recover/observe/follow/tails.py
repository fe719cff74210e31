"""Read the new lines of the traces of all nodes of a run, without waiting.

What is new at one look is merged by the stamps (`trace/merging.py`). A line that is written later
than the others comes later: a live reader does not wait for a node, which may be lost.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_recover import trace
from megatron_recover.core.hybrid_clock import milliseconds
from megatron_recover.observe.follow.tail import Tail
from megatron_recover.trace import merging
from megatron_recover.trace.event import snake_case
from megatron_recover.trace.event_files import EVENTS_FILE, TraceError

_BEGINNING = re.compile(rb'\{"event":"(\w+)","v":\d+,"t":(-?\d+(?:\.\d+)?)(?:,"h":(\d+))?')
_CLOCK = re.compile(rb'"clock":(\d+)')


_OF_THE_RUN = {snake_case(kind.__name__) for kind in merging.OF_THE_RUN}


class _NodeTail:
    """The trace of one node that grows, with its clock."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self._tail = number, Tail(folder / EVENTS_FILE)
        self._base = self._stamp = 0
        self.leads_s: float | None = None
        """Seconds by which the clock that is furthest ahead exceeds `t`; None before a stamp."""

    def lines(self) -> Iterator[tuple[int, _NodeTail, bytes]]:
        """Yield stamp, node and line of each new line.

        Lines of another node than node 0 that cannot be read are left out: `check` names them.
        """
        try:
            for line in self._tail.lines():
                self._take(line)
                yield self._stamp, self, line
        except TraceError:
            if not self.number:
                raise

    def _take(self, line: bytes) -> None:
        found = _BEGINNING.match(line)
        if found is None or found[3] is None:
            return
        if found[1] == b"node_started" and (clock := _CLOCK.search(line)):
            self._base = int(clock[1])
        self._stamp = max(self._stamp, self._base + int(found[3]))
        if self._base:
            leads_s = milliseconds(self._base + int(found[3])) / 1e3 - float(found[2])
            self.leads_s = leads_s if self.leads_s is None else max(self.leads_s, leads_s)


class Tails:
    """A reader of the traces of all nodes that continues where it stopped (`Tail` reads one)."""

    def __init__(self, place: Path) -> None:
        """Follow a run from its beginning. `place`: the `events.jsonl` of its run directory."""
        self._run_dir = place.parent
        self._nodes = {0: _NodeTail(0, self._run_dir)}

    def lines(self) -> Iterator[bytes]:
        """Yield every line that was completed since the last call, with `t` as on node 0.

        Raise `event_files.TraceError` if the trace of node 0 cannot be read.
        """
        for number, folder in merging.folders(self._run_dir).items():
            if number not in self._nodes:
                self._nodes[number] = _NodeTail(number, folder)
        first = self._nodes[0]
        for _, node, line in heapq.merge(*(each.lines() for each in self._nodes.values()), key=lambda one: one[0]):
            if node is not first and node.leads_s is not None and first.leads_s is not None:
                line = _shifted(line, node.leads_s - first.leads_s)
            if node is first or trace.name_in(line) not in _OF_THE_RUN:
                yield line


def _shifted(line: bytes, seconds: float) -> bytes:
    found = _BEGINNING.match(line)
    if found is None:
        return line
    return line[: found.start(2)] + b"%.6f" % (float(found[2]) + seconds) + line[found.end(2) :]
