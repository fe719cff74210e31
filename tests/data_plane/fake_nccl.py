"""An NCCL and a CUDA of a few lines of Python: late, wrong in any call, and writing for as long as the real ones may.

Members are threads of one process, and a stream is a thread that runs kernels. A kernel writes garbage into its target until
all members have come, and looks at the abort flag only now and then, as on a device. What must never happen is noted in
`World.violations`: two kernels that may write the same memory, memory freed under a kernel, a communicator destroyed under one,
a kernel that is not behind the caller's stream, and scratch that the caller's stream reads without its allocator's knowledge.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_recover.data_plane.nccl import Sums

GARBAGE = 0x7F
UNIQUE_ID = b"\x07" * 128
REMOTE_ERROR = 6
DEVICE = 3


class NcclError(Exception):
    """As `nccl.bindings.nccl.NCCLError`: no relation of TransportError."""


class Stream:
    """A thread that runs what is enqueued, in order."""

    numbers = itertools.count(1)
    by_number: dict[int, Stream] = {}

    def __init__(self) -> None:
        self.cuda_stream = next(self.numbers)
        self.by_number[self.cuda_stream] = self
        self.behind: dict[HostStream, int] = {}
        """How much of another stream's work is in front of what is enqueued from now on."""
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def wait_stream(self, other: HostStream) -> None:
        self.behind[other] = other.num_works


class Event:
    def __init__(self) -> None:
        self._done = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.enqueue(self._done.set)

    def query(self) -> bool:
        return self._done.is_set()


class HostStream:
    """The stream of one calling thread: what is enqueued has happened, and still counts as work that others wait for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.num_works = 0
        self.unrecorded: set[int] = set()
        """Addresses of scratch of this thread's sums that the allocator does not keep for this stream."""

    def enqueue(self, work: Callable[[], None]) -> None:
        self.num_works += 1
        work()

    def query(self) -> bool:
        if self._world.lost_device is not None:
            raise self._world.lost_device
        return True


class Operand:
    """A tensor as a kernel sees it: an address, and nothing that keeps the memory from being freed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._place = tensor.storage_offset(), tensor.size()
        self.dtype, self.first = tensor.dtype, tensor.data_ptr()
        self.num_bytes = tensor.numel() * tensor.element_size()

    @property
    def is_freed(self) -> bool:
        return self._storage.expired()

    def read(self) -> torch.Tensor | None:
        """A copy of what is in the memory; None if it was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return None if storage is None else torch.empty(0, dtype=self.dtype).set_(storage, *self._place).clone()


def record_stream(tensor: torch.Tensor, stream: HostStream) -> None:
    """As `torch.Tensor.record_stream`, which no processor has."""
    stream.unrecorded.discard(tensor.data_ptr())


class World:
    """What the communicators of all members share, and the cuda of one machine."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.violations: list[str] = []
        self.writing: list[tuple[int, int]] = []
        """First and last address of the target of each running kernel."""
        self.failing: dict[tuple[int, str], int] = {}
        """(position, call) -> number of the call, from 1, that raises."""
        self.lost_device: Exception | None = None
        """What every stream says once the device is lost."""
        self.error: Exception | None = None
        """What is raised then; None: `NcclError`."""
        self.calls: Counter[tuple[int, str]] = Counter()
        self.arrived: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """(number of the group of communicators, number of its sum) -> position -> content of the source."""
        self.made: list[Communicator] = []
        self.devices: dict[threading.Thread, int] = {}
        """The device that a thread has chosen; a new thread has device 0."""
        self.host_streams: dict[threading.Thread, HostStream] = {}
        self.launch_s = 0.005
        """How long NCCL's own thread takes to enqueue a kernel."""
        self.forgets = False
        """True: NCCL does not know of the kernels that run, as after a launch that failed halfway."""
        self.hangs_on_error = False
        """True: a kernel whose connection is lost waits for ever, as on a device."""
        self.may_free = threading.Event()
        """Unset: to free a communicator takes for ever."""
        self.may_free.set()
        self.revoking = threading.Event()
        """Set once a communicator is being revoked."""
        self.may_revoke = threading.Event()
        """Unset: to revoke a communicator takes for ever."""
        self.may_revoke.set()
        self.free_s = 0.0
        """How long it takes to free a communicator."""
        self.last_error = "remote process exited"
        self.ends_on_error = False
        """True: an error ends the kernel. A lost connection does not."""
        self.generation = 0
        self.num_streams = 0
        self.blind_s = 0.05
        """How long a kernel runs before it looks at the abort flag."""
        self.deaf: tuple[int, ...] = ()
        """Members whose kernels never look."""
        self.pause: Callable[[torch.Tensor], None] = lambda source: None
        """Called by a kernel when all members have come."""
        self.after_asking: Callable[[Communicator], None] = lambda communicator: None
        """Called when a communicator has said how it is."""

    # --- torch.cuda ---
    def Stream(self, *, priority: int) -> Stream:  # noqa: N802
        assert priority == -1
        self.num_streams += 1
        return Stream()

    Event = Event

    def current_stream(self) -> HostStream:
        return self.host_streams.setdefault(threading.current_thread(), HostStream(self))

    def stream(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return DEVICE

    def set_device(self, device: int) -> None:
        self.devices[threading.current_thread()] = device

    # --- nccl.core ---
    SUM = "sum"

    class UniqueId:
        from_bytes = staticmethod(bytes)

    def get_unique_id(self) -> bytes:
        self.count(0, "get_unique_id")
        return UNIQUE_ID

    @staticmethod
    def NCCLConfig(*, blocking: bool, max_ctas: int) -> object:  # noqa: N802
        assert not blocking and 0 < max_ctas <= 32
        return None

    @property
    def Communicator(self) -> Any:  # noqa: N802
        world = self

        class Maker:
            @staticmethod
            def init(size: int, position: int, unique_id: bytes, config: object) -> Communicator:
                assert unique_id == UNIQUE_ID
                world.count(position, "init")
                return Communicator(world, size, position)

        return Maker

    def count(self, position: int, call: str) -> None:
        """Count a call; raise if it is the one that fails."""
        with self.lock:
            self.calls[position, call] += 1
            if self.failing.get((position, call)) == self.calls[position, call]:
                raise self.error or NcclError(f"{call} of {position}")

    def violated(self, what: str) -> None:
        with self.lock:
            self.violations.append(what)


class Communicator:
    def __init__(self, world: World, size: int, position: int) -> None:
        self.world, self.size, self.position = world, size, position
        with world.lock:
            self.group = world.generation
            world.made.append(self)
        self.num_sums = 0
        self.error = 0
        self.aborted = threading.Event()
        self.destroyed = threading.Event()
        self.running = self.launching = 0
        self.was_connected = False
        self.has_job = False
        """NCCL has not been asked since its thread has enqueued a sum: the job of that thread is linked to this."""
        self.job_is_freed = False
        """The communicator was revoked with that job: every call that looks at it finds freed memory."""

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, op: str, *, stream: int) -> None:
        self.world.count(self.position, "allreduce")
        if self.launching:
            raise NcclError("a call before NCCL was ready")
        host = self.world.current_stream()
        if Stream.by_number[stream].behind.get(host) != host.num_works:
            self.world.violated("a kernel may run before the work of the caller's stream")
        host.unrecorded.add(target.data_ptr())
        number, self.num_sums = self.num_sums, self.num_sums + 1
        operands = Operand(source), Operand(target)
        with self.world.lock:
            self.running, self.launching, self.has_job = self.running + 1, self.launching + 1, True

        def launch() -> None:
            time.sleep(self.world.launch_s)
            Stream.by_number[stream].enqueue(lambda: self._kernel(number, *operands))
            with self.world.lock:
                self.launching -= 1

        threading.Thread(target=launch, daemon=True).start()

    def _kernel(self, number: int, source: Operand, target: Operand) -> None:
        world, mine, content = self.world, (target.first, target.first + target.num_bytes), source.read()
        with world.lock:
            if any(low < mine[1] and mine[0] < high for low, high in world.writing):
                world.violated("two kernels may write the same memory")
            world.writing.append(mine)
            if content is not None:
                world.arrived.setdefault((self.group, number), {})[self.position] = content
        try:
            begun, paused = time.monotonic(), False
            while True:
                if source.is_freed or content is None or target.is_freed:
                    return world.violated("memory was freed under a kernel")
                ctypes.memset(target.first, GARBAGE, target.num_bytes)
                if time.monotonic() - begun >= world.blind_s and self.position not in world.deaf and self.aborted.is_set():
                    return None
                if self.error and world.ends_on_error:
                    return None
                sources = world.arrived[self.group, number]
                if len(sources) == self.size and not (self.error and world.hangs_on_error):
                    if not paused:
                        world.pause(content)
                        paused = True
                        continue
                    total = sum(sources[position] for position in range(self.size))
                    assert isinstance(total, torch.Tensor) and total.dtype == target.dtype
                    ctypes.memmove(target.first, total.data_ptr(), target.num_bytes)
                    return None
                time.sleep(0.001)
        finally:
            with world.lock:
                world.writing.remove(mine)
                self.running -= 1

    def get_async_error(self) -> int:
        self.world.count(self.position, "get_async_error")
        with self.world.lock:
            result = 7 if self._is_busy() else self.error  # a lost connection stays an error
            self.was_connected |= result == 0
            self.has_job &= result != 0
        self._looks_at_its_job()
        self.world.after_asking(self)
        return result

    def _is_busy(self) -> bool:
        if self.aborted.is_set():
            return self.running > 0 and not self.world.forgets
        return self.launching > 0 or sum(each.group == self.group for each in self.world.made) < self.size

    def get_last_error(self) -> str:
        self.world.count(self.position, "get_last_error")
        return self.world.last_error

    def revoke(self) -> None:
        self.world.count(self.position, "revoke")
        self._on_its_device()
        self.world.revoking.set()
        self.world.may_revoke.wait()
        while self.launching:  # it waits for its thread
            time.sleep(0.001)
        if self.aborted.is_set():
            raise NcclError("it was revoked before")
        if not self.was_connected:
            self.world.violated("a communicator was revoked that was never connected")
        self.aborted.set()
        self.job_is_freed = self.has_job
        if self.error:
            raise NcclError("a connection was lost")

    def destroy(self) -> None:
        self.world.count(self.position, "destroy")
        self._looks_at_its_job()
        if self.error:
            raise NcclError("it has an error")
        self._free()

    def abort(self) -> None:
        self.world.count(self.position, "abort")
        self._looks_at_its_job()
        self.aborted.set()
        self._free()

    def _free(self) -> None:
        self._on_its_device()
        time.sleep(self.world.free_s)
        self.world.may_free.wait()
        if any(each.running for each in self.world.made if each.group == self.group):
            self.world.violated("memory was freed that a kernel of a peer may read")
        if self.running:
            self.world.violated("a communicator was freed under a kernel")
        self.destroyed.set()

    def _looks_at_its_job(self) -> None:
        if self.job_is_freed:
            self.world.violated("a job was used that the revoke had freed")

    def _on_its_device(self) -> None:
        if self.world.devices.get(threading.current_thread(), 0) != DEVICE:
            self.world.violated("a context was made on device 0")


def sums_of(world: World, deadlines: Any, *, has_own_collectives: bool = True) -> Sums:
    """The sums of one member of the world."""
    return Sums(world, close_s=deadlines.close_s, has_own_collectives=has_own_collectives, cuda=world)  # type: ignore[arg-type]
