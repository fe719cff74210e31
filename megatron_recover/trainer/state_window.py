"""The state window: the time in which the state of a rank does not change.

The window opens when a training step is applied, and closes before the next training step changes
anything. Forward and backward of that next step, evaluations and steps without microbatches run
while the window is open. So what is read in an open window is the state of one iteration, and
nobody stops for the reading.

Note [Reads by other threads]
    A thread that serves the state to others reads while the training thread computes. Nothing
    holds the training thread back, so a read may overlap the close. Such a read is void.
    `OutsideReads` decides this without a wait. Each open window has an object of its own, which the
    close marks closed, for good, before anything changes the state. A reader looks at the mark
    after each read. Mark and look are under one lock. If the look came first, the read was over
    before the state changed. If the mark came first, the look sees it. (One counter, odd while
    closed, would do the same. With an object for each window nobody can take a later one for it.)
    On a GPU reads are enqueued on a stream of their own, behind the opening event. A read that is
    enqueued when its reader looks is valid: the close has the current stream wait for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class StateWindow:
    """The state window of one rank. The training thread calls all methods.

    One window serves copies (`copy`) and readers in other threads (`expose`).
    """

    def __init__(self) -> None:
        """Begin with an open window: before the first step nothing changes."""
        self._is_open = True
        self._reading: list[StateCopy | OutsideReads] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        """Streams of `OutsideReads`. They are kept, since libraries keep memory for each stream."""

    def open(self) -> None:
        """Let copies begin; call this when a training step is applied."""
        self._is_open = True

    def close(self) -> None:
        """Have what comes next on the current streams wait for the copies; let no other begin.

        Call this before a committed step changes the state. The thread does not wait: the streams
        of a GPU do, and copies of tensors on a CPU are complete by now. Reads of a CPU's tensors
        by other threads that are not complete are void.
        """
        self._is_open = False
        for reading in self._reading:
            reading.hold_back()
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

    def expose(self) -> OutsideReads:
        """Let other threads read the state until the window closes.

        Raises RuntimeError if the window is closed.
        """
        if not self._is_open:
            raise RuntimeError("state is to be read while a step changes it")
        self._reading = [each for each in self._reading if not isinstance(each, OutsideReads) or each.is_open]
        reads = OutsideReads(self._streams)
        self._reading.append(reads)
        return reads


class OutsideReads:
    """Reads by other threads in one open window. See Note [Reads by other threads]."""

    def __init__(self, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        """Begin, in the training thread. What was enqueued on its current stream comes before.

        `streams` are those of all windows of this rank, by device.
        """
        self._lock = threading.Lock()
        self._is_open = True
        self._streams = streams
        self._stream: torch.cuda.Stream | None = None
        """The stream of the reads, once there was one in this window."""
        self._opened: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self._opened = torch.cuda.current_stream().record_event()
            self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def is_open(self) -> bool:
        """Return whether all that was read, or enqueued by `enqueuing`, so far is of the window."""
        with self._lock:
            return self._is_open

    @contextlib.contextmanager
    def enqueuing(self) -> Iterator[None]:
        """Enqueue what the body does on a GPU on the stream of the reads. Any thread may call."""
        if self._opened is None:
            yield
            return
        with self._lock:
            if (stream := self._stream) is None:
                if self._device not in self._streams:
                    self._streams[self._device] = torch.cuda.Stream(self._device)
                self._stream = stream = self._streams[self._device]
                stream.wait_event(self._opened)
        # A new thread's device is GPU 0, where the end of `stream` alone would make a context.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def wait(self) -> None:
        """Return when all that was enqueued before has been done."""
        if self._stream is not None:
            self._stream.record_event().synchronize()

    def hold_back(self) -> None:
        """Close: what is read from now on is void. The training thread calls it, and never waits.

        What comes next on its current stream waits for the reads that are enqueued.
        """
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


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
