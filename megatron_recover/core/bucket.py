"""Complete buckets of one replica, and the buckets that are decided among members.

A bucket version is *complete* when all ranks of its stage in one replica hold it. Mixed versions
would let parameters that these ranks replicate drift apart.

A bucket is *decided* when a status exchange shows that a member holds it complete. From then on it
is neither computed nor reduced again while a member holds it (INV-4), unless it is withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_recover.core.values import (
    BucketId,
    BucketVersion,
    Generation,
    Held,
    HeldVersion,
    ReplicaId,
    Shape,
    Status,
    Value,
    Version,
)


class Decision(Value, frozen=True):
    """A bucket that needs no reduction any more."""

    bucket: BucketId
    version: Version
    holders: tuple[ReplicaId, ...]
    """Members that hold the bucket complete in this version, ascending; not empty."""
    source: ReplicaId
    """The holder that sends the result to members without it."""


def complete(shape: Shape, held: Sequence[Sequence[Held]], buckets: Iterable[BucketId]) -> tuple[BucketVersion, ...]:
    """Return those of `buckets` that all ranks of their stage hold in one version.

    `held[rank]` has the results of a rank; if `held` is empty, no bucket is complete. Each bucket
    comes with one checksum per rank of the stage.
    """
    by_rank = [{item.bucket: item for item in items} for items in held]
    found = []
    for bucket in buckets:
        items = [by_rank[rank].get(bucket) for rank in shape.bucket_ranks[bucket]] if by_rank else [None]
        present = [item for item in items if item is not None]
        if len(present) == len(items) and len({item.version for item in present}) == 1:
            found.append(BucketVersion(bucket, present[0].version, tuple(item.checksum for item in present)))
    return tuple(found)


def by_version(complete: Iterable[BucketVersion]) -> tuple[HeldVersion, ...]:
    """Return complete buckets by version, as a status has them.

    A status needs no checksums: the vote compares them.
    """
    buckets: dict[Version, list[BucketId]] = {}
    for each in complete:
        buckets.setdefault(each.version, []).append(each.bucket)
    return tuple(HeldVersion(version, tuple(sorted(buckets[version]))) for version in sorted(buckets))


def decide(statuses: Sequence[Status], buckets: Iterable[BucketId], trusted_from: Generation) -> tuple[Decision, ...]:
    """Return the decided ones of `buckets`, given the statuses of all members that are at the step.

    - Versions below `trusted_from` decide nothing (`NewGeneration.trusted_from`).
    - The highest version wins. Members can hold different versions only if a holder was missing in
      between. A roster that never takes a lost replica back excludes that.
    - Sources are spread over the holders by bucket, so that no single member's link is the
      bottleneck. The next generation takes the next holder. So a link that is bad between a holder
      and a member without the result costs a generation, and no member.
    """
    versions: dict[BucketId, dict[ReplicaId, Version]] = {bucket: {} for bucket in buckets}
    for status in statuses:
        for each in status.complete:
            if each.version >= trusted_from:
                for bucket in each.buckets:
                    if bucket in versions:
                        versions[bucket][status.replica] = each.version
    decisions = []
    for bucket, held in versions.items():
        if held:
            version = max(held.values())
            holders = tuple(sorted(replica for replica, of in held.items() if of == version))
            source = holders[(bucket + statuses[0].generation) % len(holders)]
            decisions.append(Decision(bucket, version, holders, source))
    return tuple(decisions)
