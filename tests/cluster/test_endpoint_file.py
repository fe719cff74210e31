"""The file through which nodes find their endpoint: one owner, however many come at once."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_recover.cluster.endpoint_file import await_address, claim, owner_file, publish, refuse
from megatron_recover.host.addresses import host_name


def test_of_many_that_come_at_once_one_owns_it_and_all_find_its_address(tmp_path: Path) -> None:
    file, start = tmp_path / "job" / "endpoint", threading.Barrier(16)

    def come(_: int) -> tuple[bool, tuple[str, int]]:
        start.wait()
        owns = claim(file)
        if owns:
            publish(file, "[fd00::1]:29400")
        return owns, await_address(file, 20.0, bool)

    with ThreadPoolExecutor(16) as pool:
        came = list(pool.map(come, range(16)))
    assert sum(owns for owns, _ in came) == 1
    assert {address for _, address in came} == {("fd00::1", 29400)}


def test_an_owner_that_never_writes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "endpoint"
    assert claim(file) and not claim(file)
    with pytest.raises(ValueError, match=rf"had no address after 0.1 s; {host_name()} was to write it, as {owner_file(file)}"):
        await_address(file, 0.1, bool)


def test_an_owner_that_cannot_start_a_coordinator_ends_the_wait_of_the_others_at_once(tmp_path: Path) -> None:
    file = tmp_path / "endpoint"
    assert claim(file)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_address, file, 60.0, bool)
        refuse(file, "no port is free")
        with pytest.raises(ValueError, match=f"no job begins here, as {host_name()}: no port is free"):
            waiting.result(10.0)


def test_a_node_that_finds_no_room_there_does_not_own_the_endpoint_of_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "endpoint"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ValueError, match=r"No space left on device\); name a file in a folder that all nodes see"):
            claim(file)
    assert claim(file)


def test_a_folder_in_which_no_file_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="name a file in a folder that all nodes see and may write"):
        claim(tmp_path / "file" / "endpoint")
