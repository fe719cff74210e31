"""Slices of upstream's gradient buffers: what a stage reduces, where a pass puts its gradient, and when it is all there.

Decides the geometry: which elements belong to which bucket, the same on every replica. It never communicates across replicas.

Note [Columns]
    Upstream's distributed optimizer cuts each of its buckets into one shard a lane. Seen as a matrix with one row a lane, a
    bucket of ours is a range of columns, so what a lane holds of it after the reduction over lanes lies inside the lane's
    optimizer shard. With one lane a column range is simply a slice. The plain optimizer uses the same geometry and gathers the
    rows of all lanes after the commit. Buckets cut parameters in two where it happens; `Redirection` copes with that.

Note [Local gradient]
    `Region.local` is upstream's own buffer: backward accumulates into it and nothing else writes it until the step is committed
    (INV-3). A result is a separate tensor. With `exact` the local gradient is an fp64 accumulator instead (`Reduction`);
    upstream's buffer then holds one microbatch, and is emptied after each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_recover.core.values import BucketId


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
    """One of upstream's own buckets (without overlap: a whole gradient buffer) and our buckets in it."""

    def __init__(self, chunk: int, buffer: Any, upstream: Any, bucket_elements: int, sharded: bool) -> None:
        self.chunk = chunk
        self.local: Tensor = upstream.grad_data
        self.params: dict[Any, tuple[int, int]] = upstream.param_to_index
        self.group = buffer.data_parallel_group
        self.num_lanes: int = self.group.size()
        self.lane: int = self.group.rank()
        self.scale: float = upstream.gradient_scaling_factor
        self.sharded = sharded
        """Each lane's optimizer needs its own shard of the gradient only (ZeRO-1)."""
        self.width = math.ceil(self.local.numel() / self.num_lanes)
        num = max(1, round(self.local.numel() / bucket_elements))
        edges = [self.width * index // num for index in range(num + 1)]
        self.buckets = [Bucket(self, start, stop) for start, stop in zip(edges, edges[1:], strict=False) if stop > start]

    def params_of(self, bucket: Bucket) -> list[Any]:
        """The parameters that a bucket has a part of."""
        parts = bucket.slices()
        return [
            param
            for param, (start, stop) in self.params.items()
            if any(max(part.start, start) < min(part.stop, stop) for part in parts)
        ]


class Redirection:
    """Where a region's gradient goes while it is collected for some of its buckets only.

    Between `begin` and `end` backward adds to the local gradient of the buckets `into`; one small dump takes the rest. It may
    begin and end any number of times, and every time parameters get the same targets: a fused weight gradient goes where
    `main_grad` pointed in its *forward*, and its backward makes that `main_grad` again (upstream's
    `core/tensor_parallel/layers.py`). With several microbatches in flight that forward can lie before another redirection.
    """

    def __init__(self, region: Region, into: Sequence[BucketId]) -> None:
        dump = region.local.new_empty(max(stop - start for start, stop in region.params.values()))
        kept = [part for bucket in region.buckets if bucket.id in into for part in bucket.slices()]
        self._redirected: list[tuple[Any, Tensor, Tensor, list[slice]]] = []
        """Parameter, its own main gradient, the target instead, and the parts of it that count."""
        for param, (start, stop) in region.params.items():
            overlaps = [slice(max(part.start, start) - start, min(part.stop, stop) - start) for part in kept]
            overlaps = [part for part in overlaps if part.start < part.stop]
            if sum(part.stop - part.start for part in overlaps) == stop - start:
                continue
            target = torch.zeros_like(param.main_grad) if overlaps else dump[: stop - start].view(param.main_grad.shape)
            self._redirected.append((param, param.main_grad, target, overlaps))

    def begin(self) -> None:
        """From now on."""
        for param, _, target, _ in self._redirected:
            param.main_grad = target

    def end(self) -> None:
        """Until now: what has come for the buckets goes into the local gradient."""
        for param, main_grad, target, overlaps in self._redirected:
            param.main_grad = main_grad
            for part in overlaps:
                main_grad.view(-1)[part] += target.view(-1)[part]
            if overlaps:
                target.zero_()


class Collector:
    """Into which buckets backward's gradient goes at the moment, region by region. Between passes it goes into all."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._into: tuple[BucketId, ...] | None = None
        self._redirections: dict[tuple[BucketId, ...] | None, list[Redirection]] = {}
        """Of the pass that runs, by the buckets that they collect into. They hold memory."""

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """From now on gradient goes into these buckets and no other (None: the pass is over)."""
        if into == self._into:
            return
        for redirection in self._redirections.get(self._into, ()):
            redirection.end()
        self._into = into
        if into is None:
            self._redirections.clear()
        elif into not in self._redirections:
            self._redirections[into] = [
                Redirection(region, into) for region in self._regions if any(bucket.id not in into for bucket in region.buckets)
            ]
        for redirection in self._redirections.get(into, ()):
            redirection.begin()


class BackwardWatch:
    """Tells, during a backward, which buckets it will not touch any more."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._buckets: dict[int, dict[Any, list[BucketId]]] = {}
        """Model chunk -> parameter -> buckets that have a part of it."""
        for region in regions:
            of_chunk = self._buckets.setdefault(region.chunk, {})
            of_chunk.update((param, []) for param in region.params)
            for bucket in region.buckets:
                for param in region.params_of(bucket):
                    of_chunk[param].append(bucket.id)
        self._awaited: dict[BucketId, int] = {}
        """How many parameters of each bucket the backward has yet to reach."""
        self._left: dict[Any, list[BucketId]] | None = None
        self._passed: Callable[[BucketId], None] = lambda bucket: None
        self._nodes = []
        for param in (param for of_chunk in self._buckets.values() for param in of_chunk):
            with torch.enable_grad():
                # The node that accumulates into a leaf. Upstream has hung its hook, which adds to `main_grad`, on it already;
                # hooks run in the order of their registration. Kept, since the leaf itself does not keep it.
                node = param.expand_as(param).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, param=param: self._reached(param))
            self._nodes.append(node)

    def begin(self, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """Watch the backward of `chunk` that is about to begin: `passed(bucket)` is called within it."""
        self._left = dict(self._buckets.get(chunk, {}))
        self._passed = passed
        self._awaited = {}
        for buckets in self._left.values():
            for bucket in buckets:
                self._awaited[bucket] = self._awaited.get(bucket, 0) + 1

    def end(self) -> None:
        """The backward is over, or has failed."""
        self._left = None

    def _reached(self, param: Any) -> None:
        if self._left is None:
            return
        if param not in self._left:
            raise RuntimeError(
                "a parameter's gradient came twice in one backward, after its bucket may have been reduced: the model cannot "
                "be trained with --overlap-grad-reduce; leave it out"
            )
        for bucket in self._left.pop(param):
            self._awaited[bucket] -= 1
            if not self._awaited[bucket]:
                self._passed(bucket)


def find_regions(chunks: Sequence[Any], bucket_elements: int) -> list[Region]:
    """The regions of this rank's model chunks (upstream's DDP modules), in upstream's order.

    Raises ValueError for gradients that do not live in upstream's buffers.
    """
    regions = []
    for chunk, model in enumerate(chunks):
        for buffer in [*model.buffers, *model.expert_parallel_buffers]:
            if buffer.extra_main_grads:
                raise ValueError(
                    "gradients kept outside the gradient buffer are not supported; drop the fp32 accumulation patterns"
                )
            sharded = bool(model.ddp_config.use_distributed_optimizer)
            regions += [Region(chunk, buffer, upstream, bucket_elements, sharded) for upstream in buffer.buckets]
    return regions


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
