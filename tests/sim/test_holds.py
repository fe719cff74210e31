"""Short steps and newcomers: without holds none gets in, with them one does, and nobody else waits for long."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.core import admission, coordinator, holding, replica, replica_step
from megatron_recover.core.coordinator_state import FormAsked
from megatron_recover.core.membership_messages import TurnedAway
from megatron_recover.core.rank_messages import CloseAsked
from megatron_recover.core.replica_state import HoldExpired, ReplicaPhase, ReplicaState
from megatron_recover.sim.timed.models import JobTable, Timing
from megatron_recover.sim.timed.recover import timers_of
from tests.core.planting import handle, plant
from tests.sim.build import TimedJob, scenario

pytestmark = pytest.mark.timeout(120)

GATHER_S = 0.05


class ShortSteps(TimedJob):
    """Two replicas with steps of about 60 ms, and a newcomer that reads the state in `reading_s`."""

    def __init__(self, reading_s: float, *, microbatches: int = 4, steps: int = 60) -> None:
        what = scenario(
            job={"replicas": 2, "ranks": 1, "stages": 1, "microbatches": microbatches, "steps": steps},
            compute={"microbatch_s": 0.05 * 2 / microbatches, "optimizer_s": 0.005},
            network={"bytes_per_s": 1e9, "gradient_bytes": 1e6, "latency_s": 0.001},
        )
        timers_s = timers_of(what.failures) | {"gather_s": GATHER_S}
        super().__init__(
            what.job, Reading(reading_s, what.job, what.compute, what.network), timers_s, detect_s=0.0, stall_s=2.0
        )
        self.reasons: list[str] = []
        self.clock.after(0.2, self.coordinator.feed, FormAsked(1))

    def judge(
        self, before: coordinator.CoordinatorState, message: coordinator.Input, after: coordinator.CoordinatorState
    ) -> None:
        if isinstance(message, TurnedAway):
            self.reasons.append(message.reason)

    @property
    def has_joined(self) -> bool:
        return 2 in self.coordinator.state.roster and not self.coordinator.state.joins


class Reading(Timing):
    """Reading a state takes time."""

    def __init__(self, seconds: float, job: JobTable, *others: Any) -> None:
        super().__init__(job, *others)
        self.seconds = seconds

    def state_s(self) -> float:
        return self.seconds


def without_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "held_for", lambda state, *_, **__: state)


def votes_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that vouches keeps its vote back, and lets its pass end."""
    original = replica_step._vote

    def close(state: ReplicaState, report: CloseAsked) -> replica.Step:
        after, effects = holding.on_close_asked(replace(state, hold=None), report)
        return replace(after, hold=state.hold), effects

    def vote(state: ReplicaState) -> replica.Step:
        return (state, ()) if replica.held_label(state) else original(state)

    def expired(state: ReplicaState, over: HoldExpired) -> replica.Step:
        after, effects = holding.on_hold_expired(state, over)
        if after.phase is not ReplicaPhase.WORKING or after is state:
            return after, effects
        after, more = original(after)
        return after, (*effects, *more)

    plant(monkeypatch, "_vote", vote)
    handle(monkeypatch, CloseAsked, close)
    handle(monkeypatch, HoldExpired, expired)


def test_without_a_hold_each_step_is_over_before_its_newcomer_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    without_holds(monkeypatch)
    job = ShortSteps(0.01)
    job.newcomers_ask = False
    job.run(until_s=60)
    assert not job.has_joined and len(job.reasons) > 5
    assert all("the step is" in reason or "is reduced already" in reason for reason in job.reasons), job.reasons
    assert any("the step is train" in reason for reason in job.reasons)


def test_with_a_hold_the_first_newcomer_that_asks_gets_in() -> None:
    job = ShortSteps(0.01)
    job.newcomers_ask = False
    job.run(until_s=60)
    assert job.has_joined and not job.reasons
    steps = sorted(time.ended for time in job.account.steps.values())
    longest = max(after - before for before, after in zip(steps, steps[1:], strict=False))
    assert longest < 0.06 + GATHER_S + 0.03, "the members wait for the announcement, and for nothing else"


def test_a_vote_that_is_kept_back_helps_no_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is reduced by then: a plan admits nobody to it."""
    votes_kept_back(monkeypatch)
    job = ShortSteps(0.01)
    job.newcomers_ask = False
    job.run(until_s=60)
    assert not job.has_joined and job.reasons
    assert all("is reduced already" in reason for reason in job.reasons)


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("asks", [True, False])
def test_a_newcomer_that_reads_for_longer_than_a_step_gets_in_if_it_asks_for_a_hold(asks: bool, microbatches: int) -> None:
    """With a quota of 1 the end of the pass is asked for as it begins."""
    job = ShortSteps(0.15, microbatches=microbatches)
    job.newcomers_ask = asks
    job.run(until_s=60)
    assert job.has_joined == asks
    assert job.account.exit_code == 0 and not job.coordinator.state.losses and not job.coordinator.state.fruitless


def test_a_reading_that_is_slower_than_any_hold_costs_the_members_no_more_than_holds_and_no_replica() -> None:
    job = ShortSteps(5.0, steps=20)
    job.run(until_s=60)
    assert not job.has_joined and job.account.exit_code == 0
    assert job.coordinator.state.generation == 1, "a hold has led to a request"
    steps = sorted(time.ended for time in job.account.steps.values())
    assert max(after - before for before, after in zip(steps, steps[1:], strict=False)) < job.hold_s + 0.1
