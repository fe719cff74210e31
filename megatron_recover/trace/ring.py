"""A ring of events in shared memory: one process records, another drains, and neither waits.

`RingLog` is the writer's side, `RingReader` the reader's. `Merge` puts the events of many rings
into one order. The memory is a memfd, which the process that starts the writer keeps open as well.
So recorded events outlive their process, SIGKILL included. This module never writes a file and
never decides what a lost event means.

Note [Order]. To record an event, a writer first makes its sequence number odd and reads
CLOCK_MONOTONIC, one clock for all processes of a host. Then the writer publishes the event with
that stamp, and makes the number even. The reader reads the time N, and after it the number of every
writer. If a number is even, all events that this writer records later have stamps above N. If a
number is odd, one event with a stamp below N may still come. The stamp of that event is above the N
of the last look that did not find this number. The smallest of these bounds is the *watermark*. No
further event can have a stamp below the watermark, so the events below it are merged by stamp and
returned. The exception is an event whose writer is stopped for too long (`Merge.drain`). An event
that is recorded before another one is begun has the smaller stamp. So the merged order is one in
which the run can have happened.

Note [Stamps]. An event also has a stamp of the node's clock (`node_clock.py`), by which the traces
of several nodes are merged. The clock ticks before the time is read. So if an event has the larger
time, the clock of its node was past the other event's stamp before any frame that the event's
process sends later.

Note [Visibility]. A writer uses no memory barrier, since Python has none that is not a system call.
The reader waits instead. It reads the sequence numbers `_SETTLE_S` after N, the positions
`_SETTLE_S` after that, and the events `_SETTLE_S` after that. A store leaves a core's store buffer
within microseconds. So each look sees the stores before the instant that the look relies on, also
on processors that reorder stores (Arm). A process that is killed has stored, in program order, an
event before the position that publishes the event. So a torn event is never published.
"""

from __future__ import annotations

import heapq
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from megatron_recover import trace
from megatron_recover.config import RankContext, inherited_descriptor
from megatron_recover.deadlines import STUCK_S
from megatron_recover.host import memory_file
from megatron_recover.trace.node_clock import NodeClock

RING_BYTES = 4 * 2**20
"""Bytes for the events of one process: some 20,000 of the most common ones. They are allocated at
once; most runs fill them."""
DESCRIPTOR = "events"
"""Name under which a rank inherits its ring."""

_HEADER_BYTES = mmap.PAGESIZE
_MAGIC = 0x6D72_7269_6E67_0002
"""Magic number; its last digits are the version of the layout."""
# Indices of 8-byte words in the header. The writer's words and the reader's words are in different
# cache lines.
_KIND, _CAPACITY, _LEVEL = 0, 1, 2
_SEQUENCE, _WRITTEN, _DROPPED, _DROPPED_FIRST, _DROPPED_LAST = 8, 9, 10, 11, 12
_READ, _TOLD = 16, 17
_RECORD = struct.Struct("<qqq")
"""Header of an event: its stamp, the node's clock, and its length in bytes. The length `_SKIP`
means that the rest of the ring is unused."""
_SKIP = -1
_SETTLE_S = 0.0005


def _aligned(length: int) -> int:
    """Return the room for `length` bytes: positions are multiples of 8."""
    return length + 7 & ~7


def create(*, level: trace.Level = "microbatches", capacity: int = RING_BYTES) -> int:
    """Create a ring of `capacity` bytes and return its descriptor, which is not inheritable.

    `capacity` is a multiple of 8, at least 4096. The writer leaves out the events that `level` does
    not include. Raises ValueError for another capacity, and OSError if no memory can be had.
    """
    if capacity < 4096 or capacity % 8:
        raise ValueError(f"a ring of {capacity} bytes is not possible; give a multiple of 8 from 4096 on")
    try:
        descriptor = memory_file.create_sized("megatron-recover-events", _HEADER_BYTES + capacity)
    except OSError as error:
        why = f"no shared memory of {capacity} bytes can be made for events ({error.strerror}); see `ulimit -f` and `free`"
        raise OSError(error.errno, why) from error
    with mmap.mmap(descriptor, _HEADER_BYTES) as header:
        struct.pack_into("=QQQ", header, 0, _MAGIC, capacity, trace.LEVELS.index(level))
    return descriptor


class _Ring:
    """The mapped memory of a ring."""

    def __init__(self, descriptor: int) -> None:
        """Map the ring of `descriptor`, which the caller may then close.

        Raises ValueError if the descriptor is no ring of this version.
        """
        self._memory = mmap.mmap(descriptor, 0)
        self._words = memoryview(self._memory)[:_HEADER_BYTES].cast("q")
        self.capacity = self._words[_CAPACITY]
        if self._words[_KIND] != _MAGIC or self.capacity != len(self._memory) - _HEADER_BYTES:
            self.close()
            raise ValueError("the descriptor is no ring of events of this version")

    def close(self) -> None:
        """Unmap the ring."""
        self._words.release()
        self._memory.close()


class RingLog(_Ring):
    """The writer's side of a ring, one for each process. Any thread may record.

    Recording never waits for the reader, never raises, and makes no system call except for the
    clock, and for a lock while another thread of the process records. An event for which there is
    no room is dropped and counted.
    """

    def __init__(self, descriptor: int, node_clock: NodeClock, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Map the ring of `descriptor`, which must have no other living writer.

        `clock` returns nanoseconds of CLOCK_MONOTONIC.
        """
        super().__init__(descriptor)
        self._clock, self._node_clock = clock, node_clock
        self._left_out = trace.LEFT_OUT[trace.LEVELS[self._words[_LEVEL]]]
        self._encode = msgspec.json.Encoder().encode
        self._lock = threading.Lock()
        self._sequence = self._words[_SEQUENCE] + 1 & ~1
        self._written = self._words[_WRITTEN]

    def record(self, event: trace.Event) -> None:
        """Stamp the event with the time and publish it, or count it as dropped.

        Events that the level of the ring leaves out are ignored.
        """
        if type(event) in self._left_out:
            return
        try:
            line = self._encode(event)
        except Exception:
            # For example a text that is no Unicode. It must not end a rank, so the event counts as
            # dropped.
            line = None
        words = self._words
        with self._lock:
            words[_SEQUENCE] = self._sequence + 1
            try:
                hybrid = self._node_clock.tick()  # first: Note [Stamps]
                self._publish(self._clock(), hybrid, line)
            finally:
                self._sequence += 2
                words[_SEQUENCE] = self._sequence

    def _publish(self, stamp: int, hybrid: int, line: bytes | None) -> None:
        words, capacity, written = self._words, self.capacity, self._written
        length = len(line) if line is not None else capacity
        size = _RECORD.size + _aligned(length)
        start = written % capacity
        unused = capacity - start if start + size > capacity else 0
        if line is None or unused + size > capacity - (written - words[_READ]):
            if words[_DROPPED] == words[_TOLD]:
                words[_DROPPED_FIRST] = stamp
            words[_DROPPED_LAST] = stamp
            words[_DROPPED] += 1
            return
        if unused:
            # Positions are multiples of 8. If the rest has no room for a header either, it gets no
            # mark.
            if unused >= _RECORD.size:
                _RECORD.pack_into(self._memory, _HEADER_BYTES + start, stamp, hybrid, _SKIP)
            start = 0
        begin = _HEADER_BYTES + start
        _RECORD.pack_into(self._memory, begin, stamp, hybrid, length)
        begin += _RECORD.size
        self._memory[begin : begin + length] = line
        self._written = written + unused + size
        words[_WRITTEN] = self._written


class _Nothing:
    """A log that keeps nothing."""

    def record(self, event: trace.Event) -> None:
        """Ignore the event."""


def log_of_rank(context: RankContext, node_clock: NodeClock) -> trace.Log:
    """Return the log of this rank: the inherited ring, or the trace file if there is no recorder.

    Called once in a process, since it closes the inherited descriptor. A dry run is no part of the
    run, so its log keeps nothing.
    """
    if context.dry_run:
        return _Nothing()
    descriptor = inherited_descriptor(DESCRIPTOR)
    if descriptor is not None:
        log = RingLog(descriptor, node_clock)
        os.close(descriptor)  # the mapping keeps the memory
        return log
    return trace.EventLog(os.path.join(context.run_dir, trace.EVENTS_FILE), context.started_at)


class Dropped(msgspec.Struct, frozen=True):
    """Lost events of one ring."""

    num_events: int
    """Number of lost events; all events of a damaged part of the ring count as one."""
    since: int
    """No lost event has a smaller stamp. The first one may have a larger stamp if another report of
    lost events was not yet stored when it was lost."""


class Item(msgspec.Struct, frozen=True):
    """One event in the merged order, or a count of events that are missing there."""

    stamp: int
    source: int
    """Number of the ring, as given to `Merge.add`."""
    what: bytes | Dropped
    position: int
    """Position of the ring up to which this item allows `RingReader.release`, once the item is
    stored."""
    told: int
    """Number of dropped events of the ring that were reported, this item included."""
    hybrid: int = 0
    """Stamp of the node's clock; 0 for a count of missing events."""


class RingReader(_Ring):
    """The reader's side of a ring; one reader at a time. It frees no room before `release`."""

    def __init__(self, descriptor: int, *, position: int = 0, told: int = 0) -> None:
        """Read from `position` on, where `told` dropped events were reported before.

        Both are from the newest `Item` that was stored.
        """
        super().__init__(descriptor)
        self._position, self._told = position, told
        self._end, self._last = position, 0
        self.release(position, told)

    @property
    def sequence(self) -> int:
        """Return the writer's sequence number, which is odd while the writer records an event.

        The number never returns to a former value.
        """
        return self._words[_SEQUENCE]

    @property
    def is_exhausted(self) -> bool:
        """Return whether all published events were read and all dropped events were reported."""
        return self._words[_WRITTEN] == self._position and self._words[_DROPPED] == self._told

    def look(self) -> None:
        """Read the writer's position, up to which `until` reads (Note [Visibility])."""
        # A writer is never further ahead. A larger value is damage, and must not keep the reader
        # busy for ever.
        self._end = min(self._words[_WRITTEN], self._position + self.capacity)

    def release(self, position: int, told: int) -> None:
        """Free the room before `position` for the writer."""
        self._words[_TOLD] = told
        self._words[_READ] = position

    def until(self, stamp: int, source: int) -> Iterator[Item]:
        """Yield the events that the writer recorded or dropped with a smaller stamp, in order."""
        words = self._words
        total, first, last = words[_DROPPED], words[_DROPPED_FIRST], words[_DROPPED_LAST]
        # While events are being dropped, their report waits: its place is that of the last of them.
        lost = Dropped(total - self._told, first) if total != self._told and last < stamp else None
        while (record := self._next()) is not None:
            at, hybrid, begin, length, position = record
            if lost is not None and (at > last or at >= stamp):
                self._told = total
                yield Item(last, source, lost, self._position, total)
                lost = None
            if at >= stamp:
                return
            line = self._memory[begin : begin + length] if length else Dropped(1, at)
            self._position, self._last = position, at
            yield Item(at, source, line, position, self._told, hybrid if length else 0)
        if lost is not None:
            self._told = total
            yield Item(last, source, lost, self._position, total)

    def _next(self) -> tuple[int, int, int, int, int] | None:
        """Return stamp, clock, offset, length and next position of the next record.

        None if there is none.

        A malformed record has length 0, and stands for all that was published after it.
        """
        while self._position < self._end:
            start = self._position % self.capacity
            unused = self.capacity - start
            header = _RECORD.unpack_from(self._memory, _HEADER_BYTES + start) if unused >= _RECORD.size else (0, 0, _SKIP)
            stamp, hybrid, length = header
            if length == _SKIP:
                self._position += unused
                continue
            size = _RECORD.size + _aligned(length)
            if length <= 0 or size > min(unused, self._end - self._position) or stamp < self._last:
                return self._last, 0, 0, 0, self._end
            return stamp, hybrid, _HEADER_BYTES + start + _RECORD.size, length, self._position + size
        return None


class _Look(msgspec.Struct, frozen=True):
    """The last look at the sequence number of a ring."""

    sequence: int
    bound: int
    """Lower bound of the stamp of the event that is recorded under this sequence number."""
    since: int
    """Time of the first look that found this number."""


class Merge:
    """Merges the events of several rings into one order of cause before effect (Note [Order]).

    Used by one thread.
    """

    def __init__(
        self,
        *,
        settle: Callable[[], None] = lambda: time.sleep(_SETTLE_S),
        after: int = 0,
        stuck_s: float = STUCK_S,
    ) -> None:
        """Make a merge without rings.

        - `settle` waits for `_SETTLE_S` (Note [Visibility]).
        - `after` is the largest stamp of the events of these rings that a former reader has stored.
        - `stuck_s` is the seconds for which later events wait, at most, for one that a process has
          begun to record.
        """
        self._settle, self._stuck_s = settle, stuck_s
        self._readers: dict[int, RingReader] = {}
        self._ended: set[int] = set()
        self._looks: dict[int, _Look] = {}
        self._looked_at = after
        self._watermark = self._former = after
        self._rest: Iterator[Item] | None = None

    def add(self, source: int, reader: RingReader) -> None:
        """Merge one more ring. Its writer may have begun already."""
        self._readers[source] = reader

    def ended(self, source: int) -> None:
        """Note that the writer of a ring has ended: an event that it had begun will not come."""
        self._ended.add(source)

    def exhausted(self) -> list[int]:
        """Return the rings whose writers have ended and whose events were all returned.

        Return none after a `drain` that its limit cut off.
        """
        if self._rest is not None:
            return []
        return [source for source in self._ended if source in self._readers and self._readers[source].is_exhausted]

    def remove(self, source: int) -> None:
        """Remove a ring, and unmap it."""
        self._ended.discard(source)
        self._looks.pop(source, None)
        self._readers.pop(source).close()

    @property
    def has_more(self) -> bool:
        """Return whether something was recorded that was not returned."""
        return self._rest is not None or any(not reader.is_exhausted for reader in self._readers.values())

    @property
    def sources(self) -> Mapping[int, RingReader]:
        """Return the rings that are merged."""
        return self._readers

    def drain(self, now: int, limit_bytes: int = 2**62) -> list[Item]:
        """Return in order the events since the last call that no further event can precede.

        - `now` is a time in nanoseconds of CLOCK_MONOTONIC. Every ring that had a writer by then is
          added.
        - `limit_bytes` limits the events of one call; the next calls return only the others, until
          there are none.

        A process may be stopped while it records an event. If later events were returned meanwhile,
        that event is left out and reported as lost.
        """
        if self._rest is None:
            self._former = self._watermark
            self._raise_watermark(now)
            for reader in self._readers.values():
                reader.look()
            self._settle()
            each = [reader.until(self._watermark, source) for source, reader in self._readers.items()]
            self._rest = heapq.merge(*each, key=lambda item: item.stamp)
        items: list[Item] = []
        for item in self._rest:
            if item.stamp < self._former:
                what = item.what if isinstance(item.what, Dropped) else Dropped(1, item.stamp)
                item = Item(self._former, item.source, what, item.position, item.told)
            items.append(item)
            limit_bytes -= _RECORD.size if isinstance(item.what, Dropped) else len(item.what)
            if limit_bytes <= 0:
                return items
        self._rest = None
        return items

    def _raise_watermark(self, now: int) -> None:
        self._settle()
        bounds = [now]
        for source, reader in self._readers.items():
            sequence, look = reader.sequence, self._looks.get(source)
            if look is None or look.sequence != sequence:
                bound = self._looked_at if look is not None else self._watermark
                look = self._looks[source] = _Look(sequence, bound, now)
            if sequence % 2 and source not in self._ended and now - look.since <= self._stuck_s * 1e9:
                bounds.append(look.bound)
        self._looked_at = now
        self._settle()
        self._watermark = max(self._watermark, min(bounds))
