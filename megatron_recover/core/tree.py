"""Who tells whom what all members have to know: everybody everybody or, where there are many members, along a tree.

The roster (ascending) is a heap: the parent of position i is (i - 1) // k. What a member and all below it say goes up as one
message once it is all there; what everybody says goes down the same way. So a member of n sends and gets at most k + 1
messages instead of n - 1, and knows everything after 2 log_k(n) of them in a row. Every member makes the same tree out of the
roster alone, and `heard`, the members whose word a member has, decides what it does next: nothing else is remembered.

Never looks into what is said, never decides anything about it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

from megatron_recover.core.values import ReplicaId

TREE_ABOVE = 64
"""Members, above which the word goes over a tree (default of `--recover-tree-above`)."""
_FAN_OUT = 8
"""Children of a member: the depth of the tree hardly falls beyond, and a parent's work grows."""


def parent(roster: Sequence[ReplicaId], replica: ReplicaId, above: int) -> ReplicaId | None:
    """The member next to the root; None for the root itself."""
    position = bisect_left(roster, replica)
    return roster[(position - 1) // _fan_out(above)] if position else None


def children(roster: Sequence[ReplicaId], replica: ReplicaId, above: int) -> tuple[ReplicaId, ...]:
    """The members next to the leaves."""
    first = bisect_left(roster, replica) * _fan_out(above) + 1
    return tuple(roster[first : first + _fan_out(above)])


def neighbours(roster: Sequence[ReplicaId], replica: ReplicaId, above: int) -> tuple[ReplicaId, ...]:
    """With whom `replica` exchanges messages, ascending."""
    if len(roster) <= above:
        return tuple(member for member in roster if member != replica)
    up = parent(roster, replica, above)
    return (*(() if up is None else (up,)), *children(roster, replica, above))


def told(roster: Sequence[ReplicaId], replica: ReplicaId, heard: Collection[ReplicaId], above: int) -> tuple[ReplicaId, ...]:
    """To whom `replica` hands on all that it has `heard`, once: when this changes. Nobody, where members tell each other."""
    if len(roster) <= above:
        return ()
    if len(heard) == len(roster):
        return children(roster, replica, above)
    up = parent(roster, replica, above)
    return (up,) if up is not None and _all_below(roster, replica, heard, above) else ()


def awaited(roster: Sequence[ReplicaId], replica: ReplicaId, heard: Collection[ReplicaId], above: int) -> tuple[ReplicaId, ...]:
    """Whose message `replica` still needs before it has heard from all: of the members that are missing; of the children
    below whom one is missing; of the parent."""
    if len(heard) == len(roster):
        return ()
    if len(roster) <= above:
        return tuple(member for member in roster if member not in heard)
    lacking = tuple(each for each in children(roster, replica, above) if not _all_below(roster, each, heard, above))
    up = parent(roster, replica, above)
    return lacking or (() if up is None else (up,))


def _fan_out(above: int) -> int:
    """A member of a tree has no more children than it had peers before there was one."""
    return min(_FAN_OUT, above)


def _all_below(roster: Sequence[ReplicaId], replica: ReplicaId, heard: Collection[ReplicaId], above: int) -> bool:
    """Whether everybody from `replica` down to the leaves is among `heard`."""
    return all(roster[position] in heard for position in _below(bisect_left(roster, replica), len(roster), _fan_out(above)))


def _below(position: int, size: int, fan_out: int) -> Iterator[int]:
    """`position` and all below it, level by level: each level of a heap is one range."""
    first = last = position
    while first < size:
        yield from range(first, min(last + 1, size))
        first, last = first * fan_out + 1, last * fan_out + fan_out
