"""Finds what FSDP2 has sharded over the lanes: the parameters of a model, and their local shards.

Note [Sharded and whole]
    FSDP2 puts whole parameters in the place of a module's shards while the module computes. It
    takes them away after the forward, unless it is told to keep them, and after the backward. After
    an evaluation they may stay, since there is no backward. So shards are looked up only by the
    training thread between two steps, after `reshard`, and whoever needs them later keeps them.
    FSDP2 never replaces a shard itself (torch's `_fsdp_param.py`, `reset_sharded_param`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from megatron_recover import packages


def is_sharded(model: Any) -> bool:
    """Return whether `fully_shard` has sharded `model`, or a module in it."""
    return isinstance(model, torch.nn.Module) and next(_sharded_modules(model), None) is not None


def reshard(model: torch.nn.Module) -> None:
    """Free all whole parameters of `model`, so that its modules have their shards. No collective.

    See Note [Sharded and whole].
    """
    for module in _sharded_modules(model):
        module.reshard()


def parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return all parameters of `model` by name, each as this lane's shard: a DTensor.

    The training thread calls it between two steps.
    """
    reshard(model)
    return list(model.named_parameters())


def groups(model: torch.nn.Module) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    """Return each module that `fully_shard` has sharded, with its parameters.

    FSDP2 gathers and reduces these together. Parameters of sharded modules inside the module are
    left out. The order is that of the modules, and so equal on all replicas.
    """
    reshard(model)
    return [
        (module, [parameter for each in _outside_of_others(module) for parameter in each.parameters(recurse=False)])
        for module in _sharded_modules(model)
    ]


def local(tensor: Tensor) -> Tensor:
    """Return this lane's shard of a DTensor, which has the same memory; another tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def padded_elements(parameter: Tensor) -> int:
    """Return the number of elements of the largest shard of `parameter`, that of the first lane.

    Raises ValueError for a parameter that is not sharded in its first dimension over the lanes
    alone.
    """
    if not isinstance(parameter, DTensor) or tuple(parameter.placements) != (Shard(0),):
        placed = parameter.placements if isinstance(parameter, DTensor) else "not at all"
        raise ValueError(f"a parameter is sharded {placed}; only parameters whose first dimension FSDP2 shards are supported")
    return math.ceil(parameter.shape[0] / parameter.device_mesh.size()) * math.prod(parameter.shape[1:])


def refuse_types(parameters: Iterable[Any]) -> None:
    """Raise ValueError if `parameters`, all that a rank trains, do not have one type.

    In a model in bf16 Megatron's optimizer takes the gradient of a parameter in fp32 from
    `main_grad` and nowhere else. With FSDP2 alone nobody sets it, so the first step fails.
    """
    shapes = {parameter.dtype: tuple(parameter.shape) for parameter in parameters}
    if len(shapes) > 1:
        found = ", ".join(sorted(f"{dtype} (shape {shape})" for dtype, shape in shapes.items()))
        raise ValueError(
            f"trained parameters have different types: {found}; with --use-torch-fsdp2 Megatron's optimizer fails at that; "
            "give all of them the type of the model"
        )


def always_sum(model: torch.nn.Module) -> None:
    """Have FSDP2 sum the gradients of `model` over the lanes in every backward, from now on.

    Without these sums a backward would leave nothing in the gradient, and without the wait at its
    end the training stream could read the gradient too early. So calls of torch's two methods that
    leave out the one or the other raise RuntimeError. What was set before is taken back.
    """
    for module in _sharded_modules(model):
        for name in ("set_requires_gradient_sync", "set_is_last_backward"):
            call = getattr(module, name)
            call(True)
            setattr(module, name, functools.partial(_call_with_true, name, call))


def _call_with_true(name: str, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    is_on, *_ = inspect.signature(call).bind(*args, **kwargs).arguments.values()
    if not is_on:
        raise RuntimeError(f"{name}(False) is not supported: lanes are summed in every backward; leave the call out")
    call(*args, **kwargs)


def refuse_empty(parameters: Iterable[Any], transformer_engine: str | None) -> None:
    """Raise ValueError for a parameter on a GPU of which some lane has nothing, if that is unsafe.

    FusedAdam of Transformer Engine before 2.18 then leaves out the parameters before it, on that
    lane alone and without a word (its issue 3207). `transformer_engine`: the version that is
    installed, or None; other optimizers take such parameters.
    """
    if transformer_engine is None or packages.suffices(transformer_engine, "transformer-engine>=2.18"):
        return
    for parameter in parameters:
        rows, lanes = parameter.shape[0], parameter.device_mesh.size()
        num_with_rows = math.ceil(rows / math.ceil(rows / lanes))
        if parameter.device.type == "cuda" and num_with_rows < lanes:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has rows for {num_with_rows} of {lanes} lanes, and FusedAdam "
                f"of Transformer Engine {transformer_engine} fails at that in silence; use a number of lanes that divides "
                f"{rows}, or Transformer Engine 2.18"
            )


def _sharded_modules(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _outside_of_others(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield `module` and the modules in it that are in no other sharded module inside it."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _outside_of_others(child)
