"""The listening end of the control plane: runs handshakes and reports proven links."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from megatron_recover.authentication.admission import PAUSE_S, Admission, ReportStrangers
from megatron_recover.authentication.handshake import Admits, Party, Reply, Role
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import Link, largest_body
from megatron_recover.trace.node_clock import NodeClock


class Gate:
    """The listener of a driver. Calls `on_link` for each proven peer that is admitted.

    Used by the loop's thread.
    """

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        key: bytes,
        me: Role,
        admits: Admits,
        on_link: Callable[[Link, Party], None],
        *,
        clock: NodeClock,
        expects: Callable[[], int],
        report: ReportStrangers,
        also: Sequence[socket.socket] = (),
    ) -> None:
        """Begin to listen at `listener`, and at those of `also` (`Admission`).

        - `me` is this end's role.
        - `admits(peer, wanted)` returns whether that peer may connect to the wanted party.
        - `on_link(link, peer)` is called for each proven peer that is admitted.
        - `clock` is that of this node.
        - `expects()` returns the number of peers that are needed and have not connected yet: see
          `authentication/admission.py`, Note [Whom a listener expects].
        - `report(name, number)` is called when many strangers were disconnected (`Admission`).
        """
        self._loop, self._me, self._admits, self._on_link, self._expects = loop, me, admits, on_link, expects
        self._clock = clock
        self.admission = Admission(listener, key, me.name.lower(), report, loop.time, also=also)
        self._turn_at: float | None = None
        """Time of the next turn if nothing arrives before, by the loop's clock; None if no turn is
        planned."""
        loop.watch_readable(self.admission, self._turn)

    def close(self) -> None:
        """Stop listening, and close the connections that have not proven themselves.

        Report the strangers first, if there were many. Proven links belong to the loop.
        """
        self._turn_at = None
        self._loop.forget_readable(self.admission)
        self.admission.tell()
        self.admission.close()

    def _turn(self) -> None:
        for unproven in self.admission.turn(self._admits, expects=self._expects()):
            peer = unproven.acceptor.peer
            assert peer is not None
            try:
                unproven.decide(Reply.WELCOME)
            except OSError:  # the peer is gone; it dials again if it lives
                unproven.sock.close()
                continue
            keys = unproven.acceptor.session_keys
            self._on_link(Link(unproven.sock, keys, self._clock, largest_body(peer.role, self._me)), peer)
        if self.admission.is_stuck:
            self._loop.pause_readable(self.admission, PAUSE_S)
        self._turn_later()

    def _turn_later(self) -> None:
        """Schedule the next turn for when it is due, unless an earlier one is scheduled."""
        due_s = self.admission.due_s()
        if due_s is None or (self._turn_at is not None and self._turn_at <= self._loop.time() + due_s):
            return
        at = self._turn_at = self._loop.time() + due_s

        def turn() -> None:
            if self._turn_at == at:
                self._turn_at = None
                self._turn()

        self._loop.after(due_s, turn)
