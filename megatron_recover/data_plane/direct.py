"""Direct reduction over TCP: each member sends shard j to its owner j, which returns the sum.

The owner adds in ascending order of replica id and sends the sum to all members. Every member adds
a small tensor for itself (`shards.py`). Every member has a connection to every other one. So all
survivors see a death themselves, and no member waits on a distant ring neighbour. A larger tensor's
reduction moves as many bytes as a ring, in 2 hops instead of 2(n-1).

One thread does everything: the caller's, inside the call, with non-blocking sockets and `poll`.
Bytes move directly from the source, and sums directly into the result. Only the contributions of
peers go through scratch. So after a call has returned or raised, nothing is left running that could
write memory. `revoke` sets a flag, wakes the poll and shuts the data connections down. It then
waits for the piece that the call may be receiving or adding (`writing.py`). A piece is at most
1 MiB of a sum, or what the kernel has received of a copy. `revoke` writes no tensor and closes no
descriptor.

Generations are fenced by three means:

* A data connection belongs to one generation. The handshake binds that generation, and an acceptor
  in a newer one refuses it.
* Opening a generation retires the older transport.
* Each frame repeats generation and tag.

Of two members the higher id connects. Until then the lower id holds a *watch*: a connection to the
peer's listener that carries nothing but a handshake. If a proven watch ends, or if nobody listens
any more, the peer has ended or has closed its endpoint before it connected. A connection that ends
before the acceptor's verdict is no such evidence: strangers may have crowded it out. It is dialled
again.

A member whose call failed does not shut its sockets down before it is revoked. Otherwise the others
would blame this member, the first to notice, and not the culprit.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_recover.authentication.admission import ReportStrangers
from megatron_recover.authentication.handshake import Reply, Role
from megatron_recover.data_plane.arrivals import Arrivals, Parked
from megatron_recover.data_plane.connection import REDIAL_S, CannotDial, Connection, EndedUnproven, connect
from megatron_recover.data_plane.exchange import CopyExchange, Exchange, SumExchange
from megatron_recover.data_plane.transport import (
    CallPart,
    DeadlineExceeded,
    Operand,
    PeerAhead,
    PeerLost,
    Probe,
    Revoked,
    TransportError,
    check_operands,
    no_probe,
)
from megatron_recover.data_plane.writing import WriteGate
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import HOST, Ports, address_of, bind_free

if TYPE_CHECKING:
    from torch import Tensor


class DirectEndpoint:
    """A rank's TCP listener at a free port of `host`. Address: `host:port`.

    Peers prove the job's key, their replica, and that they are ranks of the same position. No
    thread accepts connections: they wait in the kernel until a transport of this endpoint is inside
    a call. A forked child closes all sockets at once, so that it does not keep a dead rank's
    connections open.
    """

    def __init__(
        self,
        host: str = HOST,
        *,
        key: bytes,
        rank: int,
        deadlines: Deadlines | None = None,
        report: ReportStrangers = lambda name, number: None,
        ports: Ports | None = None,
    ) -> None:
        """Listen on `host`. `key` is the job's; `rank` is this rank's position in its replica.

        `deadlines`: how long the parts of a call may last. `report`: see `Admission`; called in the
        thread of a call or of `close`. `ports`: see `bind_free`.
        """
        self.deadlines = deadlines or Deadlines.of()
        listener = bind_free(host, ports)
        self.address = address_of(listener)
        self._key, self._rank = key, rank
        self._arrivals = Arrivals(listener, key, rank, report)
        self._lock = threading.Lock()
        self._current: DirectTransport | None = None
        self._generation = 0
        self._closed = False
        endpoint = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: alive._abandon() if (alive := endpoint()) is not None else None)

    def overlap_refusal(self, generation: int, operands: Collection[Operand]) -> str:
        """Return an empty text: a socket needs no device."""
        return ""

    def open(self, generation: int, me: int, addresses: Mapping[int, str]) -> DirectTransport:
        """Return the transport of `generation`, and close the previous one.

        Raises Revoked if the endpoint is closed, or unless `generation` is newer than all before,
        also those that failed to open. Raises TransportError if this process has no free
        descriptor; the previous transport is closed then, too.
        """
        previous = None
        try:
            with self._lock:
                if self._closed or generation <= self._generation:
                    reason = "the endpoint is closed" if self._closed else f"it is in generation {self._generation}"
                    raise Revoked(f"cannot open generation {generation}: {reason}")
                previous, self._current, self._generation = self._current, None, generation
                self._current = transport = DirectTransport(self, generation, me, addresses)
        finally:
            if previous is not None:
                previous.close()
        return transport

    def close(self) -> None:
        """Stop listening, and close the current transport."""
        with self._lock:
            self._closed = True
            current, self._current = self._current, None
            self._arrivals.admission.tell()
            self._arrivals.close()
        if current is not None:
            current.close()

    def connect(self, address: str, role: Role, *, generation: int, me: int, peer: int) -> Connection:
        """Begin to connect to the same-position rank of replica `peer`.

        Raises PeerLost or `CannotDial`, as `dial` does.
        """
        return connect(address, self._key, role, generation=generation, me=me, peer=peer, rank=self._rank)

    def greet(self, me: int, *, expects: bool = True) -> int:
        """Accept new connections and advance all handshakes, as `Arrivals.greet` does.

        Return the descriptor that is readable when there is more to do. Raises Revoked if the
        endpoint is closed.
        """
        with self._lock:
            if self._closed:
                raise Revoked("the endpoint is closed")
            self._arrivals.greet(me, self._generation, expects=expects)
            return self._arrivals.admission.fileno()

    def take(self, generation: int) -> tuple[dict[int, Parked], dict[int, int]]:
        """Take the proven connections for `generation`; return them and the peers in a newer one.

        The first dictionary maps a peer to its connection, which is no longer parked. The second
        maps a peer to the newer generation of its connection. Connections of older generations are
        refused.
        """
        with self._lock:
            parked = self._arrivals.parked
            arrived = {peer: parked.pop((g, peer)) for g, peer in list(parked) if g == generation}
            for stale in [key for key in parked if key[0] < generation]:
                parked.pop(stale).refuse(Reply.OLDER, self._generation)
            return arrived, {peer: newer for newer, peer in parked}

    def _abandon(self) -> None:
        """Close the sockets in a forked child.

        The lock is new: another thread may have held the old one at the fork.
        """
        self._lock = threading.Lock()
        self._closed = True
        current, self._current = self._current, None
        self._arrivals.close()
        if current is not None:
            current.abandon()


class DirectTransport:
    """The transport of one generation among `addresses`.

    Only `revoke` and `close` are thread-safe.
    """

    def __init__(self, endpoint: DirectEndpoint, generation: int, me: int, addresses: Mapping[int, str]) -> None:
        """Make no connection yet.

        Raises TransportError if this process has no free descriptor.
        """
        try:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise TransportError(f"cannot open generation {generation} ({error.strerror}); raise `ulimit -n`") from error
        self.generation = generation
        self.members = tuple(sorted(addresses))
        self.me = me
        self._endpoint = endpoint
        self._addresses = dict(addresses)
        self._connections: dict[int, Connection] = {}
        self._watches: dict[int, Connection] = {}
        self._reached: set[int] = set()
        """Peers to or from which a connection was ever established."""
        self._dial_at: dict[int, float] = {}
        """Monotonic time at which to dial a peer again, by peer."""
        self._not_dialled: dict[int, str] = {}
        """Error text for each peer that could not be dialled for want of a resource of this
        rank."""
        self._scratch: dict[int, Tensor] = {}
        self._arrivals: int | None = None
        """Descriptor that is readable when a peer has arrived; None while no further peer is
        expected."""
        self._failure = ""
        self._revoked = False
        self._retired = False
        self._released = False
        self._lock = threading.Lock()
        self._calling = threading.Lock()
        self._writing = WriteGate()

    @property
    def deadlines(self) -> Deadlines:
        """Return how long the parts of a call may last now."""
        return self._endpoint.deadlines

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, probe: Probe | None = None) -> None:
        """Sum as `Transport.sum_into` does; CPU tensors, in ascending order of replica id."""
        check_operands(sources, results, device="cpu")
        probe = probe or no_probe
        with self._call():
            probe("begin")
            exchange = SumExchange(self.generation, tag, self.members, self.me, sources, results, self._scratch, probe)
            for add in exchange.alone():
                self._check()
                with self._writing:
                    add()
            self._run(exchange, [member for member in self.members if member != self.me])
            exchange.finish()

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, targets: Sequence[int], tag: int) -> None:
        """Copy as `Transport.copy_into` does; CPU tensors.

        Raises ValueError if the source or a target is no member.
        """
        check_operands(tensors, device="cpu")
        if not {source, *targets} <= set(self.members):
            raise ValueError(f"copy from {source} to {list(targets)}, but the members are {list(self.members)}")
        sending = self.me == source
        peers = [target for target in targets if target != source] if sending else [source] if self.me in targets else []
        with self._call():
            self._run(CopyExchange(self.generation, tag, peers, tensors, sending=sending), peers)

    def revoke(self) -> None:
        """Revoke as `Transport.revoke` does.

        The data connections are shut down, so that the peers notice even while this rank computes.
        Return when a call in another thread, if any, has left its piece of memory; it then writes
        no more.
        """
        with self._lock:
            if not self._revoked:
                self._revoked = True
                os.eventfd_write(self._wake, 1)
                for connection in self._connections.values():
                    connection.shut_down()
        self._writing.shut()

    def close(self) -> None:
        """Close as `Transport.close` does.

        If another thread is inside a call, that call is revoked and releases the sockets itself.
        """
        self._retired = True
        self.revoke()
        if self._calling.acquire(blocking=False):
            self._release()
            self._calling.release()

    def abandon(self) -> None:
        """Close the sockets in a forked child, without a message to the peers."""
        self._lock, self._calling, self._writing = threading.Lock(), threading.Lock(), WriteGate()
        self._revoked = True
        self._release()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        if not self._calling.acquire(blocking=False):
            self._check()  # a close holds it while it releases the sockets
            raise RuntimeError("a transport is used by one thread at a time")
        try:
            self._check()
            if self._failure:
                raise TransportError(f"generation {self.generation} is broken: {self._failure}")
            yield
        except Revoked as error:
            self._failure = self._failure or str(error)
            raise
        except TransportError as error:
            self._failure = self._failure or str(error)
            self._check()  # after a revoke the sockets' errors are its consequence
            raise
        except BaseException as error:
            self._failure = self._failure or repr(error)  # frames may be half sent
            raise
        finally:
            self._calling.release()
            if self._retired:
                self.close()

    def _check(self) -> None:
        if self._revoked:
            raise self._revoked_error()

    def _revoked_error(self, peers: Sequence[int] = (), *, stalled: bool = False) -> Revoked:
        return Revoked(f"generation {self.generation} was revoked", peers, stalled=stalled)

    def _release(self) -> None:
        with self._lock:
            if not self._released:
                self._released = True
                os.close(self._wake)
                for connection in (*self._watches.values(), *self._connections.values()):
                    connection.sock.close()
                self._scratch.clear()

    def _run(self, exchange: Exchange, peers: Sequence[int]) -> None:
        """Connect to `peers`, and move bytes until the exchange is complete.

        Raises:
        - PeerLost, PeerAhead or TransportError as `_dial`, `_adopt`, `_advance` and `_wait` do;
        - Revoked after a revoke, with the suspects if the call had waited for half of its limit;
        - DeadlineExceeded if no byte has moved for as long as the part may last;
        - TransportError in its place if this member lacks a resource to dial a peer of lower id.
        """
        part, limit_s = CallPart.CONNECT, CallPart.CONNECT.limit_s(self.deadlines)
        progressed_at = time.monotonic()
        self._endpoint.greet(self.me, expects=False)  # also if no peer is missing: strangers fill the kernel's queue
        while not exchange.complete():
            if self._revoked:
                stalled = time.monotonic() - progressed_at >= limit_s / 2
                raise self._revoked_error(self._suspects(exchange, peers) if stalled else (), stalled=stalled)
            self._dial(peers)
            self._adopt(peers)
            moved = [self._advance(peer, exchange) for peer in peers]
            exchange.tell()
            part = self._part(exchange, peers)
            now, limit_s = time.monotonic(), part.limit_s(self.deadlines)
            if any(moved):
                progressed_at = now
            elif now - progressed_at >= limit_s:
                if missing := [self._not_dialled[each] for each in peers if each < self.me and each in self._not_dialled]:
                    raise TransportError(missing[0])  # not the peers' fault: this member is the one that dials
                unreached = self._unreached(peers)
                raise DeadlineExceeded(part, unreached or self._suspects(exchange, peers), limit_s)
            else:
                self._wait(exchange, peers, progressed_at + limit_s - now)

    def _part(self, exchange: Exchange, peers: Sequence[int]) -> CallPart:
        """Return the part that the call is in."""
        if self._unreached(peers):
            return CallPart.CONNECT
        return CallPart.SUM if all(exchange.has_entered(peer) for peer in peers) else CallPart.SLOWEST

    def _unreached(self, peers: Sequence[int]) -> list[int]:
        """Return the peers to which a connection was never established.

        A peer of higher id is left out if this member had no resource to watch it with.
        """
        return [peer for peer in peers if peer not in self._reached and not (peer > self.me and peer in self._not_dialled)]

    def _dial(self, peers: Sequence[int]) -> None:
        """Begin to connect to the peers of lower id, and to watch the others not connected so far.

        A peer that cannot be dialled now is dialled again after `REDIAL_S`. Raises PeerLost if
        nobody listens there.
        """
        for peer in peers:
            role, known = (Role.DATA, self._connections) if peer < self.me else (Role.WATCH, self._watches)
            if peer in self._connections or peer in known or self._dial_at.get(peer, 0.0) > time.monotonic():
                continue
            try:
                made = self._endpoint.connect(self._addresses[peer], role, generation=self.generation, me=self.me, peer=peer)
            except CannotDial as error:
                self._not_dialled[peer] = str(error)
                self._dial_at[peer] = time.monotonic() + REDIAL_S
                continue
            self._not_dialled.pop(peer, None)
            if role is Role.DATA:
                self._add(made)
            else:
                self._watches[peer] = made

    def _dial_again(self, connection: Connection) -> None:
        """Close a connection that ended unproven, and schedule the next attempt for `_dial`."""
        for known in (self._connections, self._watches):
            if known.get(connection.peer) is connection:
                with self._lock:
                    del known[connection.peer]
                connection.sock.close()
        self._dial_at[connection.peer] = time.monotonic() + REDIAL_S

    def _advance(self, peer: int, exchange: Exchange) -> bool:
        """Advance the handshake with `peer` or of its watch; once connected, send and receive once.

        Return whether a byte of a frame moved. Nothing waits. A connection that ended unproven is
        dialled again later. Raises PeerLost, PeerAhead, TransportError for an unexpected frame, or
        Revoked after a revoke.
        """
        connection = self._connections.get(peer)
        try:
            if connection is None and (watch := self._watches.get(peer)) is not None and not watch.ready:
                watch.handshake()
                if watch.is_established:
                    self._reached.add(peer)
            if connection is None:
                return False
            is_ready = connection.ready or connection.handshake()
            if connection.is_established:
                self._reached.add(peer)
            if not is_ready:
                return False
            moved = bool(exchange.outgoing[peer]) and connection.send(exchange.outgoing[peer])
            with self._writing:
                return (exchange.wants(peer) and exchange.receive(peer, connection)) or moved
        except EndedUnproven:
            self._dial_again(connection or self._watches[peer])
            return False
        except OSError as error:
            raise PeerLost(peer, error.strerror or str(error)) from error

    def _wait(self, exchange: Exchange, peers: Sequence[int], timeout_s: float) -> None:
        """Sleep until a socket is ready, a peer arrives, somebody revokes, or the time is over.

        The sleep ends earlier if a peer is to be dialled. Raises PeerLost if a connection on which
        nothing is to be sent or received was reset, or if a proven watch has ended (Revoked if that
        follows a revoke).
        """
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._arrivals is not None:
            poll.register(self._arrivals, select.POLLIN)
        idle: dict[int, int] = {}
        watched: dict[int, int] = {}
        for peer in peers:
            connection = self._connections.get(peer)
            if connection is None:
                if (watch := self._watches.get(peer)) is None:
                    timeout_s = min(timeout_s, max(0.0, self._dial_at.get(peer, 0.0) - time.monotonic()))
                    continue
                if watch.ready:
                    watched[watch.sock.fileno()] = peer
                poll.register(watch.sock, watch.poll_mask(sending=False, receiving=True))
            else:
                mask = connection.poll_mask(sending=bool(exchange.outgoing[peer]), receiving=exchange.wants(peer))
                poll.register(connection.sock, mask)
                if not mask:
                    idle[connection.sock.fileno()] = peer
        for descriptor, _ in poll.poll(timeout_s * 1000):
            if descriptor in idle:
                # Nothing was polled for here, so this is a reset. The peer gave up or died: a peer
                # that is done has read all bytes, so its end is no reset.
                raise PeerLost(idle[descriptor], "connection reset")
            if descriptor in watched:
                self._check()
                raise PeerLost(watched[descriptor], "ended before it connected")

    def _adopt(self, peers: Sequence[int]) -> None:
        """Accept the peers that have connected to this generation, if one of `peers` is missing.

        Refused are a second connection of a peer, and one of a peer that is no member or has a
        lower id. Raises PeerAhead if a missing peer has connected to a newer generation, and
        Revoked if the endpoint is closed.
        """
        self._arrivals = None
        if all(peer in self._connections for peer in peers):
            return
        self._arrivals = self._endpoint.greet(self.me)
        arrived, newer = self._endpoint.take(self.generation)
        for peer, parked in arrived.items():
            if peer in self._connections or peer not in self.members or peer < self.me:
                parked.refuse(Reply.NO_ROOM, self.generation)
                continue
            self._add(Connection(peer, parked.sock))
            if (watch := self._watches.pop(peer, None)) is not None:
                watch.sock.close()
            parked.decide(Reply.WELCOME, self.generation)
        for peer in peers:
            if peer not in self._connections and peer in newer:
                raise PeerAhead(peer, newer[peer])

    def _add(self, connection: Connection) -> None:
        with self._lock:
            self._connections[connection.peer] = connection
            if self._revoked:
                connection.shut_down()

    def _suspects(self, exchange: Exchange, peers: Sequence[int]) -> list[int]:
        """Return the peers that keep this member waiting.

        These are the peers that are not connected. If all are, they are the peers whose next
        segment of their own data this member can store but does not get. (A peer that is `SLOTS`
        segments ahead waits for others, and is not one of them.) If there are none, it is the one
        peer that does not receive this member's data, or else the one that has not sent a sum.
        Several such peers are themselves waiting for a third, so none is returned.
        """
        connected = [peer for peer in peers if peer in self._connections and self._connections[peer].ready]
        first_hand = [peer for peer in peers if peer not in connected] or [
            peer for peer in connected if exchange.waits_for(peer)
        ]
        if first_hand:
            return first_hand
        late = [peer for peer in connected if exchange.outgoing[peer]] or [peer for peer in connected if exchange.wants(peer)]
        return late if len(late) == 1 else []
