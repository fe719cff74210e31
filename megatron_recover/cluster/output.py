"""What a process of a run prints: a file in memory that takes it at once, and the book on how far that was copied to its log.

`cluster/logs.py` copies. Nothing here touches a disk.

Note [Output never waits]. Stdout and stderr of a rank, and of what it starts, are one file in memory (memfd), opened for
appending. So a write there ends at once, whoever stands still: the disk, the recorder, the launcher. A pipe would need a reader
at every instant. While its reader is stopped or dead, a pipe blocks or fails whoever prints, native code and child processes
included. What finds no room is therefore dropped by those who read, never by those who write: the oldest output that was not
copied goes first, since the last words of a rank tell why it died. The recorder drops it, and so does the launcher, since one
of them may be stopped. Lost bytes are counted and told in the log, where they are missing.

Note [Dropping]. Who drops enters in the ledger up to where output is lost, and then frees that memory. Who copies reads, and
then looks into the ledger again: what was entered meanwhile may have been read as zeros, and is read anew. Recorder and
launcher have a word of their own there, and the larger one counts.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
from pathlib import Path

import msgspec

from megatron_recover import memory_file
from megatron_recover.cluster.event_store import MAX_RINGS

KEPT_BYTES = 2**18
"""So much of the newest output of each process stays in memory, in the log or not: its last words can be read there."""
CHUNK_BYTES = 2**18
"""Read at once."""
_ALL_BYTES = 2**29
_LEAST_BYTES = 2**22
MAX_OUTPUTS = MAX_RINGS + 8
"""Of one run on one node: one for each process that prints, and `train.log`."""
_WORDS = 16
"""Of an output in the ledger: which of two slots is valid; the slots, each `Copied`; lost up to, by recorder and by launcher;
shown up to."""
_SLOTS, _LOST, _SHOWN = (1, 4), 7, 9


def limit_bytes(num_processes: int) -> int:
    """Return how much output of each process may wait in memory for a disk."""
    return max(_LEAST_BYTES, _ALL_BYTES // max(1, num_processes))


class Output(msgspec.Struct, frozen=True):
    """What one process prints."""

    descriptor: int
    log: Path
    """Where it is copied to."""

    @property
    def num_bytes(self) -> int:
        """How much was printed in all."""
        return os.fstat(self.descriptor).st_size

    def end(self) -> str:
        """Return the newest output, `KEPT_BYTES` at most."""
        return os.pread(self.descriptor, KEPT_BYTES, max(0, self.num_bytes - KEPT_BYTES)).decode(errors="replace")

    def close(self) -> None:
        """Close the descriptor of this process."""
        os.close(self.descriptor)


def create(log: Path) -> Output:
    """Create an output with nothing in it. Raises OSError."""
    descriptor = memory_file.create("megatron-recover-output")
    os.fchmod(descriptor, 0o600)
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

    def copied(self, number: int) -> Copied:
        """Return how far an output is in its log."""
        begin = self._begin(number)
        slot = begin + _SLOTS[self._words[begin]]
        return Copied(*self._words[slot : slot + 3])

    def commit(self, number: int, copied: Copied) -> None:
        """Replace how far an output is in its log, at one instant. Used by one thread at a time."""
        begin, words = self._begin(number), self._words
        other = 1 - words[begin]
        slot = begin + _SLOTS[other]
        words[slot], words[slot + 1], words[slot + 2] = copied.position, copied.log_bytes, copied.num_lost
        words[begin] = other

    def lost(self, number: int) -> int:
        """Return up to where an output is lost as far as it was not copied."""
        place = self._begin(number) + _LOST
        return max(self._words[place], self._words[place + 1])

    def drop(self, number: int, output: Output, limit: int, who: Who) -> None:
        """Free the oldest output that is not copied, where there is more of it than `limit` bytes (Note [Dropping])."""
        size = output.num_bytes
        if size - max(self.copied(number).position, self.lost(number)) <= limit:
            return
        until = size - limit + limit // 8  # a part of it at once, not each byte by itself
        self._words[self._begin(number) + _LOST + who] = until
        memory_file.free(output.descriptor, until)

    def begin_anew(self, number: int) -> None:
        """Note that somebody has emptied an output: `echo > /dev/stderr` in a shell does."""
        begin = self._begin(number)
        self._words[begin + _LOST] = self._words[begin + _LOST + 1] = self._words[begin + _SHOWN] = 0
        self.commit(number, msgspec.structs.replace(self.copied(number), position=0))

    def shown(self, number: int) -> int:
        """Return up to where the console has had an output."""
        return max(self._words[self._begin(number) + _SHOWN], self.lost(number))

    def show(self, number: int, position: int) -> None:
        """Note up to where the console has had an output."""
        self._words[self._begin(number) + _SHOWN] = position

    @staticmethod
    def _begin(number: int) -> int:
        return _WORDS * number


def create_output_ledger() -> int:
    """Create an empty ledger, and return its descriptor. Memory that is not used is not taken."""
    return memory_file.create_sized("megatron-recover-outputs", 8 * _WORDS * MAX_OUTPUTS)
