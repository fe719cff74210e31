"""The traces of the nodes of a run as one trace, merged by the stamps of the nodes' clocks.

The trace of node 0 is in the run directory, that of node `k` in its folder `nodes/k`. `MergedTrace`
reads all of them side by side and keeps one event of each in memory. It says which of them are
absent, cut short or damaged, and yields a `Gap` for each rank whose events are missing there.

Note [Merged order]. Within a file the order of the lines holds, so the stamp of a line is at least
that of the line before. Lines of several files are ordered by their stamps, and by the numbers of
the nodes if stamps are equal. A frame carries a stamp that is larger than those of all events that
its node has recorded before, and smaller than those of all events that its receiver records later.
So an event that another one can have caused, as far as frames show it, is behind the other one. Of
two other events of different nodes the order is arbitrary.

Note [Common time]. `t` counts from the start of each node's agent, and no two hosts have the same
clock. The shift between two nodes is taken from the stamps: the largest difference of stamp and `t`
among the first events of a node is the difference between its `t` and the clock that is furthest
ahead, less about the time of one message. So durations between events of two nodes are good to
milliseconds. No verdict depends on them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from megatron_recover.core.hybrid_clock import milliseconds
from megatron_recover.trace.catalog import AnyEvent
from megatron_recover.trace.event_files import TraceError
from megatron_recover.trace.failure import Failure, Fenced, SetAside, Thawed
from megatron_recover.trace.reading import read
from megatron_recover.trace.run import ClockRefused, Gap, NodeStarted, RunFinished, RunStarted
from megatron_recover.trace.standstill import RankMoved, RankSilent, Strangers

FOLDER = "nodes"
"""Folder of a run directory with a folder for each node but the first."""
_BEGINNING = 20_000
"""Number of events of each node that are read first, for its clock (Note [Common time])."""
OF_THE_RUN = (RunStarted, RunFinished)
"""Types of events that each agent records for its node. Those of other nodes than node 0 are left
out: a run has one beginning and one end."""
MARGIN_S = 1.0
"""Seconds by which the period of a gap is extended, since times of several nodes do not fit
exactly."""
_BY_THE_AGENT = (Failure, Fenced, SetAside, Thawed, RankMoved, RankSilent, Strangers, ClockRefused, Gap)
"""Types of events that name a rank that has not written them, or may not have."""


def folder_of(run_dir: Path, node: int) -> Path:
    """Return the folder of a node's trace and logs."""
    return run_dir / FOLDER / str(node) if node else run_dir


def folders(run_dir: Path) -> dict[int, Path]:
    """Return the folders of all nodes that are there, by number; node 0 is always among them."""
    found = (path for path in (run_dir / FOLDER).glob("*") if path.name.isdecimal() and path.is_dir())
    return {0: run_dir} | {int(path.name): path for path in sorted(found, key=lambda path: int(path.name))}


class _Node:
    """The trace of one node: what its beginning and its first reading have shown."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self._folder = number, folder
        self.trouble = ""
        """The damage of the trace; empty if it is whole."""
        self.is_left_out = False
        """True if it is known that nothing of its ranks can be missing: it has had none."""
        self.base = 0
        self.leads_s = float("-inf")
        """Seconds by which the clock that is furthest ahead exceeds `t` (Note [Common time])."""
        self.num_lines: int | None = None
        """Number of the last line that was read first; None before."""
        self.places: set[tuple[int, int]] = set()
        """Ranks (replica, rank) that have written an event."""
        self.gaps: list[Gap] = []
        """Gaps for what is missing: behind the last event, or before all if nothing was read."""
        self._begin()

    def _begin(self) -> None:
        beginning: list[AnyEvent] = []
        try:
            beginning += (event for _, event in itertools.islice(read(self._folder), _BEGINNING))
        except FileNotFoundError:
            self.trouble = f"is absent: there is no trace in {self._folder}"
            return
        except TraceError as error:  # named by the first pass, unless nothing before can be used
            self.trouble = f"is damaged: {error}"
        started = next((event for event in beginning if isinstance(event, NodeStarted)), None)
        if started is None:
            self.trouble = self.trouble or f"lacks its beginning: there is no node_started in {self._folder}"
            return
        if started.node != self.number:  # somebody has copied it here; its events are there twice, or take those of this node
            self.trouble = f"is absent: the trace in {self._folder} is that of node {started.node} ({started.name})"
            return
        self.base, self.trouble = started.clock, ""
        leads_s = (milliseconds(self.base + event.h) / 1e3 - event.t for event in beginning if event.h is not msgspec.UNSET)
        self.leads_s = max(leads_s, default=0.0)

    @property
    def is_readable(self) -> bool:
        return self.leads_s > float("-inf")

    def events(self, on_cut: Callable[[int, str], None] | None) -> Iterator[tuple[int, int, AnyEvent, bool]]:
        """Yield stamp, line, event, and whether the event is a gap of this reader, not in the file.

        The first iteration reads to the present end of the file and finds what is wrong with it;
        later ones read as far as the first.
        """
        is_first = self.num_lines is None
        stamp, line, last_t = 0, 0, 0.0
        last: AnyEvent | None = None
        try:
            for line, event in read(self._folder, on_cut) if self.is_readable else ():
                if not is_first and line > (self.num_lines or 0):
                    break
                if event.h is not msgspec.UNSET:
                    stamp = max(stamp, self.base + event.h)
                if is_first:
                    last, last_t = event, event.t
                    replica = getattr(event, "replica", -1)
                    if replica >= 0 and not isinstance(event, _BY_THE_AGENT):
                        self.places.add((replica, getattr(event, "rank", 0)))
                yield stamp, line, event, False
        except TraceError as error:
            if not self.number:
                raise
            self.trouble = f"is damaged after {last_t:.1f} s: {error}"
        if is_first:
            self.num_lines = line
            if self.is_readable and not self.trouble and not isinstance(last, RunFinished):
                self.trouble = f"is cut short: it ends after {last_t:.1f} s"
            if self.is_readable and self.trouble:
                self.lacks(self.places, last_t)
        for gap in self.gaps:
            yield stamp, line, gap, True

    def lacks(self, places: Iterable[tuple[int, int]], since: float) -> None:
        """Note that the events of some ranks (replica, rank), and of the agent, end at a time."""
        self.gaps = _gaps([*sorted(places), (-1, -self.number)], since)


def _gaps(places: Iterable[tuple[int, int]], since: float) -> list[Gap]:
    """Return the gaps of ranks (replica, rank) whose events end at a time."""
    return [Gap(t=since, replica=replica, rank=rank, num_events=0, since=since) for replica, rank in places]


class MergedTrace:
    """The events of all nodes in one order, read again by each iteration (Note [Merged order]).

    Iterations after the first one (`first_pass`) end in each file where that one ended, so all
    yield the same events.
    """

    def __init__(self, folders: Mapping[int, Path]) -> None:
        """Read the beginnings of all traces. `folders` has that of each node, by its number.

        Raises FileNotFoundError or `TraceError` if the trace of node 0 cannot be read.
        """
        self._nodes = [_Node(number, folder) for number, folder in sorted(folders.items())]
        for _ in read(folders[0]):
            break
        if not self._nodes[0].is_readable:
            raise TraceError(f"the trace of node 0 {self._nodes[0].trouble}")

    @property
    def troubles(self) -> dict[int, str]:
        """Return what is wrong with the traces of some nodes. Known after `first_pass`."""
        return {node.number: node.trouble for node in self._nodes if node.trouble}

    def leave_out(self, numbers: Collection[int]) -> None:
        """Expect nothing of nodes that were lost and have had no rank. Call after `first_pass`."""
        for node in self._nodes:
            if node.number in numbers and not node.places:
                node.is_left_out, node.trouble, node.gaps = True, "", []

    def is_left_out(self, gap: Gap) -> bool:
        """Return whether a gap is one of the agent of a node that is left out."""
        return gap.replica < 0 and any(node.is_left_out and gap.rank == -node.number for node in self._nodes)

    def lay_on_unread(self, places: Iterable[tuple[int, int]]) -> list[Gap]:
        """Note which ranks (replica, rank) the run has; return the gaps of ranks without events.

        Ranks that have written nothing on any node count as ranks of all nodes whose traces are
        absent or end early: these may end before the first events of their ranks. Called after
        `first_pass`.
        """
        silent = set(places).difference(*(node.places for node in self._nodes))
        found: list[Gap] = []
        for node in self._nodes:
            if node.is_left_out:
                continue
            if not node.is_readable:
                node.lacks(silent, 0.0)
                found += node.gaps
            elif node.trouble:
                early = _gaps(sorted(silent), 0.0)
                node.gaps += early
                found += early
        return found

    def first_pass(self, on_cut: Callable[[int, str], None]) -> Iterator[tuple[int, AnyEvent]]:
        """Yield the events up to the present end of all files; call `on_cut` for each cut line."""
        return self._merged(on_cut)

    def __iter__(self) -> Iterator[tuple[int, AnyEvent]]:
        return self._merged(None)

    def _merged(self, on_cut: Callable[[int, str], None] | None) -> Iterator[tuple[int, AnyEvent]]:
        for number, _, _, event in self._placed(on_cut):
            yield number, event

    def places(self, numbers: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Return node and line of some events, by their numbers in the merged order."""
        wanted = set(numbers)
        return {number: (node, line) for number, node, line, _ in self._placed(None) if number in wanted} if wanted else {}

    def _placed(self, on_cut: Callable[[int, str], None] | None) -> Iterator[tuple[int, int, int, AnyEvent]]:
        number = 0

        def of(node: _Node) -> Iterator[tuple[int, _Node, int, AnyEvent, bool]]:
            def cut(line: int, fragment: str) -> None:
                if on_cut is not None:
                    on_cut(number + 1, fragment)

            for stamp, line, event, is_made in node.events(cut):
                yield stamp, node, line, event, is_made

        for _, node, line, event, is_made in heapq.merge(*map(of, self._nodes), key=lambda one: one[0]):
            if node.number and isinstance(event, OF_THE_RUN):
                continue
            number += not is_made
            shift = node.leads_s - self._nodes[0].leads_s
            if isinstance(event, Gap):
                since = event.since + (shift if node.is_readable else 0.0) - MARGIN_S
                rank = event.rank if event.replica >= 0 else -node.number
                event = msgspec.structs.replace(event, since=round(since, 6), rank=rank)
            if node.number and node.is_readable:
                event = msgspec.structs.replace(event, t=round(event.t + shift, 6))
            yield number, node.number, line, event
