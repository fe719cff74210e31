"""The listening end of the control plane: serves a listener's admission in a loop, and hands on the links that are proven."""

from __future__ import annotations

import socket
from collections.abc import Callable

from megatron_recover.authentication.admission import PAUSE_S, Admission, Report
from megatron_recover.authentication.handshake import Admits, Party, Role, Verdict
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import Link, largest_body


class Gate:
    """The admission of the control plane: hands on those whose peers have proven who they are. Used by the loop's thread."""

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
        report: Report,
    ) -> None:
        """`on_link(link, peer)` is called for each proven peer that `admits(peer, wanted)` lets in. `me` is this end's role.

        `expects()` returns whether anyone who has not connected yet is needed: see Note [Whom a listener expects].
        """
        self._loop, self._me, self._admits, self._on_link, self._expects = loop, me, admits, on_link, expects
        self.admission = Admission(listener, key, me.name.lower(), report, loop.time)
        self._turn_at: float | None = None
        """When the next turn comes though nothing arrives, by the loop's clock."""
        loop.watch_readable(self.admission, self._turn)

    def close(self) -> None:
        """Stop listening, and let go of those that have not proven themselves. Proven links belong to the loop."""
        self._turn_at = None
        self._loop.forget_readable(self.admission)
        self.admission.tell()
        self.admission.close()

    def _turn(self) -> None:
        for unproven in self.admission.turn(self._admits, expects=self._expects()):
            peer = unproven.acceptor.peer
            assert peer is not None
            try:
                unproven.decide(Verdict.WELCOME)
            except OSError:  # the peer is gone, and dials again if it lives
                unproven.sock.close()
                continue
            self._on_link(Link(unproven.sock, largest_body(peer.role, self._me)), peer)
        if self.admission.is_stuck:
            self._loop.pause_readable(self.admission, PAUSE_S)
        self._turn_later()

    def _turn_later(self) -> None:
        """Have the next turn made when it is due, unless one comes before."""
        due_s = self.admission.due_s()
        if due_s is None or (self._turn_at is not None and self._turn_at <= self._loop.time() + due_s):
            return
        at = self._turn_at = self._loop.time() + due_s

        def turn() -> None:
            if self._turn_at == at:
                self._turn_at = None
                self._turn()

        self._loop.after(due_s, turn)
