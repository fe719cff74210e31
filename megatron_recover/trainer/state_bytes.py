"""The tensors of a state as one range of bytes, and its scalars as bytes.

Only the bytes that have a name are in the range: not the padding of upstream's buffers, and not the
rest of the storage of a view (`trainer/state.py`, Note [Each byte once]). Nothing is pickled.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy
import torch
from torch import Tensor

from megatron_recover.trainer.state import Scalar


class StateBytes:
    """The bytes 0 to `num_bytes` of tensors, one after the other."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Use the memory of contiguous, one-dimensional tensors. Raises RuntimeError for others."""
        self._parts = [tensor.detach().view(torch.uint8) for tensor in tensors]
        self._ends = list(itertools.accumulate(part.numel() for part in self._parts))
        self.num_bytes = self._ends[-1] if self._ends else 0
        """Number of bytes."""
        self.devices = {part.device for part in self._parts}
        """Devices of the tensors."""

    def copy_out(self, start: int, stop: int, buffer: Tensor) -> None:
        """Copy the bytes `start` to `stop` to the begin of `buffer` (uint8, host memory).

        Copies from a GPU are enqueued on the current stream, if `buffer` is pinned.
        """
        for at, part in self._pieces(start, stop):
            _copy(part, buffer[at : at + part.numel()])

    def copy_in(self, start: int, stop: int, buffer: Tensor) -> None:
        """Copy the begin of `buffer` (uint8, host memory) to the bytes `start` to `stop`.

        Copies to a GPU are enqueued on the current stream, if `buffer` is pinned.
        """
        for at, part in self._pieces(start, stop):
            _copy(buffer[at : at + part.numel()], part)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the memory of `start` to `stop` in pieces, each with its place behind `start`."""
        for index in range(bisect.bisect_right(self._ends, start), len(self._parts)):
            part, end = self._parts[index], self._ends[index]
            begin = end - part.numel()
            if begin >= stop:
                return
            piece = part[max(start - begin, 0) : stop - begin]
            if piece.numel():
                yield max(begin, start) - start, piece


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy bytes between memory of equal size. On a CPU one core copies, and no lock is held.

    torch would copy with all cores of a CPU, which the training thread uses.
    """
    if source.device.type == target.device.type == "cpu":
        numpy.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)


class _Large(msgspec.Struct, frozen=True, array_like=True, tag="large"):
    """An integer beyond 64 bits, such as a number of floating-point operations."""

    digits: str


_Encoded = dict[str, Scalar | _Large]


def encoded(scalars: Mapping[str, Scalar]) -> bytes:
    """Return scalars as msgpack. Each has the same type and bits when it is `decoded`."""
    return msgspec.msgpack.encode({name: _fitting(value) for name, value in scalars.items()})


def _fitting(value: Scalar) -> Scalar | _Large:
    is_large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return _Large(f"{value:x}") if is_large else value


def decoded(message: bytes) -> dict[str, Scalar]:
    """Return the scalars of a message. Raises ValueError if it has others values."""
    found = msgspec.msgpack.decode(message, type=_Encoded)
    return {name: int(value.digits, 16) if isinstance(value, _Large) else value for name, value in found.items()}
