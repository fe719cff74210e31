"""All state of a rank by name: what a checkpoint holds and what replicas compare.

Decides what counts as state, and names it. Nothing here communicates with another rank, and only
`assigned` and `assign_to_torch_optimizer` write state: the scalars of a newcomer.

State is what the next step depends on:

* parameters (frozen ones too), persistent buffers and extra state of modules;
* the tensors of the optimizer with their scales, and master weights;
* scalars: step counts, values of parameter groups, scheduler, loss scaler, counters of samples.

Gradients and activations are not state, since every step makes them anew. Random state is not state
either, since it is a function of the microbatch.

Note [Each byte once]
    Tensors share memory: a tied embedding, a shard of an fp32 parameter, a parameter inside a
    contiguous buffer. So bytes are counted, not tensors. A byte belongs to the first name that
    covers it, in an order that is the same on the same rank of all replicas. No other bytes of a
    storage are read, so the padding of upstream's buffers is left out. A tensor with gaps is read
    whole, unless the same view has a name already.
"""

from __future__ import annotations

import bisect
import enum
import hashlib
import io
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from megatron_recover.core.digest import combined
from megatron_recover.trainer.checksum import checksums

Scalar = int | float | str | bool | None


class StateTensor(NamedTuple):
    """A tensor of the state, or the part of it that no earlier name covers."""

    name: str
    data: Tensor
    """The elements, one-dimensional and contiguous. They share the memory of the original tensor
    unless it has gaps or overlaps itself. They are bytes where an earlier name covers a part."""
    shape: tuple[int, ...]
    """Shape of the original tensor."""
    original: Tensor | None = None
    """The original tensor where `data` is a copy, since it has gaps or overlaps itself; else None.
    Whoever changes `data` calls `put_back`."""

    @property
    def layout(self) -> str:
        """Return a description without the contents, equal on the same rank of all replicas."""
        return f"{self.name} {self.data.dtype} {self.shape} {self.data.numel()}"

    def put_back(self) -> None:
        """Copy `data` to the original tensor, if `data` is a copy.

        Elements that share memory get one of their values in `data`; state that was read from such
        a tensor has the same value for all of them.
        """
        if self.original is not None:
            strides = list(zip(self.original.shape, self.original.stride(), strict=True))
            first = tuple(slice(0, 1) if size > 1 and not stride else slice(None) for size, stride in strides)
            self.original[first].copy_(self.data.view(self.shape)[first])


class State(Protocol):
    """The state of one rank, as its trainer offers it. A trainer implements `values`."""

    def values(self) -> Iterator[tuple[str, Tensor | Scalar]]:
        """Yield all state by name, in an order equal on the same rank of all replicas.

        Tensors may share memory (Note [Each byte once]).
        """

    def tensors(self) -> list[StateTensor]:
        """Return all tensors of the state, in an order equal on the same rank of all replicas."""
        found, covered = [], _Covered()
        for name, value in self.values():
            if isinstance(value, Tensor):
                found += covered.new_parts(name, value)
        return found

    def scalars(self) -> dict[str, Scalar]:
        """Return all scalars of the state."""
        return {name: value for name, value in self.values() if not isinstance(value, Tensor)}

    def compared(self) -> dict[str, Scalar]:
        """Return the scalars that layout and digest cover: all, unless a trainer says otherwise."""
        return self.scalars()

    def layout_digest(self) -> int:
        """Return a 63-bit digest of the names, shapes and dtypes of all state."""
        return layout_digest_of(self.tensors(), self.compared())

    def digest(self) -> int:
        """Return a 63-bit digest of all state of this rank.

        The digest changes with any bit, scalar or layout, except as rarely as `checksum` explains
        in Note [What a checksum misses].
        """
        return digest_of(self.tensors(), self.compared())


def layout_digest_of(tensors: Sequence[StateTensor], scalars: Mapping[str, Scalar]) -> int:
    """Return `State.layout_digest` of a state that has these tensors and scalars."""
    return _digest_of_text([tensor.layout for tensor in tensors], sorted(scalars))


def digest_of(tensors: Sequence[StateTensor], scalars: Mapping[str, Scalar], sums: Sequence[int] | None = None) -> int:
    """Return `State.digest` of a state that has these tensors and scalars.

    `sums` are the checksums of the tensors. None: they are computed here.
    """
    text = _digest_of_text([tensor.layout for tensor in tensors], sorted(scalars.items()))
    return combined([text, *(checksums([tensor.data for tensor in tensors]) if sums is None else sums)])


# --- State of torch's own objects ----------------------------------------------------------------


def beside_parameters(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, Tensor | Scalar]]:
    """Yield the persistent buffers and extra state of a module and of all modules in it."""
    for path, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield ".".join(filter(None, (prefix, path, name))), buffer
        if type(each).get_extra_state is not torch.nn.Module.get_extra_state:
            extra = each.get_extra_state()
            if isinstance(extra, io.BytesIO):
                extra = torch.frombuffer(bytearray(extra.getvalue()), dtype=torch.uint8)
            yield from flattened(".".join(filter(None, (prefix, path, "extra"))), extra)


def of_torch_optimizer(prefix: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor | Scalar]]:
    """Yield the state of an optimizer of torch, or of one with the same interface.

    FusedAdam of Transformer Engine and of Apex has that interface. The parameters of the groups are
    yielded as well: the master weights, or the model's parameters, or shards of either.
    """
    scales: Mapping[Any, Any] = getattr(optimizer, "_scales", {})  # scales of Transformer Engine's moments below fp32
    seen = set()
    for number, group in enumerate(optimizer.param_groups):
        yield from flattened(f"{prefix}.group{number}", _of_group(group, optimizer))
        for position, parameter in enumerate(group["params"]):
            name = f"{prefix}.group{number}.{position}"
            seen.add(parameter)
            yield name, parameter
            yield from flattened(name, optimizer.state.get(parameter, {}))
            yield from flattened(f"{name}.scale", scales.get(parameter, {}))
    for position, key in enumerate(key for key in optimizer.state if key not in seen):
        yield from flattened(f"{prefix}.other{position}", optimizer.state[key])
    for number, inner in enumerate(getattr(optimizer, "sub_optimizers", ())):  # optimizer offloaded to the host
        yield from of_torch_optimizer(f"{prefix}.part{number}", inner)


def _of_group(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a group of parameters has beside them, as far as a step depends on it.

    Upstream leaves a `step` in the group when it loads a checkpoint. No optimizer reads it in a
    group without parameters, or where each parameter counts its steps.
    """
    counts = any("step" not in optimizer.state.get(parameter, {}) for parameter in group["params"])
    return {key: value for key, value in group.items() if key != "params" and (key != "step" or counts)}


def assign_to_torch_optimizer(prefix: str, optimizer: torch.optim.Optimizer, scalars: Mapping[str, Scalar]) -> None:
    """Set the scalars that `of_torch_optimizer` yields under `prefix` to those of `scalars`.

    Scalars that `scalars` lacks stay as they are, and all tensors.
    """
    scales: Mapping[Any, Any] = getattr(optimizer, "_scales", {})
    seen = set()
    for number, group in enumerate(optimizer.param_groups):
        group.update(assigned(f"{prefix}.group{number}", _of_group(group, optimizer), scalars))
        for position, parameter in enumerate(group["params"]):
            name = f"{prefix}.group{number}.{position}"
            seen.add(parameter)
            assigned(name, optimizer.state.get(parameter, {}), scalars)
            assigned(f"{name}.scale", scales.get(parameter, {}), scalars)
    for position, key in enumerate(key for key in optimizer.state if key not in seen):
        optimizer.state[key] = assigned(f"{prefix}.other{position}", optimizer.state[key], scalars)
    for number, inner in enumerate(getattr(optimizer, "sub_optimizers", ())):
        assign_to_torch_optimizer(f"{prefix}.part{number}", inner, scalars)


def flattened(name: str, value: Any) -> Iterator[tuple[str, Tensor | Scalar]]:
    """Yield the tensors and scalars inside `value`.

    Raises TypeError for anything that could be state and cannot be compared.
    """
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flattened(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from flattened(f"{name}.{position}", item)
    elif isinstance(value, Tensor | int | float | str | bool | None):
        yield name, value
    elif isinstance(value, torch.dtype | torch.device | enum.Enum):
        yield name, str(value)
    elif isinstance(value, numpy.generic):
        yield name, value.item()
    else:
        raise TypeError(f"the state has a {type(value).__name__} at {name}, which replicas cannot compare")


def assigned(name: str, value: Any, scalars: Mapping[str, Scalar]) -> Any:
    """Return `value` with the scalars that `scalars` has under their names: `flattened` inverted.

    Mappings and lists are changed in place, tuples are made anew. Scalars that `scalars` lacks,
    tensors, and what `flattened` yields as a text (types, devices, enumerations) stay.
    """
    if isinstance(value, MutableMapping):
        for key in value:
            value[key] = assigned(f"{name}.{key}", value[key], scalars)
        return value
    if isinstance(value, list):
        value[:] = [assigned(f"{name}.{position}", item, scalars) for position, item in enumerate(value)]
        return value
    if isinstance(value, tuple):
        return tuple(assigned(f"{name}.{position}", item, scalars) for position, item in enumerate(value))
    if isinstance(value, int | float | str | bool | None) and not isinstance(value, enum.Enum):
        return scalars.get(name, value)
    if isinstance(value, numpy.generic):
        return type(value)(scalars.get(name, value.item()))
    return value


# --- Memory ---------------------------------------------------------------------------------------


class _Covered:
    """The address ranges whose bytes have a name. See Note [Each byte once]."""

    def __init__(self) -> None:
        self._edges: dict[torch.device, list[int]] = {}
        """Begins and ends of the covered address ranges, ascending, by device."""
        self._with_gaps: set[tuple[object, ...]] = set()
        self._alive: list[Tensor] = []
        """Tensors seen so far, kept alive so that no other tensor reuses their addresses."""

    def new_parts(self, name: str, tensor: Tensor) -> list[StateTensor]:
        """Return the parts of `tensor` that have no name yet, and give them `name`."""
        shape = tuple(tensor.shape)
        data = tensor.detach()
        self._alive.append(data)
        if not data.numel():
            return []
        flat = _flat(data)
        if flat is None:
            key = (str(data.device), data.data_ptr(), shape, data.stride())
            if key in self._with_gaps:
                return []
            self._with_gaps.add(key)
            return [StateTensor(name, data.contiguous().view(-1), shape, data)]
        size = flat.element_size()
        begin = flat.data_ptr()
        free = self._take(begin, begin + flat.numel() * size, data.device)
        if len(free) == 1 and free[0] == (begin, begin + flat.numel() * size):
            return [StateTensor(name, flat, shape)]
        parts = []
        for start, stop in free:  # in bytes, since an overlapping tensor may have another dtype
            part = flat.view(torch.uint8)[start - begin : stop - begin]
            parts.append(StateTensor(f"{name}[{start - begin}:{stop - begin}]", part, shape))
        return parts

    def _take(self, start: int, stop: int, device: torch.device) -> list[tuple[int, int]]:
        """Cover `start`..`stop`; return the ranges in it that were not covered."""
        edges = self._edges.setdefault(device, [])
        first, last = bisect.bisect_left(edges, start), bisect.bisect_right(edges, stop)
        inside = edges[first:last]
        bounds = [*([] if first % 2 else [start]), *inside, *([] if last % 2 else [stop])]
        edges[first:last] = [*([] if first % 2 else [start]), *([] if last % 2 else [stop])]
        return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]


def _flat(tensor: Tensor) -> Tensor | None:
    """Return a tensor's memory in the order of addresses, one-dimensional.

    None if the tensor has gaps or overlaps itself.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _digest_of_text(*content: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(content).encode(), digest_size=8).digest(), "little") >> 1
