"""The state window: the time in which the state of a rank does not change.

The window opens when a training step is applied, and closes before the next training step changes
anything. Forward and backward of that next step, evaluations and steps without microbatches run
while the window is open. So what is read in an open window is the state of one iteration, and
nobody stops for the reading.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StateWindow:
    """The state window of one rank. The training thread calls all methods."""

    def __init__(self) -> None:
        """Begin with an open window: before the first step nothing changes."""
        self._is_open = True
        self._reading: list[StateCopy] = []

    def open(self) -> None:
        """Let copies begin; call this when a training step is applied."""
        self._is_open = True

    def close(self) -> None:
        """Have what comes next on the current streams wait for the copies; let no other begin.

        Call this before a committed step changes the state. The thread does not wait: the streams
        of a GPU do, and copies of tensors on a CPU are complete by now.
        """
        self._is_open = False
        for copy in self._reading:
            copy.hold_back()
        self._reading = []

    def copy(self, tensors: Sequence[Tensor]) -> StateCopy:
        """Begin a copy of `tensors` to host memory, and return it.

        Raises RuntimeError if the window is closed.
        """
        if not self._is_open:
            raise RuntimeError("state is to be copied while a step changes it")
        copy = StateCopy(tensors)
        self._reading.append(copy)
        return copy


class StateCopy:
    """Tensors on their way to the host, in the order in which they were given.

    On a GPU streams of their own copy them to pinned memory while the device computes. On a CPU
    they are copied at once, since a thread that copies would take the core that computes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy. What has been enqueued on the current streams comes before."""
        self._tensors = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for tensor in tensors:
            self._tensors.append(tensor.detach().clone() if tensor.device.type == "cpu" else self._enqueued(tensor.detach()))
        self._ends = [stream.record_event() for stream in self._streams.values()]

    def _enqueued(self, tensor: Tensor) -> Tensor:
        """Return a tensor in pinned memory into which the stream of the device copies `tensor`."""
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # some exist for this copy alone, and their memory is used again
        return host

    def hold_back(self) -> None:
        """Have the current stream of each device wait for the copy."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def tensors(self) -> list[Tensor]:
        """Return the copies in host memory; wait until they have arrived. Any thread may call."""
        for end in self._ends:
            end.synchronize()
        return self._tensors
