"""The slot of every rank on several nodes: pure functions, so that all agents compute the same.

A *slot* is room for one rank on a node. The arguments are the nodes' slots, the number of replicas,
and the shape of a replica. This module never decides which nodes take part.

Note [How replicas are placed]
    Consecutive ranks stay together, in units of TP ranks: a tensor-parallel group is on one node.
    Where the replicas do not fit into whole groups, the unit is one rank, and groups are divided.

    1. As many replicas as possible are each on one node. If not all such places are needed, the
       replicas are spread, so that the loss of a node costs as few replicas as possible.
    2. Every other replica, one after the other, is on as few nodes as it can be with what is left:
       it takes all of the nodes with the most room. The last part is taken from the node with the
       least room that suffices.

    Step 1 costs no node: a plan that divides a replica over nodes of which one could contain it
    uses at least as many pairs (replica, node). In step 2 a plan with fewer such pairs may exist
    where nodes are uneven, since replicas are placed one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_recover.core.values import Value
from megatron_recover.core.wording import counted, verb

Share = dict[int, int]
"""Number of ranks of one replica by node."""


class Slot(NamedTuple):
    """Room for one rank."""

    node: int
    slot: int
    """Number of the slot on its node, from 0."""


class Placement(Value, frozen=True):
    """The slot of every rank. Replicas are numbered in the order of their first nodes."""

    replicas: tuple[tuple[Slot, ...], ...]
    """Slots of each replica, by rank."""
    left_over: tuple[Slot, ...]
    """Slots without a rank, in order."""

    def nodes_of(self, replica: int) -> tuple[int, ...]:
        """Return the nodes of a replica, in the order of its ranks."""
        return tuple(dict.fromkeys(slot.node for slot in self.replicas[replica]))


def most_replicas(slots: Sequence[int], num_ranks: int) -> int:
    """Return how many replicas of `num_ranks` ranks fit on nodes with so many slots each."""
    return sum(slots) // num_ranks


def place(slots: Sequence[int], *, num_replicas: int, num_ranks: int, tp: int = 1) -> Placement:
    """Return the placement of `num_replicas` replicas of `num_ranks` ranks each.

    `slots` has the number of slots of each node, by node number. `tp` divides `num_ranks`; ranks
    `i tp` to `i tp + tp - 1` are a tensor-parallel group. See Note [How replicas are placed].
    Raises ValueError with the remedy if the replicas do not fit.
    """
    fitting = most_replicas(slots, num_ranks)
    if num_replicas > fitting:
        missing = num_replicas * num_ranks - sum(slots)
        fewer = f"--replicas {fitting}, or " if fitting else ""
        raise ValueError(
            f"{counted(num_replicas, 'replica')} of {counted(num_ranks, 'rank')} {verb(num_replicas, 'needs', 'need')} "
            f"{counted(num_replicas * num_ranks, 'slot')}, and the nodes have "
            f"{sum(slots)} ({_described(enumerate(slots))}), in which {fitting} {verb(fitting, 'fits', 'fit')}; "
            f"give {fewer}nodes or a larger --nproc-per-node, for {missing} more {verb(missing, 'slot', 'slots')}"
        )
    unit = tp if sum(each // tp for each in slots) >= num_replicas * num_ranks // tp else 1
    shares = _shares([each // unit for each in slots], num_replicas, num_ranks // unit)
    # Of two replicas that begin on one node, the one on fewer nodes has the lower slots.
    parted = (_parts({node: units * unit for node, units in share.items()}, tp) for share in shares)
    replicas = sorted(parted, key=lambda parts: (parts[0][0], len(parts), parts))
    used = [itertools.count() for _ in slots]
    placed = tuple(
        tuple(Slot(node, next(used[node])) for node, num_here in parts for _ in range(num_here)) for parts in replicas
    )
    left_over = tuple(Slot(node, slot) for node, num in enumerate(slots) for slot in range(next(used[node]), num))
    return Placement(placed, left_over)


def left_over_line(placement: Placement, num_ranks: int, *, are_spares: bool = False) -> str | None:
    """Return a line about the slots without a rank; None if every slot has a rank.

    `are_spares`: lost replicas are replaced (`core/slots.py`).
    """
    num = len(placement.left_over)
    if not num:
        return None
    by_node = [(node, len(list(group))) for node, group in itertools.groupby(placement.left_over, lambda slot: slot.node)]
    what = f"{counted(num, 'slot')} {verb(num, 'has', 'have')} no rank ({_described(by_node)})"
    if are_spares:
        return f"{what}: {verb(num, 'a spare', 'spares')} for replicas that are lost"
    more = (
        f"too few for another replica of {counted(num_ranks, 'rank')}"
        if num < num_ranks
        else f"give a larger --replicas to use {verb(num, 'it', 'them')}"
    )
    return f"{what}: {more}"


def _shares(free: list[int], num_replicas: int, size: int) -> Iterator[Share]:
    """Yield the number of units of each replica by node. `free`, the units of nodes, is used up.

    `size` is the number of units of a replica. See Note [How replicas are placed].
    """
    whole = [each // size for each in free]
    for _ in range(num_replicas):
        node = max(range(len(free)), key=lambda each: (whole[each], -each))
        if whole[node]:
            whole[node] -= 1
            share = {node: size}
        else:
            share = _share_of_several(free, size)
        for each, units in share.items():
            free[each] -= units
        yield share


def _share_of_several(free: Sequence[int], size: int) -> Share:
    """Return the units by node of a replica that no node can contain."""
    share: Share = {}
    for node in sorted(range(len(free)), key=lambda each: (-free[each], each)):
        missing = size - sum(share.values())
        if free[node] >= missing:
            sufficing = (each for each in range(len(free)) if each not in share and free[each] >= missing)
            return share | {min(sufficing, key=lambda each: (free[each], each)): missing}
        share[node] = free[node]
    raise AssertionError("unreachable: the replicas fit")


def _parts(share: Mapping[int, int], tp: int) -> list[tuple[int, int]]:
    """Return (node, number of ranks) of a replica in the order of its ranks.

    Parts of whole tensor-parallel groups come first, so that as few groups as possible are divided.
    """
    return sorted(share.items(), key=lambda part: (part[1] % tp != 0, part[0]))


def _described(numbers: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> str:
    """Return text about numbers of slots by node; neighbours with equal numbers are one range."""
    runs: list[tuple[int, int, int]] = []
    for node, number in numbers:
        if runs and runs[-1][1:] == (node - 1, number):
            runs[-1] = (runs[-1][0], node, number)
        else:
            runs.append((node, node, number))
    return ", ".join(f"node {a}: {number}" if a == b else f"nodes {a} to {b}: {number} each" for a, b, number in runs)
