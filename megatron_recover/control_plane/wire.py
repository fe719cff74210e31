"""Framed messages of the control plane: what travels between ranks, leaders and the coordinator, and the link it travels on.

A frame is a header (magic, format version, body length) and one msgpack body of the tagged union `Message`. This module
decides how bytes become messages and refuses those that are not; it never acts on one, never blocks and never connects
by itself.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator

import msgspec

from megatron_recover.authentication.handshake import Role
from megatron_recover.control_plane.encoding import (
    PackedPeers,
    PackedStatus,
    PackedStatuses,
    Peer,
    packed_peers,
    packed_status,
    packed_statuses,
    unpacked_peers,
    unpacked_status,
    unpacked_statuses,
)
from megatron_recover.core import values
from megatron_recover.core.values import ReplicaId, Shape, Value

FORMAT_VERSION = 1
MAX_BODY_BYTES = 64 * 2**20
"""A status carries the contributions of every bucket: far below this at any size we know of."""
STATUSES_A_FRAME = 64
"""Of those that are handed on in a tree: each has a line per bucket and rank, and a frame has only so much room."""
_HEADER = struct.Struct("!2sHI")
_MAGIC = b"mr"
_CHUNK_BYTES = 2**18
_READ_BYTES = 2**20
"""What one call reads of a link at most, before the other links are served."""
MAX_QUEUED_BYTES = 2 * MAX_BODY_BYTES
"""What is kept for a peer that does not read; with more the link is closed."""
_LARGEST_BODIES = {(Role.LEADER, Role.COORDINATOR): 4 * 2**20, (Role.RANK, Role.LEADER): 16 * 2**20}


def largest_body(sender: Role, receiver: Role) -> int:
    """Return how many bytes a message from one role to another may have."""
    return _LARGEST_BODIES.get((sender, receiver), MAX_BODY_BYTES)


class LinkClosed(Exception):
    """The other end is gone, or what it sends is not ours; the link cannot be used any more."""


class CannotDial(LinkClosed):
    """This end had no descriptor, memory or local port to connect with: nothing is known of the other end. Try again later."""


class QueueFull(LinkClosed):
    """The other end does not read, and a message found no room: the link is over, also where it could be dialled again."""


# --- Messages that only the wire knows; the others are core values ---------------------------------------------------------


class RankHello(Value, frozen=True):
    """First message of a rank to its leader, when its buckets are known."""

    rank: int
    shape: Shape
    fingerprint: str
    data_address: str
    parts: tuple[tuple[str, str], ...] = ()
    """What of the fingerprint has a name (`core/alike.py`)."""


class LeaderHello(Value, frozen=True):
    """First message of a leader to the coordinator, when all its ranks have said theirs."""

    hello: values.Hello
    peer: Peer


class PeerHello(Value, frozen=True):
    """First message of a leader to another leader."""

    replica: ReplicaId


class Announcement(Value, frozen=True):
    """Coordinator to a leader: a new generation and where its members are."""

    new: values.NewGeneration
    peers: tuple[Peer, ...]
    """Members of the roster that no earlier announcement to this leader had: where a replica is never changes."""
    noticed_s: float
    """Seconds between the coordinator's first sign of the loss (or request) behind it and the sending."""


class Enter(Value, frozen=True):
    """Leader to a rank: the order to promise, and where the same-position ranks of the members are."""

    promise: values.Promise
    data_addresses: tuple[tuple[ReplicaId, str], ...]
    """Of members that no earlier order to this rank had."""


class PackedAnnouncement(Value, frozen=True):
    """How `Announcement` travels."""

    new: values.NewGeneration
    peers: PackedPeers
    noticed_s: float


class Heard(Value, frozen=True):
    """Leader to a rank: its `Raised` is on its way to the coordinator, the process may end now."""


class Beat(Value, frozen=True):
    """Coordinator to a leader, every `Deadlines.beat_s`: that it runs, and what it knows. It says nothing about any rank."""

    pid: int
    """Of the coordinator's process."""
    generation: values.Generation
    step: int
    """The highest uncommitted step that it has heard of."""
    waiting_for: tuple[ReplicaId, ...]
    """Members that have not entered the generation; before the first one, replicas that have not said `Hello`."""


class LeaderBeat(Value, frozen=True):
    """A leader's answer to a `Beat`, by its control thread: it says nothing about the training thread."""

    replica: ReplicaId
    generation: values.Generation
    step: int
    waiting_for: tuple[ReplicaId, ...]
    request: values.Requested | values.Diverged | values.Miscounted | None = None
    """What the leader has asked for in this generation and not got yet. The coordinator acts on it once."""


def frame(message: Message) -> bytes:
    """A message as it travels; the same for all whom it is sent to."""
    body = msgspec.msgpack.encode(_packed(message))
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes exceeds the wire's {MAX_BODY_BYTES}")
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, len(body)) + body


Message = (
    RankHello | LeaderHello | PeerHello | Announcement | Enter | Heard | Beat | LeaderBeat
    | values.Plan | values.Close | values.Apply | values.Stop
    | values.Begun | values.Promised | values.Holds | values.Blocked | values.Raised | values.Ended
    | values.Vote | values.Votes | values.Status | values.Statuses
    | values.Entered | values.Requested | values.Busy | values.Failing | values.Diverged | values.Miscounted | values.Finished
)  # fmt: skip
_Framed = Message | PackedStatus | PackedStatuses | PackedAnnouncement


def _packed(message: Message) -> _Framed:
    """Return the form in which a message travels (`control_plane/encoding.py`)."""
    match message:
        case values.Status():
            return packed_status(message)
        case values.Statuses():
            return packed_statuses(message)
        case Announcement(new, peers, noticed_s):
            return PackedAnnouncement(new, packed_peers(peers), noticed_s)
    return message


def _unpacked(framed: _Framed, known: list[values.Commitment]) -> Message:
    """Return the message that has travelled in this form. Raises ValueError where it is no such form."""
    match framed:
        case PackedStatus():
            return unpacked_status(framed)
        case PackedStatuses():
            return unpacked_statuses(framed, known)
        case PackedAnnouncement(new, peers, noticed_s):
            return Announcement(new, unpacked_peers(peers), noticed_s)
    return framed


class Link:
    """One connected, non-blocking stream of messages. Used by one thread."""

    def __init__(self, connection: socket.socket | None, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """A frame with a longer body than `max_body_bytes` closes the link before the body is read.

        Without a connection yet (None) the link has to be made by `redial` before it is used.
        """
        if connection is not None:
            self._take_socket(connection)
        self._max_body_bytes = max_body_bytes
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._queued = 0
        """Bytes in `_outgoing`."""
        self._has_gap = False
        """Whether a message found no room: nothing that is sent later may arrive."""
        self._known: list[values.Commitment] = []
        """Those of the newest statuses: what comes in several frames shares them in memory, too."""
        self._decode = msgspec.msgpack.Decoder(_Framed).decode

    def _take_socket(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def connection(self) -> socket.socket:
        """The socket; another one after `redial`."""
        return self._socket

    @property
    def wants_write(self) -> bool:
        """Whether something is queued that the socket has not taken yet."""
        return bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Queue a message and hand the socket what it takes now. Raises `LinkClosed`."""
        self.put(frame(message))

    def put(self, framed: bytes) -> None:
        """`send` of what is framed already. Raises `LinkClosed`; `QueueFull` when the other end has not read for too long."""
        if self._has_gap or self._queued + len(framed) > MAX_QUEUED_BYTES:
            self._has_gap = True
            raise QueueFull(f"the other end does not read: {self._queued + len(framed)} bytes wait for it")
        self._queued += len(framed)
        self._outgoing.append(memoryview(framed))
        self.flush()

    def flush(self) -> None:
        """Hand the socket what it takes of the queue. Raises `LinkClosed`."""
        try:
            while self._outgoing:
                taken = self._socket.send(self._outgoing[0])
                self._queued -= taken
                if taken == len(self._outgoing[0]):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = self._outgoing[0][taken:]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> Iterator[Message]:
        """Yield every complete message of what has arrived, of which a call reads a bounded part.

        Then raises `LinkClosed` if the stream ends there, or is malformed.
        """
        closed = self._read()
        yield from self._complete()
        if closed is not None:
            raise closed

    def _read(self) -> LinkClosed | None:
        """Take a bounded part of what has arrived, and return how the stream ended if it did."""
        try:
            for _ in range(_READ_BYTES // _CHUNK_BYTES):
                chunk = self._socket.recv(_CHUNK_BYTES)
                if not chunk:
                    return LinkClosed("closed by the other end")
                self._incoming += chunk
        except BlockingIOError:  # that was all for now
            return None
        except OSError as error:
            return LinkClosed(str(error))
        return None  # there may be more: the loop comes back to it

    def retry_s(self) -> float | None:
        """Return None: a link that is closed stays closed."""
        return None

    def redial(self) -> None:
        """Raise `LinkClosed`: only a link that dialled can dial again."""
        raise LinkClosed("this end did not dial")

    def close(self) -> None:
        """Close the socket. What is queued is kept by a link that can `redial`, and lost otherwise."""
        self._socket.close()

    def _complete(self) -> Iterator[Message]:
        while len(self._incoming) >= _HEADER.size:
            magic, version, num_bytes = _HEADER.unpack_from(self._incoming)
            if magic != _MAGIC or version != FORMAT_VERSION or num_bytes > self._max_body_bytes:
                raise LinkClosed(f"not a frame of format {FORMAT_VERSION}: {magic!r}, format {version}, {num_bytes} bytes")
            end = _HEADER.size + num_bytes
            if len(self._incoming) < end:
                return
            try:
                framed = self._decode(self._incoming[_HEADER.size : end])
                message = _unpacked(framed, self._known)
            except (ValueError, RecursionError) as error:  # msgspec's own is a ValueError; nested arrays make the other
                raise LinkClosed(f"not a message: {error}") from error
            del self._incoming[:end]
            yield message


def dial(address: str) -> socket.socket:
    """Return a non-blocking socket on its way to `host:port`.

    Raises `LinkClosed` if that is refused at once, and `CannotDial` if this end has not got what it takes to connect.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise CannotDial(f"cannot connect ({error.strerror}); raise `ulimit -n`") from error
    connection.setblocking(False)
    code = connection.connect_ex((host, int(port)))
    if code not in (0, errno.EINPROGRESS):
        connection.close()
        if code == errno.ECONNREFUSED:
            raise LinkClosed(os.strerror(code))
        raise CannotDial(f"cannot connect to {address} ({os.strerror(code)})")
    return connection


def listen(address: str) -> socket.socket:
    """Return a non-blocking listening socket at `host:port`; port 0 lets the kernel choose (see `address_of`).

    Raises OSError where the port is taken.
    """
    host, _, port = address.rpartition(":")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if int(port):
            # A port that was in use a moment ago is taken again. Never with port 0: between `bind` and `listen` another
            # user's socket with this option could be bound to the same port and listen first.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def address_of(bound: socket.socket) -> str:
    """`host:port` of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"{host}:{port}"
