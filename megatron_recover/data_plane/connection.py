"""A non-blocking stream between two members of one generation: how it is made, and how bytes go in and out.

Both ends prove who they are first (`handshake.py`). The acceptor's verdict is welcome only if both are in the same generation.
Nothing here waits. Who is refused is decided in `arrivals.py` and `direct.py`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import select
import socket
from collections import deque

from megatron_recover.authentication.handshake import NONCE_BYTES, Connector, Party, Refused, Role, Verdict
from megatron_recover.data_plane.transport import PeerAhead, PeerLost

WOULD_BLOCK = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS)
MAX_VIEWS = 64
"""Buffers handed to one system call; far below IOV_MAX."""
REDIAL_S = 0.02
"""Before a peer is dialled again whose connection ended before it had proven itself."""


class Connection:
    """A stream to one peer; `ready` once both sides greeted."""

    def __init__(self, peer: int, sock: socket.socket, connector: Connector | None = None) -> None:
        """`connector` is the handshake of an end that dialled; one that accepted is welcome already and has none."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.sock = sock
        self.ready = connector is None
        self.interest = 0
        self._connector = connector
        self._to_say = connector.opening if connector is not None else b""

    def handshake(self) -> bool:
        """Go on with a dialling end's handshake; return whether it is complete.

        Raises PeerLost if the acceptor refused, OSError if nobody listens there, and `EndedUnproven` if the connection ended
        before the acceptor had proven itself.
        """
        connector = self._connector
        assert connector is not None
        try:
            if code := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            while True:
                if self._to_say:
                    self._to_say = self._to_say[self.sock.send(self._to_say) :]
                if not (connector.wanted and not self._to_say):
                    break
                chunk = self.sock.recv(connector.wanted)
                if not chunk:
                    raise EndedUnproven(self.peer, "refused the connection or ended")
                self._to_say = connector.feed(chunk)
        except OSError as error:
            if error.errno in (*WOULD_BLOCK, errno.ENOTCONN):
                return False
            if error.errno == errno.ECONNREFUSED:
                raise
            raise EndedUnproven(self.peer, error.strerror or str(error)) from error
        except Refused as refused:
            raise EndedUnproven(self.peer, str(refused)) from refused
        match connector.verdict:
            case Verdict.WELCOME:
                self.ready = True
            case Verdict.OLDER:
                raise PeerAhead(self.peer, connector.generation)
            case Verdict.NO_ROOM:
                raise PeerLost(self.peer, "has no room for another connection of this generation")
        return self.ready

    @property
    def is_established(self) -> bool:
        """Whether the other end's kernel has accepted the connection: that machine can be reached, and its listener lives."""
        return self.ready or not self._to_say

    def poll_mask(self, *, sending: bool, receiving: bool) -> int:
        """What to poll for, kept in `interest`. Resets are reported even when it is 0."""
        if not self.ready:
            self.interest = select.POLLOUT if self._to_say else select.POLLIN
        else:
            self.interest = (select.POLLOUT if sending else 0) | (select.POLLIN if receiving else 0)
        return self.interest

    def send(self, views: deque[memoryview]) -> bool:
        """Hand as much of `views` (not empty) to the kernel as it takes and drop that; whether it took anything."""
        try:
            sent = self.sock.sendmsg(itertools.islice(views, MAX_VIEWS))
        except BlockingIOError:
            return False
        while views and sent >= len(views[0]):
            sent -= len(views.popleft())
        if sent:
            views[0] = views[0][sent:]
        return True

    def receive(self, views: list[memoryview]) -> bool:
        """Fill `views` (not empty) with what is there and drop what is full; whether anything was there.

        Raises PeerLost at the end of the stream.
        """
        try:
            received = self.sock.recvmsg_into(views)[0]
        except BlockingIOError:
            return False
        if received == 0:
            raise PeerLost(self.peer, "connection closed")
        while views and received >= len(views[0]):
            received -= len(views.pop(0))
        if received:
            views[0] = views[0][received:]
        return True

    def shut_down(self) -> None:
        """End both directions, from any thread; descriptors stay open."""
        with contextlib.suppress(OSError):  # not connected yet, or the peer was faster: either way it is down
            self.sock.shutdown(socket.SHUT_RDWR)


class EndedUnproven(Exception):
    """A connection ended before the acceptor had proven itself: dial again, the acceptor may have been crowded by strangers."""

    def __init__(self, peer: int, detail: str) -> None:
        super().__init__(detail)
        self.peer = peer


class CannotDial(Exception):
    """This rank has not got what it takes to connect: nothing is known of the peer. Dial again later."""


def connect(address: str, key: bytes, role: Role, *, generation: int, me: int, peer: int, rank: int) -> Connection:
    """Begin to connect to `host:port` as a rank that sends data, watches, or probes; `Connection.handshake` completes it.

    Raises as `dial` does.
    """
    port = int(address.rpartition(":")[2])
    parties = Party(role, me, rank), Party(Role.ECHO if role is Role.ECHO else Role.DATA, peer, rank)
    connector = Connector(key, *parties, port=port, nonce=secrets.token_bytes(NONCE_BYTES), generation=generation)
    return Connection(peer, dial(address, peer), connector)


def dial(address: str, peer: int) -> socket.socket:
    """Return a non-blocking socket on its way to `host:port`.

    Raises PeerLost if nobody listens there, and `CannotDial` if this rank has no descriptor, memory or local port left.
    """
    host, _, port = address.rpartition(":")
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise CannotDial(f"cannot connect to replica {peer} ({error.strerror}); raise `ulimit -n`") from error
    sock.setblocking(False)
    code = sock.connect_ex((host, int(port)))
    if code not in (0, *WOULD_BLOCK):
        sock.close()
        if code == errno.ECONNREFUSED:
            raise PeerLost(peer, os.strerror(code))
        raise CannotDial(f"cannot connect to replica {peer} ({os.strerror(code)})")
    return sock
