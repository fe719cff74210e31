"""Who computes which microbatches: pure functions of roster, M and what is held, so all members come to the same answer.

Never decides who is a member, nor what is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from megatron_recover.core.values import MicrobatchId, ReplicaId

REBALANCING_IS_WORTH = 0.05
"""Other quotas are chosen when they save more than this fraction of a step."""


def even(num_microbatches: int, num_members: int) -> tuple[int, ...]:
    """Quotas as even as integers allow, the larger ones first. Raises ValueError where there is nobody to compute."""
    if num_members < 1:
        raise ValueError("a roster has at least one member")
    small, extra = divmod(num_microbatches, num_members)
    return tuple(small + (position < extra) for position in range(num_members))


def balanced(num_microbatches: int, seconds: Sequence[float], *, num_stages: int = 1) -> tuple[int, ...]:
    """Quotas with the least makespan, given each member's seconds per microbatch on its slowest stage (all above 0).

    A pipeline of `num_stages` takes `makespan` seconds for its quota. Everyone gets at least one microbatch as long as there
    are enough, since only who computes is measured. Raises ValueError where there is nobody to compute.

    Giving each next microbatch to the member that would be done with it first is optimal: microbatches are alike, and the time
    of a member only grows with its quota.
    """
    if not seconds:
        raise ValueError("a roster has at least one member")
    quotas = [1 if position < num_microbatches else 0 for position in range(len(seconds))]
    done = [((quota + num_stages) * pace, position) for position, (quota, pace) in enumerate(zip(quotas, seconds, strict=True))]
    heapq.heapify(done)
    for _ in range(num_microbatches - sum(quotas)):
        _, position = done[0]
        quotas[position] += 1
        heapq.heapreplace(done, ((quotas[position] + num_stages) * seconds[position], position))
    return tuple(quotas)


def makespan(quotas: Sequence[int], seconds: Sequence[float], *, num_stages: int = 1) -> float:
    """Seconds until the last member has computed its quota: 1F1B needs `num_stages - 1` more slots than microbatches."""
    return max(((quota + num_stages - 1) * pace for quota, pace in zip(quotas, seconds, strict=True) if quota), default=0.0)


def rebalanced(
    current: Sequence[int], seconds: Sequence[float], *, num_stages: int = 1, worth: float = REBALANCING_IS_WORTH
) -> tuple[int, ...]:
    """The quotas of the next step: `current`, or others if these save more than the fraction `worth` of the step.

    The threshold is what keeps quotas still under noise: to change them a measurement has to be off by about that much.
    """
    best = balanced(sum(current), seconds, num_stages=num_stages)
    saved = makespan(current, seconds, num_stages=num_stages) - makespan(best, seconds, num_stages=num_stages)
    return best if saved > worth * makespan(current, seconds, num_stages=num_stages) else tuple(current)


def share(num_microbatches: int, roster: Sequence[ReplicaId], replica: ReplicaId) -> tuple[MicrobatchId, ...]:
    """The ids that `replica` computes when a step begins with nothing held: contiguous, in the order of the roster."""
    quotas = even(num_microbatches, len(roster))
    position = roster.index(replica)
    start = sum(quotas[:position])
    return tuple(range(start, start + quotas[position]))


def deal(lost: Iterable[MicrobatchId], loads: Mapping[ReplicaId, int]) -> dict[MicrobatchId, ReplicaId]:
    """Give each lost id to the member with the least load at that moment, the lowest replica among equals.

    `loads` has the number of microbatches that each member holds already; the largest load grows only when it has to.
    """
    current = [(load, member) for member, load in loads.items()]
    heapq.heapify(current)
    dealt: dict[MicrobatchId, ReplicaId] = {}
    for microbatch in sorted(lost):
        load, replica = current[0]
        heapq.heapreplace(current, (load + 1, replica))
        dealt[microbatch] = replica
    return dealt
