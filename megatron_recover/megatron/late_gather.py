"""Finds the parameters that are current between two steps, where lanes gather them late, or always.

With `--overlap-param-gather` the optimizer writes this lane's shard of the parameters, and hooks in
the next forward gather the shards of the other lanes. Until then those are of an older step; how
old depends on when this replica last computed a forward. So between two steps only the shard of
this lane is state (upstream's `core/distributed/param_and_grad_buffer.py`, `start_param_sync`).

With FSDP2 a lane has nothing but its shards between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_recover.fsdp2 import shards


def has_shards(chunk: Any) -> bool:
    """Return whether the parameters of `chunk` that are current are shards of this lane."""
    return is_late(chunk) or shards.is_sharded(chunk)


def is_late(chunk: Any) -> bool:
    """Return whether several lanes gather the parameters of `chunk` late.

    False if `chunk` is no DDP module of upstream.
    """
    if shards.is_sharded(chunk):
        return False
    config = getattr(chunk, "ddp_config", None)
    if config is None or not config.overlap_param_gather:
        return False
    return any(buffer.data_parallel_group.size() > 1 for buffer in _buffers(chunk))


def current(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of `chunk` that are current between two steps, with their names.

    Where they are gathered late, yield this lane's shard of each of upstream's buckets instead,
    named by buffer and bucket, and then the parameters that are in no buffer: the frozen ones. With
    FSDP2 yield this lane's shard of each parameter. The training thread calls this.
    """
    if shards.is_sharded(chunk):
        yield from ((name, shards.local(parameter)) for name, parameter in shards.parameters(chunk))
        return
    if not is_late(chunk):
        yield from chunk.named_parameters()
        return
    sharded = set()
    for number, buffer in enumerate(_buffers(chunk)):
        lanes = buffer.data_parallel_group
        for position, bucket in enumerate(buffer.buckets):
            size = bucket.param_data.numel() // lanes.size()
            shard = bucket.param_data.view(-1)[lanes.rank() * size : (lanes.rank() + 1) * size]
            yield f"buffer{number}.bucket{position}.shard", shard
            sharded.update(bucket.param_to_index)
    for name, parameter in chunk.named_parameters():
        if parameter not in sharded:
            yield name, parameter


def lanes_of(chunks: Sequence[Any]) -> list[tuple[Any, torch.device]]:
    """Return the process groups over which lanes sum gradients, each once, with their device.

    Those of FSDP2 are left out: it has used them in the first forward.
    """
    buffers = [buffer for chunk in chunks if not shards.is_sharded(chunk) for buffer in _buffers(chunk)]
    found = {id(buffer.data_parallel_group): (buffer.data_parallel_group, buffer.grad_data.device) for buffer in buffers}
    return [(group, device) for group, device in found.values() if group.size() > 1]


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]
