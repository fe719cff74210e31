"""Grants: at most one replica may name a checkpoint, and `latest` never moves back. Each rule is broken once, and caught."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_recover.core import coordinator, generations, grants, replica
from megatron_recover.core.grants import Holding, Ledger
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.membership_messages import Grant, NewGeneration
from megatron_recover.core.rank_messages import Begun, Holds, Promised, RankFinished
from megatron_recover.core.request import coordinator_lost
from megatron_recover.core.values import Held, Shape, Work
from megatron_recover.sim.explore.naming import NAMING, Naming, NamingScenario, Writer
from megatron_recover.sim.timed.leases import LeaseJob

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("scenario", NAMING, ids=str)
def test_inv_6_no_order_of_events_lets_two_replicas_name_or_moves_latest_back(scenario: NamingScenario) -> None:
    assert Naming(scenario).run() > 1000


def caught(naming: Naming, *words: str) -> None:
    with pytest.raises(InvariantViolation, match="INV-6") as found:
        naming.run()
    print(found.value)
    assert any(word in str(found.value) for word in words)


AT_ONCE, BACK = "at the same time", "moves latest"


def test_the_next_grant_on_suspicion_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the death of the holder is confirmed, and before its lease has lapsed."""
    original = generations.announce

    def hasty(state: coordinator.CoordinatorState, losses: Any, reason: str) -> coordinator.Step:
        for loss in losses:
            state = coordinator.replace(state, grants=grants.ended(state.grants, loss.replica))
        return original(state, losses, reason)

    monkeypatch.setattr(generations, "announce", hasty)
    caught(Naming(NamingScenario(cuts=1)), AT_ONCE)
    caught(Naming(NamingScenario(cuts=1, locks=False)), AT_ONCE)


def test_a_grant_that_is_used_twice_is_caught() -> None:
    class Twice(Naming):
        def begun(self, holding: Holding) -> Holding:
            return grants.replace(grants.begun(holding), is_used=False)

    caught(Twice(NamingScenario(deaths=1, cuts=1, replicas=2)), AT_ONCE, BACK)


def test_a_lease_that_the_coordinator_counts_short_is_caught() -> None:
    class Short(Naming):
        def is_lapsed(self, writer: Writer) -> bool:
            return True

    caught(Short(NamingScenario(cuts=1)), AT_ONCE)


def test_the_next_grant_on_the_death_of_another_than_the_holder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants, "ended", lambda ledger, _: grants.replace(ledger, open=None))
    caught(Naming(NamingScenario(cuts=1, deaths=1)), AT_ONCE)


def test_the_next_grant_on_the_timer_of_an_older_lease_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The death of the first holder was confirmed, and the second one is cut off, before that timer runs out."""

    def any_lease(state: coordinator.CoordinatorState, fired: coordinator.TimerFired) -> coordinator.Step:
        return generations.give_next(state, grants.replace(state.grants, open=None))

    monkeypatch.setattr(coordinator, "TABLE", {**coordinator.TABLE, coordinator.TimerFired: any_lease})
    caught(Naming(NamingScenario(cuts=1, deaths=1)), AT_ONCE)


def test_a_replica_that_has_voted_alone_and_enters_a_newer_generation_is_caught() -> None:
    """The others rely on its vote: the writer of the last generation needs no lease."""

    class Fickle(Naming):
        def is_bound(self, writer: Writer) -> bool:
            return False

    caught(Fickle(NamingScenario(replicas=2, cuts=1, blind=2)), AT_ONCE)


def test_a_last_generation_by_the_word_of_one_member_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants, "is_last_generation", lambda requests, roster: bool(requests))
    caught(Naming(NamingScenario(replicas=2, cuts=1, blind=1)), AT_ONCE)


def test_the_exploration_meets_writers_that_name_again_under_their_newest_grant() -> None:
    again = set()

    class Watched(Naming):
        def begun(self, holding: Holding) -> Holding:
            if holding.is_used:
                again.add(holding.newest)
            return super().begun(holding)

    Watched(NamingScenario(replicas=2, saves=3, cuts=1, blind=2)).run()
    assert {grant.writer for grant in again if grant is not None} == {0, 1}


def test_a_last_writer_without_any_grant_that_names_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It became the writer, and the lease of the one before has not lapsed."""
    original = grants.refusal

    def lenient(holding: Holding, now: float, lease_s: float, *, is_last: bool = False) -> str:
        return "" if is_last and holding.attempt is None else original(holding, now, lease_s, is_last=is_last)

    monkeypatch.setattr(grants, "refusal", lenient)
    caught(Naming(NamingScenario(replicas=2, cuts=1, blind=1)), AT_ONCE)


def test_a_used_grant_that_lasts_in_any_generation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = grants.refusal
    monkeypatch.setattr(grants, "refusal", lambda holding, *times, **_: original(holding, *times, is_last=True))
    caught(Naming(NamingScenario(replicas=2, cuts=1)), AT_ONCE, BACK)


def test_a_grant_of_a_generation_that_was_not_entered_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = grants.received
    monkeypatch.setattr(grants, "received", lambda holding, grant, _: original(holding, grant, grant.generation))
    caught(Naming(NamingScenario(replicas=2, cuts=1, blind=2)), AT_ONCE)


def test_a_writer_without_a_lock_that_excludes_nobody_is_caught() -> None:
    class Careless(Naming):
        def excluded(self, world: Any) -> Any:
            return world

    caught(Careless(NamingScenario(cuts=1, locks=False)), BACK)


def test_a_replica_whose_vote_says_that_it_has_no_coordinator_enters_no_newer_generation() -> None:
    def state_after(*inputs: replica.Input) -> replica.ReplicaState:
        state = replica.ReplicaState(0, Shape(1, ((0,),)))
        for each in (NewGeneration(1, (0,)), Promised(0, 1), *inputs):
            state, _ = replica.step(state, each)
        return state

    work, newer = Work("train 1", 1, (0,)), NewGeneration(2, (0,))
    lost, found = replica.CoordinatorLost(), replica.CoordinatorLost(is_over=True)
    voted = (Begun(0, 0, work), Holds(0, 0, (Held(0, 1, 7),)))
    assert state_after(lost, newer).generation == 2, "nobody relies on what was not said yet"
    assert state_after(lost, found, *voted).requests == ()
    after = state_after(lost, *voted, found, newer)
    assert (after.generation, after.requests) == (1, (coordinator_lost(0),))
    assert state_after(*voted, RankFinished(0)).phase is replica.ReplicaPhase.IDLE
    for end in ((RankFinished(0), lost), (lost, RankFinished(0))):
        assert state_after(*voted, *end).phase is replica.ReplicaPhase.STOPPED


# --- The lease, on clocks ------------------------------------------------------------------------------------------------


def test_inv_6_a_lease_lapses_before_the_next_grant_whatever_is_late_or_stands_still() -> None:
    for seed in range(200):
        LeaseJob(random.Random(seed)).run()


def test_a_lease_that_is_counted_from_when_a_beat_is_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that wakes reads an old beat, and takes itself for a member."""
    monkeypatch.setattr(grants, "heard", lambda holding, now: grants.replace(holding, renewed_at=now, answered_at=now))
    found = 0
    for seed in range(200):
        try:
            LeaseJob(random.Random(seed)).run()
        except InvariantViolation as violation:
            assert violation.invariant == 6
            found += 1
    assert found, "no seed shows it"


# --- The two sides alone -------------------------------------------------------------------------------------------------


def test_no_number_is_given_twice() -> None:
    ledger, numbers = Ledger(), []
    for roster in ((0, 1), (0, 1), (1,)):
        ledger = grants.given(ledger, 1, roster)
        assert ledger.open is not None and grants.given(ledger, 1, roster) == ledger, "one at a time"
        numbers.append(ledger.open.number)
        ledger = grants.confirmed(ledger, ledger.open.writer, ledger.open.number)
    assert numbers == [1, 2, 3] and grants.given(ledger, 1, ()) == ledger


def test_the_lease_counts_from_the_answer_before_the_newest_beat() -> None:
    holding = grants.received(Holding(0.0), Grant(1, 1, 0), 1)
    assert grants.refusal(holding, 0.0, 12.0), "no beat has come"
    holding = grants.heard(holding, 5.0)
    assert (holding.renewed_at, holding.answered_at) == (0.0, 5.0)
    assert not grants.refusal(holding, 12.0, 12.0) and "has lapsed" in grants.refusal(holding, 12.1, 12.0)
    assert not grants.refusal(holding, 1e6, 12.0, is_last=True)
    assert not grants.refusal(grants.heard(holding, 13.0), 17.0, 12.0)


def test_a_grant_counts_once_and_also_if_its_generation_is_over_when_it_comes() -> None:
    """The writer may have entered the next generation meanwhile. The coordinator gives no other until this one is closed."""
    holding = grants.received(grants.heard(Holding(0.0), 1.0), Grant(1, 1, 0), 2)
    assert not grants.refusal(holding, 2.0, 12.0)
    used = grants.attempted(grants.begun(holding))
    assert grants.refusal(grants.received(used, Grant(1, 1, 0), 2), 2.0, 12.0), "it has come twice"


def test_in_the_last_generation_the_newest_grant_lasts_and_one_attempt_excludes_another() -> None:
    holding = grants.heard(grants.received(Holding(0.0), Grant(3, 1, 0), 1), 1.0)
    for _ in range(2):
        holding = grants.begun(holding)
        assert grants.refusal(holding, 2.0, 12.0, is_last=True), "an attempt is under way"
        holding = grants.attempted(holding)
        assert "next grant" in grants.refusal(holding, 2.0, 12.0) and not grants.refusal(holding, 1e6, 12.0, is_last=True)
    assert grants.refusal(Holding(0.0, 0.0), 0.0, 12.0, is_last=True), "no grant was ever received"
    older = grants.received(grants.heard(Holding(0.0), 1.0), Grant(3, 2, 0), 1)
    assert grants.refusal(older, 2.0, 12.0, is_last=True), "that of a generation that was not entered counts for nothing"


def test_the_last_generation_is_known_only_by_the_word_of_every_member() -> None:
    said = {coordinator_lost(0), coordinator_lost(2), "exit: SIGTERM"}
    assert grants.is_last_generation(said, (0, 2)) and not grants.is_last_generation(said, (0, 1))
    assert not grants.is_last_generation(said, ())
