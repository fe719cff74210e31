"""A GPU that is pretended: tensors that say they are on one, and a count of each wait of the host for it.

The elements are in host memory. What reads them on the host does not get at them but by a copy, so a read that waits for
the device is seen. Kernels are counted by nobody.

Note [What waits]
    - `_local_scalar_dense`: `item`, `bool`, `float` of a tensor;
    - `nonzero`, `unique` and the like, whose result has a size that the device decides;
    - an index that is on the host, or a mask;
    - a copy between host and device that is not `non_blocking`, or whose memory on the host is not pinned;
    - `Event.synchronize`, on an event that has not completed.

Note [What has completed]
    An event has completed once the host has waited for it, or for anything that comes behind it: later work on its stream,
    or work on a stream that has waited for it since. So nobody finds results early, and a wait for an early event does not
    complete the late ones.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_recover.trainer import checksum

DEVICE = torch.device("cuda", 0)
_WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "repeat_interleave")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class OnGpu(Tensor):
    """A tensor on the pretended GPU."""

    gpu: Gpu
    held: Tensor
    """The elements, in host memory."""

    @staticmethod
    def __new__(cls, held: Tensor, gpu: Gpu) -> OnGpu:
        # torch itself believes in "meta", which is a device that needs no driver.
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device="meta"
        )
        made.held, made.gpu = held, gpu
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: object) -> str:
        return f"OnGpu({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(each.gpu for each in tree_leaves((args, kwargs)) if isinstance(each, OnGpu))
        return gpu.dispatch(func, args, kwargs or {})


class Event:
    """An event of the pretended GPU; see Note [What has completed]."""

    gpu: Gpu

    def __init__(self, **_: object) -> None:
        self.reached: dict[str, int] = {}
        """For each stream the number of its events that have completed when this one has."""
        self.name, self._stream = "", ""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.current
        stream.reached[stream.name] += 1
        self.reached, self._stream = dict(stream.reached), stream.name
        self.name = f"event {stream.reached[stream.name]} on {stream.name}"
        self.gpu.order.append(self.name)

    def query(self) -> bool:
        return self.gpu.is_quick or self.gpu.completed[self._stream] >= self.reached.get(self._stream, 0)

    def synchronize(self) -> None:
        if not self.query():
            self.gpu.wait("Event.synchronize", self.reached)

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Stream:
    """A stream of the pretended GPU."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self.name = gpu, name
        self.reached = Counter({name: 0})
        """For each stream the number of its events that come before what is enqueued here now."""

    def wait_stream(self, other: Stream) -> None:
        self._gpu.order.append(f"{self.name} waits for {other.name}")
        self.reached |= other.reached

    def wait_event(self, event: Event) -> None:
        self._gpu.order.append(f"{self.name} waits for {event.name}")
        self.reached |= Counter(event.reached)

    def record_event(self) -> Event:
        event = torch.cuda.Event()
        event.record(self)
        return event


class Gpu(TorchFunctionMode):
    """Makes tensors "on cuda" pretended ones, in the thread in which it is entered."""

    def __init__(self, *, is_quick: bool = False) -> None:
        """Make a GPU. `is_quick`: it has done everything before the host asks."""
        super().__init__()
        self.is_quick = is_quick
        self.waits: Counter[str] = Counter()
        """How often the host has waited, by what for."""
        self.order: list[str] = []
        """Waits of streams, copies that nobody waits for, and events, in their order."""
        self.completed: Counter[str] = Counter()
        """For each stream the number of its events that have completed."""
        self.pinned: set[int] = set()
        """Addresses of pinned host memory."""
        self._training, self._num_streams = Stream(self, "training"), 0
        self._thread, self._of_thread = threading.get_ident(), threading.local()

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        return getattr(self._of_thread, "stream", self._training)

    def stream(self) -> Stream:
        """Make a stream. The product makes one, for its reductions."""
        self._num_streams += 1
        return Stream(self, "reduction" if self._num_streams == 1 else f"stream {self._num_streams}")

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one of this thread. In another thread than the first, also pretend the GPU there."""
        before = self.current
        self._of_thread.stream = stream or before
        try:
            with contextlib.nullcontext() if threading.get_ident() == self._thread else self:
                yield
        finally:
            self._of_thread.stream = before

    def wait(self, why: str, reached: dict[str, int] | None = None) -> None:
        """Count a wait: for what is enqueued on the current stream, or until the streams have `reached` these events."""
        self.waits[why] += 1
        self.completed |= Counter(self.current.reached if reached is None else reached)

    def tensor(self, held: Tensor) -> OnGpu:
        """Return a tensor on the GPU with the memory of `held`."""
        return OnGpu(held, self)

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        to_host = name == "_to_copy" and _is(kwargs.get("device"), "cpu")
        if (
            name in _WAITS
            or name in _INDEXED
            and any(not isinstance(each, OnGpu) or each.dtype is torch.bool for each in _indices(args[1]))
        ):
            self.wait(name)
        elif to_host:
            self._copy(name, kwargs.get("non_blocking", False), host=None)
        elif name == "copy_":
            into, source = args[0], args[1]
            if isinstance(into, OnGpu) != isinstance(source, OnGpu):
                non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
                self._copy(name, non_blocking, into if isinstance(source, OnGpu) else source)
        found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if to_host or (isinstance(args[0], Tensor) and not isinstance(args[0], OnGpu) and name.endswith("_")):
            return found
        return tree_map(lambda each: self.tensor(each) if isinstance(each, Tensor) else each, found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return self._pinned(args[0].clone())
        pins = kwargs.pop("pin_memory", False)
        if name == "to" and not isinstance(args[0], OnGpu) and any(_is(each, "cuda") for each in (*args[1:], *kwargs.values())):
            self._copy("to", kwargs.pop("non_blocking", False), args[0])
            others = {key: _held(each) for key, each in kwargs.items()} | {"copy": True}
            return self.tensor(args[0].to(*map(_held, args[1:]), **others))
        on_gpu = _is(kwargs.get("device"), "cuda")
        if on_gpu:
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if pins:
            self._pinned(found)
        if name == "tensor" and on_gpu:
            self.wait("tensor")
        return self.tensor(found) if on_gpu and not isinstance(found, OnGpu) else found

    def _pinned(self, tensor: Tensor) -> Tensor:
        """Note that the memory of `tensor` is pinned for as long as the tensor lives."""
        self.pinned.add(tensor.data_ptr())
        weakref.finalize(tensor, self.pinned.discard, tensor.data_ptr())
        return tensor

    def _copy(self, name: str, non_blocking: bool, host: Tensor | None) -> None:
        if not non_blocking or host is None or host.data_ptr() not in self.pinned:
            self.wait(name)
        else:
            self.order.append(f"copy on {self.current.name}")


def _indices(given: Any) -> list[Tensor]:
    return [each for each in given if isinstance(each, Tensor)]


def _held(each: Any) -> Any:
    if isinstance(each, OnGpu):
        return each.held
    return torch.device("cpu") if isinstance(each, torch.device) else each


def _is(device: Any, kind: str) -> bool:
    return isinstance(device, torch.device | str) and torch.device(device).type == kind


@contextlib.contextmanager
def pretended(*, is_quick: bool = False) -> Iterator[Gpu]:
    """Pretend a GPU in this thread."""
    gpu = Gpu(is_quick=is_quick)
    with pytest.MonkeyPatch.context() as patch, gpu:
        for name in _FACTORIES:  # another test of the process may have called `megatron.cpu.enable_cpu`
            patch.setattr(torch, name, getattr(getattr(torch, name), "__wrapped__", getattr(torch, name)))
        patch.setattr(torch.cuda, "Event", type("Event", (Event,), {"gpu": gpu}))
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: gpu.stream())
        patch.setattr(torch.cuda, "stream", gpu.on)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        yield gpu
    checksum._weights.cache_clear()
