"""The listening end of the control plane: strangers are held short until they have proven the job's key, or are let go.

A connection that has not proven itself costs one descriptor and less than a hundred bytes. It has a deadline, and there is a
cap on how many there are. Nothing of what it sends is decoded. Running out of descriptors delays connections and ends nothing.

Note [Whom a listener expects]. Every listener knows whether the job still needs a connection to it: a rank that has not greeted
its leader, a neighbour in the roster, a leader that has not greeted the coordinator, a member that the sum in progress waits
for. While it expects one it accepts as fast as it can, so a peer waits no longer than it takes to let go of the strangers
before it in the kernel's queue, which is bounded (`net.core.somaxconn`). Nothing can be computed meanwhile anyway. While it
expects nobody it accepts `UNEXPECTED_AT_ONCE` and rests for `REST_S`, so that strangers take no time from the training thread.
The others wait in the kernel, where they cost nothing. It does not stop accepting, since a full queue refuses peers as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable

from megatron_recover.collectives.handshake import MAGIC, NONCE_BYTES, Acceptor, Admits, Party, Refused, Role, Verdict
from megatron_recover.collectives.loop import Loop
from megatron_recover.collectives.speaker import Speaker
from megatron_recover.collectives.wire import Link, largest_body
from megatron_recover.deadlines import INTRODUCTION_S

MAX_UNPROVEN = 256
"""Connections that have not proven themselves; with one more the oldest is closed."""
ACCEPTED_AT_ONCE = 64
"""Connections that one turn of the loop accepts, before it serves the others."""
UNEXPECTED_AT_ONCE = 16
"""Connections that a listener accepts before it rests, while it expects nobody. See Note [Whom a listener expects]."""
REST_S = 0.1
"""How long that rest is."""
MANY = 16
"""Connections that are let go without a word: a peer that dies or dials again leaves a few."""
TELL_S = 60.0
"""Between two reports of strangers."""
_PAUSE_S = 0.05
"""How long a listener rests that cannot accept for want of descriptors."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def is_hopeless(sock: socket.socket) -> bool:
    """Return whether a connection is over already, or begins with what no peer sends. Nothing need be made for such a one."""
    try:
        begin = sock.recv(len(MAGIC), socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not begin or not MAGIC.startswith(begin)


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
        self._speaker = Speaker()
        self._refill()

    def turn_away(self, listener: socket.socket, error: OSError) -> bool:
        """Accept a connection and close it. Return whether that was possible. The first time, say what is wrong."""
        if not self._said:
            self._said = True
            self._speaker.say(f"megatron-recover: cannot accept a connection ({error.strerror}); raise `ulimit -n`")
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
        self,
        loop: Loop,
        listener: socket.socket,
        key: bytes,
        me: Role,
        admits: Admits,
        on_link: Callable[[Link, Party], None],
        *,
        expects: Callable[[], bool],
        report: Callable[[int], None],
    ) -> None:
        """`on_link(link, peer)` is called for each proven peer that `admits(peer, wanted)` lets in. `me` is this end's role.

        `report(number)` is called with the number of connections that were let go, at most every `TELL_S`, and not for few.
        `expects()` returns whether anyone who has not connected yet is needed: see Note [Whom a listener expects].
        """
        self._loop, self._listener, self._key, self._me, self._admits = loop, listener, key, me, admits
        self._on_link, self._expects, self._report = on_link, expects, report
        self._num_let_go, self._told_at = 0, -TELL_S
        self._will_tell = False
        self._speaker = Speaker()
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
        self._tell()
        self._reserve.close()

    def _arrived(self) -> None:
        expects = self._expects()
        if not expects:
            self._loop.pause_readable(self._listener, REST_S)
        for _ in range(ACCEPTED_AT_ONCE if expects else UNEXPECTED_AT_ONCE):
            try:
                sock = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if out_of_descriptors(error):
                    self._make_room(error, rests=not expects)
                    return
                continue  # that connection was gone again before we looked
            if is_hopeless(sock):
                sock.close()
                self._count()
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                self._let_go(next(iter(self._unproven.values())))
            acceptor = Acceptor(self._key, self._admits, port=self._port, nonce=secrets.token_bytes(NONCE_BYTES))
            unproven = self._unproven[sock.fileno()] = Unproven(sock, acceptor)
            self._loop.watch_readable(sock, lambda unproven=unproven: self._serve(unproven))
            self._sweep_later()

    def _make_room(self, error: OSError, *, rests: bool) -> None:
        """Let the oldest stranger go, or turn the next one away; where neither is possible, rest unless it `rests` already."""
        turned_away = self._reserve.turn_away(self._listener, error)
        if self._unproven:
            self._let_go(next(iter(self._unproven.values())))
        elif not turned_away and not rests:
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
        self._count()

    def _count(self) -> None:
        """Count a connection that was let go, and have it told when it is time."""
        self._num_let_go += 1
        if self._num_let_go >= MANY and not self._will_tell:
            self._will_tell = True
            self._loop.after(max(_PAUSE_S, self._told_at + TELL_S - self._loop.time()), self._tell)

    def _tell(self) -> None:
        """Report how many connections were let go, unless they are few."""
        self._will_tell = False
        if self._num_let_go < MANY:
            return
        number, self._num_let_go, self._told_at = self._num_let_go, 0, self._loop.time()
        self._report(number)
        self._speaker.say(
            f"megatron-recover: WARNING: {number} connections to port {self._port} ({self._me.name.lower()}) came from "
            f"strangers and were let go unheard; `ss -tnp sport = :{self._port} or dport = :{self._port}` shows whose they are"
        )

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
