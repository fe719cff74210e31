"""All state of a rank, by name: what a checkpoint holds, what replicas must hold alike, and what a newcomer would read.

Decides what state is and names it. It never writes any of it, and never talks to another rank.

State is what the next step depends on: parameters (frozen ones too), persistent buffers, the tensors of the optimizer with
their scales, master weights, and scalars (step counts, parameter groups' values, scheduler, loss scaler, counters of samples).
Gradients and activations are no state, since every step makes them anew; random state is none, since it is a function of
the microbatch.

Note [Each byte once]
    Tensors share memory: a tied embedding, a shard of an fp32 parameter, a parameter inside a contiguous buffer. So memory is
    counted, not tensors: a byte belongs to the first name under which it is met, in an order that is the same on the same rank
    of all replicas. Nothing else of a storage is looked at, so the padding of upstream's buffers is left out.
"""

from __future__ import annotations

import bisect
import enum
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_recover.trainer.checksum import checksums, combined

Scalar = int | float | str | bool | None


class StateTensor(NamedTuple):
    """A tensor of the state, or the part of it that no earlier name covers."""

    name: str
    data: Tensor
    """One-dimensional and contiguous. It shares the memory of the original unless that has gaps."""
    shape: tuple[int, ...]
    """Of the original tensor."""

    @property
    def layout(self) -> str:
        """Return what has to be equal before two replicas can exchange this tensor."""
        return f"{self.name} {self.data.dtype} {self.shape} {self.data.numel()}"


class State:
    """The state of one rank. Tensors are found anew in each call: an optimizer makes its own in its first step."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any = None,
        scheduler: Any = None,
        counters: Callable[[], Mapping[str, Scalar]] = dict,
    ) -> None:
        """Look at upstream's model chunks (DDP modules), its optimizer (chained or not) and its parameter scheduler.

        `counters()` returns the scalars that belong to none of these, such as the number of consumed samples.
        """
        self._chunks, self._optimizer, self._scheduler, self._counters = chunks, optimizer, scheduler, counters

    @property
    def has_optimizer(self) -> bool:
        """Return whether the optimizer is known."""
        return self._optimizer is not None

    def tensors(self) -> list[StateTensor]:
        """Return all tensors of the state, in an order that is equal on the same rank of all replicas."""
        found, covered = [], _Covered()
        for name, value in self._values():
            if isinstance(value, Tensor):
                found += covered.new_parts(name, value)
        return found

    def scalars(self) -> dict[str, Scalar]:
        """Return all scalars of the state."""
        return {name: value for name, value in self._values() if not isinstance(value, Tensor)}

    def layout_digest(self) -> int:
        """Return 63 bits that name the names, shapes and types of all state."""
        return _digest_of_text([tensor.layout for tensor in self.tensors()], sorted(self.scalars()))

    def digest(self) -> int:
        """Return 63 bits that name all state of this rank: they change with any bit, scalar or layout.

        What is missed, and how rarely: `checksum`, Note [What a checksum misses].
        """
        tensors = self.tensors()
        text = _digest_of_text([tensor.layout for tensor in tensors], sorted(self.scalars().items()))
        return combined([text, *checksums([tensor.data for tensor in tensors])])

    # --- What state is ----------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[str, Tensor | Scalar]]:
        for number, chunk in enumerate(self._chunks):
            yield from _of_module(f"chunk{number}", chunk)
        for number, leaf in enumerate(_leaves(self._optimizer)):
            if leaf.optimizer is not None:  # a rank without parameters of this kind has none
                yield from _of_torch_optimizer(f"optimizer{number}", leaf.optimizer)
            if getattr(leaf, "grad_scaler", None) is not None:
                yield from _flattened(f"optimizer{number}.scaler", leaf.grad_scaler.state_dict())
        if self._scheduler is not None:
            yield from _flattened("scheduler", self._scheduler.state_dict())
        yield from _flattened("counters", self._counters())


def _of_module(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, Tensor | Scalar]]:
    for name, parameter in module.named_parameters():
        yield f"{prefix}.{name}", parameter
    for path, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield ".".join(filter(None, (prefix, path, name))), buffer
        if type(each).get_extra_state is not torch.nn.Module.get_extra_state:
            extra = each.get_extra_state()
            if isinstance(extra, io.BytesIO):
                extra = torch.frombuffer(bytearray(extra.getvalue()), dtype=torch.uint8)
            yield from _flattened(".".join(filter(None, (prefix, path, "extra"))), extra)


def _leaves(optimizer: Any) -> Iterator[Any]:
    """Yield upstream's optimizers that wrap one of torch's."""
    if optimizer is None:
        return
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    for each in chained or ():
        yield from _leaves(each)


def _of_torch_optimizer(prefix: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor | Scalar]]:
    """Yield the state of one of torch's optimizers or of its kind (Transformer Engine's and Apex's FusedAdam).

    What a group optimizes are the master weights, or the parameters themselves, or shards of either.
    """
    scales: Mapping[Any, Any] = getattr(optimizer, "_scales", {})  # of Transformer Engine's moments in less than fp32
    seen = set()
    for number, group in enumerate(optimizer.param_groups):
        yield from _flattened(f"{prefix}.group{number}", {key: value for key, value in group.items() if key != "params"})
        for position, parameter in enumerate(group["params"]):
            name = f"{prefix}.group{number}.{position}"
            seen.add(parameter)
            yield name, parameter
            yield from _flattened(name, optimizer.state.get(parameter, {}))
            yield from _flattened(f"{name}.scale", scales.get(parameter, {}))
    for position, key in enumerate(key for key in optimizer.state if key not in seen):
        yield from _flattened(f"{prefix}.other{position}", optimizer.state[key])
    for number, inner in enumerate(getattr(optimizer, "sub_optimizers", ())):  # optimizer offloaded to the host
        yield from _of_torch_optimizer(f"{prefix}.part{number}", inner)


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Tensor | Scalar]]:
    """Yield the tensors and scalars inside `value`. Raises TypeError for what could be state and cannot be compared."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _flattened(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _flattened(f"{name}.{position}", item)
    elif isinstance(value, Tensor | int | float | str | bool | None):
        yield name, value
    elif isinstance(value, torch.dtype | torch.device | enum.Enum):
        yield name, str(value)
    elif isinstance(value, numpy.generic):
        yield name, value.item()
    else:
        raise TypeError(f"the state has a {type(value).__name__} at {name}, which replicas cannot compare")


# --- Memory ---------------------------------------------------------------------------------------


class _Covered:
    """Which bytes have a name already. See Note [Each byte once]."""

    def __init__(self) -> None:
        self._edges: dict[torch.device, list[int]] = {}
        """By device: begins and ends of the ranges of addresses that are covered, ascending in turn."""
        self._with_gaps: set[tuple[object, ...]] = set()
        self._alive: list[Tensor] = []
        """What was looked at: no other tensor may come to lie at its address meanwhile."""

    def new_parts(self, name: str, tensor: Tensor) -> list[StateTensor]:
        """Return the parts of `tensor` that have no name yet, and give them this one."""
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
            return [StateTensor(name, data.contiguous().view(-1), shape)]
        size = flat.element_size()
        begin = flat.data_ptr()
        free = self._take(begin, begin + flat.numel() * size, data.device)
        if len(free) == 1 and free[0] == (begin, begin + flat.numel() * size):
            return [StateTensor(name, flat, shape)]
        parts = []
        for start, stop in free:  # in bytes, since what overlaps may be of another type
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
    """Return the memory of a tensor without gaps, in the order of its addresses; None where it has gaps or overlaps itself."""
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
