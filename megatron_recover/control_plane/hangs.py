"""The driver of the machine that decides on hangs (`core/condemning.py`), in the coordinator.

It sends the questions and answers of the machine to the agents, and tells which replicas are at
work on all nodes: an agent at work reports them, and a replica that is accused of a hang is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_recover.control_plane.agents import Agents
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import AskPart, TellKnown
from megatron_recover.core import condemning


class Hangs:
    """Drives the machine for the nodes of one job. Everything runs in the loop's thread."""

    def __init__(self, agents: Agents, loop: Loop) -> None:
        self._agents, self._loop = agents, loop
        self._state = condemning.CondemningState({})

    def begin(self, hosts: Mapping[int, tuple[int, ...]]) -> None:
        """Begin to judge. `hosts`: replica -> numbers of the nodes that have ranks of it."""
        self._state = condemning.CondemningState({replica: frozenset(nodes) for replica, nodes in hosts.items()})

    def host(self, replica: int, nodes: Iterable[int]) -> None:
        """Note the nodes that have ranks of a newcomer."""
        self.judge(condemning.Hosted(replica, frozenset(nodes)))

    def judge(self, event: condemning.Input) -> None:
        """Feed the machine, and send what it asks and tells."""
        self._state, effects = condemning.step(self._state, event)
        links = self._agents.links() if effects else {}
        for effect in effects:
            if (link := links.get(effect.node)) is None:
                continue  # its replicas are lost with it
            match effect:
                case condemning.Ask(_, question, replica):
                    self._loop.send(link, AskPart(question, replica))
                case condemning.Tell(_, report, known):
                    self._loop.send(link, TellKnown(report, known))

    def at_work(self, silent: frozenset[int]) -> set[int]:
        """Return the replicas at work on the living nodes, but none that a node accuses.

        Those of a node in `silent` are left out: nobody knows what they do now.
        """
        at_work = {replica for agent in self._agents.living if agent.number not in silent for replica in agent.at_work}
        return at_work - condemning.accused(self._state)
