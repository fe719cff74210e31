"""The listening end of the data plane: who has arrived and proven itself, by generation; strangers are held short.

There is no accepting thread. Connections wait in the kernel until a transport of the endpoint is inside a call, which lets them
prove themselves without waiting for them. What is kept for strangers is bounded as on the control plane (`admission.py`), and
what they cost a call that waits for nobody's connection as well (Note [Whom a listener expects] there).
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time

from megatron_recover.collectives.admission import (
    ACCEPTED_AT_ONCE,
    MAX_UNPROVEN,
    REST_S,
    UNEXPECTED_AT_ONCE,
    Reserve,
    Unproven,
    is_hopeless,
    out_of_descriptors,
)
from megatron_recover.collectives.handshake import NONCE_BYTES, Acceptor, Party, Refused, Role, Verdict

MAX_PARKED = 1024
"""Proven connections that are kept before their generation is opened."""


class Parked:
    """A proven connection that waits for its generation to be opened."""

    def __init__(self, sock: socket.socket, acceptor: Acceptor) -> None:
        self.sock = sock
        self._acceptor = acceptor

    def decide(self, verdict: Verdict, generation: int) -> None:
        """Tell the connector the verdict."""
        with contextlib.suppress(OSError):  # a peer that is gone already is found by the first read
            self.sock.send(self._acceptor.decide(verdict, generation))

    def refuse(self, verdict: Verdict, generation: int) -> None:
        """Tell the connector the verdict, and close the connection."""
        self.decide(verdict, generation)
        self.sock.close()


def _has_ended(sock: socket.socket) -> bool:
    """Return whether the other end of a watch, which says nothing, has hung up."""
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class Arrivals:
    """Connections to one listener. Used under the lock of its endpoint."""

    def __init__(self, listener: socket.socket, key: bytes, rank: int) -> None:
        listener.setblocking(False)
        self._listener, self._key, self._rank = listener, key, rank
        self._port = listener.getsockname()[1]
        self._unproven: dict[int, Unproven] = {}
        """By descriptor, the oldest first."""
        self._poll = select.epoll()
        self._poll.register(listener, select.EPOLLIN)
        self._rests_until = 0.0
        self._watching: dict[int, socket.socket] = {}
        """By replica. They end with this process, which is what their other ends wait for."""
        self.parked: dict[tuple[int, int], Parked] = {}
        """By generation and replica."""
        self._reserve = Reserve()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `greet` has something to do."""
        return self._poll.fileno()

    def greet(self, me: int, generation: int, *, expects: bool = True) -> None:
        """Go on with everyone's handshake without waiting, as replica `me` in `generation`.

        `expects`: someone who has not connected is needed. Else this does little, and that only every `REST_S`.
        """
        now = time.monotonic()
        if not expects and now < self._rests_until:
            return
        self._rests_until = now + REST_S
        self._accept(me, ACCEPTED_AT_ONCE if expects else UNEXPECTED_AT_ONCE)
        for replica in [each for each, sock in self._watching.items() if _has_ended(sock)]:
            self._watching.pop(replica).close()
        for descriptor, _ in self._poll.poll(0):
            if (unproven := self._unproven.get(descriptor)) is None:  # the listener: the next call accepts more
                continue
            try:
                proven = unproven.advance()
            except (Refused, OSError):
                self._let_go(unproven)
                continue
            if proven:
                self._forget(unproven)
                self._admit(unproven, generation)
        while self._unproven and (oldest := next(iter(self._unproven.values()))).until <= now:
            self._let_go(oldest)

    def close(self) -> None:
        """Close every socket, the listener included."""
        self._poll.close()
        held = (each.sock for each in (*self._unproven.values(), *self.parked.values()))
        for sock in (self._listener, *self._watching.values(), *held):
            sock.close()
        self._unproven.clear()
        self._watching.clear()
        self.parked.clear()
        self._reserve.close()

    def _accept(self, me: int, at_most: int) -> None:
        """Accept whoever has arrived, but no endless stream of strangers."""

        def admits(peer: Party, wanted: Party) -> bool:
            known = peer.role in (Role.DATA, Role.WATCH) and peer.rank == self._rank and peer.replica != me
            return known and wanted == Party(Role.DATA, me, self._rank)

        for _ in range(at_most):
            try:
                sock = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if not out_of_descriptors(error):
                    continue  # that connection died in the queue
                self._reserve.turn_away(self._listener, error)
                if self._unproven:
                    self._let_go(next(iter(self._unproven.values())))
                return
            if is_hopeless(sock):
                sock.close()
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                self._let_go(next(iter(self._unproven.values())))
            acceptor = Acceptor(self._key, admits, port=self._port, nonce=secrets.token_bytes(NONCE_BYTES))
            self._unproven[sock.fileno()] = Unproven(sock, acceptor)
            self._poll.register(sock, select.EPOLLIN)

    def _admit(self, unproven: Unproven, generation: int) -> None:
        """Park a connection of this or a newer generation; refuse an older one, a second one and one for which is no room."""
        acceptor, arrived = unproven.acceptor, Parked(unproven.sock, unproven.acceptor)
        peer = acceptor.peer
        assert peer is not None
        if peer.role is Role.WATCH:
            if peer.replica in self._watching:
                self._watching.pop(peer.replica).close()
            self._watching[peer.replica] = arrived.sock
            arrived.decide(Verdict.WELCOME, generation)
        elif acceptor.generation < generation:
            arrived.refuse(Verdict.OLDER, generation)
        elif len(self.parked) >= MAX_PARKED or (acceptor.generation, peer.replica) in self.parked:
            arrived.refuse(Verdict.NO_ROOM, generation)
        else:
            self.parked[acceptor.generation, peer.replica] = arrived

    def _forget(self, unproven: Unproven) -> None:
        del self._unproven[unproven.sock.fileno()]
        self._poll.unregister(unproven.sock)

    def _let_go(self, unproven: Unproven) -> None:
        self._forget(unproven)
        unproven.sock.close()
