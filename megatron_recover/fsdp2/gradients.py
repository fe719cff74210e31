"""Offers the sharded gradients of FSDP2 as regions (`trainer.regions.Regions`).

FSDP2 sums a gradient over the lanes in each backward and adds this lane's shard of it to the
parameter's `grad`. Here `grad` is a view of a flat buffer, which is the local gradient. With
parameters in bf16 the buffer is in fp32 instead, unless the user wants bf16
(`parameter_gradient.py`). Nothing here communicates.

Note [Set aside]
    In a pass that must not add to a bucket (it is decided), the gradients of its parameters are set
    aside: FSDP2 finds none and makes new ones, which are dropped. After the pass the views are put
    back. (In fp32 FSDP2 always makes new ones, and those of such a pass are not added.) So a bucket
    consists of whole parameters. With `exact` nothing is set aside: the buffer holds one
    microbatch, and `Reduction.end_backward` chooses the buckets that take it.

Note [Zeros for a parameter without gradient]
    A parameter that no microbatch of a step uses has a gradient of zeros here, and none in plain
    Megatron. Which parameters are used can depend on the microbatch, and all lanes and replicas
    must have the same buckets. So the moments of such a parameter decay, and with weight decay the
    parameter itself.

Note [Passed]
    FSDP2 calls the post-accumulate hooks of a sharded parameter once it has added to `grad`, in the
    thread that runs the backward and on the stream of the addition (torch's `foreach_reduce`). So
    an event that is recorded in the hook is behind the addition, and a bucket has passed when the
    hooks of all its parameters have run. At the end of the backward FSDP2 has the training stream
    wait for all additions. A version of torch without these calls would pass no bucket, and all
    would be summed after the pass.

Note [Nobody else writes]
    The gradient that FSDP2 adds to, the one that is summed over replicas and the one that the
    optimizer reads have to be the same memory. If somebody replaced `grad` in between (a hook, an
    optimizer that steps inside the backward), gradient would be lost silently. So after each
    backward, and before the optimizer, every `grad` is compared with its view: the address counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from megatron_recover import packages
from megatron_recover.core.values import BucketId
from megatron_recover.fsdp2 import shards
from megatron_recover.fsdp2.parameter_gradient import FlatSum, Gradient, WideGradient
from megatron_recover.trainer.collecting import Watch
from megatron_recover.trainer.regions import Bucket, Region


class ParameterGroup(Region):
    """The region of the parameters that FSDP2 reduces together."""

    def __init__(
        self,
        module: Any,
        parameters: Sequence[Any],
        *,
        chunk: int,
        scale: float,
        bucket_elements: int,
        flat: FlatSum | None = None,
    ) -> None:
        """Allocate the local gradient of `parameters`, and cut it into buckets.

        `parameters` are those of the sharded `module` that are trained. A bucket has whole
        parameters and about `bucket_elements` elements. With `flat` the local gradient is in fp32,
        also if the parameters are not. Raises ValueError for parameters that are sharded in another
        way than FSDP2's default.
        """
        self._module = module
        sizes = [shards.padded_elements(parameter) for parameter in parameters]
        borders = [0, *itertools.accumulate(sizes)]
        like = shards.local(parameters[0])
        self._flat = flat if like.dtype != torch.float32 else None
        dtype = like.dtype if self._flat is None else torch.float32
        buffer = torch.zeros(borders[-1], dtype=dtype, device=like.device)
        super().__init__(
            buffer, chunk=chunk, group=None, scale=scale, sharded=True, bucket_elements=bucket_elements,
            edges=_edges(borders, bucket_elements),
        )  # fmt: skip
        self.gradients = {
            bucket: [
                self._gradient(parameter, start, stop)
                for parameter, start, stop in zip(parameters, borders, borders[1:], strict=False)
                if bucket.start <= start < bucket.stop
            ]
            for bucket in self.buckets
        }
        self._into: tuple[BucketId, ...] | None = None
        if self._flat is not None:
            module.set_all_reduce_hook(self._flat.keep)

    def _gradient(self, parameter: Any, start: int, stop: int) -> Gradient:
        if self._flat is None:
            return Gradient(parameter, start, stop, self.local)
        return WideGradient(parameter, start, stop, self.local, self._flat)

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """Have backwards add to the buckets `into` only; None: to all. See Note [Set aside]."""
        if into != self._into:
            self._attach(into)

    def _attach(self, into: tuple[BucketId, ...] | None) -> None:
        self._into = into
        for bucket, gradients in self.gradients.items():
            for gradient in gradients:
                if into is None or bucket.id in into:
                    gradient.attach()
                else:
                    gradient.set_aside()

    def begin(self) -> None:
        """Begin a step: the optimizer has forgotten the gradients, or they are of the last step.

        Free whole parameters that an evaluation has left: in a step without a backward here nobody
        else would, and finalize looks for the gradients of what the module has.
        """
        if self._flat is not None:
            self._flat.begin(self.local.device)
        self._module.reshard()
        self.local.zero_()
        self._attach(None)

    def backward_ended(self, microbatch: int, into: Collection[BucketId]) -> None:
        """Check that FSDP2 has added to the buffer, where nothing is set aside."""
        if self._flat is not None:
            self._flat.forget()
        for bucket, gradients in self.gradients.items():
            for gradient in gradients if self._into is None or bucket.id in self._into else ():
                gradient.check()

    def applied(self) -> None:
        """Check that the optimizer will read the buffer."""
        for gradient in itertools.chain.from_iterable(self.gradients.values()):
            gradient.check()


class ShardedGradients:
    """The sharded gradients of a rank's model chunks (`trainer.regions.Regions`)."""

    def __init__(
        self,
        chunks: Sequence[Any],
        bucket_elements: int,
        *,
        in_fp32: bool = False,
        overlaps: bool = False,
        checks_finite: bool = True,
    ) -> None:
        """Give each trained parameter of `chunks`, Megatron's FSDP2 modules, a gradient.

        The settings are what the user asked for; Megatron leaves them out of the configuration of
        such a module. With `in_fp32` gradients are added up in fp32; the modules have to be sharded
        for that (`Sharding`). With `overlaps` each parameter also gets a hook, except on a
        GPU with tensor parallelism: a third communicator would then run beside those of lanes and
        replicas. From now on FSDP2 sums in every backward (`shards.always_sum`). Raises ValueError
        as `ParameterGroup`, `shards.refuse_types` and `shards.refuse_empty` do.
        """
        for model in chunks:
            shards.always_sum(model)
        shards.refuse_types(each for model in chunks for _, each in shards.parameters(model) if each.requires_grad)
        flat = FlatSum() if in_fp32 else None
        self._groups = [
            ParameterGroup(
                module, trained, chunk=chunk, scale=_scale(model, trained[0]), bucket_elements=bucket_elements, flat=flat
            )  # fmt: skip
            for chunk, model in enumerate(chunks)
            for module, group in shards.groups(model)
            if (trained := [parameter for parameter in group if parameter.requires_grad])
        ]
        shards.refuse_empty(
            (gradient.parameter for group in self._groups for each in group.gradients.values() for gradient in each),
            packages.version("transformer-engine"),
        )
        self.regions, self.num_chunks = self._groups, len(chunks)
        self.checks_finite = checks_finite
        self.can_watch = overlaps and all(_may_watch(chunk) for chunk in chunks)
        self._watch = BackwardWatch(self._groups) if self.can_watch else None

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """Collect gradient in the buckets `into` only, from now on. None: the pass is over."""
        for group in self._groups:
            group.collect_into(into)

    def watch(self, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """Watch the backward of `chunk` that is about to begin; only if `can_watch`.

        FSDP2 runs `passed` on the stream on which it has added to the bucket.
        """
        assert self._watch is not None
        self._watch.begin(chunk, passed)

    def end_watch(self) -> None:
        """Stop watching the backward, if it was watched; only if `can_watch`."""
        assert self._watch is not None
        self._watch.end()


class BackwardWatch(Watch):
    """Reports which buckets a backward is done with. See Note [Passed]."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        """Give each parameter of `groups` a hook."""
        buckets: dict[int, dict[Any, list[Bucket]]] = {}
        for group in groups:
            for bucket, gradients in group.gradients.items():
                buckets.setdefault(group.chunk, {}).update((gradient.parameter, [bucket]) for gradient in gradients)
        super().__init__(buckets)
        for parameter in (parameter for of_chunk in buckets.values() for parameter in of_chunk):
            parameter.register_post_accumulate_grad_hook(self.reached)


def zero(model: Any) -> None:
    """Give each trained parameter of `model` a gradient of zeros."""
    for _, parameter in shards.parameters(model):
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)


def scale_gradients(model: Any, scaling_factor: float) -> None:
    """Multiply all gradients of `model` by `scaling_factor` (seam `scale_gradients`)."""
    for parameter in model.parameters():
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            shards.local(gradient).mul_(scaling_factor)


def _edges(borders: Sequence[int], bucket_elements: int) -> list[int]:
    """Return those of `borders` between parameters at which buckets end."""
    edges = [0]
    for border in borders[1:]:
        if border - edges[-1] >= bucket_elements:
            edges.append(border)
    return edges if edges[-1] == borders[-1] else [*edges, borders[-1]]


def _scale(model: Any, parameter: Any) -> float:
    """Return the factor from FSDP2's mean over the lanes to what Megatron's finalize expects.

    With a per-token loss finalize divides by the tokens of all lanes, so it expects the sum.
    """
    return float(parameter.device_mesh.size()) if model.config.calculate_per_token_loss else 1.0


def _may_watch(model: Any) -> bool:
    on_gpu = shards.local(next(model.parameters())).device.type != "cpu"
    return not (on_gpu and model.config.tensor_model_parallel_size > 1)
