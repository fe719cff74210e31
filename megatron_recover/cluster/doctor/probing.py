"""Trying the connections from this node to others: every port, clock, large messages and packets.

All waits are bounded, and so is the number of nodes that one node tries (`peers_of`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from megatron_recover.authentication.admission import out_of_descriptors
from megatron_recover.authentication.handshake import NONCE_BYTES, Connector
from megatron_recover.cluster.doctor import conversation
from megatron_recover.cluster.doctor.conversation import DATAGRAMS, REQUEST, TIMES, TOKEN_BYTES, Kind
from megatron_recover.data_plane.connection import Connection, EndedUnproven
from megatron_recover.data_plane.transport import PeerLost
from megatron_recover.host.addresses import family_of

ALL_PAIRS = 17
"""Largest number of nodes of which each tries all others."""
MAX_PORTS = 64
"""Ports of a range that are tried at most (`sample`)."""
CROWDED_PORTS = 4
"""Ports of a crowded node that one node tries at most (`tried`). All of them from 1,000 nodes would
take that node longer than `_CONNECT_S`."""
_AT_ONCE = 16
"""Peers that are tried at the same time."""
_CONNECT_S = 2.0
"""Seconds for a connection to each port, all of them at the same time."""
_REDIAL_S = 0.05
_ECHO_S = 2.0
_ECHO_BYTES = 2**18
_NUM_TIMES = 5
"""Looks at a peer's clock. The quickest one counts."""
_PACKET_S, _NUM_PACKETS = 0.15, 3
_SIZES = (9000, 8928, 4000, 1500, 1450, 1400, 1280, 576)
"""Sizes in bytes that are tried if packets as large as the interface sends are lost."""
_SMALL = 128


class Peer(msgspec.Struct, frozen=True):
    """A node that is to be tried."""

    node: int
    host: str
    """Numeric address that it publishes."""
    ports: tuple[int, ...]
    """Ports on which it listens (`Service.ports`)."""
    is_crowded: bool = False
    """True if so many nodes try it that only some ports and its clock are to be tried."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of one node about its connection to another."""

    node: int
    """Number of the other node."""
    unreached: tuple[tuple[int, str], ...] = ()
    """Ports without a proven connection, each with the reason."""
    ahead_s: float | None = None
    """Seconds by which the other clock is ahead; None if that is not known."""
    within_s: float = 0.0
    """Largest error of `ahead_s`: half of the quickest round trip."""
    has_echo: bool | None = None
    """True if a large message came back by TCP; None if nothing was sent."""
    packet_bytes: int = 0
    """Size of the packets that the interface sends; 0 if UDP does not pass at all."""
    passed_bytes: int = 0
    """Size of the largest packets that came back."""


def peers_of(node: int, num_nodes: int) -> dict[int, bool]:
    """Return the nodes that a node tries, each with whether it is crowded (`Peer.is_crowded`).

    Up to `ALL_PAIRS` nodes try each other.

    With more, a node tries node 0, and the nodes that come 1, 2, 4, 8, ... after it, in a circle.
    So each is tried by as many: by 10 of 1,024. A node or switch with a fault is found, but not
    each single pair of nodes that cannot connect. Node 0 is tried by all. It is crowded for those
    that it does not come after: their packets would be too many for its buffers, and be lost.
    """
    if num_nodes <= ALL_PAIRS:
        return {each: False for each in range(num_nodes) if each != node}
    after = {(node + 2**power) % num_nodes for power in range((num_nodes - 1).bit_length())}
    return {each: each not in after for each in sorted(after | {0}) if each != node}


def sample(first: int, last: int) -> list[int]:
    """Return the ports of a range to try: all, or `MAX_PORTS` from end to end."""
    number = last - first + 1
    if number <= MAX_PORTS:
        return [*range(first, last + 1)]
    return [first + round(step * (number - 1) / (MAX_PORTS - 1)) for step in range(MAX_PORTS)]


def tried(node: int, peer: Peer) -> tuple[int, ...]:
    """Return the ports of `peer` that this node tries: all, or some of those of a crowded node.

    Nodes with successive numbers try successive ports.
    """
    number = len(peer.ports)
    if not peer.is_crowded or number <= CROWDED_PORTS:
        return peer.ports
    return tuple(peer.ports[(CROWDED_PORTS * node + each) % number] for each in range(CROWDED_PORTS))


def probe(
    node: int, peers: Sequence[Peer], key: bytes, *, now_ns: Callable[[], int] = time.time_ns
) -> tuple[Answer, ...]:  # fmt: skip
    """Try the connections to all `peers`, and return an answer for each, in their order.

    `node`: number of this node; `now_ns`: its clock. Takes at most 10 s for each 16 peers, and
    milliseconds where all is well.
    """
    if not peers:
        return ()
    with ThreadPoolExecutor(min(_AT_ONCE, len(peers)), thread_name_prefix="doctor") as pool:
        return tuple(pool.map(lambda peer: _Probe(node, peer, key, now_ns).run(), peers))


class _Probe:
    """The attempt to connect to one peer. One thread uses it."""

    def __init__(self, node: int, peer: Peer, key: bytes, now_ns: Callable[[], int]) -> None:
        self._node, self._peer, self._key, self._now_ns = node, peer, key, now_ns

    def run(self) -> Answer:
        """Connect to all ports, and have the conversation on the first one that answers."""
        proven, unreached = self._connect()
        answer = Answer(node=self._peer.node, unreached=tuple(sorted(unreached.items())))
        if proven is None:
            return answer
        with proven.sock:
            return self._converse(proven.sock, answer)

    def _connect(self) -> tuple[Connection | None, dict[int, str]]:
        """Return the first proven connection, and the reason for each port without one.

        The others are closed at once: the peer has room for a limited number, and nodes that each
        kept some would wait for each other. A connection that ends before it is proven is dialled
        again: other nodes may have crowded it out (`admission.MAX_UNPROVEN`). So is a port for
        whose connection this process had no descriptor.
        """
        unreached: dict[int, str] = {}
        pending: dict[int, tuple[int, Connection]] = {}
        first: Connection | None = None
        to_dial, until = [*tried(self._node, self._peer)], time.monotonic() + _CONNECT_S
        while (to_dial or pending) and (left_s := until - time.monotonic()) > 0:
            dialled, to_dial = to_dial, []
            for port in dialled:
                try:
                    connection = self._dial(port)
                    pending[connection.sock.fileno()] = port, connection
                except OSError as error:
                    unreached[port] = error.strerror or str(error)
                    if out_of_descriptors(error):
                        to_dial.append(port)
            poll = select.poll()
            for _, connection in pending.values():
                poll.register(connection.sock, connection.poll_mask(sending=False, receiving=True))
            for number, _ in poll.poll(1000 * (0.0 if to_dial else left_s)):
                port, connection = pending[number]
                try:
                    if not connection.handshake():
                        continue
                    unreached.pop(port, None)
                    if first is None:
                        first = connection
                    else:
                        connection.sock.close()
                except (EndedUnproven, PeerLost) as error:
                    unreached[port] = str(error)
                    to_dial.append(port)
                except OSError as error:
                    unreached[port] = error.strerror or str(error)
                del pending[number]
                if port in unreached:
                    connection.sock.close()
            if to_dial:
                time.sleep(_REDIAL_S)
        for port, connection in pending.values():
            unreached[port] = "answers, but not the job's program" if connection.is_established else "no answer"
            connection.sock.close()
        return first, unreached

    def _dial(self, port: int) -> Connection:
        """Begin to connect to a port. Raises OSError if that fails at once."""
        sock = socket.socket(family_of(self._peer.host), socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex((self._peer.host, port))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(code, os.strerror(code))
        parties = conversation.party(self._node), conversation.party(self._peer.node)
        connector = Connector(self._key, *parties, port=port, nonce=secrets.token_bytes(NONCE_BYTES))
        return Connection(self._peer.node, sock, connector)

    def _converse(self, sock: socket.socket, answer: Answer) -> Answer:
        """Ask for the clock, a large echo, and packets. What does not answer is left out."""
        sock.settimeout(_ECHO_S)
        with contextlib.suppress(OSError):
            ahead_s, within_s = min((self._look_at_clock(sock) for _ in range(_NUM_TIMES)), key=lambda each: each[1])
            answer = msgspec.structs.replace(answer, ahead_s=ahead_s, within_s=within_s)
            if self._peer.is_crowded:
                return answer
            token = self._ask(sock, Kind.DATAGRAMS, DATAGRAMS.size)
            answer = msgspec.structs.replace(answer, **self._packets(*DATAGRAMS.unpack(token)))
            answer = msgspec.structs.replace(answer, has_echo=False)
            self._echo(sock)
            answer = msgspec.structs.replace(answer, has_echo=True)
        return answer

    def _ask(self, sock: socket.socket, kind: Kind, num_bytes: int, body: bytes = b"") -> bytes:
        """Send a request, and return the answer of `num_bytes` bytes. Raises OSError."""
        sock.sendall(REQUEST.pack(kind, len(body)) + body)
        return _read(sock, num_bytes)

    def _look_at_clock(self, sock: socket.socket) -> tuple[float, float]:
        """Return how many seconds the other clock is ahead, and the largest error of that."""
        sent, begin = self._now_ns(), time.monotonic_ns()
        read, answered = TIMES.unpack(self._ask(sock, Kind.TIME, TIMES.size))
        trip = time.monotonic_ns() - begin - (answered - read)
        return (read - sent - trip / 2) / 1e9, trip / 2e9

    def _echo(self, sock: socket.socket) -> None:
        """Have a large message come back, in parts: neither end has room for all of it."""
        until = time.monotonic() + _ECHO_S
        part = os.urandom(2**15)
        for _ in range(_ECHO_BYTES // len(part)):
            if self._ask(sock, Kind.ECHO, len(part), part) != part or time.monotonic() > until:
                raise TimeoutError

    def _packets(self, port: int, token: bytes) -> dict[str, int]:
        """Return the fields of `Answer` about packets, for those that begin with `token`."""
        with socket.socket(family_of(self._peer.host), socket.SOCK_DGRAM) as sock:
            conversation.forbid_fragments(sock)
            sock.connect((self._peer.host, port))
            sock.settimeout(_PACKET_S)
            if not _comes_back(sock, token, _SMALL, 2 * _NUM_PACKETS):
                return {}
            largest = min(conversation.path_bytes(sock), _SIZES[0])
            sizes = [largest, *(size for size in _SIZES if size < largest), _SMALL]
            passed = next(size for size in sizes if size == _SMALL or _comes_back(sock, token, size, _NUM_PACKETS))
            return {"packet_bytes": largest, "passed_bytes": passed}


def _comes_back(sock: socket.socket, token: bytes, num_bytes: int, num_tries: int) -> bool:
    """Return whether a packet of `num_bytes`, headers included, is answered by itself."""
    for _ in range(num_tries):
        packet = token + secrets.token_bytes(num_bytes - conversation.headers_of(sock) - TOKEN_BYTES)
        until = time.monotonic() + _PACKET_S
        with contextlib.suppress(OSError):  # nothing came, or the packet is larger than the interface
            sock.send(packet)
            while time.monotonic() < until:
                if sock.recv(2**16) == packet:
                    return True
    return False


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes. Raises OSError at the end of the stream, or after its timeout."""
    found = b""
    while len(found) < num_bytes:
        chunk = sock.recv(num_bytes - len(found))
        if not chunk:
            raise ConnectionResetError
        found += chunk
    return found
