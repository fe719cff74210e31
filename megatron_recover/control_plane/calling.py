"""The dialling end of the control plane: a link that redials until it has proven itself.

An acceptor crowded by strangers may close a connection before its peer has proven itself. No
message is lost by that, since messages are kept until the acceptor has welcomed this end. So a
caller sees one link, which either works or is closed.
"""

from __future__ import annotations

import errno
import secrets
import sys
import time
from collections.abc import Iterator

from megatron_recover.authentication.handshake import NONCE_BYTES, Connector, Party, Refused, Reply
from megatron_recover.control_plane.wire import NOBODY_LISTENS, CannotDial, Link, LinkClosed, Message, dial, largest_body
from megatron_recover.host.addresses import parse_address
from megatron_recover.trace.node_clock import NodeClock

_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_NOT_YET = (errno.EAGAIN, errno.ENOTCONN)


class OutgoingLink(Link):
    """A link to one party at one address.

    Messages are queued until that party has proven itself and welcomed this end.
    """

    def __init__(self, address: str, key: bytes, me: Party, peer: Party, *, clock: NodeClock, patience_s: float) -> None:
        """Begin to dial `address` (host:port).

        Raises `LinkClosed` if the connection is refused at once, since nobody listens there.

        `patience_s` limits for how many seconds the link dials again. It does so if a connection
        ends before the peer was proven, unless the other end refused it, or if this end cannot dial
        (`CannotDial`). If this end cannot dial now, a line on stderr reports that, the link has no
        connection at first (`fileno()` is -1), and the loop dials again.
        """
        self._address, self._key, self._me, self._peer = address, key, me, peer
        self._give_up_at = time.monotonic() + patience_s
        self._pause_s = _PAUSE_S
        self.proven = False
        """True once the peer has proven itself and welcomed this end."""
        self._refused = False
        self.refusal = ""
        """Reason why the other end is not the wanted party, if a handshake has shown that. The link
        dials again all the same."""
        self._is_dialled = False
        """True once there has been a connection."""
        self._broken = ""
        """Reason why the handshake on this connection has failed. Another call would find another
        one: of the socket, or in what a stranger has sent behind."""
        super().__init__(None, None, clock, largest_body(peer.role, me.role))
        try:
            self.redial()
        except CannotDial as error:
            print(f"megatron-recover: {error}; this is tried again", file=sys.stderr, flush=True)

    @property
    def is_refused(self) -> bool:
        """Return whether nobody listens at the address, or the other end has refused this one."""
        return self._refused

    def fileno(self) -> int:
        """Return the descriptor, or -1 while there is no connection."""
        return super().fileno() if self._is_dialled else -1

    @property
    def wants_write(self) -> bool:
        """Return whether bytes are queued that the socket can accept when it is writable."""
        return super().wants_write if self.proven else bool(self._to_say)

    def flush(self) -> None:
        """Write as many bytes of the handshake, and after it of the queue, as the socket accepts.

        Raises `LinkClosed`.
        """
        if self.proven:
            super().flush()
        elif self.fileno() >= 0:
            self._advance()

    def receive(self) -> Iterator[Message]:
        """Read a bounded part of what has arrived, and yield its complete messages.

        Raises `LinkClosed`. Until the peer has welcomed this end, continue the handshake
        instead, and yield nothing.
        """
        if self.proven:
            yield from super().receive()
        else:
            self._advance()

    def retry_s(self) -> float | None:
        """Return the seconds to wait before `redial`, or None if the link is closed for good.

        Each call doubles the next pause, up to `_LONGEST_PAUSE_S`.
        """
        if self.proven or self._refused or time.monotonic() + self._pause_s > self._give_up_at:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def redial(self) -> None:
        """Begin anew with another connection.

        Raises `LinkClosed` if the connection is refused at once, and `CannotDial` if another try
        may succeed (`retry_s`).
        """
        self._take_socket(dial(self._address))
        self._is_dialled, self._broken = True, ""
        _, port = parse_address(self._address)
        self._connector = Connector(self._key, self._me, self._peer, port=port, nonce=secrets.token_bytes(NONCE_BYTES))
        self._to_say = self._connector.opening

    def close(self) -> None:
        """Close the socket, if there is one. Queued messages are kept for `redial`."""
        if self._is_dialled:
            super().close()

    def _advance(self) -> None:
        """Continue the handshake as far as possible without waiting. Raises `LinkClosed`.

        Once this end is welcomed, also write queued messages.
        """
        if self._broken:
            raise LinkClosed(self._broken)
        try:
            self._say()
            while (wanted := self._connector.wanted) and not self._to_say:
                chunk = self._socket.recv(wanted)
                if not chunk:
                    raise LinkClosed("the other end hung up before it had proven itself")
                self._to_say = self._connector.feed(chunk)
                self._say()
        except BlockingIOError:
            return
        except OSError as error:
            self._refused = error.errno == errno.ECONNREFUSED
            self._broken = NOBODY_LISTENS if self._refused else str(error)
            raise LinkClosed(self._broken) from error
        except Refused as refused:
            self.refusal = self._broken = str(refused)
            raise LinkClosed(self.refusal) from refused
        verdict = self._connector.verdict
        if verdict is None:
            return
        if verdict is not Reply.WELCOME:
            self._refused = True
            raise LinkClosed(f"refused by the other end ({verdict.name})")
        self.proven = True
        self._take_keys(self._connector.session_keys)
        super().flush()

    def _say(self) -> None:
        if not self._to_say:
            return
        try:
            sent = self._socket.send(self._to_say)
        except OSError as error:
            if error.errno in _NOT_YET:
                return
            raise
        self._to_say = self._to_say[sent:]
