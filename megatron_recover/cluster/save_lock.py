"""The lock of a job on its `--save` folder: a second live job there is refused, before it starts.

Note [When the first job is dead]
    The file `.job.lock` names the job that holds it. Its launcher holds the kernel's lock on the
    file, and rewrites the file every `_BEAT_S` seconds. A job that ends well empties the file.

    - The kernel's lock is held: the first job lives, wherever it is.
    - The lock is free, and the file names a process of this host: the process has ended, since the
      kernel of this host released its lock. Of a job of several nodes the file also names the
      coordinator, which outlives the launcher while the other nodes train on. If it has not ended
      within `_WATCH_S`, the job lives.
    - The lock is free, and the file names another host: either that job is dead, or locks do not
      work between the two hosts. So the file is watched for `_WATCH_S`. If it changes, the job
      lives.
    - The file system has no locks: a process of this host is looked up by its id and start time;
      one of another host is watched.

    Where locks do not work between two hosts, a launcher that stood still for `_WATCH_S` counts as
    dead, and another job takes the file over. So the launcher reads the file before it rewrites or
    empties it. If the file names another job, it leaves the file alone, and its own job ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from megatron_recover.host import lock_file
from megatron_recover.host.addresses import host_name
from megatron_recover.host.in_use import InUse
from megatron_recover.observe.follow import launcher

LOCK = ".job.lock"
_BEAT_S = 5.0
"""Seconds between two changes of the file by a job that lives."""
_WATCH_S = 15.0
"""Seconds for which the file of a job of another host must not change, so that the job counts as
dead."""
_LOOK_S = 0.2


class _Holder(msgspec.Struct, frozen=True):
    """The job that a lock file names."""

    process: launcher.LauncherProcess
    run_dir: str
    since: str
    """Local time of its start, with the offset from UTC."""
    coordinator: launcher.LauncherProcess | None = None
    """The process of its coordinator, if the job has several nodes."""
    beat: int = 0
    """Number of times that the file was rewritten."""


class SaveLock:
    """The lock of this job. `release` it, or end the process."""

    def __init__(self, folder: Path, run_dir: Path, coordinator: int | None = None) -> None:
        """Take the lock of the `--save` folder, which is created if there is none.

        `coordinator`: id of the process of the coordinator, if the job has several nodes.

        Raises InUse that names the first job if that lives, and OSError if the folder cannot
        be written.
        """
        self._made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._stack = folder / LOCK, contextlib.ExitStack()
        self._holder = _Holder(
            launcher.this_process(), str(run_dir), time.strftime("%Y-%m-%d %H:%M:%S %z"),
            coordinator=launcher.process_of(coordinator) if coordinator is not None else None,
        )  # fmt: skip
        self._over, self._writing = threading.Event(), threading.Lock()
        self._taken = ""
        """Line about the job that has taken the file over; empty if none has."""
        self._on_taken: Callable[[str], None] = lambda why: None
        try:
            self._file = self._stack.enter_context(lock_file.opened(self._path))
            self._refuse_second(folder)
            self._write(msgspec.json.encode(self._holder))
        except BaseException:
            self._stack.close()
            raise
        threading.Thread(target=self._beat, name="save-lock", daemon=True).start()

    def tell(self, on_taken: Callable[[str], None]) -> None:
        """Call `on_taken(line)` once if another job takes the lock over, in any thread."""
        with self._writing:
            self._on_taken = on_taken
            if self._taken:
                on_taken(self._taken)

    def release(self, patience_s: float) -> None:
        """Give the lock back. Remove the folder if this job made it and saved nothing there.

        If the disk takes longer than `patience_s` seconds, leave the file as it is: the kernel
        releases the lock when this process ends.
        """
        self._over.set()
        giving_back = threading.Thread(target=self._give_back, name="save-lock-end", daemon=True)
        giving_back.start()
        giving_back.join(patience_s)

    def _give_back(self) -> None:
        with self._stack, contextlib.suppress(OSError), self._writing:  # a beat may still wait for the disk
            if self._is_taken():
                return
            self._write(b"")
            if self._made and [each.name for each in self._path.parent.iterdir()] == [LOCK]:
                self._path.unlink()
                self._path.parent.rmdir()

    def _refuse_second(self, folder: Path) -> None:
        """Take the kernel's lock. Raise InUse if another job lives that saves here."""
        has_locks = True
        try:
            is_free = lock_file.acquired(self._file, 0.0)
        except OSError:
            has_locks, is_free = False, True
        holder = _holder_of(self._file)
        if is_free and (holder is None or not self._lives(holder, has_locks=has_locks)):
            return
        if holder is None:
            raise InUse(f"--save {folder} is in use by another job, which is just starting; give another folder")
        process = holder.process
        alone = ""
        if is_free and holder.coordinator is not None and process.host == host_name() and not launcher.is_running(process):
            alone = (
                f" (which has ended; its coordinator, process {holder.coordinator.pid}, has not, and its other nodes may train)"
            )
        raise InUse(
            f"--save {folder} is in use by another job: process {process.pid} on {process.host}{alone}, run directory "
            f"{holder.run_dir}, since {holder.since}; end that job first, or give another folder"
        )

    def _lives(self, holder: _Holder, *, has_locks: bool) -> bool:
        """Return whether a job lives whose lock is free. See Note [When the first job is dead]."""
        is_here, until = holder.process.host == host_name(), time.monotonic() + _WATCH_S
        if is_here and not has_locks and launcher.is_running(holder.process):
            return True
        while is_here and holder.coordinator is not None and launcher.is_running(holder.coordinator):
            if time.monotonic() > until:
                return True
            time.sleep(_LOOK_S)
        while not is_here and time.monotonic() < until:
            time.sleep(_LOOK_S)
            if self._holder_now() != holder:
                return True
        return False

    def _beat(self) -> None:
        while not self._taken and not self._over.wait(_BEAT_S):
            self._holder = msgspec.structs.replace(self._holder, beat=self._holder.beat + 1)
            with contextlib.suppress(OSError), self._writing:
                if not self._over.is_set() and not self._is_taken():
                    self._write(msgspec.json.encode(self._holder))

    def _is_taken(self) -> bool:
        """Return whether the file names another job. The first time, tell so. Raises OSError."""
        holder = self._holder_now()
        if not self._taken and holder is not None and holder.process != self._holder.process:
            process = holder.process
            self._taken = (
                f"--save {self._path.parent} was taken over by another job (process {process.pid} on {process.host}, run "
                f"directory {holder.run_dir}), since this launcher stood still and locks do not work between the two hosts"
            )
            self._on_taken(self._taken)
        return bool(self._taken)

    def _holder_now(self) -> _Holder | None:
        """Return the job that the file names. Raises OSError."""
        with open(self._path, encoding="utf-8") as again:  # anew: some file systems look only then
            return _holder_of(again)

    def _write(self, content: bytes) -> None:
        """Write the file, without a buffer: one whose write stands still could not be closed."""
        descriptor = self._file.fileno()
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)  # NFS: without it other hosts see the file half a minute later


def _holder_of(file: IO[str]) -> _Holder | None:
    """Return the job that a lock file names; None if it is empty or just being written."""
    file.seek(0)
    try:
        return msgspec.json.decode(file.read(), type=_Holder)
    except msgspec.MsgspecError:
        return None
