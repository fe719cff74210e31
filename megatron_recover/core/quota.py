"""Who computes which microbatches: pure functions of roster, M, paces and what is held, so all members come to the same answer.

Never decides who is a member, how fast one is (`core/speed.py`), nor what is lost.

Note [What a pass takes]
    A tick is the forward and backward of one model chunk of a stage. 1F1B over q microbatches on PP stages takes q + PP - 1
    ticks. With V chunks a stage, the interleaved schedule takes whole groups of PP microbatches: qV + PP - 1 ticks. What is
    left of the groups, r < PP microbatches, is swept through all chunks forwards and back (`megatron/schedule.py`, Note
    [Interleaved remainder]): PP V + r - 1 ticks, as long as a whole group and more. So a quota should be whole groups.

Note [Quota 0]
    A member gets nothing where its one microbatch would end later than the whole shares of the others: then it only takes
    part in the reduction. Upstream's schedules cannot run an empty pass (they would run one microbatch and divide its loss by
    0), so a plan has none. Note [Members that compute nothing] in `core/speed.py` says how such a member gets its share back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from megatron_recover.core.values import MicrobatchId, Pipeline, ReplicaId

ONE_STAGE = Pipeline()


def ticks(quota: int, pipeline: Pipeline = ONE_STAGE) -> int:
    """How long a pass over `quota` microbatches takes; see Note [What a pass takes]."""
    if not quota:
        return 0
    fill = pipeline.num_stages - 1
    if pipeline.num_chunks == 1:
        return quota + fill
    whole, rest = divmod(quota, pipeline.num_stages)
    group = pipeline.num_stages * pipeline.num_chunks
    return (whole * group + fill if whole else 0) + (group + rest - 1 if rest else 0)


def makespan(quotas: Sequence[int], paces: Sequence[int], pipeline: Pipeline = ONE_STAGE) -> int:
    """Until the last member has computed its quota, in ticks times pace."""
    return max((ticks(quota, pipeline) * pace for quota, pace in zip(quotas, paces, strict=True)), default=0)


def balanced(num_microbatches: int, paces: Sequence[int], pipeline: Pipeline = ONE_STAGE) -> tuple[int, ...]:
    """The quotas of a step, in the order of the members' paces (nanoseconds a microbatch, all above 0): the least makespan.

    They sum to `num_microbatches`. Raises ValueError where there is nobody to compute.

    Giving each next microbatch to the member that would be done with it first is optimal without virtual stages: microbatches
    are alike, and every further one costs a member the same. With virtual stages whole groups are given out in this way, which
    is optimal where they make up the batch; each member is tried as the one that gets what is left over. Next to that stands
    what single microbatches give, which can be better where there are few.
    """
    if not paces:
        raise ValueError("a roster has at least one member")
    if pipeline.num_chunks == 1:
        start = _head_start(num_microbatches, 1, paces, pipeline)
        return _filled(start, num_microbatches - sum(start), 1, paces, pipeline)
    size = pipeline.num_stages
    num_groups, rest = divmod(num_microbatches, size)
    # Two less than each gets without the rest: whoever gets that, the others have room for them.
    start = [max(0, num - 2) for num in _head_start(num_groups, size * pipeline.num_chunks, paces, pipeline)]
    tried = [_filled((0,) * len(paces), num_microbatches, 1, paces, pipeline)]
    for holder in range(len(paces) if rest else 1):
        groups = [size * num + (rest if at == holder else 0) for at, num in enumerate(start)]
        tried.append(_filled(groups, num_groups - sum(start), size, paces, pipeline))
    return min(tried, key=lambda quotas: makespan(quotas, paces, pipeline))


def _head_start(num: int, piece_ticks: int, paces: Sequence[int], pipeline: Pipeline) -> list[int]:
    """Pieces that each member gets in any case: those with which it is done when everyone would be, could pieces be divided."""
    fill = pipeline.num_stages - 1
    scale = max(paces) << 32
    horizon = (num * piece_ticks + len(paces) * fill) * scale // sum(scale // pace for pace in paces)
    pieces = [max(0, (horizon // pace - fill) // piece_ticks) for pace in paces]
    return pieces if sum(pieces) <= num else [0] * len(paces)  # more where some members are too slow for any


def _filled(quotas: Sequence[int], num: int, size: int, paces: Sequence[int], pipeline: Pipeline) -> tuple[int, ...]:
    """The quotas with `num` more pieces of `size` microbatches, each given to the member that is done with it first."""
    filled = list(quotas)
    done = [(ticks(quota + size, pipeline) * pace, at) for at, (quota, pace) in enumerate(zip(quotas, paces, strict=True))]
    heapq.heapify(done)
    for _ in range(num):
        _, at = done[0]
        filled[at] += size
        heapq.heapreplace(done, (ticks(filled[at] + size, pipeline) * paces[at], at))
    return tuple(filled)


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

    `loads` has the number of microbatches that each member has still to compute, `paces` how long it takes for one. With
    virtual stages they are dealt in groups of PP, see Note [What a pass takes].
    """
    ids = sorted(lost)
    size = pipeline.num_stages if pipeline.num_chunks > 1 else 1
    done = [(ticks(load + size, pipeline) * paces[member], member) for member, load in loads.items()]
    heapq.heapify(done)
    current = dict(loads)
    dealt: dict[MicrobatchId, ReplicaId] = {}
    for start in range(0, len(ids), size):
        group = ids[start : start + size]
        _, replica = done[0]
        current[replica] += len(group)
        dealt |= dict.fromkeys(group, replica)
        heapq.heapreplace(done, (ticks(current[replica] + size, pipeline) * paces[replica], replica))
    return dealt
