"""Named properties that all replicas must share at the start, to describe any difference.

Pure functions. Each rank makes its parts (names and values as text), its leader combines those of
all ranks, and the coordinator compares the replicas: first their fingerprints, and if these differ,
their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Parts = tuple[tuple[str, str], ...]
"""(name, value or its digest) pairs, in an order that is equal on all replicas."""


class Alike(NamedTuple):
    """The parts that must be equal on the same rank of every replica."""

    configuration: Parts
    """All that does not change while the job runs; newcomers are compared by it."""
    beginning: Parts
    """All that is compared when they start: all arguments, and the state that they begin with."""


SHOWN = 5
"""Most differences that are described one by one; the rest is counted."""
_ABSENT = "not there"


def combined(of_ranks: Sequence[Parts]) -> Parts:
    """Return a replica's parts from those of its ranks, in rank order.

    A name has one part where all ranks that have the name agree on its value. Otherwise it has one
    part for each of these ranks.
    """
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
    """Return (name, value in `one`, value in `other`) of each difference, in the order of `one`.

    Names that only `other` has come last. The value of a name that one lacks is "not there".
    """
    mine, theirs = dict(one), dict(other)
    names = dict.fromkeys([*mine, *theirs])
    return [(name, mine.get(name, _ABSENT), theirs.get(name, _ABSENT)) for name in names if mine.get(name) != theirs.get(name)]


def described(one: int, other: int, found: Sequence[tuple[str, str, str]]) -> str:
    """Describe the differences between two replicas, at most `SHOWN` of them one by one."""
    lines = [f"{name} is {mine} on replica {one} and {theirs} on replica {other}" for name, mine, theirs in found[:SHOWN]]
    more = [f"{len(found) - SHOWN} more differ"] if len(found) > SHOWN else []
    return "; ".join([*lines, *more])
