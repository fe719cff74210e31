"""The coordinator's part of nodes that come after the start of a job: they become spares.

Such a node idles until training has begun. Then it gets `Met` with a number that no node has had.
It describes the job, imports and makes its dry run like any other node, and sends `NodeReady`. From
then on its slots are spares, on which newcomers may be formed (`healing.py`).

No other node waits for it or is told of it, except node 0 by the state of the job: an agent talks
to the coordinator alone, and the members get the addresses of a newcomer with its generation.

A node that was lost and is started again is such a node, too. If its launcher lives, as after a
cut, the launcher ends that run once every rank of the job has ended on its node, and comes anew
(`StartAnew`). So no number is used twice, and nothing of the former run is left in the new one.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_recover import trace
from megatron_recover.control_plane.agents import Agent, Agents
from megatron_recover.control_plane.healing import Healing
from megatron_recover.control_plane.job_start import JobStart
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import JobEnds, Launch, NodeReady, Roster, Say, StartAnew, TraceDone
from megatron_recover.control_plane.node_watch import NodeWatch
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.trace.merging import FOLDER


class LateNodes:
    """Takes late nodes into one job. Everything runs in the loop's thread."""

    def __init__(
        self, start: JobStart, agents: Agents, healing: Healing, *, loop: Loop, watch: NodeWatch,
        record: Callable[[trace.Event], None], say: Callable[[Say], None],
    ) -> None:  # fmt: skip
        """`say(line)` sends a line for people to node 0."""
        self._start, self._agents, self._healing = start, agents, healing
        self._loop, self._watch, self._record, self._say = loop, watch, record, say
        self._roster: Roster | None = None
        """The newest roster; None before generation 1."""

    def announced(self, roster: Roster) -> None:
        """Note a generation. From the first one on, late nodes are taken."""
        self._roster = roster
        self.take()

    def take(self) -> None:
        """Have all nodes that idle prepare themselves, and turn away those that do not fit."""
        for agent in self._agents.idle if self._roster is not None else ():
            if agent.is_lost or agent.hello.mistake:
                continue  # it leaves
            if mistake := self._start.mistake_of_late(agent.hello):
                self._turn_away(agent, mistake)
                continue
            agent.is_launched = True  # nobody waits until it has started ranks
            self._start.meet_late(agent)
            self._watch.watch(agent.number, agent.hello.name, is_unused=True)

    def is_ready(self, agent: Agent, ready: NodeReady) -> None:
        """Use the slots of a late node that is ready; a message of any other node is ignored."""
        if agent.is_spare or not agent.is_late:
            return
        if ready.settings != self._start.settings or ready.healing != self._healing.settings:
            self._turn_away(agent, "its flags make another job than those of node 0; use the same")
            return
        agent.is_spare = True
        number, name, slots = agent.number, agent.hello.name, agent.hello.slots
        self._record(trace.NodeJoined(node=number, name=name, slots=slots))
        self._loop.send(agent.link, Launch(()))
        if self._roster is not None:
            self._loop.send(agent.link, self._roster)
        self._healing.node_joined(number, slots)

    def start_anew(self, agent: Agent) -> None:
        """Have a node that was lost, and has no rank of the job any more, meet the others anew."""
        if agent.number in self._healing.drained:
            return  # it was given back, and would become a spare
        if agent.number > 0 and not agent.starts_anew:  # the launcher of node 0 keeps the trace of the job
            agent.starts_anew = True
            number, name = agent.number, agent.hello.name
            self._say(
                Say(
                    f"node {number} ({name}) meets the others anew, under a new number; where --run-dir is not shared, the "
                    f"trace of node {number} stays on {name}, in {FOLDER}/{number} of that folder: copy it from there"
                )
            )
            self._loop.send(agent.link, StartAnew())
            self._loop.send(agent.link, TraceDone(agent.number))  # node 0 gathers only at the end of the job

    def _turn_away(self, agent: Agent, why: str) -> None:
        """End the run on a node that cannot take part. The job goes on."""
        agent.is_lost = True
        if agent.number >= 0:
            self._start.late_lost(agent.hello.name, was_used=False)
        self._watch.forget(agent.number)
        name = agent.hello.name
        self._loop.send(agent.link, JobEnds(ExitCode.BAD_INPUT, f"{name} cannot join the job, which goes on: {why}"))
        self._say(Say(f"node {name} has come late and is turned away: {why}"))
