"""The agents of a job's nodes, as the coordinator knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_recover.control_plane.node_messages import NodeHello, NodeReady, NodeShares
from megatron_recover.control_plane.wire import Link


class Agent:
    """The state of one agent."""

    def __init__(self, link: Link, hello: NodeHello) -> None:
        self.link, self.hello = link, hello
        self.number = -1
        """Number of the node; -1: the job does not use it."""
        self.shared: NodeShares | None = None
        """The findings that the node has sent in the newest round of the examination."""
        self.ready: NodeReady | None = None
        self.is_launched = False
        self.is_lost = False
        """True once the node's replicas were removed, or it was turned away. The agent may live."""
        self.is_late = False
        """True if the node got its number after the start of the job."""
        self.is_spare = False
        """True once newcomers may be formed on such a node."""
        self.starts_anew = False
        """True once a node that was lost was told to meet the others anew."""
        self.at_work: tuple[int, ...] = ()


class Agents:
    """The agents that are there: those of nodes that the job uses, and idle ones."""

    def __init__(self, owner: int) -> None:
        """`owner`: identity of the agent of the coordinator's own node."""
        self._owner = owner
        self._all: list[Agent] = []

    def __iter__(self) -> Iterator[Agent]:
        return iter(tuple(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, agent: Agent) -> None:
        """Add an agent."""
        self._all.append(agent)

    def remove(self, agent: Agent) -> None:
        """Remove an agent, which is one of these."""
        self._all.remove(agent)

    @property
    def owner(self) -> Agent | None:
        """Return the agent of the coordinator's own node, if it is there."""
        return next((each for each in self._all if each.hello.identity == self._owner), None)

    def arrange(self, order: Sequence[int]) -> None:
        """Give the agents with these identities their numbers, in this order."""
        by_identity = {each.hello.identity: each for each in self._all}
        used = [by_identity.pop(identity) for identity in order]
        for number, agent in enumerate(used):
            agent.number = number
        self._all = [*used, *by_identity.values()]

    @property
    def used(self) -> list[Agent]:
        """Return the agents of nodes that the job uses, in the order of the nodes as they met."""
        return [each for each in self._all if each.number >= 0]

    @property
    def idle(self) -> list[Agent]:
        """Return the agents of nodes that the job does not use."""
        return [each for each in self._all if each.number < 0]

    @property
    def living(self) -> list[Agent]:
        """Return those of `used` whose nodes are not lost."""
        return [each for each in self.used if not each.is_lost]

    def numbers_of(self, name: str) -> frozenset[int]:
        """Return the numbers of the nodes of this name that are there, also of lost ones."""
        return frozenset(each.number for each in self.used if each.hello.name == name)

    def links(self) -> Mapping[int, Link]:
        """Return the links of `used`, by the number of the node."""
        return {each.number: each.link for each in self.used}
