"""One NCCL communicator: its calls, its errors, and how it is retired.

Note [Retiring]
    A communicator whose call failed is revoked, watched, and destroyed, in this order and never in
    one step:

    - `ncclCommRevoke` (NCCL 2.28.7) has its kernels quit. It returns at once: the device looks at
      the flag only now and then, and may write scratch until it does.
    - The communicator is at rest when its asynchronous state is success again. NCCL has then
      waited for its kernels (`commRevokeAsync` in NCCL's src/init.cc). Only then is scratch freed.
    - It is destroyed when all members of a newer generation have promised it. Before that a kernel
      of another member may still read this process's memory over NVLink (NVIDIA/nccl#863).

    On any doubt (a call fails, or it does not come to rest) communicator and scratch are kept for
    the life of the process. That costs memory and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from megatron_recover.data_plane.transport import TransportError

logger = logging.getLogger(__name__)

SUCCESS, IN_PROGRESS = 0, 7
"""Values of ncclResult_t."""
MAX_CTAS = 16
"""Most thread blocks of a sum. Sums over replicas run beside the replica's own collectives: all
must fit on the device at once, or each may wait for the other. A user's NCCL_MAX_CTAS wins."""
_LOOK_S = 0.01
"""Seconds between two looks at a communicator that is to come to rest."""


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

    def __init__(self, nccl: ModuleType, unique_id: bytes, num_members: int, position: int) -> None:
        """Begin to connect to the other members. Raises TransportError.

        `position` is this member's, in the order of the members.
        """
        self._nccl = nccl
        with transport_errors("ncclCommInitRank"):
            self._raw: Any = nccl.Communicator.init(
                num_members, position, nccl.UniqueId.from_bytes(unique_id),
                nccl.NCCLConfig(blocking=False, max_ctas=MAX_CTAS),
            )  # fmt: skip

    def is_idle(self) -> bool:
        """Return whether NCCL is ready for the next call. Raises TransportError for its errors."""
        with transport_errors("ncclCommGetAsyncError"):
            result = int(self._raw.get_async_error())
            if result not in (SUCCESS, IN_PROGRESS):
                raise TransportError(f"NCCL: {self._raw.get_last_error()} (result {result})")
        return result == SUCCESS

    def sum_into(self, source: torch.Tensor, target: torch.Tensor, stream: int) -> None:
        """Enqueue the sum of `source` over all members into `target`. Raises TransportError."""
        with transport_errors("ncclAllReduce"):
            self._raw.allreduce(source.detach(), target, self._nccl.SUM, stream=stream)

    def revoke(self) -> None:
        """Have all kernels quit. Raises TransportError."""
        with transport_errors("ncclCommRevoke"):
            self._raw.revoke()

    def destroy(self) -> None:
        """Free the communicator, which must be at rest. Raises TransportError."""
        with transport_errors("ncclCommDestroy"):
            self._raw.destroy()


class Retirement:
    """The retired communicators of a rank; see Note [Retiring]. Thread-safe."""

    def __init__(self, rest_s: float) -> None:
        """Doubt a communicator that is not at rest `rest_s` seconds after it was revoked."""
        self._rest_s = rest_s
        self._lock = threading.Lock()
        self._promised = 0
        """Newest generation that all its members have promised."""
        self._waiting: list[tuple[int, threading.Event]] = []
        """Generation of each retired communicator, and an event for when it may be destroyed."""
        self.kept: list[object] = []
        """Communicators and memory that are in doubt."""

    def retire(self, generation: int, communicator: Communicator, memory: list[object]) -> None:
        """Retire a communicator and what its kernels may use. Returns at once."""
        may_destroy = threading.Event()
        with self._lock:
            self._waiting.append((generation, may_destroy))
        self.all_have_promised(self._promised)
        # A daemon thread: a call that hangs, as ncclCommAbort in NCCL 2.25, must not keep the
        # process from ending.
        threading.Thread(
            target=self._retire, args=(generation, communicator, memory, may_destroy), name="nccl-retire", daemon=True
        ).start()

    def all_have_promised(self, generation: int) -> None:
        """Let the communicators of all older generations be destroyed."""
        with self._lock:
            self._promised = max(self._promised, generation)
            for each, may_destroy in self._waiting:
                if each < self._promised:
                    may_destroy.set()
            self._waiting = [(each, may_destroy) for each, may_destroy in self._waiting if each >= self._promised]

    def _retire(self, generation: int, communicator: Communicator, memory: list[object], may_destroy: threading.Event) -> None:
        try:
            communicator.revoke()
            until = time.monotonic() + self._rest_s
            while not communicator.is_idle():
                if time.monotonic() >= until:
                    raise TransportError(f"it did not come to rest within {self._rest_s:g} s")
                time.sleep(_LOOK_S)
            memory.clear()
            may_destroy.wait()
            communicator.destroy()
        except (TransportError, torch.AcceleratorError) as error:
            with self._lock:
                self.kept += [communicator, *memory]
            logger.warning("the communicator of generation %d is kept, with its memory: %s", generation, error)
