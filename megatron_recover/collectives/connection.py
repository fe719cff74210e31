"""A non-blocking stream between two members of one generation: how it is made, and how bytes go in and out.

The connector's first message names the acceptor's token, the generation and both replicas; the acceptor answers with its own
generation, which equals the connector's if it is welcome. Nothing here waits. Who is refused is decided in `direct.py`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import struct
from collections import deque

from megatron_recover.collectives.transport import PeerAhead, PeerLost

HELLO = struct.Struct("<8s16sQII")
"""Magic, the acceptor's token, generation, from replica, to replica."""
WELCOME = struct.Struct("<8sQ")
"""Magic, the acceptor's generation."""
MAGIC = b"mgrecov1"
WOULD_BLOCK = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS)
MAX_VIEWS = 64
"""Buffers handed to one system call; far below IOV_MAX."""


class Connection:
    """A stream to one peer; `ready` once both sides greeted."""

    def __init__(self, peer: int, sock: socket.socket, generation: int, hello: bytes = b"") -> None:
        """`hello` is what a connector has to say first; an acceptor has none."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.sock = sock
        self.ready = not hello
        self.interest = 0
        self._generation = generation
        self._hello = hello
        self._welcome = bytearray()

    def handshake(self) -> bool:
        """The connector's side: send hello once connected, then read the welcome. Whether it is complete.

        Raises PeerLost if the acceptor refused, OSError if it is not there.
        """
        if self._hello:
            if code := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            try:
                self.sock.send(self._hello)  # an empty send buffer takes it whole
            except OSError as error:
                if error.errno in (*WOULD_BLOCK, errno.ENOTCONN):
                    return False
                raise
            self._hello = b""
        if not read_towards(self.sock, self._welcome, WELCOME.size):
            return False
        if len(self._welcome) < WELCOME.size:
            raise PeerLost(self.peer, "refused the connection or ended")
        _, generation = WELCOME.unpack(self._welcome)
        if generation != self._generation:
            raise PeerAhead(self.peer, generation)
        self.ready = True
        return True

    def poll_mask(self, *, sending: bool, receiving: bool) -> int:
        """What to poll for, kept in `interest`. Resets are reported even when it is 0."""
        if not self.ready:
            self.interest = select.POLLOUT if self._hello else select.POLLIN
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


def connect(address: str, generation: int, me: int, peer: int) -> Connection:
    """Begin to connect to ``host:port/token``; `Connection.handshake` completes it."""
    token = bytes.fromhex(address.rpartition("/")[2])
    return Connection(peer, dial(address, peer), generation, HELLO.pack(MAGIC, token, generation, me, peer))


def dial(address: str, peer: int) -> socket.socket:
    """A non-blocking socket on its way to ``host:port/token``. Raises PeerLost if nobody listens there."""
    host, _, port = address.rpartition("/")[0].rpartition(":")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex((host, int(port)))
    if code not in (0, *WOULD_BLOCK):
        sock.close()
        raise PeerLost(peer, os.strerror(code))
    return sock


def read_towards(sock: socket.socket, received: bytearray, size: int) -> bool:
    """Read towards `size` bytes without waiting. True when they are there or the stream ended (then fewer are)."""
    while len(received) < size:
        try:
            chunk = sock.recv(size - len(received))
        except BlockingIOError:
            return False
        except OSError:
            return True
        if not chunk:
            return True
        received += chunk
    return True
