"""Anonymous files in memory (memfd) that processes of a run share. No other module creates one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

_MFD_NOEXEC_SEAL = 0x0008
"""Flag for a file that can never be executed (Linux 6.3; Python has no constant). Hosts with
`vm.memfd_noexec=2` refuse a file without it."""
FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals for a file that others map. If the file could shrink, reading it would end its readers with
SIGBUS."""
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
"""Flags of fallocate(2)."""
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def create(name: str) -> int:
    """Create an empty file that can be sealed, and return its descriptor. Raises OSError.

    The descriptor is not inheritable. /proc shows `name`.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel does not know the flag
            raise
    return os.memfd_create(name, flags)


def create_sized(name: str, num_bytes: int, *, is_sparse: bool = False) -> int:
    """Create a file of `num_bytes` zeros with a fixed size, and return its descriptor.

    Raises OSError.

    All its memory is allocated now. Otherwise, on a host without overcommit
    (`vm.overcommit_memory=2`), a later write to a mapping could find no memory and end the writer
    with SIGBUS. A sparse file gets each page at the first write to it.
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


def create_with(name: str, content: bytes) -> int:
    """Create a file with this content, and return its descriptor. Raises OSError."""
    descriptor = create(name)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read(descriptor: int) -> bytes:
    """Return the whole content of a file, whatever its offset is. Raises OSError."""
    size, content = os.fstat(descriptor).st_size, b""
    while part := os.pread(descriptor, size - len(content), len(content)):
        content += part
    return content


def free(descriptor: int, end: int) -> None:
    """Release the memory of all whole pages before `end`, which then read as zeros.

    Raises OSError.
    """
    zero(descriptor, end - end % mmap.PAGESIZE)


def zero(descriptor: int, num_bytes: int) -> None:
    """Make the first `num_bytes` read as zeros, and release the whole pages among them.

    Raises OSError.
    """
    if num_bytes > 0 and _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, num_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def seal_empty(descriptor: int) -> None:
    """Release all memory of a file and forbid writing to it: a write fails with EPERM.

    The file keeps its size, and all bytes read as zeros. If a process has mapped the file, only
    writes that would make the file larger fail. Raises OSError.
    """
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    free(descriptor, os.fstat(descriptor).st_size + mmap.PAGESIZE)
    with contextlib.suppress(OSError):  # EBUSY: a process has mapped it; the fixed size limits its memory
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
