"""Where the ranks of a job are on several nodes, and all ways to divide them among nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megatron_recover.core.placement import Placement, place
from tests.system.jobs import Job

MAX_NODES = 3


def placement(job: Job, slots: Sequence[int]) -> Placement:
    """Return where the ranks of a job are on nodes with so many slots."""
    return place(slots, num_replicas=job.replicas, num_ranks=job.tp * job.pp * job.lanes, tp=job.tp)


def hosted(placed: Placement, node: int) -> frozenset[int]:
    """Return the replicas that have ranks on a node."""
    return frozenset(replica for replica in range(len(placed.replicas)) if node in placed.nodes_of(replica))


def divisions(job: Job) -> Iterator[tuple[int, ...]]:
    """Yield all ways to divide the ranks of a job among nodes, also with a first node that has too little room for any."""
    num_ranks = job.tp * job.pp * job.lanes
    total = job.replicas * num_ranks
    for num_nodes in range(2, MAX_NODES + 1):
        for cuts in itertools.combinations(range(1, total), num_nodes - 1):
            slots = tuple(after - before for before, after in itertools.pairwise((0, *cuts, total)))
            yield slots
            if num_nodes < MAX_NODES and num_ranks > 1:
                yield (1, *slots)
