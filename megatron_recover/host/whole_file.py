"""Files that are complete, as they were before, or absent, even after a full disk or a kill.

A file is written under another name, and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_recover.host.addresses import host_name

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def replacing(
    place: Path, *, partial: Path | None = None, durable: bool = False, before_naming: Callable[[], None] = lambda: None
) -> Iterator[BinaryIO]:
    """Yield a file to write, which gets the name `place` once it is complete.

    Until then, and if writing fails, the former file at `place` stays as it is. Raises OSError with
    `place` as its file name if the file cannot be written. That includes the error of a write, in
    which the system names no file.

    - `partial` is the name during the writing, in the same folder; the file then replaces a link at
      `place`. None: a hidden name of this process on this host, since hosts share folders and
      process ids; the file then replaces the target of a link.
    - `durable` writes the file to disk before it gets its name, and its folder after that. If the
      folder cannot be written, OSError is raised, and the file has its name already.
    - `before_naming()` is called when the file is complete. What it raises is raised.
    """
    target = place if partial is not None else place.resolve()
    beside = partial or target.with_name(f".{target.name}.{host_name()}.{os.getpid()}")
    try:
        with _named(place, beside):
            beside.unlink(missing_ok=True)  # what a process of this number has left, or somebody's link
        with _named(place, beside), open(beside, "xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        before_naming()
        with _named(place, beside):
            os.replace(beside, target)
            if durable:
                sync(target.parent)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(place: Path, beside: Path) -> Iterator[None]:
    """Name `place` in the errors of the file `beside`.

    An OSError without errno, or of another file, is unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and str(error.filename) != str(beside)):
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


def sync(path: Path) -> None:
    """Write a file or folder to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Let two entries of a file system change places in one step; return whether that worked.

    Returns False where library, kernel or file system (NFS) lack Linux's renameat2. Raises OSError
    for any other failure.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
