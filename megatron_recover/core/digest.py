"""The digest and the outline that stand for a record in a vote.

All members of a generation hold the record that they vote for, so the record need not travel. The
functions are pure and give the same on every machine: msgpack has one encoding of a frozen value.

Note [Outline]
    The record is cut into parts: each field that voters have to agree on except `versions`, then
    `versions` in at most `MAX_GROUPS` runs, whose lengths differ by at most one. The digest covers
    the digests of all parts, so equal digests mean equal records, apart from requests and paces.

    The outline has the first bytes of each part's digest. The outline decides nothing. Where
    digests differ, it shows which fields and runs of buckets differ, or that their number does. Its
    size is bounded. If votes disagree, the records themselves are in the leaders' traces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from megatron_recover.core.values import BucketVersion, Commitment, Record, Value

DIGEST_BYTES = 16
"""Bytes of a record's digest. 128 bits suffice: nobody chooses records to make digests collide."""
MAX_GROUPS = 64
"""Most runs of buckets in an outline. With at most this many buckets each bucket is named alone."""
_PART_BYTES = 4
"""Bytes of each part in the outline."""
_COMPARED = tuple(name for name in Record.__struct_fields__ if name not in ("versions", "requests", "paces"))


class RecordSummary(Value, frozen=True):
    """The digest and the outline of a record."""

    digest: bytes
    """Digest of the `bare` record: two digests are equal exactly if the bare records are equal."""
    outline: bytes
    """The first bytes of the digest of each part, see Note [Outline]."""


def bare(record: Record) -> Record:
    """Return the record without requests and paces: the part that all votes must agree on."""
    return replace(record, requests=(), paces=())


def summarize(record: Record) -> RecordSummary:
    """Return the digest and the outline of a record without its requests and paces."""
    parts = [_digest((name, getattr(record, name))) for name in _COMPARED]
    parts += [_digest(versions) for versions in _groups(record.versions)]
    digest = hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()
    return RecordSummary(digest, b"".join(part[:_PART_BYTES] for part in parts))


def digest(record: Record) -> bytes:
    """Return the digest of a record, as in `summarize`."""
    return summarize(record).digest


def commitment(record: Record) -> Commitment:
    """Return a committed record without versions, for members that hold them, and its digest."""
    return Commitment(replace(record, versions=()), digest(record))


def differences(record: Record, outlines: Iterable[bytes]) -> str:
    """Describe the fields and runs of buckets in which these outlines differ from that of `record`.

    Of an outline with another number of parts, name only that. The text also says if none differs.
    """
    mine = _parts(summarize(record).outline)
    buckets = [_span(versions) for versions in _groups(record.versions)]
    names = [*(f"field {name!r}" for name in _COMPARED), *buckets]
    found: dict[str, None] = {}
    for outline in outlines:
        theirs = _parts(outline)
        if len(theirs) != len(mine):
            found["the number of buckets"] = None
            continue
        found |= {name: None for name, one, other in zip(names, mine, theirs, strict=True) if one != other}
    return f"they differ in {', '.join(found)}" if found else "their outlines are alike"


def combined(digests: Sequence[int]) -> int:
    """Return one digest, 0..2**63-1, of digests or checksums of that range in this order.

    A replica's state digest combines those of its ranks, in rank order.
    """
    parts = b"".join(value.to_bytes(8, "little") for value in digests)
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little") >> 1


def _digest(part: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(part), digest_size=DIGEST_BYTES).digest()


def _groups(versions: tuple[BucketVersion, ...]) -> Iterator[tuple[BucketVersion, ...]]:
    """Yield runs of the versions, as equal in length as integers allow; no run is empty."""
    number = min(MAX_GROUPS, len(versions))
    for index in range(number):
        yield versions[index * len(versions) // number : (index + 1) * len(versions) // number]


def _parts(outline: bytes) -> list[bytes]:
    return [outline[at : at + _PART_BYTES] for at in range(0, len(outline), _PART_BYTES)]


def _span(versions: tuple[BucketVersion, ...]) -> str:
    first, last = versions[0].bucket, versions[-1].bucket
    return f"bucket {first}" if len(versions) == 1 else f"buckets {first} to {last}"
