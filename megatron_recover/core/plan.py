"""The plan of a fresh step, a member's part in a recovery, and the operations of one rank.

This module decides nothing that members have to agree on. The quotas of a fresh step come from
`core/quota.py`. Those of a recovery, and what is held and lost, come from `core/recovery.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megatron_recover.core.quota import ONE_STAGE, balanced, share
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.recovery import Recovery
from megatron_recover.core.speed import UNKNOWN, Speeds, paces
from megatron_recover.core.values import (
    BucketId,
    Compute,
    Generation,
    MicrobatchId,
    Pipeline,
    ReplicaId,
    Transfer,
    Value,
    Version,
    Work,
)


class Operation(Value, frozen=True):
    """An operation across replicas: a sum or a copy of a bucket.

    The ranks of one position in all `members` take part.
    """

    generation: Generation
    step: int
    bucket: BucketId
    version: Version
    """Version of the result."""
    source: ReplicaId | None
    """The replica that sends its result to the other members; None for a sum over all members."""
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
    leavers: Collection[ReplicaId] = (),
) -> Plan:
    """Return the plan of one member for a step of which no member holds anything.

    `speeds` must have learned from all the steps before. `leavers` get no microbatch.
    """
    stay = tuple(member for member in roster if member not in leavers)
    share_of = dict(zip(stay, balanced(work.num_microbatches, paces(speeds, stay), pipeline), strict=True))
    quotas = tuple(share_of.get(member, 0) for member in roster)
    ids = share(quotas, roster, replica)
    computes = (Compute(ids, work.buckets),) if ids else ()
    return Plan(step, generation, tuple(roster), work, quotas, (), computes, work.buckets)


def plan_of(recovery: Recovery, replica: ReplicaId, generation: Generation, roster: Sequence[ReplicaId]) -> Plan:
    """Return the plan of one member in a recovery.

    `computes` has the member's own microbatches. All other fields are equal on all members. Raises
    ValueError if nobody has begun the step.
    """
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
    """Return the version of each result that a plan brings to a replica.

    The results are the plan's reductions and the transfers to `replica`.
    """
    brought = {item.bucket: item.version for item in plan.transfers if replica in item.targets}
    return brought | dict.fromkeys(plan.reduces, plan.generation)


def microbatches_of(plan: Plan) -> tuple[MicrobatchId, ...]:
    """Return the microbatches that a plan orders, in their order."""
    return tuple(microbatch for compute in plan.computes for microbatch in compute.microbatches)


def operations(plan: Plan, replica: ReplicaId, buckets: Iterable[BucketId]) -> tuple[Operation, ...]:
    """Return a rank's operations across replicas: copies, then sums in the order of `buckets`.

    `buckets` are those of the rank.
    """
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
