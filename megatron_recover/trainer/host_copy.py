"""Copies between a device and the host for which no thread waits unless it has nothing else to do.

A synchronous copy makes the host wait until the device has done all that its stream has. Then the
device has nothing to do until the host has enqueued more. So what the host has to know of a
device's tensors travels in one copy to pinned memory. An event behind the copy shows when the copy
has arrived (`HostCopy.has_arrived`). Tensors on a CPU are not copied.

Note [Who ends a wait]
    `HostCopy.wait` has no deadline of its own. A thread that waits for its device changes nothing,
    so it may be killed at any time, and SIGKILL ends it. While other replicas live, they miss the
    rank's sum or its replica's vote and have the replica removed. The last replica is missed by
    nobody: the detector names it once all its ranks wait, and fences it after the deadline
    (`core/detector.py`, Note [The last replica waits for itself]). The same holds for every other
    read from a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on `device`, without waiting for the device.

    `tensor` is not in pinned memory. The caller may overwrite it at once.
    """
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned copy until it is read


class HostCopy:
    """Contiguous tensors on their way to the host. Each device makes one copy of all of its own.

    On a CPU the tensors are not copied: read them before they change.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Enqueue the copies, on the current streams."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._arriving = [
            _Arriving([index for index, tensor in enumerate(self._tensors) if tensor.device == device], self._tensors)
            for device in {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}
        ]

    def has_arrived(self) -> bool:
        """Return whether `tensors` would return at once."""
        return all(each.event.query() for each in self._arriving)

    def wait(self) -> None:
        """Return when the copies have arrived, and with them all that came before on their streams.

        See Note [Who ends a wait].
        """
        for arriving in self._arriving:
            arriving.event.synchronize()

    def tensors(self) -> list[Tensor]:
        """Return the tensors in host memory, with their types and shapes; wait for them."""
        self.wait()
        for arriving in self._arriving:
            for index, tensor in arriving.cut(self._tensors):
                self._tensors[index] = tensor
        self._arriving = []
        return self._tensors


class _Arriving:
    """One copy: the tensors of one device, those with the largest elements first."""

    def __init__(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> None:
        # In this order each begins at a multiple of its elements' size.
        self._indices = sorted(indices, key=lambda index: -tensors[index].element_size())
        together = torch.cat([tensors[index].reshape(-1).view(torch.uint8) for index in self._indices])
        self._host = torch.empty(together.shape, dtype=torch.uint8, pin_memory=True)
        self._host.copy_(together, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(together.device))

    def cut(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Return (index, tensor in host memory) for each tensor of this copy."""
        sizes = [tensors[index].numel() * tensors[index].element_size() for index in self._indices]
        return [
            (index, piece.view(tensors[index].dtype).view(tensors[index].shape))
            for index, piece in zip(self._indices, self._host.split(sizes), strict=True)
        ]
