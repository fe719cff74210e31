"""The fuzzer: random jobs hold, a planted bug is found, and a seed that fails prints the line that fails again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.core import (
    admission,
    coordinator,
    generations,
    lateness,
    newcomers,
    rank,
    recovery,
    replica,
    replica_generation,
    replica_step,
)
from megatron_recover.core.blame import Evidence
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.joining import Admissions
from megatron_recover.core.membership_messages import JoinRefused, Loss, LossKind, NewcomersProven, ReplicaBlocked
from megatron_recover.core.plan import plan_of
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.speed import Speeds
from megatron_recover.core.values import Claim, Compute, Vote
from megatron_recover.sim.timed import fuzz, random_faults
from megatron_recover.sim.timed.course import Course
from megatron_recover.sim.timed.fuzz import RandomJob, SeedVerdict, run, verdicts
from megatron_recover.sim.timed.memory import Counts
from megatron_recover.sim.timed.rank import TimedRank
from tests.core.planting import handle, plant

SEEDS = 120
PATIENCE = 500
"""Seeds in which a planted bug has to be found; each is found in far fewer."""


def test_random_jobs_hold_and_end_well() -> None:
    found = list(verdicts(range(1, SEEDS + 1)))
    assert [verdict for verdict in found if verdict.problem] == []
    assert len({verdict.exit_code for verdict in found}) >= 4, "of all ways in which a job may end"
    words = " ".join(fault for verdict in found for fault in verdict.faults)
    for what in (
        "is killed", "is fenced", "stands still", "everybody stands", "the coordinator stands", "card of", "network between",
        "breaks", "fails on", "drift", "raises", "saves", "asked to exit", "miscounts", "reads for", "newcomers are formed",
    ):  # fmt: skip
        assert what in words
    with_newcomers = [verdict for verdict in found if verdict.newcomers]
    assert len(with_newcomers) >= SEEDS / 5
    assert sum(verdict.joined > 0 for verdict in with_newcomers) >= len(with_newcomers) / 5, "newcomers are formed, and join"
    assert any(verdict.joined > 1 for verdict in with_newcomers)


def test_a_seed_always_gives_the_same_job() -> None:
    assert list(verdicts(range(20, 40))) == list(verdicts(range(20, 40)))


@pytest.mark.parametrize("seed", [13350, 27708])
def test_the_owner_of_a_bad_card_is_named_whoever_waits_for_whom(seed: int) -> None:
    """Of the first, a member that needed a copy held all others up; of the second, the root of a tree has most accusers."""
    job = RandomJob(seed)
    verdict = run(job, seed)
    assert verdict.problem is None and sum("card of" in fault for fault in verdict.faults) == 1
    assert {loss.replica for loss in job.coordinator.state.losses} == {card[0] for card in job.bad_cards}


# --- Planted bugs --------------------------------------------------------------------------------------------------------


def _first_failure(job_of: Callable[[int], RandomJob] = RandomJob) -> SeedVerdict:
    for seed in range(1, PATIENCE):
        verdict = run(job_of(seed), seed)
        if verdict.problem is not None:
            print(f"seed {seed}: {verdict.problem}")
            return verdict
    pytest.fail(f"the bug was not found in {PATIENCE} seeds")


def _with_memory(kind: type[Counts]) -> Callable[[int], RandomJob]:
    def job_of(seed: int) -> RandomJob:
        job = RandomJob(seed)
        job.counts = job.memory = kind(job.table.microbatches, job.observe)
        return job

    return job_of


def test_committing_without_votes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "tally", lambda votes, roster, unproven: next(iter(votes)))
    assert "INV-6" in str(_first_failure().problem)


def test_counting_the_votes_of_an_older_generation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_generation

    def keep_votes(state: replica.ReplicaState, new: Any) -> replica.Step:
        after, effects = original(state, new)
        return replace(after, votes=state.votes), effects

    handle(monkeypatch, replica.NewGeneration, keep_votes)
    assert str(_first_failure().problem)[:5] in ("INV-2", "INV-6")


def test_a_reduction_in_place_is_found() -> None:
    class InPlace(Counts):
        def local_gradient_after(self, before: Any, result: Any) -> Any:
            return result

    assert "INV-" in str(_first_failure(_with_memory(InPlace)).problem)


def test_skipping_the_passes_of_an_overtaken_plan_is_found() -> None:
    class Skips(Counts):
        def computes(self, rank: TimedRank, plan: Plan) -> tuple[Compute, ...]:
            return plan.computes if plan.generation == rank.machine.promised else ()

    assert "INV-" in str(_first_failure(_with_memory(Skips)).problem)


def test_dealing_what_a_member_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = plan_of

    def for_all(found: recovery.Recovery, number: int, generation: int, roster: Any) -> Plan:
        dealt = tuple((number, i, into) for _, i, into in found.dealt)
        return original(replace(found, dealt=dealt), number, generation, roster)

    plant(monkeypatch, "plan_of", for_all)
    assert "INV-7" in str(_first_failure().problem)


def test_deciding_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "decide", lambda *_: ())
    assert "INV-4" in str(_first_failure().problem)


def test_results_that_count_after_the_promise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(TimedRank):
        __slots__ = ()

        def _retire(self, generation: int) -> None:
            pass

    def job_of(seed: int) -> RandomJob:
        job = RandomJob(seed, (random_faults.break_link,))
        for one in job.replicas:
            one.ranks = [Deaf(job, one, position) for position in range(job.table.ranks)]
        return job

    monkeypatch.setattr(rank, "may_run", lambda state, generation: True)
    assert "INV-5" in str(_first_failure(job_of).problem)


def test_a_coordinator_that_ignores_who_cannot_go_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coordinator.TABLE, ReplicaBlocked, lambda state, request: (state, ()))  # type: ignore[arg-type]
    assert "INV-8" in str(_first_failure().problem)


def test_blaming_who_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "working", lambda state: ())
    for module in (generations, lateness):
        monkeypatch.setattr(module, "are_waits_excused", lambda state: bool(state.saves))
    assert "INV-9" in str(_first_failure().problem)


def test_blaming_the_highest_id_of_all_who_are_accused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def highest(evidence: Evidence, roster: tuple[int, ...]) -> int | None:
        return max((accused for _, accused in evidence.pairs if accused in roster), default=None)

    monkeypatch.setattr(lateness, "culprit", highest)
    verdict = _first_failure(lambda seed: RandomJob(seed, (random_faults.bad_card,)))
    assert "nothing was wrong with them" in str(verdict.problem)


def test_keeping_ones_contributions_to_a_void_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation._voided

    def forgets(state: replica.ReplicaState, new: Any) -> replica.ReplicaState:
        return replace(original(state, new), contributions=state.contributions)

    plant(monkeypatch, "_voided", forgets)
    assert "INV-" in str(_first_failure(lambda seed: RandomJob(seed, (random_faults.miscount,))).problem)


def test_a_step_that_is_miscounted_twice_ends_the_job_with_its_state_saved() -> None:
    found = [run(RandomJob(seed, (random_faults.miscount,)), seed) for seed in range(1, SEEDS)]
    assert [verdict for verdict in found if verdict.problem] == []
    assert ExitCode.INVARIANT_VIOLATED in {verdict.exit_code for verdict in found}


def test_computing_a_step_a_third_time_instead_of_giving_it_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation._voided

    def stubborn(state: replica.ReplicaState, new: Any) -> replica.ReplicaState:
        return replace(original(state, new), work=state.work)

    plant(monkeypatch, "_voided", stubborn)
    assert "INV-1" in str(_first_failure(lambda seed: RandomJob(seed, (random_faults.miscount,))).problem)


def test_a_digest_that_does_not_show_a_drift_before_a_save_is_found() -> None:
    class Blind(Counts):
        def state_digest(self, rank: TimedRank) -> int:
            drifted, self.drifted = self.drifted, {}
            of_state, self.state_drifted = self.state_drifted, {}
            digest = super().state_digest(rank)
            self.drifted, self.state_drifted = drifted, of_state
            return digest

    def job_of(seed: int) -> RandomJob:
        job = RandomJob(seed, (random_faults.drift,))
        job.counts = job.memory = Blind(job.table.microbatches, job.observe)
        return job

    assert "INV-6" in str(_first_failure(job_of).problem)


def test_leaving_without_a_save_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Course.next_label

    def leaves(self: Course, num_steps: int, save_interval: int) -> str | None:
        return None if self.leaves else original(self, num_steps, save_interval)

    monkeypatch.setattr(Course, "next_label", leaves)
    assert "INV-9" in str(_first_failure(lambda seed: RandomJob(seed, (random_faults.ask_exit,))).problem)


def test_taking_a_save_for_made_whose_writer_died_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Course.after

    def at_once(self: Course, record: Any, *, is_writer: bool) -> Course:
        return replace(original(self, record, is_writer=is_writer), is_saved=record.label.startswith("end "))

    monkeypatch.setattr(Course, "after", at_once)
    assert "INV-9" in str(_first_failure(lambda seed: RandomJob(seed, (random_faults.kill_in_save,))).problem)


def test_a_timeout_that_removes_the_last_members_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_that_are_late(state: coordinator.CoordinatorState) -> coordinator.Step:
        late = [number for number in state.roster if number not in state.entered]
        return generations.remove(state, tuple(Loss(one, LossKind.SUSPECTED, "did not enter") for one in late), "late")

    monkeypatch.setattr(lateness, "_followed_late", all_that_are_late)
    assert "a timeout removed the last members" in str(_first_failure().problem)


def test_keeping_what_an_outvoted_replica_took_part_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recovery.recover
    plant(monkeypatch, "recover", lambda statuses, trusted_from, **others: original(statuses, 0, **others))
    assert "INV-" in str(_first_failure().problem)


def _with_newcomers(seed: int) -> RandomJob:
    """Return the job of the first seed from 10 times `seed` on that has newcomers."""
    return next(job for number in range(10 * seed, 20 * seed + 100) if (job := RandomJob(number)).has_newcomers)


def test_admission_without_equal_digests_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = admission.refusal

    def vouches(state: replica.ReplicaState, claim: Claim) -> JoinRefused | None:
        answer = original(state, claim)
        return None if answer is not None and "digest" in answer.reason else answer

    def admits(claims: Sequence[Claim], statuses: Any, work: Any) -> Admissions:
        return Admissions(tuple(claim.replica for claim in claims))

    monkeypatch.setattr(admission, "refusal", vouches)
    monkeypatch.setattr(recovery, "judged", admits)
    assert "INV-2" in str(_first_failure(_with_newcomers).problem)


def test_beliefs_about_speed_that_a_newcomer_does_not_take_over_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = replica_generation.on_admission

    def knows_nothing(state: replica.ReplicaState, admission: Any) -> replica.Step:
        return original(state, replace(admission, speeds=Speeds()))

    plant(monkeypatch, "on_admission", knows_nothing)
    handle(monkeypatch, replica.Admission, knows_nothing)
    assert "INV-" in str(_first_failure(_with_newcomers).problem)


def test_removing_a_member_because_it_was_a_newcomer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = newcomers.on_proven

    def never_entered(state: coordinator.CoordinatorState, told: NewcomersProven) -> coordinator.Step:
        return replace(original(state, told)[0], entered=state.entered), ()

    monkeypatch.setitem(coordinator.TABLE, NewcomersProven, never_entered)  # type: ignore[arg-type]
    assert "nothing was wrong with them" in str(_first_failure(_with_newcomers).problem)


def test_a_failing_seed_prints_the_line_that_fails_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = replica_step.on_vote

    def twice(state: replica.ReplicaState, vote: Vote) -> replica.Step:
        return original(replace(state, phase=replica.ReplicaPhase.WORKING) if vote.replica == 1 else state, vote)

    handle(monkeypatch, Vote, twice)
    assert fuzz.main(["--seeds", "20"]) == 1
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith(fuzz.COMMAND))
    assert fuzz.main(line.removeprefix(fuzz.COMMAND).split()) == 1
    assert line in capsys.readouterr().out
    assert "failed" in said.splitlines()[-1]


def test_ctrl_c_is_answered_with_the_totals_so_far_and_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def some(seeds: Sequence[int], jobs: int) -> Iterator[SeedVerdict]:
        yield from verdicts(seeds[:3])
        yield replace(fuzz.fuzz(seeds[3]), problem="INV-9: planted")
        raise KeyboardInterrupt

    monkeypatch.setattr(fuzz, "verdicts", some)
    assert fuzz.main(["--seeds", "1000", "--seed", "7", "--jobs", "2"]) == 130
    rest, sums, last = capsys.readouterr().out.splitlines()[-3:]
    assert rest == f"interrupted; to go on: {fuzz.COMMAND} --seed 11 --seeds 996 --jobs 2"
    assert sums.startswith("4 seeds, ") and last == "3 passed, 1 failed"


def test_a_defect_of_any_kind_is_told_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handle(monkeypatch, Vote, lambda state, vote: [][0])
    assert fuzz.main(["--seeds", "20"]) == 1
    assert f"{fuzz.COMMAND} --seed" in capsys.readouterr().out


def test_a_job_that_ends_otherwise_than_its_faults_explain_is_found() -> None:
    job = RandomJob(1)
    job.run(max_events=fuzz.MAX_EVENTS, until_s=fuzz.CALM_S)
    assert fuzz._ill_ended(job) is None
    job.faults, job.hit, job.num_raised = [], set(), 0
    for code in (ExitCode.INTERRUPTED, ExitCode.NO_REPLICA_LEFT, ExitCode.FAILED, ExitCode.POISONED_MICROBATCH):
        job.account.exit_code = code
        assert "INV-9" in str(fuzz._ill_ended(job)), code
