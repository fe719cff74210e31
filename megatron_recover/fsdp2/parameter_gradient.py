"""Has FSDP2 add the gradient of one parameter to a flat buffer, or to none.

Nothing here communicates.

Note [Before it is rounded]
    FSDP2 gives a gradient the type of its parameter. So with parameters in bf16 it would round each
    microbatch, and add the microbatches up in bf16, also where it has summed the lanes in fp32
    (`MixedPrecisionPolicy.reduce_dtype`). Megatron's other data parallelism adds up in fp32.

    FSDP2 shows the sum over the lanes before it rounds the sum: to the hook of
    `set_all_reduce_hook`, flat, for all parameters that it reduces together. Then it rounds the
    whole tensor, and makes the gradient of each parameter a view of the result. The place of that
    view says which part of the flat sum belongs to the parameter. So nothing has to be known of
    FSDP2's order or padding. The post-accumulate hook of the parameter adds this part to the buffer
    and drops the rounded gradient. All three run in the thread of the backward, for one set of
    parameters after the other.

    On a GPU both hooks run on a stream of FSDP2's own, behind the sum. The training stream waits
    for that stream at the end of the backward.

    What torch promises of this is the argument of the hook. That the gradients are views of one
    tensor of its size is checked each time; otherwise the run ends.

Note [Freed]
    The flat sum comes from the memory of FSDP2's stream for reduce-scatters, and is read on another
    stream. When it is freed, the next reduce-scatter may write into that memory. So it is freed
    once the training stream waits for the additions: each reduce-scatter waits for what the
    training stream has to do before it. With `record_stream` nobody would have to wait, but the
    host, which is many layers ahead of the GPU, would get new memory for each of them. As it is,
    two sums exist at a time. The training stream waits for the additions of the sum before the
    last, and FSDP2 has it wait for the last reduce-scatter anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.fsdp2 import shards


def sharding_in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fully_shard`, changed to sum gradients over the lanes in fp32."""
    return functools.partial(original, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


class Sharding:
    """Shards modules as torch's `fully_shard` does (seam `fully_shard`)."""

    def __init__(self, original: Callable[..., Any], *, in_fp32: bool) -> None:
        """`in_fp32`: sum gradients over the lanes in fp32, and not in their own type."""
        self._original = sharding_in_fp32(original) if in_fp32 else original

    def fully_shard(self, module: Any, **kwargs: Any) -> Any:
        """Shard `module`, with the settings that Megatron gives."""
        return self._original(module, **kwargs)


class Gradient:
    """The gradient of one parameter: a part of its region's local gradient, which `grad` is."""

    _ATTRIBUTE = "grad"
    """The attribute of the parameter in which Megatron's optimizer finds the gradient."""

    def __init__(self, parameter: Any, start: int, stop: int, buffer: Tensor) -> None:
        """Use the elements `start`..`stop` (exclusive) of `buffer`; padding, if any, comes last."""
        self.parameter, self.start, self.stop = parameter, start, stop
        shard = shards.local(parameter)
        self._view = buffer[start : start + shard.numel()].view(shard.shape)
        self._grad = DTensor.from_local(
            self._view, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip

    def attach(self) -> None:
        """Have backwards add to the buffer, and the optimizer read it."""
        setattr(self.parameter, self._ATTRIBUTE, self._grad)

    def set_aside(self) -> None:
        """Let FSDP2 make a gradient of its own instead, which nobody reads."""
        self.parameter.grad = None

    def check(self) -> None:
        """Raise InvariantViolation unless the gradient that the optimizer reads is in the buffer.

        See `gradients.py`, Note [Nobody else writes].
        """
        grad = getattr(self.parameter, self._ATTRIBUTE, None)
        if not isinstance(grad, DTensor) or shards.local(grad).data_ptr() != self._view.data_ptr():
            raise InvariantViolation(
                3, "the gradient of a parameter was replaced by something else than FSDP2: its microbatches would be lost"
            )


class FlatSum:
    """The newest sum over the lanes, not rounded. See Note [Before it is rounded]."""

    def __init__(self) -> None:
        """There is none yet."""
        self._sum: Tensor | None = None
        self._older: list[tuple[Tensor, torch.cuda.Event]] = []
        """Sums whose parts may still be read, and what comes after their additions."""
        self._training: torch.cuda.Stream | None = None

    def begin(self, device: torch.device) -> None:
        """Note the stream of the training thread, which calls this before each step."""
        if device.type != "cpu":
            self._training = torch.cuda.current_stream(device)

    def keep(self, flat: Tensor) -> None:
        """Keep the sum of the parameters whose hooks come next; forget the one before the last.

        Raises RuntimeError for a sum in another type than fp32 (`Sharding`).
        """
        if flat.dtype != torch.float32:
            raise RuntimeError(f"FSDP2 has summed a gradient over the lanes in {flat.dtype}, not in fp32")
        if flat.device.type != "cpu":
            self._grow_older(torch.cuda.current_stream(flat.device))
        self._sum = flat

    def forget(self) -> None:
        """Forget all sums; the training stream waits for what the backward has added."""
        self._sum, self._older = None, []

    def _grow_older(self, stream: torch.cuda.Stream) -> None:
        """Keep the newest sum, and free the one before. See Note [Freed]."""
        assert self._training is not None, "a backward runs before a step has begun"
        for _, added in self._older:
            self._training.wait_event(added)
        self._older = [] if self._sum is None else [(self._sum, stream.record_event())]

    def part(self, rounded: Tensor) -> Tensor:
        """Return the part of the sum that FSDP2 has rounded to `rounded`, with its shape.

        Raises InvariantViolation if `rounded` is no part of the rounded sum.
        """
        if self._sum is None or rounded.untyped_storage().nbytes() != self._sum.numel() * rounded.element_size():
            raise InvariantViolation(3, "FSDP2 has not shown a gradient before it has rounded it: its microbatch would be lost")
        start = rounded.storage_offset()
        return self._sum[start : start + rounded.numel()].view(rounded.shape)


class WideGradient(Gradient):
    """A gradient in fp32 of a parameter in another type. See Note [Before it is rounded].

    It is the parameter's `main_grad`, which Megatron's optimizer prefers to `grad`.
    """

    _ATTRIBUTE = "main_grad"

    def __init__(self, parameter: Any, start: int, stop: int, buffer: Tensor, flat: FlatSum) -> None:
        """Use a part of `buffer` as `Gradient` does; `flat` has what was summed over the lanes."""
        super().__init__(parameter, start, stop, buffer)
        self._flat, self._is_aside = flat, False
        parameter.register_post_accumulate_grad_hook(self._add)

    def attach(self) -> None:
        """Have backwards add to the buffer, and the optimizer read it."""
        super().attach()
        self._is_aside = False

    def set_aside(self) -> None:
        """Have backwards drop the gradient."""
        self._is_aside = True

    def check(self) -> None:
        """Raise InvariantViolation unless the optimizer reads the buffer, and all is in it."""
        super().check()
        if self.parameter.grad is not None:
            raise InvariantViolation(3, "a parameter has a gradient that was not added up: its microbatches would be lost")

    def _add(self, parameter: Any) -> None:
        """Add the gradient of one microbatch to the buffer, inside the backward."""
        if not self._is_aside:
            self._view.add_(self._flat.part(shards.local(parameter.grad)))
        parameter.grad = None
