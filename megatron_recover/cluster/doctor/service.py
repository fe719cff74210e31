"""The listeners by which a node answers the probes of other nodes, in a thread of its own.

Strangers meet what they meet at every listener of a job (`authentication/admission.py`). A UDP
packet is answered only if it begins with the token of a proven connection that is still open, and
with as many bytes as it has. So nobody can have this node send anything to others.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from megatron_recover.authentication.admission import PAUSE_S, Admission
from megatron_recover.authentication.handshake import Party, Reply, Role
from megatron_recover.cluster.doctor import conversation
from megatron_recover.cluster.doctor.conversation import DATAGRAMS, MAX_ECHO_BYTES, REQUEST, TIMES, TOKEN_BYTES, Kind
from megatron_recover.host.addresses import family_of

_CHUNK_BYTES = 2**16
_WAITING_BYTES = 2**18
"""Bytes for a peer that does not read, above which nothing more is read from it."""
_MAX_PACKETS = 64
"""UDP packets that are read in a turn: a stranger may send without end."""
_END_S = 2.0
_MAX_CONVERSATIONS = 1024
"""Proven connections at a time; further ones are told that there is no room."""


class _Conversation:
    """A proven connection from another node."""

    def __init__(self, sock: socket.socket, now_ns: Callable[[], int]) -> None:
        self.sock, self.token = sock, b""
        self._now_ns = now_ns
        self._read, self._to_send, self._echo = b"", bytearray(), 0

    @property
    def events(self) -> int:
        """Return the events of poll(2) to wait for."""
        return (select.POLLOUT if self._to_send else 0) | (select.POLLIN if len(self._to_send) < _WAITING_BYTES else 0)

    def advance(self, udp_port: int) -> None:
        """Read, answer and send what can be without waiting. Raises OSError at its end."""
        with contextlib.suppress(BlockingIOError):
            if len(self._to_send) < _WAITING_BYTES:
                chunk = self.sock.recv(_CHUNK_BYTES)
                if not chunk:
                    raise ConnectionResetError
                self._take(chunk, udp_port)
        with contextlib.suppress(BlockingIOError):
            while self._to_send:
                del self._to_send[: self.sock.send(self._to_send)]

    def _take(self, chunk: bytes, udp_port: int) -> None:
        """Process what has come. Raises ConnectionAbortedError for what is no request."""
        arrived, self._read = self._read + chunk, b""
        while arrived:
            if self._echo:
                echoed, arrived = arrived[: self._echo], arrived[self._echo :]
                self._echo -= len(echoed)
                self._to_send += echoed
                continue
            if len(arrived) < REQUEST.size:
                self._read = arrived
                return
            kind, num_bytes = REQUEST.unpack_from(arrived)
            arrived = arrived[REQUEST.size :]
            if kind == Kind.TIME:
                self._to_send += TIMES.pack(self._now_ns(), self._now_ns())
            elif kind == Kind.ECHO and num_bytes <= MAX_ECHO_BYTES:
                self._echo = num_bytes
            elif kind == Kind.DATAGRAMS:
                self.token = self.token or secrets.token_bytes(TOKEN_BYTES)
                self._to_send += DATAGRAMS.pack(udp_port, self.token)
            else:
                raise ConnectionAbortedError(f"request {kind} of {num_bytes} bytes is unknown")


class Service:
    """The listeners of one node, until `close`."""

    def __init__(
        self, host: str, key: bytes, node: int, ports: Sequence[int] = (0,), *, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Listen at the numeric address `host` on all of `ports`; 0 is a port that is free.

        `node` is the number of this node. `now_ns` is its clock. Ports that other programs have are
        left out (`taken`). Raises OSError if none is left, or `host` is no address of this machine.
        """
        self._node, self._now_ns = node, now_ns
        listeners: list[socket.socket] = []
        taken: list[int] = []
        for port in ports:
            listener = socket.socket(family_of(host), socket.SOCK_STREAM)
            if port:  # which may have been in use a moment ago
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
                listener.listen(socket.SOMAXCONN)
                listeners.append(listener)
            except OSError as error:
                listener.close()
                if not port or error.errno != errno.EADDRINUSE:
                    for each in listeners:
                        each.close()
                    raise
                taken.append(port)
        if not listeners:
            raise OSError(errno.EADDRINUSE, f"other programs use all of the ports {taken[0]} to {taken[-1]}")
        self.ports = tuple(each.getsockname()[1] for each in listeners)
        """Ports on which this node listens."""
        self.taken = tuple(taken)
        """Ports that other programs have."""
        self._datagrams = self._bind_datagrams(host)
        self._admissions = [Admission(each, key, "doctor", lambda name, number: None) for each in listeners]
        self._conversations: dict[int, _Conversation] = {}
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="doctor", daemon=True)
        self._thread.start()

    def _bind_datagrams(self, host: str) -> socket.socket:
        """Return a UDP socket at the first port that is free for it among `ports`, else at any."""
        sock = socket.socket(family_of(host), socket.SOCK_DGRAM)
        for port in (*self.ports, 0):
            with contextlib.suppress(OSError):
                sock.bind((host, port))
                break
        conversation.forbid_fragments(sock)
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        """Stop answering; return when the thread has ended, or is late: it ends by itself then."""
        self._wake.close()
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for admission in self._admissions:
                admission.close()
            for each in self._conversations.values():
                each.sock.close()
            self._datagrams.close()
            self._woken.close()

    def _turn(self) -> bool:
        """Wait for something, and answer it; return False once the service is to end."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(self._datagrams, select.POLLIN)
        for each in self._conversations.values():
            poll.register(each.sock, each.events)
        is_stuck = any(each.is_stuck for each in self._admissions)
        for admission in () if is_stuck else self._admissions:
            poll.register(admission, select.POLLIN)
        waits = [wait for each in self._admissions if (wait := each.due_s()) is not None]
        ready = {number for number, _ in poll.poll(1000 * (PAUSE_S if is_stuck else min(waits, default=60.0)))}
        if self._woken.fileno() in ready:
            return False
        for each in [each for number, each in self._conversations.items() if number in ready]:
            self._advance(each)
        if self._datagrams.fileno() in ready:
            self._echo_datagrams()
        for admission in self._admissions:
            self._admit(admission)
        return True

    def _admit(self, admission: Admission) -> None:
        for proven in admission.turn(self._admits, expects=True):
            has_room = len(self._conversations) < _MAX_CONVERSATIONS
            try:
                proven.decide(Reply.WELCOME if has_room else Reply.NO_ROOM)
            except OSError:  # the prober is gone
                has_room = False
            if not has_room:
                proven.sock.close()
                continue
            proven.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._conversations[proven.sock.fileno()] = _Conversation(proven.sock, self._now_ns)

    def _admits(self, peer: Party, wanted: Party) -> bool:
        return peer.role is Role.DOCTOR and wanted == conversation.party(self._node)

    def _advance(self, each: _Conversation) -> None:
        try:
            each.advance(self._datagrams.getsockname()[1])
        except OSError:
            del self._conversations[each.sock.fileno()]
            each.sock.close()

    def _echo_datagrams(self) -> None:
        tokens = {each.token for each in self._conversations.values() if each.token}
        with contextlib.suppress(OSError):  # nothing more has come, or the interface sends no packets so large
            for _ in range(_MAX_PACKETS):
                packet, sender = self._datagrams.recvfrom(_CHUNK_BYTES)
                if packet[:TOKEN_BYTES] in tokens:
                    self._datagrams.sendto(packet, sender)
