"""Multisets of microbatch ids, which simulated ranks hold instead of gradient.

`counts[i]` is how often microbatch i is in a multiset. So exactly-once is checked in the data
(INV-1).
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_recover.core.values import Record

Multiset = tuple[int, ...]


def add(parts: Iterable[Multiset]) -> Multiset:
    """Return the sum of multisets."""
    return tuple(map(sum, zip(*parts, strict=True)))


def checksum(counts: Multiset) -> int:
    """Return what replaces the checksum of a result: equal on all ranks that reduced it."""
    value = 0
    for count in counts:
        value = value * 10 + count
    return value


def voted(counts: Multiset, *, drifted: bool) -> int:
    """Return what replaces the checksum that is voted on, which covers the parameters, too.

    `drifted`: the parameters differ from those of the other replicas.
    """
    return -checksum(counts) if drifted else checksum(counts)


def state_digest(step: int, rank: int, *, drifted: bool) -> int:
    """Return what replaces the digest of all state with which a rank begins a step.

    `drifted`: this state differs from that of the other replicas.
    """
    return 1000 * step + 10 * rank + drifted


def digest(record: Record, *, drifted: bool) -> str:
    """Return what replaces the digest of the parameters that a committed step has made."""
    return str(([(item.bucket, item.version) for item in record.versions], drifted))
