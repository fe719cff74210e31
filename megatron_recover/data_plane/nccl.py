"""A data plane over NCCL on CUDA. What has run on a GPU is in docs/evidence/gpu.md.

Each generation of two or more members has a communicator of its own per position. nccl4py makes it
directly and nonblocking, for two reasons. torch's process group would bring a watchdog that ends
the process. Communicators split from a parent do not inherit the parent's abort.

NCCL may not stop at once, and may write memory after a revoke, so it reduces into scratch
(`scratch.py`). The host waits for the kernels' event in short slices. Between slices it checks for
a revoke, the deadline and NCCL's asynchronous error. Only after the event has completed without an
error is scratch copied to the results, on the caller's stream. On failure or revoke a separate
thread retires the communicator (`nccl_communicator.py`), with the scratch if kernels may still
write it. Whatever NCCL still writes is memory that nobody else has.

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

    - They should fit on the device together (`MAX_CTAS`).
    - They should not share a hardware queue. There a kernel that waits for its stream holds up all
      that was enqueued later, on whatever stream. There are at most 32 queues.
    - NCCL does not put them in one order, which would have to be the same on all ranks.
    - No communicator is made or destroyed meanwhile, and no memory allocated: that may wait for the
      device.

    Where one of these is known not to hold, the pass is reduced when it is over. The first two
    cannot be known for certain: NCCL itself promises progress only for one order on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
    DeviceError,
    Operand,
    PeerLost,
    Probe,
    Revoked,
    TransportError,
    check_operands,
    no_probe,
)
from megatron_recover.data_plane.writing import WriteGate

if TYPE_CHECKING:
    from torch import Tensor

UNIQUE_ID_BYTES = 128
LEAST_NCCL = 22807
"""Version 2.28.7 as NCCL counts: the first with `ncclCommRevoke`."""
MOST_QUEUES = "32"
"""Largest CUDA_DEVICE_MAX_CONNECTIONS."""
SHORTEST_SLICE_S, LONGEST_SLICE_S = 20e-6, 1e-3
"""Seconds between two looks at an event. The slice doubles each time, so that a small sum is not
delayed and a large one costs little CPU."""


class NcclTransport:
    """The NCCL transport of one generation, on torch's current CUDA device.

    Only `revoke` and `close` are thread-safe.
    """

    def __init__(
        self,
        nccl: ModuleType,
        rendezvous: DirectTransport,
        scratch: Scratch,
        retirement: Retirement,
        *,
        unreachable: Callable[[], tuple[int, ...]] = lambda: (),
        cuda: Any = torch.cuda,
    ) -> None:
        """Use the binding `nccl` (see `load`). The first sum makes the communicator.

        A lone member makes none.

        - `rendezvous`: the direct transport of the generation. Its `deadlines` say how long the
          parts of a call may last.
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
        self._summed: set[Operand] = set()
        self._is_settled = False
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
        the call, and the wait for the slowest member is over. A lone member only copies.
        """
        check_operands(sources, results, device="cuda")
        probe = probe or no_probe
        with self._call():
            probe("begin")
            if len(self.members) == 1 and not self._is_settled:
                self._settle(others_rest=True)
            summed = self._sum(sources, probe) if len(self.members) > 1 else sources
            probe("middle")
            for scratch, result in zip(summed, results, strict=True):
                with self._writing:
                    result.copy_(scratch.view_as(result))
                scratch.record_stream(self._cuda.current_stream())  # or growing it could free memory below the copy
            probe("end")
        self._summed |= {(source.dtype, source.numel()) for source in sources}

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
            self._wait_for_the_device()  # else the copies wait for it, and a revoke for them
            host = [tensor.detach().cpu() if sending else torch.empty_like(tensor, device="cpu") for tensor in tensors]
            self._rendezvous.copy_into(host, source=source, targets=targets, tag=tag)
            self._wait_for_the_device()
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
        self.revoke()  # first, so that a call does not take our own close for a failure of a peer
        self._rendezvous.close()

    def has_summed(self, operands: Collection[Operand]) -> bool:
        """Return whether this transport has summed tensors of all these types and sizes.

        Making a communicator may wait for the device, and so may the first sum that NCCL does by an
        algorithm or that needs more scratch than the sums before.
        """
        return self._summed.issuperset(operands)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Run one call. If it fails in any way, retire the communicator and refuse later calls.

        Errors of the device are raised as they are. Any other error of a revoked call becomes
        `Revoked`. A TransportError without peers may get some by a probe (`_probe_peers`).
        """
        if not self._calling.acquire(blocking=False):
            self._check()  # a revoke holds it while it retires the communicator
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
            if isinstance(error, torch.AcceleratorError | DeviceError):
                raise
            self._cuda.current_stream().query()  # raises the error of a lost device, which NCCL may see first
            if isinstance(error, TransportError) and not isinstance(error, DeadlineExceeded | PeerLost) and not error.peers:
                self._probe_peers(error)
            if self._revoked.is_set() and not isinstance(error, Revoked):
                raise self._revoked_error(error) from error
            raise
        finally:
            self._calling.release()
            if self._revoked.is_set():
                self.revoke()  # a revoke may have come while this call held the communicator

    def _probe_peers(self, error: TransportError) -> None:
        """Make the members that do not answer a probe the peers of an error, and set `stalled`.

        After a revoke a recovery waits for this process, so it probes then only if the call had
        waited for half of its limit.
        """
        stalled = time.monotonic() - self._since >= self._part.limit_s(self._rendezvous.deadlines) / 2
        if stalled or not self._revoked.is_set():
            error.peers, error.stalled = self._unreachable(), stalled

    def _check(self) -> None:
        if self._revoked.is_set():
            raise self._revoked_error()

    def _revoked_error(self, error: BaseException | None = None) -> Revoked:
        """Return the error of a revoked call, with the peers of `error` and whether it had stalled.

        After a revoke other errors are its consequences. But a wait or a probe that the revoke has
        met is evidence.
        """
        known = error if isinstance(error, TransportError) else TransportError()
        return Revoked(f"generation {self.generation} was revoked", known.peers, stalled=known.stalled)

    def _sum(self, sources: Sequence[Tensor], probe: Probe) -> list[Tensor]:
        """Return the complete sums, in scratch that is valid until the next call.

        The first call makes the communicator.
        """
        if self._communicator is None:
            self._communicator = self._connect()
        communicator = self._communicator
        self._begin(CallPart.SLOWEST)
        stream, summed = self._scratch.stream, self._scratch.like(sources)
        # The sums run behind the writers of the sources, and behind the copies out of the scratch.
        stream.wait_stream(self._cuda.current_stream())
        self._sources = [*sources]
        done: list[Any] = []
        for index in sorted(range(len(sources)), key=lambda index: sources[index].numel()):
            if not sources[index].numel():
                continue
            communicator.sum_into(sources[index].view(-1), summed[index], stream)
            # NCCL enqueues the kernel in a thread of its own. An event that is recorded before it
            # has done so is in front of the kernel, and says nothing.
            self._wait(communicator.is_idle)
            done.append(self._cuda.Event())
            done[-1].record(stream)
        probe("sent")
        for event in done:
            self._wait(functools.partial(self._has_ended, communicator, event))
            self._begin(CallPart.SUM)
        self._sources = []
        return summed

    @staticmethod
    def _has_ended(communicator: Communicator, event: Any) -> bool:
        """Return whether the kernels before `event` have ended without an error.

        NCCL is asked in each look: a connection that is lost does not end the kernel. It is asked
        after the event: an error that came before the event is then known. Raises as
        `Communicator.is_idle` does.
        """
        has_completed = event.query()
        return communicator.is_idle() and has_completed

    def _come_to_rest(self) -> bool:
        """Wait a little for older communicators of ours; return whether all rest or are kept.

        Wait at most `slowest_s` / 8. A communicator that is not at rest `close_s` after it was
        retired is kept (`Retirement.is_resting`). Raises Revoked after a revoke.
        """
        self._pause_while(lambda: not self._retirement.is_resting(self.generation))
        return self._retirement.is_resting(self.generation)

    def _settle(self, *, others_rest: bool) -> None:
        """Have older generations' communicators at rest destroyed, before the first sum.

        All members have promised this generation, and nothing else of ours runs on the device now.
        `others_rest`: the older communicators of all members are at rest or kept. If not, destroy
        none before a newer generation. One that hangs as it is destroyed is left to itself.
        """
        self._is_settled = True
        if others_rest:
            self._retirement.settle(self.generation)
            self._pause_while(lambda: self._retirement.is_settling(self.generation))
            self._retirement.leave(self.generation)

    def _pause_while(self, condition: Callable[[], bool]) -> None:
        """Wait while `condition` holds, at most `slowest_s` / 8, which the other members can spare.

        Raises Revoked after a revoke.
        """
        until = time.monotonic() + self._rendezvous.deadlines.slowest_s / 8
        while condition() and time.monotonic() < until:
            self._check()
            self._revoked.wait(LONGEST_SLICE_S)

    def _wait_for_the_device(self) -> None:
        """Return when the work that is enqueued on the caller's stream has ended."""
        self._begin(CallPart.SUM)
        event = self._cuda.Event()
        event.record(self._cuda.current_stream())
        self._wait(event.query)

    def _connect(self) -> Communicator:
        """Make the communicator, once all members have met over `direct`.

        The lowest member contributes the unique id, all others zeros; the sum is the id. Beside it
        they add up how many of them have older communicators that are not at rest. Then `_settle`
        runs, before NCCL connects. A communicator that does not connect is retired.
        """
        restless = torch.tensor([not self._come_to_rest()], dtype=torch.int32)
        num_restless = torch.empty_like(restless)
        mine, unique_id = torch.zeros(UNIQUE_ID_BYTES, dtype=torch.uint8), torch.empty(UNIQUE_ID_BYTES, dtype=torch.uint8)
        if self.me == self.members[0]:
            with transport_errors("ncclGetUniqueId"):
                mine = torch.frombuffer(bytearray(bytes(self._nccl.get_unique_id())), dtype=torch.uint8)
        self._rendezvous.sum_into([mine, restless], [unique_id, num_restless], tag=-1)
        self._settle(others_rest=not num_restless.item())
        self._begin(CallPart.CONNECT)
        connecting = Communicator(
            self._nccl, unique_id.numpy().tobytes(), len(self.members), self.members.index(self.me), self._cuda
        )
        try:
            self._wait(connecting.is_idle)
        except BaseException:
            self._retirement.retire(self.generation, connecting)
            raise
        return connecting

    def _begin(self, part: CallPart) -> None:
        """Begin the next part of a call."""
        self._part, self._since = part, time.monotonic()

    def _wait(self, condition: Callable[[], bool]) -> None:
        slice_s, limit_s = SHORTEST_SLICE_S, self._part.limit_s(self._rendezvous.deadlines)
        while True:
            self._check()
            if condition():
                return
            if time.monotonic() - self._since >= limit_s:
                raise DeadlineExceeded(self._part, self._unreachable(), limit_s)
            self._revoked.wait(slice_s)
            slice_s = min(2 * slice_s, LONGEST_SLICE_S)

    def _retire(self) -> None:
        """Retire the communicator, if any, and what its kernels use. Its caller has `_calling`."""
        communicator, sources = self._communicator, self._sources
        self._communicator, self._sources = None, []
        if communicator is None:
            return
        if not sources:  # all kernels have ended, and the scratch stays in use
            self._retirement.retire(self.generation, communicator)
            return
        stream, memory = self._scratch.abandon()
        self._retirement.retire(
            self.generation,
            communicator,
            stream,
            sources,
            functools.partial(self._scratch.give_back, stream, memory),
        )


class Sums:
    """The NCCL sums of one rank: what its transports of all generations share."""

    def __init__(self, nccl: ModuleType, *, close_s: float, has_own_collectives: bool, cuda: Any = torch.cuda) -> None:
        """Use the binding `nccl` (see `load`).

        - `close_s`: seconds after which a retired communicator that is not at rest is kept.
        - `has_own_collectives`: True if the replica has collectives of its own, over its ranks.
        """
        self._nccl, self._cuda = nccl, cuda
        self._has_own_collectives = has_own_collectives
        self._scratch, self._retirement = Scratch(cuda), Retirement(close_s, cuda)
        self._current: NcclTransport | None = None

    def transport(self, rendezvous: DirectTransport, unreachable: Callable[[], tuple[int, ...]]) -> NcclTransport:
        """Return the transport of a generation that all its members have promised."""
        self._current = NcclTransport(
            self._nccl, rendezvous, self._scratch, self._retirement,
            unreachable=unreachable, cuda=self._cuda,
        )  # fmt: skip
        return self._current

    def overlap_refusal(self, generation: int, operands: Collection[Operand]) -> str:
        """Return why sums must not run beside other work; see `Endpoint` and Note [Overlap]."""
        queues = device_queues()
        if queues.number != MOST_QUEUES and self._has_own_collectives:
            return (
                f"CUDA_DEVICE_MAX_CONNECTIONS is {queues.number or 'not set'}, so a sum over replicas and a collective of the "
                f"replica can each wait behind the other; set it to {MOST_QUEUES} where Megatron does not ask for 1"
            )
        if queues.is_ordered and self._has_own_collectives:
            return "NCCL_LAUNCH_ORDER_IMPLICIT is set, and ranks call sums and the replica's collectives in different orders"
        if self._retirement.is_busy(generation):
            return "a communicator of an older generation is not destroyed yet"
        if self._current is None or self._current.generation != generation or not self._current.has_summed(operands):
            return f"the communicator of generation {generation} has not summed all buckets yet"
        return ""


def load() -> ModuleType:
    """Return the nccl4py binding.

    Raises ValueError without CUDA or nccl4py, and for an NCCL or a setting that cannot work.
    """
    if not torch.cuda.is_available():
        raise ValueError("--recover-transport nccl needs a CUDA device and torch sees none; use direct")
    if device_queues().is_blocking:
        raise ValueError("NCCL_COMM_BLOCKING is 1, so a sum could not be left when a peer dies; unset it")
    try:
        import nccl.core as nccl
        from nccl.bindings import nccl as bindings
    except ImportError as error:
        raise ValueError(f"--recover-transport nccl needs nccl4py ({error}); pip install 'megatron-recover[gpu]'") from error
    if (found := bindings.get_version()) < LEAST_NCCL:
        raise ValueError(f"NCCL {found} was found, and {LEAST_NCCL} (2.28.7) is needed for ncclCommRevoke; install a newer one")
    return nccl
