"""Anonymous files in memory (memfd) that processes of a run share: the one place that creates them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

_MFD_NOEXEC_SEAL = 0x0008
"""Not executable, for ever (Linux 6.3; no constant of Python's). Hosts with `vm.memfd_noexec=2` refuse a file without it."""
FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals for a file that others map: with another size, reading it would end its readers with SIGBUS."""
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
"""Flags of fallocate(2)."""
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def create(name: str) -> int:
    """Create an empty file that can be sealed, and return its descriptor, which is not inheritable. Raises OSError.

    `name` is what /proc shows.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel does not know the flag
            raise
    return os.memfd_create(name, flags)


def create_sized(name: str, num_bytes: int, *, is_sparse: bool = False) -> int:
    """Create a file of so many bytes, all 0, whose size nobody can change. Return its descriptor. Raises OSError.

    It gets all its memory now, as a mapping that is written later and finds none ends the writer with SIGBUS (a host that does
    not overcommit: `vm.overcommit_memory=2`). A sparse file gets each page when it is written first.
    """
    descriptor = create(name)
    try:
        os.ftruncate(descriptor, num_bytes)
        if not is_sparse:
            os.posix_fallocate(descriptor, 0, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FIXED_SIZE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def free(descriptor: int, end: int) -> None:
    """Give back the memory of everything before `end`, in whole pages; it then reads as zeros. Raises OSError."""
    zero(descriptor, end - end % mmap.PAGESIZE)


def zero(descriptor: int, num_bytes: int) -> None:
    """Have so many bytes at the beginning read as zeros, and give back the memory of whole pages among them. Raises OSError."""
    if num_bytes > 0 and _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, num_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def seal_empty(descriptor: int) -> None:
    """Give back all memory of a file, and let nobody write into it any more: a write fails with EPERM. Raises OSError."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    free(descriptor, os.fstat(descriptor).st_size + mmap.PAGESIZE)
    with contextlib.suppress(OSError):  # EBUSY: somebody has mapped it, and its size bounds what that may take
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
