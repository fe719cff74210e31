"""The coordinator has newcomers formed: when, on which nodes, and what becomes of those that cannot start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.control_plane.node_messages import (
    DrainAnswer,
    DrainAsked,
    FenceDone,
    FenceReplica,
    FormReplica,
    JobState,
    Launch,
    NodeBeat,
    NodeLaunched,
    NodeReady,
    NotAdmitted,
    ReplicaGone,
    Roster,
    Say,
    ScaleAnswer,
    ScaleAsked,
    Seat,
    SlotsReady,
    SlotsUnfit,
    StartReplica,
)
from megatron_recover.core import slots
from megatron_recover.core.coordinator import MembershipSettings
from megatron_recover.core.membership_messages import Loss, LossKind, NewcomerReady, ReplicaLeaving, TurnedAway
from megatron_recover.core.request import TOO_FEW
from megatron_recover.core.values import Claim
from tests.control_plane.test_nodes_driver import Agent, Town

pytestmark = pytest.mark.timeout(120)
SETTINGS = slots.Settings(backoff_s=1.0, budget=2, patience_s=0.3, num_ranks=2)
Seats = dict[int, tuple[Seat, ...]]
Start = Callable[..., tuple[Town, list[Agent]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a job; each node has its seats (replica -> (rank, slot) pairs) and spare slots."""
    made: list[Town] = []

    def starting(
        *nodes: tuple[Seats, tuple[int, ...]], settings: slots.Settings | None = SETTINGS, lost: tuple[int, ...] = (),
        shared: MembershipSettings | None = None, node_silence_s: float = 1000.0,
        hello: Mapping[str, object] = MappingProxyType({}), early: int | None = None,
    ) -> tuple[Town, list[Agent]]:  # fmt: skip
        """`hello`: fields of each. `early`: a node of this number comes once the others have met."""
        town = Town(least=len(nodes), most=len(nodes), node_silence_s=node_silence_s)
        made.append(town)
        agents = town.meet(len(nodes), **hello)
        town.early = [] if early is None else [Agent(town, early, **hello)]
        town.num_replicas, led = len({replica for seats, _ in nodes for replica in seats}), set[int]()
        for agent, (seats, spares) in zip(agents, nodes, strict=True):
            mine = [replica for replica in seats if replica not in led]
            led.update(mine)
            leaders = tuple((replica, f"a:{replica}") for replica in mine)
            described = shared or MembershipSettings(num_replicas=town.num_replicas)
            agent.say(NodeReady(described, tuple(seats), leaders, (), tuple(seats.items()), spares, settings))
        town.until(lambda: all(agent.of(Launch) for agent in agents))
        for agent in agents:
            agent.say(NodeLaunched())
        town.leaders = {}
        for replica in lost:
            lose(town, agents[0], replica)
            agents[0].say(FenceDone(replica))
        for replica in {*range(town.num_replicas)} - {*lost}:
            town._lead(replica)
        town.until(lambda: all(agent.of(Roster) for agent in agents))
        return town, agents

    yield starting
    for town in made:
        town.nodes.close()
        town.loop.close()


def one_node(*replicas: int) -> tuple[Seats, tuple[int, ...]]:
    return {replica: ((0, 2 * at), (1, 2 * at + 1)) for at, replica in enumerate(replicas)}, ()


def lose(town: Town, agent: Agent, replica: int, kind: LossKind = LossKind.PROCESS_ENDED, rank: int | None = None) -> None:
    agent.say(ReplicaGone(Loss(replica, kind, "it is gone"), None, rank))
    town.until(lambda: FenceReplica(replica) in agent.received)


def said(agent: Agent) -> str:
    return "\n".join(message.text for message in agent.of(Say))


def test_a_newcomer_is_formed_in_place_once_the_end_of_every_process_was_seen(start: Start) -> None:
    town, [agent] = start(one_node(0, 1, 2))
    lose(town, agent, 1)
    town.run(0.2, agent)
    assert not agent.of(FormReplica), "a former process may live"
    agent.say(FenceDone(1))
    town.until(lambda: agent.of(FormReplica))
    assert agent.of(FormReplica) == [FormReplica(3, ((0, 2), (1, 3)))]
    [told] = town.of(trace.Forming)
    assert (told.newcomer, told.in_place_of, told.reason) == (3, (1,), "in the slots of replica 1 (node 0: slots 2 and 3)")
    town.run(0.1, agent)
    assert not agent.of(StartReplica)
    agent.say(SlotsReady(3, "a:33"))
    town.until(lambda: agent.of(StartReplica))
    assert agent.of(StartReplica) == [StartReplica(3, "a:33")]
    assert [each.roster for each in agent.of(Roster)] == [(0, 1, 2), (0, 2)], "nobody else is concerned"


def test_without_the_setting_nobody_is_formed(start: Start) -> None:
    town, [agent] = start(one_node(0, 1), settings=None)
    lose(town, agent, 1)
    agent.say(FenceDone(1))
    town.run(0.3, agent)
    assert not agent.of(FormReplica)


def test_a_replica_over_two_nodes_is_formed_when_both_have_seen_its_end_and_started_when_both_are_ready(start: Start) -> None:
    town, agents = start(({0: ((0, 0), (1, 1)), 1: ((0, 2),)}, ()), ({1: ((1, 0),), 2: ((0, 1), (1, 2))}, ()))
    lose(town, agents[1], 1)
    agents[1].say(FenceDone(1))
    town.run(0.1, *agents)
    assert not any(agent.of(FormReplica) for agent in agents), "a process on node 0 may live"
    agents[0].say(FenceDone(1))
    town.until(lambda: all(agent.of(FormReplica) for agent in agents))
    assert [agent.of(FormReplica) for agent in agents] == [[FormReplica(3, ((0, 2),), True)], [FormReplica(3, ((1, 0),), True)]]
    agents[0].say(SlotsReady(3, "a:33", "a:44"))
    town.run(0.1, *agents)
    assert not any(agent.of(StartReplica) for agent in agents)
    agents[1].say(SlotsReady(3))
    town.until(lambda: all(agent.of(StartReplica) for agent in agents))
    assert all(agent.of(StartReplica) == [StartReplica(3, "a:33", "a:44")] for agent in agents)
    lose(town, agents[1], 3)
    town.until(lambda: FenceReplica(3) in agents[0].received)


def test_a_newcomer_that_ends_is_tried_again_at_once_if_it_was_killed_and_later_if_it_broke_twice(start: Start) -> None:
    town, [agent] = start(one_node(0, 1))
    for replica, kind in ((1, LossKind.CRASHED), (2, LossKind.PROCESS_ENDED)):
        lose(town, agent, replica, kind)
        agent.say(FenceDone(replica))
        town.until(lambda replica=replica: FormReplica(replica + 1, ((0, 2), (1, 3))) in agent.received)
    lose(town, agent, 3, LossKind.EXCEPTION)
    agent.say(FenceDone(3))
    town.run(0.9, agent)
    assert len(agent.of(FormReplica)) == 2
    assert "slots 2 and 3: set aside for 1 s (1 of 2): replica 3: exception (it is gone)" in said(agent)
    membership = town.nodes._membership
    assert membership is not None and membership.state.has_room, "later"
    town.run(0.3, agent)
    assert agent.of(FormReplica)[2:] == [FormReplica(4, ((0, 2), (1, 3)))]


def test_a_newcomer_that_somebody_stops_again_and_again_is_put_off_and_its_slots_are_never_given_up(start: Start) -> None:
    town, [agent] = start(one_node(0, 1), settings=replace(SETTINGS, budget=1, backoff_s=0.1))
    for replica in (1, 2, 3, 4, 5):
        agent.say(ReplicaGone(Loss(replica, LossKind.HUNG, "rank 0 stopped"), None, 0, is_from_outside=True))
        town.until(lambda replica=replica: FenceReplica(replica) in agent.received)
        agent.say(FenceDone(replica))
        if replica > 2:
            town.run(0.07 * 2 ** (replica - 3), agent)
            assert len(agent.of(FormReplica)) == replica - 1, "it is put off"
        town.until(lambda replica=replica: len(agent.of(FormReplica)) == replica)
    assert "slots 2 and 3: put off for 0.1 s: replica 3: process ended (rank 0 stopped)" in said(agent)
    assert "never used again" not in said(agent)


def test_the_machine_knows_when_no_newcomer_can_be_formed_any_more(start: Start) -> None:
    town, [agent] = start(one_node(0, 1), settings=replace(SETTINGS, budget=0))
    membership = town.nodes._membership
    assert membership is not None
    for replica in (1, 2):
        assert membership.state.has_room
        lose(town, agent, replica, LossKind.CRASHED)
        agent.say(FenceDone(replica))
        town.run(0.2, agent)
    assert len(agent.of(FormReplica)) == 1 and not membership.state.has_room
    assert "never used again, as no try is left: replica 2: crashed" in said(agent)


def test_only_the_slot_of_the_rank_that_broke_is_blamed(start: Start) -> None:
    seats, _ = one_node(0, 1)
    town, [agent] = start((seats, (7,)))
    for replica in (1, 2):
        lose(town, agent, replica, LossKind.CRASHED, rank=1)
        agent.say(FenceDone(replica))
        town.until(lambda replica=replica: len(agent.of(FormReplica)) == replica)
    assert agent.of(FormReplica) == [FormReplica(2, ((0, 2), (1, 3))), FormReplica(3, ((0, 2), (1, 7)))]


def test_slots_that_are_not_fit_are_put_off_and_the_newcomer_is_removed_without_a_generation(start: Start) -> None:
    town, [agent] = start(one_node(0, 1))
    lose(town, agent, 1)
    agent.say(FenceDone(1))
    town.until(lambda: agent.of(FormReplica))
    agent.say(SlotsUnfit(2, (3,), "no room on the disk"))
    town.until(lambda: FenceReplica(2) in agent.received)
    agent.say(FenceDone(2))
    town.run(0.5, agent)
    assert len(agent.of(FormReplica)) == 1 and len(agent.of(Roster)) == 2
    assert "node 0: slot 3: put off for 1 s: no room on the disk" in said(agent)
    town.run(0.8, agent)
    assert [each.replica for each in agent.of(FormReplica)] == [2, 3]


def test_a_job_with_too_few_members_does_not_wait_for_checks_that_fail_for_good(start: Start) -> None:
    """It waits as often as the budget allows to set a slot aside, here twice, and then ends."""
    waits = MembershipSettings(num_replicas=2, min_replicas=2, waits_for_newcomers=True)
    town, [agent] = start(one_node(0, 1), shared=waits, settings=replace(SETTINGS, backoff_s=0.2))
    membership = town.nodes._membership
    assert membership is not None
    lose(town, agent, 1)
    agent.say(FenceDone(1))
    for replica in (2, 3, 4):
        town.until(lambda replica=replica: len(agent.of(FormReplica)) == replica - 1)
        assert not membership.state.requests and membership.state.has_room
        agent.say(SlotsUnfit(replica, (2,), "no room on the disk"))
        town.until(lambda replica=replica: FenceReplica(replica) in agent.received)
        agent.say(FenceDone(replica))
        town.run(0.1, agent)
    assert not membership.state.has_room and membership.state.requests == (TOO_FEW,), "the members end as with `end`"
    town.run(1.0, agent)
    assert len(agent.of(FormReplica)) == 3, "nobody is formed for a job that ends"


def test_the_node_on_which_a_waiting_job_forms_its_newcomer_is_not_drained(start: Start) -> None:
    waits = MembershipSettings(num_replicas=2, min_replicas=2, waits_for_newcomers=True)
    town, agents = start(one_node(0), one_node(1), ({}, (0, 1)), shared=waits)
    agents[1].hang_up()
    town.until(lambda: agents[2].of(FormReplica))
    refused = drain(town, agents[0], "n2").why
    assert refused.startswith("the job waits for 1 more replica, and without node n2 there are slots for 1 replica in all; ")
    membership = town.nodes._membership
    assert membership is not None and membership.state.forming and not membership.state.requests, "it goes on waiting"


def test_a_job_that_has_enough_members_tries_slots_again_however_often_their_checks_have_failed(start: Start) -> None:
    town, [agent] = start(one_node(0, 1), settings=replace(SETTINGS, budget=0, backoff_s=0.1))
    lose(town, agent, 1)
    agent.say(FenceDone(1))
    for replica in (2, 3, 4):
        town.until(lambda replica=replica: len(agent.of(FormReplica)) == replica - 1)
        agent.say(SlotsUnfit(replica, (3,), "no room on the disk"))
        town.until(lambda replica=replica: FenceReplica(replica) in agent.received)
        agent.say(FenceDone(replica))


def test_all_nodes_know_of_a_newcomer_that_was_turned_away_that_it_is_no_member(start: Start) -> None:
    """Without the coordinator they would wait for it for ever, since it cannot join any more."""
    town, agents = start(one_node(0, 1), one_node(2))
    lose(town, agents[0], 1)
    agents[0].say(FenceDone(1))
    town.until(lambda: agents[0].of(FormReplica))
    agents[0].say(SlotsReady(3, "a:3"))
    town.until(lambda: agents[0].of(StartReplica))
    town._lead(3)
    membership = town.nodes._membership
    assert membership is not None
    town.until(lambda: membership.num_expected == 0)
    claim = Claim(3, "train 1", 5)
    town.loop.send(town.links[0], NewcomerReady(0, membership.generation, membership.state.step, claim))
    town.until(lambda: 3 in agents[1].of(Roster)[-1].roster)
    town.loop.send(town.links[0], TurnedAway(0, membership.generation, (3,), "late"))
    town.until(lambda: all(agent.of(NotAdmitted) for agent in agents))
    assert agents[1].of(NotAdmitted) == [NotAdmitted((3,))] and membership.state.forming == (3,)


def test_a_newcomer_that_is_lost_before_all_nodes_are_ready_is_not_started(start: Start) -> None:
    town, [agent] = start(one_node(0, 1))
    lose(town, agent, 1)
    agent.say(FenceDone(1))
    town.until(lambda: agent.of(FormReplica))
    lose(town, agent, 2)
    agent.say(SlotsReady(2, "a:22"))
    town.run(0.2, agent)
    assert not agent.of(StartReplica)
    assert len(agent.of(FormReplica)) == 1, "nor is another one formed where it may have processes"


def test_spares_on_another_node_replace_what_a_lost_node_had(start: Start) -> None:
    town, agents = start(one_node(0), one_node(1), ({2: ((0, 0), (1, 1))}, (4, 5)))
    agents[1].hang_up()
    town.until(lambda: agents[2].of(FormReplica))
    assert agents[2].of(FormReplica) == [FormReplica(3, ((0, 4), (1, 5)))]
    assert not agents[0].of(FormReplica)


def test_the_slots_of_a_replica_that_leaves_are_given_back(start: Start) -> None:
    town, [agent] = start(one_node(0, 1, 2))
    agent.say(DrainAsked((1,), "drain"))
    town.run(0.1, agent)
    town.loop.send(town.links[1], ReplicaLeaving(1, 1))
    town.until(lambda: town.announced(0)[-1].new.roster == (0, 2))
    agent.say(FenceDone(1))
    town.run(0.3, agent)
    assert not agent.of(FormReplica)
    lose(town, agent, 2)
    agent.say(FenceDone(2))
    town.until(lambda: agent.of(FormReplica))
    town.run(0.2, agent)
    assert agent.of(FormReplica) == [FormReplica(3, ((0, 4), (1, 5)))], "one is missing, not two"


def test_a_newcomer_that_says_nothing_until_the_deadline_is_given_up(start: Start) -> None:
    town, [agent] = start(one_node(0, 1))
    lose(town, agent, 1)
    agent.say(FenceDone(1))
    town.until(lambda: agent.of(FormReplica))
    agent.say(SlotsReady(2, "a:22"))
    town.until(lambda: agent.of(StartReplica))
    end = town.now + 19.0
    while town.now < end:
        agent.say(NodeBeat())
        town.turn(0.2)
    assert FenceReplica(2) not in agent.received
    for _ in range(10):
        agent.say(NodeBeat())
        town.turn(0.2)
    assert FenceReplica(2) in agent.received


def test_a_replica_that_is_lost_before_generation_1_is_replaced_after_it(start: Start) -> None:
    town, [agent] = start(one_node(0, 1, 2), lost=(1,))
    town.until(lambda: agent.of(FormReplica))
    assert agent.of(FormReplica) == [FormReplica(3, ((0, 2), (1, 3)))]


# --- Another number of replicas ------------------------------------------------------------------------------------------


def scale(town: Town, agent: Agent, number: int) -> ScaleAnswer:
    """What the job answers."""
    known = len(agent.of(ScaleAnswer))
    agent.say(ScaleAsked(number, f"scale to {number}", "i"))
    town.until(lambda: len(agent.of(ScaleAnswer)) > known)
    return agent.of(ScaleAnswer)[-1]


def leave(town: Town, agent: Agent, replica: int) -> None:
    """Have a replica that was asked to leave report that it may, and end."""
    generation = town.announced(0)[-1].new.generation
    town.loop.send(town.links[replica], ReplicaLeaving(replica, generation))
    town.until(lambda: replica not in town.announced(0)[-1].new.roster)
    agent.say(FenceDone(replica))


def test_a_job_grows_into_its_spares_and_shrinks_by_the_highest_ids(start: Start) -> None:
    seats, _ = one_node(0, 1)
    town, [agent] = start((seats, (4, 5, 6)))
    answer = scale(town, agent, 3)
    assert answer == ScaleAnswer("i", "", "1 replica is formed while the others train")
    [*_, state] = [each for each in agent.received[: agent.received.index(answer)] if isinstance(each, JobState)]
    assert state.wanted == 3, "whoever reads the answer does not take the old number for a newer request"
    town.until(lambda: agent.of(FormReplica))
    assert agent.of(FormReplica) == [FormReplica(2, ((0, 4), (1, 5)))]
    town.run(0.2, agent)
    assert agent.of(JobState)[-1].wanted == 3 and len(agent.of(Roster)) == 1, "members are not concerned"
    answer = scale(town, agent, 1)
    assert (answer.leaving, answer.text) == ((1,), "replica 1 leaves after a common step; replica 2 is not formed any more")
    town.until(lambda: FenceReplica(2) in agent.received)
    agent.say(FenceDone(2))
    leave(town, agent, 1)
    town.run(0.3, agent)
    assert agent.of(JobState)[-1].wanted == 1 and len(agent.of(FormReplica)) == 1, "nobody is formed again"
    assert "scale to 3: 1 replica is formed while the others train" in said(agent)


def test_what_was_given_back_is_used_again_when_more_are_asked_for_and_for_nothing_else(start: Start) -> None:
    town, [agent] = start(one_node(0, 1, 2))
    agent.say(DrainAsked((1,), "drain"))
    town.run(0.1, agent)
    leave(town, agent, 1)
    town.run(0.2, agent)
    assert agent.of(JobState)[-1].wanted == 2 and not agent.of(FormReplica)
    assert scale(town, agent, 4).refused.startswith("there are slots for 3 replicas; ")
    scale(town, agent, 3)
    town.until(lambda: agent.of(FormReplica))
    assert agent.of(FormReplica) == [FormReplica(3, ((0, 2), (1, 3)))]
    [told] = town.of(trace.Forming)
    assert told.reason == "in the slots of replica 1 (node 0: slots 2 and 3)"


def test_spares_are_used_before_what_was_given_back(start: Start) -> None:
    seats, _ = one_node(0, 1, 2)
    town, [agent] = start((seats, (6, 7)))
    agent.say(DrainAsked((1,), "drain"))
    town.run(0.1, agent)
    leave(town, agent, 1)
    scale(town, agent, 3)
    town.until(lambda: agent.of(FormReplica))
    assert agent.of(FormReplica) == [FormReplica(3, ((0, 6), (1, 7)))]
    scale(town, agent, 4)
    town.until(lambda: len(agent.of(FormReplica)) == 2)
    assert agent.of(FormReplica)[1] == FormReplica(4, ((0, 2), (1, 3)))


def test_slots_of_a_replica_that_is_about_to_leave_are_used_again_once_its_processes_have_ended(start: Start) -> None:
    town, [agent] = start(one_node(0, 1, 2))
    agent.say(DrainAsked((2,), "drain"))
    town.run(0.1, agent)
    assert not scale(town, agent, 3).refused
    town.run(0.2, agent)
    assert not agent.of(FormReplica), "it lives"
    town.loop.send(town.links[2], ReplicaLeaving(2, 1))
    town.until(lambda: town.announced(0)[-1].new.roster == (0, 1))
    town.run(0.2, agent)
    assert not agent.of(FormReplica), "its processes may live"
    agent.say(FenceDone(2))
    town.until(lambda: agent.of(FormReplica))
    assert agent.of(FormReplica) == [FormReplica(3, ((0, 4), (1, 5)))]


def test_slots_that_a_request_for_more_would_use_again_stay_given_back_once_fewer_are_wanted(start: Start) -> None:
    town, [agent] = start(one_node(0, 1, 2))
    agent.say(DrainAsked((2,), "drain"))
    town.run(0.1, agent)
    scale(town, agent, 3)
    scale(town, agent, 2)
    town.loop.send(town.links[2], ReplicaLeaving(2, 1))
    town.until(lambda: town.announced(0)[-1].new.roster == (0, 1))
    agent.say(FenceDone(2))
    town.run(0.1, agent)
    lose(town, agent, 1)
    town.run(0.3, agent)
    assert not agent.of(FormReplica), "replica 1 may live, and what replica 2 had belongs to somebody else"
    agent.say(FenceDone(1))
    town.until(lambda: agent.of(FormReplica))
    assert agent.of(FormReplica) == [FormReplica(3, ((0, 2), (1, 3)))]


def test_a_member_that_was_asked_to_leave_and_is_needed_since_a_loss_is_replaced(start: Start) -> None:
    town, [agent] = start(one_node(0, 1, 2), shared=MembershipSettings(num_replicas=3, min_replicas=2))
    agent.say(DrainAsked((2,), "drain"))
    town.run(0.1, agent)
    lose(town, agent, 1)
    agent.say(FenceDone(1))
    town.until(lambda: agent.of(FormReplica))
    assert agent.of(FormReplica) == [FormReplica(3, ((0, 2), (1, 3)))]
    membership = town.nodes._membership
    assert membership is not None and membership.state.roster == (0, 2), "it stays until then"


def test_a_refused_number_changes_nothing(start: Start) -> None:
    town, [agent] = start(one_node(0, 1))
    membership = town.nodes._membership
    assert membership is not None
    before, events, states = membership.state, len(town.events), agent.of(JobState)
    for number, why in ((0, "0 replicas cannot train"), (3, "there are slots for 2 replicas"), (10**9, "there are slots")):
        assert why in scale(town, agent, number).refused
    town.run(0.2, agent)
    assert (membership.state, len(town.events), agent.of(JobState)) == (before, events, states)
    assert not agent.of(Say) and not agent.of(FormReplica)
    assert [len(town.announced(replica)) for replica in (0, 1)] == [1, 1]


def test_a_job_without_healing_shrinks_and_does_not_grow(start: Start) -> None:
    seats, _ = one_node(0, 1)
    town, [agent] = start((seats, (4, 5)), settings=None)
    assert "--recover-heal off" in scale(town, agent, 3).refused
    assert scale(town, agent, 1).leaving == (1,)
    leave(town, agent, 1)
    town.run(0.2, agent)
    assert scale(town, agent, 2).refused.startswith("no replica can be formed in this job")


def test_a_replica_that_is_lost_before_it_leaves_is_not_replaced(start: Start) -> None:
    town, [agent] = start(one_node(0, 1, 2))
    scale(town, agent, 2)
    lose(town, agent, 2)
    agent.say(FenceDone(2))
    town.run(0.3, agent)
    assert not agent.of(FormReplica)


def test_newcomers_that_are_given_up_for_a_smaller_number_do_not_speak_against_their_slots(start: Start) -> None:
    seats, _ = one_node(0, 1)
    town, [agent] = start((seats, (4, 5)))
    for replica in (2, 3, 4):
        scale(town, agent, 3)
        town.run(0.2, agent)
        assert FormReplica(replica, ((0, 4), (1, 5))) in agent.received, said(agent)
        scale(town, agent, 2)
        town.until(lambda replica=replica: FenceReplica(replica) in agent.received)
        agent.say(FenceDone(replica))


# --- A node that is given back -------------------------------------------------------------------------------------------


def drain(town: Town, agent: Agent, name: str) -> DrainAnswer:
    """What the job answers."""
    known = len(agent.of(DrainAnswer))
    agent.say(DrainAsked((), f"drain {name}", "i", name))
    town.until(lambda: len(agent.of(DrainAnswer)) > known)
    return agent.of(DrainAnswer)[-1]


def node_words(town: Town, *agents: Agent) -> list[str]:
    town.run(0.2, *agents)
    return [node.state for node in agents[0].of(JobState)[-1].nodes]


def test_a_drained_node_has_all_its_slots_out_of_use_for_good(start: Start) -> None:
    """Node 1 has a member, a lost replica whose processes may live, and spares."""
    two = {1: ((0, 0), (1, 1)), 2: ((0, 2), (1, 3))}
    town, agents = start(one_node(0), (two, (4, 5)), ({3: ((0, 0), (1, 1))}, ()))
    lose(town, agents[1], 2)
    answer = drain(town, agents[0], "n1")
    assert answer == DrainAnswer(
        "i", (), "", "no new replica is formed on n1 any more; replica 1 leaves after a common step", (1,)
    )
    leave(town, agents[1], 1)
    agents[1].say(FenceDone(2))
    town.run(0.5, *agents)
    assert not any(agent.of(FormReplica) for agent in agents)
    assert node_words(town, *agents) == ["here", "drained", "here"]
    assert "no newcomer is formed on node 1: slots 2, 3, 4 and 5: node 1 is drained" in said(agents[0])
    assert scale(town, agents[0], 4).refused.startswith("there are slots for 2 replicas; "), "nor for this"
    lose(town, agents[2], 3)
    agents[2].say(FenceDone(3))
    town.until(lambda: agents[2].of(FormReplica))
    assert agents[2].of(FormReplica) == [FormReplica(4, ((0, 0), (1, 1)))] and not agents[1].of(FormReplica)


def test_a_newcomer_whose_slots_are_being_checked_or_that_forms_on_a_drained_node_is_removed(start: Start) -> None:
    for is_started in (False, True):
        town, agents = start(one_node(0), ({1: ((0, 0), (1, 1))}, (2, 3)), ({}, (0, 1)))
        lose(town, agents[1], 1)
        agents[1].say(FenceDone(1))
        town.until(lambda agents=agents: agents[1].of(FormReplica))
        if is_started:
            agents[1].say(SlotsReady(2, "a:22"))
            town.until(lambda agents=agents: agents[1].of(StartReplica))
        answer = drain(town, agents[0], "n1")
        assert (answer.why, answer.leaving) == ("", ())
        assert answer.text == "no new replica is formed on n1 any more; replica 2 is not formed there any more"
        town.until(lambda agents=agents: FenceReplica(2) in agents[1].received)
        agents[1].say(SlotsReady(2, "a:22"))
        agents[1].say(FenceDone(2))
        town.until(lambda agents=agents: agents[2].of(FormReplica))
        town.run(0.4, *agents)
        assert len(agents[1].of(FormReplica)) == 1 and len(agents[1].of(StartReplica)) == is_started
        assert agents[2].of(FormReplica) == [FormReplica(3, ((0, 0), (1, 1)))], "the job still wants two replicas"


def test_who_drains_a_node_again_reads_what_has_become_of_it(start: Start) -> None:
    town, agents = start(one_node(0), one_node(1), ({}, (0, 1)))
    drain(town, agents[0], "n1")
    assert drain(town, agents[0], "n1").why == "node n1 is drained already: replica 1 still leaves"
    leave(town, agents[1], 1)
    told = "node n1 is drained already: no replica has a rank there, and no new one is formed there"
    assert drain(town, agents[0], "n1").why == told
    assert not drain(town, agents[0], "n2").why, "a node without ranks"
    agents[2].hang_up()
    town.until(lambda: town.of(trace.NodeLost))
    assert drain(town, agents[0], "n2").why == "node n2 is lost, or not used by the job: nothing of it is in use"


def test_a_refused_drain_of_a_node_changes_nothing(start: Start) -> None:
    """Node 0 has both members, and a newcomer of which it has a rank."""
    town, agents = start(({0: ((0, 0), (1, 1)), 1: ((0, 2), (1, 3))}, (4,)), ({2: ((0, 0), (1, 1))}, ()))
    membership = town.nodes._membership
    assert membership is not None
    agents[1].hang_up()
    town.until(lambda: town.announced(0)[-1].new.roster == (0, 1))
    town.run(0.2, agents[0])
    before, events, states = membership.state, len(town.events), agents[0].of(JobState)
    assert drain(town, agents[0], "n0").why == "replica 0 does not leave: no replica would stay"
    town.run(0.2, agents[0])
    assert (membership.state, len(town.events), agents[0].of(JobState)) == (before, events, states)
    lose(town, agents[0], 1)
    agents[0].say(FenceDone(1))
    town.until(lambda: agents[0].of(FormReplica))
    assert drain(town, agents[0], "n0").why == "replica 0 does not leave: no replica would stay"
    town.run(0.2, agents[0])
    assert not [each for each in agents[0].of(FenceReplica) if each.replica > 1], "the newcomer goes on"


def test_a_job_without_healing_drains_a_node_with_members_alone(start: Start) -> None:
    town, agents = start(one_node(0), one_node(1), ({}, (0, 1)), settings=None)
    assert "no new one is formed in this job: none has to leave" in drain(town, agents[0], "n2").why
    assert drain(town, agents[0], "n1").leaving == (1,)
    assert drain(town, agents[0], "n1").why == "node n1 is drained already: replica 1 still leaves"
