"""The start of a job in the coordinator: nodes meet, examine each other, and say what they have.

The driver of the nodes takes over once all are ready (`control_plane/nodes_driver.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import msgspec

from megatron_recover.control_plane.agents import Agent, Agents
from megatron_recover.control_plane.fitting import mistake_of, mistake_of_late, numbered
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    Idle,
    Launch,
    Met,
    NodeHello,
    NodePlace,
    NodeReady,
    NodeShares,
    NodesShared,
)
from megatron_recover.control_plane.node_watch import NodeWatch
from megatron_recover.control_plane.wire import encode
from megatron_recover.core.coordinator_state import MembershipSettings
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted, verb
from megatron_recover.deadlines import Deadlines

_EARLIER = 0.95
"""Part of `deadline_s` after which the coordinator names the nodes for which all others wait."""
MOST_WASTED = 32
"""Number of times in a row that a host may come late and be lost before it is of use."""


class NodesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a coordinator knows from its start."""

    owner: int
    """Identity of the agent of the coordinator's own node."""
    least: int
    most: int
    """Number of nodes with which the job starts."""
    join_s: float
    """Longest wait for `least` nodes. Then the job ends."""
    last_call_s: float
    """Time for which more nodes are awaited once `least` are there."""
    node_silence_s: float
    """Silence after which a node is removed (`--node-timeout`)."""
    deadlines: Deadlines
    ignored: tuple[int, ...] = ()
    """Signals that the agents handle, and the coordinator ignores."""


class JobStart:
    """Starts one job. Everything runs in the loop's thread."""

    def __init__(
        self,
        settings: NodesSettings,
        agents: Agents,
        *,
        loop: Loop,
        watch: NodeWatch,
        end: Callable[[int, str], None],
        end_of_too_few: Callable[[str], None],
        refuse: Callable[[Agent, str], None],
        all_ready: Callable[[], None],
    ) -> None:
        """Wait for `settings.least` nodes from now on.

        - `end(exit_code, reason)` ends the job.
        - `end_of_too_few(reason)` ends it because fewer than `settings.least` nodes came.
        - `refuse(agent, mistake)` ends it because of a node that does not fit.
        - `all_ready()` is called once, when every node that is used has sent `NodeReady`.
        """
        self._settings, self._agents, self._loop, self._watch = settings, agents, loop, watch
        self._end, self._refuse, self._all_ready = end, refuse, all_ready
        self._end_of_too_few = end_of_too_few
        self.nodes: tuple[NodePlace, ...] = ()
        """The nodes that have a number, by number; empty until they have met."""
        self._num_met = 0
        """Number of the nodes that met at the start, the first of `nodes`."""
        self._first: NodeHello | None = None
        """The hello of node 0, which may be gone later; None until the nodes have met."""
        self._settings_of_job: MembershipSettings | None = None
        """The settings on which all nodes agree; None until they are ready."""
        self._job = secrets.randbits(63)
        """A random number that tells this job from other starts at the same endpoint."""
        self._wasted: dict[str, int] = {}
        """Name of a host -> number of times in a row that it came late and was lost without use."""
        self._is_over = False
        self._are_all_ready = False
        self._is_last_call_over = False
        loop.after(settings.join_s, self._met_too_late)

    def stop(self) -> None:
        """Wait for nobody any more: the job is over."""
        self._is_over = True

    # --- Meeting ----------------------------------------------------------------------------------

    def meet(self, newcomer: Agent) -> None:
        """Compare a newcomer with the others, and start the job with the last one."""
        others = [agent.hello for agent in self._agents if agent is not newcomer]
        if mistake := mistake_of(newcomer.hello, others, owner=self._settings.owner):
            self._refuse(newcomer, mistake)
            return
        number = len(self._agents)
        if number >= self._settings.most or (self._is_last_call_over and number >= self._settings.least):
            self._meet_if_owner_is_here()
        elif number == self._settings.least:
            self._loop.after(self._settings.last_call_s, self._last_call)

    def is_of_other_job(self, hello: NodeHello) -> bool:
        """Return whether an agent belongs to another start, whose coordinator it has lost."""
        return hello.job not in (0, self._job)

    def have_idle(self, agent: Agent) -> None:
        """Tell an agent that the job does not use its node, as far as is known by now."""
        self._loop.send(agent.link, Idle(f"the job runs on {counted(self._num_met, 'node')} already", self._job))

    def _last_call(self) -> None:
        if len(self._agents) >= self._settings.least:
            self._is_last_call_over = True  # the owner may come later than others
            self._meet_if_owner_is_here()

    def _met_too_late(self) -> None:
        if self._is_over or self.nodes:
            return
        here = ", ".join(agent.hello.name for agent in self._agents)
        were = verb(len(self._agents), "was", "were")
        self._end_of_too_few(
            f"{len(self._agents)} of {self._settings.least} nodes {were} there after {self._settings.join_s:g} s ({here})"
        )  # fmt: skip

    def _meet_if_owner_is_here(self) -> None:
        """Give each node its number, and tell all agents. Nodes beyond the most idle."""
        owner = self._agents.owner
        if self._is_over or self.nodes or owner is None:
            return
        order = numbered([each.hello for each in self._agents], owner=self._settings.owner, most=self._settings.most)
        self._agents.arrange(order)
        for agent in self._agents.used:
            self._watch.watch(agent.number, agent.hello.name)
        self.nodes = tuple(NodePlace(each.number, each.hello.name, each.hello.slots) for each in self._agents.used)
        self._num_met, self._first = len(self.nodes), owner.hello
        for agent in self._agents.used:
            self._send_met(agent, owner.hello)
        for agent in self._agents.idle:
            self.have_idle(agent)

    def _send_met(self, agent: Agent, first: NodeHello) -> None:
        num_late = len(self.nodes) - self._num_met
        self._loop.send(agent.link, Met(self.nodes, agent.number, first.run_dir, first.run_id, self._job, num_late))

    # --- After the start --------------------------------------------------------------------------

    def mistake_of_late(self, hello: NodeHello) -> str:
        """Return why a node that comes after the start cannot be a spare; empty if it can."""
        assert self._first is not None
        mistake = mistake_of_late(hello, self._first, [node.slots for node in self.nodes[: self._num_met]])
        if not mistake and (times := self._wasted.get(hello.name, 0)) >= MOST_WASTED:
            return (
                f"{hello.name} has come {times} times and was lost each time before it was of use, and is not taken any more; "
                "look there, and start no more launchers there before the next start of the job"
            )
        return mistake

    def late_lost(self, name: str, *, was_used: bool) -> None:
        """Note that a node that came after the start is lost. `was_used`: it has had ranks.

        Each time it comes back it gets another number, which all later nodes are told of.
        """
        self._wasted[name] = 0 if was_used else self._wasted.get(name, 0) + 1

    def meet_late(self, agent: Agent) -> None:
        """Give a node that comes after the start a number that no node has had, and send `Met`."""
        assert self._first is not None
        agent.number, agent.is_late = len(self.nodes), True
        self.nodes = (*self.nodes, NodePlace(agent.number, agent.hello.name, agent.hello.slots))
        self._send_met(agent, self._first)

    # --- Preparing --------------------------------------------------------------------------------

    def share(self, agent: Agent, newest: NodeShares) -> None:
        """End a round of the examination once all nodes have sent theirs."""
        agent.shared = newest
        used = self._agents.used
        sent = [(each, each.shared) for each in used if each.shared is not None and each.shared.round == newest.round]
        if len(sent) == 1:
            self._expect(
                "end its part of the examination", lambda each: each.shared is None or each.shared.round < newest.round
            )  # fmt: skip
        if len(sent) < len(used):
            return
        data = {each.number: shared.data for each, shared in sent}
        bodies: dict[tuple[int, ...], bytes] = {}
        for each, shared in sent:
            if shared.wanted not in bodies:
                wanted = tuple(data[number] for number in shared.wanted if number in data)
                bodies[shared.wanted] = encode(NodesShared(newest.round, wanted))
            self._loop.put(each.link, bodies[shared.wanted])

    def is_ready(self, agent: Agent, ready: NodeReady) -> None:
        """Compare the jobs that all nodes have described once the last is ready."""
        agent.ready = ready
        used = self._agents.used
        described = [each.ready for each in used if each.ready is not None]
        if len(described) == 1:
            self._expect("get ready", lambda each: each.ready is None)
        if len(described) < len(used):
            return
        for each in used[1:]:
            if each.ready is not None and each.ready.settings != described[0].settings:
                self._refuse(each, "its flags make another job than those of node 0; use the same")
                return
        self._settings_of_job = described[0].settings
        self._are_all_ready = True
        self._all_ready()

    def _expect(self, deed: str, is_missing: Callable[[Agent], bool]) -> None:
        """End the job if a node has not done what another one has, and name it.

        The agents give up shortly after, and do not know for which node they have waited. Once all
        were ready nobody is waited for: a node that is removed and comes back has sent nothing over
        its new link.
        """
        limit_s = _EARLIER * self._settings.deadlines.deadline_s

        def look() -> None:
            late = ", ".join(each.hello.name for each in self._agents.used if is_missing(each))
            if late and not (self._is_over or self._are_all_ready):
                self._end(ExitCode.FAILED, f"{late} did not {deed} within {limit_s:.0f} s after another node; look there")

        self._loop.after(limit_s, look)

    # --- When all are ready -----------------------------------------------------------------------

    @property
    def settings(self) -> MembershipSettings:
        """Return the settings of the job, on which all nodes agree, also when they are gone."""
        assert self._settings_of_job is not None
        return self._settings_of_job

    @property
    def replicas(self) -> Mapping[int, tuple[int, ...]]:
        """Return the replicas that have ranks on each node, by its number."""
        return {each.number: each.ready.replicas for each in self._agents.used if each.ready is not None}

    @property
    def hosts(self) -> Mapping[int, tuple[int, ...]]:
        """Return the numbers of the nodes that have ranks of each replica, by the replica."""
        hosts: dict[int, list[int]] = {replica: [] for replica in range(self.settings.num_replicas)}
        for number, replicas in self.replicas.items():
            for replica in replicas:
                hosts[replica].append(number)
        return {replica: tuple(numbers) for replica, numbers in hosts.items()}

    def launch(self) -> None:
        """Have all nodes start their ranks."""
        leaders = dict(leader for one in self._ready for leader in one.leaders)
        stores = dict(store for one in self._ready for store in one.stores)
        replicas = self.replicas
        for each in self._agents.used:  # all addresses to all nodes would be gigabytes in a job of 12,500 nodes
            mine = replicas[each.number]
            own = (tuple((replica, known[replica]) for replica in mine if replica in known) for known in (leaders, stores))
            self._loop.send(each.link, Launch(*own))

    @property
    def _ready(self) -> list[NodeReady]:
        return [each.ready for each in self._agents.used if each.ready is not None]
