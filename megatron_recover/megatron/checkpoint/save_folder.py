"""The folder of `--save`: complete and partial checkpoints, the tracker, the lock of the writer.

Decides how a checkpoint becomes part of the folder. It never decides when a checkpoint is due.

Note [When a checkpoint exists]
    A checkpoint is written below `.partial`. So all that is there can be removed without any check,
    and all that has a checkpoint's name is complete.

    Each save has a folder of its own there, with a random name, and only what is in it gets a name.
    The lock excludes two writers only where it works between their hosts. Where it does not, a
    writer that stood still may wake up while another one writes. The other one has removed all that
    was there, so the first finds its folder gone, and its save fails. Before a folder is removed it
    is renamed: none of it is moved out while it is removed. The file `begun` in it goes with it, so
    a folder that a slow rank makes again counts as gone.

    When all of a checkpoint is written, it is synced and moved to its name in one rename. An older
    branch (`--ckpt-step`) may have left a complete checkpoint of this iteration. Then the two
    change places in one step (NFS: `_exchange`), and the older checkpoint is removed after the
    tracker names the new one.

    Megatron opens the tracker for writing, which empties the file, and then writes the iteration.
    Here the tracker is written beside its name, synced and renamed. So whichever process dies, the
    tracker always names a complete checkpoint: the previous one or the new one. One exception is
    left, on a file system that cannot exchange two names (NFS), where the tracker already names the
    iteration that is saved again: between two renames that name is missing, and the older
    checkpoint is complete under the same name with `.replaced`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_recover.host import lock_file
from megatron_recover.host.whole_file import exchange, sync

TRACKER = "latest_checkpointed_iteration.txt"
PARTIAL = ".partial"
_LOCK = ".writer.lock"
_BEGUN = "begun"
"""File in the folder of a save."""
_TOKEN_LENGTH = 16
"""Length of the name of that folder, in hexadecimal digits."""
_SAMPLES = "samples.json"
"""File in each checkpoint that describes the samples of the run (`alike.samples`)."""
_RUN_ID = "wandb_run_id.txt"
"""File in each checkpoint with the id of its run at Weights & Biases, if it has one."""


class SaveFolder:
    """One folder of checkpoints.

    Only rank 0 of a replica calls its methods. Other ranks make the object to read `path` and
    `partial`. Where the folder cannot be written or read, methods raise OSError, except `named` and
    `has`.
    """

    def __init__(self, path: str | Path, lock_s: float) -> None:
        """Look at the tracker in `path`. Raises OSError if that is not possible.

        `lock_s` is the number of seconds to wait for the lock. A writer that was declared dead
        holds the lock until its process has ended.
        """
        self._lock_s = lock_s
        self.path = Path(path)
        self.partial = self.path / PARTIAL
        """Folder in which checkpoints are written, each in a folder of its own."""
        self.own: Path | None = None
        """Folder of the save that this writer has begun; None: there is none. Rank 0 tells it to
        the other ranks."""
        self._begun = self.partial
        """The checkpoint in it."""
        self.is_published = False
        """True if the checkpoint that was begun last has its name. Its folder may then have an
        older one of that name, which must never go back."""
        self._at_first = self._identity()

    def named(self) -> int:
        """Return the iteration that the tracker names; -1 if there is none or it cannot be read."""
        try:
            return named_in(self.path)
        except OSError:
            return -1

    def is_ahead(self, iteration: int) -> bool:
        """Return whether this job has saved a later iteration than `iteration`."""
        return self.has(iteration + 1)

    def has(self, iteration: int) -> bool:
        """Return whether this job has saved `iteration` or a later one.

        True only if the tracker has changed since this object was created. False if the tracker
        cannot be read (NFS answers ESTALE, EACCES or EIO): the writer then tries to save, and
        learns whether it can.
        """
        try:
            return self.named() >= iteration and self._identity() != self._at_first
        except OSError:
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the writer's lock of the folder, and create the folder if there is none.

        Raises TimeoutError if another process still holds the lock after `lock_s` seconds.
        The kernel releases the lock of a dead writer. A writer that only seems dead keeps the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with lock_file.opened(self.path / _LOCK) as file:
            if not lock_file.acquired(file, self._lock_s):
                raise TimeoutError(f"another writer holds {self.path / _LOCK}; does another job save there?")
            yield

    def clear(self) -> list[int]:
        """Remove all partial checkpoints, whose ever they are; return their iterations.

        Their folder is created if there is none.
        """
        self.partial.mkdir(exist_ok=True)
        names: list[str] = []
        for each in sorted(self.partial.iterdir()):
            if each.is_dir() and not each.is_symlink():
                names += (each.name, *os.listdir(each))  # earlier versions had no folder for each save
                _remove(each)
            else:
                each.unlink()
        numbers = (name.removeprefix("iter_") for name in names if name.startswith("iter_"))
        return sorted(int(number) for number in numbers if number.isdecimal())  # else moved aside (`_exchange`)

    def begin(self, iteration: int) -> None:
        """Create the folder of a partial checkpoint, so that a full disk shows before the save."""
        self.own, self.is_published = self.partial / secrets.token_hex(_TOKEN_LENGTH // 2), False
        self._begun = self.own / f"iter_{iteration:07d}"
        self._begun.mkdir(parents=True)
        (self.own / _BEGUN).touch()

    def describe(self, samples: Mapping[str, str], run_id: str = "") -> None:
        """Store `samples` (`alike.samples`) in the partial checkpoint, to be published with it.

        `run_id` (`wandb_run.py`) is stored as well, unless it is empty.
        """
        self._check_begun()
        (self._begun / _SAMPLES).write_text(json.dumps(samples))
        if run_id:
            (self._begun / _RUN_ID).write_text(run_id)

    def publish(self) -> None:
        """Give the checkpoint that was begun its name, durably; call it when all of it is written.

        An older checkpoint of that name moves to the place of the partial one.
        """
        _sync_tree(self._begun)
        self._check_begun()
        target = self.path / self._begun.name
        if os.path.lexists(target):
            _exchange(self._begun, target)
        else:
            os.rename(self._begun, target)
        sync(self.path)
        self.is_published = True

    def discard(self) -> None:
        """Remove the folder of the save that was begun, if there is one."""
        if self.own is not None:
            shutil.rmtree(self.own)
            self.own = None

    def _check_begun(self) -> None:
        """Raise FileNotFoundError if the folder of the save was removed meanwhile."""
        if self.own is None or not (self.own / _BEGUN).exists():
            why = "another writer has removed it before it was complete (do locks work between the hosts?)"
            raise FileNotFoundError(errno.ENOENT, why, str(self._begun))

    def _identity(self) -> tuple[int, int] | None:
        """Return (inode, modification time) of the tracker, which change with each save.

        None without a tracker. Raises OSError if it cannot be looked at.
        """
        try:
            status = os.stat(self.path / TRACKER)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_mtime_ns


def final(path: str) -> str:
    """Return a path or URI of a partial checkpoint as it is once the checkpoint has its name."""
    return re.sub(rf"/{re.escape(PARTIAL)}/[0-9a-f]{{{_TOKEN_LENGTH}}}/", "/", path)


def named_in(path: Path) -> int:
    """Return the iteration that the tracker in the folder `path` names.

    Returns -1 if there is no tracker or it names no iteration. Raises OSError if the tracker cannot
    be read.
    """
    try:
        text = (path / TRACKER).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return -1
    return int(text) if text.isdigit() else -1


def samples_of(path: Path, iteration: int) -> dict[str, str] | None:
    """Return the description of a run's samples that a checkpoint contains, or None.

    Checkpoints of upstream, and older ones, contain no description. A damaged one counts as none.
    Raises OSError if it cannot be read.
    """
    try:
        found = json.loads((path / f"iter_{iteration:07d}" / _SAMPLES).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def run_id_of(path: Path, iteration: int) -> str:
    """Return the run id in a checkpoint (`SaveFolder.describe`), or "" if it has none.

    Raises OSError if it cannot be read.
    """
    try:
        return (path / f"iter_{iteration:07d}" / _RUN_ID).read_text().strip()
    except FileNotFoundError:
        return ""


def _exchange(new: Path, old: Path) -> None:
    """Let two entries change places, in one step where the file system can."""
    if exchange(new, old):
        return
    # Without an exchange (NFS): meanwhile the older checkpoint is complete under a name that
    # nothing removes while the newer one has none.
    aside = old.with_name(f"{old.name}.replaced")
    if os.path.lexists(aside):  # of a writer that died below, before the last line
        os.rename(aside, new.with_name(aside.name))
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:  # such as where another writer has removed the new one
        with contextlib.suppress(OSError):
            os.rename(aside, old)
        raise
    os.rename(aside, new)


def _remove(folder: Path) -> None:
    """Remove a folder of another save. See Note [When a checkpoint exists]."""
    gone = folder.with_name(f"removed-{secrets.token_hex(_TOKEN_LENGTH // 2)}")
    try:
        os.rename(folder, gone)
    except FileNotFoundError:
        return
    except OSError:  # a full disk may refuse even that, and needs the removal most
        gone = folder
    shutil.rmtree(gone)


def _sync_tree(folder: Path) -> None:
    """Sync a folder and all files in it to disk, whichever process of this machine wrote them."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in sorted(files):
            sync(Path(parent, name))
        sync(Path(parent))
