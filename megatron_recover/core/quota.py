"""Who computes which microbatches: pure functions of roster, M, paces and what is held, so all members come to the same answer.

Never decides who is a member, how fast one is (`core/speed.py`), nor what is lost.

Note [What a pass takes]
    A tick is the forward and backward of one model chunk of a stage. 1F1B over q microbatches on PP stages takes q + PP - 1
    ticks. With V chunks a stage microbatches pass in groups of PP (`megatron/schedule/interleaved.py`), PP V ticks each. A last
    group of r < PP has vacant slots, which stages have to wait through in all chunks but the last: PP (V - 1) + r ticks, most
    of a whole group. So the first microbatch of a group is dear, the others are cheap, and quotas of the least makespan fill
    groups where that pays.

Note [Quota 0]
    A member gets nothing where its one microbatch would end later than the whole shares of the others: then it only takes
    part in the reduction. Upstream's schedules cannot run an empty pass (they would run one microbatch and divide its loss by
    0), so a plan has none. Note [Members that compute nothing] in `core/speed.py` says how such a member gets its share back.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Mapping, Sequence

from megatron_recover.core.values import MicrobatchId, Pipeline, ReplicaId

ONE_STAGE = Pipeline()


def ticks(quota: int, pipeline: Pipeline = ONE_STAGE) -> int:
    """How long a pass over `quota` microbatches takes; see Note [What a pass takes]."""
    if not quota:
        return 0
    groups, rest = divmod(quota, pipeline.num_stages)
    whole = pipeline.num_stages * pipeline.num_chunks
    return groups * whole + (whole - pipeline.num_stages + rest if rest else 0) + pipeline.num_stages - 1


def _most(within: int, pipeline: Pipeline) -> int:
    """The largest quota of which a pass takes no more ticks than that."""
    whole = pipeline.num_stages * pipeline.num_chunks
    groups, rest = divmod(max(0, within - pipeline.num_stages + 1), whole)
    return groups * pipeline.num_stages + max(0, rest - whole + pipeline.num_stages)


def makespan(quotas: Sequence[int], paces: Sequence[int], pipeline: Pipeline = ONE_STAGE) -> int:
    """Until the last member has computed its quota, in ticks times pace."""
    return max((ticks(quota, pipeline) * pace for quota, pace in zip(quotas, paces, strict=True)), default=0)


@functools.lru_cache(maxsize=8)
def balanced(num_microbatches: int, paces: tuple[int, ...], pipeline: Pipeline = ONE_STAGE) -> tuple[int, ...]:
    """The quotas of the least makespan, in the order of the members' paces (nanoseconds a microbatch, all above 0).

    They sum to `num_microbatches`. Raises ValueError where there is nobody to compute.

    A pass takes the longer the more microbatches it has, so a makespan can be kept if the most that each member can do in it
    sum to the batch or more; the least such makespan is found by bisection. One nanosecond less does not do, so what is too
    much is one microbatch of members that are done at the last instant, and the last of these go without.
    """
    if not paces:
        raise ValueError("a roster has at least one member")

    def most(makespan: int) -> list[int]:
        return [_most(makespan // pace, pipeline) for pace in paces]

    least, enough = -1, ticks(num_microbatches, pipeline) * min(paces)
    while enough - least > 1:
        middle = (least + enough) // 2
        least, enough = (least, middle) if sum(most(middle)) >= num_microbatches else (middle, enough)
    quotas, before = most(enough), most(enough - 1)
    too_many = sum(quotas) - num_microbatches
    for position in reversed(range(len(paces))):
        if too_many and quotas[position] > before[position]:
            quotas[position] -= 1
            too_many -= 1
    return tuple(quotas)


def share(quotas: Sequence[int], roster: Sequence[ReplicaId], replica: ReplicaId) -> tuple[MicrobatchId, ...]:
    """The ids that `replica` computes when a step begins with nothing held: contiguous, in the order of the roster."""
    position = roster.index(replica)
    start = sum(quotas[:position])
    return tuple(range(start, start + quotas[position]))


def deal(
    lost: Iterable[MicrobatchId],
    loads: Mapping[ReplicaId, int],
    paces: Mapping[ReplicaId, int],
    pipeline: Pipeline = ONE_STAGE,
) -> dict[MicrobatchId, ReplicaId]:
    """Give each lost id to the member that would be done with it first, the lowest replica among equals.

    `loads` has the number of microbatches that each member has still to compute, `paces` how long it takes for one.
    """
    current = dict(loads)
    done = [(ticks(load + 1, pipeline) * paces[member], member) for member, load in loads.items()]
    heapq.heapify(done)
    dealt: dict[MicrobatchId, ReplicaId] = {}
    for microbatch in sorted(lost):
        _, replica = done[0]
        current[replica] += 1
        dealt[microbatch] = replica
        heapq.heapreplace(done, (ticks(current[replica] + 1, pipeline) * paces[replica], replica))
    return dealt
