"""Network faults of the data plane: broken channels, the operations they stop, and the accusations.

A channel leads from one replica to another. Whom a member of a stopped operation accuses follows
from how the direct transport sums (`data_plane/direct.py`). Each member sends every other member
a shard of its local gradient, and then its sums to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Literal

from megatron_recover.core.plan import Operation
from megatron_recover.core.values import ReplicaId

Channels = frozenset[tuple[ReplicaId, ReplicaId]]
"""(from, to) of each channel that delivers nothing."""
Ways = Literal["out", "in", "both"]
"""Directions that are lost, as seen from the replica that is named first."""


def card(owner: ReplicaId, replicas: Iterable[ReplicaId], ways: Ways) -> Channels:
    """Return the channels that a bad network card of `owner` breaks.

    `ways`: what it sends ("out"), what it receives ("in"), or both.
    """
    return frozenset[tuple[ReplicaId, ReplicaId]]().union(
        *(link(owner, other, ways) for other in replicas if other != owner)
    )  # fmt: skip


def link(one: ReplicaId, other: ReplicaId, ways: Ways) -> Channels:
    """Return the channels that a bad link breaks: from `one` ("out"), to `one` ("in"), or both."""
    there, back = (one, other), (other, one)
    return frozenset({there} if ways == "out" else {back} if ways == "in" else {there, back})


def completes(operation: Operation, me: ReplicaId, broken: Channels) -> bool:
    """Return whether `me` gets its result when all members take part.

    Of a transfer, if the channel from its source works. Of a sum, if all channels between members
    work: one broken channel denies the result to all.
    """
    if operation.source is not None:
        return (operation.source, me) not in broken
    return not any(set(operation.members).issuperset(channel) for channel in broken)


def accused(operation: Operation, me: ReplicaId, broken: Channels) -> tuple[ReplicaId, ...]:
    """Return the replicas that a member accuses when an operation stops that all have reached."""
    if operation.source is not None:
        return () if completes(operation, me, broken) else (operation.source,)
    return stuck_in_a_sum(operation.members, broken).get(me, ())


def stuck_in_a_sum(members: Sequence[ReplicaId], broken: Channels) -> dict[ReplicaId, tuple[ReplicaId, ...]]:
    """Return the replicas that each stuck member accuses.

    These are the members whose shards it lacks. If it lacks none, it lacks sums: then it accuses
    the only other member that lacks shards, or nobody if there are several.
    """
    missing = {me: tuple(peer for peer in members if (peer, me) in broken) for me in members}
    found = {}
    for me in members:
        owing = tuple(peer for peer in members if peer != me and missing[peer])
        if missing[me] or owing:
            found[me] = missing[me] or (owing if len(owing) == 1 else ())
    return found


def at_fault(broken: Channels) -> list[frozenset[ReplicaId]]:
    """Return the smallest sets of replicas whose removal leaves no broken channel.

    Try all sets of the replicas at the ends of broken channels.
    """
    ends = sorted({end for channel in broken for end in channel})
    for size in range(len(ends) + 1):
        found = [frozenset(some) for some in combinations(ends, size) if all({*some} & {*channel} for channel in broken)]
        if found:
            return found
    raise AssertionError("the set of all ends is one")


def innocent(fenced: Sequence[ReplicaId], roster: Sequence[ReplicaId], broken: Channels) -> bool:
    """Return whether one of the `fenced` replicas was not at fault for `broken` channels.

    In that case no set of `at_fault` has all of them.

    `fenced` is in the order of fencing; `roster` has the members that are left. Of the last two
    members either may be fenced if a channel between them is broken.
    """
    if len(roster) == 1 and fenced and any({*channel} == {fenced[-1], *roster} for channel in broken):
        fenced = fenced[:-1]
    return not any(some.issuperset(fenced) for some in at_fault(broken))
