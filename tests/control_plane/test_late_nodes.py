"""Nodes that come after the start of a job: the coordinator makes spares of them, or turns them away, and nobody waits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.control_plane import job_start
from megatron_recover.control_plane.node_messages import (
    DrainAnswer,
    EndAsked,
    FenceDone,
    FenceReplica,
    FormReplica,
    Idle,
    JobEnds,
    JobState,
    Launch,
    Met,
    NodeBeat,
    NodeFailed,
    NodeReady,
    ReplicaGone,
    Roster,
    SlotsReady,
    StartAnew,
    StartReplica,
    TraceDone,
)
from megatron_recover.core.coordinator import MembershipSettings
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import Loss, LossKind
from tests.control_plane.test_healing import SETTINGS, Start, drain, leave, one_node, said, start
from tests.control_plane.test_nodes_driver import Agent, Town

__all__ = ["start"]
pytestmark = pytest.mark.timeout(120)
SHARED = MembershipSettings(num_replicas=2)
READY = NodeReady(SHARED, (), (), (), (), (0, 1), SETTINGS)
TWO_NODES = (({0: ((0, 0), (1, 1))}, ()), ({1: ((0, 0), (1, 1))}, ()))
"""Two nodes with a replica each, and no slot left."""


def come(town: Town, number: int, **hello: object) -> Agent:
    """Have a late node come, and wait until the coordinator has answered."""
    late = Agent(town, number, **{"slots": 1, **hello})
    town.until(lambda: late.of(Met) or late.of(JobEnds))
    return late


def states(agent: Agent) -> list[tuple[int, str, str]]:
    return [(node.number, node.name, node.state) for node in agent.of(JobState)[-1].nodes]


def lose_node(town: Town, agents: list[Agent]) -> None:
    """Have node 1 be lost with replica 1, by the end of its agent."""
    agents[1].hang_up()
    town.until(lambda: town.announced(0)[-1].new.roster == (0,))


def test_a_late_node_becomes_a_spare_and_takes_the_place_of_one_that_is_lost(start: Start) -> None:
    town, agents = start(*TWO_NODES)
    late = come(town, 5)
    [met] = late.of(Met)
    assert (met.you, met.run_dir, met.is_late) == (2, "/run0", True)
    assert [node.name for node in met.nodes] == ["n0", "n1", "n5"] and [node.name for node in met.at_start] == ["n0", "n1"]
    town.run(0.2, *agents, late)
    assert states(agents[0])[-1] == (2, "n5", "idle") and not town.of(trace.NodeJoined)
    late.say(READY)
    town.until(lambda: late.of(Launch) and late.of(Roster))
    assert late.of(Launch) == [Launch(())] and late.of(Roster)[-1].roster == (0, 1)
    town.run(0.2, *agents, late)
    assert states(agents[0])[-1] == (2, "n5", "spare")
    assert [(each.node, each.name, each.slots) for each in town.of(trace.NodeJoined)] == [(2, "n5", 1)]
    assert not late.of(FormReplica) and len(town.announced(0)) == 1, "nobody is missing, and no member is told"


def test_the_slots_of_a_late_node_form_the_replica_that_is_missing(start: Start) -> None:
    town, agents = start(*TWO_NODES)
    lose_node(town, agents)
    assert "node 1 is lost" in said(agents[0])
    late = come(town, 5, slots=1)
    late.say(READY)
    other = come(town, 6, slots=1)
    town.run(0.2, agents[0], late, other)
    assert not late.of(FormReplica), "one slot is too few for a replica of two ranks"
    other.say(READY)
    town.until(lambda: late.of(FormReplica) and other.of(FormReplica))
    assert late.of(FormReplica) == [FormReplica(2, ((0, 0),), True)]
    assert other.of(FormReplica) == [FormReplica(2, ((1, 0),), True)]
    late.say(SlotsReady(2, "a:22", "a:33"))
    other.say(SlotsReady(2))
    town.until(lambda: late.of(StartReplica) and other.of(StartReplica))
    assert len(town.announced(0)) == 2, "for the loss; the newcomer has not claimed yet"


def test_late_nodes_that_come_before_training_begins_are_taken_then_and_not_without_healing(start: Start) -> None:
    for settings, is_taken in ((SETTINGS, True), (None, False)):
        town, agents = start(*TWO_NODES, settings=settings, early=5)
        [early] = town.early
        town.run(0.2, *agents, early)
        assert early.of(Idle) and bool(early.of(Met)) is is_taken


ALIKE = {"alike": (("megatron-recover", "1.0"), ("--lr", "1")), "address": "10.0.0.1", "run_id": "a"}


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"alike": (("megatron-recover", "1.1"), ("--lr", "1"))}, "megatron-recover is 1.1 on n5, and 1.0 on n0"),
        ({"alike": (("megatron-recover", "1.0"), ("--lr", "2"))}, "--lr is 2 on n5, and 1 on n0"),
        ({"slots": 3}, "--nproc-per-node is 3 on n5, and 1 on the nodes of the start; use the same"),
        ({"run_dir": "/run5"}, "it started a coordinator of its own"),
        ({"address": "::1"}, "its address is ::1, and that of n0 is 10.0.0.1"),
        ({"run_id": "b"}, "--rdzv-id is b on n5, and a on n0"),
    ],
    ids=["version", "launch line", "slots", "coordinator", "family", "id"],
)
def test_a_late_node_that_does_not_fit_is_turned_away_by_name_and_the_job_goes_on(
    start: Start, hello: dict[str, object], why: str
) -> None:
    town, agents = start(*TWO_NODES, hello=ALIKE)
    late = come(town, 5, **{**ALIKE, **hello})
    [end] = late.of(JobEnds)
    assert end.exit_code == ExitCode.BAD_INPUT and end.reason.startswith("n5 cannot join the job, which goes on: ")
    assert why in end.reason and why in said(agents[0])
    late.say(READY)
    late.hang_up()
    town.run(0.2, *agents)
    assert not any(agent.of(JobEnds) for agent in agents) and not town.of(trace.NodeJoined) and not town.of(trace.NodeLost)
    good = come(town, 6, **{**ALIKE, "node_rank": 1})
    assert good.of(Met)[0].you == 2, "the number of a node decides nothing any more"


@pytest.mark.parametrize(
    "ready",
    [replace(READY, settings=MembershipSettings(num_replicas=3)), replace(READY, healing=replace(SETTINGS, num_ranks=1)),
     replace(READY, healing=None)],
    ids=["replicas", "ranks", "no healing"],
)  # fmt: skip
def test_a_late_node_that_describes_another_job_is_turned_away(start: Start, ready: NodeReady) -> None:
    town, agents = start(*TWO_NODES)
    late = come(town, 5)
    late.say(ready)
    town.until(lambda: late.of(JobEnds))
    assert "its flags make another job than those of node 0" in late.of(JobEnds)[0].reason
    town.run(0.2, *agents)
    assert not late.of(Launch) and [name for _, name, _ in states(agents[0])] == ["n0", "n1"]
    lose_node(town, agents)
    town.run(0.2, agents[0])
    assert not late.of(FormReplica)


@pytest.mark.parametrize("how", ["dies", "is reset", "fails", "hangs"])
@pytest.mark.parametrize("when", ["preparing", "spare"])
def test_a_late_node_that_is_gone_before_it_is_used_costs_nobody_anything(start: Start, how: str, when: str) -> None:
    """So do five of them beside two members: they count in no majority."""
    town, agents = start(*TWO_NODES, node_silence_s=2.0)
    late = [come(town, number) for number in range(5, 10)]
    town.run(0.02, *agents)
    if when == "spare":
        for agent in late:
            agent.say(READY)
        town.until(lambda: all(agent.of(Launch) for agent in late))
    for agent in late:
        if how == "dies":
            agent.hang_up()
        elif how == "is reset":
            agent.reset()
        elif how == "fails":
            agent.say(NodeFailed(ExitCode.FAILED, "it cannot import"))
    town.run(2.5, *agents)
    assert len(town.announced(0)) == 1 and not any(agent.of(JobEnds) for agent in agents)
    lost = town.of(trace.NodeLost)
    assert sorted(event.node for event in lost) == [*range(2, 7)] and all(event.replicas == () for event in lost)
    good = come(town, 20)
    assert good.of(Met)[0].you == 7, "no number is used twice"
    good.say(READY)
    more = come(town, 21)
    more.say(READY)
    lose_node(town, agents)
    town.until(lambda: good.of(FormReplica) and more.of(FormReplica))


@pytest.mark.parametrize("how", ["is reset", "hangs"])
def test_a_job_of_one_node_takes_late_nodes_too(start: Start, how: str) -> None:
    town, [agent] = start(one_node(0, 1), node_silence_s=0.5)
    late = come(town, 5, slots=1)
    late.say(READY)
    town.until(lambda: late.of(Launch))
    if how == "is reset":
        late.reset()
    town.run(0.8, agent)
    assert [(event.node, event.replicas) for event in town.of(trace.NodeLost)] == [(1, ())]
    assert len(town.announced(0)) == 1 and not agent.of(JobEnds)
    pair = [come(town, number) for number in (6, 7)]
    for each in pair:
        each.say(READY)
    agent.say(ReplicaGone(Loss(1, LossKind.CRASHED, "it breaks"), None, None))
    town.until(lambda: FenceReplica(1) in agent.received)
    town.run(0.4, agent, *pair)
    assert all(each.of(FormReplica) for each in pair), "its former processes do not end in time, so that spares take its place"


def test_silent_late_nodes_hold_up_no_removal_of_a_member(start: Start) -> None:
    town, agents = start(*TWO_NODES, node_silence_s=0.5)
    for number in range(5, 9):
        come(town, number)
    town.run(0.4, *agents)
    town.run(0.8, agents[0])
    assert town.announced(0)[-1].new.roster == (0,), "one of two members is heard, and that is half"


def test_a_node_that_was_used_counts_like_any_other(start: Start) -> None:
    town, agents = start(*TWO_NODES, node_silence_s=0.5)
    lose_node(town, agents)
    late = [come(town, number) for number in (5, 6)]
    for agent in late:
        agent.say(READY)
    town.until(lambda: all(agent.of(FormReplica) for agent in late))
    town.run(0.7, agents[0])
    assert not [event for event in town.of(trace.NodeLost) if event.node > 1], "one of three is heard"
    town.run(0.9, agents[0], late[0])
    [lost] = [event for event in town.of(trace.NodeLost) if event.node > 1]
    assert (lost.node, lost.replicas) == (3, (2,))


def test_a_lost_node_whose_launcher_lives_starts_anew_once_its_ranks_have_ended(start: Start) -> None:
    town, agents = start(*TWO_NODES, node_silence_s=0.5)
    town.run(0.8, agents[0])
    assert town.announced(0)[-1].new.roster == (0,)
    agents[1].say(NodeBeat())
    town.until(lambda: FenceReplica(1) in agents[1].received)
    town.run(0.1, *agents)
    assert not agents[1].of(StartAnew), "its ranks may live"
    agents[1].say(FenceDone(1))
    town.until(lambda: agents[1].of(StartAnew))
    town.run(0.2, *agents)
    assert len(agents[1].of(StartAnew)) == 1 and agents[1].of(TraceDone) == [TraceDone(1)] and not agents[0].of(StartAnew)
    agents[1].hang_up()
    again = come(town, 9, name="n1")
    assert again.of(Met)[0].you == 2
    again.say(READY)
    town.run(0.2, agents[0], again)
    assert states(agents[0]) == [(0, "n0", "here"), (1, "n1", "lost"), (2, "n1", "spare")]


def test_a_spare_whose_link_was_reset_comes_anew(start: Start) -> None:
    town, agents = start(*TWO_NODES)
    late = come(town, 5)
    late.say(READY)
    town.until(lambda: late.of(Launch))
    late.reset()
    town.until(lambda: town.of(trace.NodeLost))
    back = Agent(town, 5, job=late.of(Met)[0].job)
    town.run(0.1, *agents)
    back.say(NodeBeat())
    town.until(lambda: back.of(StartAnew))


def test_a_late_node_whose_link_is_reset_before_it_has_read_its_number_is_told_and_can_come_as_another(start: Start) -> None:
    town, agents = start(*TWO_NODES)
    late = Agent(town, 5, slots=1)
    town.until(lambda: any(agent.number == 2 for agent in town.nodes._agents))
    late.reset()
    town.until(lambda: town.of(trace.NodeLost))
    back = Agent(town, 5, slots=1)
    town.run(0.1, *agents)
    assert not back.of(Met)
    back.say(NodeBeat())
    town.until(lambda: back.of(StartAnew))
    back.hang_up()
    assert come(town, 6, name="n5").of(Met)[0].you == 3


def test_a_host_that_comes_again_and_again_and_is_of_no_use_is_taken_no_more(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it gets a number of its own."""
    monkeypatch.setattr(job_start, "MOST_WASTED", 3)
    town, agents = start(*TWO_NODES)
    ways = (Agent.hang_up, Agent.reset, lambda late: late.say(replace(READY, healing=None)))
    for number, leave_by in enumerate(ways):
        late = come(town, 5 + number, name="n5")
        assert late.of(Met)[0].you == 2 + number
        leave_by(late)
        town.run(0.1, *agents)
        late.hang_up()
        town.run(0.1, *agents)
    late = come(town, 9, name="n5")
    assert not late.of(Met) and "n5 has come 3 times and was lost each time before it was of use" in late.of(JobEnds)[0].reason
    assert "node n5 has come late and is turned away: n5 has come 3 times" in said(agents[0])
    assert come(town, 10).of(Met)[0].you == 5, "another host is"


def test_a_host_that_was_of_use_begins_to_count_anew(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_start, "MOST_WASTED", 1)
    town, agents = start(*TWO_NODES)
    late = [come(town, number) for number in (5, 6)]
    for agent in late:
        agent.say(READY)
    lose_node(town, agents)
    town.until(lambda: all(agent.of(FormReplica) for agent in late))
    late[0].hang_up()
    town.until(lambda: len(town.of(trace.NodeLost)) == 2)
    come(town, 7, name="n5").hang_up()
    town.until(lambda: len(town.of(trace.NodeLost)) == 3)
    assert come(town, 8, name="n5").of(JobEnds)


def test_a_lost_node_on_which_a_newcomer_had_ranks_starts_anew_only_once_those_have_ended_too(start: Start) -> None:
    """Replica 1 has ended there, and replica 2 has been formed in its place."""
    town, agents = start(*TWO_NODES, node_silence_s=0.5)
    agents[1].say(ReplicaGone(Loss(1, LossKind.PROCESS_ENDED, "it is gone"), None, None))
    town.until(lambda: FenceReplica(1) in agents[1].received)
    agents[1].say(FenceDone(1))
    town.until(lambda: agents[1].of(FormReplica))
    agents[1].say(SlotsReady(2, "a:22"))
    town.until(lambda: agents[1].of(StartReplica))
    town.run(0.8, agents[0])
    assert [event.replicas for event in town.of(trace.NodeLost)] == [(1, 2)]
    agents[1].say(NodeBeat())
    town.run(0.2, *agents)
    assert FenceReplica(2) in agents[1].received and not agents[1].of(StartAnew), "ranks of the newcomer may live"
    agents[1].say(FenceDone(2))
    town.until(lambda: agents[1].of(StartAnew))
    told = (
        "node 1 (n1) meets the others anew, under a new number; where --run-dir is not shared, the trace of node 1 stays on n1"
    )
    assert told in said(agents[0])


def test_node_0_is_never_told_to_start_anew(start: Start) -> None:
    """Its launcher keeps the trace of the job, and has the coordinator."""
    town, agents = start(*TWO_NODES, node_silence_s=0.5)
    late = town.nodes._late
    assert late is not None
    [owner] = [agent for agent in town.nodes._agents if agent.number == 0]
    late.start_anew(owner)
    town.run(0.1, *agents)
    assert not agents[0].of(StartAnew) and not owner.starts_anew
    other = next(agent for agent in town.nodes._agents if agent.number == 1)
    late.start_anew(other)
    town.until(lambda: agents[1].of(StartAnew))


def test_a_signal_to_a_late_node_ends_it_alone(start: Start) -> None:
    town, agents = start(*TWO_NODES)
    late = come(town, 5)
    late.say(EndAsked("SIGTERM"))
    town.until(lambda: late.of(JobEnds))
    assert late.of(JobEnds)[0].exit_code == ExitCode.INTERRUPTED
    town.run(0.2, *agents)
    assert not any(agent.of(JobEnds) for agent in agents)


def test_the_drain_of_a_late_node_that_still_prepares_is_not_forgotten(start: Start) -> None:
    town, agents = start(*TWO_NODES)
    late = come(town, 5)
    assert drain(town, agents[0], "n5") == DrainAnswer("i", (), "", "no new replica is formed on n5 any more")
    late.say(READY)
    town.until(lambda: late.of(Launch))
    town.run(0.1, *agents, late)
    assert states(agents[0])[-1] == (2, "n5", "drained")
    lose_node(town, agents)
    town.run(0.4, agents[0], late)
    assert not late.of(FormReplica) and "no newcomer is formed on node 2: slot 0: node 2 is drained" in said(agents[0])
    assert drain(town, agents[0], "n5").why.startswith("node n5 is drained already: ")


def test_a_drained_node_that_is_lost_and_heard_again_does_not_come_anew(start: Start) -> None:
    town, agents = start(*TWO_NODES, node_silence_s=0.5)
    drain(town, agents[0], "n1")
    leave(town, agents[1], 1)
    town.run(0.8, agents[0])
    assert town.of(trace.NodeLost)
    agents[1].say(NodeBeat())
    town.run(0.3, *agents)
    assert not agents[1].of(StartAnew)
