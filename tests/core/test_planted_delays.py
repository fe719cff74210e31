"""Each rule about who is late and who is at work, and about steps that are miscounted more than twice, broken once.

As in `test_planted_bugs.py`: the explorer must find it.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.core import coordinator, generations, lateness, rank, replica, replica_step
from megatron_recover.core.blame import Evidence
from megatron_recover.core.membership_messages import LossKind, Miscounted, ReplicaBlocked
from megatron_recover.core.rank_messages import Apply, Begun, Plan
from megatron_recover.sim.channels import link
from megatron_recover.sim.explore.explorer import Explorer, Scenario
from tests.core.planting import caught, explore, handle

SHARED = ((0, 1),)

pytestmark = pytest.mark.timeout(120)

LATE_READERS: dict[str, Any] = {"replicas": 2, "microbatches": 2, "readers": 2, "waits": 2}


def test_counting_waits_for_a_replica_at_work_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: its peers name it after some sums that ran out, and it is removed."""
    monkeypatch.setattr(lateness, "working", lambda state: ())
    for module in (generations, lateness):
        monkeypatch.setattr(module, "are_waits_excused", lambda state: bool(state.saves))
    caught(explore(**LATE_READERS), 9)


def test_asking_only_at_the_end_of_the_grace_who_was_at_work_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lateness.on_blocked

    def forgets(state: coordinator.CoordinatorState, request: ReplicaBlocked) -> coordinator.Step:
        state, effects = original(state, request)
        return replace(state, reason_excused_by=()), effects

    monkeypatch.setitem(coordinator.TABLE, ReplicaBlocked, forgets)  # type: ignore[arg-type]
    caught(explore(**LATE_READERS), 9)


def test_excusing_work_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs looks like one that reads, and keeps the others waiting for ever."""
    monkeypatch.setattr(lateness, "excuse", lambda state, members: (state, ()))
    scenario = Scenario("planted", replicas=2, microbatches=1, steps=1, readers=1, hangs=True, waits=2)
    with pytest.raises(MemoryError):
        Explorer(scenario).run(limit=2000)


def test_what_a_committed_step_does_not_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on after the deadline commits the step; who reads in the next one has a deadline of its own."""
    monkeypatch.setattr(lateness, "_reached", lambda state, step: replace(state, step=max(step, state.step)))
    caught(explore(replicas=2, microbatches=1, readers=2, waits=1, outlasts=True), 9)


def test_a_second_member_at_fault_that_is_never_named_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is a reader that hangs: once it is fenced nobody is at work, and what stops the others is their own link."""
    original = lateness._blame

    def once(state: coordinator.CoordinatorState) -> coordinator.Step:
        if any(loss.kind is LossKind.SUSPECTED for loss in state.losses):
            return generations.announce(state, (), state.reason)
        return original(state)

    monkeypatch.setattr(lateness, "_blame", once)
    caught(explore(microbatches=1, steps=1, readers=1, waits=1, hangs=True, broken=link(1, 2, "both")), 9)


def test_blaming_after_so_many_generations_instead_of_so_much_time_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generations may follow one another quickly, also where two were excused before them."""
    original = lateness._same_roster

    def counts(state: coordinator.CoordinatorState) -> coordinator.Step:
        return original(replace(state, patience=max(state.patience, int(state.fruitless > 2))))

    monkeypatch.setattr(lateness, "_same_roster", counts)
    caught(explore(replicas=2, microbatches=1, steps=1, readers=1, waits=3, hangs=True), 9)


def test_a_timer_that_removes_who_is_at_work_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes others that are late with right."""
    original = lateness._followed_late
    monkeypatch.setattr(lateness, "_followed_late", lambda state: original(replace(state, at_work=())))
    caught(explore(replicas=2, microbatches=1, steps=1, readers=1, waits=1, late=1), 9)


def test_forgetting_why_a_step_was_given_up_when_the_save_after_it_is_void_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = coordinator._on_miscounted

    def forgets(state: coordinator.CoordinatorState, miscounted: Miscounted) -> coordinator.Step:
        after, effects = original(state, miscounted)
        return (after if after.void is None or after.void.gives_up else replace(after, miscount="")), effects

    monkeypatch.setitem(coordinator.TABLE, Miscounted, forgets)  # type: ignore[arg-type]
    caught(explore(replicas=2, microbatches=2, steps=1, miscounts=3), 9)


def test_dropping_what_gives_a_step_up_once_the_next_one_is_planned_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may begin the next step before another rank of its replica has taken that this one is given up."""
    original = rank.TABLE[Plan]

    def hasty(state: rank.RankState, plan: Plan) -> rank.Step:
        kept = [order for order in state.queue if not (isinstance(order, Apply) and order.record.gives_up)]
        return original(replace(state, queue=tuple(kept)), plan)

    monkeypatch.setitem(rank.TABLE, Plan, hasty)  # type: ignore[arg-type]
    shared: dict[str, Any] = {"num_ranks": 2, "bucket_ranks": SHARED}
    caught(explore(replicas=2, microbatches=2, steps=1, **shared, miscounts=2, slow=True), 9)


def test_forgetting_the_digest_of_a_rank_that_begins_before_its_leader_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.on_begun

    def forgets(state: replica.ReplicaState, begun: Begun) -> replica.Step:
        return original(state if begun.rank else replace(state, digests=()), begun)

    handle(monkeypatch, Begun, forgets)
    caught(explore(replicas=2, microbatches=2, steps=1, num_ranks=2, bucket_ranks=SHARED, digested=(0,)), 9)


OVERDUE_SAVE: dict[str, Any] = {"replicas": 2, "microbatches": 1, "steps": 1, "readers": 1, "waits": 3, "saves": 1}


def test_excusing_an_overdue_save_by_the_work_of_another_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "own_deadlines", lambda evidence: Evidence())
    caught(explore(**OVERDUE_SAVE, late_saves=True), 9)


def test_holding_an_overdue_save_against_who_has_ended_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "without_evidence", lambda state: state)
    caught(explore(**OVERDUE_SAVE, late_saves=True), 9)


def test_naming_nobody_where_several_are_at_work_beyond_the_deadline_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who accuses several that are silent is not named, nor are they: only the agent tells that they had their time."""
    monkeypatch.setattr(lateness, "at_work_for_too_long", lambda state: None)
    caught(explore(microbatches=1, steps=1, readers=2, waits=1, hangs=True), 9)
