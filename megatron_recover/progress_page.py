"""The progress page of a rank: records in shared memory of what two of its threads do.

The rank writes the page, its agent reads the page, and the page outlives the rank. This module
decides how a record is laid out and when a record is whole. What follows from a record is decided
by `core/detector.py` (hangs) and `cluster/watch.py` (the microbatches that a death is charged to).

Note [A page without locks]
    The page is a memfd, which is no file anywhere. The agent creates the page, seals it against
    shrinking and gives it to the rank; both map it. Writing is one copy into the mapping and makes
    no system call.

    Each record carries a checksum of itself. So a reader notices a write that is half done, also if
    the rank died in the middle of it. Such a record names no microbatch. A checksum needs no order
    of stores, which differs between processors.

Note [One writer a record]
    The training thread of the rank writes the first record. Other threads (control,
    `recover-reduce`) never touch it. If a healthy control thread kept it fresh, a training thread
    that hangs would be hidden.

    The thread `recover-read` has a record of its own behind the first, with its own checksum: the
    microbatch whose samples it reads. A process that dies of that reading names it, while the first
    record names the microbatch that was computed meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator

from megatron_recover.config import inherited_descriptor
from megatron_recover.core.progress import Phase, Progress
from megatron_recover.host import memory_file

DESCRIPTOR = "progress"
"""The name under which the agent gives the page to the rank."""
MAX_MICROBATCHES = 16
"""Most microbatches in work that a page has room for. The oldest stay: a device works in order."""
PAGE_BYTES = 4096
_MAX_LABEL_BYTES = 48
_CHECK = struct.Struct("<I")
_FIXED = struct.Struct(f"<qqqqqBB{_MAX_LABEL_BYTES}s")
"""(generation, step, begun, ended, since_ns, phase, number of microbatches, zero-padded label)."""
_IDS = tuple(struct.Struct(f"<{count}i") for count in range(MAX_MICROBATCHES + 1))
_RECORD_BYTES = _CHECK.size + _FIXED.size
_AHEAD = struct.Struct("<iiq")
"""The record of the thread that reads ahead: 1 if it reads (else 0), the microbatch, the step."""
_AHEAD_AT = _RECORD_BYTES + _IDS[-1].size
"""Offset of that record: behind the longest record of the training thread."""
_MOST_BYTES = _AHEAD_AT + _CHECK.size + _AHEAD.size
"""Most bytes that the records can have. A look reads no more: the rest of a page is in no cache."""
_TRIES = 3
"""Reads after which a reader gives up on a page that is torn each time."""


class ProgressPage:
    """The writing end of a page, for the training thread of a rank alone, except `show_reading`."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Map the page behind `descriptor`, close the descriptor, and enter `Phase.LOADING`.

        None: make a page that nobody reads.
        """
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, PAGE_BYTES)
        if descriptor is not None:
            os.close(descriptor)
        self._phase = Phase.LOADING
        self._label = b""
        self._ids: tuple[int, ...] = ()
        self._packed_ids = b""
        self._generation, self._step = 0, -1
        self._begun = self._ended = 0
        self._is_open = False
        """True while the newest operation has not ended."""
        self._since_ns = 0
        self.enter(Phase.LOADING)

    @classmethod
    def inherited(cls) -> ProgressPage:
        """Return the page that the agent gave this rank.

        Outside `megatron-recover run` it is a private one.
        """
        return cls(inherited_descriptor(DESCRIPTOR))

    @property
    def phase(self) -> Phase:
        """The phase that was entered last."""
        return self._phase

    def enter(self, phase: Phase, microbatches: tuple[int, ...] | None = None) -> None:
        """Begin an operation, which ends the one before.

        `microbatches` are in work from now on, the oldest first; None: the same as before. The page
        keeps the first `MAX_MICROBATCHES`.
        """
        if microbatches is not None and microbatches != self._ids:
            self._ids = microbatches[:MAX_MICROBATCHES]
            self._packed_ids = _IDS[len(self._ids)].pack(*self._ids)
        self._phase = phase
        self._ended += self._is_open
        self._begun += 1
        self._is_open = True
        self._since_ns = time.monotonic_ns()
        self._write()

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enter another phase, then again the phase of before, as an operation of its own."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def show_reading(self, microbatch: int | None) -> None:
        """Show the microbatch whose samples are read ahead; None: none.

        Only the thread that reads ahead calls this. The step is that in which the reading begins.
        """
        body = _AHEAD.pack(microbatch is not None, microbatch or 0, self._step)
        self._memory[_AHEAD_AT:_MOST_BYTES] = _CHECK.pack(zlib.crc32(body)) + body

    def begin_step(self, step: int, label: str) -> None:
        """Store the step at which the training thread arrives; the next `enter` shows it."""
        self._step, self._label = step, label.encode()[:_MAX_LABEL_BYTES]

    def obey(self, generation: int) -> None:
        """Store the generation of the order that is carried out; the next `enter` shows it."""
        self._generation = generation

    def _write(self) -> None:
        body = (
            _FIXED.pack(
                self._generation, self._step, self._begun, self._ended, self._since_ns, self._phase, len(self._ids), self._label
            )
            + self._packed_ids
        )
        self._memory[: _CHECK.size + len(body)] = _CHECK.pack(zlib.crc32(body)) + body


class PageReader:
    """The reading end of a page, for the agent; it outlives the rank."""

    def __init__(self, name: str) -> None:
        """Create the page; /proc shows it under `name`."""
        # Sealed: if a holder of the descriptor shrank the file, reading would end in SIGBUS.
        self.descriptor = memory_file.create_sized(name, PAGE_BYTES)
        """The descriptor to give to the rank; close it with `release`."""
        self._memory = mmap.mmap(self.descriptor, PAGE_BYTES, prot=mmap.PROT_READ)

    def release(self) -> None:
        """Close the descriptor once the rank has its own; the page stays readable."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Close the descriptor and unmap the page."""
        self.release()
        self._memory.close()

    def read(self) -> Progress | None:
        """Return what the page shows, or None if its first record is torn or was never written."""
        for _ in range(_TRIES):
            if (progress := parse(self._memory[:_MOST_BYTES])) is not None:
                return progress
        return None


def parse(page: bytes) -> Progress | None:
    """Return what a page shows, or None if its first record does not fit its checksum or layout.

    Without a fitting record of reading ahead, `Progress.ahead` is None.
    """
    [check] = _CHECK.unpack_from(page)
    generation, step, begun, ended, since_ns, phase, count, label = _FIXED.unpack_from(page, _CHECK.size)
    if count > MAX_MICROBATCHES or phase not in _PHASES:
        return None
    if zlib.crc32(page[_CHECK.size : _RECORD_BYTES + _IDS[count].size]) != check:
        return None
    return Progress(
        generation=generation, step=step, label=label.rstrip(b"\0").decode(errors="replace"), phase=Phase(phase),
        microbatches=_IDS[count].unpack_from(page, _RECORD_BYTES), begun=begun, ended=ended, since_ns=since_ns,
        ahead=_ahead(page, step),
    )  # fmt: skip


def _ahead(page: bytes, step: int) -> int | None:
    """Return the microbatch of this step that is read ahead, or None.

    A reading may outlive its step, if the pass has ended without the batch.
    """
    [check] = _CHECK.unpack_from(page, _AHEAD_AT)
    body = page[_AHEAD_AT + _CHECK.size : _MOST_BYTES]
    reads, microbatch, of_step = _AHEAD.unpack(body)
    return microbatch if reads and of_step == step and zlib.crc32(body) == check else None


_PHASES = frozenset(Phase)
