"""Files of a run: where a rank's log is, and files that are whole or not there, whatever a full disk does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LOGS = "logs"
"""The folder of a run directory that has the logs of its ranks."""


def log_name(replica: int, rank: int) -> str:
    """Return the path of a rank's log inside its run directory."""
    return f"{LOGS}/replica-{replica}-rank-{rank}.log"


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `place` when all of it is written; else what stands there stays as it is.

    It is written beside its name. Raises OSError with `place` as its file name where it cannot be: one from a write has none.
    """
    target = place.resolve()  # where a link leads: the link stays
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
