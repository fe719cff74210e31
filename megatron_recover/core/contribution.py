"""Microbatches that replicas contribute to buckets, grouped by equal contributions.

A replica's microbatches go into all buckets of a step, except what is computed again after a loss.
So there is usually one group and seldom more than a few. `added` and `missing` unite the ids once
per group, not once per bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_recover.core.values import BucketId, Compute, Contribution, MicrobatchId


def grouped(by_bucket: Mapping[BucketId, Sequence[MicrobatchId]]) -> tuple[Contribution, ...]:
    """Return contributions in groups, ordered by their lowest bucket, with ids ascending.

    Buckets without any microbatch are left out.
    """
    groups: dict[tuple[MicrobatchId, ...], list[BucketId]] = {}
    for bucket in sorted(by_bucket):
        if by_bucket[bucket]:
            groups.setdefault(tuple(sorted(by_bucket[bucket])), []).append(bucket)
    return tuple(Contribution(tuple(buckets), ids) for ids, buckets in groups.items())


def by_bucket(contributions: Iterable[Contribution]) -> dict[BucketId, tuple[MicrobatchId, ...]]:
    """Return the microbatch ids of each bucket that has any; a bucket is in one group only."""
    return {bucket: each.microbatches for each in contributions for bucket in each.buckets}


def added(contributions: Sequence[Contribution], computes: Iterable[Compute]) -> tuple[Contribution, ...]:
    """Return the contributions with the microbatches that a plan computes added."""
    known: dict[BucketId, Sequence[MicrobatchId]] = dict(by_bucket(contributions))
    for compute in computes:
        united: dict[int, tuple[MicrobatchId, ...]] = {}  # by identity of the old ids, which the buckets of a group share
        for bucket in compute.into:
            before = known.get(bucket, ())
            if id(before) not in united:
                united[id(before)] = tuple(sorted({*before, *compute.microbatches}))
            known[bucket] = united[id(before)]
    return grouped(known)


def missing(
    held: Iterable[Sequence[Contribution]], buckets: Sequence[BucketId], num_microbatches: int
) -> dict[MicrobatchId, tuple[BucketId, ...]]:
    """Return each id that no member contributes to some of `buckets`, with all these buckets.

    `held` has the contributions of each member. The buckets of an id are in the order of `buckets`.
    """
    present: dict[tuple[BucketId, ...], set[MicrobatchId]] = {}
    for each in (group for contributions in held for group in contributions):
        present.setdefault(each.buckets, set()).update(each.microbatches)
    # Buckets that are in the same groups miss the same ids.
    memberships: dict[BucketId, list[int]] = {bucket: [] for bucket in buckets}
    for number, group in enumerate(present):
        for bucket in group:
            if bucket in memberships:
                memberships[bucket].append(number)
    alike: dict[tuple[int, ...], list[BucketId]] = {}
    for bucket in buckets:
        alike.setdefault(tuple(memberships[bucket]), []).append(bucket)
    ids = list(present.values())
    lacking: dict[MicrobatchId, list[int]] = {}
    for number, members in enumerate(alike):
        there = set[MicrobatchId]().union(*(ids[each] for each in members))
        for microbatch in range(num_microbatches):
            if microbatch not in there:
                lacking.setdefault(microbatch, []).append(number)
    parts, order = list(alike.values()), {bucket: position for position, bucket in enumerate(buckets)}
    joined: dict[tuple[int, ...], tuple[BucketId, ...]] = {}
    for numbers in {tuple(numbers) for numbers in lacking.values()}:
        joined[numbers] = tuple(sorted((bucket for number in numbers for bucket in parts[number]), key=order.__getitem__))
    return {microbatch: joined[tuple(numbers)] for microbatch, numbers in lacking.items()}
