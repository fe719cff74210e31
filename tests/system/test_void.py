"""A sum that does not count every microbatch once, in real jobs: computed anew; the second time all save the state and end."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import pytest

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.stop_mark import STOP_MARK
from tests.system.jobs import Job, Outcome, chaos_text, check, run_job
from tests.system.test_durable import tracker

pytestmark = pytest.mark.timeout(300)
SCRIPT = pathlib.Path(__file__).with_name("miscounting_pretrain.py")


def test_a_miscount_costs_one_attempt(
    tmp_path: pathlib.Path,
    data: pathlib.Path,
    reference: Callable[[Job], pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(replicas=2)
    monkeypatch.setenv("MISCOUNT", "1 2 1")
    once = run_job(job, tmp_path / "once", data, script=SCRIPT).expect(0)
    assert {event["step"] for event in once.events("miscounted")} == {2}
    (voiding,) = [event for event in once.events("generation") if event["generation"] == 2]
    assert voiding["void"] == [2, 2] and voiding["roster"] == [0, 1] and "computed anew" in voiding["reason"]
    verdict, report = check(once.run_dir, reference(dataclasses.replace(job)))
    assert verdict == 0, report
    (said,) = [line for line in report.splitlines() if line.startswith("computed anew: step 2, bucket ")]
    # A member that learns of the next generation before its own sum is complete does not report.
    words = ("has it 2 times", "did not report how often it has it")
    assert said.endswith(tuple(f"miscounted in generation 1; replica 1 {word}, planned in generation 1" for word in words)), (
        said
    )


def twice(
    tmp_path: pathlib.Path,
    data: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    job: Job,
    chaos: str = "",
    *,
    step: int = 2,
    saves: bool = True,
) -> Outcome:
    """Run a job whose third training step, which is this one of the job, is miscounted in both attempts."""
    monkeypatch.setenv("MISCOUNT", f"1 {step} 2")
    save = tmp_path / "checkpoints" if saves else None
    return run_job(job, tmp_path / "twice", data, script=SCRIPT, save=save, chaos=chaos)


def judged(outcome: Outcome, *, is_saved: bool) -> list[int]:
    """Return the iterations that the run has saved; fail unless it says what happened, and `check` has no finding."""
    found = outcome.expect(ExitCode.INVARIANT_VIOLATED)
    assert " is given up: replica " in found.output and "when the step was computed for the first time" in found.output
    saved = "is saved" if is_saved else "was not saved"
    assert f"; the state before that step {saved}" in found.output
    labels = {event["label"] for event in found.events("committed")}
    assert "give up train 3" in labels and "train 3" not in labels
    verdict, report = check(found.run_dir)
    assert verdict == 0, report
    return [iteration for iteration, phase in found.saves() if phase == "finished"]


@pytest.mark.parametrize("shape", [{}, {"pp": 2, "lanes": 2}], ids=str)
def test_a_second_miscount_ends_the_job_with_its_state_saved_from_which_it_goes_on_bit_for_bit(
    shape: dict[str, int],
    tmp_path: pathlib.Path,
    data: pathlib.Path,
    reference: Callable[[Job], pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(replicas=2, **shape)
    outcome = twice(tmp_path, data, monkeypatch, job)
    assert judged(outcome, is_saved=True) == [2] and not outcome.events("failure"), "a replica ended before it was told to"
    (tmp_path / "checkpoints" / STOP_MARK).unlink()
    resumed = run_job(job, tmp_path / "resumed", data, save=tmp_path / "checkpoints").expect(0)
    assert resumed.events("committed")[0]["label"] == "train 3"
    verdict, report = check(resumed.run_dir, reference(job))
    assert verdict == 0 and "bit-identical" in report, report


def test_what_is_saved_already_is_not_saved_again(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = twice(tmp_path, data, monkeypatch, Job(replicas=2, save_interval=1), step=4)
    assert judged(outcome, is_saved=True) == [1, 2]
    monkeypatch.setenv("MISCOUNT", "1 0 2")
    (tmp_path / "checkpoints" / STOP_MARK).unlink()
    again = run_job(Job(replicas=2, save_interval=1), tmp_path / "again", data, script=SCRIPT, save=tmp_path / "checkpoints")
    again.expect(ExitCode.INVARIANT_VIOLATED)
    loaded = f"is what was loaded from iteration 2 of --load {tmp_path / 'checkpoints'}: nothing was trained"
    assert f"; the state before that step {loaded}" in again.output
    assert {event["label"] for event in again.events("committed")} == {"give up train 3", "end 0"}
    assert not again.saves(), "what was loaded was saved again"
    assert tracker(tmp_path / "checkpoints") == 2


def test_without_a_place_to_save_the_job_says_so(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged(twice(tmp_path, data, monkeypatch, Job(replicas=2), saves=False), is_saved=False) == []


def test_a_writer_that_dies_in_that_save_is_made_up_for(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = twice(tmp_path, data, monkeypatch, Job(replicas=2), chaos_text("0 0 checkpoint"))
    assert judged(outcome, is_saved=True) == [2] and tracker(tmp_path / "checkpoints") == 2
    assert [event["replica"] for event in outcome.events("checkpoint") if event["phase"] == "finished"] == [1]


def test_state_that_has_drifted_is_not_saved(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIFT", "0 0 2 exp_avg")
    outcome = twice(tmp_path, data, monkeypatch, Job(replicas=2)).expect(ExitCode.DIVERGED)
    assert tracker(tmp_path / "checkpoints") is None
    labels = {kind: {event["label"] for event in outcome.events(kind)} for kind in ("plan", "committed")}
    assert "give up train 3" in labels["committed"] and "save 2" in labels["plan"] - labels["committed"]
