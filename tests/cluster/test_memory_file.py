"""The files in memory that processes of a run share: nobody can cut them, and hosts that forbid executable ones take them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

import pytest

from megatron_recover.authentication import key
from megatron_recover.cluster.event_store import create_bookmark
from megatron_recover.host import memory_file
from megatron_recover.progress_page import PageReader
from megatron_recover.trace import ring

FILES: dict[str, Callable[[], int]] = {
    "ring": ring.create,
    "ledger": create_bookmark,
    "page": lambda: os.dup(PageReader("progress-0.0").descriptor),
    "key": lambda: key.sealed(key.make_key()),
}


@pytest.mark.parametrize("which", FILES)
def test_nobody_can_cut_or_extend_it(which: str) -> None:
    descriptor = FILES[which]()
    try:
        for size in (0, 2**30):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("which", FILES)
@pytest.mark.parametrize("host", ["strict", "old"])
def test_it_is_made_where_executable_ones_are_forbidden_and_where_the_flag_is_unknown(
    host: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        has_flag = bool(flags & memory_file._MFD_NOEXEC_SEAL)
        if has_flag != (host == "strict"):
            number = errno.EACCES if host == "strict" else errno.EINVAL
            raise OSError(number, os.strerror(number))
        return real(name, flags & ~memory_file._MFD_NOEXEC_SEAL)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    os.close(FILES[which]())


@pytest.mark.parametrize("which", FILES)
def test_what_a_rank_writes_has_its_memory_from_the_start_and_a_sparse_bookmark_takes_none(which: str) -> None:
    """Where memory is not overcommitted (`vm.overcommit_memory=2`) the first write to a page that finds none is SIGBUS."""
    descriptor = FILES[which]()
    found = os.fstat(descriptor)
    os.close(descriptor)
    assert (found.st_blocks * 512 >= found.st_size) == (which != "ledger")


def test_a_host_without_memory_for_a_ring_says_so_before_a_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no shared memory of"):
        ring.create()
    assert len(os.listdir("/proc/self/fd")) == len(before), "its descriptor is still there"
