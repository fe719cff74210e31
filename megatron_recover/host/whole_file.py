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

    It is written to `partial` meanwhile, which lies in the same folder (None: a hidden name that is this process's own).
    `durable` has it on the disk before and after it gets its name. `before_naming()` is called when it is complete. Raises
    OSError with `place` as its file name where it cannot be written: one from a write has none.
    """
    target = place.resolve()  # where a link leads: the link stays
    beside = partial or target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        before_naming()
        os.replace(beside, target)
        if durable:
            sync(target.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file or folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
