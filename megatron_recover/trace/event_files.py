"""The files of one trace: `events.jsonl`, and its older parts, which the recorder has put aside.

The parts are `events.0001.jsonl.gz`, `events.0002.jsonl.gz` and so on, oldest first. A part that
was not compressed, perhaps because the run ended first, lacks the `.gz`. The newest events are in
`events.jsonl`. This module finds and opens the parts in order, also while the recorder puts one
aside. It does not know what a line means.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, cast

EVENTS_FILE = "events.jsonl"
"""Name of the newest part of the log inside a run directory."""
_PART = re.compile(r"events\.(\d{4,})\.jsonl(?:\.gz)?")
_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "only its owner may read it"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP), "give the --run-dir of a run"),
}
"""Remedies for errors of permissions and of names. For any other error the remedy is to see to the
disk."""


class TraceError(ValueError):
    """A log that cannot be read.

    The message names the file. For a line that is no event it has the line and the reason, for most
    other errors the remedy.
    """


@contextlib.contextmanager
def reading(place: Path) -> Iterator[None]:
    """Raise a `TraceError` instead of an error that keeps a file from being read.

    FileNotFoundError is raised unchanged. `place` is the file or folder to name if the error names
    none.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{place}: {error}; the compressed file is damaged") from error
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see to its disk")
        raise TraceError(f"{error.filename or place} cannot be read ({error.strerror}): {remedy}") from error


def exists(folder: Path) -> bool:
    """Return whether a folder has a trace or a part of one.

    Raises `TraceError` if it cannot be read.
    """
    with reading(folder):
        return (folder / EVENTS_FILE).is_file() or bool(numbers(folder))


def part(folder: Path, number: int) -> Path:
    """Return the path to which part `number` (from 1) is put aside, before `compressed`."""
    return folder / f"events.{number:04}.jsonl"


def compressed(plain: Path) -> Path:
    """Return the name of a part after its compression."""
    return plain.with_name(plain.name + ".gz")


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the parts that were put aside, ascending."""
    found = (_PART.fullmatch(path.name) for path in folder.glob("events.*.jsonl*"))
    return sorted({int(match[1]) for match in found if match})


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else open(path, "rb")


def open_part(folder: Path, number: int) -> tuple[IO[bytes], Path] | None:
    """Open the part `number` of a trace, put aside or not; None if there is none yet.

    Raises `TraceError` if the part is missing although later parts exist, or if it cannot be
    opened. Until the recorder has put the next file in its place, the name `events.jsonl` also
    leads to the previous part.
    """
    with reading(folder):
        return _open_part(folder, number)


def _open_part(folder: Path, number: int) -> tuple[IO[bytes], Path] | None:
    for _ in range(2):
        for path in (part(folder, number), compressed(part(folder, number))):
            try:
                # The plain file is removed once the compressed one exists. A reader that has the
                # plain file open reads it to its end.
                return _open(path), path
            except FileNotFoundError:
                continue
        # Looked at first: once the previous part is compressed and removed, `events.jsonl` is
        # another file, which may have got the same inode.
        before = _identity(part(folder, number - 1))
        file = _newest(folder)
        if file is not None:
            here = os.fstat(file.fileno())
            if before == (here.st_dev, here.st_ino):
                file.close()
                return None
        last = max(numbers(folder), default=0)  # first: if later parts exist, this one is put aside by now
        if not is_put_aside(folder, number) and last <= number:
            return None if file is None else (file, folder / EVENTS_FILE)
        if file is not None:
            file.close()  # if the part was put aside meanwhile, this may be the next part
        if not is_put_aside(folder, number):
            raise TraceError(f"part {number} is missing: there is no {compressed(part(folder, number))}; put it back")
    raise AssertionError("unreachable: what was put aside stays there")


def _newest(folder: Path) -> IO[bytes] | None:
    try:
        return open(folder / EVENTS_FILE, "rb")
    except FileNotFoundError:
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file that a name leads to; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def is_put_aside(folder: Path, number: int) -> bool:
    """Return whether the part `number` is complete, so that nothing more is written to it."""
    plain = part(folder, number)
    return plain.exists() or compressed(plain).exists()


def lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """Yield (file, line number in that file from 1, line) of a trace in order.

    `path` is a run directory or its `events.jsonl`, which both stand for all parts. Any other file
    is read alone. Raises FileNotFoundError if there is no such file, and `TraceError` if it cannot
    be read.
    """
    with reading(path):
        is_folder = path.is_dir()
    folder = path if is_folder else path.parent
    if path.name != EVENTS_FILE and not is_folder:
        with reading(path), _open(path) as file:
            for count, line in enumerate(file, start=1):
                yield path, count, line
        return
    number, opened = 1, open_part(folder, 1)
    if opened is None:
        raise FileNotFoundError(2, "No such file or directory", str(folder / EVENTS_FILE))
    while opened is not None:
        file, place = opened
        # The file stays open until the next part is open. So if it is compressed and removed
        # meanwhile, no other file can get its inode.
        with reading(place), file:
            complete = yield from _lines(file, folder, number, place)
            opened = open_part(folder, number + 1) if complete else None
        number += 1


def _lines(file: IO[bytes], folder: Path, number: int, place: Path) -> Generator[tuple[Path, int, bytes], None, bool]:
    """Yield the lines of one part as `lines` does; return whether the part is complete.

    The last line may lack its line end. The caller must not check again whether the part is
    complete. By then it may be, and lines that were added before would not be read.
    """
    begun, count = b"", 0
    while True:
        # Lines that are added before the part is put aside belong to it. So the file is read again
        # after the check whether it is complete.
        is_complete = place.name != EVENTS_FILE or is_put_aside(folder, number)
        for line in file:
            begun += line
            if begun.endswith(b"\n"):
                count += 1
                yield place, count, begun
                begun = b""
        if is_complete or not is_put_aside(folder, number):
            break
    if begun:
        yield place, count + 1, begun
    return is_complete
