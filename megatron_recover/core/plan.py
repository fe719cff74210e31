"""What a member does next: the plan of a step that begins, its part in a recovery, and what a plan means for each rank.

Decides nothing that members have to agree on: quotas come from `core/quota.py`, what is held and lost from `core/recovery.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_recover.core.quota import ONE_STAGE, balanced, share
from megatron_recover.core.recovery import Recovery
from megatron_recover.core.speed import UNKNOWN, Speeds, paces
from megatron_recover.core.values import (
    BucketId,
    Compute,
    Generation,
    MicrobatchId,
    Pipeline,
    Plan,
    ReplicaId,
    Transfer,
    Value,
    Version,
    Work,
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


def fresh_plan(
    replica: ReplicaId,
    generation: Generation,
    roster: Sequence[ReplicaId],
    step: int,
    work: Work,
    *,
    speeds: Speeds = UNKNOWN,
    pipeline: Pipeline = ONE_STAGE,
) -> Plan:
    """The plan of a step that begins with nothing held by anyone. `speeds` are of all the steps before it."""
    quotas = balanced(work.num_microbatches, paces(speeds, roster), pipeline)
    ids = share(quotas, roster, replica)
    computes = (Compute(ids, work.buckets),) if ids else ()
    return Plan(step, generation, tuple(roster), work, quotas, (), computes, work.buckets)


def plan_of(recovery: Recovery, replica: ReplicaId, generation: Generation, roster: Sequence[ReplicaId]) -> Plan:
    """The part of one member in a recovery whose `work` is known."""
    if recovery.work is None:
        raise ValueError("nobody has begun the step: it has no recovery plan")
    transfers = []
    for decision in recovery.decisions:
        targets = tuple(member for member in roster if member not in decision.holders)
        if targets:
            transfers.append(Transfer(decision.bucket, decision.version, decision.source, targets))
    by_buckets: dict[tuple[BucketId, ...], list[MicrobatchId]] = {}
    for owner, microbatch, into in recovery.dealt:
        if owner == replica:
            by_buckets.setdefault(into, []).append(microbatch)
    computes = tuple(Compute(tuple(ids), into) for into, ids in sorted(by_buckets.items()))
    return Plan(
        recovery.step,
        generation,
        tuple(roster),
        recovery.work,
        recovery.quotas,
        tuple(transfers),
        computes,
        recovery.reduces,
    )


def results(plan: Plan, replica: ReplicaId) -> dict[BucketId, Version]:
    """The results that a plan brings to a replica, with the version of each: its reductions and the transfers to it."""
    brought = {item.bucket: item.version for item in plan.transfers if replica in item.targets}
    return brought | dict.fromkeys(plan.reduces, plan.generation)


def operations(plan: Plan, replica: ReplicaId, buckets: Iterable[BucketId]) -> tuple[Operation, ...]:
    """What a plan has a rank do across replicas: copies, then sums in the order of `buckets`, which are those of the rank."""
    mine, reduces = dict.fromkeys(buckets), frozenset(plan.reduces)
    copies = (
        Operation(plan.generation, plan.step, item.bucket, item.version, item.source, (item.source, *item.targets))
        for item in plan.transfers
        if item.bucket in mine and replica in (item.source, *item.targets)
    )
    sums = (
        Operation(plan.generation, plan.step, bucket, plan.generation, None, plan.roster)
        for bucket in mine
        if bucket in reduces
    )
    return (*copies, *sums)
