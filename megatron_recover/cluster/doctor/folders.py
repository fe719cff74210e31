"""Checks of the folders that flags name: whether this node can do there what the run will do.

Every folder has a process of its own (`folder_probe.py`), so a disk that does not answer delays
neither this process nor the check of another folder.
"""

from __future__ import annotations

import contextlib
import signal
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


class Trial:
    """The process that tries one folder. Raises OSError if it cannot be started."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        command = [*module_command(_PROBE), folder.path, *DEEDS[folder.check]]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )  # fmt: skip

    def finding(self, timeout_s: float) -> Finding:
        """Wait up to `timeout_s` seconds for the process, and judge what it found.

        A process that is late is killed and not waited for: its disk may keep it from its end.
        """
        try:
            text = self._process.communicate(timeout=max(_READ_S, timeout_s))[0]
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGKILL)
            return warn(self._folder.check, f"{self._folder.path} does not answer", "see to its disk, or give another folder")
        try:
            return judged(self._folder, msgspec.json.decode(text, type=Tried))
        except msgspec.DecodeError:
            return warn(self._folder.check, f"{self._folder.path} could not be tried", "give the command again")


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
