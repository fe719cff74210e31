"""The links of a leader to the leaders of other replicas.

There are two for each pair of leaders: each leader dials the other one, and writes only on the link
that it has dialled. A leader dials when it has a message to send. Everything runs in the loop's
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.config import RankContext
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.leader_messages import PeerHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import Link, LinkClosed, Message
from megatron_recover.core.joining import older
from megatron_recover.core.tree import neighbours
from megatron_recover.core.values import Claim
from megatron_recover.deadlines import Deadlines
from megatron_recover.trace.node_clock import NodeClock


class PeerLinks:
    """Links one leader to others, and knows their addresses."""

    def __init__(
        self,
        context: RankContext,
        *,
        tree_above: int,
        key: bytes,
        clock: NodeClock,
        loop: Loop,
        deadlines: Deadlines,
        received: Callable[[int, Message], bool],
        lost: Callable[[int, str], None],
    ) -> None:
        """Prepare the links; none is dialled yet.

        - `tree_above` is that of `core/tree.py`.
        - `key` is the job's; `clock` is that of this node.
        - `received(peer, message)` handles a message of another leader. It returns False for one
          that this leader must not send; its link is then closed.
        - `lost(peer, why)` is called when a link to or from a leader breaks.
        """
        self._context, self._tree_above, self._key, self._clock = context, tree_above, key, clock
        self._loop, self._deadlines, self._received, self._lost = loop, deadlines, received, lost
        self._me = Party(Role.LEADER, context.replica)
        self._peers: dict[int, Peer] = {}
        """Addresses of every replica that was ever announced; they never change."""
        self._callers: dict[int, str] = {}
        """Addresses of leaders that nobody has announced: newcomers that have called, and, for a
        newcomer, the members that it may read from."""
        self._outgoing: dict[int, Link] = {}
        self._incoming: dict[Link, int] = {}
        self._neighbours: tuple[int, ...] = ()
        """Members of the roster that link to this leader."""

    def announced(self, peers: Iterable[Peer]) -> None:
        """Store the addresses of replicas that the coordinator has announced."""
        self._peers |= {peer.replica: peer for peer in peers}

    def listens_at(self, replica: int, address: str) -> None:
        """Store the address of the leader of a replica that may never be announced to this one."""
        self._callers[replica] = address

    def data_addresses(self, replica: int) -> tuple[str, ...]:
        """Return the addresses of the ranks of a replica that was announced, on the data plane."""
        return self._peers[replica].data_addresses

    def accept(self, link: Link, peer: int) -> None:
        """Read the messages of a leader that has dialled this one and introduced itself."""
        self._incoming[link] = peer
        self._loop.watch(link, self._from_peer, self._incoming_lost)

    def are_complete(self) -> bool:
        """Return whether all neighbours have linked to this leader."""
        return set(self._incoming.values()).issuperset(self._neighbours)

    def keep_neighbours(self, roster: tuple[int, ...], joins: tuple[Claim, ...], before: tuple[int, ...]) -> None:
        """Drop links to leaders that are no neighbours in a roster that has this replica.

        Statuses are exchanged by the older members alone, so their neighbours count, too. Links to
        replicas outside this roster and the one `before` are kept: newcomers wait for answers.
        """
        me, members = self._context.replica, older(roster, joins)
        if me not in roster:
            return
        near = neighbours(members, me, self._tree_above) if me in members else members[:1]
        self._neighbours = tuple(sorted({*neighbours(roster, me, self._tree_above), *near}))
        for peer in (self._outgoing.keys() & {*roster, *before}) - set(self._neighbours):
            self._loop.drop(self._outgoing.pop(peer))

    def send(self, peer: int, bodies: Sequence[bytes]) -> None:
        """Send encoded messages to a leader, and dial it at the first.

        A replica of unknown address gets nothing: a newcomer that has not said where it listens.
        """
        link = self._outgoing.get(peer)
        if link is None and peer not in self._peers and peer not in self._callers:
            return
        try:
            if link is None:
                address = self._peers[peer].leader_address if peer in self._peers else self._callers[peer]
                link = self._outgoing[peer] = OutgoingLink(
                    address, self._key, self._me, Party(Role.LEADER, peer),
                    clock=self._clock, patience_s=self._deadlines.stall_s,
                )  # fmt: skip
                self._loop.watch(link, self._unexpected_answer, self._outgoing_lost)
                self._loop.send(link, PeerHello(self._context.replica, self._context.leader if self._context.newcomer else ""))
        except LinkClosed as closed:
            why = str(closed)
            self._loop.post(lambda: self._lost(peer, why))
            return
        for each in bodies:
            self._loop.put(link, each)

    def _from_peer(self, link: Link, message: Message) -> None:
        if not self._received(self._incoming[link], message):
            self._incoming_lost(link, f"sent a {type(message).__name__}")
            self._loop.drop(link)

    def _incoming_lost(self, link: Link, why: str) -> None:
        peer = self._incoming.pop(link, None)
        if peer is not None:
            self._lost(peer, why)

    def _unexpected_answer(self, link: Link, message: Message) -> None:
        self._loop.drop(link)
        self._outgoing_lost(link, f"sent a {type(message).__name__} on a link that is ours to write")

    def _outgoing_lost(self, link: Link, why: str) -> None:
        for peer, known in list(self._outgoing.items()):
            if known is link:
                del self._outgoing[peer]
                self._lost(peer, why)
