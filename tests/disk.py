"""A disk of its own whose faults are real: its writes or reads stand still, it is full, or it fails.

It is an ext4 file system in an image, which needs root and a loop device. Whoever writes while it is frozen (FIFREEZE), or
reads what is not in memory while the kernel lets nothing through (the blkio controller of cgroup v1), waits in state D, which
no signal ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

_FIFREEZE, _FITHAW, _EXT4_IOC_SHUTDOWN = 0xC0045877, 0xC0045878, 0x8004587D
_IMAGE_BYTES = 16 * 2**20
_FILLER = "filler"
_DEADLINE_S = 30.0
_GUARD = f"""
import contextlib, fcntl, os, subprocess, sys
place, rule, device = sys.argv[1:]
sys.stdin.read()
if not os.path.ismount(place):
    sys.exit()
with contextlib.suppress(OSError), open(rule, "w") as file:
    file.write(device + " 0")
folder = os.open(place, os.O_RDONLY)
with contextlib.suppress(OSError):
    fcntl.ioctl(folder, {_FITHAW}, 0)
os.close(folder)
subprocess.run(["umount", "--lazy", place])
"""


class Disk:
    """A small ext4 file system in an image, and what can happen to it."""

    def __init__(self, folder: pathlib.Path, num_bytes: int = _IMAGE_BYTES) -> None:
        """Make it in `folder`. Raises OSError where nobody may mount one."""
        self.place = folder / "disk"
        self._image = folder / "disk.img"
        self.place.mkdir(parents=True)
        with open(self._image, "wb") as file:
            file.truncate(num_bytes)
        _command("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        self._rule, self._guard = _rule(), None
        self._mount()

    def stall(self, *, on: bool) -> None:
        """Let writes block, or go on."""
        self._ioctl(_FIFREEZE if on else _FITHAW)

    def stall_reads(self, *, on: bool) -> None:
        """Let reads of what is not in memory block, or go on. Skips the test where this cannot be had."""
        if self._rule is None:
            pytest.skip("this machine has no blkio controller of cgroup v1, which holds back the reads of a disk")
        self._rule.write_text(f"{self._device} {int(on)}")  # bytes a second; 0: as many as there are

    def fill(self) -> None:
        """Leave no room."""
        with open(self.place / _FILLER, "wb", buffering=0) as file:
            for size in (2**16, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
            os.fsync(file.fileno())

    def make_room(self) -> None:
        """Give back what `fill` took."""
        (self.place / _FILLER).unlink()

    def fail(self) -> None:
        """Let everything fail with EIO; what was written before is kept."""
        self._ioctl(_EXT4_IOC_SHUTDOWN)

    def forget(self) -> None:
        """Have all that is on the disk read from there again, and nothing ahead. No process may use it."""
        self._unmount()
        self._mount()
        pathlib.Path(f"/sys/dev/block/{self._device}/queue/read_ahead_kb").write_text("0")

    def rescue(self, run_dir: pathlib.Path, to: pathlib.Path) -> None:
        """Copy a folder off the disk, whatever state that is in, and give the disk up. No process may use it any more."""
        name = run_dir.relative_to(self.place)
        self._unmount()
        self._mount()
        shutil.copytree(self.place / name, to)
        self.close()

    def close(self) -> None:
        """Let go whom it holds, and remove the file system."""
        if self.place.is_mount():
            with contextlib.suppress(OSError):
                self.stall(on=False)
            if self._rule is not None:
                self.stall_reads(on=False)
            self._unmount()

    @property
    def _device(self) -> str:
        number = os.stat(self.place).st_dev
        return f"{os.major(number)}:{os.minor(number)}"

    def _mount(self) -> None:
        _command("mount", "-o", "loop", str(self._image), str(self.place))
        # It does what `close` does if this process is killed: a file system that stays frozen holds up whoever syncs.
        self._guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD, str(self.place), str(self._rule), self._device],
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def _unmount(self) -> None:
        until = time.monotonic() + _DEADLINE_S
        while True:
            try:
                _command("umount", str(self.place))
                break
            except OSError:  # somebody who is about to end has it open
                if time.monotonic() > until:
                    _command("umount", "--lazy", str(self.place))
                    raise
                time.sleep(0.05)
            finally:
                if not self.place.is_mount() and self._guard is not None:
                    self._guard.communicate(timeout=_DEADLINE_S)
                    self._guard = None

    def _ioctl(self, request: int) -> None:
        place = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(place, request, bytes(4))
        finally:
            os.close(place)


def _rule() -> pathlib.Path | None:
    """Return the file of this process's control group that limits what is read from a device; None if there is none."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            file = pathlib.Path("/sys/fs/cgroup/blkio") / path.lstrip("/") / "blkio.throttle.read_bps_device"
            return file if os.access(file, os.W_OK) else None
    return None


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_DEADLINE_S)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(folder: pathlib.Path, num_bytes: int = _IMAGE_BYTES) -> Iterator[Disk]:
    """A disk that is gone at the end, whoever it holds then. Skips the test where nobody may mount one."""
    try:
        disk = Disk(folder, num_bytes)
    except OSError as error:
        pytest.skip(f"this machine lets nobody mount an image: {error}")
    try:
        yield disk
    finally:
        disk.close()
