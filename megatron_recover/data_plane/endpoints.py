"""The choice of a data plane by name. A framework is imported only if it is chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from megatron_recover.authentication.admission import ReportStrangers
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.data_plane.direct import DirectEndpoint, DirectTransport
from megatron_recover.data_plane.echo import EchoServer, unreachable
from megatron_recover.data_plane.transport import Endpoint, Operand, Transport
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import HOST, Ports

TransportKind = Literal["auto", "direct", "gloo", "nccl"]


def open_endpoint(
    kind: TransportKind,
    *,
    key: bytes,
    rank: int,
    num_ranks: int = 1,
    device: str = "cpu",
    deadlines: Deadlines | None = None,
    report: ReportStrangers = lambda name, number: None,
    host: str = HOST,
    ports: Ports | None = None,
) -> Endpoint:
    """Return a rank's endpoint on the data plane, whose address is to be published to its peers.

    Peers are the same-position ranks of the other replicas.

    - `kind`: `auto` means direct sockets for CPU tensors and NCCL for CUDA tensors.
    - `key`: the job's key. `rank`: this rank's position inside its replica. Connections prove both.
    - `num_ranks`: ranks of a replica.
    - `device`: the device of the tensors (``cpu`` or ``cuda``).
    - `deadlines`: how long the parts of a call may last.
    - `report`: see `Admission`. Any thread may call it.
    - `host`: the address of this node at which peers reach this rank.
    - `ports`: see `bind_free`. gloo and NCCL listen on further ports, which they choose themselves.

    Raises ValueError if the kind is unknown or cannot serve the device, and as `nccl.load` does.
    """
    deadlines = deadlines or Deadlines.of()
    on_cuda = device.split(":")[0] == "cuda"
    chosen = ("nccl" if on_cuda else "direct") if kind == "auto" else kind
    if (chosen == "nccl") != on_cuda:
        remedy = "nccl" if on_cuda else "direct"
        raise ValueError(f"--recover-transport {chosen} does not move {device} tensors; use {remedy} or auto")
    direct = functools.partial(DirectEndpoint, host, key=key, rank=rank, deadlines=deadlines, report=report, ports=ports)
    if chosen == "direct":
        return direct()
    if chosen == "gloo":
        from megatron_recover.data_plane.gloo import GlooTransport

        return RendezvousEndpoint(
            EchoServer(host, key, rank, report, ports=ports),
            direct(),
            lambda direct, unreachable: GlooTransport(direct, host=host, unreachable=unreachable),
            key=key, rank=rank,
        )  # fmt: skip
    if chosen == "nccl":
        from megatron_recover.data_plane import nccl

        sums = nccl.Sums(nccl.load(), close_s=deadlines.close_s, has_own_collectives=num_ranks > 1)
        return RendezvousEndpoint(
            EchoServer(host, key, rank, report, ports=ports),
            direct(),
            sums.transport,
            key=key,
            rank=rank,
            overlap_refusal=sums.overlap_refusal,
        )
    raise ValueError(f"--recover-transport is {kind!r}; choose auto, direct, gloo or nccl")


class RendezvousEndpoint:
    """The endpoint of gloo or NCCL, whose members rendezvous over a `direct` transport.

    The address is that of `direct`, a space, and that of this rank's `EchoServer`.
    """

    def __init__(
        self,
        echo: EchoServer,
        direct: DirectEndpoint,
        transport: Callable[[DirectTransport, Callable[[], tuple[int, ...]]], Transport],
        *,
        key: bytes,
        rank: int,
        overlap_refusal: Callable[[int, Collection[Operand]], str] = lambda generation, operands: "",
    ) -> None:
        """Join both ends. `echo` answers probes. `close` also closes `echo` and `direct`.

        `transport(direct, unreachable)` makes one generation's transport. The new transport owns
        its argument `direct`, the direct transport of that generation. `unreachable()` probes the
        other members and returns the members that do not answer. `overlap_refusal`: see `Endpoint`.
        """
        self.overlap_refusal = overlap_refusal
        self._direct = direct
        self._key, self._rank = key, rank
        self._echo = echo
        self._transport = transport
        self._current: Transport | None = None
        self.address = f"{self._direct.address} {self._echo.address}"

    def open(self, generation: int, me: int, addresses: Mapping[int, str]) -> Transport:
        """Return the transport of `generation`, and close the previous one.

        Raises Revoked or TransportError as `DirectEndpoint.open` does. Revoked leaves the previous
        transport open. After TransportError only the previous direct transport is closed.
        """
        both = {member: address.partition(" ") for member, address in addresses.items()}
        direct = self._direct.open(generation, me, {member: each[0] for member, each in both.items()})
        if self._current is not None:
            self._current.close()
        echoes = {member: each[2] for member, each in both.items() if member != me}
        probe_s = self.deadlines.probe_s
        asker = Party(Role.ECHO, me, self._rank)
        self._current = self._transport(direct, lambda: unreachable(echoes, self._key, asker, probe_s))
        return self._current

    @property
    def deadlines(self) -> Deadlines:
        """Return how long the parts of a call may last; they are those of the direct transports."""
        return self._direct.deadlines

    @deadlines.setter
    def deadlines(self, deadlines: Deadlines) -> None:
        self._direct.deadlines = deadlines

    def close(self) -> None:
        """Stop listening, and close the current transport."""
        if self._current is not None:
            self._current.close()
        self._direct.close()
        self._echo.close()
