"""The recorder's side of the events: from the rings of all processes to lines of the trace.

`Events` is used by the recorder's own thread and waits for no disk: a thread of its own writes
(`event_store.Keeper`). Nothing here decides what an event means.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Container

import msgspec

from megatron_recover import trace
from megatron_recover.cluster.event_store import Batch, Bookmark, EventStore, Keeper
from megatron_recover.cluster.recorder_messages import Settings
from megatron_recover.trace.ring import Dropped, Item, Merge, RingReader

_BATCH_BYTES = 2**20
"""Bytes that are written at once. The rings get room when a batch is written."""
_AHEAD_BYTES = 16 * 2**20
"""About how many bytes of events are read from the rings ahead of the disk, at most. The console
shows these events while the disk stalls. They stay in the rings until they are written."""


class Events:
    """The events of a run: read from the rings in one order, and written once each."""

    def __init__(
        self, bookmark: Bookmark, store: EventStore, settings: Settings, *,
        wanted: Container[str], take: Callable[[trace.AnyEvent], None],
    ) -> None:  # fmt: skip
        """Start the thread that writes to `store`, behind what `bookmark` has.

        `take(event)` is called with each event whose name is in `wanted`, when it is read.
        """
        self._bookmark, self._settings, self._wanted, self._take = bookmark, settings, wanted, take
        self._decode = msgspec.json.Decoder(trace.AnyEvent).decode
        self._merge = Merge(after=bookmark.last, stuck_s=settings.deadlines.stuck_s)
        self._places: dict[int, tuple[int, int]] = {}
        """Ring -> replica and rank of its process."""
        self._lines: deque[tuple[bytes, Item]] = deque()
        """Events that are read and not given to the keeper."""
        self._ahead = 0
        """Bytes of the events that are read and not written."""
        self.num_lost = 0
        """Events that processes have recorded and a full ring had no room for."""
        self.keeper = Keeper(store)

    @property
    def num_rings(self) -> int:
        """Return the number of rings that were ever added."""
        return len(self._places)

    @property
    def is_ahead(self) -> bool:
        """Return whether events are read that the keeper was not given yet."""
        return bool(self._lines)

    @property
    def num_unwritten(self) -> int:
        """Return the number of events that are read and not written."""
        return self.keeper.num_events + len(self._lines)

    @property
    def has_more(self) -> bool:
        """Return whether any event is left that is not written."""
        return bool(self._lines) or self.keeper.busy_since is not None or self._merge.has_more

    def add(self, number: int, descriptor: int, *, replica: int, rank: int) -> None:
        """Read one more ring from now on. The caller closes the descriptor."""
        position, dropped = self._bookmark.position(number)
        self._merge.add(number, RingReader(descriptor, position=position, told=dropped))
        self._places[number] = replica, rank

    def ended(self, number: int) -> None:
        """Note that the process of a ring has ended and records no more."""
        self._merge.ended(number)

    def all_ended(self) -> None:
        """Note that no process records any more."""
        for number in self._merge.sources:
            self._merge.ended(number)

    def read(self, now: int) -> None:
        """Read events up to `now`, a time of the monotonic clock in ns, unless too many wait."""
        if self._ahead >= _AHEAD_BYTES:
            return
        for item in self._merge.drain(now, _AHEAD_BYTES - self._ahead):
            line = self._line(item)
            self._lines.append((line, item))
            self._ahead += len(line)

    def write(self, wait_s: float) -> list[int]:
        """Write batches one after the other, until one takes longer than `wait_s` seconds.

        The keeper's thread writes. When it is idle, return the rings that are exhausted: they are
        removed.
        """
        self._note_written(0.0)
        while self.keeper.busy_since is None and self._lines:
            self.keeper.give(self._next_batch())
            self._note_written(wait_s)
        exhausted = self._merge.exhausted() if self.keeper.busy_since is None else []
        for number in exhausted:
            self._merge.remove(number)
        return exhausted

    def _line(self, item: Item) -> bytes:
        """Return the line of an event, and call `take` with the event if it is wanted.

        Lost events become a line with a `Gap`.
        """
        seconds = item.stamp / 1e9 - self._settings.started_at
        if isinstance(item.what, Dropped):
            self.num_lost += item.what.num_events
            replica, rank = self._places[item.source]
            since = round(item.what.since / 1e9 - self._settings.started_at, 6)
            gap = trace.Gap(t=round(seconds, 6), replica=replica, rank=rank, num_events=item.what.num_events, since=since)
            return msgspec.json.encode(gap) + b"\n"
        # The process that records leaves the time at 0.0 in `{"event":"voted","v":2,"t":0.0,...`;
        # the stamp has the time.
        time_of_it = b'"t":%.6f' % seconds
        if self._settings.clock is not None:
            time_of_it += b',"h":%d' % (item.hybrid - self._settings.clock)
        line = item.what.replace(b'"t":0.0', time_of_it, 1) + b"\n"
        if trace.name_in(line) in self._wanted:
            with contextlib.suppress(msgspec.DecodeError):  # the line is only not shown; `check` will name it
                self._take(self._decode(line))
        return line

    def _note_written(self, wait_s: float) -> None:
        """Free the room of a batch that the keeper's thread finishes within `wait_s` seconds.

        The room is that in the rings and that below `_AHEAD_BYTES`.
        """
        if self.keeper.busy_since is None or (batch := self.keeper.done(wait_s)) is None:
            return
        for number, (position, told) in batch.positions.items():
            self._merge.sources[number].release(position, told)
        self._ahead -= len(batch.lines)

    def _next_batch(self) -> Batch:
        lines: list[bytes] = []
        positions: dict[int, tuple[int, int]] = {}
        room, last = _BATCH_BYTES, 0
        while self._lines and room > 0:
            line, item = self._lines.popleft()
            lines.append(line)
            positions[item.source] = item.position, item.told
            room, last = room - len(line), item.stamp
        return Batch(b"".join(lines), len(lines), positions, last)
