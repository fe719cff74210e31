"""Each rule of joining (`core/joining.py`), broken once: the explorer must find it and print the way to it.

That a slot is used while its former process lives is planted in `tests/control_plane/test_planted_slots.py`: slots and
processes are the driver's, and no machine knows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.core import (
    admission,
    coordinator,
    generations,
    holding,
    joining,
    newcomers,
    plan,
    recovery,
    replica,
    replica_generation,
    replica_step,
)
from megatron_recover.core.coordinator_state import Form
from megatron_recover.core.excuses import after_progress, without_evidence
from megatron_recover.core.invariants import StateKnown
from megatron_recover.core.joining import Admissions
from megatron_recover.core.membership_messages import Loss, LossKind, NewcomerReady, TurnedAway
from megatron_recover.core.rank_messages import Close, CloseAsked, Plan, StateDigested
from megatron_recover.core.replica_state import ReplicaState
from megatron_recover.core.speed import UNKNOWN
from megatron_recover.core.values import Claim, Record, Status, Work
from megatron_recover.core.vote import tally
from megatron_recover.sim.channels import card
from megatron_recover.sim.explore.explorer import Explorer, JobState
from megatron_recover.sim.explore.node import Node, Outcome, ReadState, Stimulus
from megatron_recover.sim.explore.scenario import Scenario
from megatron_recover.sim.explore.space import Attempt
from megatron_recover.sim.explore.threads import Threads
from megatron_recover.sim.multiset import state_digest
from tests.core.planting import caught, explore, handle, plant

pytestmark = pytest.mark.timeout(120)

JOIN: dict[str, Any] = {"microbatches": 1, "steps": 1, "newcomers": 1, "passes_last": True}
ALONE: dict[str, Any] = JOIN | {"replicas": 1}
TWO: dict[str, Any] = JOIN | {"replicas": 2}


class Rosters(Explorer):
    """Remembers the working rosters of all generations with newcomers, and how jobs ended."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.working: set[tuple[int, ...]] = set()
        self.ends: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def over(self, world: JobState) -> bool:
        over, state = super().over(world), self.coordinators[world.coordinator]
        self.working |= {members for _, members in self.histories[world.history].working}
        if over:
            self.ends.add((state.roster, tuple(loss.replica for loss in state.losses)))
        return over


def refused(threads: Threads | None, **scenario: Any) -> None:
    """No newcomer is ever admitted, and nothing is broken; without the change of `threads` some are admitted."""
    for simulator, is_admitted in ((Threads(passes_last=True), True), (threads, False)):
        found = Rosters(Scenario("refused", **scenario), simulator)
        report = found.run(limit=500_000)
        assert report.found is None, (report.found.lines, report.found.detail)
        newcomer = scenario["replicas"]
        assert any(newcomer in members for members in found.working) == is_admitted


def test_the_explorer_admits_newcomers_and_turns_them_away() -> None:
    """Or no bug below would show: a newcomer is admitted, is turned away, is lost, goes on alone."""
    found, alone = Rosters(Scenario("joins", **TWO)), Rosters(Scenario("joins", **ALONE | {"steps": 2}, crashes=1))
    assert found.run().found is None and alone.run().found is None
    assert {(0, 1), (0, 1, 2)} <= found.working and {(0,), (0, 1)} <= alone.working
    assert {((0, 1), ()), ((0, 1, 2), ())} <= found.ends
    assert {((0, 1), ()), ((1,), (0,)), ((0,), (1,))} <= alone.ends


# --- The state of a newcomer ----------------------------------------------------------------------


class Torn(Threads):
    """Newcomers read beyond the end of the state window: what they hold is the state of no step."""

    def stimulate(self, node: Node, stimulus: Stimulus) -> Outcome:
        if isinstance(stimulus, ReadState):
            stimulus = replace(stimulus, state_drifted=True)
        return super().stimulate(node, stimulus)


class OneRank(Threads):
    """In each step a single rank of a newcomer reads, in turn."""

    def stimulate(self, node: Node, stimulus: Stimulus) -> Outcome:
        outcome = super().stimulate(node, stimulus)
        if not isinstance(stimulus, ReadState):
            return outcome
        turn = stimulus.step % len(node.ranks)
        digest = state_digest(stimulus.step, turn, drifted=False)
        leader, _ = replica.step(node.leader, StateDigested(turn, node.work[stimulus.step].label, digest))
        facts = tuple(fact for fact in outcome.facts if isinstance(fact, StateKnown) and fact.rank == turn)
        return replace(outcome, node=replace(outcome.node, leader=leader), facts=facts)


def vouch_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members vouch for any digest."""
    original = joining.refusal

    def refusal(state: ReplicaState, claim: Claim) -> str:
        mine = joining.state_digest(state)
        return original(state, claim if mine is None else replace(claim, digest=mine))

    monkeypatch.setattr(admission, "refusal", refusal)


def plan_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The common plan admits newcomers with any digest."""
    original = joining.judged

    def judged(claims: Sequence[Claim], statuses: Sequence[Status], work: Work | None) -> Admissions:
        alike = [replace(status, state_digest=claims[0].digest) for status in statuses] if claims else statuses
        return original(claims, alike, work)

    monkeypatch.setattr(recovery, "judged", judged)


def test_admission_without_equal_digests_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other state of a member has drifted: nobody can say whose state the newcomer should have."""
    plan_blindly(monkeypatch)
    caught(explore(**TWO, state_drifts=1, digested=(0,)), 2)


def test_a_read_across_the_end_of_the_window_is_refused_or_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The member that is asked refuses it, and the plan does where that member does not."""
    torn = Torn(passes_last=True)
    refused(torn, **ALONE | {"steps": 2})
    vouch_blindly(monkeypatch)
    refused(torn, **ALONE | {"steps": 2})
    plan_blindly(monkeypatch)
    caught(explore(torn, **ALONE | {"steps": 2}), 2)


def test_a_digest_that_a_newcomer_adopts_is_caught() -> None:
    """It says what the member says, instead of what it computes from what it has read."""

    class Adopts(Torn):
        def digest(self, step: int, position: int, *, drifted: bool) -> int:
            return state_digest(step, position, drifted=False)

    caught(explore(Adopts(passes_last=True), **ALONE), 2)


def test_a_digest_that_a_member_adopts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = joining.state_digest
    plant(monkeypatch, "state_digest", lambda state: state.joins[0].digest if state.joins and state.work else original(state))
    caught(explore(**TWO), 2)


def test_chunks_of_two_steps_that_are_mixed_are_refused_or_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer forgets what its ranks have read of another step; else the digest shows it."""

    def mixed(state: ReplicaState, report: StateDigested) -> replica.Step:
        served = tuple(sorted({**dict(state.served), report.rank: report.digest}.items()))
        return replace(state, served_label=report.label, served=served), ()

    ranks = ALONE | {"steps": 2, "num_ranks": 2, "bucket_ranks": ((0, 1),)}
    chunks = OneRank(passes_last=True)
    refused(chunks, **ranks)
    handle(monkeypatch, StateDigested, mixed)
    refused(chunks, **ranks)
    vouch_blindly(monkeypatch)
    plan_blindly(monkeypatch)
    caught(explore(chunks, **ranks), 2)


def test_a_newcomer_with_the_state_of_an_earlier_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original, judge = joining.refusal, joining.judged

    def refusal(state: ReplicaState, claim: Claim) -> str:
        mine = joining.state_digest(state)
        return original(state, claim if mine is None or state.work is None else Claim(claim.replica, state.work.label, mine))

    def judged(claims: Sequence[Claim], statuses: Sequence[Status], work: Work | None) -> Admissions:
        known = next((each.state_digest for each in statuses if each.state_digest is not None), None)
        if known is not None and work is not None:
            claims = [Claim(claim.replica, work.label, known) for claim in claims]
        return judge(claims, statuses, work)

    monkeypatch.setattr(admission, "refusal", refusal)
    monkeypatch.setattr(recovery, "judged", judged)
    caught(explore(**ALONE | {"steps": 2}, digested=(0, 1)), 2)


# --- Its first step -------------------------------------------------------------------------------


def test_a_fresh_quota_in_the_first_step_of_a_newcomer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = plan.plan_of

    def fresh(found: recovery.Recovery, number: int, generation: int, roster: Any) -> Plan:
        made = original(found, number, generation, roster)
        if number not in found.admissions.admitted or found.work is None:
            return made
        return replace(made, computes=plan.fresh_plan(number, generation, roster, found.step, found.work).computes)

    monkeypatch.setattr(admission, "plan_of", fresh)
    caught(explore(**ALONE | {"microbatches": 2}), 7)


def test_a_lost_microbatch_that_is_dealt_to_a_newcomer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older member lives, and the newcomer may yet be turned away."""
    original = recovery.recover

    def recover(*arguments: Any, **others: Any) -> Any:
        found = original(*arguments, **others)
        if not isinstance(found, recovery.Recovery) or not found.admissions.admitted:
            return found
        return replace(found, dealt=tuple((found.admissions.admitted[0], i, into) for _, i, into in found.dealt))

    plant(monkeypatch, "recover", recover)
    caught(explore(**TWO | {"microbatches": 2}, crashes=1), 7)


class Early(Explorer):
    """The first newcomer is there from the beginning."""

    def initial(self) -> JobState:
        world = super().initial()
        left = world.faults._replace(newcomers=world.faults.newcomers - 1)
        return self.coordinate(world._replace(faults=left), coordinator.FormAsked(1))


class JoinsInStep1(Early):
    """It joins in step 1 or never."""

    def may_join(self, step: int) -> bool:
        return step == 1


def test_beliefs_about_speed_that_a_newcomer_does_not_take_over_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_admission

    def unknowing(state: ReplicaState, admission: replica.Admission) -> replica.Step:
        return original(state, replace(admission, speeds=UNKNOWN))

    plant(monkeypatch, "on_admission", unknowing)
    handle(monkeypatch, replica.Admission, unknowing)
    scenario = Scenario("planted", **TWO | {"steps": 3, "microbatches": 4}, paces=(1000, 4000, 1000))
    caught(JoinsInStep1(scenario).run(limit=500_000), 1, 2, 7)


class Member1Dies(JoinsInStep1):
    """Of the members only replica 1 may die."""

    def faults(self, world: JobState) -> Iterator[tuple[Attempt, JobState]]:
        for attempt, after in super().faults(world):
            if attempt != "replica 0 dies":
                yield attempt, after


def test_an_admission_with_a_part_of_the_record_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer is proven by the commit of replica 1, and in the next generation gives the record of the step before."""
    scenario = Scenario("planted", **TWO | {"steps": 2}, crashes=1, links=True)
    assert Member1Dies(scenario).run().found is None
    original = replica_generation.on_admission

    def of_part(state: ReplicaState, admission: replica.Admission) -> replica.Step:
        after, effects = original(state, admission)
        return replace(after, committed_digest=b""), effects

    plant(monkeypatch, "on_admission", of_part)
    handle(monkeypatch, replica.Admission, of_part)
    caught(Member1Dies(scenario).run(), 9)


def with_status(monkeypatch: pytest.MonkeyPatch, *, holds: bool) -> None:
    """A newcomer that was admitted sends its status like a member: its step and, if `holds`, its results."""
    original = replica_generation._newcomer_promised

    def promised(state: ReplicaState) -> replica.Step:
        after, effects = original(state)
        if not state.admitted_in or not joining.unproven(state):
            return after, effects
        _, said = replica_generation._send_status(state)
        own = next(effect.message for effect in said if isinstance(effect, replica.ToPeers))
        assert isinstance(own, Status)
        own = replace(own, state_digest=None, complete=own.complete if holds else ())
        return after, (*effects, replica.ToPeers(joining.older(state.roster, state.joins), own))

    plant(monkeypatch, "_newcomer_promised", promised)


def test_a_newcomer_that_counts_in_the_step_of_the_members_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has committed the step with the votes of all, and the member that is left has not heard of that."""
    with_status(monkeypatch, holds=False)
    caught(explore(**TWO, crashes=1, links=True), 2)


def test_a_result_that_is_taken_from_a_newcomer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with_status(monkeypatch, holds=True)
    caught(explore(**TWO, crashes=1, links=True), 2)


def test_a_newcomer_that_adopts_a_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as a member that is behind, where it has read what that step made."""

    def everybody(roster: Sequence[int], joins: Any) -> tuple[int, ...]:
        return tuple(roster)

    for module in (joining, replica_step):
        monkeypatch.setattr(module, "older", everybody)
    plant(monkeypatch, "_newcomer_promised", replica_generation._send_status)
    caught(explore(**ALONE | {"steps": 2}), 2)


# --- Turned away, lost ----------------------------------------------------------------------------


def test_waiting_for_the_vote_of_a_newcomer_that_is_turned_away_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    without, original = replica_generation.with_working_roster, plan.plan_of

    def keeps(state: ReplicaState, found: recovery.Recovery) -> replica.Step:
        after, effects = without(state, found)
        return replace(after, roster=state.roster), effects

    def working(found: recovery.Recovery, number: int, generation: int, roster: Sequence[int]) -> Plan:
        return original(found, number, generation, [each for each in roster if each not in found.admissions.turned_away])

    plant(monkeypatch, "with_working_roster", keeps)
    for module in (replica_generation, admission):
        monkeypatch.setattr(module, "plan_of", working)
    caught(explore(**TWO), 9)


def test_waiting_for_the_gradient_of_a_newcomer_that_is_turned_away_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.with_working_roster

    def keeps(state: ReplicaState, found: recovery.Recovery) -> replica.Step:
        after, effects = original(state, found)
        return replace(after, roster=state.roster), effects

    plant(monkeypatch, "with_working_roster", keeps)
    caught(explore(**ALONE | {"steps": 2}), 2, 9)


def test_a_turned_away_newcomer_that_stays_until_a_step_is_committed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the step before was the last: no commit follows, and the job waits for it to end."""
    original = newcomers.on_turned_away

    def later(state: coordinator.CoordinatorState, told: TurnedAway) -> coordinator.Step:
        return original(state, told) if state.step > 1 else (state, ())

    monkeypatch.setitem(coordinator.TABLE, TurnedAway, later)  # type: ignore[arg-type]
    caught(explore(**ALONE), 9)


def test_a_dead_newcomer_that_stays_until_a_step_is_committed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = generations._remove_newcomers

    def later(state: coordinator.CoordinatorState, losses: tuple[Loss, ...], reason: str) -> coordinator.Step:
        return original(state, losses, reason) if state.step else (state, ())

    monkeypatch.setattr(generations, "_remove_newcomers", later)
    caught(explore(**ALONE, crashes=1), 9)


def test_a_generation_for_the_loss_of_a_newcomer_that_forms_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(state: coordinator.CoordinatorState, losses: tuple[Loss, ...], reason: str) -> coordinator.Step:
        return generations.announce(generations.without(state, {loss.replica for loss in losses}), losses, reason)

    monkeypatch.setattr(generations, "_remove_newcomers", always)
    caught(explore(**ALONE, crashes=1), 9)


def test_blaming_a_member_for_the_stall_of_a_newcomer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def blames(state: coordinator.CoordinatorState) -> coordinator.Step:
        stuck = max(each for each in state.evidence.stuck if each in generations.members(state))
        return generations.remove(state, (Loss(stuck, LossKind.SUSPECTED, state.reason),), state.reason)

    scenario = TWO | {"broken": card(2, range(3), "both")}
    assert explore(**scenario).found is None
    monkeypatch.setattr(newcomers, "without_unproven", blames)
    caught(explore(**scenario), 9)


def test_a_majority_that_needs_a_newcomer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "tally", lambda votes, roster, unproven: tally(votes, roster))
    caught(explore(**TWO, drifts=1), 6)


class AfterALoss(Early):
    """A second newcomer is formed after a loss."""

    def faults(self, world: JobState) -> Iterator[tuple[Attempt, JobState]]:
        for attempt, after in super().faults(world):
            if self.coordinators[world.coordinator].losses or attempt != "a newcomer is formed":
                yield attempt, after


def test_an_id_that_is_used_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = newcomers.on_form_asked

    def again(state: coordinator.CoordinatorState, asked: coordinator.FormAsked) -> coordinator.Step:
        gone = [loss.replica for loss in state.losses if loss.replica >= state.policy.num_replicas]
        if not gone or state.generation < 3:  # it was in no roster
            return original(state, asked)
        return replace(state, forming=(*state.forming, gone[0])), (Form(gone[0]),)

    monkeypatch.setitem(coordinator.TABLE, coordinator.FormAsked, again)  # type: ignore[arg-type]
    scenario = Scenario("planted", **ALONE | {"newcomers": 2, "steps": 2}, crashes=1)
    caught(AfterALoss(scenario).run(limit=500_000), 6)


# --- A request to end -----------------------------------------------------------------------------

ASKED: dict[str, Any] = ALONE | {"exits": 1}


def test_a_newcomer_that_does_not_end_where_the_job_was_asked_to_is_caught() -> None:
    """The others agree on a last save, which it does not begin."""

    class TrainsOn(Threads):
        def is_asked_to_end(self, number: int, record: Record) -> bool:
            return number == 0 and super().is_asked_to_end(number, record)

    assert explore(**ASKED).found is None
    caught(explore(TrainsOn(passes_last=True), **ASKED), 2, 9)


def test_a_newcomer_that_joins_a_job_that_was_asked_to_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    vouch, judge = joining.refusal, newcomers.why_not_now
    monkeypatch.setattr(admission, "refusal", lambda state, claim: vouch(replace(state, requests=()), claim))
    monkeypatch.setattr(newcomers, "why_not_now", lambda state, ready: judge(replace(state, requests=()), ready))
    caught(explore(**ASKED), 9)


def test_a_request_to_end_that_takes_an_unproven_newcomer_for_a_member_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = coordinator.TABLE[coordinator.ExitAsked]

    def forgets(state: coordinator.CoordinatorState, asked: coordinator.ExitAsked) -> coordinator.Step:
        return original(replace(state, joins=()), asked)

    monkeypatch.setitem(coordinator.TABLE, coordinator.ExitAsked, forgets)  # type: ignore[arg-type]
    caught(explore(**ASKED), 2, 6)


# --- A crash loop beside a bad member -------------------------------------------------------------

LOOP: dict[str, Any] = TWO | {"newcomer_crashes": 1, "broken": card(1, range(4), "both"), "links": True}


def test_a_crash_loop_that_keeps_the_job_from_its_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bad member is not found, as the losses of newcomers explain each wait."""
    original = newcomers.why_not_now

    def ever(state: coordinator.CoordinatorState, ready: NewcomerReady) -> str:
        calm = replace(without_evidence(state), fruitless=0, reason="", joins_from=0)
        return original(calm, ready)

    assert explore(**LOOP).found is None
    monkeypatch.setattr(newcomers, "why_not_now", ever)
    caught(Early(Scenario("planted", **LOOP | {"newcomers": 2})).run(limit=500_000), 9)


def test_a_newcomer_that_dies_and_hides_a_bad_member_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator takes its loss for the reason why the members have got nowhere."""
    original = generations._remove_newcomers

    def hides(state: coordinator.CoordinatorState, losses: tuple[Loss, ...], reason: str) -> coordinator.Step:
        return original(after_progress(state), losses, reason)

    monkeypatch.setattr(generations, "_remove_newcomers", hides)
    caught(explore(**LOOP | {"newcomer_crashes": 0, "crashes": 1}), 9)


# --- A hold ---------------------------------------------------------------------------------------


def test_a_hold_that_never_ends_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer dies before it is announced: nothing else ends the hold."""
    handle(monkeypatch, replica.HoldExpired, lambda state, expired: (state, ()))
    caught(explore(**ALONE, crashes=1), 8, 9)


def test_a_hold_that_outlives_its_generation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "ended", lambda state: (state, ()))
    caught(explore(**ALONE), 8)


def test_a_hold_of_another_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that was asked to hold a later step holds the one that runs."""
    monkeypatch.setattr(holding, "held_label", lambda state: state.hold.label if state.hold is not None else "")
    caught(explore(**ALONE | {"steps": 2}, asks=1, links=True), 8)


def test_a_hold_that_lasts_beyond_the_end_of_its_pass_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps nobody's results back, and says that it does."""

    def closes(state: ReplicaState, report: CloseAsked) -> replica.Step:
        return replace(state, is_closed=True), (replica.ToRanks(Close(state.step)),)

    handle(monkeypatch, CloseAsked, closes)
    caught(explore(**ALONE), 8)
