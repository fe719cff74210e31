"""The recorder's side of the outputs: a thread that copies them to logs, and lines to show.

A stalled disk stops the thread of `LogWriter` and nothing else here. Note [Output never waits] in
`output.py` explains why a process that prints never waits. Nothing here interprets a line.

Note [Copied once]. A recorder that dies leaves at most one chunk that is in a log, wholly or in
part, and not in the bookmark. The next recorder cuts the log to the size in the bookmark and copies
the chunk again. Memory is freed when the bookmark has its position.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_recover.cluster.output import (
    CHUNK_BYTES,
    EMPTIED_NOTE,
    KEPT_BYTES,
    Copied,
    Output,
    OutputBookmark,
    Reader,
    Who,
    Why,
    lost_note,
)
from megatron_recover.cluster.streams import Tee

_INTERVAL_S = 0.2
_SOON_S = 0.003
"""Seconds between two copies at the end of a run, when somebody waits for them."""
_RETRY_S = 1.0
"""Seconds until a log that had an error is tried again."""
_DROP_S = 0.05
"""Shortest time between two looks at all outputs while lines are read. With a look for each chunk a
turn of 1,000 teed outputs would take 20 s. What ranks print in that time is in memory above the
limit."""
_CHUNKS_AT_ONCE = 16
"""Maximum of chunks of one output before the other outputs have their turn."""


class _Log:
    """The log of one output. Only the thread that writes uses it, except for `num_left`."""

    def __init__(self, number: int, output: Output, bookmark: OutputBookmark, readers: Collection[Reader] = ()) -> None:
        """Open nothing yet. `readers`: those that read this output, too."""
        self.number, self.retry_at = number, 0.0
        self._output, self._bookmark, self._readers = output, bookmark, readers
        self._file: int | None = None
        self._is_regular = True
        self._freed = 0

    @property
    def num_left(self) -> int:
        bookmark, number = self._bookmark, self.number
        done = max(bookmark.copied(number).position, bookmark.first(number))
        return max(0, bookmark.end(number, self._output) - done)

    def copy(self) -> bool:
        """Append the next chunk to the log, if there is one. Return whether to call again at once.

        Raises OSError; a regular log is then cut to its size before, now or at the next call.
        """
        bookmark, number, output = self._bookmark, self.number, self._output
        if self._file is None:
            self._file = self._open()
        copied, first = bookmark.copied(number), bookmark.first(number)
        done = max(copied.position, first)
        unneeded = self._unneeded(done)
        if bookmark.end(number, output) == done and unneeded == self._freed:
            return False
        if bookmark.is_emptied(number, output):
            return False  # the recorder's own thread is about to notice it
        self._free(unneeded)  # only now: an emptied output has new bytes there
        begin = max(done, bookmark.lost(number))
        data = bookmark.read(number, output, begin)
        if bookmark.lost(number) > begin or bookmark.first(number) != first:
            return True  # freed meanwhile, perhaps before the read
        if not data and begin == done:
            return False
        notes = EMPTIED_NOTE if copied.position < first and copied != Copied() else b""
        if begin > done:
            notes += lost_note(begin - done, bookmark.why(number))
        self._append(notes + data, copied.log_bytes)
        log_bytes = copied.log_bytes + len(notes) + len(data)
        bookmark.commit(number, Copied(begin + len(data), log_bytes, copied.num_lost + begin - done))
        return len(data) == CHUNK_BYTES

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def give_back(self) -> None:
        """Close the log, release the memory of the output, and close the output's descriptor."""
        self.close()
        with contextlib.suppress(OSError):
            self._output.seal()
        self._output.close()

    def _unneeded(self, position: int) -> int:
        """Return the position before which nobody needs an output copied up to `position`."""
        return min((position, *(self._bookmark.shown(self.number, reader) for reader in self._readers)))

    def _free(self, position: int) -> None:
        """Give back the memory before `position`, except for the newest output."""
        if position != self._freed:
            self._bookmark.free(self.number, self._output, position - KEPT_BYTES)
            self._freed = position

    def _open(self) -> int:
        """Open the log, and cut it to its size in the bookmark.

        If the log is smaller, the bookmark gets its size instead.
        """
        bookmark, number = self._bookmark, self.number
        file = os.open(self._output.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found, copied = os.fstat(file), bookmark.copied(number)
            self._is_regular = stat.S_ISREG(found.st_mode)
            if self._is_regular and found.st_size > copied.log_bytes:
                os.ftruncate(file, copied.log_bytes)
            elif self._is_regular and found.st_size < copied.log_bytes:  # somebody has cut it: append there
                bookmark.commit(number, Copied(copied.position, found.st_size, copied.num_lost))
        except OSError:
            os.close(file)
            raise
        return file

    def _append(self, data: bytes, log_bytes: int) -> None:
        assert self._file is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                if self._is_regular:
                    os.ftruncate(self._file, log_bytes)
            self.close()  # the next call opens it anew: in an open file ESTALE would stay
            raise


class LogWriter:
    """The thread that writes all logs. A stalled disk holds up this thread alone."""

    def __init__(self, bookmark: OutputBookmark) -> None:
        """Start the thread."""
        self._bookmark = bookmark
        self._logs: tuple[_Log, ...] = ()
        self._removed: deque[_Log] = deque()
        """Logs that are complete, for the thread to close."""
        self._errors: dict[int, OSError] = {}
        self._woken = threading.Event()
        self._is_hurried = self._is_over = False
        self.busy_since: float | None = None
        """`time.monotonic()` at which the current write began; None: nothing is being written."""
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def add(self, number: int, output: Output, readers: Collection[Reader]) -> None:
        """Copy one more output, which `readers` read as well, to its log from now on."""
        self._logs = (*self._logs, _Log(number, output, self._bookmark, readers))

    def remove(self, number: int) -> None:
        """Copy an output no more, of which everything is in its log; close it and its log."""
        log = next(each for each in self._logs if each.number == number)
        self._logs = tuple(each for each in self._logs if each is not log)
        self._removed.append(log)  # only now: the thread looks at these after a pass over the others

    def is_complete(self, number: int) -> bool:
        """Return whether everything of an output is in its log."""
        return not any(each.num_left for each in self._logs if each.number == number)

    @property
    def error(self) -> OSError | None:
        """Return the newest error of one of the logs that cannot be written; None if all can."""
        return next(iter(list(self._errors.values())), None)

    @property
    def num_left(self) -> int:
        """Return the number of bytes that are not in their logs."""
        return sum(each.num_left for each in self._logs)

    def wake(self) -> None:
        """Copy new output at once."""
        self._woken.set()

    def hurry(self) -> None:
        """Copy with `_SOON_S` between two copies from now on: the run is over."""
        self._is_hurried = True
        self._woken.set()

    def close(self, deadline_s: float) -> None:
        """End the thread, unless the disk holds it for longer than `deadline_s` seconds.

        Output that is not copied yet stays out of the logs.
        """
        self._is_over = True
        self._woken.set()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        has_more = False
        while not self._is_over:
            has_more = sum(self._copy(log) for log in self._logs) > 0  # not any(): each has its turn
            while self._removed:
                log = self._removed.popleft()
                log.give_back()
                self._errors.pop(log.number, None)
            self._woken.wait(0.0 if has_more else _SOON_S if self._is_hurried else _INTERVAL_S)
            self._woken.clear()
        for log in self._logs:
            log.close()

    def _copy(self, log: _Log) -> bool:
        """Copy a limited number of chunks. Return whether there is more to copy now.

        That is False for `_RETRY_S` after an error.
        """
        has_more = False
        if time.monotonic() < log.retry_at:
            return has_more
        try:
            for _ in range(_CHUNKS_AT_ONCE):
                self.busy_since = time.monotonic()
                has_more = log.copy()
                if not has_more:
                    break
        except OSError as error:
            self._errors[log.number] = error
            log.retry_at = time.monotonic() + _RETRY_S
            has_more = False
        else:
            self._errors.pop(log.number, None)
        self.busy_since = None
        return has_more


class Outputs:
    """The outputs of a run in the recorder's own thread, which waits for no disk."""

    def __init__(
        self, bookmark: OutputBookmark, *, limit_bytes: int, slow_disk_s: float, speaks: Callable[[int], bool],
        keep: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        """Start a `LogWriter` on `bookmark`.

        `limit_bytes`: bytes of all outputs that may wait for the disk. `slow_disk_s`: seconds after
        which a disk counts as not answering. `speaks(replica)` returns whether a replica is the
        job's writer at present. The writer's lines are shown, and `keep` is called with them.
        """
        self._bookmark, self._limit_bytes, self._slow_disk_s = bookmark, limit_bytes, slow_disk_s
        self._speaks, self._keep = speaks, keep
        self._outputs: dict[int, Output] = {}
        self._shown: dict[int, int] = {}
        """Output -> replica whose lines are to be shown."""
        self._teed: dict[int, Tee] = {}
        self._unseen: set[int] = set()
        """Outputs whose lines `keep` gets and `look` does not yield."""
        self._ends: dict[int, int] = {}
        """Output -> its end in this turn; `_ends_before` has its end in the turn before."""
        self._ends_before: dict[int, int] = {}
        self._ended: set[int] = set()
        """Outputs into which nobody prints any more."""
        self._num_lost_before = 0
        """Bytes of outputs that were released which had no room in memory."""
        self._looked_at = self._dropped_at = time.monotonic()
        self.is_filling = False
        """True if new output would fill the memory within a second; then each turn follows soon."""
        self.has_more = False
        """True if the last `look`, or `teed` after it, has left lines for the next one."""
        self.num_emptied = 0
        """Number of times that somebody has emptied an output (`output.py`, Note [Emptied])."""
        self.num_unshown = 0
        """Bytes that are missing in `train.log`, because memory had no room for them."""
        self.writer = LogWriter(bookmark)

    def add(
        self, number: int, output: Output, *, shown_of: int | None, tee: Tee | None = None, is_on_console: bool = True
    ) -> None:
        """Add an output.

        `shown_of`: the replica that prints it, if its lines are to be shown while that replica is
        the writer; without `is_on_console` only `keep` gets them. `tee`: `teed` yields every line
        of the output, each with this value; None: `teed` yields none.
        """
        self._outputs[number] = output
        if shown_of is not None:
            self._shown[number] = shown_of
        if tee is not None:
            self._teed[number] = tee
        if not is_on_console:
            self._unseen.add(number)
        self.writer.add(number, output, [reader for reader, theirs in self._read.items() if number in theirs])

    def ended(self, number: int) -> None:
        """Note that nobody prints into an output any more."""
        if number in self._outputs:
            self._ended.add(number)

    def released(self) -> list[int]:
        """Forget the ended outputs whose log and readers have everything; return these outputs."""
        found = [number for number in sorted(self._ended) if self._is_done(number)]
        for number in found:
            self._num_lost_before += self._bookmark.copied(number).num_lost
            self.writer.remove(number)
            self._ended.discard(number)
            self._unseen.discard(number)
            known: tuple[dict[int, Any], ...] = (self._outputs, self._shown, self._teed, self._ends, self._ends_before)
            for each in known:
                each.pop(number, None)
        return found

    def _is_done(self, number: int) -> bool:
        """Return whether the log and the readers of an output have all that was printed."""
        end = self._bookmark.end(number, self._outputs[number])
        readers = (reader for reader, theirs in self._read.items() if number in theirs)
        return self.writer.is_complete(number) and all(self._bookmark.shown(number, reader) >= end for reader in readers)

    @property
    def _read(self) -> dict[Reader, dict[int, int] | dict[int, Tee]]:
        return {Reader.SHOWN: self._shown, Reader.TEED: self._teed}

    def make_room(self) -> None:
        """Free the oldest output beyond the limit, and measure how fast processes print.

        A call begins a turn. Of replicas other than the writer, `look` never yields what they
        printed before the previous turn began; only their logs get it. Calls that follow each
        other at once would measure nothing.
        """
        self._drop()
        now, ends = time.monotonic(), {number: self._bookmark.end(number, output) for number, output in self._outputs.items()}
        num_new = sum(ends.values()) - sum(self._ends.values())
        self.is_filling = num_new > self._limit_bytes * (now - self._looked_at)
        self._ends_before, self._ends, self._looked_at = self._ends, ends, now

    def look(self, *, at_end: bool = False) -> Iterator[str]:
        """Yield new lines of the job's writer, also given to `keep`; drop output without room.

        `at_end`: yield everything up to now, also the text after the last newline. Otherwise yield
        a limited part of each output, so that each has its turn. Output of other replicas stays if
        it is newer than the turn before: the event that makes one of them the writer may be on its
        way.
        """
        self.has_more = False
        for number, replica in self._shown.items():
            if not self._speaks(replica):
                before = self._ends_before.get(number, 0)
                self._bookmark.show(number, max(before, self._bookmark.shown(number)))
                continue
            is_last = at_end or number in self._ended
            for text, position in self._new_lines(number, Reader.SHOWN, self._keep, at_end=is_last):
                self._keep(text)
                self._bookmark.show(number, position)  # at once: a kill in between keeps lines twice
                if number not in self._unseen:
                    yield from text.decode(errors="replace").splitlines()
                self._drop_now_and_then()

    def teed(self, *, at_end: bool = False) -> Iterator[tuple[Tee, str]]:
        """Yield new lines of all teed outputs and notes of missing bytes; drop output without room.

        Call it after `look`. `at_end` as there.
        """
        for number, tee in self._teed.items():
            notes: list[bytes] = []
            is_last = at_end or number in self._ended
            for text, position in self._new_lines(number, Reader.TEED, notes.append, at_end=is_last):
                self._bookmark.show(number, position, Reader.TEED)
                for line in b"".join([*notes, text]).decode(errors="replace").splitlines():
                    yield tee, line
                notes.clear()
                self._drop_now_and_then()

    def seal(self) -> None:
        """Let no process print any more.

        The run is over, and a program that outlives it would fill the memory.
        """
        for output in self._outputs.values():
            with contextlib.suppress(OSError):
                output.seal()

    @property
    def num_lost(self) -> int:
        """Return how many bytes had no room in memory, also those that no log has reported yet."""
        bookmark, total = self._bookmark, self._num_lost_before
        for number in self._outputs:
            copied = bookmark.copied(number)
            total += copied.num_lost + max(0, bookmark.lost(number) - max(copied.position, bookmark.first(number)))
        return total

    def ends(self) -> list[tuple[Path, str]]:
        """Return the path of each log, with the newest output of its process, if that is kept."""
        return sorted((each.log, each.end()) for each in self._outputs.values())

    def _drop_now_and_then(self) -> None:
        """Call `_drop` unless it was called a moment ago: it looks at every output."""
        if time.monotonic() - self._dropped_at >= _DROP_S:
            self._drop()

    def _drop(self) -> None:
        """Drop output that has no room in memory, and notice which outputs somebody has emptied."""
        bookmark, self._dropped_at = self._bookmark, time.monotonic()
        for number, output in self._outputs.items():
            if bookmark.notice_emptied(number, output):
                self.num_emptied += 1
                self.writer.wake()  # another emptying before the copy loses what is printed now
                if number in self._shown and self._speaks(self._shown[number]):
                    self._keep(EMPTIED_NOTE)
        since = self.writer.busy_since
        is_stuck = self.writer.error is not None or (since is not None and time.monotonic() - since > self._slow_disk_s)
        disk = Why.DISK if is_stuck else Why.FASTER
        bookmark.look(time.monotonic_ns(), disk)
        bookmark.drop(self._outputs, self._limit_bytes, Who.RECORDER, why=disk, read=self._read)

    def _new_lines(
        self, number: int, reader: Reader, note: Callable[[bytes], object], *, at_end: bool
    ) -> Iterator[tuple[bytes, int]]:
        """Yield chunks of whole lines, with the position after each, for the bookmark.

        A line longer than `CHUNK_BYTES` comes in parts. `note` is called with the notes of missing
        bytes.
        """
        bookmark, output = self._bookmark, self._outputs[number]
        end = bookmark.end(number, output)  # a fixed end, as somebody may print meanwhile
        for _ in itertools.count() if at_end else range(_CHUNKS_AT_ONCE):
            begin, first = bookmark.shown(number, reader), bookmark.first(number)
            if num_missing := bookmark.num_unshown(number, reader):
                note(lost_note(num_missing, bookmark.why(number)))
                self.num_unshown += num_missing * (reader is Reader.SHOWN)
                bookmark.show(number, begin, reader)
            if end <= begin:
                return
            data = bookmark.read(number, output, begin)
            if bookmark.lost(number) > begin or bookmark.first(number) != first:
                continue
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) < CHUNK_BYTES:
                if at_end and data:
                    yield data + b"\n", begin + len(data)
                return  # the line is still being written
            whole = whole or len(data)
            yield data[:whole], begin + whole
        self.has_more = True
