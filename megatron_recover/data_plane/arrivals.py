"""The listener of the data plane: proven connections, by generation.

No thread accepts connections. Connections wait in the kernel until a transport of the endpoint is
inside a call. That call runs the handshakes without waiting for any of them. The memory kept for
strangers is bounded as on the control plane (`admission.py`). So is the time that strangers take
from a call that expects no connection (Note [Whom a listener expects] there).
"""

from __future__ import annotations

import contextlib
import socket

from megatron_recover.authentication.admission import Admission, ReportStrangers, Unproven
from megatron_recover.authentication.handshake import Party, Reply, Role

MAX_PARKED = 1024
"""Most proven connections that are kept until a call of their generation takes them."""


class Parked:
    """A proven connection that waits for its verdict."""

    def __init__(self, proven: Unproven) -> None:
        self.sock = proven.sock
        self._proven = proven

    def decide(self, verdict: Reply, generation: int) -> None:
        """Send the connector the verdict."""
        with contextlib.suppress(OSError):  # a peer that is gone is noticed at the first read
            self._proven.decide(verdict, generation)

    def refuse(self, verdict: Reply, generation: int) -> None:
        """Send the connector the verdict, and close the connection."""
        self.decide(verdict, generation)
        self.sock.close()


def _has_ended(sock: socket.socket) -> bool:
    """Return whether the other end has closed a watch. A watch carries no data."""
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class Arrivals:
    """The connections to one listener.

    The lock of the endpoint guards every call, except in a forked child.
    """

    def __init__(self, listener: socket.socket, key: bytes, rank: int, report: ReportStrangers) -> None:
        self.admission = Admission(listener, key, "data", report)
        self._rank = rank
        self._watching: dict[int, socket.socket] = {}
        """Connections of peers that watch this process, by replica. They end with this process; its
        end is what the peers wait for."""
        self.parked: dict[tuple[int, int], Parked] = {}
        """Proven connections by (generation, replica)."""

    def greet(self, me: int, generation: int, *, expects: bool = True) -> None:
        """Accept connections and advance all handshakes, as replica `me` in `generation`.

        Proven connections are parked, welcomed or refused (`_admit`), and ended watches closed.
        Nothing waits. `expects`: the caller needs a peer that has not connected. Otherwise the call
        accepts only a few connections, and for `REST_S` afterwards such calls do nothing.
        """
        if not expects and self.admission.rests:
            return

        def admits(peer: Party, wanted: Party) -> bool:
            known = peer.role in (Role.DATA, Role.WATCH) and peer.rank == self._rank and peer.replica != me
            return known and wanted == Party(Role.DATA, me, self._rank)

        for proven in self.admission.turn(admits, expects=expects):
            self._admit(proven, generation)
        for replica in [each for each, sock in self._watching.items() if _has_ended(sock)]:
            self._watching.pop(replica).close()

    def close(self) -> None:
        """Close every socket, the listener included."""
        self.admission.close()
        for sock in (*self._watching.values(), *(each.sock for each in self.parked.values())):
            sock.close()
        self._watching.clear()
        self.parked.clear()

    def _admit(self, unproven: Unproven, generation: int) -> None:
        """Park a connection of this or a newer generation, and refuse any other.

        Refused are a connection of an older generation, a second one of the same peer and
        generation while the first is parked, and any above `MAX_PARKED`. A watch is welcome in any
        generation and replaces the peer's previous watch.
        """
        acceptor, arrived = unproven.acceptor, Parked(unproven)
        peer = acceptor.peer
        assert peer is not None
        if peer.role is Role.WATCH:
            if peer.replica in self._watching:
                self._watching.pop(peer.replica).close()
            self._watching[peer.replica] = arrived.sock
            arrived.decide(Reply.WELCOME, generation)
        elif acceptor.generation < generation:
            arrived.refuse(Reply.OLDER, generation)
        elif len(self.parked) >= MAX_PARKED or (acceptor.generation, peer.replica) in self.parked:
            arrived.refuse(Reply.NO_ROOM, generation)
        else:
            self.parked[acceptor.generation, peer.replica] = arrived
