"""The files of a run's events, each event exactly once, whichever process dies meanwhile.

`Bookmark` is shared memory that outlives the recorder. It records what is in the files and up to
where each ring was read. `EventStore` writes batches, puts a large file aside, and has it
compressed in a thread of its own. `Keeper` is the thread that a stalled disk may block. Nothing
here interprets events. Nothing is synced to the disk: a power failure may lose the newest events.

Note [Exactly once]. An event leaves its ring when the bookmark records that it is in the file, and
not before. A recorder that dies leaves at most one batch that is in the file, wholly or in part,
and not in the bookmark. The next recorder cuts the file to the size in the bookmark and reads the
rings from the positions in the bookmark. So the rings are the only buffer: a second one in the
recorder's memory would be lost with the recorder.
"""

from __future__ import annotations

import array
import contextlib
import gzip
import mmap
import os
import queue
import shutil
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from megatron_recover.host import memory_file
from megatron_recover.trace import event_files
from megatron_recover.trace.event_files import EVENTS_FILE

MAX_RINGS = 2**16
"""Maximum of rings of one run on one node, one for each process that ever records."""
PART_BYTES = 256 * 2**20
"""Default size in bytes at which a file is put aside."""
_RETRY_S = 1.0
_HEAD = struct.Struct("=qqqq")
"""Head of a slot: parts put aside, bytes of the newest file, largest stamp in all files, number of
rings."""
_SLOT_BYTES = _HEAD.size + 16 * MAX_RINGS
_COMPRESSION_LEVEL = 6
_CHUNK_BYTES = 2**20
_LOWEST_PRIORITY = 19


class Batch(msgspec.Struct, frozen=True):
    """Whole lines for the file, and the bookmark's entries once these lines are there."""

    lines: bytes
    num_events: int
    positions: Mapping[int, tuple[int, int]]
    """Ring -> (position, dropped events that were reported)."""
    last: int
    """Largest stamp of the events."""


class Bookmark:
    """The record of what is in the files.

    It has two slots. One word selects the valid slot, so the bookmark changes at one instant.
    Each object copies the valid slot when it is made, and reads that copy from then on. So it sees
    only its own commits. One process at a time uses a bookmark.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind `descriptor`, which `create_bookmark` made."""
        self._memory = mmap.mmap(descriptor, 0)
        self._valid = memoryview(self._memory)[:8].cast("q")
        begin = self._begin(self._valid[0])
        self.parts, self.num_bytes, self.last, count = _HEAD.unpack_from(self._memory, begin)
        self._positions = array.array("q", self._memory[begin + _HEAD.size : begin + _HEAD.size + 16 * count])

    def position(self, ring: int) -> tuple[int, int]:
        """Return the position of one ring, and its number of dropped events that were reported."""
        if 2 * ring >= len(self._positions):
            return 0, 0
        return self._positions[2 * ring], self._positions[2 * ring + 1]

    def commit(self, parts: int, num_bytes: int, last: int, positions: Mapping[int, tuple[int, int]]) -> None:
        """Replace the bookmark's entries at one instant, except the positions of other rings."""
        self.parts, self.num_bytes, self.last = parts, num_bytes, last
        for ring, (position, told) in positions.items():
            self._positions.extend([0] * (2 * ring + 2 - len(self._positions)))
            self._positions[2 * ring], self._positions[2 * ring + 1] = position, told
        slot = 1 - self._valid[0]
        begin = self._begin(slot)
        _HEAD.pack_into(self._memory, begin, parts, num_bytes, last, len(self._positions) // 2)
        begin += _HEAD.size
        self._memory[begin : begin + 8 * len(self._positions)] = self._positions.tobytes()
        self._valid[0] = slot

    @staticmethod
    def _begin(slot: int) -> int:
        return mmap.PAGESIZE + slot * _SLOT_BYTES


def create_bookmark() -> int:
    """Create an empty bookmark, and return its descriptor. Unused memory is not allocated."""
    return memory_file.create_sized("megatron-recover-bookmark", mmap.PAGESIZE + 2 * _SLOT_BYTES, is_sparse=True)


class EventStore:
    """The files of one trace. One thread at a time uses it."""

    def __init__(
        self,
        folder: Path,
        bookmark: Bookmark,
        *,
        part_bytes: int = PART_BYTES,
        close_s: float,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        """Store the events in `folder`; the files are opened at the first batch.

        `part_bytes`: size at which a file is put aside; 0: never. `close_s`: seconds that `close`
        waits for a part that is being compressed. `write`: replaces `os.write` in tests.
        """
        self._close_s = close_s
        self._folder, self._bookmark, self._part_bytes, self._write = folder, bookmark, part_bytes, write
        self._file: int | None = None
        self._is_regular = True
        self._compression: threading.Thread | None = None
        self._over = threading.Event()

    def keep(self, batch: Batch) -> None:
        """Append a batch and enter it in the bookmark.

        Then put the file aside if it has reached `part_bytes`. Raises OSError; the batch is then
        cut off a regular file again, now or in the next call.
        """
        if self._file is None:
            self._file = self._open()
        rest = memoryview(batch.lines)
        try:
            while rest:
                rest = rest[self._write(self._file, rest) :]
        except OSError:
            self._give_up()
            raise
        bookmark = self._bookmark
        bookmark.commit(bookmark.parts, bookmark.num_bytes + len(batch.lines), batch.last, batch.positions)
        if self._part_bytes and self._is_regular and bookmark.num_bytes >= self._part_bytes:
            with contextlib.suppress(OSError):  # the disk is full: the file grows, and the next batch tries again
                self._put_aside()

    def close(self) -> None:
        """Close the file. A part whose compression is not finished stays uncompressed."""
        self._over.set()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._compression is not None:
            self._compression.join(self._close_s)

    def _open(self) -> int:
        """Open the newest file, cut to its size in the bookmark."""
        newest, bookmark = self._folder / EVENTS_FILE, self._bookmark
        parts = max(event_files.numbers(self._folder), default=0)
        if parts > bookmark.parts:  # put aside by a recorder that died before the commit
            if newest.exists() and newest.samefile(event_files.part(self._folder, parts)):
                os.replace(self._create_empty(), newest)
            bookmark.commit(parts, 0, bookmark.last, {})
        file = os.open(newest, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(file)
            self._is_regular = stat.S_ISREG(found.st_mode)
            if self._is_regular and found.st_size > bookmark.num_bytes:
                os.ftruncate(file, bookmark.num_bytes)
            elif self._is_regular and found.st_size < bookmark.num_bytes:  # somebody has cut or replaced it: append there
                bookmark.commit(bookmark.parts, found.st_size, bookmark.last, {})
        except OSError:
            os.close(file)
            raise
        return file

    def _give_up(self) -> None:
        """Cut off the written part of a batch, and close the file.

        The next batch opens it anew: in an open file ESTALE would stay.
        """
        assert self._file is not None
        with contextlib.suppress(OSError):
            if self._is_regular:
                os.ftruncate(self._file, self._bookmark.num_bytes)
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = None

    def _put_aside(self) -> None:
        """Give the file its number, begin a new file, and have parts compressed. Raises OSError.

        On file systems with links, `events.jsonl` exists at every instant.
        """
        newest, bookmark = self._folder / EVENTS_FILE, self._bookmark
        aside, empty = event_files.part(self._folder, bookmark.parts + 1), self._create_empty()  # first, as it needs room
        try:
            os.link(newest, aside)
        except OSError:  # a file system without links
            os.rename(newest, aside)
        os.replace(empty, newest)
        assert self._file is not None
        os.close(self._file)
        self._file = None
        bookmark.commit(bookmark.parts + 1, 0, bookmark.last, {})
        if self._compression is None or not self._compression.is_alive():
            self._compression = threading.Thread(target=self._compress, name="compression", daemon=True)
            self._compression.start()

    def _create_empty(self) -> Path:
        empty = self._folder / (EVENTS_FILE + ".new")
        os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        return empty

    # --- The thread that compresses ---------------------------------------------------------------

    def _compress(self) -> None:
        # The priority of this thread alone (setpriority(2), notes): it should use only idle time.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        for number in event_files.numbers(self._folder):
            plain = event_files.part(self._folder, number)
            begun = plain.with_name(plain.name + ".gz.new")
            if plain.exists():
                try:
                    if self._compress_one(plain, begun):
                        os.replace(begun, event_files.compressed(plain))
                        plain.unlink()
                except OSError:  # no room; the next compression tries again
                    begun.unlink(missing_ok=True)

    def _compress_one(self, plain: Path, begun: Path) -> bool:
        """Compress one part into `begun`. Return False if the run was over before the end.

        Raises OSError.
        """
        with (
            open(plain, "rb") as source,
            open(begun, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as raw,
            gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=_COMPRESSION_LEVEL) as target,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                if self._over.is_set():
                    begun.unlink()
                    return False
                target.write(chunk)
        shutil.copystat(plain, begun)
        return True


class Keeper:
    """The thread that writes, one batch at a time. It repeats each until the disk accepts it.

    `close` ends this.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._todo: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._over = threading.Event()
        self.busy_since: float | None = None
        """`time.monotonic()` at which the current batch was given; None: there is no batch."""
        self.error: OSError | None = None
        """Error of the last attempt to write the current batch; None if there was none."""
        self.num_events = 0
        """Number of events in the current batch."""
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def give(self, batch: Batch) -> None:
        """Have a batch written. The batch before must be done."""
        self.busy_since, self.num_events = time.monotonic(), batch.num_events
        self._todo.put(batch)

    def done(self, wait_s: float = 0.0) -> Batch | None:
        """Return the batch that was written since the last call, or is within `wait_s` seconds.

        None if there is none.
        """
        try:
            batch = self._done.get(timeout=wait_s) if wait_s else self._done.get_nowait()
        except queue.Empty:
            return None
        self.busy_since, self.num_events = None, 0
        return batch

    def close(self, deadline_s: float) -> bool:
        """Give up what is not written.

        Returns whether the thread has ended; a disk that stalls keeps it from that.
        """
        self._over.set()
        self._todo.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (batch := self._todo.get()) is not None:
            while not self._over.is_set():
                try:
                    self._store.keep(batch)
                except OSError as error:
                    self.error = error
                    self._over.wait(_RETRY_S)
                else:
                    self.error = None
                    self._done.put(batch)
                    break
        with contextlib.suppress(OSError):
            self._store.close()
