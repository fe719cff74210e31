"""What the memory of a simulated rank holds instead of gradient: a multiset of microbatch ids.

Exactly-once is checked in the data that way (INV-1): `counts[i]` is how often microbatch i is in it.
"""

from __future__ import annotations

from collections.abc import Iterable

Multiset = tuple[int, ...]


def add(parts: Iterable[Multiset]) -> Multiset:
    """The sum of multisets."""
    return tuple(map(sum, zip(*parts, strict=True)))


def checksum(counts: Multiset) -> int:
    """Stands for the checksum of a result's bytes."""
    value = 0
    for count in counts:
        value = value * 10 + count
    return value
