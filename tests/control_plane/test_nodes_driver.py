"""The coordinator's driver of nodes, with agents and leaders that the test plays."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.job_start import NodesSettings
from megatron_recover.control_plane.leader_messages import Announcement, LeaderHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    EndAsked,
    FenceDone,
    FenceReplica,
    GivesUp,
    Idle,
    JobEnds,
    JobState,
    KillAsked,
    Launch,
    Met,
    NodeAtWork,
    NodeBeat,
    NodeFailed,
    NodeGone,
    NodeHello,
    NodeLaunched,
    NodeReady,
    NodeShares,
    NodesShared,
    NodeSuspects,
    OtherJob,
    ReplicaGone,
    Roster,
    TellKnown,
    TraceDone,
    TraceEnds,
    TraceNext,
    TraceOffer,
    TracePart,
)
from megatron_recover.control_plane.node_watch import PREPARING_SILENCES
from megatron_recover.control_plane.nodes_driver import TELL_S, NodesDriver
from megatron_recover.control_plane.wire import Message, listen
from megatron_recover.core import coordinator
from megatron_recover.core.coordinator import MembershipSettings
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import Hello, Loss, LossKind, ReplicaFinished
from megatron_recover.core.verdict import Known
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import address_of
from megatron_recover.trace.node_clock import NodeClock
from tests.control_plane.partners import KEY, PATIENCE_S, call

pytestmark = pytest.mark.timeout(120)
DEADLINES = replace(Deadlines.of(20.0), beat_s=0.05)
OWNER = 100


class Agent:
    """A node that the test plays."""

    def __init__(self, town: Town, number: int, **hello: object) -> None:
        self.town, self.received = town, list[Message]()
        self.is_closed = False
        self.link: OutgoingLink = call(town.address, Party(Role.AGENT), Party(Role.COORDINATOR))
        town.loop.watch(self.link, lambda link, message: self.received.append(message), lambda link, why: self._close())
        fields = {"identity": OWNER + number, "name": f"n{number}", "slots": 1, "run_dir": "" if number else "/run0", **hello}
        self.say(NodeHello(**fields))

    def _close(self) -> None:
        self.is_closed = True

    def say(self, message: Message) -> None:
        self.town.loop.send(self.link, message)

    def hang_up(self) -> None:
        self.town.loop.drop(self.link)

    def reset(self) -> None:
        """Have the connection reset, as a machine on the way does."""
        self.link.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.town.loop.drop(self.link)

    def of[Kind: Message](self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self.received if isinstance(message, kind)]


class Town:
    """A coordinator, and whoever the test plays, in one loop."""

    def __init__(self, *, least: int = 3, most: int = 3, **settings: float | str) -> None:
        self.now = 0.0
        """Time of the loop's clock, which goes on by turns of the test and not by itself."""
        self.loop = Loop(clock=lambda: self.now, cpu_clock=lambda: 0.0)
        self.events: list[trace.Event] = []
        self.links: dict[int, OutgoingLink] = {}
        """Of the leaders, by their replicas."""
        self.early: list[Agent] = []
        """Nodes that came after the meeting and before training."""
        listener = listen("127.0.0.1:0")
        self.address = address_of(listener)
        given = {"join_s": 20.0, "last_call_s": 0.2, "node_silence_s": 0.5, **settings}
        self.nodes = NodesDriver(
            NodesSettings(owner=OWNER, least=least, most=most, deadlines=DEADLINES, **given), listener,
            key=KEY, clock=NodeClock(None), loop=self.loop, record=self.events.append,
        )  # fmt: skip

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"in vain: {self.events}"
            self.turn(0.001)

    def turn(self, seconds: float) -> None:
        """Let so much time pass, and serve what has arrived by then."""
        self.now += seconds
        for _ in range(4):
            self.loop.run_once(0.0)
        time.sleep(0.0005)  # for the kernel to deliver what was just sent
        self.loop.run_once(0.0)

    def run(self, seconds: float, *beating: Agent) -> None:
        """Go on so long; agents `beating` send signs of life."""
        end = self.now + seconds
        while self.now < end:
            for agent in beating:
                agent.say(NodeBeat())
            self.turn(0.01)

    def meet(self, num_nodes: int = 3, **hello: object) -> list[Agent]:
        agents = [Agent(self, number, **hello) for number in range(num_nodes)]
        self.until(lambda: all(agent.of(Met) for agent in agents))
        return agents

    def start(self, hosts: list[list[int]], num_nodes: int = 3) -> list[Agent]:
        """Start a job whose nodes have these replicas, one leader each on the first of its nodes."""
        agents = self.ready(hosts, num_nodes)
        for agent in agents:
            agent.say(NodeLaunched())
        self.leaders: dict[int, list[Message]] = {}
        for replica in range(self.num_replicas):
            self._lead(replica)
        self.until(lambda: all(agent.of(Roster) for agent in agents))
        return agents

    def ready(self, hosts: list[list[int]], num_nodes: int = 3) -> list[Agent]:
        """Have the nodes of such a job told to start their ranks."""
        agents = self.meet(num_nodes)
        self.num_replicas = 1 + max(replica for replicas in hosts for replica in replicas)
        led: set[int] = set()
        for agent, replicas in zip(agents, hosts, strict=True):
            mine = [replica for replica in replicas if replica not in led]
            led.update(mine)
            leaders = tuple((replica, f"a:{replica}") for replica in mine)
            agent.say(NodeReady(MembershipSettings(num_replicas=self.num_replicas), tuple(replicas), leaders))
        self.until(lambda: all(agent.of(Launch) for agent in agents))
        return agents

    def _lead(self, replica: int) -> None:
        link = call(self.address, Party(Role.LEADER, replica), Party(Role.COORDINATOR))
        heard, self.links[replica] = list[Message](), link
        self.leaders[replica] = heard
        self.loop.watch(link, lambda link, message: heard.append(message), lambda link, why: None)
        self.loop.send(link, LeaderHello(Hello(replica, "f"), Peer(replica, f"a:{replica}", ("b",))))

    def announced(self, replica: int) -> list[Announcement]:
        return [message for message in self.leaders[replica] if isinstance(message, Announcement)]

    def of[Kind: trace.Event](self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def make_town() -> Iterator[Callable[..., Town]]:
    made: list[Town] = []

    def making(**settings: float) -> Town:
        made.append(Town(**settings))
        return made[-1]

    yield making
    for town in made:
        town.nodes.close()
        town.loop.close()


Make = Callable[..., Town]


def test_nodes_are_numbered_with_the_coordinators_first_and_the_given_ranks_next(make_town: Make) -> None:
    town = make_town()
    late, owner, early = Agent(town, 7, node_rank=2), Agent(town, 0, node_rank=0), Agent(town, 8, node_rank=1)
    town.until(lambda: all(agent.of(Met) for agent in (late, owner, early)))
    [met] = owner.of(Met)
    assert [(node.number, node.name) for node in met.nodes] == [(0, "n0"), (1, "n8"), (2, "n7")]
    assert (met.you, late.of(Met)[0].you, early.of(Met)[0].you) == (0, 2, 1)
    assert late.of(Met)[0].run_dir == "/run0", "that of node 0"


def test_ranks_start_when_all_nodes_are_ready_and_know_the_leaders_of_their_replicas(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0, 1], [1, 2], []])
    [event] = town.of(trace.NodesMet)
    assert [node.name for node in event.nodes] == ["n0", "n1", "n2"]
    launches = [agent.of(Launch) for agent in agents]
    assert launches == [[Launch(((0, "a:0"), (1, "a:1")))], [Launch(((1, "a:1"), (2, "a:2")))], [Launch(())]]
    assert [message.new.roster for message in town.announced(0)] == [(0, 1, 2)]


def test_the_coordinator_has_room_for_all_that_it_expects(make_town: Make) -> None:
    town = make_town()
    agents, expected = [Agent(town, 0)], town.nodes._num_expected
    town.until(lambda: agents[0].received)
    assert expected() == 2, "two nodes are missing"
    agents += [Agent(town, number) for number in (1, 2)]
    town.until(lambda: all(agent.of(Met) for agent in agents))
    assert expected() == 1, "it cannot know whether one is needed"
    other = make_town()
    other.start([[0, 1], [2], [3]])
    assert other.nodes._num_expected() == 0


def test_the_loss_of_a_node_is_one_event_for_all_its_replicas_and_no_others(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0, 1], [2, 3], [3, 4]])
    agents[1].hang_up()
    town.until(lambda: town.announced(0)[-1].new.roster == (0, 1, 4))
    [lost] = town.of(trace.NodeLost)
    assert (lost.node, lost.name, lost.replicas) == (1, "n1", (2, 3))
    assert len(town.announced(0)) == 2, "one generation for both"
    town.until(lambda: FenceReplica(3) in agents[2].received)
    assert FenceReplica(2) not in agents[2].received, "replica 3 alone has ranks there"
    assert town.announced(0)[-1].new.losses[0].detail.startswith("node n1: its agent is gone")


def test_a_fence_counts_for_the_next_writer_when_all_nodes_of_the_replica_have_confirmed_it(make_town: Make) -> None:
    town = make_town(least=2, most=2)
    agents = town.start([[0], [0, 1]], num_nodes=2)
    agents[0].say(ReplicaGone(Loss(0, LossKind.SUSPECTED)))
    town.until(lambda: all(FenceReplica(0) in agent.received for agent in agents))
    agents[0].say(FenceDone(0))
    agents[0].say(FenceDone(0))
    town.run(0.1, *agents)
    assert [event.writer for event in town.of(trace.Granted)] == [0], "its ranks on node 1 may still name a checkpoint"
    agents[1].say(FenceDone(0))
    town.until(lambda: [event.writer for event in town.of(trace.Granted)] == [0, 1])


def test_a_silent_node_is_shown_at_once_removed_after_its_time_and_fenced_when_it_comes_back(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    town.run(0.2, agents[0], agents[1])
    assert [(event.node, event.phase) for event in town.of(trace.NodeSilent)] == [(2, "began")]
    assert not town.of(trace.NodeLost)
    town.run(0.6, agents[0], agents[1])
    [lost] = town.of(trace.NodeLost)
    assert (lost.node, lost.replicas) == (2, (2,)) and town.announced(0)[-1].new.roster == (0, 1)
    agents[2].say(NodeBeat())
    town.until(lambda: FenceReplica(2) in agents[2].received)
    agents[2].say(ReplicaGone(Loss(0, LossKind.SUSPECTED)))
    town.run(0.1, agents[0], agents[1], agents[2])
    assert town.announced(1)[-1].new.roster == (0, 1), "a removed node has no say"  # replica 0 would not be told its own loss


def test_a_short_silence_costs_nothing(make_town: Make) -> None:
    town = make_town(node_silence_s=2.0)
    agents = town.start([[0], [1], [2]])
    town.run(0.3, agents[0], agents[1])
    town.run(0.2, *agents)
    phases = [(event.node, event.phase) for event in town.of(trace.NodeSilent)]
    assert phases == [(2, "began"), (2, "over")] and not town.of(trace.NodeLost)


def test_a_silence_is_recorded_in_less_than_two_beats_whenever_it_begins(make_town: Make) -> None:
    """A quarter of a beat is left for the recorder: a silence is to be on the console in less than two beats."""
    town = make_town(node_silence_s=20.0)
    agents = town.start([[0], [1], [2]])
    for phase in range(8):
        town.run(0.02 + 0.01 * phase, *agents)
        town.run(0.15, *agents[:2])
    began = [event.seconds / DEADLINES.beat_s for event in town.of(trace.NodeSilent) if event.phase == "began"]
    assert len(began) == 8 and max(began) <= 1.75 + 0.2, f"a turn of the test is a fifth of a beat: {began}"


def test_a_coordinator_that_hears_fewer_than_half_removes_nobody(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    town.run(0.8, agents[0])
    assert {event.node for event in town.of(trace.NodeSilent)} == {1, 2} and not town.of(trace.NodeLost)
    town.run(0.3, *agents)
    assert not town.of(trace.NodeLost), "they are heard again"


def test_a_silent_node_is_removed_by_its_own_time_alone_and_on_the_only_node_nobody_is_excused(make_town: Make) -> None:
    town = make_town(node_silence_s=10.0)
    agents = town.start([[0], [1], [1, 2]])
    agents[0].say(NodeAtWork((0,)))
    membership = town.nodes._membership
    assert membership is not None
    town.run(0.1, *agents)
    assert membership._state.at_work == (0,)
    town.run(0.3, agents[0], agents[1])
    assert membership._state.at_work == (0, 1, 2), "no timer of the coordinator removes the others"
    town.run(0.2, *agents)
    assert membership._state.at_work == (0,), "it is heard again"
    alone = make_town(least=1, most=1)
    [agent] = alone.start([[0, 1]], num_nodes=1)
    agent.say(NodeAtWork((0, 1)))
    membership = alone.nodes._membership
    assert membership is not None
    alone.run(0.1, agent)
    assert membership._state.at_work == (0, 1)
    alone.run(0.3)
    assert membership._state.at_work == ()


def test_a_node_gets_the_findings_that_it_wants_and_no_others(make_town: Make) -> None:
    town = make_town()
    agents = town.meet()
    for agent, data, wanted in zip(agents, (b"a", b"b", b"c"), ((0, 1, 2), (2, 0), ()), strict=True):
        assert not any(each.of(NodesShared) for each in agents)
        agent.say(NodeShares(0, data, wanted))
        town.turn(0.01)
    town.until(lambda: all(agent.of(NodesShared) for agent in agents))
    assert [agent.of(NodesShared)[0].data for agent in agents] == [(b"a", b"b", b"c"), (b"c", b"a"), ()]


def test_a_node_that_falls_silent_while_it_prepares_ends_the_job_in_time_and_by_name(make_town: Make) -> None:
    town = make_town(node_silence_s=0.1)
    agents = town.meet()
    town.run(0.1 * PREPARING_SILENCES - 0.1, *agents[:2])
    assert not town.nodes.has_ended
    town.run(0.3, *agents[:2])
    for agent in agents[:2]:
        [end] = agent.of(JobEnds)
        assert end.exit_code == ExitCode.FAILED and end.reason.startswith("n2: nothing was heard of it for 0.6 s")


def _all_launch_but_the_last(town: Town) -> list[Agent]:
    """Have three nodes start their ranks, of which the last does not say so; return their agents."""
    agents = town.meet()
    for number, agent in enumerate(agents):
        agent.say(NodeReady(MembershipSettings(num_replicas=3), (number,), ((number, f"a:{number}"),)))
    town.until(lambda: all(agent.of(Launch) for agent in agents))
    for agent in agents[:2]:
        agent.say(NodeLaunched())
    return agents


def test_a_node_that_dies_while_ranks_start_is_lost_in_time(make_town: Make) -> None:
    town = make_town(node_silence_s=0.1)
    agents = _all_launch_but_the_last(town)
    town.run(0.1 * PREPARING_SILENCES - 0.1, *agents[:2])
    assert not town.of(trace.NodeLost)
    town.run(0.3, *agents[:2])
    [lost] = town.of(trace.NodeLost)
    assert lost.name == "n2" and lost.detail.startswith("nothing was heard of it for 0.6 s")


@pytest.mark.parametrize("deed", ["end its part of the examination", "get ready"])
def test_a_node_that_is_heard_and_keeps_all_others_waiting_is_named(make_town: Make, deed: str) -> None:
    town = make_town()
    agents = town.meet()
    is_ready = NodeReady(MembershipSettings(num_replicas=2), (), ())
    for agent in agents[:2]:
        agent.say(is_ready if deed == "get ready" else NodeShares(0, b"", (0, 1, 2)))
    for _ in range(62):
        town.turn(0.3)
        town.run(0.01, *agents)
    assert not town.nodes.has_ended
    town.run(0.6, *agents)
    assert agents[0].of(JobEnds)[0].reason.startswith(f"n2 did not {deed} within 19 s")


def test_a_node_whose_link_is_reset_is_lost_though_it_comes_back_at_once(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[1].reset()
    back = Agent(town, 1)
    town.until(lambda: back.of(FenceReplica))
    assert [event.node for event in town.of(trace.NodeLost)] == [1]
    assert not town.nodes.is_done


def test_a_removed_node_that_comes_back_ends_nothing_when_the_wait_for_all_to_get_ready_is_over(make_town: Make) -> None:
    """Its new link has sent no `NodeReady`, and needs none: all were ready once."""
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[2].reset()
    town.until(lambda: town.of(trace.NodeLost))
    back = Agent(town, 2)
    town.until(lambda: FenceReplica(2) in back.received)
    for _ in range(66):
        town.turn(0.3)
        town.run(0.01, *agents[:2], back)
    assert town.now > DEADLINES.deadline_s
    assert town.announced(0)[-1].new.roster == (0, 1) and not agents[0].of(JobEnds)


def test_a_coordinator_does_not_wait_for_a_node_whose_link_was_reset_just_before_the_end(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[1].reset()
    agents[0].say(KillAsked(137, "killed on request"))
    town.until(lambda: agents[2].of(JobEnds))
    for agent in (agents[0], agents[2]):
        agent.hang_up()
    town.until(lambda: town.nodes.is_done)
    assert not town.of(trace.NodeLost)


@pytest.mark.parametrize(("is_back", "is_own"), [(True, False), (False, False), (False, True)])
def test_links_that_are_reset_at_once_cost_no_node_and_leave_the_job_without_a_coordinator(
    make_town: Make, is_back: bool, is_own: bool
) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    for agent in agents[0 if is_own else 1 :]:
        agent.reset()
    back = [Agent(town, number) for number in (1, 2)] if is_back else []
    town.until(lambda: town.nodes.is_done)
    assert not town.of(trace.NodeLost) and len(town.of(trace.Generation)) == 1
    [left] = town.of(trace.CoordinatorLeft)
    assert f"{3 if is_own else 2} of 3 nodes were reset at once" in left.reason
    assert [each.reason for each in agents[0].of(GivesUp)] == [left.reason] * (not is_own)
    town.until(lambda: all(agent.of(GivesUp) for agent in back))
    assert not any(agent.of(FenceReplica) for agent in back)


def test_half_of_the_links_or_links_that_are_reset_one_after_the_other_cost_their_nodes(make_town: Make) -> None:
    town = make_town(least=4, most=4)
    agents = town.start([[0], [1], [2], [3]], 4)
    for number in (2, 3):
        agents[number].reset()
    town.run(0.2, *agents[:2])
    assert [event.node for event in town.of(trace.NodeLost)] == [2, 3] and not town.of(trace.CoordinatorLeft)
    town = make_town(least=4, most=4)
    agents = town.start([[0], [1], [2], [3]], 4)
    for number in (1, 2, 3):
        agents[number].reset()
        town.run(0.3, agents[0], *agents[number + 1 :])
    assert [event.node for event in town.of(trace.NodeLost)] == [1, 2, 3] and not town.of(trace.CoordinatorLeft)


def test_a_node_whose_new_link_ends_before_the_reset_of_the_old_one_is_judged_may_come_back_again(make_town: Make) -> None:
    town = make_town()
    town.start([[0], [1], [2]])
    back = Agent(town, 1)
    town.until(lambda: town.nodes._held)
    back.hang_up()
    town.until(lambda: not town.nodes._held)
    assert not town.of(trace.NodeLost), "it is judged later"
    town.until(lambda: town.of(trace.NodeLost))
    again = Agent(town, 1)
    town.until(lambda: again.of(FenceReplica))


def test_a_machine_that_resets_each_link_when_it_carries_the_next_beat_does_not_cost_all_nodes(make_town: Make) -> None:
    town = make_town(least=5, most=5)
    agents = town.start([[0], [1], [2], [3], [4]], 5)
    for number in (1, 2, 3, 4):
        agents[number].reset()
        town.run(0.03, agents[0], *agents[number + 1 :])
    assert len(town.of(trace.NodeLost)) == 2 and town.of(trace.CoordinatorLeft) and town.nodes.is_done


def test_a_reset_that_could_not_be_judged_is_judged_when_enough_nodes_are_heard_again(make_town: Make) -> None:
    """Else the silence of the coordinator's own agent would hide that of all others for ever."""
    town = make_town(node_silence_s=5.0)
    agents = town.start([[0], [1], [2]])
    town.run(0.2, agents[0])
    agents[0].reset()
    town.run(0.3)
    assert not town.of(trace.NodeLost)
    town.run(0.3, *agents[1:])
    assert [event.node for event in town.of(trace.NodeLost)] == [0]


def test_a_node_without_replicas_leaves_alone_by_a_signal_and_node_0_ends_the_job(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    for node in (0, 1):
        agents[node].say(ReplicaGone(Loss(node, LossKind.PROCESS_ENDED)))
        town.until(lambda: town.of(trace.Generation)[-1].roster == tuple(range(node + 1, 3)))  # noqa: B023
    agents[1].say(EndAsked("SIGTERM"))
    town.until(lambda: agents[1].of(TraceDone))
    [end] = agents[1].of(JobEnds)
    assert (end.exit_code, end.reason) == (ExitCode.INTERRUPTED, "SIGTERM; the job goes on without this node")
    assert not agents[2].of(JobEnds) and town.of(trace.Generation)[-1].reason != "SIGTERM"
    agents[0].say(KillAsked(137, "killed on request"))
    town.until(lambda: agents[2].of(JobEnds))


def test_a_node_that_vanishes_or_breaks_off_after_the_end_is_not_awaited_for_long_and_keeps_its_trace(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[0].say(KillAsked(137, "killed on request"))
    town.until(lambda: all(agent.of(JobEnds) for agent in agents))
    back = Agent(town, 1)
    town.until(lambda: back.of(JobEnds))
    back.say(TraceOffer(1))
    town.until(lambda: agents[0].of(TraceOffer))
    assert not agents[0].of(NodeGone)
    for agent in (agents[0], back):
        agent.hang_up()
    town.run(0.5 + DEADLINES.traces_s - 0.2)
    assert not town.nodes.is_done
    town.run(1.0)
    assert town.nodes.is_done, "node 2 has sent nothing for so long"


def test_the_launcher_of_the_coordinators_node_dies_alone_however_its_link_ends(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[0].reset()
    town.until(lambda: town.of(trace.NodeLost))
    assert [event.node for event in town.of(trace.NodeLost)] == [0]
    assert not town.nodes.is_done and not agents[1].of(GivesUp)


def test_a_reset_while_others_are_silent_is_judged_like_their_silence(make_town: Make) -> None:
    town = make_town(node_silence_s=5.0)
    agents = town.start([[0], [1], [2]])
    town.run(0.5, agents[1], agents[2])  # the agent of node 0 is stopped
    agents[2].reset()
    town.run(0.5, agents[1])
    assert not town.of(trace.NodeLost) and not town.nodes.is_done
    town.run(5.5, agents[0], agents[1])
    assert [event.node for event in town.of(trace.NodeLost)] == [2]


def test_a_node_whose_link_was_reset_is_not_one_of_those_that_are_heard(make_town: Make) -> None:
    """It was heard just now, and would make three of five. So the coordinator may remove nobody, not even that node."""
    town = make_town(least=5, most=5, node_silence_s=5.0)
    agents = town.start([[0], [1], [2], [3], [4]], 5)
    town.run(0.5, *agents[:3])
    agents[2].reset()
    town.run(0.06, *agents[:2])
    assert not town.of(trace.NodeLost)
    town.run(0.3, *agents[:2], *agents[3:])
    assert [event.node for event in town.of(trace.NodeLost)] == [2]


def test_nodes_whose_agents_end_at_once_are_lost_however_many(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    for agent in agents[1:]:
        agent.hang_up()
    town.until(lambda: len(town.of(trace.NodeLost)) == 2)
    assert not town.nodes.is_done and not agents[0].of(GivesUp)


def test_a_coordinator_that_is_cut_off_ends_its_side_after_twice_the_time(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    town.run(0.8, agents[0])
    assert not agents[0].of(JobEnds)
    town.run(0.6, agents[0])
    [end] = agents[0].of(JobEnds)
    assert end.exit_code == ExitCode.NO_REPLICA_LEFT and end.reason.startswith("1 of 3 nodes is heard, too few")
    assert not town.of(trace.NodeLost)


def test_an_agent_of_node_0_that_is_stopped_ends_nothing(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    town.run(1.4, agents[1], agents[2])
    assert not town.of(trace.NodeLost) and not agents[1].of(JobEnds)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"alike": (("--lr", "2"),)}, "n1: --lr is 2 on n1, and 1 on n0; use the same on all nodes"),
        ({"mistake": "there is no script"}, "n1: there is no script"),
        ({"alike": ()}, "n1: --lr is not given on n1, and 1 on n0; use the same on all nodes"),
        ({"node_rank": 0}, "n1: --node-rank 0 is also that of n0; give each node its own"),
        ({"run_dir": "/run1"}, "n1: it started a coordinator of its own; give --node-rank 0, or is_host of --rdzv-conf, to one "
         "node only, the one whose address the endpoint is"),
        ({"address": "::1"}, "n1: its address is ::1, and that of n0 is 10.0.0.1; nodes need addresses of one family, IPv4 or "
         "IPv6: give --interface or --local-addr"),
        ({"run_id": "b"}, "n1: --rdzv-id is b on n1, and a on n0; use the same on all nodes"),
    ],
    ids=["other flags", "a mistake", "a flag less", "the same rank", "two coordinators", "IPv6 and IPv4", "another id"],
)  # fmt: skip
def test_nodes_that_do_not_fit_together_are_refused_on_all_with_the_name_of_one(
    make_town: Make, hello: dict[str, object], why: str
) -> None:
    town = make_town()
    alike: dict[str, object] = {"alike": (("--lr", "1"),), "address": "10.0.0.1", "run_id": "a"}
    first = Agent(town, 0, node_rank=0, **alike)
    town.until(lambda: first.received)
    second = Agent(town, 1, **{**alike, **hello})
    town.until(lambda: first.of(JobEnds) and second.of(JobEnds))
    assert first.of(JobEnds) == second.of(JobEnds) == [JobEnds(ExitCode.BAD_INPUT, why)]


def test_nodes_that_come_soon_after_a_refusal_are_told_and_the_coordinators_own_above_all(make_town: Make) -> None:
    town = make_town(most=3)
    first = Agent(town, 1, mistake="there is no script")
    town.until(lambda: first.of(JobEnds))
    first.hang_up()
    town.run(0.1)
    assert not town.nodes.is_done
    town.run(TELL_S + 0.1)
    assert not town.nodes.is_done, "its own node waits for it, and would wait for long"
    owner = Agent(town, 0)
    town.until(lambda: owner.of(JobEnds))
    assert owner.of(JobEnds)[0].reason == "n1: there is no script"
    owner.hang_up()
    town.until(lambda: town.nodes.is_done)
    other = make_town(most=3)
    agents = [Agent(other, number, mistake="no script") for number in range(2)]
    other.until(lambda: agents[0].of(JobEnds) and agents[1].of(JobEnds))
    for agent in agents:
        agent.hang_up()
    other.run(0.1)
    assert not other.nodes.is_done
    last = Agent(other, 2)
    other.until(lambda: last.of(JobEnds))
    last.hang_up()
    other.until(lambda: other.nodes.is_done)
    assert other.now < TELL_S, "all were there"


def test_a_mistake_of_a_node_that_the_job_does_not_use_ends_nothing(make_town: Make) -> None:
    town = make_town()
    agents = town.meet()
    late = Agent(town, 5, mistake="no script")
    town.until(lambda: late.of(Idle))
    town.run(0.1, *agents)
    assert not any(agent.of(JobEnds) for agent in (*agents, late))


def test_an_agent_of_an_earlier_start_takes_no_place_in_a_new_one_and_ends_nothing(make_town: Make) -> None:
    earlier = make_town(most=3)
    agents, late = earlier.meet(), Agent(earlier, 5)
    earlier.until(lambda: late.of(Idle))
    jobs = [agents[1].of(Met)[0].job, late.of(Idle)[0].job]
    town = make_town()
    owner = Agent(town, 10, identity=OWNER, run_dir="/run1")
    town.until(lambda: owner.received)
    stale = [Agent(town, number, job=job) for number, job in zip((1, 5), jobs, strict=True)]
    town.until(lambda: all(agent.of(OtherJob) for agent in stale))
    others = [Agent(town, number) for number in (11, 12)]
    town.until(lambda: all(agent.of(Met) for agent in (owner, *others)))
    assert [node.name for node in owner.of(Met)[0].nodes] == ["n10", "n11", "n12"]
    again = Agent(town, 1, job=jobs[0])
    town.until(lambda: again.of(OtherJob))
    town.run(0.1, owner, *others)
    assert not owner.of(JobEnds) and not any(agent.of(Met) or agent.of(Idle) for agent in (*stale, again))


def test_a_node_of_the_next_start_that_meets_the_coordinator_of_the_last_one_does_not_hear_its_end_as_its_own(
    make_town: Make,
) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    town.nodes.end(ExitCode.OK, "training finished")
    town.until(lambda: agents[0].of(JobEnds))
    new = Agent(town, 9)
    town.until(lambda: new.of(JobEnds))
    [end] = new.of(JobEnds)
    assert end.exit_code == ExitCode.TOO_FEW_REPLICAS
    assert end.reason == "the job at this endpoint has just ended (training finished); start this node again"
    idle = Agent(town, 8, job=agents[0].of(Met)[0].job)
    town.until(lambda: idle.of(JobEnds))
    assert idle.of(JobEnds)[0].exit_code == ExitCode.OK, "it is of this job, which does not use it"
    for agent in (*agents, idle):
        agent.hang_up()
    town.run(0.1)
    assert town.nodes.is_done, "nobody waits for a node of another start"


def test_too_few_nodes_end_the_job_in_time_and_are_named(make_town: Make) -> None:
    town = make_town(join_s=0.3)
    agents = [Agent(town, number) for number in range(2)]
    town.until(lambda: all(agent.of(JobEnds) for agent in agents))
    reason = "2 of 3 nodes were there after 0.3 s (n0, n1)"
    for agent in agents:
        assert agent.of(JobEnds) == [JobEnds(ExitCode.TOO_FEW_REPLICAS, reason, too_few=True)]


def test_a_job_starts_with_fewer_after_the_last_call_and_a_later_node_idles_until_its_end(make_town: Make) -> None:
    town = make_town(least=2, most=4)
    agents = town.meet(2)
    late = Agent(town, 5)
    town.until(lambda: late.of(Idle))
    assert "the job runs on 2 nodes already" in late.of(Idle)[0].reason
    late.say(EndAsked("SIGTERM"))  # it left before it knew that the job does not use it
    town.run(0.1, *agents)
    assert not agents[0].of(JobEnds)
    agents[1].say(NodeFailed(ExitCode.BAD_INPUT, "no such flag"))
    town.until(lambda: late.of(JobEnds))
    assert [agent.of(JobEnds)[0].reason for agent in (agents[0], late)] == ["n1: no such flag"] * 2


def test_fewer_nodes_than_the_least_do_not_start_though_the_last_call_is_over(make_town: Make) -> None:
    """Two nodes have waited for the coordinator's own, which is slow, and have left."""
    town = make_town(least=2, most=3)
    gone = [Agent(town, number) for number in (1, 2)]
    town.until(lambda: all(agent.received for agent in gone))
    town.run(0.3, *gone)
    for agent in gone:
        agent.hang_up()
    town.run(0.1)
    owner = Agent(town, 0)
    town.until(lambda: owner.received)
    town.run(0.1, owner)
    assert not owner.of(Met), "one node is too few"
    Agent(town, 3)
    town.until(lambda: owner.of(Met))
    assert [node.name for node in owner.of(Met)[0].nodes] == ["n0", "n3"]


def test_a_node_that_leaves_before_the_start_is_forgotten_but_not_the_coordinators(make_town: Make) -> None:
    town = make_town()
    gone = Agent(town, 9)
    town.until(lambda: gone.received)
    gone.hang_up()
    town.run(0.1)
    assert len(town.meet()[0].of(Met)[0].nodes) == 3
    other = make_town()
    owner, waits = Agent(other, 0), Agent(other, 1)
    other.until(lambda: owner.received and waits.received)
    owner.hang_up()
    other.until(lambda: waits.of(JobEnds))
    assert waits.of(JobEnds)[0].exit_code == ExitCode.FAILED


def test_signals_of_any_number_from_any_node_are_one_request(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    for agent in agents:
        agent.say(EndAsked("SIGTERM"))
        agent.say(EndAsked("SIGTERM"))
    town.until(lambda: town.announced(0)[-1].new.requests)
    town.run(0.1, *agents)
    assert len(town.announced(0)) == 2 and town.announced(0)[-1].new.requests == ("exit: SIGTERM",)


def test_a_signal_before_training_ends_the_job_and_names_the_node(make_town: Make) -> None:
    for num_nodes in (2, 3):  # meeting, and preparing
        town = make_town()
        agents = [Agent(town, number) for number in range(num_nodes)]
        town.until(lambda agents=agents: all(agent.received for agent in agents))
        agents[1].say(EndAsked("SIGUSR1"))
        town.until(lambda agents=agents: all(agent.of(JobEnds) for agent in agents))
        assert agents[0].of(JobEnds) == [JobEnds(ExitCode.INTERRUPTED, "n1: SIGUSR1 before training began")]


def test_a_signal_while_ranks_start_ends_the_job_and_names_the_node(make_town: Make) -> None:
    town = make_town()
    agents = town.ready([[0], [1], [2]])
    agents[0].say(NodeLaunched())
    agents[1].say(EndAsked("SIGUSR1"))
    town.until(lambda: all(agent.of(JobEnds) for agent in agents))
    assert agents[0].of(JobEnds) == [JobEnds(ExitCode.INTERRUPTED, "n1: SIGUSR1 before training began")]


def test_a_person_kills_everything_on_all_nodes_at_once(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[1].say(KillAsked(130, "killed on request (SIGINT)"))
    town.until(lambda: all(agent.of(JobEnds) for agent in agents))
    assert agents[0].of(JobEnds) == [JobEnds(130, "n1: killed on request (SIGINT)", at_once=True)]


def test_a_node_that_fails_in_training_is_lost_and_the_last_one_ends_the_job(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[1].say(NodeFailed(ExitCode.FAILED, "the fork server has ended"))
    town.until(lambda: town.announced(0)[-1].new.roster == (0, 2))
    agents[2].say(NodeFailed(ExitCode.FAILED, "the fork server has ended"))
    town.until(lambda: town.announced(0)[-1].new.roster == (0,))
    agents[0].say(NodeFailed(ExitCode.FAILED, "the fork server has ended"))
    town.until(lambda: agents[0].of(JobEnds))
    assert agents[0].of(JobEnds) == [JobEnds(ExitCode.FAILED, "n0: the fork server has ended")]


def test_node_0_gets_the_state_of_the_job_when_it_changes(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    town.until(lambda: agents[0].of(JobState))
    agents[2].hang_up()
    town.run(0.3, agents[0], agents[1])
    assert agents[0].of(JobState)[-1].roster == (0, 1)
    assert [(node.name, node.state, node.replicas) for node in agents[0].of(JobState)[-1].nodes] == [
        ("n0", "here", (0,)), ("n1", "here", (1,)), ("n2", "lost", (2,)),
    ]  # fmt: skip
    agents[1].say(ReplicaGone(Loss(1, LossKind.PROCESS_ENDED, "SIGKILL"), None))
    town.run(0.3, agents[0], agents[1])
    assert agents[0].of(JobState)[-1].nodes[1].replicas == (), "the node is here, and its replica is gone"
    assert not agents[1].of(JobState)


def test_node_0_gets_all_idle_nodes(make_town: Make) -> None:
    town = make_town(least=1, most=1)
    [agent] = town.start([[0]], num_nodes=1)
    spares = [Agent(town, 5), Agent(town, 6)]
    town.until(lambda: all(spare.of(Idle) for spare in spares))
    town.run(0.3, agent, *spares)
    assert [(node.number, node.name, node.state) for node in agent.of(JobState)[-1].nodes] == [
        (0, "n0", "here"), (-1, "n5", "idle"), (-1, "n6", "idle"),
    ]  # fmt: skip


def test_what_all_nodes_report_in_one_turn_is_put_together_once(make_town: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    fed: list[tuple[int, ...]] = []
    monkeypatch.setattr(town.nodes._membership, "at_work", fed.append)
    for number, agent in enumerate(town.nodes._agents):
        town.nodes._from_agent(agent, NodeAtWork((number,)))
    town.loop.run_once(0.0)
    assert fed == [(0, 1, 2)]
    town.run(0.12, agents[0])
    town.run(0.05, *agents)
    assert len(fed) <= 5, "two nodes have fallen silent and are heard again"


def test_the_coordinator_is_done_when_all_have_hung_up(make_town: Make) -> None:
    town = make_town()
    assert not town.nodes.is_done, "nobody was there yet"
    agents = town.start([[0], [1], [2]])
    town.nodes.end(0, "training finished")
    town.until(lambda: all(agent.of(JobEnds) for agent in agents))
    for agent in agents:
        assert not town.nodes.is_done
        agent.hang_up()
        town.run(0.05)
    assert town.nodes.is_done


def test_a_coordinator_that_was_stopped_until_all_had_finished_and_left_calls_nobody_lost(make_town: Make) -> None:
    """Other nodes end by themselves then. All that happened waits in its sockets, in no order."""
    town = make_town()
    agents = town.start([[0], [1], [2]])
    for agent in agents[1:]:
        agent.hang_up()
    for replica, link in town.links.items():
        town.loop.send(link, ReplicaFinished(replica, 0))
    town.until(lambda: town.nodes.has_ended)
    assert not town.of(trace.NodeLost) and len(town.of(trace.Generation)) == 1
    town.until(lambda: agents[0].of(JobEnds))
    assert agents[0].of(JobEnds)[0].exit_code == ExitCode.OK


def test_a_removed_node_whose_link_had_only_broken_comes_back_to_be_fenced(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[2].hang_up()
    town.until(lambda: town.announced(0)[-1].new.roster == (0, 1))
    again = Agent(town, 2)
    town.until(lambda: again.received)
    assert again.received == [FenceReplica(2)] and not again.of(Met)
    town.nodes.end(0, "training finished")
    town.until(lambda: again.of(JobEnds))
    again.hang_up()
    town.run(0.1, *agents[:2])
    late = Agent(town, 2)
    town.until(lambda: late.of(JobEnds))
    for agent in (agents[0], agents[1], late):
        agent.hang_up()
    town.run(0.1)
    assert town.nodes.is_done


def test_traces_go_to_node_0_part_by_part_and_nobody_waits_for_a_node_that_is_gone(make_town: Make) -> None:
    """A node speaks for itself only, and sends one part for each question; so no queue of the coordinator grows."""
    town = make_town()
    first, second, third = town.start([[0], [1], [2]])
    town.nodes.end(0, "over")
    town.until(lambda: all(agent.of(JobEnds) for agent in (first, second, third)))
    part = TracePart(1, "events.jsonl", 2, 0, b"x")
    for message in (TraceOffer(1), TraceOffer(2), part, TraceEnds(1)):  # for another node, and unasked
        second.say(message)
    town.until(lambda: first.of(TraceOffer))
    first.say(TraceNext(1))
    town.until(lambda: second.of(TraceNext))
    second.say(part)
    second.say(part)
    town.until(lambda: first.of(TracePart))
    first.say(TraceNext(1))
    town.until(lambda: len(second.of(TraceNext)) == 2)
    second.say(TraceEnds(1))
    town.until(lambda: first.of(TraceEnds))
    assert first.of(TraceOffer) == [TraceOffer(1)] and first.of(TracePart) == [part]
    third.hang_up()
    town.until(lambda: first.of(NodeGone))
    assert [gone.node for gone in first.of(NodeGone)] == [2]
    first.hang_up()
    town.until(lambda: second.of(TraceDone))


def test_the_loss_of_a_node_is_told_to_node_0_which_does_not_wait_for_its_trace(make_town: Make) -> None:
    town = make_town()
    first, second, _ = town.start([[0], [1], [2]])
    second.hang_up()
    town.until(lambda: first.of(NodeGone))
    assert first.of(NodeGone)[0].node == 1 and "the node was lost" in first.of(NodeGone)[0].why


def test_a_node_may_come_back_before_the_end_of_its_broken_link_is_seen(make_town: Make) -> None:
    town = make_town(node_silence_s=20.0)
    owner, broken = Agent(town, 0, node_rank=0), Agent(town, 1, node_rank=1)
    town.until(lambda: owner.received and broken.received)
    again, last = Agent(town, 1, node_rank=1), Agent(town, 2, node_rank=2)
    town.until(lambda: again.of(Met) and last.of(Met))
    assert [node.name for node in owner.of(Met)[0].nodes] == ["n0", "n1", "n2"] and broken.is_closed
    town = make_town(node_silence_s=20.0)
    agents = town.start([[0], [1], [2]])
    for _ in range(2):
        again = Agent(town, 2)
        town.until(lambda agent=again: FenceReplica(2) in agent.received)
        assert town.announced(0)[-1].new.roster == (0, 1) and not again.of(Idle)
    assert agents[2].is_closed and len(town.of(trace.NodeLost)) == 1


def test_a_node_that_is_lost_while_ranks_start_excuses_no_silence_after(make_town: Make) -> None:
    town = make_town()
    agents = _all_launch_but_the_last(town)
    town.leaders = {}
    town._lead(0)
    town._lead(1)
    membership = town.nodes._membership
    assert membership is not None
    town.until(lambda: membership._state.start)
    town.run(1.0, *agents[:2])
    assert not town.of(trace.NodeLost), "it may still start ranks"
    membership._step(coordinator.TimerFired(membership._state.start))
    town.run(1.0, *agents[:2])
    town.run(1.0, agents[0])
    assert [event.node for event in town.of(trace.NodeLost)] == [2, 1]
    assert town.announced(0)[-1].new.roster == (0,)


def test_a_node_that_falls_silent_when_all_have_started_their_ranks_is_lost_after_its_own_time(make_town: Make) -> None:
    town = make_town()
    agents = town.ready([[0], [1], [2]])
    for agent in agents:
        agent.say(NodeLaunched())
    town.run(0.1, *agents)
    town.run(0.7, *agents[:2])
    assert [event.node for event in town.of(trace.NodeLost)] == [2], "and not after six times as long"


def test_a_node_that_fails_before_training_begins_ends_the_job_on_all_nodes(make_town: Make) -> None:
    town = make_town()
    agents = town.ready([[0], [1], [2]])
    agents[1].say(NodeFailed(ExitCode.FAILED, "no process can be started"))
    town.until(lambda: all(agent.of(JobEnds) for agent in agents))
    assert {agent.of(JobEnds)[0].reason for agent in agents} == {"n1: no process can be started"}


def test_an_agent_may_condemn_its_replica_while_another_member_lives(make_town: Make) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[1].say(NodeSuspects(1, (1,), (1,)))
    town.until(lambda: agents[1].of(TellKnown))
    assert agents[1].of(TellKnown) == [TellKnown(1, Known(1, (), may_condemn=True))]
    for number in (0, 2):
        agents[number].say(NodeSuspects(1, (number,), ()))
    agents[1].say(NodeSuspects(2, (1,), (1,)))
    town.until(lambda: len(agents[1].of(TellKnown)) == 2)
    assert not agents[1].of(TellKnown)[1].known.may_condemn, "all are silent"


def test_the_waits_for_ranks_begin_also_if_the_last_node_that_starts_some_dies(
    make_town: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = make_town()
    agents = town.meet()
    for number, agent in enumerate(agents):
        agent.say(NodeReady(MembershipSettings(num_replicas=3), (number,), ((number, f"a:{number}"),)))
    town.until(lambda: all(agent.of(Launch) for agent in agents))
    begun: list[int] = []
    assert town.nodes._membership is not None
    monkeypatch.setattr(town.nodes._membership, "launched", lambda: begun.append(1))
    for agent in agents[:2]:
        agent.say(NodeLaunched())
    town.run(0.05, *agents)
    assert not begun
    agents[2].hang_up()
    town.until(lambda: town.of(trace.NodeLost))
    assert begun == [1]


@pytest.mark.parametrize("message", [FenceDone(7), ReplicaGone(Loss(7, LossKind.SUSPECTED))])
def test_an_agent_that_names_no_replica_of_the_job_loses_its_node_alone(make_town: Make, message: Message) -> None:
    town = make_town()
    agents = town.start([[0], [1], [2]])
    agents[2].say(message)
    town.until(lambda: town.announced(0)[-1].new.roster == (0, 1))
    kind = type(message).__name__
    assert town.of(trace.NodeLost)[0].detail == f"its agent is gone (sent a {kind} of replica 7, which the job does not have)"


def test_nodes_beyond_the_most_idle_also_if_they_are_there_before_the_coordinators(make_town: Make) -> None:
    town = make_town(least=2, most=2)
    first, late = Agent(town, 5), Agent(town, 6)
    town.until(lambda: first.received and late.received)
    owner = Agent(town, 0)
    town.until(lambda: owner.of(Met) and first.of(Met) and late.of(Idle))
    assert [node.name for node in owner.of(Met)[0].nodes] == ["n0", "n5"] and not late.of(Met)
