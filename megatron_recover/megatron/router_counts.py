"""Tokens per expert of the routers of a model chunk, summed over replicas like a gradient.

With `--moe-router-enable-expert-bias` each router counts in its forward how many tokens it gave to
each expert. Upstream's finalize sums the counts over the ranks of a pipeline stage, here those of
one replica. It then lowers the bias of each expert with more tokens than the average by a fixed
amount, and raises that of each with fewer (`core/transformer/moe/moe_utils.py`,
`get_updated_expert_bias`).
The bias is state, so every replica needs the counts of all microbatches, each once. So the counts
are a region, whose buckets count each microbatch as those of gradients do.

Note [Whose counts]
    With several microbatches in flight the routers count the forwards of some before the backward
    of another. With activation recomputation a router counts in the backward, where its forward
    runs again with gradients. So after each forward and each backward all that the routers have
    counted is taken from them, and kept for that microbatch until its backward has ended. Counts
    are integers, so their sum in float32 is exact below 2**24, in any order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from megatron_recover.core.values import BucketId
from megatron_recover.trainer.regions import Region


class RouterCounts(Region):
    """The region of all routers with a bias in one model chunk."""

    sums_exactly, is_passed = True, False

    def __init__(self, routers: list[Any], *, chunk: int, group: Any, bucket_elements: int) -> None:
        """Use `routers`, upstream's router modules. `group` is the process group of the lanes."""
        self._routers = routers
        self._of_microbatch: dict[int, Tensor] = {}
        """Counts of microbatches whose backward has not ended."""
        counts = torch.zeros_like(torch.cat([router.local_tokens_per_expert for router in routers]))
        super().__init__(counts, chunk=chunk, group=group, scale=1.0, sharded=False, bucket_elements=bucket_elements)

    def begin(self) -> None:
        """Begin a step with no counts."""
        self.local.zero_()
        self._of_microbatch.clear()

    def forward_ended(self, microbatch: int) -> None:
        """Take what the routers have counted, for this microbatch."""
        self._of_microbatch[microbatch] = self._taken()

    def backward_ended(self, microbatch: int, into: Collection[BucketId]) -> None:
        """Add the counts of this microbatch to the buckets `into`."""
        counts = self._of_microbatch.pop(microbatch) + self._taken()
        for bucket in self.buckets:
            if bucket.id in into:
                for part in bucket.slices():
                    self.local[part] += counts[part]

    def applied(self) -> None:
        """Store the counts of all microbatches in the routers, for upstream's finalize.

        These are summed over the lanes already, and upstream sums them over the lanes again. That
        multiplies all counts by the same number. Upstream uses only the sign of the difference
        between a count and the average, so the bias is the same.
        """
        counts = self.local.split([router.local_tokens_per_expert.numel() for router in self._routers])
        for router, its_counts in zip(self._routers, counts, strict=True):
            router.local_tokens_per_expert.copy_(its_counts)

    def _taken(self) -> Tensor:
        buffers = [router.local_tokens_per_expert for router in self._routers]
        counts = torch.cat(buffers)
        torch._foreach_zero_(buffers)
        return counts


def of_chunk(chunk: int, model: Any, bucket_elements: int) -> list[Region]:
    """Return a list with the region of the routers of `model`, upstream's DDP module.

    The list is empty if no router has a bias. `chunk` is the number of the model chunk.
    """
    routers = [
        module
        for module in model.modules()
        if getattr(module, "expert_bias", None) is not None and getattr(module, "local_tokens_per_expert", None) is not None
    ]
    if not routers:
        return []
    group = [*model.buffers, *model.expert_parallel_buffers][0].data_parallel_group
    return [RouterCounts(routers, chunk=chunk, group=group, bucket_elements=bucket_elements)]
