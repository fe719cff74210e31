"""A ring of events in shared memory: one process records, another one drains, and neither ever waits for the other.

`RingLog` is the writer's side, `RingReader` the reader's, `Merge` puts the events of many rings into one order. The memory is a
memfd that whoever starts the writer keeps open as well: what a process has recorded outlives it, SIGKILL included.
This module never writes a file and never decides what a lost event means.

Note [Order]. A writer makes its sequence number odd, reads CLOCK_MONOTONIC (one clock for all processes of a host), publishes
the event under that stamp, and makes the number even. The reader notes the time N, then looks at every number. An even number
says that whatever the ring records later has a stamp above N. An odd number says that one event may still come with a stamp
below N; its stamp is above the N of the last look that did not find this number. The smallest of these bounds is the
*watermark*: nothing can come below it any more, so events below it are merged by stamp and given out. An event that is recorded
before another one is begun has the smaller stamp, so the merged order is one in which the run can have happened.

Note [Visibility]. A writer uses no memory barrier, since Python has none that is not a system call. The reader makes up for
that: it looks at the sequence numbers `_SETTLE_S` after N, at the positions `_SETTLE_S` after that, and at the events
`_SETTLE_S` after that. A store leaves a core's store buffer within microseconds, so each look sees what was stored before the
instant that it relies on, on processors that reorder stores (Arm) too. A process that is killed has stored, in program order,
an event before the position that publishes it: a torn event is never published.
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

RING_BYTES = 4 * 2**20
"""Room for the events of one process: some 20,000 of the most common ones. It is allocated at once; most runs fill it."""
DESCRIPTOR = "events"
"""The name under which a rank inherits its ring."""

_HEADER_BYTES = mmap.PAGESIZE
_MAGIC = 0x6D72_7269_6E67_0001
"""The last digits are the version of the layout."""
# Words of 8 bytes in the header. Those of the writer and of the reader are in cache lines of their own.
_KIND, _CAPACITY, _LEVEL = 0, 1, 2
_SEQUENCE, _WRITTEN, _DROPPED, _DROPPED_FIRST, _DROPPED_LAST = 8, 9, 10, 11, 12
_READ, _TOLD = 16, 17
_RECORD = struct.Struct("<qq")
"""Before each event: its stamp and its length in bytes. The length `_SKIP` says that the rest of the ring is unused."""
_SKIP = -1
_SETTLE_S = 0.0005


def _aligned(length: int) -> int:
    """Return the room that so many bytes take: positions are multiples of 8."""
    return length + 7 & ~7


def create(*, level: trace.Level = "microbatches", capacity: int = RING_BYTES) -> int:
    """Create a ring of `capacity` bytes (a multiple of 8, at least 4096). Return its descriptor, which is not inheritable.

    The writer leaves out what `level` does not ask for.
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
    """The memory of a ring, mapped."""

    def __init__(self, descriptor: int) -> None:
        """Map the ring behind `descriptor`, which the caller may close after that. Raises ValueError when it is none."""
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
    """The writer's side: one for each process. Any thread may record.

    Recording never waits, never raises and makes no system call but for the clock. An event for which there is no room is
    dropped and counted.
    """

    def __init__(self, descriptor: int, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock`: nanoseconds of CLOCK_MONOTONIC. The ring must have no other writer that lives."""
        super().__init__(descriptor)
        self._clock = clock
        self._left_out = trace.LEFT_OUT[trace.LEVELS[self._words[_LEVEL]]]
        self._encode = msgspec.json.Encoder().encode
        self._lock = threading.Lock()
        self._sequence = self._words[_SEQUENCE] + 1 & ~1
        self._written = self._words[_WRITTEN]

    def record(self, event: trace.Event) -> None:
        """Stamp the event with the time and publish it, or count it as dropped."""
        if type(event) in self._left_out:
            return
        try:
            line = self._encode(event)
        except Exception:
            # A text that is no Unicode, for example. It must not end a rank; it is told as an event that was lost.
            line = None
        words = self._words
        with self._lock:
            words[_SEQUENCE] = self._sequence + 1
            try:
                self._publish(self._clock(), line)
            finally:
                self._sequence += 2
                words[_SEQUENCE] = self._sequence

    def _publish(self, stamp: int, line: bytes | None) -> None:
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
            # Positions are multiples of 8: where the header of a record does not fit either, 8 bytes are left, and no mark.
            if unused >= _RECORD.size:
                _RECORD.pack_into(self._memory, _HEADER_BYTES + start, stamp, _SKIP)
            start = 0
        begin = _HEADER_BYTES + start
        _RECORD.pack_into(self._memory, begin, stamp, length)
        begin += _RECORD.size
        self._memory[begin : begin + length] = line
        self._written = written + unused + size
        words[_WRITTEN] = self._written


class _Nothing:
    """A log that keeps nothing."""

    def record(self, event: trace.Event) -> None:
        """Forget the event."""


def log_of_rank(context: RankContext) -> trace.Log:
    """Return the log of this rank: the ring that it has inherited, else the trace file itself, as without a recorder.

    Called once in a process, as it closes the inherited descriptor.
    A dry run is no part of the run and records nothing.
    """
    if context.dry_run:
        return _Nothing()
    descriptor = inherited_descriptor(DESCRIPTOR)
    if descriptor is not None:
        log = RingLog(descriptor)
        os.close(descriptor)  # the mapping has a copy of its own
        return log
    return trace.EventLog(os.path.join(context.run_dir, trace.EVENTS_FILE), context.started_at)


class Dropped(msgspec.Struct, frozen=True):
    """Events of one ring that were lost."""

    num_events: int
    since: int
    """Stamp of the first."""


class Item(msgspec.Struct, frozen=True):
    """One event in the merged order, or word of events that are missing there."""

    stamp: int
    source: int
    """The ring, as it was numbered when it was added."""
    what: bytes | Dropped
    position: int
    """Of the ring, once this item is kept for good (`RingReader.release`)."""
    told: int
    """Dropped events of the ring that were told of, this item included."""


class RingReader(_Ring):
    """The reader's side: one at a time for each ring. It frees nothing before `release`."""

    def __init__(self, descriptor: int, *, position: int = 0, told: int = 0) -> None:
        """Read on at `position`, of whose lost events `told` were told of: those of the newest `Item` that was kept."""
        super().__init__(descriptor)
        self._position, self._told = position, told
        self._end, self._last = position, 0
        self.release(position, told)

    @property
    def sequence(self) -> int:
        """Odd while the writer records an event. It never returns to a former value."""
        return self._words[_SEQUENCE]

    @property
    def is_exhausted(self) -> bool:
        """Whether everything published was read, and everything dropped was told of."""
        return self._words[_WRITTEN] == self._position and self._words[_DROPPED] == self._told

    def look(self) -> None:
        """Take note of how far the writer has got: `until` reads so far (Note [Visibility])."""
        # A writer is never further ahead. What says more was not written by one, and must not keep the reader busy for ever.
        self._end = min(self._words[_WRITTEN], self._position + self.capacity)

    def release(self, position: int, told: int) -> None:
        """Let the writer use the room of everything before `position` again."""
        self._words[_TOLD] = told
        self._words[_READ] = position

    def until(self, stamp: int, source: int) -> Iterator[Item]:
        """Yield what the writer has recorded or dropped with a smaller stamp, in order."""
        words = self._words
        total, first, last = words[_DROPPED], words[_DROPPED_FIRST], words[_DROPPED_LAST]
        # While events are being dropped, the word of them waits: it has to stand where the last of them would.
        lost = Dropped(total - self._told, first) if total != self._told and last < stamp else None
        while (record := self._next()) is not None:
            at, begin, length, position = record
            if lost is not None and (at > last or at >= stamp):
                self._told = total
                yield Item(last, source, lost, self._position, total)
                lost = None
            if at >= stamp:
                return
            line = self._memory[begin : begin + length] if length else Dropped(1, at)
            self._position, self._last = position, at
            yield Item(at, source, line, position, self._told)
        if lost is not None:
            self._told = total
            yield Item(last, source, lost, self._position, total)

    def _next(self) -> tuple[int, int, int, int] | None:
        """Return stamp, offset, length and following position of the next record; None at the end of what was published.

        What cannot be a record stands for all that was published behind it: its length is 0.
        """
        while self._position < self._end:
            start = self._position % self.capacity
            unused = self.capacity - start
            stamp, length = _RECORD.unpack_from(self._memory, _HEADER_BYTES + start) if unused >= _RECORD.size else (0, _SKIP)
            if length == _SKIP:
                self._position += unused
                continue
            size = _RECORD.size + _aligned(length)
            if length <= 0 or size > min(unused, self._end - self._position) or stamp < self._last:
                return self._last, 0, 0, self._end
            return stamp, _HEADER_BYTES + start + _RECORD.size, length, self._position + size
        return None


class _Look(msgspec.Struct, frozen=True):
    """What was seen of a ring."""

    sequence: int
    bound: int
    """The event that is recorded under this sequence number has a stamp above it."""
    since: int
    """Time of the first look that saw this number."""


class Merge:
    """Merges the events of several rings into one order of cause before effect (Note [Order]). Used by one thread."""

    def __init__(
        self,
        *,
        settle: Callable[[], None] = lambda: time.sleep(_SETTLE_S),
        after: int = 0,
        stuck_s: float = STUCK_S,
    ) -> None:
        """`after`: the largest stamp that was given out before, by whoever merged these rings until now.

        `stuck_s`: how long the events of all others wait for one that a process has begun to record.

        `settle` waits for `_SETTLE_S` (Note [Visibility]).
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
        """Note that the writer of a ring lives no more: what it has begun to record will not come."""
        self._ended.add(source)

    def exhausted(self) -> list[int]:
        """Return the rings whose writers have ended and of which everything was given out."""
        if self._rest is not None:
            return []
        return [source for source in self._ended if source in self._readers and self._readers[source].is_exhausted]

    def remove(self, source: int) -> None:
        """Forget a ring."""
        self._ended.discard(source)
        self._looks.pop(source, None)
        self._readers.pop(source).close()

    @property
    def has_more(self) -> bool:
        """Whether something was recorded that was not given out."""
        return self._rest is not None or any(not reader.is_exhausted for reader in self._readers.values())

    @property
    def sources(self) -> Mapping[int, RingReader]:
        """The rings that are merged."""
        return self._readers

    def drain(self, now: int, limit_bytes: int = 2**62) -> list[Item]:
        """Return, in order, what was recorded since the last call and can have no predecessor any more.

        `now` is a time before which every ring that had a writer was added. What goes beyond `limit_bytes` is left to the
        next call. An event whose place in the order is given out already, because its process was stopped in the middle of
        recording it, is left out and told as lost.
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
