"""The folder of `--save`: what in it is complete, which checkpoint is the latest, and who may write.

Decides how a checkpoint becomes part of the folder. It never decides when one is due, and never looks into one.

Note [When a checkpoint exists]
    A checkpoint is written below `.partial`, so whatever is there is partial and what has a checkpoint's name is complete: no
    guess is needed to remove the one and never the other. When all of it is written, it is synced and moved to its
    name in one rename; if an older branch (`--ckpt-step`) left a complete one of that iteration, the two change places in one
    step, and the older one is removed once the tracker names the new one. Megatron opens the tracker for writing, which
    empties it, and then writes the iteration; here it is written beside its name, synced and renamed. So at every instant,
    whoever dies, the tracker names a complete checkpoint: the previous one or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_recover.host import lock_file
from megatron_recover.host.whole_file import sync

TRACKER = "latest_checkpointed_iteration.txt"
PARTIAL = ".partial"
_LOCK = ".writer.lock"
_SAMPLES = "samples.json"
"""In the folder of each checkpoint."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class SaveFolder:
    """One folder of checkpoints; used by rank 0 of a replica, but for `partial`."""

    def __init__(self, path: str | Path, lock_s: float) -> None:
        """`lock_s`: how long to wait for a writer that was declared dead to be dead. It holds the lock to its end."""
        self._lock_s = lock_s
        self.path = Path(path)
        self.partial = self.path / PARTIAL
        """Where checkpoints are written."""
        self._at_first = self._identity()

    def named(self) -> int:
        """The iteration that the tracker names; -1 if there is none, or none that can be read."""
        try:
            return named_in(self.path)
        except OSError:
            return -1

    def has(self, iteration: int) -> bool:
        """Whether this job has saved `iteration` or a later one: a tracker that was there before it is no proof of that.

        Nor is one that cannot be read (NFS answers ESTALE, EACCES or EIO): whoever writes then finds out whether it can.
        """
        try:
            return self.named() >= iteration and self._identity() != self._at_first
        except OSError:
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one writer. A dead writer's kernel gives it back; one that only seems dead is waited for."""
        self.path.mkdir(parents=True, exist_ok=True)
        with lock_file.opened(self.path / _LOCK) as file:
            if not lock_file.is_held(file, self._lock_s):
                raise TimeoutError(f"another writer holds {self.path / _LOCK}; does another job save there?")
            yield

    def clear(self) -> list[str]:
        """Remove everything partial, and make room for the next; the names of what was there."""
        self.partial.mkdir(exist_ok=True)
        found = sorted(self.partial.iterdir())
        for each in found:
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()
        return [each.name for each in found]

    def describe(self, samples: Mapping[str, str]) -> None:
        """Put what decides which samples the run reads into the checkpoint that is being written. It is published with it."""
        for each in self.partial.glob("iter_*"):
            (each / _SAMPLES).write_text(json.dumps(samples))

    def publish(self) -> None:
        """What was written is complete: give it its name, durably."""
        for each in sorted(self.partial.iterdir()):
            _sync_tree(each)
            target = self.path / each.name
            if os.path.lexists(target):
                _exchange(each, target)
            else:
                os.rename(each, target)
        sync(self.path)

    def _identity(self) -> tuple[int, int] | None:
        """Of the tracker file: another one after every save."""
        try:
            status = os.stat(self.path / TRACKER)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_mtime_ns


def named_in(path: Path) -> int:
    """Return the iteration that the tracker of a folder of checkpoints names; -1 if there is none."""
    try:
        text = (path / TRACKER).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return -1
    return int(text) if text.isdigit() else -1


def samples_of(path: Path, iteration: int) -> dict[str, str] | None:
    """Return what a checkpoint says of the samples that its run read, or None if it says nothing (older, or upstream's)."""
    try:
        found = json.loads((path / f"iter_{iteration:07d}" / _SAMPLES).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _exchange(new: Path, old: Path) -> None:
    """Let two entries change places in one step, where the file system can."""
    if _renameat2(new, old):
        return
    # Two steps (NFS): between them the older one is complete under another name that nothing here ever removes.
    aside = old.with_name(f"{old.name}.replaced")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def _renameat2(new: Path, old: Path) -> bool:
    """Linux's exchange of two entries; False where library or file system do not have it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(old))


def _sync_tree(folder: Path) -> None:
    """Have all of it on the disk, whichever process of this machine wrote it."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in sorted(files):
            sync(Path(parent, name))
        sync(Path(parent))
