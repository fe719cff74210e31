"""The output of a run's processes, in memory, and the bookmark of how far it is copied to the logs.

`cluster/logs.py` copies. Nothing here touches a disk.

Note [Output never waits]. Stdout and stderr of a rank, and of its child processes, are one or two
files in memory (memfd), opened for appending. So a write there ends at once, even while the disk
stalls, or while the recorder or the launcher is stopped. A pipe would need a reader at every
instant. While its reader is stopped or dead, a pipe blocks or fails every process that prints,
native code and child processes included. Therefore the readers drop output that has no room; the
writers never do. The oldest output that was not copied is dropped first, since a rank's last words
show why it died. The recorder drops output, and so does the launcher, since either may be stopped.
Lost bytes are counted. The log reports them where they are missing, with the reason.

Note [Dropping]. All processes of a node share `WAITING_BYTES`. While more than that waits, the
outputs with the most waiting bytes lose their oldest, until all fits. Before a process drops
output, it enters in the bookmark up to where the output is lost. Then it frees that memory. The
process that copies reads output, and then looks into the bookmark again: output that was entered as
lost meanwhile may have been read as zeros, so it is read again. Recorder and launcher each have a
word of their own for this, and the larger one counts. Linux has no file that is bounded and neither
blocks nor fails its writers. So the readers enforce the bound: output that is printed between two
looks comes on top.

Note [Emptied]. A program that opens /dev/stderr for writing and not for appending (`echo >
/dev/stderr`) empties the file behind it, as with every file. A seal (F_SEAL_SHRINK) would forbid
that, but then the open would fail with EPERM. So nothing is sealed while the run lasts; the
emptying is noticed and reported.

The file begins with one byte 0. A program that prints into an emptied file puts another byte there.
The recorder then keeps that byte in the bookmark and makes it 0 again. Positions of an output never
decrease: output after an emptying begins `_GAP` after the last position in the bookmark. A position
that was read before the emptying, and is entered later, is before that start.

A program that opens its output neither for appending nor for emptying writes over the beginning. If
the beginning is freed already, the hole after it shows that the output was not emptied. If nothing
is freed, the output looks as if it was emptied and has as many bytes again. It is then reported and
copied as such: text that is there twice is better than lost text.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import resource
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from megatron_recover.cluster.event_store import MAX_RINGS
from megatron_recover.host import memory_file

WAITING_BYTES = 2**29
"""Bytes of output, of all processes of a node, that may wait in memory for a disk."""
KEPT_BYTES = 2**18
"""Bytes at the end of each output that stay in memory, copied or not, for readers of the last words
of its process."""
CHUNK_BYTES = 2**18
"""Maximum bytes of one read."""
MAX_OUTPUTS = 2 * MAX_RINGS + 8
"""Maximum of outputs of one run on one node: one or two for each process that prints, and those of
the recorder's own logs."""
_LEAST_FILE_BYTES = 2**40
"""Smallest limit on the size of files that a run accepts, in bytes. The kernel counts everything
that a process ever prints."""
_GAP = 2**32
"""Positions that are skipped at an emptying (Note [Emptied]). The number is larger than the output
that may wait in memory, and so small that an output can be emptied 2 * 10^9 times."""
_WORDS = 16
"""Number of words of an output in the bookmark. In order: index of the valid slot; two slots, each
`Copied`; end of the lost output according to the recorder, and to the launcher; end of the shown
output; first position since the last emptying, and the first byte since then; reason of the last
loss; end of the teed output."""
_SLOTS, _LOST, _SHOWN, _BASE, _FIRST, _WHY, _TEED = (1, 4), 7, 9, 10, 11, 12, 13
_LOOKED_AT, _DISK = 0, 1
"""Words after those of the outputs: time of the recorder's last look (CLOCK_MONOTONIC, ns), and the
disk's state then."""


class Why(enum.IntEnum):
    """The reason why output had no room in memory."""

    FASTER = 0
    DISK = 1
    RECORDER = 2

    def __str__(self) -> str:
        return (
            "ranks printed faster than it was copied", "the disk did not answer, or refused it", "the recorder did not run"
        )[self]  # fmt: skip


class Reader(enum.IntEnum):
    """A reader of an output beside its log; the value is the word of its position."""

    SHOWN = _SHOWN
    """The reader of the writer's lines, for `train.log` and the console."""
    TEED = _TEED
    """The reader of all lines, for the console (`--tee`)."""


def lost_note(num_bytes: int, why: Why) -> bytes:
    """Return the line of a log that reports missing output."""
    return f"\nmegatron-recover: {num_bytes} bytes of output are missing here: {why}\n".encode()


EMPTIED_NOTE = (
    b"\nmegatron-recover: a program opened /dev/stdout or /dev/stderr for writing and so emptied this output: what was printed "
    b"in the instant before is missing here; let the program append (>>)\n"
)


def file_limit_mistake() -> str | None:
    """Return why the limit on the size of files (`ulimit -f`) is too small for a run.

    The text includes the remedy. None if the limit is large enough. The kernel counts
    all that a process ever prints: memory of what was copied is given back, and the file keeps its
    size.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILE_BYTES:
        return None
    remedy = "give `ulimit -f unlimited` in this shell first"
    if hard != resource.RLIM_INFINITY:
        remedy += "; where the shell may not, raise fsize in /etc/security/limits.conf, or LimitFSIZE= of the service"
    return (
        f"files may have {soft} bytes only (`ulimit -f`), and all that a rank ever prints counts as one file: the rank would "
        f"fail in the middle of the run; {remedy}"
    )


class Output(msgspec.Struct, frozen=True):
    """The output of one process."""

    descriptor: int
    log: Path
    """Path of the log to which the output is copied."""
    stdout: Output | None = None
    """Output of stdout, if the process has one by itself. This one is then that of stderr alone."""

    def end(self) -> str:
        """Return the newest output, at most `KEPT_BYTES`, behind that of `stdout`."""
        size = os.fstat(self.descriptor).st_size
        newest = os.pread(self.descriptor, KEPT_BYTES, max(0, size - KEPT_BYTES))
        text = newest.lstrip(b"\0").decode(errors="replace")  # the mark of Note [Emptied], and freed memory
        return text if self.stdout is None else self.stdout.end() + text

    def seal(self) -> None:
        """Give back its memory; call this when nobody reads the output any more. Raises OSError.

        A program that outlives the run gets EPERM when it prints.
        """
        memory_file.seal_empty(self.descriptor)

    def close(self) -> None:
        """Close this process's descriptor."""
        os.close(self.descriptor)


def create(log: Path) -> Output:
    """Create an empty output. Raises OSError."""
    descriptor = memory_file.create("megatron-recover-output")
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, 1)  # Note [Emptied]
    # Processes that inherit the descriptor share this flag, so the processes of a rank do not
    # overwrite each other's output.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return Output(descriptor, log)


class Copied(msgspec.Struct, frozen=True):
    """The part of an output that its log has."""

    position: int = 0
    """Position in the output; everything before it is in the log or lost."""
    log_bytes: int = 0
    """Size of the log at that position."""
    num_lost: int = 0
    """Bytes of the output that are missing in the log and reported there."""


class Who(enum.IntEnum):
    """The process that drops output."""

    RECORDER = 0
    LAUNCHER = 1


class OutputBookmark:
    """The record of how far each output is copied, lost and shown.

    It is shared memory that outlives the recorder.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind `descriptor`, which `create_output_bookmark` made."""
        self._memory = mmap.mmap(descriptor, 0)
        self._words = memoryview(self._memory).cast("q")

    # --- What an output has -----------------------------------------------------------------------

    def first(self, number: int) -> int:
        """Return the first position of an output, or the first since somebody has emptied it."""
        begin = _WORDS * number
        return self._words[begin + _BASE] + (0 if self._words[begin + _FIRST] else 1)

    def end(self, number: int, output: Output) -> int:
        """Return the position after the newest byte of an output."""
        return self._words[_WORDS * number + _BASE] + os.fstat(output.descriptor).st_size

    def read(self, number: int, output: Output, position: int) -> bytes:
        """Return what an output has from `position` on, at most `CHUNK_BYTES`."""
        begin = _WORDS * number
        offset = position - self._words[begin + _BASE]
        data = os.pread(output.descriptor, CHUNK_BYTES, offset)
        return bytes([self._words[begin + _FIRST]]) + data[1:] if data and offset == 0 else data

    def free(self, number: int, output: Output, position: int) -> None:
        """Give back the memory of everything before `position`."""
        memory_file.free(output.descriptor, position - self._words[_WORDS * number + _BASE])

    def is_emptied(self, number: int, output: Output) -> bool:
        """Return whether somebody has emptied an output and printed into it.

        Also True if somebody has written over its beginning. Emptyings that the recorder has
        noticed before do not count.
        """
        found = os.fstat(output.descriptor)
        if not found.st_size:
            return False
        if os.pread(output.descriptor, 1, 0) != b"\0":
            return True
        return self._words[_WORDS * number + _BASE] + found.st_size < self._newest(number)

    def notice_emptied(self, number: int, output: Output) -> bool:
        """Begin new positions if somebody has emptied an output (Note [Emptied]).

        Returns whether the output was emptied. One thread of the recorder uses this. If the
        recorder dies in here, the next one does the work.
        """
        if not self.is_emptied(number, output):
            return False
        found, words, begin = os.fstat(output.descriptor), self._words, _WORDS * number
        mark = os.pread(output.descriptor, 1, 0)
        is_emptied = found.st_blocks * 512 >= found.st_size or mark == b"\0"  # else the hole of freed memory is still there
        if is_emptied:
            words[begin + _FIRST] = mark[0] if mark else 0
            words[begin + _BASE] = self._newest(number) + _GAP
        memory_file.zero(output.descriptor, 1)
        return is_emptied

    def _newest(self, number: int) -> int:
        """Return the newest position of an output that the bookmark has."""
        begin = _WORDS * number
        read = (self._words[begin + reader] for reader in Reader)
        return max(self._words[begin + _BASE], self.copied(number).position, self.lost(number), *read)

    # --- What became of it ------------------------------------------------------------------------

    def copied(self, number: int) -> Copied:
        """Return how far an output is copied to its log."""
        begin = _WORDS * number
        slot = begin + _SLOTS[self._words[begin]]
        return Copied(*self._words[slot : slot + 3])

    def commit(self, number: int, copied: Copied) -> None:
        """Replace how far an output is copied, at one instant. One thread at a time uses this."""
        begin, words = _WORDS * number, self._words
        other = 1 - words[begin]
        slot = begin + _SLOTS[other]
        words[slot], words[slot + 1], words[slot + 2] = copied.position, copied.log_bytes, copied.num_lost
        words[begin] = other

    def lost(self, number: int) -> int:
        """Return the position before which all output that was not copied is lost."""
        place = _WORDS * number + _LOST
        return max(self._words[place], self._words[place + 1])

    def why(self, number: int) -> Why:
        """Return the reason why output was dropped the last time."""
        return Why(self._words[_WORDS * number + _WHY])

    def shown(self, number: int, reader: Reader = Reader.SHOWN) -> int:
        """Return the position up to which a reader has had an output or never will."""
        return max(self._words[_WORDS * number + reader], self.lost(number), self.first(number))

    def num_unshown(self, number: int, reader: Reader = Reader.SHOWN) -> int:
        """Return how many bytes before `shown` a reader has not had."""
        return self.shown(number, reader) - max(self._words[_WORDS * number + reader], self.first(number))

    def show(self, number: int, position: int, reader: Reader = Reader.SHOWN) -> None:
        """Note the position up to which a reader has had an output."""
        self._words[_WORDS * number + reader] = position

    # --- Dropping ---------------------------------------------------------------------------------

    def drop(
        self,
        outputs: Mapping[int, Output],
        limit: int,
        who: Who,
        *,
        why: Why = Why.FASTER,
        read: Mapping[Reader, Container[int]] = MappingProxyType({}),
    ) -> None:
        """Free the oldest waiting output if more than `limit` bytes of all outputs wait.

        See Note [Dropping]. `read`: the outputs that also wait for a reader.
        """
        ends = {number: self.end(number, output) for number, output in outputs.items()}
        readers = {number: [reader for reader, theirs in read.items() if number in theirs] for number in outputs}
        waiting = {number: max(0, end - self._done(number, readers[number])) for number, end in ends.items()}
        if sum(waiting.values()) <= limit:
            return
        most = _most(waiting.values(), limit - limit // 8)  # a large part at once, not byte by byte
        for number, num_bytes in waiting.items():
            if num_bytes > most:
                begin, until = _WORDS * number, ends[number] - most
                self._words[begin + _WHY], self._words[begin + _LOST + who] = why, until
                self.free(number, outputs[number], until)

    def look(self, now_ns: int, disk: Why) -> None:
        """Note that the recorder looks at the outputs, and the state of the disk."""
        begin = _WORDS * MAX_OUTPUTS
        self._words[begin + _LOOKED_AT], self._words[begin + _DISK] = now_ns, disk

    def cause(self, now_ns: int, still_s: float) -> Why:
        """Return the launcher's view of why output has no room.

        `still_s`: seconds within which a running recorder looks again.
        """
        begin = _WORDS * MAX_OUTPUTS
        is_still = now_ns - self._words[begin + _LOOKED_AT] > still_s * 1e9
        return Why.RECORDER if is_still else Why(self._words[begin + _DISK])

    def _done(self, number: int, readers: Collection[Reader]) -> int:
        """Return the position before which neither the log nor `readers` need an output."""
        read = (self._words[_WORDS * number + reader] for reader in readers)
        return max(min((self.copied(number).position, *read)), self.lost(number), self.first(number))


def _most(sizes: Collection[int], room: int) -> int:
    """Return the largest size that each may keep so that all fit into `room`.

    Those with less leave their share to the others.
    """
    for number, size in enumerate(sorted(sizes)):
        share = room // (len(sizes) - number)
        if size > share:
            return share
        room -= size
    return max(sizes, default=0)


def create_output_bookmark() -> int:
    """Create an empty bookmark, and return its descriptor. Unused memory is not allocated."""
    return memory_file.create_sized("megatron-recover-outputs", 8 * _WORDS * (MAX_OUTPUTS + 1), is_sparse=True)
