"""Regions: flat gradient buffers, cut into the buckets that replicas sum.

`Regions` is the interface that a trainer offers of its buffers. Decides the geometry: which
elements belong to which bucket, the same on every replica. Nothing here communicates across
replicas.

Note [Columns]
    Megatron's distributed optimizer cuts each of its buckets, a region here, into one shard per
    lane. The region is seen as a matrix whose rows are the shards. A bucket of ours is a range of
    columns of that matrix. So a lane's part of the bucket after the reduction over lanes lies
    inside the lane's optimizer shard. With one lane a range of columns is simply a slice. With the
    plain optimizer the geometry is the same, and `Bucket.apply` gathers the rows of all lanes after
    the commit. Buckets may cut parameters in two.

    A trainer may also sum its gradient over the lanes in each backward and keep this lane's shard
    alone (`fsdp2/`). For us such a region has a single lane. Its buckets have borders of their own.

Note [Local gradient]
    `Region.local` is the trainer's own buffer. Backward accumulates into it, and nothing else
    writes it until the step is committed (INV-3; the exception is `Reduction.void`). A region that
    fills `local` itself does so when a backward has ended. A result is a separate tensor. With
    `exact` the local gradient is an fp64 accumulator instead (`bucket_sums.GradientSum`), except
    where `Region.sums_exactly`. The trainer's buffer then holds one microbatch and is cleared after
    each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_recover.core.values import BucketId


class Regions(Protocol):
    """The gradient buffers of one rank, as its trainer offers them."""

    regions: Sequence[Region]
    """Regions, in an order that is equal on the same rank of all replicas."""
    num_chunks: int
    """Model chunks of this rank; more than one with virtual pipeline stages."""
    checks_finite: bool
    """True if a gradient or a loss that is not finite ends the rank."""
    can_watch: bool
    """True if `watch` works: the user asked to reduce buckets beside the backward."""

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """Collect gradient in these buckets only, from now on.

        The gradient of a parameter that is cut by a bucket's border may reach the buffer only at
        the next call with another value. None: the pass is over; collect in all buckets.
        """

    def watch(self, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """Call `passed(bucket)` once the coming backward of `chunk` is done with the bucket.

        The call is made inside that backward, and never for a bucket with a parameter that gets no
        gradient.
        """

    def end_watch(self) -> None:
        """Stop watching, if a backward was watched. Called after every backward if `can_watch`."""


class Bucket:
    """The bucket of columns `start`..`stop` (exclusive) of a region."""

    def __init__(self, region: Region, start: int, stop: int) -> None:
        self.region = region
        self.start, self.stop = start, stop
        self.id: BucketId = -1
        """Id over all stages of the replica; set by `number`."""

    @property
    def size(self) -> int:
        """Return the number of elements in this rank's result: those of one lane."""
        return self.stop - self.start

    def slices(self) -> list[slice]:
        """Return the bucket's elements in the region as one slice per lane.

        The slices of the last lanes may be short or empty.
        """
        width, end = self.region.width, self.region.local.numel()
        return [
            slice(min(lane * width + self.start, end), min(lane * width + self.stop, end))
            for lane in range(self.region.num_lanes)
        ]

    def sum_over_lanes(self, source: Tensor) -> Tensor:
        """Return this lane's row of the bucket, summed over all lanes. Collective over the lanes.

        `source` has the region's layout: the local gradient, or its exact accumulator. It is not
        written. With a single lane the sum is a view of `source`.
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
        """Make the result the gradient: scale it as upstream does and round it once.

        The gradient is written to this lane's shard if each lane needs only its own shard.
        Otherwise it is gathered over the lanes.
        """
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
    """One flat gradient buffer, or a part of it that is reduced and sharded by itself.

    The backward writes `local` by itself. A subclass may fill `local` in `backward_ended` instead.
    """

    sums_exactly = False
    """True if no order of additions changes the sum, so that `exact` need not round."""
    is_passed = True
    """True if a watched backward can pass the buckets (`Regions.watch`); False: they are summed
    after all others, when the pass is over."""

    def __init__(
        self,
        local: Tensor,
        *,
        chunk: int,
        group: Any | None,
        scale: float,
        sharded: bool,
        bucket_elements: int,
        edges: Sequence[int] | None = None,
    ) -> None:
        """Cut `local`, one-dimensional, into buckets of about `bucket_elements` elements.

        `group` is the process group over which the trainer reduces `local`. Each rank of `group`
        counts as a lane here, context-parallel ranks too. None: `local` is this lane's shard of
        what the trainer has summed over the lanes. A result is multiplied by `scale` when it
        becomes the gradient. `edges`: the borders of the buckets, ascending from 0 to the size of
        `local`; None: buckets are equally large.
        """
        self.local, self.chunk, self.group, self.scale = local, chunk, group, scale
        self.num_lanes: int = 1 if group is None else group.size()
        self.lane: int = 0 if group is None else group.rank()
        self.sharded = sharded
        """True if each lane's optimizer needs only its own shard of the gradient (ZeRO-1)."""
        self.width = math.ceil(local.numel() / self.num_lanes)
        num = max(1, round(local.numel() / bucket_elements))
        if edges is None:
            edges = [self.width * index // num for index in range(num + 1)]
        self.buckets = [Bucket(self, start, stop) for start, stop in zip(edges, edges[1:], strict=False) if stop > start]

    def begin(self) -> None:
        """Begin a step; the trainer has zeroed its own buffer."""

    def forward_ended(self, microbatch: int) -> None:
        """Note that a forward of this region's chunk has ended."""

    def backward_ended(self, microbatch: int, into: Collection[BucketId]) -> None:
        """Note that a backward of this region's chunk has ended.

        The buckets `into`, of any region, count its microbatch.
        """

    def applied(self) -> None:
        """Note that the results of all buckets of a committed step are in `local`."""


def number(
    regions: Sequence[Region], stage: int, holdings: Sequence[tuple[int, tuple[int, ...]]]
) -> tuple[tuple[int, ...], ...]:
    """Assign ids to the buckets of this rank's `stage`; return `Shape.bucket_ranks`.

    `holdings[rank]` is (stage, element counts of its buckets) for each rank of the replica. The
    last bucket is the ledger, on the last stage. Raises ValueError if ranks of one stage differ.
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
