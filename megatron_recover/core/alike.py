"""What has to be alike on all replicas when they start, by name, so that a difference can be told with both values.

Pure: parts are names and values in text, made by each rank, put together by its leader, compared by the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence

Parts = tuple[tuple[str, str], ...]
"""(name, value or its digest), in an order that is equal on all replicas."""
SHOWN = 5
"""So many differences are told; the rest is counted."""
_ABSENT = "not there"


def together(of_ranks: Sequence[Parts]) -> Parts:
    """Return a replica's parts from those of its ranks in order: one where all that have it say the same, else one a rank."""
    values: dict[str, list[tuple[int, str]]] = {}
    for rank, parts in enumerate(of_ranks):
        for name, value in parts:
            values.setdefault(name, []).append((rank, value))
    found: list[tuple[str, str]] = []
    for name, said in values.items():
        if len({value for _, value in said}) == 1:
            found.append((name, said[0][1]))
        else:
            found += [(f"{name} of rank {rank}", value) for rank, value in said]
    return tuple(found)


def differences(one: Parts, other: Parts) -> list[tuple[str, str, str]]:
    """Return (name, value of the one, value of the other) of all that differs, in the order of the one."""
    mine, theirs = dict(one), dict(other)
    names = dict.fromkeys([*mine, *theirs])
    return [(name, mine.get(name, _ABSENT), theirs.get(name, _ABSENT)) for name in names if mine.get(name) != theirs.get(name)]


def told(one: int, other: int, found: Sequence[tuple[str, str, str]]) -> str:
    """Return in words what differs between two replicas."""
    lines = [f"{name} is {mine} on replica {one} and {theirs} on replica {other}" for name, mine, theirs in found[:SHOWN]]
    more = [f"{len(found) - SHOWN} more differ"] if len(found) > SHOWN else []
    return "; ".join([*lines, *more])
