"""Lock files, each held by at most one process.

The kernel releases a lock when its holder has ended, in whatever way. Children that the holder
forked while it had the file open share the lock: the lock then lasts until they have ended, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_POLL_S = 0.05
_MODE = 0o660
"""Mode of a lock file. Any process that can read a file can hold it, so only owner and group may
read."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """Open a lock file, and create it if there is none. Raises OSError.

    Where this process may, take from the file all rights that `_MODE` does not have.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE), "r+", encoding="utf-8") as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & ~_MODE & 0o777:
            with contextlib.suppress(PermissionError):  # the file is another user's
                os.fchmod(file.fileno(), mode & _MODE)
        yield file


def acquired(file: IO[str], patience_s: float) -> bool:
    """Take the lock of an opened file; wait up to `patience_s` seconds for another holder.

    Return whether this process holds the lock now. Closing the file releases it. Raises OSError
    where the file system has no locks.
    """
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(_POLL_S)
        else:
            return True
