"""Which buckets are complete in a replica, and which are decided among members.

A bucket version is *complete* when all ranks of its stage in one replica hold it: mixing versions between those ranks would
let parameters that they replicate drift apart. It is *decided* when a status exchange says that a member holds it complete;
from then on nobody computes or reduces it again while a member holds it (INV-4), unless it is withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_recover.core.values import (
    BucketId,
    BucketVersion,
    Generation,
    Held,
    Plan,
    ReplicaId,
    Shape,
    Status,
    Value,
    Version,
)


class Operation(Value, frozen=True):
    """What a rank does across replicas: it meets the ranks of its position in `members` for a sum or a copy of a bucket."""

    generation: Generation
    step: int
    bucket: BucketId
    version: Version
    """Of the result."""
    source: ReplicaId | None
    """Who sends its result to the other members; None: a sum over all of them, for all of them."""
    members: tuple[ReplicaId, ...]


class Decision(Value, frozen=True):
    """A bucket that needs no reduction any more."""

    bucket: BucketId
    version: Version
    holders: tuple[ReplicaId, ...]
    """Members that hold it complete, ascending; not empty."""
    source: ReplicaId
    """The holder that sends it to those that lack it."""


def complete(shape: Shape, held: Sequence[Sequence[Held]], buckets: Iterable[BucketId]) -> tuple[BucketVersion, ...]:
    """Those of `buckets` that all their ranks hold in one version. `held[rank]` has the results of a rank."""
    by_rank = [{item.bucket: item for item in items} for items in held]
    found = []
    for bucket in buckets:
        items = [by_rank[rank].get(bucket) for rank in shape.bucket_ranks[bucket]] if by_rank else [None]
        present = [item for item in items if item is not None]
        if len(present) == len(items) and len({item.version for item in present}) == 1:
            found.append(BucketVersion(bucket, present[0].version, tuple(item.checksum for item in present)))
    return tuple(found)


def results(plan: Plan, replica: ReplicaId) -> dict[BucketId, Version]:
    """The results that a plan brings to a replica, with the version of each: its reductions and the transfers to it."""
    brought = {item.bucket: item.version for item in plan.transfers if replica in item.targets}
    return brought | dict.fromkeys(plan.reduces, plan.generation)


def operations(plan: Plan, replica: ReplicaId, buckets: Iterable[BucketId]) -> tuple[Operation, ...]:
    """What a plan has a rank do across replicas: copies, then sums in the order of `buckets`, which are those of the rank."""
    mine = dict.fromkeys(buckets)
    copies = (
        Operation(plan.generation, plan.step, item.bucket, item.version, item.source, (item.source, *item.targets))
        for item in plan.transfers
        if item.bucket in mine and replica in (item.source, *item.targets)
    )
    sums = (
        Operation(plan.generation, plan.step, bucket, plan.generation, None, plan.roster)
        for bucket in mine
        if bucket in plan.reduces
    )
    return (*copies, *sums)


def decide(statuses: Sequence[Status], buckets: Iterable[BucketId], trusted_from: Generation) -> tuple[Decision, ...]:
    """The decided ones of `buckets`, given the statuses of all members for the same step, by replica.

    Versions below `trusted_from` decide nothing (`NewGeneration.trusted_from`).

    The highest version wins; members can hold different ones only if a holder was missing in between, which a roster that
    never takes a lost replica back excludes. Sources are spread over the holders by bucket, so that one member's link is not
    the bottleneck.
    """
    decisions = []
    for bucket in buckets:
        complete = ((status.replica, item) for status in statuses for item in status.complete if item.bucket == bucket)
        versions = {replica: item.version for replica, item in complete if item.version >= trusted_from}
        if versions:
            version = max(versions.values())
            holders = tuple(sorted(replica for replica, held in versions.items() if held == version))
            decisions.append(Decision(bucket, version, holders, holders[bucket % len(holders)]))
    return tuple(decisions)
