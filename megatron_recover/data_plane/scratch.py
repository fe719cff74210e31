"""The stream and the memory in which a GPU's sums over replicas happen.

One `Scratch` serves all sums of a rank for the life of its endpoint. A stream for each pass would
make torch's allocator keep as many sets of memory, since it reuses a block only on its own stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_recover.data_plane.transport import DeviceError


class Scratch:
    """The stream and the memory of a rank's sums. One transport at a time uses them.

    After a call that failed, a kernel may still write the memory, and other work on the stream
    would wait for that kernel. So `abandon` hands both to whoever retires the communicator, and the
    next use begins with those that were given back, or with new ones.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """Allocate nothing yet. `cuda` is `torch.cuda`, or stands for it in a test."""
        self._cuda = cuda
        self._stream: Any = None
        self._memory: list[Tensor] = []
        """Bytes for the operand at each index of a sum; grown as needed."""
        self._spare: deque[tuple[Any, list[Tensor]]] = deque()

    @property
    def stream(self) -> Any:
        """Return the stream, on the device that was current at its first use.

        It has a high priority: of the 32 streams of each priority that torch hands out in turn, it
        is none of those that most other work gets.
        """
        if self._stream is None:
            self._stream = self._cuda.Stream(priority=-1)
        return self._stream

    def like(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return a flat tensor for each source, of its type, device and number of elements.

        The content is undefined. Memory of earlier calls is used again where it is large enough.
        Raises DeviceError if the device has no memory left.
        """
        try:
            with self._cuda.stream(self.stream):  # where the kernels use it
                return [self._of(index, source) for index, source in enumerate(sources)]
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"no memory is left on the device for the sum over replicas: {error}") from error

    def _of(self, index: int, source: Tensor) -> Tensor:
        num_bytes = source.numel() * source.element_size()
        if index == len(self._memory):
            self._memory.append(source.new_empty(0, dtype=torch.uint8))
        if self._memory[index].numel() < num_bytes:
            self._memory[index] = source.new_empty(num_bytes, dtype=torch.uint8)
        return self._memory[index][:num_bytes].view(source.dtype)

    def abandon(self) -> tuple[Any, list[Tensor]]:
        """Return the stream and the memory, which must be kept until no kernel uses them.

        The next use has those that were given back, or new ones.
        """
        abandoned = self._stream, self._memory
        self._stream, self._memory = self._spare.pop() if self._spare else (None, [])
        return abandoned

    def give_back(self, stream: Any, memory: list[Tensor]) -> None:
        """Take a stream and memory back that no kernel uses any more. Thread-safe."""
        self._spare.append((stream, memory))
