"""Files that are whole or not there, whatever a full disk or a kill does: written beside their name, and then given it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(
    place: Path, *, partial: Path | None = None, durable: bool = False, before_naming: Callable[[], None] = lambda: None
) -> Iterator[BinaryIO]:
    """Yield a file to write. It gets the name `place` when all of it is written; else what stands there stays as it is.

    It is written to `partial` meanwhile, which lies in the same folder and takes the place of a link as well. None: to a hidden
    name that is this process's own, where a link leads; the link stays. `durable` has the file on the disk before and after
    it gets its name. `before_naming()` is called when it is complete, and what it raises is raised. Raises OSError with `place`
    as its file name where the file cannot be written: one from a write has none.
    """
    target = place if partial is not None else place.resolve()
    beside = partial or target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with _named(place, beside), open(beside, "wb") as file:
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
    """Give errors of the file `beside` the name that it is to have. What says in words what it is keeps them."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and str(error.filename) != str(beside)):
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


def sync(path: Path) -> None:
    """Have a file or folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
