"""Offers the gradient buffers of upstream's DDP modules as regions (`trainer.regions.Regions`).

Redirects gradient away from buckets that a microbatch must not add to, and watches which buckets a
backward is done with. Nothing here communicates across replicas.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_recover.core.values import BucketId
from megatron_recover.fsdp2.gradients import ShardedGradients
from megatron_recover.megatron import router_counts
from megatron_recover.trainer.collecting import Watch
from megatron_recover.trainer.regions import Bucket, Region, Regions

Params = Mapping[Any, tuple[int, int]]
"""Parameters of a region, each with (begin, end) of its elements in `Region.local`."""


class GradientBuffers:
    """The gradient buffers of a rank's model chunks (`trainer.regions.Regions`)."""

    def __init__(self, chunks: Sequence[Any], bucket_elements: int) -> None:
        """Find the buffers of `chunks`, upstream's DDP modules, and cut them into buckets.

        The counts of routers with a bias are regions, too (`router_counts.py`).

        A bucket has about `bucket_elements` elements; a smaller region is one bucket. With
        `--overlap-grad-reduce` each parameter also gets a hook (`BackwardWatch`). Raises ValueError
        for gradients outside of the buffers.
        """
        self._params = find_regions(chunks, bucket_elements)
        counts = [each for chunk, model in enumerate(chunks) for each in router_counts.of_chunk(chunk, model, bucket_elements)]
        self.regions, self.num_chunks = [*self._params, *counts], len(chunks)
        self.checks_finite = any(chunk.ddp_config.check_for_nan_in_grad for chunk in chunks)
        self.can_watch = any(chunk.ddp_config.overlap_grad_reduce for chunk in chunks)
        self._collector = Collector(self._params)
        self._watch = BackwardWatch(self._params) if self.can_watch else None

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """Collect gradient in the buckets `into` only, from now on.

        The gradient of a parameter that is partly in `into` reaches the buffer at the next call
        with another value. None: the pass is over; add what is pending, and collect in all buckets.
        """
        self._collector.collect_into(into)

    def watch(self, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """Watch the backward of `chunk` that is about to begin; only if `can_watch`.

        Call `passed(bucket)` as soon as the backward will not touch the bucket again. A bucket with
        a parameter that gets no gradient is never passed. The backward raises RuntimeError if the
        gradient of a parameter comes twice.
        """
        assert self._watch is not None
        self._watch.begin(chunk, passed)

    def end_watch(self) -> None:
        """Stop watching the backward, if it was watched; only if `can_watch`."""
        assert self._watch is not None
        self._watch.end()


def gradients_of(args: Namespace) -> Callable[[Sequence[Any], int], Regions]:
    """Return what makes the regions of model chunks that Megatron builds with `args`."""
    if not args.use_torch_fsdp2:
        return GradientBuffers
    return functools.partial(
        ShardedGradients, in_fp32=sums_in_fp32(args), overlaps=args.overlap_grad_reduce,
        checks_finite=args.check_for_nan_in_loss_and_grad,
    )  # fmt: skip


def sums_in_fp32(args: Namespace) -> bool:
    """Return whether gradients in bf16 are summed in fp32; Megatron's default."""
    return bool(args.bf16 and args.accumulate_allreduce_grads_in_fp32)


def params_of(bucket: Bucket, params: Params) -> list[Any]:
    """Return the parameters that overlap `bucket`."""
    parts = bucket.slices()
    return [
        param for param, (start, stop) in params.items() if any(max(part.start, start) < min(part.stop, stop) for part in parts)
    ]


class Redirection:
    """Collects a region's gradient for some of its buckets only.

    Between `begin` and `end` only the buckets `into` collect gradient. Gradient of other buckets
    goes to a dump. A parameter that is partly in `into` collects in a tensor of its own, from which
    `end` adds the part that counts. `begin` and `end` may alternate any number of times.

    Every `begin` gives the parameters the same targets. The reason: a fused weight gradient goes
    where `main_grad` pointed in its *forward*, and its backward makes that tensor `main_grad` again
    (upstream's `core/tensor_parallel/layers.py`). With several microbatches in flight, another
    redirection can begin between that forward and its backward.
    """

    def __init__(self, region: Region, params: Params, into: Sequence[BucketId], dump: Tensor) -> None:
        """Choose a target for each parameter that is not wholly in `into`: a new tensor or `dump`.

        `params` are all parameters of `region`; `into` names the buckets that collect, also those
        of other regions. `dump` has room for the largest of the parameters; nobody reads it.
        """
        kept = [part for bucket in region.buckets if bucket.id in into for part in bucket.slices()]
        self._redirected: list[tuple[Any, Tensor, Tensor, list[slice]]] = []
        """(parameter, its own `main_grad`, target in its place, slices of the target to add)."""
        for param, (start, stop) in params.items():
            overlaps = [slice(max(part.start, start) - start, min(part.stop, stop) - start) for part in kept]
            overlaps = [part for part in overlaps if part.start < part.stop]
            if sum(part.stop - part.start for part in overlaps) == stop - start:
                continue
            target = torch.zeros_like(param.main_grad) if overlaps else dump[: stop - start].view(param.main_grad.shape)
            self._redirected.append((param, param.main_grad, target, overlaps))

    def begin(self) -> None:
        """Point `main_grad` of the parameters not wholly in `into` to their targets."""
        for param, _, target, _ in self._redirected:
            param.main_grad = target

    def end(self) -> None:
        """Restore `main_grad`; add what the targets collected for `into` to the local gradient.

        Zero the targets afterwards, except the dump.
        """
        for param, main_grad, target, overlaps in self._redirected:
            param.main_grad = main_grad
            for part in overlaps:
                main_grad.view(-1)[part] += target.view(-1)[part]
            if overlaps:
                target.zero_()


class Collector:
    """Restricts the gradient of a backward to some buckets; between passes all buckets collect."""

    def __init__(self, regions: Mapping[Region, Params]) -> None:
        self._regions = regions
        self._into: tuple[BucketId, ...] | None = None
        self._redirections: dict[tuple[BucketId, ...] | None, list[Redirection]] = {}
        """Redirections of the current pass, by their `into`. Dropped after it to free memory."""
        self._dumps: dict[torch.dtype, Tensor] = {}
        """Dumps of the current pass, shared by all regions of a dtype."""

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """Add gradient to the buckets `into` only, from now on.

        First add what the redirections before collected. None: add to all buckets, and free the
        redirections; the pass is over. A call with the same value does nothing.
        """
        if into == self._into:
            return
        for redirection in self._redirections.get(self._into, ()):
            redirection.end()
        self._into = into
        if into is None:
            self._redirections.clear()
            self._dumps.clear()
        elif into not in self._redirections:
            self._redirections[into] = [
                Redirection(region, params, into, self._dump(region))
                for region, params in self._regions.items()
                if any(bucket.id not in into for bucket in region.buckets)
            ]
        for redirection in self._redirections.get(into, ()):
            redirection.begin()

    def _dump(self, region: Region) -> Tensor:
        """Return the dump that all regions of `region`'s dtype share; allocate it if need be."""
        dtype = region.local.dtype
        if dtype not in self._dumps:
            alike = [params for each, params in self._regions.items() if each.local.dtype == dtype]
            largest = max(stop - start for params in alike for start, stop in params.values())
            self._dumps[dtype] = region.local.new_empty(largest)
        return self._dumps[dtype]


class BackwardWatch(Watch):
    """Reports during a backward which buckets it will not touch any more."""

    def __init__(self, regions: Mapping[Region, Params]) -> None:
        """Give each parameter of `regions` a hook."""
        buckets: dict[int, dict[Any, list[Bucket]]] = {}
        for region, params in regions.items():
            of_chunk = buckets.setdefault(region.chunk, {})
            of_chunk.update((param, []) for param in params)
            for bucket in region.buckets:
                for param in params_of(bucket, params):
                    of_chunk[param].append(bucket)
        super().__init__(buckets)
        self._nodes = []
        for param in (param for of_chunk in buckets.values() for param in of_chunk):
            with torch.enable_grad():
                # The AccumulateGrad node of the leaf. Upstream has registered its hook, which adds
                # to `main_grad`, on this node already, and hooks run in the order of their
                # registration. The reference is kept because the leaf itself does not keep the node
                # alive.
                node = param.expand_as(param).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, param=param: self.reached(param))
            self._nodes.append(node)


def find_regions(chunks: Sequence[Any], bucket_elements: int) -> dict[Region, Params]:
    """Return the regions of `chunks` (DDP modules) with their parameters, in upstream's order.

    A region is one of upstream's own buckets; without `--overlap-grad-reduce` that is a whole
    gradient buffer, from which the distributed optimizer keeps a shared embedding apart. Raises
    ValueError if a buffer of upstream keeps gradients outside of itself (`extra_main_grads`).
    """
    regions: dict[Region, Params] = {}
    for chunk, model in enumerate(chunks):
        for buffer in [*model.buffers, *model.expert_parallel_buffers]:
            if buffer.extra_main_grads:
                raise ValueError(
                    "gradients kept outside the gradient buffer are not supported; drop the fp32 accumulation patterns"
                )
            for upstream in buffer.buckets:
                region = Region(
                    upstream.grad_data, chunk=chunk, group=buffer.data_parallel_group, scale=upstream.gradient_scaling_factor,
                    sharded=bool(model.ddp_config.use_distributed_optimizer), bucket_elements=bucket_elements,
                )  # fmt: skip
                regions[region] = upstream.param_to_index
    return regions
