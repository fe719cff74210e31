"""One NCCL communicator: its calls, its errors, and how it is retired.

Note [Retiring]
    A communicator that is not used any more is revoked, watched, and destroyed, in this order and
    never in one step:

    - `ncclCommRevoke` (NCCL 2.28.7) has its kernels quit. The device looks at the flag only now and
      then, and may write scratch until it does.
    - The communicator is at rest when NCCL has drained its own streams (`commRevokeAsync` in NCCL's
      src/init.cc) and an event behind its kernels has completed on ours. Only then is scratch
      given back. An error in the state that NCCL reports does not prevent it: the error of a lost
      connection stays in that state for good.
    - It is destroyed in a newer generation, if the older communicators of all its members are at
      rest or kept. Before that a kernel of another member may still read this process's memory over
      NVLink (NVIDIA/nccl#863).

    Revoking and destroying free memory, which may wait for the device (NVIDIA/nccl#564). So both
    begin in the first sum of a newer generation, before any of its kernels, with nothing else of
    ours on the device. That sum waits for them for `slowest_s` / 8 at most. Only a communicator
    whose kernels may still run is revoked at once.

    A communicator that was never connected has no kernels; it is aborted, since a revoke would read
    what is not there yet. A communicator whose revoke or state shows an error is aborted instead of
    destroyed.

    A sum has a job, which NCCL's thread runs and `ncclCommGetAsyncError` unlinks, but only where it
    finds no error. A revoke frees a job that is still linked (`ncclGroupJobAbort`), and leaves the
    link. So a revoke waits a little until the job is unlinked. If NCCL shows an error before that,
    or the thread does not end, the communicator is revoked all the same, never looked at again, and
    kept for the life of the process with its memory and its descriptors. A kernel that nobody stops
    would hold up whatever waits for the device, such as the load of a module.

    A revoke waits for all kernels that were launched before it takes the flag back: NCCL's own
    stream is behind each of them (`ncclLaunchFinish` in src/enqueue.cc). A kernel whose launch
    failed halfway may miss the flag. Its event does not complete, so nothing is given back.

    A revoke frees buffers of connections on one node (`ncclProxyStop`). That no peer's kernel reads
    them any more rests on CUDA's counting of references to them (NCCL_CUMEM_ENABLE, on by default).

    On any doubt (the communicator does not come to rest, a call other than the revoke fails or does
    not return, or no thread can be started, so that it is revoked in place) the communicator is
    kept for the life of the process, with all that was not given back, which costs memory. The
    others do not wait for it: what is not at rest after `close_s` is taken for something that never
    will be. Until its kernels quit they could still read memory that another member has freed. If a
    call returns late and the communicator is at rest then, it is destroyed
    in a newer generation.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from megatron_recover.data_plane.transport import DeviceError, TransportError

logger = logging.getLogger(__name__)

SUCCESS, IN_PROGRESS = 0, 7
"""Values of ncclResult_t."""
MAX_CTAS = 16
"""Most thread blocks of a sum. Sums over replicas run beside the replica's own collectives: all
must fit on the device at once, or each may wait for the other. A user's NCCL_MAX_CTAS wins."""
_LOOK_S = 0.01
"""Seconds between two looks at a communicator that is to come to rest."""
_FREES_S = 2.0
"""Seconds for which NCCL's threads may free memory after a revoke that nobody may look at."""


@contextlib.contextmanager
def transport_errors(call: str) -> Iterator[None]:
    """Raise whatever an NCCL call raises as a TransportError that names `call`.

    An error of the device itself (`torch.AcceleratorError`) is no TransportError: the process
    cannot use the device any more, and ends.
    """
    try:
        yield
    except (TransportError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise TransportError(f"NCCL: {call} failed: {error or type(error).__name__}") from error


class Communicator:
    """A nonblocking communicator. Used by one thread at a time."""

    def __init__(self, nccl: ModuleType, unique_id: bytes, num_members: int, position: int, cuda: Any = torch.cuda) -> None:
        """Begin to connect to the other members. Raises TransportError.

        `position` is this member's, in the order of the members.
        """
        self._nccl = nccl
        self.device = cuda.current_device()
        self.is_connected = False
        """True once `is_idle` has found NCCL ready for a call."""
        self.is_pending = True
        """True from the beginning of connecting or of a sum until `is_idle` finds NCCL ready."""
        with transport_errors("ncclCommInitRank"):
            self._raw: Any = nccl.Communicator.init(
                num_members, position, nccl.UniqueId.from_bytes(unique_id),
                nccl.NCCLConfig(blocking=False, max_ctas=MAX_CTAS),
            )  # fmt: skip

    def is_idle(self) -> bool:
        """Return whether NCCL is ready for the next call.

        Raises TransportError for its errors, and DeviceError if the device has no memory left.
        """
        result = self.state()
        if result not in (SUCCESS, IN_PROGRESS):
            with transport_errors("ncclGetLastError"):
                said = self._raw.get_last_error()
            if "out of memory" in said:
                raise DeviceError(f"NCCL: {said}")
            raise TransportError(f"NCCL: {said} (result {result})")
        if result == SUCCESS:
            self.is_connected, self.is_pending = True, False
        return result == SUCCESS

    def state(self) -> int:
        """Return NCCL's asynchronous result. Raises TransportError if NCCL does not tell it."""
        with transport_errors("ncclCommGetAsyncError"):
            return int(self._raw.get_async_error())

    def sum_into(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        """Begin to enqueue the sum of `source` over all members into `target`.

        NCCL enqueues it in a thread of its own, and has done so when `is_idle`. Raises
        TransportError.
        """
        self.is_pending = True
        with transport_errors("ncclAllReduce"):
            self._raw.allreduce(source.detach(), target, self._nccl.SUM, stream=stream.cuda_stream)

    def revoke(self) -> None:
        """Have all kernels quit, without waiting until they have. Raises TransportError."""
        with transport_errors("ncclCommRevoke"):
            self._raw.revoke()

    def destroy(self) -> None:
        """Free the communicator, which must be at rest. Raises TransportError."""
        with transport_errors("ncclCommDestroy"):
            self._raw.destroy()

    def abort(self) -> None:
        """Free the communicator, in whatever state it is. Raises TransportError."""
        with transport_errors("ncclCommAbort"):
            self._raw.abort()


class Retired:
    """A retired communicator, with the stream of its kernels and what they may use."""

    def __init__(
        self,
        generation: int,
        communicator: Communicator,
        stream: Any,
        sources: Sequence[object],
        at_rest: Callable[[], None],
        until: float,
    ) -> None:
        """Hold a communicator that may be doubted if not at rest at the monotonic time `until`."""
        self.generation, self.communicator, self.stream = generation, communicator, stream
        self.sources, self.at_rest, self.until = [*sources], at_rest, until
        self.is_at_rest = self.is_in_doubt = self.is_left = False
        self.why_linked: Exception | None = None
        """The error that left a job linked to it as it is revoked: after that no call may look at
        it. None: no job is linked."""
        self.may_destroy = threading.Event()
        self.has_ended = threading.Event()
        """Set when its thread calls NCCL no more."""


class Retirement:
    """The retired communicators of a rank; see Note [Retiring]. Thread-safe."""

    def __init__(self, rest_s: float, cuda: Any = torch.cuda) -> None:
        """Doubt a communicator that takes longer than `rest_s` seconds to come to rest."""
        self._rest_s, self._cuda = rest_s, cuda
        self._lock = threading.Lock()
        self._all: list[Retired] = []
        self.kept: list[Communicator] = []
        """Those at rest that cannot be freed: they were revoked with a job linked to them."""
        self._frees_until = 0.0
        """Monotonic time until which one of those may free memory."""

    @property
    def num_in_doubt(self) -> int:
        """Return the number of communicators that are kept because of a doubt."""
        with self._lock:
            return sum(each.is_in_doubt for each in self._all)

    def retire(
        self,
        generation: int,
        communicator: Communicator,
        stream: Any = None,
        sources: Sequence[object] = (),
        at_rest: Callable[[], None] = lambda: None,
    ) -> None:
        """Retire a communicator and what its kernels may use. Returns at once.

        If no thread can be started, the communicator is kept.

        - `stream`: that of its kernels; None: none runs, and the communicator counts as at rest.
        - `sources`: what they may read.
        - `at_rest()` gives back what they may write. It is called when they have ended, in the
          thread that retires the communicator, and never if it does not come to rest.
        """
        retired = Retired(generation, communicator, stream, sources, at_rest, time.monotonic() + self._rest_s)
        with self._lock:
            self._all.append(retired)
        # A daemon thread: a call that hangs, as ncclCommAbort in NCCL 2.25, must not keep the
        # process from ending.
        thread = threading.Thread(target=self._retire, args=(retired,), name="nccl-retire", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left
            if stream is not None:
                self._cuda.set_device(communicator.device)
                with contextlib.suppress(TransportError):
                    communicator.revoke()  # its kernels quit, and it may be linked: nobody looks at it again
            self._doubt(retired, error)
            retired.has_ended.set()

    def is_resting(self, generation: int) -> bool:
        """Return whether all communicators older than `generation` are at rest, or kept.

        A communicator whose time is over is doubted here: its thread may be inside a call of NCCL
        that does not return.
        """
        older = self._older(generation)
        for each in older:
            if not each.is_at_rest and time.monotonic() >= each.until:
                self._doubt(each, self._restless())
        return all(each.is_at_rest or each.is_in_doubt for each in older)

    def settle(self, generation: int) -> None:
        """Let the communicators older than `generation` that are at rest be destroyed.

        Their threads do so. All members have promised `generation`, and theirs are at rest or kept.
        A communicator that is not at rest waits for a newer generation.
        """
        for each in self._older(generation):
            if each.is_at_rest:
                each.may_destroy.set()

    def is_settling(self, generation: int) -> bool:
        """Return whether an older communicator is being destroyed, neither in doubt nor left."""
        return any(each.may_destroy.is_set() and not (each.is_in_doubt or each.is_left) for each in self._older(generation))

    def leave(self, generation: int) -> None:
        """Wait no more for those older than `generation` that are still being destroyed."""
        for each in self._older(generation):
            each.is_left = each.may_destroy.is_set()

    def is_busy(self, generation: int) -> bool:
        """Return whether memory of a communicator older than `generation` may be freed now.

        Of one in doubt this is never known again.
        """
        older = [each for each in self._older(generation) if each.is_in_doubt or not each.has_ended.is_set()]
        return time.monotonic() < self._frees_until or any(each.may_destroy.is_set() or not each.is_at_rest for each in older)

    def _older(self, generation: int) -> list[Retired]:
        with self._lock:
            return [each for each in self._all if each.generation < generation]

    def _retire(self, retired: Retired) -> None:
        """Bring a communicator to rest and free it, in a thread of its own; see Note [Retiring].

        Without kernels it is brought to rest only when `may_destroy` is set, and only if it was
        connected. If bringing it to rest or freeing it raises an error, it is kept, in doubt.
        """
        communicator, has_kernels = retired.communicator, retired.stream is not None
        try:
            self._cuda.set_device(communicator.device)  # a new thread has device 0, where NCCL would make a context
            is_sound = has_kernels and self._bring_to_rest(retired)
            retired.is_at_rest = True
            if retired.why_linked is not None:
                self._keep(retired)
                return
            retired.may_destroy.wait()
            if not has_kernels and communicator.is_connected:
                is_sound = self._bring_to_rest(retired)
            if is_sound and communicator.state() == SUCCESS:
                communicator.destroy()
            else:
                communicator.abort()
            with self._lock:
                self._all.remove(retired)
        except (TransportError, DeviceError, RuntimeError) as error:
            self._doubt(retired, error)
        finally:
            retired.has_ended.set()

    def _bring_to_rest(self, retired: Retired) -> bool:
        """Revoke the communicator, wait for it to rest, and give back what its kernels used.

        Wait first until NCCL has enqueued a sum that is pending. Return True, or False if the
        revoke fails; the communicator can then only be aborted, or kept if a job is linked to it.
        Raises TransportError if it does not come to rest or NCCL does not report its state.
        """
        communicator = retired.communicator
        try:
            job_until = time.monotonic() + self._rest_s / 8  # meanwhile its kernels hold up the device
            self._await(lambda: not communicator.is_pending or communicator.is_idle(), job_until)
        except (TransportError, DeviceError) as error:
            retired.why_linked = error
        is_sound = True
        try:
            communicator.revoke()
        except TransportError:  # of a connection that was lost before; the kernels show whether they quit
            is_sound = False
        until = time.monotonic() + self._rest_s
        if retired.stream is not None:
            # The revoke has waited for the thread that enqueues, so this is behind all kernels.
            ended = self._cuda.Event()
            ended.record(retired.stream)
            self._await(ended.query, until)
        retired.at_rest()
        retired.sources.clear()
        if retired.why_linked is None:
            self._await(lambda: communicator.state() != IN_PROGRESS, until)
        return is_sound

    def _await(self, condition: Callable[[], bool], until: float) -> None:
        while not condition():
            if time.monotonic() >= until:
                raise self._restless()
            time.sleep(_LOOK_S)

    def _restless(self) -> TransportError:
        return TransportError(f"it did not come to rest within {self._rest_s:g} s")

    def _keep(self, retired: Retired) -> None:
        with self._lock:
            self._all.remove(retired)
            self.kept.append(retired.communicator)
            self._frees_until = time.monotonic() + _FREES_S
        logger.warning("the communicator of generation %d is at rest, and kept: %s", retired.generation, retired.why_linked)

    def _doubt(self, retired: Retired, error: Exception) -> None:
        with self._lock:
            if retired.is_in_doubt:
                return
            retired.is_in_doubt = True
        logger.warning("the communicator of generation %d is kept, with its memory: %s", retired.generation, error)
