"""Checks of the folders that flags name: whether this node can do there what the run will do.

Every folder has a process of its own (`folder_probe.py`), so a disk that does not answer delays
neither this process nor the check of another folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from megatron_recover.cluster.doctor.findings import Check, Finding, Folder, fail, ok, warn
from megatron_recover.cluster.doctor.folder_probe import Deed
from megatron_recover.config import module_command

_PROBE = "megatron_recover.cluster.doctor.folder_probe"
_LITTLE_BYTES, _FEW_FILES = 2**30, 1000
_MIB = 2**20
_READ_S = 0.1
"""Seconds to read what a process has written, also where another one has used up all time."""
DEEDS: Mapping[Check, tuple[Deed, ...]] = MappingProxyType({
    Check.SAVE: ("write", "rename", "lock"),
    Check.LOAD: (),
    Check.RUN_DIR: ("write", "rename"),
    Check.CACHE: ("write", "rename", "lock"),
    Check.TENSORBOARD: ("write",),
})  # fmt: skip
"""What a run does in the folder of each flag. A checkpoint gets its name by a rename, under the
lock of its writer; the index cache is built by one process at a time, in the same way."""
_DEED_IN_WORDS: Mapping[Deed, str] = {
    "write": "nothing can be written", "rename": "nothing can be renamed", "lock": "files have no locks",
}  # fmt: skip
_REMEDY: Mapping[Deed, str] = {
    "write": "make it writable, or give another folder",
    "rename": "give a folder on another file system",
    "lock": "mount it with locks (Lustre: -o flock; NFS: without nolock), or give another folder",
}


class Tried(msgspec.Struct, frozen=True):
    """What `folder_probe` prints."""

    place: str = ""
    is_folder: bool = True
    free: int = 0
    total: int = 0
    files: int = -1
    failed: tuple[Deed, str] | None = None
    is_full: bool = False
    exchanges: bool = True
    error: str = ""
    """Why the folder cannot be looked at; empty if it can."""


class Probe:
    """A process of `folder_probe`."""

    def __init__(self, *words: str) -> None:
        """Start the process. Raises OSError if there can be none."""
        self._process = subprocess.Popen(
            [*module_command(_PROBE), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )  # fmt: skip

    def answer[Answer](self, kind: type[Answer], timeout_s: float) -> Answer | None:
        """Return what the process prints; None if it has not done so after `timeout_s` seconds.

        A process that is late is killed and not waited for: its disk may keep it from its end.
        Raises msgspec.DecodeError if the process has died instead.
        """
        try:
            text = self._process.communicate(timeout=max(_READ_S, timeout_s))[0]
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None
        return msgspec.json.decode(text, type=kind)


class Trial:
    """The attempt to do in one folder what a run does there."""

    def __init__(self, folder: Folder) -> None:
        """Begin. Raises OSError if no process can be started."""
        self._folder = folder
        self._probe = Probe("try", folder.path, *DEEDS[folder.check])

    def finding(self, timeout_s: float) -> Finding:
        """Wait up to `timeout_s` seconds for the end of the attempt, and judge it."""
        check, path = self._folder.check, self._folder.path
        try:
            tried = self._probe.answer(Tried, timeout_s)
        except msgspec.DecodeError:
            return warn(check, f"{path} could not be tried", "give the command again")
        if tried is None:
            return warn(check, f"{path} does not answer", "see to its disk, or give another folder")
        return judged(self._folder, tried)


def judged(folder: Folder, tried: Tried) -> Finding:
    """Return the finding about a folder. Pure."""
    check, path = folder.check, folder.path
    if tried.error:
        return fail(check, f"{path} cannot be looked at ({tried.error})", "make it readable, or give another folder")
    if not tried.is_folder:
        return fail(check, f"{path}: {tried.place} is no folder", "give another")
    if tried.failed is not None:
        deed, why = tried.failed
        where = path if tried.place == path else f"{path}: in {tried.place}"
        return fail(check, f"{where} {_DEED_IN_WORDS[deed]} ({why})", _REMEDY[deed])
    exists = tried.place.rstrip("/") == path.rstrip("/")
    value = f"{path} {'is there' if exists else f'is to be made in {tried.place}'}, {tried.free // _MIB} MiB free"
    if check is Check.LOAD:
        return ok(check, value if exists else f"{path} is not there: training begins without a checkpoint")
    if tried.is_full or tried.free < _LITTLE_BYTES:
        return warn(check, value, "make room, or give another folder")
    if 0 <= tried.files < _FEW_FILES:
        return warn(check, f"{value}, and {tried.files} files can be added", "remove files, or give another folder")
    return ok(check, value + ("" if tried.exchanges else "; its file system cannot exchange two names"))
