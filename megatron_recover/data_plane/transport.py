"""The interface of a data plane: what every transport and endpoint promises its callers.

A transport moves tensors between the same-position ranks of all members of one generation. It is
opened once and never reused. One thread at a time calls it: the training thread, or
`recover-reduce` with `--overlap-grad-reduce`. Any thread may call `revoke` at any time. A transport
knows nothing of steps, votes or membership.

Contract of every implementation:

* `sum_into` and `copy_into` never write their sources.
* A result has a defined value only after the call has returned. After an exception its bytes are
  unspecified, and **no host thread or socket of the transport still writes them**. On a GPU, copies
  that were enqueued before may (below).
* Every call ends: it returns, or it raises. It raises within milliseconds after `revoke`. It also
  raises when a part of the call (`CallPart`) has made no progress for as long as the endpoint's
  `Deadlines` allow. The parts are connecting, waiting for the slowest member, and the sum itself.
  In `gloo` and `nccl` a call may take `probe_s` longer, to find out which peers are unreachable
  (`TransportError.peers`): if it fails without a revoke, or had waited for half of its limit.
* After `revoke` has returned, no host thread writes memory that anything but the transport can
  reach. `revoke` waits for the piece that a call is writing: at most 1 MiB of a sum, or what the
  kernel has received of a copy, in `direct`; at most 2**20 elements in `gloo`; and one tensor in
  `nccl`, whose copy is enqueued, or made from host memory in a transfer. Gloo itself may still
  write scratch that belongs to an abandoned thread. On a GPU, copies that `nccl` has enqueued run
  later, in the order of the stream that was current for the call.
* A failed call may have different outcomes on different members. Callers must not act on its
  outcome: the members decide by votes what is committed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_recover.deadlines import figure

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_recover.deadlines import Deadlines

Operand = tuple["torch.dtype", int]
"""Type and number of elements of a tensor in a sum."""
Probe = Callable[[str], None]
"""Called at named instants of an operation (`"begin"`, `"sent"`, `"middle"`, `"end"`), once each.
For fault injection only."""


def no_probe(instant: str) -> None:
    """Ignore the instant."""


class TransportError(Exception):
    """An operation of one generation failed, or its transport could not be opened.

    A new generation is needed, unless it exists already (`Revoked`). The sources are unchanged.
    """

    peers: tuple[int, ...] = ()
    """Members that the caller lost, waited for in vain, or got a damaged copy from, if known. Each
    is evidence that an end of the connection to that member is at fault."""
    miscounted = False
    """True if the sum arrived but does not count every microbatch once; all members see the same
    sum."""
    stalled = False
    """True if the operation had waited so long that `peers` count even if the generation is
    over."""


class Revoked(TransportError):
    """The transport is revoked or cannot be opened, usually because a newer generation exists."""

    def __init__(self, detail: str, peers: Sequence[int] = (), *, stalled: bool = False) -> None:
        super().__init__(detail)
        self.peers, self.stalled = tuple(sorted(peers)), stalled


class PeerLost(TransportError):
    """The connection to a member failed, or the member refused it."""

    def __init__(self, peer: int, detail: str) -> None:
        super().__init__(f"replica {peer}: {detail}")
        self.peer = peer
        self.peers = (peer,)


class PeerAhead(PeerLost):
    """A member is already in a newer generation. The member is healthy, so `peers` is empty."""

    def __init__(self, peer: int, generation: int) -> None:
        super().__init__(peer, f"is already in generation {generation}")
        self.peers = ()


class DeviceError(Exception):
    """The device cannot serve the data plane. The process ends; no microbatch is charged."""


class CallPart(enum.Enum):
    """The parts of a call, by what the call waits for.

    Each value names a field of `Deadlines`.
    """

    CONNECT = "connect_s"
    """The call waits for a connection to a member."""
    SLOWEST = "slowest_s"
    """All members are reachable; the call waits for one that has not entered it."""
    SUM = "sum_s"
    """All members have entered the call; it waits for their bytes."""

    def limit_s(self, deadlines: Deadlines) -> float:
        """Return the seconds that this part may last without progress."""
        limit_s: float = getattr(deadlines, self.value)
        return limit_s


_FOR_WHAT = {
    CallPart.CONNECT: "no connection for {limit} s to {whom}",
    CallPart.SLOWEST: "the call was not entered for {limit} s by {whom}",
    CallPart.SUM: "the sum made no progress for {limit} s, waiting for {whom}",
}


class DeadlineExceeded(TransportError):
    """A part of an operation made no progress for too long.

    `peers` is empty if no replica can be named.
    """

    stalled = True

    def __init__(self, part: CallPart, peers: Sequence[int], limit_s: float) -> None:
        whom = f"replicas {sorted(peers)}" if peers else "replicas that cannot be named: none is known to be out of reach"
        super().__init__(f"{_FOR_WHAT[part].format(limit=figure(limit_s), whom=whom)} ({part.value})")
        self.part = part
        self.peers = tuple(sorted(peers))


class Transport(Protocol):
    """The data plane of one generation, between the same-position ranks of its members."""

    generation: int
    members: tuple[int, ...]
    """Replica ids in ascending order."""
    me: int
    """Id of this rank's replica."""

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, probe: Probe | None = None) -> None:
        """Sum each source over all members into the result at the same index.

        `sources[i]` and `results[i]` are contiguous, of equal dtype, device and number of elements,
        and do not overlap. All members call with the same `tag`, which is used once in a
        transport's life. The result has the same bits on all members. `direct` adds in ascending
        order of replica id; gloo and NCCL have orders of their own.
        """

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, targets: Sequence[int], tag: int) -> None:
        """Copy the tensors of member `source` into those of `targets`.

        Return at once on a member that is neither the source nor a target.
        """

    def revoke(self) -> None:
        """Make future calls, and a pending one that is not complete, raise `Revoked`.

        Thread-safe and idempotent. Return within milliseconds. From then on nothing is written, as
        defined in the contract above.
        """

    def close(self) -> None:
        """Revoke the transport and release its sockets, in bounded time.

        What a library may still use is released later: gloo's group when gloo returns, and NCCL's
        communicator as it is retired (`nccl_communicator`, Note [Retiring]).
        """


class Endpoint(Protocol):
    """A rank's stable address on the data plane, and the factory of each generation's transport."""

    address: str
    """The address that the control plane publishes to the peers. Only endpoints of the same kind
    can read it."""
    deadlines: Deadlines
    """The longest waits of the parts of a call. A new value counts from the next call on."""

    def open(self, generation: int, me: int, addresses: Mapping[int, str]) -> Transport:
        """Return the transport of `generation` among `addresses`, and close the previous one.

        `addresses` map replica ids to addresses, and include the address of `me`. Return without
        waiting for peers. Connections are made by the first call that needs one, or by a thread of
        the transport (gloo). Raises Revoked if the endpoint is closed, or unless `generation` is
        newer than all before, also those that failed to open. Raises TransportError if this process
        has no free descriptor.
        """

    def overlap_refusal(self, generation: int, operands: Collection[Operand]) -> str:
        """Return why sums of `operands` must not run beside other work of the device.

        An empty text: they may. `generation` is that of the sums.
        """

    def close(self) -> None:
        """Stop listening, and close the current transport."""


def check_operands(sources: Sequence[Tensor], results: Sequence[Tensor] | None = None, *, device: str) -> None:
    """Raise ValueError unless the operands meet the contract.

    All tensors must be contiguous and on `device`. Each result must match its source in dtype and
    number of elements and not overlap it.
    """
    for tensor in (*sources, *(results or ())):
        if tensor.device.type != device or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "strided"
            raise ValueError(f"this transport takes contiguous tensors on {device}, not a {layout} one on {tensor.device}")
    if results is None:
        return
    if len(sources) != len(results):
        raise ValueError(f"{len(sources)} sources but {len(results)} results")
    for source, result in zip(sources, results, strict=True):
        if source.dtype != result.dtype or source.numel() != result.numel():
            raise ValueError(f"a source of {source.numel()} {source.dtype} but a result of {result.numel()} {result.dtype}")
        first, other, num_bytes = source.data_ptr(), result.data_ptr(), source.numel() * source.element_size()
        if num_bytes and abs(first - other) < num_bytes:
            raise ValueError("a source overlaps its result; reductions are out of place")
