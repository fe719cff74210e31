"""Random jobs with newcomers, judged by `check`: their traces hold, and a bug that is planted in the core is found there.

The invariants of `core/invariants.py` are switched off where a bug is planted: `check` has to find it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.core import admission, coordinator, generations, recovery, replica, replica_generation, replica_step
from megatron_recover.core.joining import Admissions, judged
from megatron_recover.core.membership_messages import JoinRefused, NewGeneration
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.speed import Speeds
from megatron_recover.core.values import Claim, Compute
from megatron_recover.observe.history import History
from megatron_recover.observe.verify.check import violations
from megatron_recover.sim.timed import fuzz
from megatron_recover.sim.timed.traced import TracedJob
from scripts.study import judged_fuzz
from tests.core.planting import handle, plant

SEEDS = 80
PATIENCE = 2000
"""Seeds in which a planted bug has to be found; most are found in far fewer."""


def test_random_jobs_pass_check_as_well() -> None:
    found = list(judged_fuzz.judged(range(1, SEEDS + 1)))
    assert [one for one in found if one.problem] == []
    assert sum(one.verdict.joined for one in found) >= SEEDS / 10, "newcomers join in these traces"
    assert sum(one.events for one in found) > 100 * SEEDS


def test_the_trace_of_a_seed_has_all_that_newcomers_record() -> None:
    names = set()
    for seed in range(1, 100):
        job = TracedJob(seed)
        fuzz.run(job, seed)
        names |= {type(event).__name__ for _, event in job.trace}
    assert names >= {"Forming", "StateRead", "Claimed", "ClaimRefused", "TurnedAway", "Proven", "StateDigested"}


# --- Planted bugs --------------------------------------------------------------------------------------------------------


def _first_violation(invariant: str, words: str = "", *, first: int = 1) -> None:
    """`first`: where the search begins, since it was seen to find nothing in the seeds before."""
    for seed in range(first, PATIENCE):
        job = TracedJob(seed)
        if not job.has_newcomers:
            continue
        job.history = None  # `check` alone judges
        try:
            job.run(max_events=fuzz.MAX_EVENTS, until_s=fuzz.CALM_S)
            job.finish()
        except (RuntimeError, ValueError, KeyError, IndexError, AssertionError):
            pass  # the bug stops the job; what was recorded until then is judged
        for found in violations(History(job.trace)):
            if found.invariant == invariant and words in found.message:
                print(f"seed {seed}: {found.message}")
                return
    pytest.fail(f"the bug was not found in {PATIENCE} seeds")


def test_admission_without_equal_digests_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = admission.refusal

    def vouches(state: replica.ReplicaState, claim: Claim) -> JoinRefused | None:
        refused = original(state, claim)
        return None if refused is not None and "digest" in refused.reason else refused

    monkeypatch.setattr(admission, "refusal", vouches)
    monkeypatch.setattr(recovery, "judged", lambda claims, statuses, work: Admissions(tuple(one.replica for one in claims)))
    _first_violation("INV-2", "state digest")


def test_admission_with_the_state_of_another_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "judged", lambda claims, statuses, work: Admissions(tuple(one.replica for one in claims)))
    _first_violation("INV-2", "it has not claimed", first=390)


def test_admission_to_a_step_of_which_a_member_holds_results_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hides(claims: Sequence[Claim], statuses: Any, work: Any) -> Admissions:
        return judged(claims, [replace(status, complete=()) for status in statuses], work)

    monkeypatch.setattr(recovery, "judged", hides)
    _first_violation("INV-4", "hold results")


def test_a_fresh_microbatch_for_a_newcomer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = admission.plan_of

    def with_work(found: recovery.Recovery, number: int, generation: int, roster: Any) -> Plan:
        plan = original(found, number, generation, roster)
        return replace(plan, computes=(Compute((0,), plan.reduces),))

    monkeypatch.setattr(admission, "plan_of", with_work)
    _first_violation("INV-7", "in which it is new")


def test_a_fresh_quota_for_a_newcomer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recovery.recover

    def with_quotas(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        if not isinstance(found, recovery.Recovery) or not found.admissions.admitted:
            return found
        return replace(found, quotas=(*found.quotas[:-1], 1))

    plant(monkeypatch, "recover", with_quotas)
    _first_violation("INV-7", "in their first step")


def test_a_newcomer_whose_status_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "_newcomer_promised", replica_generation._send_status)
    _first_violation("INV-5", "in which it is unproven")


def test_waiting_for_one_that_was_turned_away_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.with_working_roster

    def keeps(state: replica.ReplicaState, found: recovery.Recovery) -> replica.Step:
        after, effects = original(state, found)
        return replace(after, roster=state.roster) if state.replica == 1 else after, effects

    plant(monkeypatch, "with_working_roster", keeps)
    _first_violation("INV-6", "turned away")


def test_a_newcomer_that_counts_as_a_member_after_a_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(*arguments: Any) -> NewGeneration:
        new = NewGeneration(*arguments)
        return replace(new, joins=()) if new.losses else new

    monkeypatch.setattr(generations, "NewGeneration", forgets)
    _first_violation("INV-6", "they are not proven")


def test_a_majority_that_needs_the_vote_of_a_newcomer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.tally
    plant(monkeypatch, "tally", lambda votes, roster, unproven: original(votes, roster, ()))
    _first_violation("INV-6", "half or more of the members", first=1250)


def test_a_newcomer_that_is_removed_without_a_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*arguments: Any) -> NewGeneration:
        new = NewGeneration(*arguments)
        return replace(new, losses=tuple(loss for loss in new.losses if loss.replica < 7))

    monkeypatch.setattr(generations, "NewGeneration", silent)
    _first_violation("INV-6", "without naming a loss", first=220)


def test_beliefs_about_speed_that_a_newcomer_does_not_take_over_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_admission

    def knows_nothing(state: replica.ReplicaState, admission: Any) -> replica.Step:
        return original(state, replace(admission, speeds=Speeds()))

    plant(monkeypatch, "on_admission", knows_nothing)
    handle(monkeypatch, replica.Admission, knows_nothing)
    _first_violation("INV-2", "quotas")


def test_committing_without_the_vote_of_a_newcomer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_step.tally

    def without(votes: Any, roster: Any, unproven: tuple[int, ...]) -> Any:
        return original(votes, tuple(one for one in roster if one not in unproven), unproven)

    plant(monkeypatch, "tally", without)
    _first_violation("INV-2", "without the vote of")


def test_taking_a_newcomer_for_proven_that_has_only_entered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = coordinator.TABLE[coordinator.Entered]

    def proves(state: coordinator.CoordinatorState, told: Any) -> coordinator.Step:
        after, effects = original(state, told)
        return replace(after, joins=tuple(claim for claim in after.joins if claim.replica != told.replica)), effects

    monkeypatch.setitem(coordinator.TABLE, coordinator.Entered, proves)  # type: ignore[arg-type]
    _first_violation("INV-6", "they are not proven")
