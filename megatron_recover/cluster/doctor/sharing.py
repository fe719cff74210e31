"""The question if the nodes of a job see the same folder under the same path.

Node 0 leaves a file with a random name in each folder, the other nodes look for it, and node 0
removes it. A folder that does not exist is judged by the nearest one above it that node 0 has.
Every call takes at most `timeout_s` seconds, whatever a disk does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import msgspec

from megatron_recover.cluster.doctor.findings import Check, Folder
from megatron_recover.cluster.doctor.folders import Probes

Sight = Literal["seen", "absent", "unknown"]
"""A node's view of a mark; unknown: its disk does not answer, or node 0 could leave none."""
_DEADLINE_S = 3.0


class Mark(msgspec.Struct, frozen=True):
    """A file that node 0 has left for the others."""

    check: Check
    file: str
    """Empty if it could not be left."""


class _Marked(msgspec.Struct, frozen=True):
    file: str = ""


class _Look(msgspec.Struct, frozen=True):
    is_there: bool = False


def leave(folders: Sequence[Folder], timeout_s: float = _DEADLINE_S) -> list[Mark]:
    """Leave a mark in each folder; node 0 calls it, and later `remove`. Raises OSError."""
    name = os.urandom(16).hex()
    answers = Probes([("mark", each.path, f"{name}{each.check}") for each in folders]).answers(_Marked, timeout_s)
    return [Mark(each.check, answer.file if answer else "") for each, answer in zip(folders, answers, strict=True)]


def look(marks: Sequence[Mark], timeout_s: float = _DEADLINE_S) -> dict[str, Sight]:
    """Return what this node finds of each mark, by the flag of its folder. Raises OSError."""
    left = [each for each in marks if each.file]
    found: dict[str, Sight] = {each.check.value: "unknown" for each in marks}
    for each, answer in zip(left, Probes([("look", each.file) for each in left]).answers(_Look, timeout_s), strict=True):
        if answer is not None:
            found[each.check.value] = "seen" if answer.is_there else "absent"
    return found


def remove(marks: Sequence[Mark], timeout_s: float = _DEADLINE_S) -> None:
    """Remove the marks, once all nodes have looked. Raises OSError."""
    Probes([("remove", each.file) for each in marks if each.file]).answers(_Look, timeout_s)
