"""The stream and the memory in which a GPU's sums over replicas happen.

One `Scratch` serves all sums of a rank for the life of its reduction. A stream for each pass would
make torch's allocator keep as many sets of memory, since it reuses a block only on its own stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Scratch:
    """Used by one transport at a time.

    After a call that failed, a kernel may still write the memory, and other work on the stream
    would wait for that kernel. So `abandon` hands both to whoever retires the communicator, and the
    next use begins with new ones.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """Allocate nothing yet. `cuda` is `torch.cuda`, or stands for it in a test."""
        self._cuda = cuda
        self._stream: Any = None
        self._memory: list[Tensor] = []
        """Bytes for the operand at each index of a sum; grown as needed."""

    @property
    def stream(self) -> Any:
        """Return the stream, on the device that was current at its first use."""
        if self._stream is None:
            self._stream = self._cuda.Stream()
        return self._stream

    def like(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return a flat tensor for each source, of its type, device and number of elements.

        The content is undefined. The memory is that of the call before.
        """
        found = []
        for index, source in enumerate(sources):
            num_bytes = source.numel() * source.element_size()
            if index == len(self._memory):
                self._memory.append(source.new_empty(0, dtype=torch.uint8))
            if self._memory[index].numel() < num_bytes:
                self._memory[index] = source.new_empty(num_bytes, dtype=torch.uint8)
            found.append(self._memory[index][:num_bytes].view(source.dtype))
        return found

    def abandon(self) -> list[object]:
        """Return the stream and the memory, which must be kept until no kernel uses them."""
        abandoned = [self._stream, *self._memory]
        self._stream, self._memory = None, []
        return abandoned
