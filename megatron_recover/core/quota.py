"""Who computes which microbatches: pure functions of roster, M and what is held, so all members come to the same answer.

Never decides who is a member, nor what is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_recover.core.values import MicrobatchId, ReplicaId


def even(num_microbatches: int, num_members: int) -> tuple[int, ...]:
    """Quotas as even as integers allow, the larger ones first. Raises ValueError where there is nobody to compute."""
    if num_members < 1:
        raise ValueError("a roster has at least one member")
    small, extra = divmod(num_microbatches, num_members)
    return tuple(small + (position < extra) for position in range(num_members))


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
    current = dict(loads)
    dealt: dict[MicrobatchId, ReplicaId] = {}
    for microbatch in sorted(lost):
        replica = min(current, key=lambda member: (current[member], member))
        current[replica] += 1
        dealt[microbatch] = replica
    return dealt
