"""Lock files: one holder, a wait that ends, and no reader who could be the holder."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from megatron_recover.host import lock_file


def test_one_holds_a_file_until_it_is_closed_and_nobody_waits_for_longer_than_was_said(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock_file.opened(path) as first, lock_file.opened(path) as second:
        assert lock_file.acquired(first, 0.0)
        began = time.monotonic()
        assert not lock_file.acquired(second, 0.2) and time.monotonic() - began >= 0.2
        first.close()
        assert lock_file.acquired(second, 0.0)


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "of an earlier release"])
def test_other_users_cannot_open_a_lock_file(tmp_path: Path, is_there: bool) -> None:
    """Who may read a file can hold it: any user of the machine could keep a job from saving."""
    path = tmp_path / "lock"
    if is_there:
        path.touch()
        path.chmod(0o664)
    umask = os.umask(0)
    try:
        with lock_file.opened(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
    finally:
        os.umask(umask)


def test_what_the_holder_wrote_is_there_for_those_who_wait(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock_file.opened(path) as first, lock_file.opened(path) as second:
        print("pid 1", file=first, flush=True)
        assert second.read() == "pid 1\n"
