"""The listening end of the control plane: strangers are held short until they have proven the job's key, or are let go.

A connection that has not proven itself costs one descriptor and less than a hundred bytes. It has a deadline, and there is a
cap on how many there are. Nothing of what it sends is decoded. Running out of descriptors delays connections and ends nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable

from megatron_recover.collectives.handshake import NONCE_BYTES, Acceptor, Admits, Party, Refused, Role, Verdict
from megatron_recover.collectives.loop import Loop
from megatron_recover.collectives.wire import Link, largest_body

INTRODUCTION_S = 5.0
"""A connection that has not proven itself so long after it was accepted is closed."""
MAX_UNPROVEN = 256
"""Connections that have not proven themselves; with one more the oldest is closed."""
ACCEPTED_AT_ONCE = 64
"""Connections that one turn of the loop accepts, before it serves the others."""
_PAUSE_S = 0.05
"""How long a listener rests that cannot accept for want of descriptors."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Unproven:
    """A connection whose peer has still to prove who it is: its socket, its side of the handshake, its deadline."""

    def __init__(self, sock: socket.socket, acceptor: Acceptor) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.acceptor = acceptor
        self.until = time.monotonic() + INTRODUCTION_S

    def advance(self) -> bool:
        """Read and answer what is there without waiting; return whether the peer has proven itself.

        Raises `Refused` or OSError when the connection is of no use.
        """
        while wanted := self.acceptor.wanted:
            try:
                chunk = self.sock.recv(wanted)
            except BlockingIOError:
                return False
            if not chunk:
                raise Refused("the other end hung up")
            if answer := self.acceptor.feed(chunk):
                self.say(answer)
        return True

    def say(self, message: bytes) -> None:
        """Send a message of the handshake. Raises OSError where the empty socket does not take it whole."""
        if self.sock.send(message) != len(message):
            raise OSError(errno.ENOBUFS, "the socket took a part of a message")


class Reserve:
    """A descriptor that is kept to be given up: with it a connection can be accepted, and closed, when there are no others."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._said = False
        self._refill()

    def turn_away(self, listener: socket.socket, error: OSError) -> bool:
        """Accept a connection and close it. Return whether that was possible. The first time, say what is wrong."""
        if not self._said:
            self._said = True
            print(
                f"megatron-recover: cannot accept a connection ({error.strerror}); raise `ulimit -n`",
                file=sys.stderr,
                flush=True,
            )
        self.close()
        try:
            listener.accept()[0].close()
        except OSError:
            return False
        finally:
            self._refill()
        return self._descriptor >= 0

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _refill(self) -> None:
        with contextlib.suppress(OSError):
            self._descriptor = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def out_of_descriptors(error: OSError) -> bool:
    """Return whether `accept` failed for want of descriptors or memory, rather than because a connection was gone again."""
    return error.errno in _OUT_OF_DESCRIPTORS


class Gate:
    """Accepts connections and hands on those whose peers have proven who they are. Used by the loop's thread."""

    def __init__(
        self, loop: Loop, listener: socket.socket, key: bytes, me: Role, admits: Admits, on_link: Callable[[Link, Party], None]
    ) -> None:
        """`on_link(link, peer)` is called for each proven peer that `admits(peer, wanted)` lets in. `me` is this end's role."""
        self._loop, self._listener, self._key, self._me, self._admits = loop, listener, key, me, admits
        self._on_link = on_link
        self._port = listener.getsockname()[1]
        self._unproven: dict[int, Unproven] = {}
        """By descriptor, the oldest first."""
        self._sweeping = False
        self._reserve = Reserve()
        loop.watch_readable(listener, self._arrived)

    def close(self) -> None:
        """Stop listening, and let go of those that have not proven themselves. Proven links belong to the loop."""
        self._loop.forget_readable(self._listener)
        self._listener.close()
        for unproven in list(self._unproven.values()):
            self._let_go(unproven)
        self._reserve.close()

    def _arrived(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if out_of_descriptors(error):
                    self._make_room(error)
                    return
                continue  # that connection was gone again before we looked
            if len(self._unproven) >= MAX_UNPROVEN:
                self._let_go(next(iter(self._unproven.values())))
            acceptor = Acceptor(self._key, self._admits, port=self._port, nonce=secrets.token_bytes(NONCE_BYTES))
            unproven = self._unproven[sock.fileno()] = Unproven(sock, acceptor)
            self._loop.watch_readable(sock, lambda unproven=unproven: self._serve(unproven))
            self._sweep_later()

    def _make_room(self, error: OSError) -> None:
        """Let the oldest stranger go, or turn the next one away; where neither is possible, rest."""
        turned_away = self._reserve.turn_away(self._listener, error)
        if self._unproven:
            self._let_go(next(iter(self._unproven.values())))
        elif not turned_away:
            self._loop.pause_readable(self._listener, _PAUSE_S)

    def _serve(self, unproven: Unproven) -> None:
        if self._unproven.get(unproven.sock.fileno()) is not unproven:  # let go in this turn of the loop
            return
        try:
            if not unproven.advance():
                return
            unproven.say(unproven.acceptor.decide(Verdict.WELCOME))
        except (Refused, OSError):
            self._let_go(unproven)
            return
        peer = unproven.acceptor.peer
        assert peer is not None
        self._forget(unproven)
        self._on_link(Link(unproven.sock, largest_body(peer.role, self._me)), peer)

    def _forget(self, unproven: Unproven) -> None:
        del self._unproven[unproven.sock.fileno()]
        self._loop.forget_readable(unproven.sock)

    def _let_go(self, unproven: Unproven) -> None:
        self._forget(unproven)
        unproven.sock.close()

    def _sweep_later(self) -> None:
        if not self._sweeping and self._unproven:
            self._sweeping = True
            self._loop.after(max(0.0, next(iter(self._unproven.values())).until - time.monotonic()), self._sweep)

    def _sweep(self) -> None:
        """Let go of those that are overdue."""
        self._sweeping = False
        now = time.monotonic()
        for unproven in list(self._unproven.values()):
            if unproven.until > now:
                break
            self._let_go(unproven)
        self._sweep_later()
