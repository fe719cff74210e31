"""The microbatches that each member computes: pure functions, so that all members agree.

Their arguments are the roster, M, the paces and what is held. They never decide who is a member,
how fast a member is (`core/speed.py`), or what is lost.

Note [What a pass takes]
    A tick is the forward and backward of one model chunk of a stage. 1F1B over q microbatches on PP
    stages takes q + PP - 1 ticks. With V chunks per stage, microbatches run in groups of PP
    (`megatron/schedule/interleaved.py`), and a group takes PP V ticks.

    A last group of r < PP microbatches has vacant slots. Stages wait through these slots in all
    chunks but the last. So the group counts PP (V - 1) + r ticks, most of a whole group. The first
    microbatch of a group is expensive and the others are cheap; quotas of the least makespan fill
    groups where that pays.

    With V > 1 and such a last group, the count is at most 10 % above what a pass takes. Groups that
    are configured larger than PP count as groups of PP (docs/design/schedule.md, "Virtual stages").

Note [Quota 0]
    A member gets quota 0 if its one microbatch would end later than the whole shares of the others.
    Such a member takes part in reduction and vote only. Its fresh plan has no pass: upstream's
    schedules cannot run an empty one (they would run one microbatch and divide its loss by 0).
    Note [Members that compute nothing] in `core/speed.py` describes how the share comes back.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Mapping, Sequence

from megatron_recover.core.memo import newest_kept
from megatron_recover.core.values import MicrobatchId, Pipeline, ReplicaId

ONE_STAGE = Pipeline()


def ticks(quota: int, pipeline: Pipeline = ONE_STAGE) -> int:
    """Return the ticks of a pass over `quota` microbatches; see Note [What a pass takes]."""
    if not quota:
        return 0
    groups, rest = divmod(quota, pipeline.num_stages)
    whole = pipeline.num_stages * pipeline.num_chunks
    return groups * whole + (whole - pipeline.num_stages + rest if rest else 0) + pipeline.num_stages - 1


def _most(within: int, pipeline: Pipeline) -> int:
    """Return the largest quota whose pass takes at most `within` ticks."""
    whole = pipeline.num_stages * pipeline.num_chunks
    groups, rest = divmod(max(0, within - pipeline.num_stages + 1), whole)
    return groups * pipeline.num_stages + max(0, rest - whole + pipeline.num_stages)


def makespan(quotas: Sequence[int], paces: Sequence[int], pipeline: Pipeline = ONE_STAGE) -> int:
    """Return when the last member has computed its quota, in ticks times pace."""
    return max((ticks(quota, pipeline) * pace for quota, pace in zip(quotas, paces, strict=True)), default=0)


@newest_kept
@functools.lru_cache(maxsize=8)
def balanced(num_microbatches: int, paces: tuple[int, ...], pipeline: Pipeline = ONE_STAGE) -> tuple[int, ...]:
    """Return the quotas of the least makespan, in the order of `paces`.

    `paces` are nanoseconds per microbatch, all above 0. The quotas sum to `num_microbatches`.
    Raises ValueError if there is no member.

    A pass with more microbatches takes longer. So a makespan is possible if the members' largest
    quotas within it sum to `num_microbatches` or more. Bisection finds the least such makespan.

    No makespan is possible that is one nanosecond less. So every excess microbatch is one that a
    member finishes at the last instant. The last of these members in `paces` get one less.
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
    """Return the ids of `replica` when nothing is held: contiguous, in the order of the roster."""
    position = roster.index(replica)
    start = sum(quotas[:position])
    return tuple(range(start, start + quotas[position]))


def deal(
    lost: Iterable[MicrobatchId],
    loads: Mapping[ReplicaId, int],
    paces: Mapping[ReplicaId, int],
    pipeline: Pipeline = ONE_STAGE,
) -> dict[MicrobatchId, ReplicaId]:
    """Give each lost id to the member that would finish it first; among equals the lowest replica.

    `loads` has the number of microbatches that each member still has to compute, `paces` the time
    that a microbatch takes each member.
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
