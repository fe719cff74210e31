"""A data plane over NCCL on CUDA. **It is not verified on a GPU**.

Each generation has a communicator of its own per position. nccl4py makes it directly and
nonblocking, for two reasons. torch's process group would bring a watchdog that ends the process.
Communicators split from a parent do not inherit the parent's abort.

NCCL may not stop at once, and may write memory after a revoke, so it reduces into scratch
(`scratch.py`). The host waits for the kernels' event in short slices. Between slices it checks for
a revoke, the deadline and NCCL's asynchronous error. Only after the event has completed without an
error is scratch copied to the results, on the caller's stream. On failure a separate thread retires
communicator and scratch (`nccl_communicator.py`). Whatever NCCL still writes is memory that nobody
else has.

An error of the device itself is no failure of a sum. The device cannot be used any more, so the
error leaves the call as it is, and ends the process.

The unique id travels over a `direct` transport of the same generation. So rendezvous has the
deadlines and fences of that transport, and needs no store. NCCL notices a dead peer only where it
uses sockets. Elsewhere the agents notice it, and a `revoke` follows.

NCCL adds in an order of its own. The result has the same bits on all members of a generation, but
the order is not that of replica ids.

Note [Overlap]
    Beside a backward two communicators have kernels on one GPU: this one and the replica's own.
    Each kernel occupies its blocks until its peers have come. So one of them must never wait for
    the other to leave, or a circle over several GPUs can close:

    - They fit on the device together (`MAX_CTAS`).
    - They do not share a hardware queue. There a kernel that waits for its stream holds up all that
      was enqueued later, on whatever stream.
    - NCCL does not put them in one order, which would have to be the same on all ranks.
    - No communicator is made meanwhile: that may wait for the device.

    Where one of these does not hold, the pass is reduced when it is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from megatron_recover.config import device_queues
from megatron_recover.data_plane.direct import DirectTransport
from megatron_recover.data_plane.nccl_communicator import Communicator, Retirement, transport_errors
from megatron_recover.data_plane.scratch import Scratch
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
        scratch: Scratch,
        retirement: Retirement,
        *,
        unreachable: Callable[[], tuple[int, ...]] = lambda: (),
        cuda: Any = torch.cuda,
    ) -> None:
        """Use the binding `nccl` (see `load`). The first call makes the communicator.

        - `deadlines`: how long the parts of a call may last.
        - `scratch`, `retirement`: those of this rank, for its transports of all generations.
        - `unreachable()`: the members that do not answer a probe; NCCL does not report which peer
          its kernels wait for.
        - `cuda`: `torch.cuda`, or what stands for it in a test.
        """
        self.generation = rendezvous.generation
        self.members = rendezvous.members
        self.me = rendezvous.me
        self._nccl = nccl
        self._rendezvous = rendezvous
        self._unreachable, self._cuda = unreachable, cuda
        self._scratch, self._retirement = scratch, retirement
        self._communicator: Communicator | None = None
        self._sources: list[Tensor] = []
        """Tensors that kernels may still read."""
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

        The smallest operand is summed first. Once that sum is complete all members have entered
        the call, and the wait for the slowest member is over.
        """
        check_operands(sources, results, device="cuda")
        probe = probe or no_probe
        with self._call():
            probe("begin")
            summed = self._sum(sources, probe) if len(self.members) > 1 else sources
            probe("middle")
            for scratch, result in zip(summed, results, strict=True):
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
                    with self._writing:
                        tensor.detach().copy_(copy)

    def revoke(self) -> None:
        """Revoke as `Transport.revoke` does.

        A running call retires the communicator as it ends; without a call it is retired here.
        """
        self._revoked.set()
        self._rendezvous.revoke()
        self._writing.shut()
        if self._calling.acquire(blocking=False):
            self._retire()
            self._calling.release()

    def close(self) -> None:
        """Close as `Transport.close` does."""
        self._rendezvous.close()
        self.revoke()

    @property
    def is_connected(self) -> bool:
        """Return whether the communicator is made; making it may wait for the device."""
        return self._communicator is not None or len(self.members) == 1

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Run one call. If it fails in any way, retire the communicator."""
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
            self._retire()
            if isinstance(error, torch.AcceleratorError):
                raise
            if isinstance(error, TransportError) and not isinstance(error, DeadlineExceeded | PeerLost) and not error.peers:
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
        """Return the complete sums, in scratch that is valid until the next call."""
        if self._communicator is None:
            self._communicator = self._connect()
        communicator = self._communicator
        self._begin(CallPart.SLOWEST)
        stream, summed = self._scratch.stream, self._scratch.like(sources)
        # Behind the writers of the sources, and behind the copies out of the scratch.
        stream.wait_stream(self._cuda.current_stream())
        self._sources = [*sources]
        done: list[Any] = []
        for index in sorted(range(len(sources)), key=lambda index: sources[index].numel()):
            if not sources[index].numel():
                continue
            communicator.sum_into(sources[index].view(-1), summed[index], stream.cuda_stream)
            done.append(self._cuda.Event())
            done[-1].record(stream)
            self._wait(communicator.is_idle)
        probe("sent")
        for event in done:
            # In this order: an error of NCCL ends the kernel, and with it completes the event.
            self._wait(lambda event=event: event.query() and communicator.is_idle())
            self._begin(CallPart.SUM)
        self._sources = []
        return summed

    def _connect(self) -> Communicator:
        """Make the communicator, once all members have met over `direct`.

        The lowest member contributes the unique id, all others zeros; the sum is the id.
        """
        mine, unique_id = torch.zeros(UNIQUE_ID_BYTES, dtype=torch.uint8), torch.empty(UNIQUE_ID_BYTES, dtype=torch.uint8)
        if self.me == self.members[0]:
            with transport_errors("ncclGetUniqueId"):
                mine = torch.frombuffer(bytearray(bytes(self._nccl.get_unique_id())), dtype=torch.uint8)
        self._rendezvous.sum_into([mine], [unique_id], tag=-1)
        self._begin(CallPart.CONNECT)
        connecting = Communicator(self._nccl, unique_id.numpy().tobytes(), len(self.members), self.members.index(self.me))
        try:
            self._wait(connecting.is_idle)
        except BaseException:
            self._retirement.retire(self.generation, connecting, [])
            raise
        return connecting

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

    def _retire(self) -> None:
        """Retire the communicator with what its kernels may use. The caller holds `_calling`."""
        communicator, sources = self._communicator, self._sources
        self._communicator, self._sources = None, []
        if communicator is not None:
            # Without sources all kernels are done, and the scratch stays in use.
            used = [*sources, *self._scratch.abandon()] if sources else []
            self._retirement.retire(self.generation, communicator, used)


class Sums:
    """The NCCL sums of one rank: what its transports of all generations share."""

    def __init__(self, nccl: ModuleType, deadlines: Deadlines, *, has_own_collectives: bool, cuda: Any = torch.cuda) -> None:
        """Use the binding `nccl` (see `load`).

        `has_own_collectives`: True if the replica has collectives of its own, over its ranks.
        """
        self._nccl, self._deadlines, self._cuda = nccl, deadlines, cuda
        self._has_own_collectives = has_own_collectives
        self._scratch, self._retirement = Scratch(cuda), Retirement(deadlines.close_s)
        self._current: NcclTransport | None = None

    def transport(self, rendezvous: DirectTransport, unreachable: Callable[[], tuple[int, ...]]) -> NcclTransport:
        """Return the transport of a generation that all its members have promised."""
        self._retirement.all_have_promised(rendezvous.generation)
        self._current = NcclTransport(
            self._nccl, rendezvous, self._deadlines, self._scratch, self._retirement,
            unreachable=unreachable, cuda=self._cuda,
        )  # fmt: skip
        return self._current

    def overlap_refusal(self, generation: int) -> str:
        """Return why sums must not run beside other work; see `Endpoint` and Note [Overlap]."""
        queues = device_queues()
        if queues.is_single and self._has_own_collectives:
            return (
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, so a sum over replicas and a collective of the replica can each wait behind "
                "the other; a larger number allows overlap where Megatron does not ask for 1"
            )
        if queues.is_ordered and self._has_own_collectives:
            return "NCCL_LAUNCH_ORDER_IMPLICIT is set, and ranks call sums and the replica's collectives in different orders"
        if self._current is None or self._current.generation != generation or not self._current.is_connected:
            return f"the communicator of generation {generation} is not made yet"
        return ""


def load() -> ModuleType:
    """Return the nccl4py binding. Raises ValueError without CUDA or nccl4py."""
    if not torch.cuda.is_available():
        raise ValueError("--recover-transport nccl needs a CUDA device and torch sees none; use direct")
    try:
        import nccl.core as nccl
    except ImportError as error:
        raise ValueError(f"--recover-transport nccl needs nccl4py ({error}); pip install 'megatron-recover[gpu]'") from error
    return nccl
