"""A pairwise probe: which peers answer on a separate connection within a bounded time.

A ring collective stalls on all members alike and cannot show which peer is unreachable. So each
rank of such a framework runs an `EchoServer`, which answers whatever the rank is doing. A rank
whose collective has stalled, or failed without a known culprit, probes all peers at once
(`unreachable`). A peer that answers is reachable, however late its collective is. The answer proves
nothing about the peer's training thread. A probe is the handshake of every other connection
(`handshake.py`) with nothing after it, so no stranger can answer for a peer.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Mapping

from megatron_recover.authentication.admission import PAUSE_S, Admission, ReportStrangers
from megatron_recover.authentication.handshake import Party, Reply, Role
from megatron_recover.data_plane.connection import REDIAL_S, CannotDial, Connection, EndedUnproven, connect
from megatron_recover.data_plane.transport import PeerLost
from megatron_recover.host.addresses import Ports, address_of, bind_free


class EchoServer:
    """A daemon thread that answers probes until it is closed.

    A forked child closes the sockets at once.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        rank: int,
        report: ReportStrangers = lambda name, number: None,
        *,
        ports: Ports | None = None,
    ) -> None:
        """Listen on a free port of `host`, as the rank at position `rank` of its replica.

        Start the thread. `key` is the job's. `report`: see `Admission`; called in the thread.
        `ports`: see `bind_free`.
        """
        self._rank = rank
        listener = bind_free(host, ports)
        self.address = address_of(listener)
        """The address, in the form that `connection.dial` accepts."""
        self.admission = Admission(listener, key, "echo", report)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="recover-echo", daemon=True)
        server = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: alive._close_sockets() if (alive := server()) is not None else None)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; return when the thread has ended."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._is_woken():
                for proven in self.admission.turn(self._admits, expects=True):
                    with contextlib.suppress(OSError):  # the prober is gone
                        proven.decide(Reply.WELCOME)
                    proven.sock.close()
            self.admission.tell()
        finally:
            self._close_sockets()

    def _admits(self, peer: Party, wanted: Party) -> bool:
        """Return whether both ends have the role ECHO and this rank's position.

        The replica that the peer asks for is not checked: no other replica listens on this port.
        """
        return peer.role is wanted.role is Role.ECHO and peer.rank == wanted.rank == self._rank

    def _is_woken(self) -> bool:
        """Wait for an event, or until `admission` has work; return whether to close the server."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        wait_s = self.admission.due_s()
        if self.admission.is_stuck:
            wait_s = PAUSE_S
        else:
            poll.register(self.admission, select.POLLIN)
        ready = poll.poll(None if wait_s is None else wait_s * 1000)
        return any(descriptor == self._wake for descriptor, _ in ready)

    def _close_sockets(self) -> None:
        self.admission.close()
        wake, self._wake = self._wake, -1
        if wake >= 0:  # close it once: the number may soon belong to another descriptor
            os.close(wake)


def unreachable(addresses: Mapping[int, str], key: bytes, me: Party, timeout_s: float) -> tuple[int, ...]:
    """Return the peers that do not answer a probe within `timeout_s`.

    `addresses` maps each replica to the address of its `EchoServer`. `me` names the replica and
    rank that probe. A peer that this rank cannot begin to probe (`CannotDial`) is not returned.
    A probe that ends before the peer's verdict is sent again: strangers may have crowded it out. A
    peer where nobody listens is probed only once.
    """
    until, rank = time.monotonic() + timeout_s, me.rank
    silent = set(addresses)
    probes: dict[int, Connection] = {}
    dial_at = dict.fromkeys(addresses, 0.0)
    try:
        while (now := time.monotonic()) < until:
            for peer in [each for each, at in dial_at.items() if at <= now]:
                del dial_at[peer]
                try:
                    probes[peer] = connect(addresses[peer], key, Role.ECHO, generation=0, me=me.replica, peer=peer, rank=rank)
                except PeerLost:  # nobody listens there
                    continue
                except CannotDial:
                    silent.discard(peer)
            if not probes and not dial_at:
                break
            poll = select.poll()
            for probe in probes.values():
                poll.register(probe.sock, probe.poll_mask(sending=False, receiving=True))
            ready = {descriptor for descriptor, _ in poll.poll((min((until, *dial_at.values())) - now) * 1000)}
            for peer, probe in [each for each in probes.items() if each[1].sock.fileno() in ready]:
                try:
                    if not probe.handshake():
                        continue
                    silent.discard(peer)
                except EndedUnproven:
                    dial_at[peer] = time.monotonic() + REDIAL_S
                except (OSError, PeerLost):  # nobody listens there
                    pass
                probes.pop(peer).sock.close()
    finally:
        for probe in probes.values():
            probe.sock.close()
    return tuple(sorted(silent))
