"""The admission of connections at every listener of a job, on all planes.

A stranger is a connection that has not proven the job's key. A stranger costs one descriptor, and
less than a hundred bytes of what it sends are kept. Strangers have a deadline, and their number is
limited. Their bytes go to the handshake only; no message is decoded. A lack of descriptors delays
connections and ends nothing.

Note [Whom a listener expects]. Every listener knows whether the job still needs a connection to it.
The listener expects, for example:

- a rank that has not greeted its leader,
- a neighbour in the roster,
- a leader that has not greeted the coordinator,
- a member that the sum in progress waits for.

A listener that expects a connection accepts as fast as it can. So a peer waits no longer than it
takes to close the strangers before it in the kernel's queue, whose length is limited
(`net.core.somaxconn`). No computation is possible meanwhile in any case. An echo server always
expects a probe, since a peer that does not answer within `probe_s` is accused. A listener that
expects nobody accepts `UNEXPECTED_AT_ONCE` connections and pauses for `REST_S`, so that strangers
take no time from the training thread. Further connections wait in the kernel, where they cost
nothing. Such a listener does not stop accepting, since a full queue refuses peers as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence

from megatron_recover import trace
from megatron_recover.authentication.handshake import MAGIC, NONCE_BYTES, Acceptor, Admits, Refused, Reply
from megatron_recover.deadlines import INTRODUCTION_S
from megatron_recover.host.speaker import Speaker

MAX_UNPROVEN = 256
"""Connections kept at most that have not proven themselves, unless the listener expects more peers.
One more closes the oldest."""
ACCEPTED_AT_ONCE = 64
"""Connections that a single turn accepts at most while the listener expects a peer, at all
addresses together. A handshake takes three turns, and `MAX_UNPROVEN` is four times as many."""
UNEXPECTED_AT_ONCE = 16
"""Connections that a single turn accepts at most while the listener expects nobody. See
Note [Whom a listener expects]."""
REST_S = 0.1
"""Seconds after such a turn in which the listener accepts nobody, unless it then expects a peer."""
MANY = 16
"""Fewer closed strangers than this are not reported: a peer that dies or dials again leaves a
few."""
TELL_S = 60.0
"""Least number of seconds between two reports of strangers. The owner of a listener that closes may
report the last ones earlier."""
PAUSE_S = 0.05
"""Seconds that a listener pauses if it can accept nothing for lack of descriptors. Also the seconds
for which it counts strangers before a report."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def is_hopeless(sock: socket.socket) -> bool:
    """Return whether a connection has ended without a byte, or begins as no peer does.

    The caller then needs no `Acceptor` for it.
    """
    try:
        begin = sock.recv(len(MAGIC), socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not begin or not MAGIC.startswith(begin)


class Unproven:
    """A connection that has not proven itself, with its end of the handshake and its deadline."""

    def __init__(self, sock: socket.socket, acceptor: Acceptor, until: float) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.acceptor = acceptor
        self.until = until

    def advance(self) -> bool:
        """Continue the handshake without waiting; return whether the peer has proven itself.

        Raises `Refused` or OSError if the connection cannot be used.
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

    def decide(self, verdict: Reply, generation: int = 0) -> None:
        """Send a proven peer the verdict. Raises OSError if the peer is gone."""
        self.say(self.acceptor.decide(verdict, generation))

    def say(self, message: bytes) -> None:
        """Send a message of the handshake.

        Raises OSError if the peer is gone or the socket accepts only a part of the message. The
        socket's buffer is empty before, so it has room for the message.
        """
        if self.sock.send(message) != len(message):
            raise OSError(errno.ENOBUFS, "the socket took a part of a message")


class Reserve:
    """A spare descriptor, released to accept and close a connection when no other is free."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._said = False
        self._speaker = Speaker()
        self._refill()

    def turn_away(self, listener: socket.socket, error: OSError) -> bool:
        """Accept a connection and close it.

        Return whether that succeeded and the descriptor was opened anew.

        The first call prints what is wrong.
        """
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
        """Release the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _refill(self) -> None:
        with contextlib.suppress(OSError):
            self._descriptor = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def out_of_descriptors(error: OSError) -> bool:
    """Return whether `accept` failed for lack of descriptors or memory.

    Otherwise the connection was gone.
    """
    return error.errno in _OUT_OF_DESCRIPTORS


ReportStrangers = Callable[[str, int], None]
"""`report(name, number)` is called when `number` connections to the listener `name` were closed as
strangers.

The thread that calls `Admission.turn` or `Admission.tell` calls it.
"""


def recording_strangers(record: Callable[[trace.Event], None], *, replica: int, rank: int) -> ReportStrangers:
    """Return what records the strangers at a listener of a rank as an event."""
    return lambda name, number: record(trace.Strangers(replica=replica, rank=rank, listener=name, num_connections=number))


class Admission:
    """The listeners of a party, all at one port, and connections that have not proven themselves.

    It never waits. On the control plane and in an echo server its owner calls `turn` when its
    descriptor is readable, and after the seconds that `due_s` returns. On the listener of the data
    plane `turn` is called inside calls of a transport only. Used by one thread at a time.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        name: str,
        report: ReportStrangers,
        clock: Callable[[], float] = time.monotonic,
        *,
        also: Sequence[socket.socket] = (),
    ) -> None:
        """Begin to admit connections to `listener`, and to `also`, at its port of other addresses.

        `name` is the listener's in reports. `turn` reports at most every `TELL_S` seconds; `tell`
        reports at once. Neither reports fewer than `MANY` connections. `clock` returns seconds.
        """
        self._listeners = (listener, *also)
        self._key, self._name, self._report, self._clock = key, name, report, clock
        self._port = listener.getsockname()[1]
        self.unproven: dict[int, Unproven] = {}
        """Connections that have not proven themselves, by descriptor, the oldest first."""
        self.is_stuck = False
        """True if a connection can be neither accepted nor closed. The owner then pauses for
        `PAUSE_S`."""
        self._reserve = Reserve()
        self._poll = select.epoll()
        for each in self._listeners:
            each.setblocking(False)
            self._poll.register(each, select.EPOLLIN)
        self._watches_listener = True
        self._rests_until = 0.0
        self._num_let_go, self._told_at = 0, -TELL_S
        self._tell_at: float | None = None
        self._speaker = Speaker()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection or bytes have arrived."""
        return self._poll.fileno()

    def close(self) -> None:
        """Close the listeners, and the connections that have not proven themselves.

        In a forked child this closes the child's copies.
        """
        self._poll.close()
        for listener in self._listeners:
            listener.close()
        for unproven in self.unproven.values():
            unproven.sock.close()
        self.unproven.clear()
        self._reserve.close()

    @property
    def rests(self) -> bool:
        """Return whether the pause (`REST_S`) after a turn that expected nobody still lasts."""
        return self._clock() < self._rests_until

    def due_s(self) -> float | None:
        """Return the seconds until `turn` has work even if nothing arrives; None for never."""
        oldest = next(iter(self.unproven.values())).until if self.unproven else None
        listens_at = None if self._watches_listener else self._rests_until
        times = [each for each in (oldest, listens_at, self._tell_at) if each is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def turn(self, admits: Admits, *, expects: int) -> list[Unproven]:
        """Accept connections, continue all handshakes, and close what fails or is overdue.

        Accept none while the listener `rests`, unless it expects a peer. Report strangers. Return
        the connections that are proven now. They belong to the caller, who has to send each a
        verdict. `expects`: number of peers that have not connected and that the caller needs. See
        Note [Whom a listener expects].
        """
        now, self.is_stuck = self._clock(), False
        accepts = expects or not self.rests
        if accepts:
            self._rests_until = now if expects else now + REST_S
            self._watch_listener(True)
        proven, arrived = [], set()
        for descriptor, _ in self._poll.poll(0):
            if (unproven := self.unproven.get(descriptor)) is None:
                arrived.add(descriptor)
                continue
            try:
                if unproven.advance():
                    self._forget(unproven)
                    proven.append(unproven)
            except (Refused, OSError):
                self.let_go(unproven)
        if arrived:
            self._watch_listener(bool(expects))
            if accepts:
                at_most, most_unproven = ACCEPTED_AT_ONCE if expects else UNEXPECTED_AT_ONCE, max(MAX_UNPROVEN, expects)
                # A turn that closes what it has just accepted would keep peers out.
                ready = [each for each in self._listeners if each.fileno() in arrived]
                for listener in ready:
                    self._accept(listener, admits, -(-at_most // len(ready)), most_unproven)
        while self.unproven and (oldest := next(iter(self.unproven.values()))).until <= now:
            self.let_go(oldest)
        if self._tell_at is not None and now >= self._tell_at:
            self.tell()
        return proven

    def let_go(self, unproven: Unproven) -> None:
        """Close a connection that has not proven itself, and count it as a stranger."""
        self._forget(unproven)
        unproven.sock.close()
        self._count()

    def tell(self) -> None:
        """Report the number of closed strangers, unless they are fewer than `MANY`."""
        self._tell_at = None
        if self._num_let_go < MANY:
            return
        number, self._num_let_go, self._told_at = self._num_let_go, 0, self._clock()
        self._report(self._name, number)
        self._speaker.say(
            f"megatron-recover: WARNING: {number} connections to port {self._port} ({self._name}) came from "
            f"strangers and were closed; `ss -tnp sport = :{self._port} or dport = :{self._port}` shows their processes"
        )

    def _watch_listener(self, wanted: bool) -> None:
        """Choose whether a new connection makes the descriptor readable."""
        if wanted != self._watches_listener:
            for listener in self._listeners:
                self._poll.modify(listener, select.EPOLLIN if wanted else 0)
            self._watches_listener = wanted

    def _accept(self, listener: socket.socket, admits: Admits, at_most: int, most_unproven: int) -> None:
        for _ in range(at_most):
            try:
                sock = listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if not out_of_descriptors(error):
                    continue  # that connection was gone before it was accepted
                turned_away = self._reserve.turn_away(listener, error)
                self.is_stuck |= not self.unproven and not turned_away
                if self.unproven:
                    self.let_go(next(iter(self.unproven.values())))
                return
            if is_hopeless(sock):
                sock.close()
                self._count()
                continue
            if len(self.unproven) >= most_unproven:
                self.let_go(next(iter(self.unproven.values())))
            acceptor = Acceptor(self._key, admits, port=self._port, nonce=secrets.token_bytes(NONCE_BYTES))
            self.unproven[sock.fileno()] = Unproven(sock, acceptor, self._clock() + INTRODUCTION_S)
            self._poll.register(sock, select.EPOLLIN)

    def _forget(self, unproven: Unproven) -> None:
        del self.unproven[unproven.sock.fileno()]
        self._poll.unregister(unproven.sock)

    def _count(self) -> None:
        self._num_let_go += 1
        if self._num_let_go >= MANY and self._tell_at is None:
            self._tell_at = max(self._clock() + PAUSE_S, self._told_at + TELL_S)
