"""A flat gradient buffer, cut into the buckets that replicas sum, and what a trainer has to offer of its buffers.

Decides the geometry: which elements belong to which bucket, the same on every replica. It never communicates across replicas.

Note [Columns]
    Megatron's distributed optimizer cuts each of its buckets into one shard a lane. Seen as a matrix with one row a lane, a
    bucket of ours is a range of columns, so what a lane holds of it after the reduction over lanes lies inside the lane's
    optimizer shard. With one lane a column range is simply a slice. The plain optimizer uses the same geometry and gathers the
    rows of all lanes after the commit. Buckets may cut parameters in two.

Note [Local gradient]
    `Region.local` is the trainer's own buffer: backward accumulates into it and nothing else writes it until the step is
    committed (INV-3). A result is a separate tensor. With `exact` the local gradient is an fp64 accumulator instead
    (`slots.GradientSlot`); the trainer's buffer then holds one microbatch, and is emptied after each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_recover.core.values import BucketId


class Regions(Protocol):
    """The gradient buffers of one rank, as its trainer offers them."""

    regions: Sequence[Region]
    """In the order of the model chunks. It is equal on the same rank of all replicas."""
    num_chunks: int
    """Model chunks of this rank; more than one with virtual pipeline stages."""
    checks_finite: bool
    """Whether a gradient that is not finite ends the rank."""
    can_watch: bool
    """Whether `watch` works: the trainer reduces buckets beside the backward."""

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """Let gradient go into these buckets and no other from now on. None: the pass is over, and it goes into all."""

    def watch(self, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """Call `passed(bucket)` in the backward of `chunk` that is about to begin, once it will not touch the bucket again.

        A bucket with a parameter that gets no gradient is never passed.
        """

    def end_watch(self) -> None:
        """Watch no longer: the backward is over, or has failed."""


class Bucket:
    """Columns `start`..`stop` of a region."""

    def __init__(self, region: Region, start: int, stop: int) -> None:
        self.region = region
        self.start, self.stop = start, stop
        self.id: BucketId = -1
        """Number over all stages of the replica; set by `number`."""

    @property
    def size(self) -> int:
        """Elements of this rank's result."""
        return self.stop - self.start

    def slices(self) -> list[slice]:
        """Its elements in the region, lane by lane; the last lane's may be short."""
        width, end = self.region.width, self.region.local.numel()
        return [
            slice(min(lane * width + self.start, end), min(lane * width + self.stop, end))
            for lane in range(self.region.num_lanes)
        ]

    def sum_over_lanes(self, source: Tensor) -> Tensor:
        """The sum of this lane's part, out of place (a view of `source` where the lane is alone). Collective over the lanes.

        `source` has the region's layout (the local gradient, or its exact accumulator).
        """
        if self.region.num_lanes == 1:
            return source[self.start : self.stop]
        rows = source.new_zeros(self.region.num_lanes, self.size)
        for row, part in zip(rows, self.slices(), strict=True):
            row[: part.stop - part.start] = source[part]
        mine = source.new_empty(self.size)
        dist.reduce_scatter_tensor(mine, rows.view(-1), group=self.region.group)
        return mine

    def apply(self, result: Tensor) -> None:
        """Make the result the gradient: scaled as upstream scales, rounded once, on the lanes that need it."""
        local, scaled = self.region.local, result if self.region.scale == 1.0 else result * self.region.scale
        parts = self.slices()
        if self.region.num_lanes == 1 or self.region.sharded:
            part = parts[self.region.lane]
            local[part].copy_(scaled[: part.stop - part.start])
            return
        mine = scaled.to(local.dtype)
        rows = mine.new_empty(self.region.num_lanes, self.size)
        dist.all_gather_into_tensor(rows.view(-1), mine, group=self.region.group)
        for row, part in zip(rows, parts, strict=True):
            local[part] = row[: part.stop - part.start]


class Region:
    """One flat gradient buffer, or a part of it that is reduced and sharded by itself."""

    def __init__(self, local: Tensor, *, chunk: int, group: Any, scale: float, sharded: bool, bucket_elements: int) -> None:
        """Cut `local`, one-dimensional, into buckets of about `bucket_elements` elements.

        `group` is the process group of the lanes. `scale` multiplies a result when it becomes the gradient.
        """
        self.local, self.chunk, self.group, self.scale = local, chunk, group, scale
        self.num_lanes: int = group.size()
        self.lane: int = group.rank()
        self.sharded = sharded
        """Each lane's optimizer needs its own shard of the gradient only (ZeRO-1)."""
        self.width = math.ceil(local.numel() / self.num_lanes)
        num = max(1, round(local.numel() / bucket_elements))
        edges = [self.width * index // num for index in range(num + 1)]
        self.buckets = [Bucket(self, start, stop) for start, stop in zip(edges, edges[1:], strict=False) if stop > start]


def number(
    regions: Sequence[Region], stage: int, holdings: Sequence[tuple[int, tuple[int, ...]]]
) -> tuple[tuple[int, ...], ...]:
    """Give the buckets of this rank's `stage` their numbers; return the ranks of each bucket (`Shape.bucket_ranks`).

    `holdings[rank]` is (stage, element counts of its buckets) of each rank of the replica. Raises ValueError if ranks of one
    stage differ. The ledger, on the last stage, is the last bucket.
    """
    bucket_ranks: list[tuple[int, ...]] = []
    num_stages = 1 + max(rank_stage for rank_stage, _ in holdings)
    for each in range(num_stages):
        ranks = tuple(rank for rank, (rank_stage, _) in enumerate(holdings) if rank_stage == each)
        sizes = {holdings[rank][1] for rank in ranks}
        if len(sizes) > 1:
            raise ValueError(f"ranks {ranks} of pipeline stage {each} have unlike gradient buffers: {sorted(sizes)}")
        if each == stage:
            for offset, bucket in enumerate(bucket for region in regions for bucket in region.buckets):
                bucket.id = len(bucket_ranks) + offset
        bucket_ranks += [ranks] * len(next(iter(sizes)))
    last = tuple(rank for rank, (rank_stage, _) in enumerate(holdings) if rank_stage == num_stages - 1)
    return (*bucket_ranks, last)
