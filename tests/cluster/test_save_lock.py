"""A second live job on one `--save` folder is refused and told the first; the lock of a dead job is taken over."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from megatron_recover.cluster import save_lock
from megatron_recover.cluster.run_end import RunEnd
from megatron_recover.cluster.save_lock import LOCK, SaveLock
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import EndAsked
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import host_name
from megatron_recover.observe.follow import launcher
from tests.forks import CONTEXT

pytestmark = pytest.mark.timeout(90)
PATIENCE_S = 60.0


def hold(folder: Path, run_dir: Path, coordinator: int | None = None) -> None:
    SaveLock(folder, run_dir, coordinator)
    time.sleep(1000.0)


@pytest.fixture
def first(tmp_path: Path) -> Any:
    """Another process whose job saves to the folder."""
    process = CONTEXT.Process(target=hold, args=(tmp_path / "save", tmp_path / "run"))
    process.start()
    while not (tmp_path / "save" / LOCK).exists() or not (tmp_path / "save" / LOCK).read_text():
        assert process.is_alive()
        time.sleep(0.02)
    yield process
    process.kill()
    process.join()


def test_a_second_job_is_refused_and_told_the_first_until_that_is_dead(first: Any, tmp_path: Path) -> None:
    folder = tmp_path / "save"
    os.kill(first.pid, signal.SIGSTOP)  # a job that stands still lives
    with pytest.raises(
        ValueError, match=rf"process {first.pid} on {host_name()}, run directory {tmp_path}/run, since \d{{4}}-"
    ):
        SaveLock(folder, tmp_path / "other")
    first.kill()
    first.join()
    lock = SaveLock(folder, tmp_path / "other")
    assert str(tmp_path / "other") in (folder / LOCK).read_text()
    lock.release(PATIENCE_S)
    assert (folder / LOCK).read_text() == ""


def test_a_folder_that_the_job_made_and_did_not_use_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        SaveLock(tmp_path / name, tmp_path).release(PATIENCE_S)
    assert (tmp_path / "there").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("lives", [True, False])
def test_a_job_whose_launcher_alone_has_ended_lives_as_long_as_its_coordinator(
    lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other nodes train on with it. It ends a moment after the last of them."""
    monkeypatch.setattr(save_lock, "_WATCH_S", 0.5 if lives else 60.0)
    with subprocess.Popen(["sleep", "1000" if lives else "0.5"]) as coordinator:
        process = CONTEXT.Process(target=hold, args=(tmp_path / "save", tmp_path / "run", coordinator.pid))
        process.start()
        while not (tmp_path / "save" / LOCK).exists() or not (tmp_path / "save" / LOCK).read_text():
            time.sleep(0.02)
        process.kill()
        process.join()
        if lives:
            with pytest.raises(ValueError, match=rf"has ended; its coordinator, process {coordinator.pid}, has not"):
                SaveLock(tmp_path / "save", tmp_path)
            coordinator.kill()
        else:
            SaveLock(tmp_path / "save", tmp_path).release(PATIENCE_S)


def elsewhere(folder: Path) -> save_lock._Holder:
    """The lock file of a job of another host."""
    folder.mkdir()
    holder = save_lock._Holder(launcher.LauncherProcess("another-host", 7, 1), "/run", "today")
    (folder / LOCK).write_bytes(msgspec.json.encode(holder))
    return holder


@pytest.mark.parametrize("lives", [True, False])
def test_a_job_of_another_host_lives_while_its_file_changes(
    lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks may not work between the two hosts, so a free lock alone shows nothing."""
    holder = elsewhere(tmp_path / "save")
    monkeypatch.setattr(save_lock, "_WATCH_S", 0.5)

    def beats(_: float) -> None:
        if lives:
            (tmp_path / "save" / LOCK).write_bytes(msgspec.json.encode(replace(holder, beat=1)))

    slept: Callable[[float], None] = time.sleep
    monkeypatch.setattr(save_lock.time, "sleep", lambda seconds: (slept(seconds), beats(seconds)))
    if lives:
        with pytest.raises(ValueError, match="process 7 on another-host, run directory /run, since today"):
            SaveLock(tmp_path / "save", tmp_path)
    else:
        SaveLock(tmp_path / "save", tmp_path).release(PATIENCE_S)


def test_where_a_file_system_has_no_locks_a_process_of_this_host_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = SaveLock(tmp_path / "save", tmp_path)
    with pytest.raises(ValueError, match=f"process {os.getpid()}"):
        SaveLock(tmp_path / "save", tmp_path)
    holder = msgspec.json.decode((tmp_path / "save" / LOCK).read_bytes(), type=save_lock._Holder)
    lock.release(PATIENCE_S)
    ended = replace(holder, process=replace(holder.process, began=holder.process.began - 1))  # the id is used again
    (tmp_path / "save").mkdir(exist_ok=True)
    (tmp_path / "save" / LOCK).write_bytes(msgspec.json.encode(ended))
    SaveLock(tmp_path / "save", tmp_path).release(PATIENCE_S)


def test_a_job_of_another_host_is_watched_for_several_of_its_beats() -> None:
    assert save_lock._WATCH_S >= 3 * save_lock._BEAT_S


def test_a_job_that_lives_changes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "_BEAT_S", 0.01)
    lock = SaveLock(tmp_path / "save", tmp_path)
    before = (tmp_path / "save" / LOCK).read_bytes()
    while (tmp_path / "save" / LOCK).read_bytes() in (before, b""):
        time.sleep(0.01)
    lock.release(PATIENCE_S)


def test_other_hosts_see_each_change_of_the_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of NFS sends what is written when it is synced, or up to 30 s later: longer than `_WATCH_S`."""
    seen: list[bytes] = []
    sync = os.fsync

    def at_the_server(descriptor: int) -> None:
        sync(descriptor)
        seen.append((tmp_path / "save" / LOCK).read_bytes())

    monkeypatch.setattr(os, "fsync", at_the_server)
    monkeypatch.setattr(save_lock, "_BEAT_S", 0.01)
    lock = SaveLock(tmp_path / "save", tmp_path)
    assert seen and b'"beat":0' in seen[0]
    while b'"beat":2' not in seen[-1]:
        time.sleep(0.01)
    (tmp_path / "save" / "checkpoint").touch()  # or the file goes with the folder
    lock.release(PATIENCE_S)
    assert seen[-1] == b""


@pytest.mark.parametrize("is_beating", [True, False])
def test_a_disk_that_stands_still_keeps_no_job_from_its_end(
    is_beating: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the last sync nor in one of a beat, which holds the file."""
    stalled, goes_on = threading.Event(), threading.Event()

    def stand_still(_: int) -> None:
        stalled.set()
        goes_on.wait(60.0)

    monkeypatch.setattr(save_lock, "_BEAT_S", 0.01 if is_beating else 1000.0)
    (tmp_path / "save").mkdir()
    lock = SaveLock(tmp_path / "save", tmp_path)
    monkeypatch.setattr(os, "fsync", stand_still)
    if is_beating:
        assert stalled.wait(20.0)
    since = time.monotonic()
    lock.release(0.2)
    assert time.monotonic() - since < 20.0
    goes_on.set()
    for each in threading.enumerate():
        if each.name.startswith("save-lock"):
            each.join()
    assert (tmp_path / "save" / LOCK).read_text() == ""
    SaveLock(tmp_path / "save", tmp_path).release(PATIENCE_S)


def test_a_launcher_that_stood_still_leaves_the_file_to_the_job_that_has_taken_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks do not work between the two hosts, so the file alone shows the other job."""
    monkeypatch.setattr(save_lock, "_BEAT_S", 0.01)
    said: list[str] = []
    lock = SaveLock(tmp_path / "save", tmp_path)
    lock.tell(said.append)
    other = msgspec.json.encode(save_lock._Holder(launcher.LauncherProcess("another-host", 7, 1), "/run", "today"))
    with lock._writing:  # it stands still
        (tmp_path / "save" / LOCK).write_bytes(other)
    while not said:
        time.sleep(0.01)
    lock.release(PATIENCE_S)
    assert (tmp_path / "save" / LOCK).read_bytes() == other
    [line] = said
    assert f"--save {tmp_path}/save was taken over by another job (process 7 on another-host, run directory /run)" in line


def test_a_launcher_that_wakes_up_at_its_end_does_not_empty_the_file_of_another_job(tmp_path: Path) -> None:
    lock = SaveLock(tmp_path / "save", tmp_path)
    other = msgspec.json.encode(save_lock._Holder(launcher.LauncherProcess("another-host", 7, 1), "/run", "today"))
    (tmp_path / "save" / LOCK).write_bytes(other)
    lock.release(PATIENCE_S)
    assert (tmp_path / "save" / LOCK).read_bytes() == other


def test_a_job_whose_folder_was_taken_over_ends_as_after_a_signal() -> None:
    loop, sent, said = Loop(), list[Any](), list[str]()
    job: Any = Namespace(shutdown_s=None, nodes=())
    end = RunEnd(
        job, loop=loop, deadlines=Deadlines.of(), says=said.append, send=sent.append,
        has_begun=lambda: True, promise=lambda: "all end", is_alone=lambda: False, request=EndRequest(),
    )  # fmt: skip
    asking = threading.Thread(target=end.ask, args=("taken",))
    asking.start()
    asking.join()
    loop.run_once(1.0)
    loop.close()
    assert (sent, said) == ([EndAsked("taken")], ["taken: all end"])
