"""Messages among ranks, leaders and the coordinator that no machine of `core` reads.

They carry addresses, introduce one end of a connection to the other, or show that an end lives.
`control_plane/wire.py` has all messages of the control plane, and how they are sent.
"""

from __future__ import annotations

from megatron_recover.control_plane.encoding import Peer
from megatron_recover.core.membership_messages import Diverged, Hello, Miscounted, NewGeneration, ReplicaBlocked
from megatron_recover.core.rank_messages import Promise
from megatron_recover.core.values import Generation, ReplicaId, Shape, Value


class RankHello(Value, frozen=True):
    """The first message of a rank to its leader, sent when the rank knows its buckets."""

    rank: int
    shape: Shape
    fingerprint: str
    data_address: str
    parts: tuple[tuple[str, str], ...] = ()
    """The named values that the fingerprint covers, as (name, value) pairs (`core/alike.py`)."""
    beginning: tuple[tuple[str, str], ...] = ()
    """Such pairs of what must be alike at the start only (`Hello.beginning`)."""
    state_address: str = ""
    """Address at which newcomers read the state of this rank; empty if they cannot."""


class LeaderHello(Value, frozen=True):
    """The first message of a leader to the coordinator, after `RankHello` from all its ranks."""

    hello: Hello
    peer: Peer
    state_addresses: tuple[str, ...] = ()
    """Addresses at which newcomers read the state of the ranks, by rank; empty if they cannot."""


class PeerHello(Value, frozen=True):
    """The first message of a leader to another leader."""

    replica: ReplicaId
    address: str = ""
    """Address of this leader if it is that of a newcomer, which the other may not know yet."""


class Source(Value, frozen=True):
    """A member from which a newcomer can read state."""

    replica: ReplicaId
    leader_address: str
    state_addresses: tuple[str, ...]
    """Addresses at which the state of its ranks is read, by rank."""


class Sources(Value, frozen=True):
    """Message of the coordinator to the leader of a newcomer: the members that it may read from.

    It is sent when the newcomer is formed, and again after each new generation. It names some of
    the members, so that forming costs the same in a job of any size.
    """

    generation: Generation
    sources: tuple[Source, ...]


class ReadFrom(Value, frozen=True):
    """Message of a newcomer's leader to a rank: where to read state, in place of an older list."""

    sources: tuple[tuple[ReplicaId, str], ...]
    """(member, address of its rank at this rank's position)."""


class Announcement(Value, frozen=True):
    """Message of the coordinator to a leader: a new generation and its members' addresses."""

    new: NewGeneration
    peers: tuple[Peer, ...]
    """The members of the roster that no earlier announcement to this leader contained. The
    addresses of a replica never change."""
    noticed_s: float
    """Seconds from the coordinator's first sign of the loss or request that caused the generation,
    to the sending of this message."""


class Enter(Value, frozen=True):
    """Message of the leader to a rank: the order to promise, and the data addresses of members."""

    promise: Promise
    data_addresses: tuple[tuple[ReplicaId, str], ...]
    """(replica, address) of the members that no earlier order to this rank contained. Each address
    is that of the member's rank at this rank's position."""


class Heard(Value, frozen=True):
    """Message of the leader to a rank: the leader has forwarded the rank's `RankFailing`.

    The rank's process may end now.
    """


class Beat(Value, frozen=True):
    """The coordinator's sign of life to a leader.

    The coordinator sends one every `Deadlines.beat_s` if the leader has answered the one before.
    """

    host: str
    """Name of the coordinator's host."""
    pid: int
    """Process id of the coordinator on that host."""
    generation: Generation
    step: int
    """The highest step that any leader has reported as its first uncommitted one."""
    waiting_for: tuple[ReplicaId, ...]
    """Members that have not entered the generation. Before the first generation: replicas that have
    not sent `Hello`."""


class LeaderBeat(Value, frozen=True):
    """A leader's answer to a `Beat`, sent by its control thread.

    It does not show that training runs.
    """

    replica: ReplicaId
    generation: Generation
    step: int
    waiting_for: tuple[ReplicaId, ...]
    request: ReplicaBlocked | Diverged | Miscounted | None = None
    """The request of this generation that the coordinator has not answered yet. The coordinator
    acts on a repeated request once."""
