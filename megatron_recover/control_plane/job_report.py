"""The coordinator's report of the state of the job to node 0, which writes it down.

The report has the generation, its members, the number of committed steps, and the state of all
nodes, also of those that were lost. It is sent only if it has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron_recover.control_plane.agents import Agent, Agents
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import JobState, NodeState


class JobReport:
    """Reports the state of one job. Everything runs in the loop's thread."""

    def __init__(self, agents: Agents, loop: Loop) -> None:
        self._agents, self._loop = agents, loop
        self._lost: dict[int, NodeState] = {}
        self._told: JobState | None = None

    def node_lost(self, number: int, name: str, replicas: tuple[int, ...]) -> None:
        """Note that a node was lost, with all replicas that had ranks on it."""
        self._lost[number] = NodeState(number, name, "lost", replicas)

    def send(
        self, progress: tuple[int, tuple[int, ...], int], replicas: Mapping[int, tuple[int, ...]], silent: frozenset[int],
        wanted: int | None = None, drained: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Send node 0 the state of the job, if node 0 is there and the state has changed.

        - `progress`: as in `CoordinatorDriver.progress`.
        - `replicas`: number of a node -> the replicas that have ranks there.
        - `silent`: numbers of the nodes that are silent.
        - `wanted`: number of replicas that the job wants.
        - `drained`: numbers of the nodes that were given back.
        """
        if (owner := self._agents.owner) is None:
            return
        state = JobState(*progress, self._states(frozenset(progress[1]), replicas, silent, drained), wanted)
        if state != self._told:
            self._told = state
            self._loop.send(owner.link, state)

    def _states(
        self, roster: frozenset[int], replicas: Mapping[int, tuple[int, ...]], silent: frozenset[int], drained: frozenset[int]
    ) -> tuple[NodeState, ...]:
        """Return the state of all nodes that there are or have been, in order; idle ones come last.

        A node that is not lost has the members of the roster only: the others of it are gone.
        """
        states, idle = dict(self._lost), list[NodeState]()
        for agent in self._agents:
            number, name = agent.number, agent.hello.name
            if number not in states and not agent.is_lost:  # else it was turned away
                members = tuple(replica for replica in replicas.get(number, ()) if replica in roster)
                is_drained = number in drained and not members
                word = _word(agent, is_silent=number in silent, has_members=bool(members), is_drained=is_drained)
                state = NodeState(number, name, word, members)
                if number < 0:  # several nodes may have this number
                    idle.append(state)
                else:
                    states[number] = state
        return (*(states[number] for number in sorted(states)), *idle)


def _word(
    agent: Agent, *, is_silent: bool, has_members: bool, is_drained: bool
) -> Literal["here", "silent", "spare", "idle", "drained"]:
    """Return the word for the state of a node that is not lost."""
    if agent.number < 0:
        return "idle"
    if is_silent:
        return "silent"
    if is_drained:
        return "drained"
    if has_members or not agent.is_late:
        return "here"
    return "spare" if agent.is_spare else "idle"
