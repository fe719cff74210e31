"""Network faults of the data plane: which channels lose what is sent, which operations that stops, and who reports whom.

A channel goes from one replica to another. What a member of a stopped operation reports follows from how sums go over the
direct transport: contributions go from all to all, then each member's sums to all (`data_plane/direct.py`).
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
"""Which directions of a link are lost, seen from the first replica that is named."""


def card(owner: ReplicaId, replicas: Iterable[ReplicaId], ways: Ways) -> Channels:
    """Return what a bad network card of `owner` loses: what it sends ("out"), what it receives ("in"), or both."""
    return frozenset[tuple[ReplicaId, ReplicaId]]().union(
        *(link(owner, other, ways) for other in replicas if other != owner)
    )  # fmt: skip


def link(one: ReplicaId, other: ReplicaId, ways: Ways) -> Channels:
    """Return what a bad link loses: from `one` to `other` ("out"), the other way ("in"), or both."""
    there, back = (one, other), (other, one)
    return frozenset({there} if ways == "out" else {back} if ways == "in" else {there, back})


def completes(operation: Operation, me: ReplicaId, broken: Channels) -> bool:
    """True if a member of an operation gets its result when all members take part."""
    if operation.source is not None:
        return (operation.source, me) not in broken
    return not any((one, other) in broken for one in operation.members for other in operation.members)


def accused(operation: Operation, me: ReplicaId, broken: Channels) -> tuple[ReplicaId, ...]:
    """Return whom a member names when an operation that all have reached does not complete."""
    if operation.source is not None:
        return () if completes(operation, me, broken) else (operation.source,)
    return stuck_in_a_sum(operation.members, broken).get(me, ())


def stuck_in_a_sum(members: Sequence[ReplicaId], broken: Channels) -> dict[ReplicaId, tuple[ReplicaId, ...]]:
    """Return whom each stuck member names: those whose contribution it lacks, else the only one that owes its sum."""
    missing = {me: tuple(peer for peer in members if (peer, me) in broken) for me in members}
    found = {}
    for me in members:
        owing = tuple(peer for peer in members if peer != me and missing[peer])
        if missing[me] or owing:
            found[me] = missing[me] or (owing if len(owing) == 1 else ())
    return found


def at_fault(broken: Channels) -> list[frozenset[ReplicaId]]:
    """Return the smallest sets of replicas without which no broken channel is left, by trying all sets."""
    ends = sorted({end for channel in broken for end in channel})
    for size in range(len(ends) + 1):
        found = [frozenset(some) for some in combinations(ends, size) if all({*some} & {*channel} for channel in broken)]
        if found:
            return found
    raise AssertionError("the set of all ends is one")


def innocent(fenced: Sequence[ReplicaId], roster: Sequence[ReplicaId], broken: Channels) -> bool:
    """True if of the replicas that were `fenced`, in this order, one was not at fault for `broken` channels.

    Of the last two members either may leave; `roster` has those that are left.
    """
    if len(roster) == 1 and fenced and any({*channel} == {fenced[-1], *roster} for channel in broken):
        fenced = fenced[:-1]
    return not any(some.issuperset(fenced) for some in at_fault(broken))
