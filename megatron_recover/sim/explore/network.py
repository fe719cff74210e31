"""A state of the whole job in small numbers, and what of its messages can still matter to whom."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatron_recover.core import replica
from megatron_recover.core.tree import told
from megatron_recover.core.values import NewGeneration, ReplicaId, Status, Statuses, Vote, Votes
from megatron_recover.core.vote import voters_of
from megatron_recover.sim.explore.node import Copy, Message, Node, Part


class Faults(NamedTuple):
    """How many faults of each kind may still come."""

    crashes: int
    suspicions: int
    alarms: int
    drifts: int
    state_drifts: int
    saves: int
    """That may still begin."""
    late: int = 0
    """Follow timers that may still run out."""
    stops: int = 0
    """Of the coordinator."""
    miscounts: int = 0
    """Replicas that may still miscount."""
    readers: int = 0
    """Replicas that may still read."""
    waits: int = 0
    """How often members may still give up waiting for them."""


class World(NamedTuple):
    """A state of the whole job; components are numbered values, so that it is small and quick to compare."""

    coordinator: int
    nodes: tuple[int, ...]
    """0: dead."""
    messages: int
    """Bit set of message numbers."""
    history: int
    faults: Faults
    links: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """(source or -1 for the coordinator, destination, messages on the way)."""
    grace: str = ""
    """The timer of a request that has not run out, where operations take time to fail (`Scenario.broken`)."""
    stopped: bool = False
    """The coordinator takes no input."""
    inbox: tuple[int, ...] = ()
    """Numbers of the inputs that reached the coordinator since it was stopped, in their order."""
    reading: tuple[ReplicaId, ...] = ()
    """Members whose training thread does nothing but read: they have not arrived at the sum. Who is fenced may go on."""
    overdue: tuple[ReplicaId, ...] | None = None
    """Who has read since the coordinator's deadline passed; None before, and when a step was committed or a replica lost."""
    late_saves: tuple[tuple[ReplicaId, int], ...] = ()
    """Who saves for longer than it may, and the generation in which that time passed; nobody after a step or a loss."""
    blamed: tuple[ReplicaId, ...] = ()
    """Replicas that were fenced for what members reported of each other, though they were not overdue; in that order."""


class Table[T]:
    """Numbers distinct values from 1."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._values: list[T] = []
        self._encode = msgspec.msgpack.Encoder(order="deterministic").encode

    def number(self, value: T) -> int:
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
    """The numbers in a bit set."""
    numbers = []
    while bits:
        low = bits & -bits
        bits ^= low
        numbers.append(low.bit_length() - 1)
    return numbers


def received(world: World, number: ReplicaId, message: int) -> World:
    """The world without the first message of the link on which `message` came to a replica."""
    links = list(world.links)
    at = next(i for i, (_, to, queue) in enumerate(links) if to == number and queue[0] == message)
    source, to, queue = links[at]
    links[at : at + 1] = [(source, to, queue[1:])] if len(queue) > 1 else []
    return world._replace(links=tuple(links))


def address(message: Part | Copy) -> tuple[object, ...]:
    version = message.version if isinstance(message, Copy) else 0
    return message.replica, message.rank, message.generation, message.step, message.bucket, version


def needed(message: Message, node: Node, member: bool) -> bool:
    """Whether a message can still have an effect on a node. `member`: of the newest roster, so that it may enter newer ones."""
    leader = node.leader
    newer = message.generation > leader.generation
    if isinstance(message, NewGeneration):
        return newer and member
    if isinstance(message, Part | Copy):
        if message.step < leader.step or message.rank >= len(node.ranks):
            return False
        return newer and member or node.ranks[message.rank].machine.promised <= message.generation <= leader.generation
    if newer or message.generation < leader.generation or not _goes_to(message, leader):
        return newer and member
    if isinstance(message, Vote | Votes):
        return message.step >= leader.step
    return leader.phase in (replica.Phase.JOINING, replica.Phase.PROMISING, replica.Phase.EXCHANGING)


def reaches(message: Message, leader: replica.ReplicaState) -> bool:
    """Whether a message can come to a replica at all: what is handed on in a tree goes to neighbours only."""
    if not isinstance(message, Statuses | Votes):
        return True
    return message.generation == leader.generation and _goes_to(message, leader)


def _goes_to(message: Status | Statuses | Vote | Votes, leader: replica.ReplicaState) -> bool:
    """Whether a message of its generation is meant for a replica: one that is handed on goes to a neighbour in the tree."""
    if isinstance(message, Status | Vote):
        return message.replica != leader.replica
    return leader.replica in told(leader.roster, message.replica, _says(message), leader.tree_above)


def _says(message: Status | Statuses | Vote | Votes) -> frozenset[ReplicaId]:
    """Whose word a message carries."""
    if isinstance(message, Statuses):
        return frozenset(status.replica for status in message.statuses)
    return voters_of(message.ballots) if isinstance(message, Votes) else frozenset({message.replica})


def only_stored(leader: replica.ReplicaState, message: Message) -> bool:
    """Whether a node would do nothing with a message but keep it, and in a tree hand it on: another one is still missing."""
    if isinstance(message, Vote | Votes):
        here = voters_of(leader.votes)
        fits = (message.generation, message.step) == (leader.generation, leader.step)
        fits = fits and leader.phase is not replica.Phase.PROMISING
    elif isinstance(message, Status | Statuses):
        here = frozenset(status.replica for status in leader.statuses if status.generation >= leader.generation)
        fits = message.generation == leader.generation
        fits = fits and leader.phase in (replica.Phase.PROMISING, replica.Phase.EXCHANGING)
    else:
        return False
    if not fits or not _goes_to(message, leader):
        return False
    said, missing = _says(message), set(leader.roster) - here - {leader.replica}
    return not said.isdisjoint(missing) and not missing <= said
