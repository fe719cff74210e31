"""What drifts where no sum shows it never becomes the newest checkpoint of a real job, whoever writes and whenever it saves."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.stop_mark import STOP_MARK
from tests.system.jobs import Job, Outcome, chaos_text, check, run_job

pytestmark = pytest.mark.timeout(300)
SILENT = pathlib.Path(__file__).with_name("silent_pretrain.py")
ZERO1 = ("--use-distributed-optimizer", "--bf16")
VIRTUAL = ("--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")


@dataclasses.dataclass(frozen=True)
class Case:
    """A job in which state drifts just before a save, and what must be left of it."""

    name: str
    job: Job
    drift: str
    agreed: int | None
    """The newest checkpoint that all had agreed on."""
    step: str
    """In which they find out that they differ."""
    faults: tuple[str, ...] = ()
    exit: str = ""
    saves_late: bool = False
    """The writer begins to write when all others have the record of that save: none of them is to save what was agreed."""


CASES = (
    # Replica 0 writes: without the comparison it would name what it has.
    Case("at a save point", Job(save_interval=2, steps=6), "0 0 4 exp_avg", 2, "save 4"),
    Case(
        "after an evaluation, in a master weight sharded over lanes",
        Job(lanes=2, save_interval=2, eval_interval=4, steps=6, extra=ZERO1), "0 1 4 weight", 2, "save 4",
    ),
    Case(
        "at the last step, with virtual stages", Job(pp=2, save_interval=3, steps=4, extra=VIRTUAL), "1 0 4 exp_avg",
        3, "save 4",
    ),
    Case(
        "with too few replicas", Job(replicas=3, save_interval=2, steps=8, extra=("--recover-min-replicas", "3")),
        "0 0 3 exp_avg", 2, "save 3", ("2 0 before_vote step=3",),
    ),
    Case("when told to exit", Job(save_interval=2, steps=8), "0 0 5 exp_avg", 4, "save 5", exit="1 4"),
    Case(
        "in a save that makes up for a dead writer's", Job(replicas=3, save_interval=3, steps=9), "1 0 8 exp_avg",
        3, "save 8", ("0 0 checkpoint_tracker occurrence=2",),
        saves_late=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_newest_checkpoint_is_the_last_that_was_agreed_on(
    case: Case, tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIFT", case.drift)
    monkeypatch.setenv("EXIT", case.exit)
    monkeypatch.setenv("LATE_SAVES", "yes" * case.saves_late)
    save = tmp_path / "checkpoints"
    chaos = chaos_text(*case.faults)
    outcome = run_job(case.job, tmp_path / "run", data, chaos=chaos, save=save, script=SILENT).expect(ExitCode.DIVERGED)
    assert tracker(save) == case.agreed
    begun = [event["label"] for event in outcome.events("plan")]
    committed = [event["label"] for event in outcome.events("committed")]
    assert case.step in begun and case.step not in committed, f"{begun}\n{committed}"
    named = [iteration for iteration, phase in outcome.saves() if phase == "finished"]
    assert named[-1:] == [case.agreed]
    assert digests(outcome, case.step) > 1, "the trace does not say which rank differs"
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report
    if case is CASES[0]:
        (save / STOP_MARK).unlink()
        resumed = run_job(case.job, tmp_path / "again", data, save=save).expect(0)
        assert resumed.events("committed")[0]["label"] == "train 3" and tracker(save) == case.job.steps


@pytest.mark.parametrize(
    ("replicas", "faults", "labels"),
    [
        # Before its vote a replica has all sums, so all others have begun the step as well.
        (3, ("2 0 before_vote step=15",), ["train 16"]),
        (4, ("3 0 before_vote step=15", "2 0 before_vote step=16"), ["train 16", "save 16"]),
        (4, ("1 0 before_vote step=16", "3 0 before_vote step=23"), ["save 16", "end 0"]),
        (3, ("1 0 before_vote step=23",), ["end 0"]),
    ],
    ids=["train, 3", "train and save, 4", "save and end, 4", "end, 3"],
)  # fmt: skip
def test_a_death_in_a_step_that_compares_all_state_is_no_disagreement(
    replicas: int, faults: tuple[str, ...], labels: list[str], tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """At the interval of every user: statuses that did not say that the step compares ended a healthy run with code 12."""
    job, save = Job(replicas=replicas, steps=17, save_interval=16), tmp_path / "checkpoints"
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos_text(*faults), save=save).expect(0)
    struck = [event["step"] for event in outcome.events("fault")]
    named = {event["step"]: event["label"] for event in outcome.events("committed")}
    assert [named[step] for step in struck] == labels and tracker(save) == job.steps
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report


def test_replicas_that_do_not_start_alike_are_refused_with_both_values(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    unlike = pathlib.Path(__file__).with_name("unlike_pretrain.py")
    outcome = run_job(Job(steps=2), tmp_path / "run", data, script=unlike).expect(ExitCode.FAILED)
    assert "argument weight_decay is 0.01 on replica 0 and 0.02 on replica 1; " in outcome.output
    assert not outcome.events("committed")


def tracker(save: pathlib.Path) -> int | None:
    """The iteration that Megatron would load."""
    file = save / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else None


def digests(outcome: Outcome, label: str) -> int:
    """The most different digests that a rank position has at the beginning of a step."""
    found: dict[int, set[str]] = {}
    for line in (outcome.run_dir / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "state_digested" and event["label"] == label:
            found.setdefault(event["rank"], set()).add(event["digest"])
    return max(len(each) for each in found.values())
