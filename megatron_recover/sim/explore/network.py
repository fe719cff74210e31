"""State of the whole job in small numbers, and which messages can still affect which node."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatron_recover.core import replica
from megatron_recover.core.joining import talkers
from megatron_recover.core.membership_messages import AddRequests, JoinRefused, NewGeneration
from megatron_recover.core.replica_state import Admission, HoldAsked
from megatron_recover.core.tree import forward_to
from megatron_recover.core.values import Claim, ReplicaId, Status, Statuses, Vote, Votes
from megatron_recover.core.vote import voters_of
from megatron_recover.sim.explore.node import Addend, Copy, Message, Node


class Faults(NamedTuple):
    """Number of faults of each kind that may still happen."""

    crashes: int
    suspicions: int
    alarms: int
    drifts: int
    state_drifts: int
    saves: int
    """Saves that may still begin."""
    late: int = 0
    """Follow timers that may still run out."""
    stops: int = 0
    """Times that the coordinator may still be stopped."""
    miscounts: int = 0
    """Miscounts that may still happen."""
    readers: int = 0
    """Times that a replica may still begin to read."""
    waits: int = 0
    """Times that members may still give up waiting for a replica that reads."""
    leaves: int = 0
    """Times that a member may still be asked to leave."""
    newcomers: int = 0
    """Newcomers that may still be formed."""
    asks: int = 0
    """Times that a newcomer may still ask a member for a hold."""
    newcomer_crashes: int = 0
    """Newcomers that may still die in their first step."""
    exits: int = 0
    """Times that the job may still be asked to end."""


class JobState(NamedTuple):
    """A state of the whole job. Its parts are numbered values: it is small and quick to compare."""

    coordinator: int
    """Number of the coordinator's state."""
    nodes: tuple[int, ...]
    """Number of each replica's node; 0: dead."""
    messages: int
    """Bit set of the numbers of all messages that may arrive; with `links`, of the data alone."""
    history: int
    """Number of the history of facts."""
    faults: Faults
    """Faults that may still happen."""
    links: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """(source, or -1 for the coordinator; destination; numbers of the messages on their way)."""
    grace: str = ""
    """Name of the grace timer that runs, or empty. Used only where `Space.takes_time`."""
    stopped: bool = False
    """True while the coordinator takes no input."""
    inbox: tuple[int, ...] = ()
    """Numbers of the inputs that reached the coordinator since it was stopped, in their order."""
    reading: tuple[ReplicaId, ...] = ()
    """Members whose training thread only reads and has not arrived at the sum.

    A fenced replica is not listed: it may continue.
    """
    overdue: tuple[ReplicaId, ...] | None = None
    """Members that read when the coordinator's deadline passed, or began to read after it.

    None before the deadline, and again after a commit or a loss.
    """
    late_saves: tuple[tuple[ReplicaId, int], ...] = ()
    """(replica, generation in which the time for its save ran out) of each overdue save.

    A save that ends is removed; a commit or a loss removes all.
    """
    leaving: tuple[int, ...] = ()
    """Numbers of the reports `ReplicaLeaving` on their way to the coordinator, ascending."""
    is_dead: bool = False
    """True once the coordinator has died. It is then `stopped` for good, and takes no input."""
    joined: str = ""
    """Label of the step in which newcomers were announced last; empty: in none.

    Used only where newcomers die in the roster.
    """
    blamed: tuple[ReplicaId, ...] = ()
    """Replicas fenced for reports of other members though not overdue, in order of fencing."""


class Numbering[T]:
    """Numbers from 1 for distinct values."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._values: list[T] = []
        self._encode = msgspec.msgpack.Encoder(order="deterministic").encode

    def number(self, value: T) -> int:
        """Return the number of a value; a new value gets the next number."""
        key = self._encode(value)
        found = self._numbers.get(key)
        if found is None:
            self._values.append(value)
            found = self._numbers[key] = len(self._values)
        return found

    def __getitem__(self, number: int) -> T:
        return self._values[number - 1]

    def __len__(self) -> int:
        return len(self._values)


def numbers(bits: int) -> list[int]:
    """Return the numbers in a bit set, in ascending order; bit 0 stands for the number 0."""
    numbers = []
    while bits:
        low = bits & -bits
        bits ^= low
        numbers.append(low.bit_length() - 1)
    return numbers


def received(world: JobState, number: ReplicaId, message: int) -> JobState:
    """Return the world without `message`, the first on a link to a replica."""
    links = list(world.links)
    at = next(i for i, (_, to, queue) in enumerate(links) if to == number and queue[0] == message)
    source, to, queue = links[at]
    links[at : at + 1] = [(source, to, queue[1:])] if len(queue) > 1 else []
    return world._replace(links=tuple(links))


def address(message: Addend | Copy) -> tuple[object, ...]:
    """Return the fields by which an operation finds the data that it delivers."""
    version = message.version if isinstance(message, Copy) else 0
    return message.replica, message.rank, message.generation, message.step, message.bucket, version


def needed(message: Message, node: Node, member: bool) -> bool:
    """Return whether a message can still affect a node.

    `member`: the node is in the newest roster, so it may enter newer generations.
    """
    leader = node.leader
    if isinstance(message, AddRequests):
        return member
    if isinstance(message, Claim | JoinRefused | HoldAsked):
        return _matters(message, node, member=member)
    newer = message.generation > leader.generation
    if isinstance(message, Admission):
        waits = leader.phase in (replica.ReplicaPhase.PROMISING, replica.ReplicaPhase.EXCHANGING)
        return leader.replica in message.plan.roster and leader.claim is not None and (newer and member or waits)
    if isinstance(message, NewGeneration):
        return newer and member
    if isinstance(message, Addend | Copy):
        if message.step < leader.step or message.rank >= len(node.ranks):
            return False
        return newer and member or node.ranks[message.rank].machine.promised <= message.generation <= leader.generation
    if newer or message.generation < leader.generation or not _goes_to(message, leader):
        return newer and member
    if isinstance(message, Vote | Votes):
        return message.step >= leader.step
    return leader.phase in (replica.ReplicaPhase.JOINING, replica.ReplicaPhase.PROMISING, replica.ReplicaPhase.EXCHANGING)


def _matters(message: Claim | JoinRefused | HoldAsked, node: Node, *, member: bool) -> bool:
    """Return whether a claim, its refusal or a request for a hold can still affect a node."""
    leader = node.leader
    if isinstance(message, JoinRefused):
        if message.newcomer != leader.replica:
            return leader.hold is not None and message.newcomer in leader.hold.newcomers
        return leader.claim is not None and (message.newcomer, message.label) == (leader.replica, leader.claim.label)
    # A member that was asked to end refuses a step that it does not begin any more.
    step = next((number for number, work in enumerate(node.work) if work.label == message.label), len(node.work))
    return member and not node.is_newcomer and leader.step <= step


def reaches(message: Message, leader: replica.ReplicaState) -> bool:
    """Return whether a message can arrive at a replica in its present state.

    A message that is forwarded in a tree goes to neighbours in its own generation only.
    """
    if not isinstance(message, Statuses | Votes):
        return True
    return message.generation == leader.generation and _goes_to(message, leader)


def _goes_to(message: Status | Statuses | Vote | Votes, leader: replica.ReplicaState) -> bool:
    """Return whether a message of the leader's own generation is sent to this leader.

    A message that is forwarded goes to a neighbour in the tree.
    """
    if isinstance(message, Status | Vote):
        return message.replica != leader.replica
    return leader.replica in forward_to(talkers(leader), message.replica, _says(message), leader.tree_above)


def _says(message: Status | Statuses | Vote | Votes) -> frozenset[ReplicaId]:
    """Return the replicas whose status or vote a message carries."""
    if isinstance(message, Statuses):
        return frozenset(status.replica for status in message.statuses)
    return voters_of(message.ballots) if isinstance(message, Votes) else frozenset({message.replica})


def only_stored(leader: replica.ReplicaState, message: Message) -> bool:
    """Return whether a node would only store a message, because another one is still missing.

    In a tree the node may also forward the message.
    """
    if isinstance(message, Vote | Votes):
        here = voters_of(leader.votes)
        fits = (message.generation, message.step) == (leader.generation, leader.step)
        fits = fits and leader.phase is not replica.ReplicaPhase.PROMISING
    elif isinstance(message, Status | Statuses):
        here = frozenset(status.replica for status in leader.statuses if status.generation >= leader.generation)
        fits = message.generation == leader.generation
        fits = fits and leader.phase in (replica.ReplicaPhase.PROMISING, replica.ReplicaPhase.EXCHANGING)
    else:
        return False
    if not fits or not _goes_to(message, leader):
        return False
    said, missing = _says(message), set(talkers(leader)) - here - {leader.replica}
    return not said.isdisjoint(missing) and not missing <= said
