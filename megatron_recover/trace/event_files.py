"""The files of one trace: `events.jsonl`, and its older parts, which the recorder has put aside and compressed.

`events.0001.jsonl.gz`, `events.0002.jsonl.gz` and so on are the parts, oldest first; one that is not compressed yet, or was not
before the end of the run, lacks the `.gz`. The newest events are in `events.jsonl`. This module finds and opens them, in
order, also while the recorder puts one aside; it does not know what a line means.
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
"""For errors of a name; after any other the disk is to be looked at."""


class TraceError(ValueError):
    """A log that cannot be read; the message names the file, and the line and field of it or the remedy."""


@contextlib.contextmanager
def reading(place: Path) -> Iterator[None]:
    """Turn what keeps a file of a trace from being read into a `TraceError` with the remedy. FileNotFoundError passes.

    `place`: the file or folder, for the errors that do not name it.
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
    """Return whether there is a trace in a folder, or a part of one. Raises `TraceError` where that cannot be seen."""
    with reading(folder):
        return (folder / EVENTS_FILE).is_file() or bool(numbers(folder))


def part(folder: Path, number: int) -> Path:
    """Return where the part `number` (from 1) is put aside; `compressed` is where it ends up."""
    return folder / f"events.{number:04}.jsonl"


def compressed(plain: Path) -> Path:
    """Return the name of a part once it is compressed."""
    return plain.with_name(plain.name + ".gz")


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the parts that were put aside, in order."""
    found = (_PART.fullmatch(path.name) for path in folder.glob("events.*.jsonl*"))
    return sorted({int(match[1]) for match in found if match})


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else open(path, "rb")


def open_part(folder: Path, number: int) -> tuple[IO[bytes], Path] | None:
    """Open the part `number` of a trace, put aside or not; None where there is none yet. Raises `TraceError` for a part that
    is missing though later ones are there, and for one that cannot be opened.

    Until the recorder has put the next file in its place, the name `events.jsonl` leads to the part before, too.
    """
    with reading(folder):
        return _open_part(folder, number)


def _open_part(folder: Path, number: int) -> tuple[IO[bytes], Path] | None:
    for _ in range(2):
        for path in (part(folder, number), compressed(part(folder, number))):
            try:
                # The plain one goes when the compressed one is there. Who has it open reads it to its end.
                return _open(path), path
            except FileNotFoundError:
                continue
        # Looked at first: once the part before is compressed and gone, `events.jsonl` is another file, perhaps of its inode.
        before = _identity(part(folder, number - 1))
        file = _newest(folder)
        if file is not None:
            here = os.fstat(file.fileno())
            if before == (here.st_dev, here.st_ino):
                file.close()
                return None
        last = max(numbers(folder), default=0)  # first: where later ones are there, this one was put aside before
        if not is_put_aside(folder, number) and last <= number:
            return None if file is None else (file, folder / EVENTS_FILE)
        if file is not None:
            file.close()  # if the part was put aside after we had looked for it, this may be the one behind it
        if not is_put_aside(folder, number):
            raise TraceError(f"part {number} is missing: there is no {compressed(part(folder, number))}; put it back")
    raise AssertionError("unreachable: what was put aside stays there")


def _newest(folder: Path) -> IO[bytes] | None:
    try:
        return open(folder / EVENTS_FILE, "rb")
    except FileNotFoundError:
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file a name leads to; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def is_put_aside(folder: Path, number: int) -> bool:
    """Return whether the part `number` is complete: nothing is written to it any more."""
    plain = part(folder, number)
    return plain.exists() or compressed(plain).exists()


def lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """Yield (file, line number in that file from 1, line) of a trace in order.

    `path` is a run directory or its `events.jsonl`, which stand for all parts; any other file is read alone. Raises
    FileNotFoundError where there is none, and `TraceError` for what cannot be read.
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
        # Open until the next part is: a file that is compressed and removed meanwhile gives its inode to nobody before.
        with reading(place), file:
            complete = yield from _lines(file, folder, number, place)
            opened = open_part(folder, number + 1) if complete else None
        number += 1


def _lines(file: IO[bytes], folder: Path, number: int, place: Path) -> Generator[tuple[Path, int, bytes], None, bool]:
    """Yield the lines of one part as `lines` does, the last one perhaps without its end. Return whether these are all.

    Nobody may look once more whether the part is complete: it may be by then, and what was added before is not read.
    """
    begun, count = b"", 0
    while True:
        # What is added before the part is put aside is part of it: so the file is read again once it is known to be complete.
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
