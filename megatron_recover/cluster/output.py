"""The stdout and stderr of a rank: a full disk under its log costs lines of the log, and no rank.

A write that stalls still holds up the thread that prints: docs/guarantees.md says so.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Buffer


class _Forgiving(io.RawIOBase):
    """A file of which what cannot be written is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: Buffer, /) -> int:
        """Write what the file takes. Return the length of all of `data`: nobody is to try the rest again."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            pass
        return length

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, for those who write to it by themselves."""
        return self._descriptor


def forgive_full_disks() -> None:
    """Replace `sys.stdout` and `sys.stderr` by files that raise nothing where the disk is full or has an error.

    `sys.stdout` and `sys.stderr` keep their encoding and how they are buffered.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        forgiving = io.TextIOWrapper(
            io.BufferedWriter(_Forgiving(stream.fileno())),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, forgiving)
