"""Whether the nodes of a job see the same folder under the same path.

Node 0 leaves a file with a random name in each folder, the other nodes look for it, and node 0
removes it. A folder that does not exist is judged by the nearest one above it that node 0 has.
Every call takes at most `timeout_s` seconds, whatever a disk does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from megatron_recover.cluster.doctor.findings import Check, Folder
from megatron_recover.cluster.doctor.folders import Probe

Sight = Literal["seen", "absent", "unknown"]
"""What a node finds of a mark; unknown: its disk does not answer, or node 0 could leave none."""
_DEADLINE_S = 3.0


class Mark(msgspec.Struct, frozen=True):
    """A file that node 0 has left for the others."""

    check: Check
    file: str
    """Empty if it could not be left."""


class _Marked(msgspec.Struct, frozen=True):
    file: str = ""


class _Look(msgspec.Struct, frozen=True):
    is_there: bool | None = None


def leave(folders: Sequence[Folder], timeout_s: float = _DEADLINE_S) -> list[Mark]:
    """Leave a mark in each folder; node 0 calls it, and later `remove`. Raises OSError."""
    name = os.urandom(16).hex()
    probes = {each.check: Probe("mark", each.path, f"{name}{each.check}") for each in folders}
    return [Mark(check, "" if answer is None else answer.file) for check, answer in _answers(probes, _Marked, timeout_s)]


def look(marks: Sequence[Mark], timeout_s: float = _DEADLINE_S) -> dict[str, Sight]:
    """Return what this node finds of each mark, by the flag of its folder. Raises OSError."""
    probes = {each.check: Probe("look", each.file) for each in marks if each.file}
    found: dict[str, Sight] = {each.check.value: "unknown" for each in marks}
    for check, answer in _answers(probes, _Look, timeout_s):
        if answer is not None and answer.is_there is not None:
            found[check.value] = "seen" if answer.is_there else "absent"
    return found


def remove(marks: Sequence[Mark], timeout_s: float = _DEADLINE_S) -> None:
    """Remove the marks, once all nodes have looked. Raises OSError."""
    probes = {each.check: Probe("remove", each.file) for each in marks if each.file}
    list(_answers(probes, _Look, timeout_s))


def _answers[Answer](probes: Mapping[Check, Probe], kind: type[Answer], timeout_s: float) -> list[tuple[Check, Answer | None]]:
    until = time.monotonic() + timeout_s
    found: list[tuple[Check, Answer | None]] = []
    for check, probe in probes.items():
        try:
            found.append((check, probe.answer(kind, until - time.monotonic())))
        except msgspec.DecodeError:
            found.append((check, None))
    return found
