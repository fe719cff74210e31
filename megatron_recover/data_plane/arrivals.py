"""The listening end of the data plane: who has arrived and proven itself, by generation; strangers are held short.

There is no accepting thread. Connections wait in the kernel until a transport of the endpoint is inside a call, which lets them
prove themselves without waiting for them. What is kept for strangers is bounded as on the control plane (`admission.py`), and
what they cost a call that waits for nobody's connection as well (Note [Whom a listener expects] there).
"""

from __future__ import annotations

import contextlib
import socket

from megatron_recover.authentication.admission import Admission, Report, Unproven
from megatron_recover.authentication.handshake import Party, Role, Verdict

MAX_PARKED = 1024
"""Proven connections that are kept before their generation is opened."""


class Parked:
    """A proven connection that waits for its generation to be opened."""

    def __init__(self, proven: Unproven) -> None:
        self.sock = proven.sock
        self._proven = proven

    def decide(self, verdict: Verdict, generation: int) -> None:
        """Tell the connector the verdict."""
        with contextlib.suppress(OSError):  # a peer that is gone already is found by the first read
            self._proven.decide(verdict, generation)

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

    def __init__(self, listener: socket.socket, key: bytes, rank: int, report: Report) -> None:
        self.admission = Admission(listener, key, "data", report)
        self._rank = rank
        self._watching: dict[int, socket.socket] = {}
        """By replica. They end with this process, which is what their other ends wait for."""
        self.parked: dict[tuple[int, int], Parked] = {}
        """By generation and replica."""

    def greet(self, me: int, generation: int, *, expects: bool = True) -> None:
        """Go on with everyone's handshake without waiting, as replica `me` in `generation`.

        `expects`: someone who has not connected is needed. Else this does little, and that only every `REST_S`.
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
        """Park a connection of this or a newer generation; refuse an older one, a second one and one for which is no room."""
        acceptor, arrived = unproven.acceptor, Parked(unproven)
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
