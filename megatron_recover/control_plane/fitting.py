"""Decides which of the nodes that come to a meeting can take part, and gives them their numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_recover.control_plane.node_messages import NodeHello

_SECOND_COORDINATOR = (
    "it started a coordinator of its own; give --node-rank 0, or is_host of --rdzv-conf, to one node only, the one "
    "whose address the endpoint is"
)


def mistake_of(newcomer: NodeHello, others: Sequence[NodeHello], *, owner: int) -> str:
    """Return why a node cannot take part beside the others, with the remedy; empty if it can.

    The others are alike, so that a comparison with one of them suffices. `owner` is the identity of
    the agent of the coordinator's node.
    """
    if newcomer.mistake:
        return newcomer.mistake
    rank = newcomer.node_rank
    same = next((each for each in others if rank is not None and each.node_rank == rank), None)
    if same is not None:
        return f"--node-rank {rank} is also that of {same.name}; give each node its own"
    if newcomer.run_dir and newcomer.identity != owner:
        return _SECOND_COORDINATOR
    return _difference(newcomer, others[0]) if others else ""


def mistake_of_late(late: NodeHello, first: NodeHello, sizes: Collection[int]) -> str:
    """Return why a node that comes after the start cannot be a spare, with the remedy; or "".

    - `first`: the hello of node 0.
    - `sizes`: the numbers of slots of the nodes that met at the start.

    Its `--node-rank` decides nothing: a node that was lost comes back under a new number.
    """
    if late.run_dir:
        return _SECOND_COORDINATOR
    if late.slots not in sizes:
        there = " or ".join(map(str, sorted({*sizes})))
        return f"--nproc-per-node is {late.slots} on {late.name}, and {there} on the nodes of the start; use the same"
    return _difference(late, first)


def _difference(mine: NodeHello, theirs: NodeHello) -> str:
    here, there = dict(mine.alike), dict(theirs.alike)
    for name in [*here, *there]:
        one, two = here.get(name, "not given"), there.get(name, "not given")
        if one != two:
            return f"{name} is {one} on {mine.name}, and {two} on {theirs.name}; use the same on all nodes"
    if mine.run_id and theirs.run_id and mine.run_id != theirs.run_id:
        return f"--rdzv-id is {mine.run_id} on {mine.name}, and {theirs.run_id} on {theirs.name}; use the same on all nodes"
    if (":" in mine.address) != (":" in theirs.address):
        return (
            f"its address is {mine.address}, and that of {theirs.name} is {theirs.address}; nodes need addresses of "
            "one family, IPv4 or IPv6: give --interface or --local-addr"
        )
    return ""


def numbered(hellos: Sequence[NodeHello], *, owner: int, most: int) -> tuple[int, ...]:
    """Return the identities of the nodes that take part, in the order of their numbers.

    Node 0 is the owner's. Of the others those that came first take part, by their `--node-rank`
    where they have one, then as they came.
    """
    others = [each for each in hellos if each.identity != owner][: most - 1]
    last = max((each.node_rank for each in others if each.node_rank is not None), default=0) + 1
    others.sort(key=lambda each: last if each.node_rank is None else each.node_rank)
    return owner, *(each.identity for each in others)
