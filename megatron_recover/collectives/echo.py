"""A pairwise probe: which peers answer a few bytes, each on a connection of its own, within a bounded time.

A collective over a ring stalls on all members alike and cannot say which peer is out of reach. So each rank whose framework
works that way keeps an `EchoServer`, which answers whatever the rank is doing, and a rank whose collective has failed asks all
peers at once (`unreachable`). A peer that answers is within reach, however late its collective is. The probe says nothing about
the peer's training thread. An answer is a keyed hash of the question by the job's key, so that no stranger can answer for a
peer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Mapping

from megatron_recover.collectives.connection import WOULD_BLOCK, dial
from megatron_recover.collectives.transport import PeerLost
from megatron_recover.deadlines import INTRODUCTION_S

NONCE_BYTES = ANSWER_BYTES = 16
_LOOK_S = 1.0
"""Between two looks at connections that have not sent their nonce."""
_PAUSE_S = 0.05
"""How long a listener rests that cannot accept for want of descriptors."""
_MAX_CONNECTIONS = 128
"""At a time; with one more the oldest is closed, since a peer sends its nonce at once."""


class EchoServer:
    """Answers probes in a daemon thread until it is closed. In forked children the sockets are closed at once."""

    def __init__(self, host: str, key: bytes) -> None:
        """Listen on a free port of `host`. `key` is the job's."""
        self._key = key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """As `connection.dial` takes it."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connections: dict[socket.socket, tuple[bytearray, float]] = {}
        """What has come of each nonce, and when the connection is closed at the latest (monotonic seconds)."""
        self._thread = threading.Thread(target=self._serve, name="recover-echo", daemon=True)
        server = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (alive := server()) and alive._close_sockets())
        self._thread.start()

    def close(self) -> None:
        """Stop answering; returns when the thread has ended."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._close_sockets()

    def _turn(self) -> bool:
        """Wait for something to happen and answer it. False once the server is to be closed."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for sock in self._connections:
            poll.register(sock, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * _LOOK_S if self._connections else None)}
        if self._wake in ready:
            return False
        if self._listener.fileno() in ready:
            try:
                sock = self._listener.accept()[0]
            except OSError:  # it is gone already, or there is no descriptor left: the prober sees no answer
                time.sleep(_PAUSE_S)
            else:
                sock.setblocking(False)
                if len(self._connections) >= _MAX_CONNECTIONS:
                    oldest = next(iter(self._connections))
                    del self._connections[oldest]
                    oldest.close()
                self._connections[sock] = bytearray(), time.monotonic() + INTRODUCTION_S
        for sock, (nonce, until) in list(self._connections.items()):
            is_over = sock.fileno() in ready and _read_towards(sock, nonce, NONCE_BYTES)
            if is_over and len(nonce) == NONCE_BYTES:
                with contextlib.suppress(OSError):  # the prober is gone
                    sock.send(_answer(self._key, bytes(nonce)))
            if is_over or time.monotonic() > until:
                del self._connections[sock]
                sock.close()
        return True

    def _close_sockets(self) -> None:
        for sock in (self._listener, *self._connections):
            sock.close()
        self._connections.clear()
        with contextlib.suppress(OSError):  # closed before, here or in the parent of a fork
            os.close(self._wake)


def _answer(key: bytes, nonce: bytes) -> bytes:
    """Return what proves that the answering process has the job's key."""
    return hashlib.blake2b(nonce, key=key, digest_size=ANSWER_BYTES, person=b"recover-echo").digest()


def unreachable(addresses: Mapping[int, str], key: bytes, timeout_s: float) -> tuple[int, ...]:
    """Return the peers of `addresses` (replica -> address of its `EchoServer`) that do not answer within so many seconds."""
    probes: dict[int, _Probe] = {}
    for peer, address in addresses.items():
        with contextlib.suppress(PeerLost):  # nobody listens there: it does not answer
            probes[peer] = _Probe(dial(address, peer), key)
    answered: set[int] = set()
    until = time.monotonic() + timeout_s
    try:
        while probes and (left_s := until - time.monotonic()) > 0:
            poll = select.poll()
            for probe in probes.values():
                poll.register(probe.sock, select.POLLIN if probe.is_sent else select.POLLOUT)
            ready = {descriptor for descriptor, _ in poll.poll(left_s * 1000)}
            for peer in [peer for peer, probe in probes.items() if probe.sock.fileno() in ready]:
                outcome = probes[peer].advance()
                if outcome is not None:
                    probes.pop(peer).sock.close()
                    answered.update([peer] if outcome else [])
    finally:
        for probe in probes.values():
            probe.sock.close()
    return tuple(sorted(set(addresses) - answered))


class _Probe:
    """One connection on which a nonce is on its way to a peer and back."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self.sock = sock
        self.is_sent = False
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._expected = _answer(key, self._nonce)
        self._answer = bytearray()

    def advance(self) -> bool | None:
        """Send or receive what is possible without waiting. True: answered; False: it will not be; None: not yet."""
        if not self.is_sent:
            try:
                self.sock.send(self._nonce)  # an empty send buffer takes it whole
            except OSError as error:
                return None if error.errno in WOULD_BLOCK else False
            self.is_sent = True
            return None
        if not _read_towards(self.sock, self._answer, ANSWER_BYTES):
            return None
        return secrets.compare_digest(bytes(self._answer), self._expected)


def _read_towards(sock: socket.socket, received: bytearray, size: int) -> bool:
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
