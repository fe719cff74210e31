"""The routes of statuses and votes: directly between all members, or along a tree above a limit.

The roster (ascending) is a heap: the parent of position i is (i - 1) // k, where k is the largest
number of children of a member. A member sends the messages of itself and all members below it
upwards, as one message, once it has all of them. The messages of all members come down the same
way. So each of n members sends and receives at most k + 1 messages instead of n - 1. Everything has
reached a member after about 2 log_k(n) hops.

Every member derives the same tree from the roster alone. `heard`, the members whose message a
member has, decides what the member does next; nothing else is remembered. This module never looks
into the messages and decides nothing about them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

from megatron_recover.core.values import ReplicaId

TREE_ABOVE = 64
"""Largest roster whose members exchange messages directly (default of `--recover-tree-above`)."""
_FAN_OUT = 8
"""Most children of a member: more hardly lower the depth of the tree, and load the parent."""


def parent(roster: Sequence[ReplicaId], replica: ReplicaId, above: int) -> ReplicaId | None:
    """Return the parent of `replica`, or None if it is the root."""
    position = bisect_left(roster, replica)
    return roster[(position - 1) // _fan_out(above)] if position else None


def children(roster: Sequence[ReplicaId], replica: ReplicaId, above: int) -> tuple[ReplicaId, ...]:
    """Return the children of `replica`, ascending; none for a leaf."""
    first = bisect_left(roster, replica) * _fan_out(above) + 1
    return tuple(roster[first : first + _fan_out(above)])


def neighbours(roster: Sequence[ReplicaId], replica: ReplicaId, above: int) -> tuple[ReplicaId, ...]:
    """Return the members that `replica` exchanges messages with, ascending."""
    if len(roster) <= above:
        return tuple(member for member in roster if member != replica)
    up = parent(roster, replica, above)
    return (*(() if up is None else (up,)), *children(roster, replica, above))


def forward_to(
    roster: Sequence[ReplicaId], replica: ReplicaId, heard: Collection[ReplicaId], above: int
) -> tuple[ReplicaId, ...]:
    """Return the members to forward everything `heard` to, or none.

    Send only when the returned members change. Without a tree nothing is forwarded.
    """
    if len(roster) <= above:
        return ()
    if len(heard) == len(roster):
        return children(roster, replica, above)
    up = parent(roster, replica, above)
    return (up,) if up is not None and _all_below(roster, replica, heard, above) else ()


def awaited(roster: Sequence[ReplicaId], replica: ReplicaId, heard: Collection[ReplicaId], above: int) -> tuple[ReplicaId, ...]:
    """Return the members whose message `replica` needs next before it has heard from all.

    - Without a tree: the members that are missing.
    - In a tree: children below which a member is missing; if there are none, the parent.
    """
    if len(heard) == len(roster):
        return ()
    if len(roster) <= above:
        return tuple(member for member in roster if member not in heard)
    lacking = tuple(each for each in children(roster, replica, above) if not _all_below(roster, each, heard, above))
    up = parent(roster, replica, above)
    return lacking or (() if up is None else (up,))


def _fan_out(above: int) -> int:
    """Return the most children of a member: `_FAN_OUT`, or `above` if that is smaller."""
    return min(_FAN_OUT, above)


def _all_below(roster: Sequence[ReplicaId], replica: ReplicaId, heard: Collection[ReplicaId], above: int) -> bool:
    """Return whether `heard` has `replica` and all members below it."""
    return all(roster[position] in heard for position in _below(bisect_left(roster, replica), len(roster), _fan_out(above)))


def _below(position: int, size: int, fan_out: int) -> Iterator[int]:
    """Yield `position` and all positions below it, by level: each level of a heap is one range."""
    first = last = position
    while first < size:
        yield from range(first, min(last + 1, size))
        first, last = first * fan_out + 1, last * fan_out + fan_out
