"""The server of a replica's store, where the ranks of the replica are on several nodes.

Rank 0 serves the store in a thread of its own, from before its first process group until its
process ends. The control thread cannot serve it: it starts when the rank knows its buckets, and
those follow from the process groups. A rank proves the job's key and its place in the replica
before anything is decoded.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
import weakref

from megatron_recover.authentication.admission import ReportStrangers
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.control_plane.gate import Gate
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.store_messages import StoreRequest
from megatron_recover.control_plane.store_table import StoreTable
from megatron_recover.control_plane.wire import Link, Message
from megatron_recover.host.speaker import Speaker
from megatron_recover.trace.node_clock import NodeClock

MAX_LINKS = 16
"""Links of one rank, at most: one for each of its threads that use the store at the same time."""


class StoreServer:
    """Serves one store to the ranks of one replica, in the thread `recover-store`."""

    def __init__(
        self, listener: socket.socket, key: bytes, *, replica: int, num_ranks: int, clock: NodeClock, report: ReportStrangers
    ) -> None:
        """Begin to serve at `listener`, which this object then owns.

        `key` is the job's; `clock` is that of this node. `report(name, number)` is
        called in the server's thread when many strangers were disconnected.
        """
        self._replica, self._num_ranks = replica, num_ranks
        self._table: StoreTable[Link] = StoreTable()
        self._links: dict[Link, int] = {}
        """The rank at the other end of each link."""
        self._seen: set[int] = set()
        """Ranks that have connected."""
        self._loop = Loop()
        self._gate = Gate(
            self._loop, listener, key, Role.STORE, self._admits, self._accept, clock=clock,
            expects=self._expects, report=report
        )  # fmt: skip
        self._is_closed = False
        self._speaker = Speaker()
        itself = weakref.ref(self)
        # A copy of a socket in a child would hide the end of this process from the other ranks.
        os.register_at_fork(after_in_child=lambda: server._loop.close_in_child() if (server := itself()) is not None else None)
        self._thread = threading.Thread(target=self._run, name="recover-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Whoever uses the store afterwards, or waits for it, gets an error."""
        self._is_closed = True
        self._loop.post(lambda: None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._loop.run_once()
        except BaseException:
            # The ranks see their links end, and name this rank.
            self._speaker.say(traceback.format_exc().rstrip())
        finally:
            with contextlib.suppress(OSError):
                self._gate.close()
            self._loop.close()

    def _admits(self, peer: Party, wanted: Party) -> bool:
        is_mine = peer.role is Role.RANK and peer.replica == self._replica and peer.rank < self._num_ranks
        return is_mine and wanted == Party(Role.STORE, self._replica)

    def _expects(self) -> bool:
        return len(self._seen) < self._num_ranks

    def _accept(self, link: Link, peer: Party) -> None:
        if sum(rank == peer.rank for rank in self._links.values()) >= MAX_LINKS:
            link.close()
            return
        self._seen.add(peer.rank)
        self._links[link] = peer.rank
        self._loop.watch(link, self._requested, lambda link, why: self._forget(link))

    def _requested(self, link: Link, message: Message) -> None:
        try:
            if not isinstance(message, StoreRequest):
                raise ValueError(f"a {type(message).__name__} is no request to a store")
            answers = self._table.ask(link, message)
        except ValueError as error:
            self._speaker.say(f"megatron-recover: rank {self._links[link]} of replica {self._replica}: {error}")
            self._loop.drop(link)
            self._forget(link)
            return
        for asker, answer in answers:
            self._loop.send(asker, answer)

    def _forget(self, link: Link) -> None:
        self._table.forget(link)
        del self._links[link]
