"""What can be swapped below the fault-tolerant group: one generation's data plane.

A transport joins the same-position ranks of all members of one generation. It is opened once, used by one thread (the
training thread), may be revoked from any thread at any time, and is never used again after that. It knows nothing of steps,
votes or membership.

Contract of every implementation:

* `sum_into` and `copy_into` never write their sources. A result has a defined value only after the call has returned; after
  an exception its bytes are unspecified, and **no thread, kernel or socket of the transport writes into it any more**.
* Every call ends. It returns, or raises within milliseconds after `revoke`, or raises when one of its parts (`Part`) has
  lasted for its wait without progress: connecting, waiting for the slowest member, the sum itself. The waits are those of the
  endpoint's `Deadlines`. A call that has stalled for half of its wait may take `probe_s` longer, to find out which peers are
  out of reach (`TransportError.peers`).
* When `revoke` has returned, no host thread writes memory that anybody but the transport can reach. `direct` and `gloo` wait
  for the piece of about a megabyte that a call is writing; what gloo itself may still write is scratch of a thread that was
  left behind. On a GPU, copies that `nccl` has enqueued run later, in the order of the training thread's stream.
* The outcome of a failed call may differ from member to member. Callers must not act on it (DESIGN: decide, then commit).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_recover.deadlines import figure

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_recover.deadlines import Deadlines

Probe = Callable[[str], None]
"""Called at named instants inside an operation (`"begin"`, `"sent"`, `"middle"`, `"end"`; each once); fault injection only."""


def no_probe(instant: str) -> None:
    """Nobody watches."""


class TransportError(Exception):
    """An operation of one generation did not complete. The input is unchanged; ask for a new generation."""

    peers: tuple[int, ...] = ()
    """Members that the caller lost or waited for in vain, as far as the transport knows: evidence against an end of each."""
    miscounted = False
    """The result does not count every microbatch once; every member sees the same one."""
    stalled = False
    """The operation had waited for long, so that `peers` count also when the generation is over."""


class Revoked(TransportError):
    """The transport was retired, usually because a newer generation exists."""

    def __init__(self, detail: str, peers: Sequence[int] = (), *, stalled: bool = False) -> None:
        super().__init__(detail)
        self.peers, self.stalled = tuple(sorted(peers)), stalled


class PeerLost(TransportError):
    """A member's end of the connection is gone."""

    def __init__(self, peer: int, detail: str) -> None:
        super().__init__(f"replica {peer}: {detail}")
        self.peer = peer
        self.peers = (peer,)


class PeerAhead(PeerLost):
    """A member is in a newer generation already; nothing is wrong with it."""

    def __init__(self, peer: int, generation: int) -> None:
        super().__init__(peer, f"is already in generation {generation}")
        self.peers = ()


class Part(enum.Enum):
    """What a call waits for, one after the other. The value is the wait's name in `Deadlines`."""

    CONNECT = "connect_s"
    """A member to which there is no connection."""
    SLOWEST = "slowest_s"
    """A member that can be reached and has not entered the call."""
    SUM = "sum_s"
    """Bytes of members that have all entered the call."""

    def limit_s(self, deadlines: Deadlines) -> float:
        """Return how long this part may last without progress, in seconds."""
        limit_s: float = getattr(deadlines, self.value)
        return limit_s


_FOR_WHAT = {
    Part.CONNECT: "no connection for {limit} s to {whom}",
    Part.SLOWEST: "the call was not entered for {limit} s by {whom}",
    Part.SUM: "the sum made no progress for {limit} s, waiting for {whom}",
}


class DeadlineExceeded(TransportError):
    """A part of an operation lasted too long. `peers` is empty where the operation does not know for whom it waited."""

    stalled = True

    def __init__(self, part: Part, peers: Sequence[int], limit_s: float) -> None:
        whom = f"replicas {sorted(peers)}" if peers else "nobody that is known: all answered a probe"
        super().__init__(f"{_FOR_WHAT[part].format(limit=figure(limit_s), whom=whom)} ({part.value})")
        self.part = part
        self.peers = tuple(sorted(peers))


class Transport(Protocol):
    """The data plane of one generation, between the same-position ranks of its members."""

    generation: int
    members: tuple[int, ...]
    """Replica ids, ascending."""
    me: int
    """This rank's replica id."""

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, probe: Probe | None = None) -> None:
        """Sum each source over all members, in ascending order of replica id, into the result at the same index.

        `sources[i]` and `results[i]` are contiguous, of equal dtype, device and number of elements, and do not overlap.
        All members pass the same `tag`, which is not used twice in a transport's life. Bit-identical on all members.
        """

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, targets: Sequence[int], tag: int) -> None:
        """Copy the tensors of member `source` into those of `targets`. Members that are neither return at once."""

    def revoke(self) -> None:
        """Make every pending and future call raise `Revoked`. Any thread, any time, any number of times.

        Returns within milliseconds, when nothing is written any more (see above).
        """

    def close(self) -> None:
        """Release sockets, communicators and scratch. Implies `revoke`; bounded time."""


class Endpoint(Protocol):
    """A rank's stable address on the data plane, from which each generation's transport is opened."""

    address: str
    """Opaque to everyone but the same kind of endpoint; handed to the peers by the control plane."""

    def open(self, generation: int, me: int, addresses: Mapping[int, str]) -> Transport:
        """Prepare the transport of `generation` among `addresses` (replica id -> address, `me` included).

        Returns without waiting for peers; connections are made on first use, by that call.
        """

    def close(self) -> None:
        """Stop listening."""


def check_operands(sources: Sequence[Tensor], results: Sequence[Tensor] | None = None, *, device: str) -> None:
    """Raise ValueError unless all tensors are contiguous, on `device`, and each result fits its source without overlap."""
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
