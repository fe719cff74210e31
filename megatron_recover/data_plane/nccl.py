"""A data plane over NCCL on CUDA. **It is not verified on a GPU**.

Each generation has a communicator of its own per position. nccl4py makes it directly and
nonblocking, for two reasons. torch's process group would bring a watchdog that ends the process.
Communicators split from a parent do not inherit the parent's abort.

NCCL may not stop at once, and may write memory after an abort, so it reduces into scratch. The host
waits for the kernels' event in short slices. Between slices it checks for a revoke, the deadline
and NCCL's asynchronous error. Only after the event has completed is scratch copied to the results,
on the caller's stream. On failure a separate thread receives communicator and scratch, aborts the
communicator, and then drops the scratch. Whatever NCCL still writes is memory that nobody else has.

The unique id travels over a `direct` transport of the same generation. So rendezvous has the
deadlines and fences of that transport, and needs no store. NCCL notices a dead peer only where it
uses sockets. Elsewhere the agents notice it, and a `revoke` follows.

NCCL adds in an order of its own. The result has the same bits on all members of a generation, but
the order is not that of replica ids.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from megatron_recover.data_plane.direct import DirectTransport
from megatron_recover.data_plane.transport import (
    CallPart,
    DeadlineExceeded,
    PeerLost,
    Probe,
    Revoked,
    TransportError,
    check_operands,
    no_probe,
)
from megatron_recover.data_plane.writing import WriteGate
from megatron_recover.deadlines import Deadlines

if TYPE_CHECKING:
    from torch import Tensor

UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
"""Values of ncclResult_t."""
SHORTEST_SLICE_S, LONGEST_SLICE_S = 20e-6, 1e-3
"""Seconds between two looks at an event. The slice doubles each time, so that a small sum is not
delayed and a large one costs no CPU."""


class NcclTransport:
    """The NCCL transport of one generation, on torch's current CUDA device.

    Only `revoke` and `close` are thread-safe.
    """

    def __init__(
        self,
        nccl: ModuleType,
        rendezvous: DirectTransport,
        deadlines: Deadlines,
        *,
        unreachable: Callable[[], tuple[int, ...]] = lambda: (),
    ) -> None:
        """Use the binding `nccl` (see `load`). The first call makes the communicator.

        `deadlines`: how long the parts of a call may last. `unreachable()` returns the members that
        do not answer a probe; NCCL does not report which peer its kernels wait for.
        """
        self.generation = rendezvous.generation
        self.members = rendezvous.members
        self.me = rendezvous.me
        self._nccl = nccl
        self._rendezvous = rendezvous
        self._unreachable = unreachable
        self._communicator: Any = None
        self._in_use: list[Tensor] = []
        """Tensors that NCCL may still read or write."""
        self._deadlines = deadlines
        self._part, self._since = CallPart.CONNECT, 0.0
        """The part that the current call is in, and the monotonic time when it began."""
        self._failure = ""
        self._revoked = threading.Event()
        self._calling = threading.Lock()
        self._writing = WriteGate()
        """Gate for the host's writes only. Copies that it has enqueued run later, in the order of
        the caller's stream."""

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, probe: Probe | None = None) -> None:
        """Sum as `Transport.sum_into` does, in NCCL's order of additions.

        Connecting has a wait of its own. Kernels do not distinguish waiting for the slowest member
        from the sum, so both together may take `slowest_s`.
        """
        check_operands(sources, results, device="cuda")
        probe = probe or no_probe
        with self._call():
            probe("begin")
            summed = self._sum(sources, probe) if len(self.members) > 1 else sources
            probe("middle")
            for scratch, result in zip(summed, results, strict=True):
                self._check()
                with self._writing:
                    result.copy_(scratch.view_as(result))
            probe("end")

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, targets: Sequence[int], tag: int) -> None:
        """Copy as `Transport.copy_into` does, through host memory and the rendezvous sockets.

        Only all members together can make a communicator, and not all take part in a copy. Copies
        follow faults only, so they are rare.
        """
        check_operands(tensors, device="cuda")
        sending = self.me == source
        if not sending and self.me not in targets:
            return
        with self._call():
            host = [tensor.detach().cpu() if sending else torch.empty_like(tensor, device="cpu") for tensor in tensors]
            self._rendezvous.copy_into(host, source=source, targets=targets, tag=tag)
            if not sending:
                for tensor, copy in zip(tensors, host, strict=True):
                    self._check()
                    with self._writing:
                        tensor.detach().copy_(copy)

    def revoke(self) -> None:
        """Revoke as `Transport.revoke` does.

        A running call aborts the communicator as it ends; without a call it is aborted here.
        """
        self._revoked.set()
        self._rendezvous.revoke()
        self._writing.shut()
        if self._calling.acquire(blocking=False):
            self._dispose()
            self._calling.release()

    def close(self) -> None:
        """Close as `Transport.close` does."""
        self._rendezvous.close()
        self.revoke()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Run one call. If it fails in any way, dispose of the communicator."""
        if not self._calling.acquire(blocking=False):
            raise RuntimeError("a transport is used by one thread at a time")
        self._begin(CallPart.SLOWEST)
        try:
            self._check()
            if self._failure:
                raise TransportError(f"generation {self.generation} is broken: {self._failure}")
            yield
        except BaseException as error:
            self._failure = self._failure or str(error) or repr(error)
            self._dispose()
            if isinstance(error, TransportError) and not isinstance(error, DeadlineExceeded | PeerLost):
                self._probe_peers(error)
            if not isinstance(error, Revoked):
                self._check()  # after a revoke other errors are its consequences
            raise
        finally:
            self._calling.release()
            if self._revoked.is_set():
                self.revoke()  # a revoke may have come while this call held the communicator

    def _probe_peers(self, error: TransportError) -> None:
        """Make the members that do not answer a probe the peers of an error.

        After a revoke a recovery waits for this process, so it probes then only if the call had
        waited for half of its limit.
        """
        stalled = time.monotonic() - self._since >= self._part.limit_s(self._deadlines) / 2
        if stalled or not self._revoked.is_set():
            error.peers, error.stalled = self._unreachable(), stalled

    def _check(self) -> None:
        if self._revoked.is_set():
            raise Revoked(f"generation {self.generation} was revoked")

    def _sum(self, sources: Sequence[Tensor], probe: Probe) -> list[Tensor]:
        """Return the complete sums, in new memory."""
        if self._communicator is None:
            self._connect()
            self._begin(CallPart.SLOWEST)
        summed = [torch.empty_like(source) for source in sources]
        self._in_use = [*sources, *summed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for source, scratch in zip(sources, summed, strict=True):
            if source.numel():
                self._communicator.allreduce(source.detach(), scratch, self._nccl.SUM, stream=stream.cuda_stream)
                self._wait(self._accepted)
        done = torch.cuda.Event()
        done.record(stream)
        probe("sent")
        self._wait(lambda: self._accepted() and done.query())
        self._in_use = []
        return summed

    def _connect(self) -> None:
        """Make the communicator, once all members have met over `direct`.

        The lowest member contributes the unique id, all others zeros; the sum is the id.
        """
        mine, unique_id = torch.zeros(UNIQUE_ID_BYTES, dtype=torch.uint8), torch.empty(UNIQUE_ID_BYTES, dtype=torch.uint8)
        if self.me == self.members[0]:
            mine = torch.frombuffer(bytearray(bytes(self._nccl.get_unique_id())), dtype=torch.uint8)
        self._rendezvous.sum_into([mine], [unique_id], tag=-1)
        self._begin(CallPart.CONNECT)
        self._communicator = self._nccl.Communicator.init(
            len(self.members),
            self.members.index(self.me),
            self._nccl.UniqueId.from_bytes(unique_id.numpy().tobytes()),
            self._nccl.NCCLConfig(blocking=False),
        )
        self._wait(self._accepted)

    def _accepted(self) -> bool:
        """Return whether NCCL is ready for the next call.

        Raises TransportError for an asynchronous error.
        """
        result = int(self._communicator.get_async_error())
        if result not in (SUCCESS, IN_PROGRESS):
            raise TransportError(f"NCCL: {self._communicator.get_last_error()} (result {result})")
        return result == SUCCESS

    def _begin(self, part: CallPart) -> None:
        """Begin the next part of a call."""
        self._part, self._since = part, time.monotonic()

    def _wait(self, condition: Callable[[], bool]) -> None:
        slice_s, limit_s = SHORTEST_SLICE_S, self._part.limit_s(self._deadlines)
        while True:
            self._check()
            if condition():
                return
            if time.monotonic() - self._since >= limit_s:
                raise DeadlineExceeded(self._part, self._unreachable(), limit_s)
            self._revoked.wait(slice_s)
            slice_s = min(2 * slice_s, LONGEST_SLICE_S)

    def _dispose(self) -> None:
        """Give the communicator and its memory to a thread that aborts the communicator.

        The caller holds `_calling`.
        """
        communicator, in_use = self._communicator, self._in_use
        self._communicator, self._in_use = None, []
        if communicator is not None:
            # A daemon thread: an abort that hangs, as in NCCL 2.25, must not keep the process from
            # ending.
            threading.Thread(target=_abort, args=(communicator, in_use), name="nccl-abort", daemon=True).start()


def _abort(communicator: Any, in_use: list[Tensor]) -> None:
    """Abort the communicator, and only then release the tensors."""
    communicator.abort()
    in_use.clear()


def load() -> ModuleType:
    """Return the nccl4py binding. Raises ValueError without CUDA or nccl4py."""
    if not torch.cuda.is_available():
        raise ValueError("--recover-transport nccl needs a CUDA device and torch sees none; use direct")
    try:
        import nccl.core as nccl
    except ImportError as error:
        raise ValueError(f"--recover-transport nccl needs nccl4py ({error}); pip install 'megatron-recover[gpu]'") from error
    return nccl
