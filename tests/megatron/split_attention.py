"""Attention over a sequence that is split over context-parallel ranks, for a CPU.

Megatron computes it by Transformer Engine, which needs CUDA. Here each rank gathers the keys and values of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def part(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor` (batch, sequence): as Megatron deals it, the r-th chunk from the front and from the end."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    chunks = tensor.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)


class Gathered(torch.autograd.Function):
    """The parts of all ranks, one behind the other; the gradient of a part comes from all ranks."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: Any) -> Tensor:
        context.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient.chunk(context.group.size())[context.group.rank()], None


class SplitAttention(torch.nn.Module):
    """Causal attention of this rank's queries over all keys and values; shapes (sequence, batch, heads, size of a head)."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self._group = parallel_state.get_context_parallel_group()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        length = query.shape[0] * self._group.size()
        mine = part(torch.arange(length).unsqueeze(0)).squeeze(0)
        all_positions = Gathered.apply(mine.float().unsqueeze(1), self._group).squeeze(1)
        keys, values = Gathered.apply(key, self._group), Gathered.apply(value, self._group)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, keys) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(all_positions > mine.unsqueeze(1), float("-inf"))
        return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), values).flatten(2)
