"""Each rule of leaving (`core/leaving.py`), broken once: the explorer must find it and print the way to it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.core import coordinator, generations, leaving, plan, recovery, replica, replica_generation, replica_step
from megatron_recover.core.membership_messages import ReplicaLeaving
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import Ballot
from megatron_recover.core.vote import voters_of
from megatron_recover.sim.explore.explorer import Explorer, JobState
from megatron_recover.sim.explore.scenario import Scenario
from tests.core.planting import caught, explore, handle, plant

pytestmark = pytest.mark.timeout(120)

LEAVE: dict[str, Any] = {"microbatches": 2, "leaves": 1}


def test_the_explorer_lets_replicas_leave_and_stay() -> None:
    """Or no bug below would show: one leaves without a loss, and one that is needed since a loss stays."""
    ends: set[tuple[tuple[int, ...], tuple[int, ...], bool]] = set()

    class Ends(Explorer):
        def over(self, world: JobState) -> bool:
            over, state = super().over(world), self.coordinators[world.coordinator]
            if over:
                ends.add((state.roster, state.left, bool(state.losses)))
            return over

    assert Ends(Scenario("leaves", replicas=2, microbatches=2, leaves=1, crashes=1)).run().found is None
    assert {((0,), (1,), False), ((1,), (0,), False), ((0,), (), True), ((0, 1), (), False)} <= ends


def test_leaving_before_a_record_asks_for_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(state: coordinator.CoordinatorState, asked: coordinator.LeaveAsked) -> coordinator.Step:
        stay = tuple(number for number in state.roster if number not in asked.replicas)
        if not stay or not state.generation:
            return state, ()
        return generations.announce(replace(state, roster=stay, left=asked.replicas), (), "leave", asked.replicas)

    monkeypatch.setitem(coordinator.TABLE, coordinator.LeaveAsked, at_once)  # type: ignore[arg-type]
    caught(explore(**LEAVE), 6)


def test_leaving_with_microbatches_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves as soon as the record is committed, in the step in which it still computes."""
    monkeypatch.setattr(coordinator, "free_to_go", lambda state: frozenset(state.leaving))
    original = replica_step.start

    def hasty(state: replica.ReplicaState) -> replica.Step:
        after, effects = original(state)
        report = replica.ToCoordinator(ReplicaLeaving(state.replica, state.generation))
        is_asked = state.work is not None and leaving.asked(state.requests, (state.replica,))
        return after, (*effects, report) if is_asked else effects

    plant(monkeypatch, "start", hasty)
    caught(explore(**LEAVE | {"leaves": 1, "alarms": 1}), 6, 7)


def test_dealing_to_a_replica_that_leaves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.fresh_plan

    def as_ever(*arguments: Any, leavers: Any, **others: Any) -> Plan:
        return original(*arguments, **others)

    plant(monkeypatch, "fresh_plan", as_ever)
    caught(explore(**LEAVE), 7)


def test_knowing_who_leaves_on_some_members_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.fresh_plan

    def forgetful(number: int, *arguments: Any, leavers: Any, **others: Any) -> Plan:
        return original(number, *arguments, leavers=leavers if number else (), **others)

    plant(monkeypatch, "fresh_plan", forgetful)
    caught(explore(**LEAVE | {"microbatches": 3}), 1, 7)


def test_forgetting_who_leaves_in_the_next_generation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.start

    def forgetful(state: replica.ReplicaState) -> replica.Step:
        record = state.committed
        if record is not None and state.generation > 1:
            record = replace(record, requests=())
        after, effects = original(replace(state, committed=record))
        return replace(after, committed=state.committed if after.step == state.step else after.committed), effects

    plant(monkeypatch, "start", forgetful)
    caught(explore(**LEAVE, replicas=2, alarms=1), 1, 7)


def test_counting_a_replica_that_has_left_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old vote would make a majority of as many heads as there are members."""
    original = replica_generation.on_generation

    def keep_vote(state: replica.ReplicaState, new: Any) -> replica.Step:
        after, effects = original(state, new)
        if after.generation == state.generation:
            return after, effects
        kept = [replace(ballot, voters=gone) for ballot in state.votes if (gone := tuple({*ballot.voters} & {*new.left}))]
        return replace(after, votes=tuple(kept)), effects

    def heads(votes: tuple[Ballot, ...], roster: tuple[int, ...], unproven: tuple[int, ...]) -> Any:
        return votes[0] if len(voters_of(votes)) >= len(roster) else None

    handle(monkeypatch, replica.NewGeneration, keep_vote)
    plant(monkeypatch, "tally", heads)
    caught(explore(**LEAVE), 2, 6)


def test_letting_the_last_member_leave_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def everybody(requests: Any, roster: Any, least: int) -> frozenset[int]:
        return frozenset(leaving.asked(requests, roster))

    for module in (leaving, replica_step, recovery):
        monkeypatch.setattr(module, "leavers", everybody)
    original = plan.balanced
    monkeypatch.setattr(plan, "balanced", lambda num, paces, pipeline: original(num, paces, pipeline) if paces else ())
    monkeypatch.setattr(coordinator, "judged", lambda state, replicas: (replicas, ()))
    # A step that nobody computes comes before the end of the job, which would be INV-9.
    caught(explore(replicas=2, microbatches=2, steps=3, leaves=2), 1)


def test_letting_too_many_leave_after_a_loss_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = leaving.leavers
    for module in (leaving, replica_step, recovery):
        monkeypatch.setattr(module, "leavers", lambda requests, roster, least: original(requests, roster, 1))
    caught(explore(**LEAVE, crashes=1, min_replicas=2), 6, 9)


def test_dealing_what_is_lost_to_a_replica_that_leaves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "leavers", lambda *_: frozenset())
    caught(explore(leaves=1, crashes=1, tree_above=1), 7)
