"""The progress page of a rank: a small record in shared memory that says what its training thread does.

The rank writes it, its agent reads it, and it outlives the rank. This module decides how the record is laid out and what is
whole; what follows from a page is decided by `core/detector.py` (hangs) and `core/policy.py` (whom a death is charged to).

Note [A page without locks]
    The page is a memfd that the agent creates, seals against shrinking and hands down (no file anywhere), mapped by both.
    Writing is one copy into the mapping and makes no system call. The record carries a checksum of itself: a reader that meets
    a write half done, or a page of which the rank died in the middle of a write, finds that it does not fit, and the page names
    nobody. A checksum needs no order of stores, which differs between processors.

Note [One writer]
    The training thread of the rank writes. Other threads of a rank (control, `recover-reduce`) never touch the page: a page
    that a healthy control thread kept fresh would hide a training thread that hangs.
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
from megatron_recover.core.detector import Phase, Progress
from megatron_recover.host import memory_file

DESCRIPTOR = "progress"
"""The name under which the agent hands the page down."""
MAX_MICROBATCHES = 16
"""In work, that a page has room for. More are cut off: the oldest stay, since a device works in order."""
PAGE_BYTES = 4096
_MAX_LABEL_BYTES = 48
_CHECK = struct.Struct("<I")
_FIXED = struct.Struct(f"<qqqqqBB{_MAX_LABEL_BYTES}s")
"""generation, step, begun, ended, since_ns, phase, number of microbatches, label padded with zeros."""
_IDS = tuple(struct.Struct(f"<{count}i") for count in range(MAX_MICROBATCHES + 1))
_RECORD_BYTES = _CHECK.size + _FIXED.size
_MOST_BYTES = _RECORD_BYTES + _IDS[-1].size
"""Of a page that a record can have. A look reads no more: twenty times a second, the rest of all pages is not in any cache."""
_TRIES = 3
"""A reader tries so often to meet a page that is not being written."""


class ProgressPage:
    """The writing end. Used by the training thread of a rank alone."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Map the page behind `descriptor`, which is closed; None: a private page that nobody reads."""
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
        """Whether the newest operation has not ended."""
        self._since_ns = 0
        self.enter(Phase.LOADING)

    @classmethod
    def inherited(cls) -> ProgressPage:
        """Return the page that the agent handed down to this rank, or a private one outside `megatron-recover run`."""
        return cls(inherited_descriptor(DESCRIPTOR))

    @property
    def phase(self) -> Phase:
        """What was entered last."""
        return self._phase

    def enter(self, phase: Phase, microbatches: tuple[int, ...] | None = None) -> None:
        """Begin an operation, which ends the one before; `microbatches` are in work from now on (None: the same as before)."""
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
        """Do something else for a while, then go on with what was being done: as an operation of its own."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def begin_step(self, step: int, label: str) -> None:
        """The training thread arrives at a step. It is shown from the next `enter` on."""
        self._step, self._label = step, label.encode()[:_MAX_LABEL_BYTES]

    def obey(self, generation: int) -> None:
        """The training thread obeys an order of `generation`. It is shown from the next `enter` on."""
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
    """The reading end, of the agent. It outlives the rank."""

    def __init__(self, name: str) -> None:
        """Create the page; `name` is what /proc shows it as."""
        # Whoever holds the descriptor could shrink the file otherwise, and reading it would end the reader with SIGBUS.
        self.descriptor = memory_file.create_sized(name, PAGE_BYTES)
        """To hand down to the rank; give it up with `release`."""
        self._memory = mmap.mmap(self.descriptor, PAGE_BYTES, prot=mmap.PROT_READ)

    def release(self) -> None:
        """Close the descriptor, once the rank has its own. The page stays readable."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Give the page up."""
        self.release()
        self._memory.close()

    def read(self) -> Progress | None:
        """Return what the page says, or None if it is torn or was never written."""
        for _ in range(_TRIES):
            if (progress := parse(self._memory[:_MOST_BYTES])) is not None:
                return progress
        return None


def parse(page: bytes) -> Progress | None:
    """Return the record of a page, or None where its checksum or a field does not fit."""
    [check] = _CHECK.unpack_from(page)
    generation, step, begun, ended, since_ns, phase, count, label = _FIXED.unpack_from(page, _CHECK.size)
    if count > MAX_MICROBATCHES or phase not in _PHASES:
        return None
    if zlib.crc32(page[_CHECK.size : _RECORD_BYTES + _IDS[count].size]) != check:
        return None
    return Progress(
        generation=generation, step=step, label=label.rstrip(b"\0").decode(errors="replace"), phase=Phase(phase),
        microbatches=_IDS[count].unpack_from(page, _RECORD_BYTES), begun=begun, ended=ended, since_ns=since_ns,
    )  # fmt: skip


_PHASES = frozenset(Phase)
