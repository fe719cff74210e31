"""Bring the trace and the logs of a node to node 0, at the end of a run without a shared folder.

`packed` reads a node's files as parts of bounded size, and `Gatherer` on node 0 writes them below
`nodes/`. The parts travel as messages of the control plane; this module sends nothing. A sender can
write only files of its own node, with the names that a run directory has, and no more bytes than
node 0 allows. A file appears under its name when it is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_recover.trace import event_files
from megatron_recover.trace.merging import folder_of

PART_BYTES = 2**20
"""Bytes of a file in one part, at most."""
MAX_BYTES = 64 * 2**30
"""Bytes that node 0 takes from one node, at most."""
MAX_FILES = 100_000
"""Files that node 0 takes from one node, at most."""
_NAME = re.compile(r"(events(\.[0-9]{4,9})?\.jsonl(\.gz)?|launcher\.log|train\.log|logs/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.log)")
"""Names of the files that are gathered, inside the folder of a node."""
_UNFINISHED = ".gathering"
"""Ending of a file that is not whole yet."""


class Refused(ValueError):
    """A part that node 0 does not take. The message names the node, the file and the reason."""


class FilePart(msgspec.Struct, frozen=True):
    """Some bytes of one file. The parts of a file come in order, and the files one by one."""

    name: str
    """Path inside the folder of the node (`_NAME`)."""
    size: int
    """Bytes of the whole file."""
    offset: int
    """Position of `data` in the file."""
    data: bytes


def is_missing(run_dir: Path, node: int) -> bool:
    """Return whether the trace of a node has to be gathered: its folder is not shared with node 0.

    Raises `event_files.TraceError` if the folder cannot be read.
    """
    return not event_files.exists(folder_of(run_dir, node))


def packed(folder: Path) -> Iterator[FilePart]:
    """Yield the trace and the logs in a node's folder as parts, the newest file of the trace last.

    Symbolic links and other files are left out. Call it when nothing writes to the folder any more;
    what is added to a file meanwhile is left out too. Raises OSError.
    """
    names = [path.relative_to(folder).as_posix() for path in [*folder.glob("*"), *folder.glob("logs/*")]]
    for name in sorted(filter(_NAME.fullmatch, names), key=lambda name: (name == event_files.EVENTS_FILE, name)):
        if (folder / name).is_symlink() or not (folder / name).is_file():
            continue
        with open(folder / name, "rb") as file:
            size, offset = os.fstat(file.fileno()).st_size, 0
            while True:
                data = file.read(min(PART_BYTES, size - offset))
                yield FilePart(name, size, offset, data)
                offset += len(data)
                if offset >= size or not data:
                    break


class Gatherer:
    """Writes the files of one node on node 0. Used by one thread."""

    def __init__(self, run_dir: Path, node: int, *, max_bytes: int = MAX_BYTES) -> None:
        """Begin to gather the files of `node`, the number that its link has proven.

        Raises `Refused` for node 0, and for a node whose folder has a trace already.
        """
        self._folder, self._node = folder_of(run_dir, node), node
        if node < 1 or not is_missing(run_dir, node):
            raise Refused(f"node {node}: there is a trace in {self._folder} already")
        self._left_bytes, self._num_files = max_bytes, 0
        self._name, self._size, self._offset = "", 0, 0
        self._file = -1

    def take(self, part: FilePart) -> None:
        """Write a part. Raises `Refused` for one that may not be written, and OSError."""
        if self._file < 0:
            self._begin(part)
        if (part.name, part.size, part.offset) != (self._name, self._size, self._offset):
            raise self._refused(part, f"a part at {part.offset} where {self._name} goes on at {self._offset}")
        if len(part.data) > min(PART_BYTES, self._size - self._offset):
            raise self._refused(part, f"a part of {len(part.data)} bytes is too long")
        if not part.data and self._size:
            raise self._refused(part, "a part without bytes")
        view = memoryview(part.data)
        while view:
            view = view[os.write(self._file, view) :]
        self._offset += len(part.data)
        if self._offset == self._size:
            os.close(self._file)
            self._file = -1
            os.rename(self._path(_UNFINISHED), self._path())

    def close(self) -> None:
        """Remove a file that is not whole. Every whole file stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                os.unlink(self._path(_UNFINISHED))

    def _begin(self, part: FilePart) -> None:
        if not _NAME.fullmatch(part.name):
            raise self._refused(part, "no file of a trace or log has this name")
        if self._num_files >= MAX_FILES or not 0 <= part.size <= self._left_bytes:
            raise self._refused(part, f"{part.size} bytes are more than node 0 takes")
        self._name, self._size, self._offset = part.name, part.size, 0
        path = self._path()
        if path.exists() or path.is_symlink():
            raise self._refused(part, "the file is there already")
        for folder in (self._folder.parent, self._folder, path.parent):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            if folder.is_symlink():
                raise self._refused(part, f"{folder} is a symbolic link")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path(_UNFINISHED), flags, 0o600)
        self._left_bytes -= part.size
        self._num_files += 1

    def _path(self, ending: str = "") -> Path:
        return self._folder / (self._name + ending)

    def _refused(self, part: FilePart, why: str) -> Refused:
        return Refused(f"node {self._node}: {part.name[:100]!r} is not gathered: {why}")
