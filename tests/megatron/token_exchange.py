"""DeepEP's exchange of tokens between the ranks of experts, for a CPU: what Megatron's flex dispatcher has of `deep_ep`.

DeepEP's kernels need NVLink. Here `torch.distributed` carries the same rows: a token goes to each rank that has one of its
experts, once, and comes back as one sum of what these experts made of it. What upstream has around the kernels stays:
their gradients (`fused_a2a.py`), and the dispatcher (`token_dispatcher.py`).
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Route(NamedTuple):
    """Which rows two dispatches, or a dispatch and its combine, have in common.

    Rows that a rank sends are ordered by receiving rank, then by token; rows that it gets by sending rank, then by token.
    """

    group: Any
    num_tokens: int
    tokens: Tensor
    """Of each row that is sent: the token."""
    sent: list[int]
    """Rows to each rank of the group."""
    received: list[int]
    """Rows from each rank of the group."""

    def rows(self, of_tokens: Tensor) -> Tensor:
        """Return the rows that come here, given a row for each token of this rank."""
        return _exchanged(of_tokens[self.tokens], self.sent, self.received, self.group)

    def sums(self, rows: Tensor) -> Tensor:
        """Return for each token of this rank the sum of its rows on all ranks; as the kernels, in single precision.

        The order is that of the ranks, so the sum is the same each time.
        """
        back = _exchanged(rows, self.received, self.sent, self.group)
        return _sums(back, self.tokens, self.num_tokens)


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arriving, rows.contiguous(), [*received], [*sent], group=group)
    return arriving


def _sums(rows: Tensor, places: Tensor, num_places: int) -> Tensor:
    """Return for each place the sum of its rows, in their order."""
    sums = torch.zeros(num_places, *rows.shape[1:], dtype=torch.float32)
    return sums.index_add_(0, places, rows.float()).to(rows.dtype)


def route_of(is_for_rank: Tensor, group: Any) -> Route:
    """Return the route of tokens, given for each token and rank whether it goes there; collective over the group."""
    tokens = is_for_rank.T.nonzero()[:, 1]
    sent = is_for_rank.sum(0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return Route(group, len(is_for_rank), tokens, sent.tolist(), received.tolist())


class EventHandle:
    """A point of a stream; on a CPU all before it is over."""


class EventOverlap:
    """A wait for an event; on a CPU there is nothing to wait for."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Return at once."""


class Config:
    """Sizes of buffers in bytes; here none is needed."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """Dispatch and combine of `--moe-flex-dispatcher-backend deepep`: rows by sending rank, with indices of the experts."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """Set how much of a GPU the kernels take."""

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Return tokens for each rank, None (no other nodes), tokens for each expert, which ranks get a token, and an event."""
        is_for_expert = (topk_idx.unsqueeze(2) == torch.arange(num_experts)).any(1)  # index -1: of no expert
        is_for_rank = is_for_expert.unflatten(1, (self.group.size(), -1)).any(2)
        return is_for_rank.sum(0), None, is_for_expert.sum(0), is_for_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        *,
        handle: Route | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Return rows, their indices of this rank's experts (-1: another rank's), weights, counts of experts, route, event."""
        if handle is not None:
            return handle.rows(x), None, None, None, None, EventOverlap()
        assert topk_idx is not None and topk_weights is not None
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        route = route_of(is_token_in_rank, self.group)
        num_local = len(num_tokens_per_expert) // self.group.size()
        indices = route.rows(topk_idx) - self.group.rank() * num_local  # on rank 0, too, -1 stays outside
        is_elsewhere = (indices < 0) | (indices >= num_local)
        indices = indices.masked_fill(is_elsewhere, -1)
        weights = route.rows(topk_weights).masked_fill(is_elsewhere, 0.0)
        counts = [int((indices == expert).sum()) for expert in range(num_local)]
        return route.rows(x), indices, weights, counts, route, EventOverlap()

    def combine(
        self, x: Tensor, handle: Route, *, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return the sums of the rows of each token, those of their weights, and an event."""
        return handle.sums(x), None if topk_weights is None else handle.sums(topk_weights), EventOverlap()


class Permuted(NamedTuple):
    """A route, and where the rows that came are among the inputs of the experts."""

    route: Route
    experts: Tensor
    """Of each input of this rank's experts: the expert."""
    rows: Tensor
    """Of each input of this rank's experts: the row."""
    num_local: int
    """Experts of this rank."""
    overflow_flag: Tensor
    """Whether inputs were dropped: never, for there is room for all."""


class HybridEPBuffer:
    """Dispatch and combine of `--moe-flex-dispatcher-backend hybridep`: inputs by expert, then sending rank, then token."""

    def __init__(self, group: Any, use_fp8: bool, **_: Any) -> None:
        assert group.size() > 1 and not use_fp8
        self.group = group

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        scaling_factor: None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: Permuted | None = None,
        num_of_experts_per_rank: int = 0,
        pad_multiple: None = None,
        num_permuted_tokens: int | Tensor | None = None,
        non_blocking: bool = False,
    ) -> tuple[Any, ...]:
        """Return inputs of experts, their weights, None (no scaling factors), how many each expert has, and the handle."""
        assert scaling_factor is None and pad_multiple is None and not non_blocking, "it is not in this substitute"
        if handle is None:
            assert routing_map is not None
            shape = (self.group.size(), num_of_experts_per_rank)
            route = route_of(routing_map.unflatten(1, shape).any(2), self.group)
            is_for_expert = self._own(route.rows(routing_map.byte()), num_of_experts_per_rank)
            experts, rows = is_for_expert.T.nonzero().T
            handle = Permuted(route, experts, rows, num_of_experts_per_rank, torch.zeros(1, dtype=torch.int))
        assert num_permuted_tokens is None or int(num_permuted_tokens) == len(handle.rows)
        weights = None
        if probs is not None:
            weights = self._own(handle.route.rows(probs), handle.num_local)[handle.rows, handle.experts]
        inputs, counts = handle.route.rows(hidden)[handle.rows], handle.experts.bincount(minlength=handle.num_local)
        return inputs, weights, None, counts, handle

    def _own(self, rows: Tensor, num_local: int) -> Tensor:
        """Return the columns of this rank's experts."""
        return rows.unflatten(1, (-1, num_local))[:, self.group.rank()]

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: Permuted, probs: Tensor | None = None, pad_multiple: None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return for each token the sum of what its experts made of it, first on each rank; and their weights, by expert."""
        assert pad_multiple is None, "it is not in this substitute"
        route = handle.route
        num_rows = sum(route.received)
        tokens = route.sums(_sums(hidden, handle.rows, num_rows))
        if probs is None:
            return tokens, None
        of_experts = probs.new_zeros(num_rows, self.group.size(), handle.num_local)
        of_experts[handle.rows, self.group.rank(), handle.experts] = probs
        return tokens, route.sums(of_experts).flatten(1)


BACKENDS = ("deepep", "hybridep")
"""Of the flex dispatcher, those whose kernels are DeepEP's."""
NAMES = ("fused_combine", "fused_dispatch", "hybrid_ep_combine", "hybrid_ep_dispatch", "set_deepep_num_sms")
"""What `token_dispatcher.py` takes from `fused_a2a.py`, where `deep_ep` is installed."""


def install() -> None:
    """Have Megatron find this module as `deep_ep`, also if it has looked for it already."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    package: Any = types.ModuleType("deep_ep")
    package.Buffer, package.HybridEPBuffer = Buffer, HybridEPBuffer
    package.utils = types.ModuleType("deep_ep.utils")
    package.utils.EventHandle, package.utils.EventOverlap = EventHandle, EventOverlap
    sys.modules.update({"deep_ep": package, "deep_ep.utils": package.utils})
    importlib.reload(fused_a2a)
    for name in NAMES:
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
