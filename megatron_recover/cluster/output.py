"""What a process of a run prints: a file in memory that takes it at once, and the book on how far that was copied to its log.

`cluster/logs.py` copies. Nothing here touches a disk.

Note [Output never waits]. Stdout and stderr of a rank, and of what it starts, are one file in memory (memfd), opened for
appending. So a write there ends at once, whoever stands still: the disk, the recorder, the launcher. A pipe would need a reader
at every instant. While its reader is stopped or dead, a pipe blocks or fails whoever prints, native code and child processes
included. What finds no room is therefore dropped by those who read, never by those who write: the oldest output that was not
copied goes first, since the last words of a rank tell why it died. The recorder drops it, and so does the launcher, since one
of them may be stopped. Lost bytes are counted and told in the log, where they are missing, with the reason.

Note [Dropping]. All processes of a node share `WAITING_BYTES`. Where more than that waits, those that have the most waiting
lose the oldest of it, until all fits. Who drops enters in the ledger up to where output is lost, and then frees that memory.
Who copies reads, and then looks into the ledger again: what was entered meanwhile may have been read as zeros, and is read
anew. Recorder and launcher have a word of their own there, and the larger one counts. Linux has no file that is bounded and
neither blocks nor fails who writes. So the bound is that of those who look: what is printed between two looks comes on top.

Note [Emptied]. Whoever opens /dev/stderr for writing and not for appending (`echo > /dev/stderr`) empties the
file behind it, as with every file. A seal would forbid that (F_SEAL_SHRINK), and the open would fail with EPERM; so nothing is
sealed, and the emptying is noticed and told. The file begins with one byte 0. Whoever prints into an emptied file puts
something else there. The recorder then keeps that byte in the ledger and makes it 0 again. Positions of an output never
decrease: what is printed after an emptying begins `_GAP` behind the last position in the ledger. A position that somebody
enters late, since it was read before the emptying, is before that. A program that opens its output neither for appending nor
for emptying writes over the beginning. Where that is freed already, the hole behind it shows that the output was not emptied.
Where nothing is freed, it looks like an output that was emptied and has as much again, and is told and copied as such: text
that is there twice is better than lost text.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import resource
from collections.abc import Collection, Container, Mapping
from pathlib import Path

import msgspec

from megatron_recover.cluster.event_store import MAX_RINGS
from megatron_recover.host import memory_file

WAITING_BYTES = 2**29
"""So much output of all processes of a node may wait in memory for a disk."""
KEPT_BYTES = 2**18
"""So much of the newest output of each process stays in memory, in the log or not: its last words can be read there."""
CHUNK_BYTES = 2**18
"""Read at once."""
MAX_OUTPUTS = MAX_RINGS + 8
"""Of one run on one node: one for each process that prints, and `train.log`."""
_LEAST_FILE_BYTES = 2**40
"""What the limit on the size of files must allow: it counts all that a process ever prints."""
_GAP = 2**32
"""Positions between what was before an emptying and what comes after it (Note [Emptied]). It is more than what may wait in
memory, and so small that an output can be emptied 2 * 10^9 times."""
_WORDS = 16
"""Of an output in the ledger: which of two slots is valid; the slots, each `Copied`; lost up to, by recorder and by launcher;
shown up to; where positions begin since it was emptied last, and the first byte since then; why something was lost last."""
_SLOTS, _LOST, _SHOWN, _BASE, _FIRST, _WHY = (1, 4), 7, 9, 10, 11, 12
_LOOKED_AT, _DISK = 0, 1
"""Words behind those of the outputs: when the recorder looked last (CLOCK_MONOTONIC, ns), and what the disk did then."""


class Why(enum.IntEnum):
    """Why output found no room in memory."""

    FASTER = 0
    DISK = 1
    RECORDER = 2

    def __str__(self) -> str:
        return (
            "ranks printed faster than it was copied", "the disk did not answer, or refused it", "the recorder did not run"
        )[self]  # fmt: skip


def lost_note(num_bytes: int, why: Why) -> bytes:
    """Return what a log says where output is missing."""
    return f"\nmegatron-recover: {num_bytes} bytes of output are missing here: {why}\n".encode()


EMPTIED_NOTE = (
    b"\nmegatron-recover: a program opened /dev/stdout or /dev/stderr for writing and so emptied this output: what was printed "
    b"in the instant before is missing here; let the program append (>>)\n"
)


def file_limit_mistake() -> str | None:
    """Return why the limit on the size of files (`ulimit -f`) is too small for a run, with the remedy; None: it is not.

    The kernel holds it against everything that a process has printed into its output, which is never cut.
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
    """What one process prints."""

    descriptor: int
    log: Path
    """Where it is copied to."""

    def end(self) -> str:
        """Return the newest output, `KEPT_BYTES` at most."""
        size = os.fstat(self.descriptor).st_size
        newest = os.pread(self.descriptor, KEPT_BYTES, max(0, size - KEPT_BYTES))
        return newest.lstrip(b"\0").decode(errors="replace")  # the mark of Note [Emptied], and what is freed

    def seal(self) -> None:
        """Give back its memory, as nobody reads it any more. A program that outlives the run finds it closed (EPERM)."""
        memory_file.seal_empty(self.descriptor)

    def close(self) -> None:
        """Close the descriptor of this process."""
        os.close(self.descriptor)


def create(log: Path) -> Output:
    """Create an output with nothing in it. Raises OSError."""
    descriptor = memory_file.create("megatron-recover-output")
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, 1)  # Note [Emptied]
    # Whoever inherits the descriptor shares this flag: nobody writes over what another process of the rank has written.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return Output(descriptor, log)


class Copied(msgspec.Struct, frozen=True):
    """How far an output is in its log."""

    position: int = 0
    """Of the output: everything before it is in the log or lost."""
    log_bytes: int = 0
    """Size of the log then."""
    num_lost: int = 0
    """Bytes of the output that are missing in the log, and told there."""


class Who(enum.IntEnum):
    """Who drops output."""

    RECORDER = 0
    LAUNCHER = 1


class OutputLedger:
    """How far each output was copied, lost and shown. It is shared memory that outlives the recorder."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind `descriptor`, which `create_output_ledger` made."""
        self._memory = mmap.mmap(descriptor, 0)
        self._words = memoryview(self._memory).cast("q")

    # --- What an output has -----------------------------------------------------------------------

    def first(self, number: int) -> int:
        """Return the position of the first byte of an output, or of the first one since somebody has emptied it."""
        begin = _WORDS * number
        return self._words[begin + _BASE] + (0 if self._words[begin + _FIRST] else 1)

    def end(self, number: int, output: Output) -> int:
        """Return the position behind the newest byte of an output."""
        return self._words[_WORDS * number + _BASE] + os.fstat(output.descriptor).st_size

    def read(self, number: int, output: Output, position: int) -> bytes:
        """Return what an output has from `position` on, `CHUNK_BYTES` at most."""
        begin = _WORDS * number
        offset = position - self._words[begin + _BASE]
        data = os.pread(output.descriptor, CHUNK_BYTES, offset)
        return bytes([self._words[begin + _FIRST]]) + data[1:] if data and offset == 0 else data

    def free(self, number: int, output: Output, position: int) -> None:
        """Give back the memory of everything before `position`."""
        memory_file.free(output.descriptor, position - self._words[_WORDS * number + _BASE])

    def is_emptied(self, number: int, output: Output) -> bool:
        """Return whether somebody has emptied an output, and printed into it, since the recorder noticed that last."""
        found = os.fstat(output.descriptor)
        if not found.st_size:
            return False
        if os.pread(output.descriptor, 1, 0) != b"\0":
            return True
        return self._words[_WORDS * number + _BASE] + found.st_size < self._newest(number)

    def notice_emptied(self, number: int, output: Output) -> bool:
        """Let positions begin anew where somebody has emptied an output, and return whether that was so (Note [Emptied]).

        Used by one thread of the recorder. A recorder that dies in here leaves it to the next one.
        """
        if not self.is_emptied(number, output):
            return False
        found, words, begin = os.fstat(output.descriptor), self._words, _WORDS * number
        mark = os.pread(output.descriptor, 1, 0)
        is_emptied = found.st_blocks * 512 >= found.st_size or mark == b"\0"  # else the hole of what is freed is still there
        if is_emptied:
            words[begin + _FIRST] = mark[0] if mark else 0
            words[begin + _BASE] = self._newest(number) + _GAP
        memory_file.zero(output.descriptor, 1)
        return is_emptied

    def _newest(self, number: int) -> int:
        """Return the newest position of an output in the ledger."""
        begin = _WORDS * number
        return max(self._words[begin + _BASE], self.copied(number).position, self.lost(number), self._words[begin + _SHOWN])

    # --- What became of it ------------------------------------------------------------------------

    def copied(self, number: int) -> Copied:
        """Return how far an output is in its log."""
        begin = _WORDS * number
        slot = begin + _SLOTS[self._words[begin]]
        return Copied(*self._words[slot : slot + 3])

    def commit(self, number: int, copied: Copied) -> None:
        """Replace how far an output is in its log, at one instant. Used by one thread at a time."""
        begin, words = _WORDS * number, self._words
        other = 1 - words[begin]
        slot = begin + _SLOTS[other]
        words[slot], words[slot + 1], words[slot + 2] = copied.position, copied.log_bytes, copied.num_lost
        words[begin] = other

    def lost(self, number: int) -> int:
        """Return up to where an output is lost as far as it was not copied."""
        place = _WORDS * number + _LOST
        return max(self._words[place], self._words[place + 1])

    def why(self, number: int) -> Why:
        """Return why output was dropped the last time."""
        return Why(self._words[_WORDS * number + _WHY])

    def shown(self, number: int) -> int:
        """Return up to where the console has had an output, or will never have it."""
        return max(self._words[_WORDS * number + _SHOWN], self.lost(number), self.first(number))

    def num_unshown(self, number: int) -> int:
        """Return how many bytes before `shown` the console has not had."""
        return self.shown(number) - max(self._words[_WORDS * number + _SHOWN], self.first(number))

    def show(self, number: int, position: int) -> None:
        """Note up to where the console has had an output."""
        self._words[_WORDS * number + _SHOWN] = position

    # --- Dropping ---------------------------------------------------------------------------------

    def drop(
        self, outputs: Mapping[int, Output], limit: int, who: Who, *, why: Why = Why.FASTER, shown: Container[int] = ()
    ) -> None:
        """Free the oldest output that waits, where more than `limit` bytes of all outputs do (Note [Dropping]).

        `shown`: those that wait for the console, too.
        """
        ends = {number: self.end(number, output) for number, output in outputs.items()}
        waiting = {number: max(0, end - self._done(number, is_shown=number in shown)) for number, end in ends.items()}
        if sum(waiting.values()) <= limit:
            return
        most = _most(waiting.values(), limit - limit // 8)  # a part of it at once, not each byte by itself
        for number, num_bytes in waiting.items():
            if num_bytes > most:
                begin, until = _WORDS * number, ends[number] - most
                self._words[begin + _WHY], self._words[begin + _LOST + who] = why, until
                self.free(number, outputs[number], until)

    def look(self, now_ns: int, disk: Why) -> None:
        """Note that the recorder looks at what is printed, and what the disk does."""
        begin = _WORDS * MAX_OUTPUTS
        self._words[begin + _LOOKED_AT], self._words[begin + _DISK] = now_ns, disk

    def cause(self, now_ns: int, still_s: float) -> Why:
        """Return why output finds no room, as the launcher sees it. `still_s`: a recorder that runs looks more often."""
        begin = _WORDS * MAX_OUTPUTS
        is_still = now_ns - self._words[begin + _LOOKED_AT] > still_s * 1e9
        return Why.RECORDER if is_still else Why(self._words[begin + _DISK])

    def _done(self, number: int, *, is_shown: bool) -> int:
        """Return the position before which nobody waits for an output."""
        copied = self.copied(number).position
        done = min(copied, self._words[_WORDS * number + _SHOWN]) if is_shown else copied
        return max(done, self.lost(number), self.first(number))


def _most(sizes: Collection[int], room: int) -> int:
    """Return how much each may have for all to find room, where those that have less leave theirs to the others."""
    for number, size in enumerate(sorted(sizes)):
        share = room // (len(sizes) - number)
        if size > share:
            return share
        room -= size
    return max(sizes, default=0)


def create_output_ledger() -> int:
    """Create an empty ledger, and return its descriptor. Memory that is not used is not taken."""
    return memory_file.create_sized("megatron-recover-outputs", 8 * _WORDS * (MAX_OUTPUTS + 1), is_sparse=True)
