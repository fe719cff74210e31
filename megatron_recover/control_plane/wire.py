"""The messages of the control plane, their frames, and the link that carries them.

Ranks, leaders and the coordinator exchange these messages. A frame is a header (magic, format
version, body length, and the sender's stamp of `trace/node_clock.py`), a MAC, and one msgpack body:
a message of the tagged union `Message`, large ones in a packed form (`control_plane/encoding.py`).
This module turns bytes into messages and rejects bytes that are no message. It never acts on a
message and never blocks. It opens a connection only when a caller asks for one (`dial`).

The MAC is that of `authentication/frame_macs.py`, Note [Frames]: a frame that was forged, changed,
repeated, left out or moved closes the link. Before its MAC is found valid, nothing of a body is
decoded, and the stamp does not move the receiver's clock.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator

import msgspec

from megatron_recover.authentication.frame_macs import MAC_BYTES, FrameMacs
from megatron_recover.authentication.handshake import Role, SessionKeys
from megatron_recover.control_plane.encoding import (
    PackedPeers,
    PackedStatus,
    PackedStatuses,
    packed_peers,
    packed_status,
    packed_statuses,
    unpacked_peers,
    unpacked_status,
    unpacked_statuses,
)
from megatron_recover.control_plane.leader_messages import (
    Announcement,
    Beat,
    Enter,
    Heard,
    LeaderBeat,
    LeaderHello,
    PeerHello,
    RankHello,
    ReadFrom,
    Sources,
)
from megatron_recover.control_plane.node_messages import FromAgent, ToAgent
from megatron_recover.control_plane.store_messages import StoreAnswer, StoreRefusal, StoreRequest
from megatron_recover.core.membership_messages import (
    AddRequests,
    Diverged,
    Entered,
    Grant,
    JoinRefused,
    Miscounted,
    Named,
    NewcomerReady,
    NewcomersProven,
    NewGeneration,
    ReplicaBlocked,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaLeaving,
    ReplicaSaving,
    TurnedAway,
)
from megatron_recover.core.rank_messages import (
    Apply,
    Begun,
    Close,
    EnterTraining,
    Holds,
    Plan,
    Promised,
    RankBlocked,
    RankFailing,
    RankFinished,
    StateDigested,
    Stop,
)
from megatron_recover.core.replica_state import Admission, HoldAsked
from megatron_recover.core.values import Claim, Commitment, Status, Statuses, Value, Vote, Votes
from megatron_recover.host.addresses import Ports, bind_free, family_of, outlast_cuts, parse_address, prepare
from megatron_recover.trace.node_clock import NodeClock

FORMAT_VERSION = 2
MAX_BODY_BYTES = 64 * 2**20
"""Largest body of any frame, in bytes. A status, which carries the contributions of every bucket,
is far smaller at any job size we know of."""
STATUSES_A_FRAME = 1024
"""Statuses in one frame, at most, when a leader forwards several statuses in a tree. A status may
have an entry for every bucket, and the size of a frame is limited. Each frame has the pace of every
member once, and its receiver looks at all statuses so far: with few statuses a frame both costs
grow with the square of the members."""
NOBODY_LISTENS = "Connection refused: nothing listens there"
"""Reason of a `LinkClosed` for a connection that was refused."""
_HEADER = struct.Struct("!2sHIQ")
_MAGIC = b"mr"
FRAME_BYTES = _HEADER.size + MAC_BYTES
"""Bytes of a frame beside its body."""
_CHUNK_BYTES = 2**18
_READ_BYTES = 2**20
"""Bytes that a single call reads from a link at most, before the loop serves the other links."""
MAX_QUEUED_BYTES = 2 * MAX_BODY_BYTES
"""Bytes queued at most for a peer that does not read. A message beyond that closes the link."""
_LARGEST_BODIES = {
    (Role.LEADER, Role.COORDINATOR): 4 * 2**20, (Role.AGENT, Role.COORDINATOR): 4 * 2**20,
    (Role.RANK, Role.LEADER): 16 * 2**20, (Role.RANK, Role.STORE): 24 * 2**20,
}  # fmt: skip


def largest_body(sender: Role, receiver: Role) -> int:
    """Return the largest body in bytes that a message from one role to another may have."""
    return _LARGEST_BODIES.get((sender, receiver), MAX_BODY_BYTES)


class LinkClosed(Exception):
    """The other end is gone, or its bytes are not valid frames.

    The link cannot be used any more, unless it can `redial` (`Link.retry_s`).
    """


class CannotDial(LinkClosed):
    """This end could not begin a connection, and nobody refused one; try again later.

    For example this end lacks a descriptor, memory, a local port or a route.
    """


class QueueFull(LinkClosed):
    """The other end does not read, and the queue had no room for a message.

    The link is over, even if this end could dial again.
    """


class PackedAnnouncement(Value, frozen=True):
    """The form in which an `Announcement` is sent."""

    new: NewGeneration
    peers: PackedPeers
    noticed_s: float


def encode(message: Message) -> bytes:
    """Return the body of a message's frames, which is the same for every receiver.

    Raises ValueError for a message larger than `MAX_BODY_BYTES`.
    """
    body = msgspec.msgpack.encode(_packed(message))
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes exceeds the wire's {MAX_BODY_BYTES}")
    return body


Message = (
    RankHello | LeaderHello | PeerHello | Sources | ReadFrom | Announcement | Enter | Heard | Beat | LeaderBeat
    | FromAgent | ToAgent
    | Plan | Close | Apply | Stop | EnterTraining
    | Begun | Promised | Holds | RankBlocked | RankFailing | RankFinished | StateDigested
    | Vote | Votes | Status | Statuses | Claim | JoinRefused | Admission | HoldAsked
    | Entered | ReplicaBlocked | ReplicaSaving | ReplicaFailing | ReplicaFinished
    | Diverged | Miscounted | AddRequests | ReplicaLeaving | Grant | Named | NewcomerReady | TurnedAway | NewcomersProven
    | StoreRequest | StoreAnswer | StoreRefusal
)  # fmt: skip
_Framed = Message | PackedStatus | PackedStatuses | PackedAnnouncement


def _packed(message: Message) -> _Framed:
    """Return the form in which a message is sent (`control_plane/encoding.py`)."""
    match message:
        case Status():
            return packed_status(message)
        case Statuses():
            return packed_statuses(message)
        case Announcement(new, peers, noticed_s):
            return PackedAnnouncement(new, packed_peers(peers), noticed_s)
    return message


def _unpacked(framed: _Framed, known: list[Commitment]) -> Message:
    """Return the message that was sent in this form. Raises ValueError if the form is malformed."""
    match framed:
        case PackedStatus():
            return unpacked_status(framed)
        case PackedStatuses():
            return unpacked_statuses(framed, known)
        case PackedAnnouncement(new, peers, noticed_s):
            return Announcement(new, unpacked_peers(peers), noticed_s)
    return framed


class Link:
    """One connected, non-blocking stream of messages, used by one thread."""

    def __init__(
        self,
        connection: socket.socket | None,
        keys: SessionKeys | None,
        clock: NodeClock,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """Make a link over a connection with its session keys, or without both.

        Each frame is stamped by `clock` when its first byte is written, and moves the receiver's.
        A frame whose body is longer than `max_body_bytes` closes the link before all of it is read.
        A link made without a connection (None) has to be connected by `redial`, and to get its keys
        (`_take_keys`), before a frame is sent or received.
        """
        if connection is not None:
            self._take_socket(connection)
        if keys is not None:
            self._take_keys(keys)
        self._clock, self._max_body_bytes = clock, max_body_bytes
        self._incoming = bytearray()
        self._outgoing: deque[bytes] = deque()
        """Bodies of which no byte was written. A frame is made when its first byte is written,
        since a link that dials has no key before."""
        self._begun = memoryview(b"")
        """Rest of the frame of which a part was written."""
        self._queued = 0
        """Bytes of all frames in `_outgoing` and of `_begun`."""
        self.was_closed = False
        """True once the other end was seen to have closed the connection. If a link ends otherwise,
        it may have been reset on the way, while both ends live."""
        self._has_gap = False
        """True once a message found no room in the queue. No later message may be sent, since the
        receiver would miss the lost one."""
        self._known: list[Commitment] = []
        """Committed records of the newest `Statuses` message. Statuses that arrive in several
        frames share these objects in memory."""
        self._decode = msgspec.msgpack.Decoder(_Framed).decode

    def _take_socket(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            prepare(connection)
        self._socket = connection

    def _take_keys(self, keys: SessionKeys) -> None:
        self._sending, self._receiving = FrameMacs(keys.sending), FrameMacs(keys.receiving)
        outlast_cuts(self._socket)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def connection(self) -> socket.socket:
        """Return the socket, which `redial` replaces."""
        return self._socket

    @property
    def wants_write(self) -> bool:
        """Return whether bytes are queued that the socket has not accepted yet."""
        return bool(self._begun or self._outgoing)

    def send(self, message: Message) -> None:
        """Queue a message and write as many queued bytes as the socket accepts now.

        Raises `LinkClosed`, and ValueError for a message that is too large (`encode`).
        """
        self.put(encode(message))

    def put(self, body: bytes) -> None:
        """Queue an encoded message, like `send`.

        Raises `LinkClosed`, and `QueueFull` if the queue has no room for it.
        """
        queued = self._queued + FRAME_BYTES + len(body)
        if self._has_gap or queued > MAX_QUEUED_BYTES:
            self._has_gap = True
            raise QueueFull(f"the other end does not read: {queued} bytes wait for it")
        self._queued = queued
        self._outgoing.append(body)
        self.flush()

    def flush(self) -> None:
        """Write as many queued bytes as the socket accepts now. Raises `LinkClosed`."""
        try:
            while self.wants_write:
                if not self._begun:
                    self._begun = memoryview(self._framed(self._outgoing.popleft()))
                taken = self._socket.send(self._begun)
                self._queued -= taken
                self._begun = self._begun[taken:]
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EPIPE:  # the end of the stream may have come before
                with contextlib.suppress(OSError):
                    self.was_closed = self._socket.recv(1, socket.MSG_PEEK) == b""
            raise LinkClosed(str(error)) from error

    def _framed(self, body: bytes) -> bytes:
        """Return the next frame of this connection."""
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, len(body), self._clock.tick())
        return header + self._sending.mac(header, body) + body

    def receive(self) -> Iterator[Message]:
        """Read a bounded part of what has arrived, and yield every complete message.

        Raises `LinkClosed` after the last message if the stream ended there or is malformed.
        """
        closed = self._read()
        yield from self._complete()
        if closed is not None:
            raise closed

    def _read(self) -> LinkClosed | None:
        """Read a bounded part of what has arrived.

        Return how the stream ended, or None if it did not.
        """
        try:
            for _ in range(_READ_BYTES // _CHUNK_BYTES):
                chunk = self._socket.recv(_CHUNK_BYTES)
                if not chunk:
                    self.was_closed = True
                    return LinkClosed("closed by the other end")
                self._incoming += chunk
        except BlockingIOError:  # that was all for now
            return None
        except OSError as error:
            return LinkClosed(str(error))
        return None  # more may be there: the loop calls again

    def retry_s(self) -> float | None:
        """Return None: a link that is closed stays closed."""
        return None

    def redial(self) -> None:
        """Raise `LinkClosed`: only a link that dialled can dial again."""
        raise LinkClosed("this end did not dial")

    def close(self) -> None:
        """Close the socket.

        Queued messages are kept by a link that can `redial`, and lost otherwise.
        """
        self._socket.close()

    def _complete(self) -> Iterator[Message]:
        while len(self._incoming) >= FRAME_BYTES:
            magic, version, num_bytes, stamp = _HEADER.unpack_from(self._incoming)
            if magic != _MAGIC or version != FORMAT_VERSION or num_bytes > self._max_body_bytes:
                raise LinkClosed(f"not a frame of format {FORMAT_VERSION}: {magic!r}, format {version}, {num_bytes} bytes")
            end = FRAME_BYTES + num_bytes
            if len(self._incoming) < end:
                return
            framed = bytes(memoryview(self._incoming)[:end])
            del self._incoming[:end]
            yield self._opened(memoryview(framed), stamp)

    def _opened(self, framed: memoryview, stamp: int) -> Message:
        """Return the message of the next frame, and have the clock see the frame's stamp.

        Raises `LinkClosed` (Note [Frames]).
        """
        header, mac, body = framed[: _HEADER.size], framed[_HEADER.size : FRAME_BYTES], framed[FRAME_BYTES:]
        if not hmac.compare_digest(self._receiving.mac(header, body), mac):
            raise LinkClosed(
                "a frame with an invalid MAC: it was forged, changed, repeated or moved, or belongs to another connection"
            )
        self._clock.see(stamp)
        try:
            return _unpacked(self._decode(body), self._known)
        except (ValueError, RecursionError) as error:  # msgspec raises ValueError; nested arrays RecursionError
            raise LinkClosed(f"not a message: {error}") from error


def dial(address: str) -> socket.socket:
    """Return a non-blocking socket that is connecting to `host:port`.

    Raises `LinkClosed` if the connection is refused at once, and `CannotDial` if it fails at once
    for any other reason.
    """
    host, port = parse_address(address)
    try:
        connection = socket.socket(family_of(host), socket.SOCK_STREAM)
    except OSError as error:
        raise CannotDial(f"cannot connect ({error.strerror}); raise `ulimit -n`") from error
    connection.setblocking(False)
    code = connection.connect_ex((host, port))
    if code not in (0, errno.EINPROGRESS):
        connection.close()
        if code == errno.ECONNREFUSED:
            raise LinkClosed(NOBODY_LISTENS)
        raise CannotDial(f"cannot connect to {address} ({os.strerror(code)})")
    return connection


def listen(address: str, ports: Ports | None = None) -> socket.socket:
    """Return a non-blocking socket that listens at `host:port`.

    Port 0 stands for a free port of `ports`, or one that the kernel chooses (`bind_free`;
    `addresses.address_of` returns it). Raises OSError if the port is taken.
    """
    host, port = parse_address(address)
    if not port:
        listener = bind_free(host, ports)
    else:
        listener = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            # The option allows a port that was in use a moment ago.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(socket.SOMAXCONN)
        except OSError:
            listener.close()
            raise
    listener.setblocking(False)
    return listener
