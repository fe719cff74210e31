"""Checks of the folders that flags name: whether this node can do there what the run will do.

Every folder has a process of its own (`folder_probe.py`), so a disk that does not answer delays
neither this process nor the check of another folder.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from megatron_recover.cluster.doctor.findings import Check, Finding, Folder, fail, ok, warn
from megatron_recover.cluster.doctor.folder_probe import Deed
from megatron_recover.config import module_command
from megatron_recover.core.wording import counted

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
"""The acts of a run in the folder of each flag. A checkpoint gets its name by a rename, under the
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
    """The output of `folder_probe`."""

    place: str = ""
    is_folder: bool = True
    free: int = 0
    total: int = 0
    files: int = -1
    failed: tuple[Deed, str] | None = None
    is_full: bool = False
    exchanges: bool = True
    error: str = ""
    """Reason why the folder cannot be looked at; empty if it can."""


class Probes:
    """The processes of `folder_probe`, one for each request."""

    def __init__(self, requests: Sequence[Sequence[str]]) -> None:
        """Start them. Raises OSError if there can be none."""
        self._num = len(requests)
        self._process: subprocess.Popen[bytes] | None = None
        if requests:
            self._process = subprocess.Popen(
                [*module_command(_PROBE), msgspec.json.encode(requests).decode()],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def answers[Answer](self, kind: type[Answer], timeout_s: float) -> list[Answer | None]:
        """Return the answers in the order of the requests. Call it once.

        An answer that has not come after `timeout_s` seconds is None. All processes are killed
        then. Forks are not waited for: a disk may keep one from its end.
        """
        found: list[Answer | None] = [None] * self._num
        if self._process is None:
            return found
        for line in _lines(self._process, timeout_s):
            answer = msgspec.json.decode(line, type=_Line)
            found[answer.number] = msgspec.json.decode(answer.answer, type=kind)
        return found


class _Line(msgspec.Struct, frozen=True):
    number: int
    answer: msgspec.Raw


def _lines(process: subprocess.Popen[bytes], timeout_s: float) -> list[bytes]:
    """Return the whole lines that a process and its forks print until they have all ended."""
    assert process.stdout is not None
    until, text = time.monotonic() + max(_READ_S, timeout_s), b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    with process.stdout:
        while poll.poll(1000 * max(0.0, until - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 2**16)
            if not chunk:
                break
            text += chunk
        else:
            os.killpg(process.pid, signal.SIGKILL)  # it is not reaped, so its number is its own
    process.wait()  # for the first process, which is on no disk
    return text.split(b"\n")[:-1]


class Trials:
    """The attempts to do in some folders what a run does there, all at the same time."""

    def __init__(self, folders: Sequence[Folder]) -> None:
        """Begin."""
        self._folders, self._why = folders, ""
        try:
            self._probes = Probes([("try", each.path, *DEEDS[each.check]) for each in folders])
        except OSError as error:
            self._why = f"cannot be tried: no process can be started ({error.strerror})"

    def findings(self, timeout_s: float) -> list[Finding]:
        """Wait up to `timeout_s` seconds for the end of the attempts, and judge them."""
        if self._why:
            return [fail(each.check, f"{each.path} {self._why}", "raise `ulimit -u`") for each in self._folders]
        tried = self._probes.answers(Tried, timeout_s)
        return [judged(folder, answer) for folder, answer in zip(self._folders, tried, strict=True)]


def judged(folder: Folder, tried: Tried | None) -> Finding:
    """Return the finding about a folder; None: there is no answer. Pure."""
    check, path = folder.check, folder.path
    if tried is None:
        return warn(check, f"{path} does not answer", "see to its disk, or give another folder")
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
        return warn(check, f"{value}, and {counted(tried.files, 'file')} can be added", "remove files, or give another folder")
    return ok(check, value + ("" if tried.exchanges else "; its file system cannot exchange two names"))
