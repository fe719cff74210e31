"""What the memory of a simulated rank holds instead of gradient: a multiset of microbatch ids.

Exactly-once is checked in the data that way (INV-1): `counts[i]` is how often microbatch i is in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_recover.core.values import Record

Multiset = tuple[int, ...]


def add(parts: Iterable[Multiset]) -> Multiset:
    """The sum of multisets."""
    return tuple(map(sum, zip(*parts, strict=True)))


def checksum(counts: Multiset) -> int:
    """Stands for the checksum of a result's bytes, which is the same on all that reduced it."""
    value = 0
    for count in counts:
        value = value * 10 + count
    return value


def voted(counts: Multiset, *, drifted: bool) -> int:
    """Stands for the checksum that is voted on: it covers the parameters, too. `drifted`: they are not those of the others."""
    return -checksum(counts) if drifted else checksum(counts)


def state_digest(step: int, rank: int, *, drifted: bool) -> int:
    """Stands for the digest of all state that a rank begins a step with. `drifted`: it is not that of the other replicas."""
    return 1000 * step + 10 * rank + drifted


def digest(record: Record, *, drifted: bool) -> str:
    """Stands for the digest of the parameters that a committed step has made."""
    return str(([(item.bucket, item.version) for item in record.versions], drifted))
