"""A non-blocking stream between two members of one generation: connecting, sending, receiving.

Both ends prove their identity first (`handshake.py`). Then the acceptor sends its verdict. For a
connection that carries data the verdict is WELCOME only if both ends are in the same generation. A
watch or a probe is welcome in any. Nothing here waits. `arrivals.py`, `direct.py` and `echo.py`
decide which peers to refuse.
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

from megatron_recover.authentication.handshake import NONCE_BYTES, Connector, Party, Refused, Reply, Role
from megatron_recover.data_plane.transport import PeerAhead, PeerLost
from megatron_recover.host.addresses import family_of, outlast_cuts, parse_address, prepare

WOULD_BLOCK = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS)
MAX_VIEWS = 64
"""Buffers in one system call; far below IOV_MAX."""
REDIAL_S = 0.02
"""Seconds before dialling a peer again if its connection ended before the verdict or could not be
begun."""


class Connection:
    """A stream to one peer. It is `ready` once the handshake is complete."""

    def __init__(self, peer: int, sock: socket.socket, connector: Connector | None = None) -> None:
        """Wrap `sock`. `connector` runs the handshake of the end that dialled.

        An accepted connection is already proven and has no connector.
        """
        prepare(sock)
        self.peer = peer
        self.sock = sock
        self.ready = connector is None
        if self.ready:
            outlast_cuts(sock)
        self.interest = 0
        self._connector = connector
        self._to_say = connector.opening if connector is not None else b""

    def handshake(self) -> bool:
        """Advance the handshake of the end that dialled; return whether it is complete.

        Raises:
        - PeerLost (or its subclass PeerAhead) if the acceptor refused,
        - OSError if nobody listens there,
        - `EndedUnproven` if the connection failed otherwise, or ended, before the verdict, or the
          other end is not the wanted party.
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
            case Reply.WELCOME:
                self.ready = True
                outlast_cuts(self.sock)
            case Reply.OLDER:
                raise PeerAhead(self.peer, connector.generation)
            case Reply.NO_ROOM:
                raise PeerLost(self.peer, "has no room for another connection of this generation")
        return self.ready

    @property
    def is_established(self) -> bool:
        """Return whether the peer's kernel has accepted the connection.

        If so, its machine is reachable and its listener is open.
        """
        return self.ready or not self._to_say

    def poll_mask(self, *, sending: bool, receiving: bool) -> int:
        """Return the events to poll for, and store them in `interest`.

        Until the connection is ready, only the handshake decides. A socket that is polled with 0
        still reports a reset.
        """
        if not self.ready:
            self.interest = select.POLLOUT if self._to_say else select.POLLIN
        else:
            self.interest = (select.POLLOUT if sending else 0) | (select.POLLIN if receiving else 0)
        return self.interest

    def send(self, views: deque[memoryview]) -> bool:
        """Send from `views` (not empty) and drop what was sent; return whether anything was.

        Raises OSError if the connection has failed.
        """
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
        """Receive into `views` (not empty) and drop the full ones; return whether anything came.

        Raises PeerLost at the end of the stream, and OSError if the connection has failed.
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
        """Shut down both directions, from any thread. The descriptor stays open."""
        with contextlib.suppress(OSError):  # not connected yet, or the peer has shut it down already
            self.sock.shutdown(socket.SHUT_RDWR)


class EndedUnproven(Exception):
    """A connection failed before the verdict, or the other end is not the wanted party.

    Strangers may have crowded it out, so dial again.
    """

    def __init__(self, peer: int, detail: str) -> None:
        super().__init__(detail)
        self.peer = peer


class CannotDial(Exception):
    """This rank could not begin to connect, mostly for want of a resource; dial again later.

    The failure is no evidence against the peer.
    """


def connect(address: str, key: bytes, role: Role, *, generation: int, me: int, peer: int, rank: int) -> Connection:
    """Begin to connect to `host:port`; `Connection.handshake` completes it.

    `role` is DATA to send and receive, WATCH to notice the end of the peer, or ECHO to probe.
    Raises the errors of `dial`.
    """
    _, port = parse_address(address)
    parties = Party(role, me, rank), Party(Role.ECHO if role is Role.ECHO else Role.DATA, peer, rank)
    connector = Connector(key, *parties, port=port, nonce=secrets.token_bytes(NONCE_BYTES), generation=generation)
    return Connection(peer, dial(address, peer), connector)


def dial(address: str, peer: int) -> socket.socket:
    """Return a non-blocking socket that is connecting to `host:port`.

    Raises PeerLost if the kernel knows at once that nobody listens there. Raises `CannotDial` if
    the connection cannot be begun here, for instance without a free descriptor, memory or local
    port.
    """
    host, port = parse_address(address)
    try:
        sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    except OSError as error:
        raise CannotDial(f"cannot connect to replica {peer} ({error.strerror}); raise `ulimit -n`") from error
    sock.setblocking(False)
    code = sock.connect_ex((host, port))
    if code not in (0, *WOULD_BLOCK):
        sock.close()
        if code == errno.ECONNREFUSED:
            raise PeerLost(peer, os.strerror(code))
        raise CannotDial(f"cannot connect to replica {peer} ({os.strerror(code)})")
    return sock
