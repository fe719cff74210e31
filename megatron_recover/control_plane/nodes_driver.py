"""The driver of a job's nodes: when ranks are started, what agents report, which nodes are lost.

It runs in the coordinator's process beside `CoordinatorDriver`, on the one port of the coordinator:
agents and leaders connect there. The stages of a job:

1. *Meeting* (`job_start.py`). Agents send `NodeHello` until enough nodes are there. All get `Met`.
2. *Preparing* (`job_start.py`). The nodes examine each other (`NodeShares`). Each node imports,
   makes its dry run and sends `NodeReady`. All get `Launch`.
3. *Running.* Agents report what happens to their ranks, carry out fences, and form newcomers
   (`healing.py`). Nodes that come now become spares (`late_nodes.py`).
4. *Over.* All agents get `JobEnds`, and hang up.

A node that cannot take part (`NodeFailed`) ends the job on all nodes before it runs. Later its
replicas are lost, all of them at once: the loss of a node is one event, and makes one generation.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import msgspec

from megatron_recover import trace
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.control_plane.agents import Agent, Agents
from megatron_recover.control_plane.coordinator_driver import CoordinatorDriver
from megatron_recover.control_plane.gate import Gate
from megatron_recover.control_plane.hangs import Hangs
from megatron_recover.control_plane.healing import Healing, seats_of, spares_of
from megatron_recover.control_plane.job_report import JobReport
from megatron_recover.control_plane.job_start import JobStart, NodesSettings
from megatron_recover.control_plane.late_nodes import LateNodes
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    DismissReplica,
    DrainAsked,
    EndAsked,
    FenceDone,
    FenceReplica,
    GivesUp,
    JobEnds,
    KillAsked,
    NodeAtWork,
    NodeBeat,
    NodeFailed,
    NodeHello,
    NodeLaunched,
    NodePart,
    NodeReady,
    NodeShares,
    NodeSuspects,
    NotAdmitted,
    OtherJob,
    ReplicaGone,
    Roster,
    Say,
    ScaleAsked,
    SlotsReady,
    SlotsUnfit,
    TraceDone,
    TraceEnds,
    TraceNext,
    TraceOffer,
    TracePart,
)
from megatron_recover.control_plane.node_watch import NodeWatch
from megatron_recover.control_plane.scaling import Scaling
from megatron_recover.control_plane.traces import Traces
from megatron_recover.control_plane.wire import Link, Message, encode
from megatron_recover.core import condemning
from megatron_recover.core.coordinator_state import Setting
from megatron_recover.core.exit_code import GOES_ON_ELSEWHERE, ExitCode
from megatron_recover.core.membership_messages import Loss, NewGeneration
from megatron_recover.trace.node_clock import NodeClock

TELL_S = 5
"""Seconds for which nodes that still come are told that a job was refused while nodes met."""


class Stage(enum.Enum):
    """The stage of the job."""

    MEETING = "meeting"
    PREPARING = "preparing"
    RUNNING = "running"
    OVER = "over"


class NodesDriver:
    """Drives the nodes of one job. Everything runs in the loop's thread."""

    def __init__(
        self,
        settings: NodesSettings,
        listener: socket.socket,
        *,
        key: bytes,
        clock: NodeClock,
        loop: Loop,
        record: Callable[[trace.Event], None],
        also: Sequence[socket.socket] = (),
    ) -> None:
        """Accept agents and leaders at `listener`, and at those of `also` (`Admission`).

        `key` is the job's; `clock` is that of this node.
        """
        self._settings, self._loop, self._record = settings, loop, record
        self._deadlines = settings.deadlines
        self._agents = Agents(settings.owner)
        self._hosts: dict[int, tuple[int, ...]] = {}
        """Replica -> numbers of the nodes that have ranks of it."""
        self._replicas: dict[int, tuple[int, ...]] = {}
        """Number of a node -> the replicas that have ranks there."""
        self._healing: Healing | None = None
        """None: lost replicas are not replaced, or ranks are not started yet."""
        self._late: LateNodes | None = None
        """None in the same cases: nodes that come after the start idle."""
        self._scaling: Scaling | None = None
        """None: ranks are not started yet."""
        self._hangs, self._report = Hangs(self._agents, loop), JobReport(self._agents, loop)
        self._fenced: dict[int, set[int]] = {}
        """Replica -> numbers of the nodes that have confirmed its fence."""
        self._membership: CoordinatorDriver | None = None
        self._are_launched = False
        self.was_joined = False
        """True once the agent of the coordinator's own node has introduced itself."""
        self._seen: set[int] = set()
        """Identities of all agents that have introduced themselves."""
        self._tells_until = 0.0
        """Time of the loop's clock until which nodes that are missing are told the end."""
        self._end: JobEnds | None = None
        self._has_given_up = False
        self._held: dict[int, tuple[Link, NodeHello]] = {}
        """Identity of an agent that is back before the reset of its link was judged -> new link."""
        self._removed: dict[int, int] = {}
        """Identity of the agent of each removed node -> number of the node."""
        self._due: set[Callable[[], None]] = set()
        """Calls that `_soon` is to make."""
        self._traces = Traces(self._agents.links, loop)
        self._gate = Gate(
            loop, listener, key, Role.COORDINATOR, self._admits, self._accept, clock=clock,
            expects=self._num_expected, also=also,
            report=lambda name, number: record(
                trace.Strangers(replica=-1, rank=-1, listener=name, num_connections=number)
            ),
        )  # fmt: skip
        self._watch = NodeWatch(
            loop=loop, deadlines=self._deadlines, limit_s=settings.node_silence_s, record=record,
            remove=self._remove, changed=lambda: self._soon(self._tell_silence), cut_off=self._cut_off, give_up=self._give_up,
        )  # fmt: skip
        self._start = JobStart(
            settings, self._agents, loop=loop, watch=self._watch, end=self.end, all_ready=self._run,
            refuse=lambda agent, mistake: self._end_everywhere(ExitCode.BAD_INPUT, agent, mistake),
            end_of_too_few=lambda reason: self.end(ExitCode.TOO_FEW_REPLICAS, reason, too_few=True),
        )  # fmt: skip
        loop.after(self._deadlines.beat_s, self._tell_state)

    @property
    def is_done(self) -> bool:
        """Return whether nobody needs the coordinator any more.

        The link to a node that was lost or is silent may never end. Once the job is over, the node
        is not awaited: the kernel delivers the last message if the node comes back.
        """
        if self._loop.time() < self._tells_until and len(self._seen) < self._settings.most:
            return False
        if self._has_given_up or not self.was_joined:
            return self._has_given_up
        silent = self._watch.silent
        return all(self.has_ended and self._is_beyond_reach(each, silent) for each in self._agents)

    def _is_beyond_reach(self, agent: Agent, silent: frozenset[int]) -> bool:
        if not self._loop.has(agent.link):  # it was reset
            return True
        return (agent.is_lost or agent.number in silent) and not agent.link.wants_write

    @property
    def has_ended(self) -> bool:
        """Return whether the agents were told that the job is over."""
        return self._end is not None

    @property
    def _stage(self) -> Stage:
        if self._end is not None:
            return Stage.OVER
        if self._membership is not None:
            return Stage.RUNNING
        return Stage.PREPARING if self._start.nodes else Stage.MEETING

    def close(self) -> None:
        """Stop listening. The links belong to the loop."""
        self._gate.close()

    def end(self, exit_code: int, reason: str, *, at_once: bool = False, too_few: bool = False) -> None:
        """Send `JobEnds` to all agents: the job is over. Only the first call has an effect."""
        if self.has_ended:
            return
        if self._stage is Stage.MEETING and exit_code == ExitCode.BAD_INPUT:
            self._tells_until = self._loop.time() + TELL_S
            self._loop.after(TELL_S, lambda: None)  # `is_done` changes then
        self._send_state()  # the last one
        self._end = JobEnds(exit_code, reason, at_once, too_few)
        self._start.stop()
        self._watch.stop()
        self._send_to(self._agents, self._end)

    # --- Connections ------------------------------------------------------------------------------

    def _num_expected(self) -> int:
        """Return how many agents or leaders are needed and may connect at the same time.

        Before the first generation at least one peer is expected.
        """
        if self._membership is not None:
            return self._membership.num_expected
        return max(1, self._settings.most - len(self._agents))

    def _admits(self, peer: Party, wanted: Party) -> bool:
        is_agent = peer == Party(Role.AGENT)
        is_leader = self._membership is not None and self._membership.admits(peer)
        return (is_agent or is_leader) and wanted == Party(Role.COORDINATOR)

    def _accept(self, link: Link, peer: Party) -> None:
        if peer.role is Role.LEADER:
            assert self._membership is not None
            self._membership.accept(link, peer)
            return
        self._loop.watch(link, self._introduced, lambda link, why: None)

    def _introduced(self, link: Link, message: Message) -> None:
        if not isinstance(message, NodeHello):
            self._loop.drop(link)
            return
        if self._start.is_of_other_job(message):
            self._answer_only(link, OtherJob())
            return
        for old in [each for each in self._agents if each.hello.identity == message.identity]:
            self._loop.drop(old.link)
            if self._end is not None:  # it may still have to hand over its trace
                old.link = link
                self._serve(old)
                self._loop.send(link, self._end)
                return
            self._link_ended(old, "its connection broke")  # only the agent has seen that
            if old in self._agents:
                self._hold(link, message)
                return
        agent = Agent(link, message)
        if (before := self._removed.get(message.identity)) is not None:
            self._returns(agent, before)
            return
        if self._end is not None and self._start.nodes and not message.job:  # it had no part, and may be of the next start
            why = f"the job at this endpoint has just ended ({self._end.reason}); start this node again"
            self._answer_only(link, JobEnds(ExitCode.TOO_FEW_REPLICAS, why))
            return
        self._add(agent)
        self._seen.add(message.identity)
        self.was_joined = self.was_joined or message.identity == self._settings.owner
        self._loop.send(link, NodeBeat())
        if self._stage is Stage.MEETING:
            self._start.meet(agent)
        elif self._end is not None:
            self._loop.send(link, self._end)
        else:
            self._start.have_idle(agent)
            if self._late is not None:
                self._late.take()

    def _answer_only(self, link: Link, answer: Message) -> None:
        """Answer an agent that has no part in this job, and wait for nothing from it."""
        self._loop.watch(link, lambda link, message: None, lambda link, why: None)
        self._loop.send(link, answer)

    def _add(self, agent: Agent) -> None:
        self._agents.add(agent)
        self._serve(agent)

    def _serve(self, agent: Agent) -> None:
        """Serve the link of an agent.

        Its end counts after what has come over other links by then: this process may have been
        stopped until all replicas had finished, and the agents had left.
        """

        def ended(link: Link, why: str) -> None:
            self._loop.post(lambda: self._link_ended(agent, why) if agent.link is link else None)

        self._loop.watch(agent.link, lambda link, message: self._from_agent(agent, message), ended)

    def _hold(self, link: Link, hello: NodeHello) -> None:
        """Keep the new link of an agent until the reset of the old one is judged."""

        def closed(link: Link, why: str) -> None:
            if self._held.get(hello.identity) == (link, hello):
                del self._held[hello.identity]

        self._held[hello.identity] = link, hello
        self._loop.watch(link, lambda link, message: None, closed)

    def _returns(self, agent: Agent, number: int) -> None:
        """Take the new link of an agent whose node was removed, and have it fence its ranks."""
        agent.number, agent.is_lost = number, True
        self._add(agent)
        for replica in self._replicas.get(number, ()):
            self._loop.send(agent.link, FenceReplica(replica))
        if self._end is not None:
            self._loop.send(agent.link, self._end)

    # --- Starting ranks ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Begin to watch over the members, and have all nodes start their ranks."""
        self._replicas, self._hosts = dict(self._start.replicas), dict(self._start.hosts)
        self._hangs.begin(self._hosts)
        is_of_several = len(self._start.nodes) > 1
        settings = msgspec.structs.replace(self._start.settings, nodes=tuple(self._replicas.values()) if is_of_several else ())
        self._membership = CoordinatorDriver(
            settings, loop=self._loop, deadlines=self._deadlines, record=self._record,
            timers_s={setting: getattr(self._deadlines, setting) for setting in get_args(Setting)},
            fence=self._fence, dismiss=self._dismiss, form=self._form, on_end=self.end,
            on_generation=self._announced, on_turned_away=self._turned_away,
        )  # fmt: skip
        if is_of_several:  # not before: node 0 records since it has met the others
            places = (trace.NodePlace(number=one.number, name=one.name, slots=one.slots) for one in self._start.nodes)
            self._record(trace.NodesMet(nodes=tuple(places)))
        self._scaling = Scaling(self._membership, self._say)
        self._begin_to_heal(self._membership, self._scaling)
        self._start.launch()

    def _say(self, line: Say) -> None:
        if (owner := self._agents.owner) is not None:
            self._loop.send(owner.link, line)

    def _begin_to_heal(self, membership: CoordinatorDriver, scaling: Scaling) -> None:
        """Replace lost replicas from now on, if the job wants that."""
        ready = {each.number: each.ready for each in self._agents.used if each.ready is not None}
        if (settings := ready[min(ready)].healing) is not None:
            self._healing = Healing(
                settings, seats_of(ready), spares_of(ready), membership=membership, loop=self._loop, deadlines=self._deadlines,
                send=lambda node, message: self._send_to((each for each in self._agents if each.number == node), message),
                hosts=self._hosts_newcomer, wanted=scaling.wanted,
            )  # fmt: skip
            self._late = LateNodes(
                self._start, self._agents, self._healing, loop=self._loop, watch=self._watch, record=self._record,
                say=self._say,
            )  # fmt: skip

    def _launched(self, agent: Agent) -> None:
        agent.is_launched = True
        self._look_at_launch()

    def _look_at_launch(self) -> None:
        """Let the waits for ranks begin once all nodes that live have started theirs."""
        if self._membership is None or self._are_launched or not all(each.is_launched for each in self._agents.living):
            return
        self._are_launched = True
        self._watch.allow()
        self._membership.launched()

    # --- Running ----------------------------------------------------------------------------------

    def _from_agent(self, agent: Agent, message: Message) -> None:
        self._watch.heard_of(agent.number)
        self._handle(agent, message)
        if agent.is_lost:
            self._look_at_lost(agent)

    def _look_at_lost(self, agent: Agent) -> None:
        """Have a node that was lost meet the others anew once all ranks have ended on it."""
        have_ended = all(agent.number in self._fenced.get(each, ()) for each in self._replicas.get(agent.number, ()))
        if self._late is not None and have_ended and agent.hello.identity in self._removed and not self.has_ended:
            self._late.start_anew(agent)

    def _handle(self, agent: Agent, message: Message) -> None:
        match message:
            case NodeBeat():
                self._loop.send(agent.link, NodeBeat())
            case FenceDone(replica) | ReplicaGone(Loss(replica=replica)) if replica not in self._hosts:
                self._drop(agent, f"sent a {type(message).__name__} of replica {replica}, which the job does not have")
            case FenceDone(replica):
                self._fence_done(agent, replica)
            case EndAsked(reason) | KillAsked(_, reason) if self._is_out_of_job(agent):
                self._loop.send(agent.link, JobEnds(ExitCode.INTERRUPTED, f"{reason}; {GOES_ON_ELSEWHERE}"))
                self._loop.send(agent.link, TraceDone(agent.number))  # node 0 gathers only at the end of the job
            case EndAsked(reason) if agent.number >= 0 or self._stage is Stage.MEETING:
                self._ask_exit(agent, reason)
            case DrainAsked() if self._scaling is not None and not self.has_ended:
                nodes = self._agents.numbers_of(message.node)
                hosted = {replica for number in nodes for replica in self._replicas.get(number, ())}
                self._loop.send(agent.link, self._scaling.drain(message, nodes, hosted, self._healing))
            case ScaleAsked() if self._scaling is not None and not self.has_ended:
                answer = self._scaling.scale(message, self._healing)
                self._send_state()  # first: a state with the answer then has the number that is wanted since
                self._loop.send(agent.link, answer)
            case KillAsked(exit_code, reason):
                self.end(exit_code, self._named(agent, reason), at_once=True)
            case NodeFailed(exit_code, reason):
                self._failed(agent, exit_code, reason)
            case TraceOffer() | TracePart() | TraceEnds() | TraceNext() | TraceDone():
                self._traces.carry(agent.number, message)
            case _ if agent.is_lost or self._stage is Stage.OVER or agent.number < 0:
                pass  # sent before the agent knew
            case NodeReady() if self._late is not None:
                self._late.is_ready(agent, message)
            case NodeShares() | NodeReady() if self._stage is not Stage.PREPARING:
                pass
            case NodeShares():
                self._start.share(agent, message)
            case NodeReady():
                self._start.is_ready(agent, message)
            case NodeLaunched():
                self._launched(agent)
            case ReplicaGone(loss, failing) if self._membership is not None:
                if self._healing is not None:
                    self._healing.broke(message)
                if failing is not None:
                    self._membership.failing(failing)
                self._membership.lost(loss)
            case SlotsReady() | SlotsUnfit() if self._healing is not None:
                self._healing.answered(agent.number, message)
            case NodeAtWork(replicas):
                agent.at_work = replicas
                self._soon(self._tell_work)
            case NodeSuspects(number, silent, accused):
                self._hangs.judge(condemning.Suspected(agent.number, number, frozenset(silent), frozenset(accused)))
                self._soon(self._tell_work)
            case NodePart(question, part):
                self._hangs.judge(condemning.Answered(agent.number, question, part))
            case _:
                self._drop(agent, f"sent a {type(message).__name__}")

    def _is_out_of_job(self, agent: Agent) -> bool:
        """Return whether the job goes on without a node: all its replicas are lost or have left.

        The node of the coordinator is in the job to the end.
        """
        if self._membership is None or not self._membership.generation or agent.number <= 0:
            return False
        return not set(self._replicas.get(agent.number, ())).intersection(self._membership.progress[1])

    def _soon(self, call: Callable[[], None]) -> None:
        """Make a call about all nodes once, after the messages that the loop serves in this turn.

        All nodes may send in one turn. A call for each message would take seconds with 1,000 nodes,
        and meanwhile all of them would seem silent.
        """

        def now() -> None:
            self._due.discard(call)
            call()

        if call not in self._due:
            self._due.add(call)
            self._loop.post(now)

    def _tell_work(self) -> None:
        """Feed the machine the replicas at work on all nodes, but none that a node accuses.

        Nobody knows what those of a silent node do now. Of several nodes a silent one is removed
        after its own time, so its replicas count as at work until then. The only node of a job is
        never removed, so they do not count there.
        """
        if self._membership is None:
            return
        silent = self._watch.silent
        at_work = self._hangs.at_work(silent)
        if len(self._start.nodes) > 1:
            at_work |= {replica for number in silent for replica in self._replicas.get(number, ())}
        self._membership.at_work(tuple(sorted(at_work)))

    def _tell_silence(self) -> None:
        """Feed the machines which nodes are heard at present."""
        self._hangs.judge(condemning.Deaf(frozenset(node.number for node in self._start.nodes) - self._watch.heard))
        self._tell_work()

    def _fence_done(self, agent: Agent, replica: int) -> None:
        """Confirm a fence once all nodes that have ranks of the replica have confirmed it."""
        self._fenced.setdefault(replica, set()).add(agent.number)
        if self._membership is not None and self._fenced[replica] >= set(self._hosts[replica]):
            self._membership.fence_confirmed(replica)
        if self._healing is not None:
            self._healing.ended(replica, agent.number)

    def _ask_exit(self, agent: Agent, reason: str) -> None:
        """Have the job end after a common step. Before generation 1, end it now."""
        if self._membership is None:
            self._end_everywhere(ExitCode.INTERRUPTED, agent, f"{reason} before training began")
        elif not self._membership.generation:
            self._membership.ask_exit(self._named(agent, reason))
        else:  # the signals of all nodes are one request, so it names none of them
            self._membership.ask_exit(reason)

    def _failed(self, agent: Agent, exit_code: int, reason: str) -> None:
        others = [each for each in self._agents.living if each is not agent]
        if self._stage is Stage.RUNNING and others and self._membership is not None and self._membership.generation:
            self._lose(agent, reason)
        else:
            self._end_everywhere(exit_code, agent, reason)

    def _end_everywhere(self, exit_code: int, agent: Agent, reason: str) -> None:
        self.end(exit_code, self._named(agent, reason))

    def _named(self, agent: Agent, reason: str) -> str:
        """Return the reason behind the name of the node, if the job has several nodes."""
        return reason if self._settings.most == 1 else f"{agent.hello.name}: {reason}"

    def _announced(self, new: NewGeneration) -> None:
        self._watch.allow()
        newcomers = tuple(claim.replica for claim in new.joins)
        roster = Roster(new.generation, new.roster, new.losses, new.reason, new.left, newcomers)
        self._send_to(self._agents, roster)
        if self._late is not None:
            self._late.announced(roster)
        self._hangs.judge(condemning.Rostered(new.roster))
        self._send_state()
        self._loop.post(self._heal)  # the machine is in the middle of a step

    def _turned_away(self, newcomer: int) -> None:
        """Have all nodes know that it is no member: it would count as one that lives."""
        assert self._membership is not None
        self._send_to(self._agents, NotAdmitted((newcomer,)))
        self._hangs.judge(condemning.Rostered(self._membership.state.roster))

    def _heal(self) -> None:
        if self._healing is not None and not self.has_ended:
            self._healing.look()

    def _form(self, replica: int) -> None:
        if self._healing is not None:
            self._healing.form(replica)

    def _hosts_newcomer(self, replica: int, nodes: tuple[int, ...]) -> None:
        """Note the nodes that have ranks of a newcomer."""
        self._hosts[replica] = nodes
        for number in nodes:
            self._replicas[number] = (*self._replicas.get(number, ()), replica)
            self._watch.use(number)
        self._hangs.host(replica, nodes)

    def _fence(self, replica: int) -> None:
        if self._healing is not None:
            self._healing.fenced(replica)
        self._send_to(self._hosts_of(replica), FenceReplica(replica))

    def _dismiss(self, replica: int) -> None:
        if self._healing is not None:
            self._healing.left(replica)
        self._send_to(self._hosts_of(replica), DismissReplica(replica))

    def _hosts_of(self, replica: int) -> Iterable[Agent]:
        return (each for each in self._agents if each.number in self._hosts[replica])

    def _send_to(self, agents: Iterable[Agent], message: Message) -> None:
        body = encode(message)
        for agent in agents:
            self._loop.put(agent.link, body)

    # --- Losing nodes -----------------------------------------------------------------------------

    def _drop(self, agent: Agent, why: str) -> None:
        self._loop.drop(agent.link)
        self._agent_gone(agent, why)

    def _link_ended(self, agent: Agent, why: str) -> None:
        """Handle the end of a link. Only the agent itself can have closed it.

        A late node without ranks is lost however its link ends: that costs nothing.
        """
        is_proof = agent.link.was_closed or len(self._start.nodes) == 1 or self._watch.is_unused(agent.number)
        if self._stage is Stage.RUNNING and agent in self._agents and agent.number >= 0 and not (is_proof or agent.is_lost):
            self._watch.was_reset(agent.number, why)
        else:
            self._agent_gone(agent, why)

    def _remove(self, number: int, why: str) -> None:
        """Remove a node that is silent, or whose link was reset."""
        agent = next((each for each in self._agents.living if each.number == number), None)
        if agent is None:
            return  # it has left since
        if self._stage is Stage.PREPARING:
            self._end_everywhere(ExitCode.FAILED, agent, f"{why} before training began")
        elif not self._loop.has(agent.link):
            self._agent_gone(agent, why)
        else:
            self._lose(agent, why)
        if (held := self._held.pop(agent.hello.identity, None)) is not None:
            self._introduced(*held)

    def _cut_off(self, reason: str) -> None:
        """End the job here. The others have no coordinator, and end by themselves."""
        if self._membership is None:
            silent = ", ".join(each.hello.name for each in self._agents.used if each.number in self._watch.silent)
            self.end(ExitCode.FAILED, f"{reason}, before training began; nothing is heard of {silent}")
        else:
            self._membership.end(ExitCode.NO_REPLICA_LEFT, reason)

    def _give_up(self, reason: str) -> None:
        """Leave the job without a coordinator: its ranks go on to the next save point."""
        self._has_given_up = True
        self._record(trace.CoordinatorLeft(reason=reason))
        self._send_to(self._agents, GivesUp(reason))
        for link, _ in self._held.values():
            self._loop.send(link, GivesUp(reason))

    def _agent_gone(self, agent: Agent, why: str) -> None:
        """Handle the end of an agent: its ranks end with it."""
        if agent not in self._agents:
            return
        self._agents.remove(agent)
        if self._stage is Stage.OVER:
            self._traces.left(agent.number, f"its agent is gone ({why}), and had not sent it")
        if self._stage is Stage.MEETING and agent.hello.identity == self._settings.owner:
            self._end_everywhere(ExitCode.FAILED, agent, f"its agent is gone ({why}) before all nodes were there")
        if agent.number < 0 or self._stage is Stage.OVER:
            return
        if self._stage is Stage.PREPARING:
            self._end_everywhere(ExitCode.FAILED, agent, f"its agent is gone ({why}) before training began")
            return
        self._lose(agent, f"its agent is gone ({why})")

    def _lose(self, agent: Agent, detail: str) -> None:
        """Remove a node with all replicas that have ranks on it."""
        if agent.is_lost or self._membership is None:
            return
        agent.is_lost = True
        self._watch.forget(agent.number)
        self._tell_silence()
        replicas = self._replicas.get(agent.number, ())
        name = agent.hello.name
        self._removed[agent.hello.identity] = agent.number
        if agent.is_late:
            self._start.late_lost(name, was_used=bool(replicas))
        self._report.node_lost(agent.number, name, replicas)
        self._traces.left(agent.number, f"the node was lost: {detail}")
        self._record(trace.NodeLost(node=agent.number, name=name, replicas=replicas, detail=detail))
        text = f"node {name}: {detail}" if len(self._start.nodes) > 1 else detail
        if self._healing is not None:
            self._healing.node_lost(agent.number)
        if replicas:
            self._membership.node_lost(replicas, text)
        self._look_at_launch()

    def _tell_state(self) -> None:
        """Send node 0 the state of the job every beat, if it has changed."""
        if not self.has_ended:
            self._loop.after(self._deadlines.beat_s, self._tell_state)
            self._send_state()
            self._heal()

    def _send_state(self) -> None:
        if self._membership is not None:
            wanted = None if self._scaling is None else self._scaling.wanted()
            drained = frozenset[int]() if self._healing is None else self._healing.drained
            self._report.send(self._membership.progress, self._replicas, self._watch.silent, wanted, drained)
