"""The time in which the ranks of a replica make their process groups, by the kind of their store.

    python -m benchmarks.run --only rendezvous

A replica of TP2 x PP2 makes all groups that Megatron makes for it, over gloo, on this machine. The
ranks of a replica that spans nodes use the store that rank 0 serves; those of a replica on one node
use a file (`control_plane/rendezvous.py`). Both kinds run in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.common import Row, row
from tests.control_plane.store_ranks import run

PAIRS = 7
TP, PP = 2, 2


def _make_groups(store: dist.Store, rank: int) -> float:
    """Make the groups of a replica in one of its ranks.

    Return the seconds that it took, from the last rank's arrival.
    """
    from megatron.core import parallel_state

    from megatron_recover.megatron.cpu import enable_cpu

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        enable_cpu()
    store.set(f"rank {rank} is there", "")
    store.wait([f"rank {each} is there" for each in range(TP * PP)])
    began = time.monotonic()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TP * PP)
    parallel_state.initialize_model_parallel(TP, PP)
    dist.barrier()
    return time.monotonic() - began


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    served, inherited = [], []
    for _ in range(PAIRS):
        served.append(max(map(float, run(TP * PP, _make_groups))))
        inherited.append(max(map(float, run(TP * PP, _make_groups, is_served=False))))
    yield row("groups of TP2 x PP2, served store", served, "s")
    yield row("groups of TP2 x PP2, inherited file", inherited, "s")
    ratios = [ours / theirs for ours, theirs in zip(served, inherited, strict=True)]
    yield row("groups, served / inherited", ratios, "x", baseline="torch's FileStore in memory", goal="<= 1.5")
