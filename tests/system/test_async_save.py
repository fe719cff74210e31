"""With `--async-save` the writer trains on while it saves, saves what all had agreed on, and may die at any time meanwhile."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.system.jobs import Job, Outcome, chaos_text, check, run_job

pytestmark = pytest.mark.timeout(400)
LATE = pathlib.Path(__file__).with_name("late_background_pretrain.py")
ASYNC = ("--async-save", "--use-persistent-ckpt-worker")
ZERO1 = ("--use-distributed-optimizer", "--bf16")


def between(outcome: Outcome, iteration: int, *, replica: int = 0) -> int:
    """How many training steps `replica`, the writer, applied between the beginning and the end of a save."""
    begun, num = False, 0
    for line in (outcome.run_dir / "events.jsonl").read_text().splitlines():
        begun |= '"phase":"started"' in line and f'"iteration":{iteration},' in line
        if begun and '"phase":"finished"' in line:
            return num
        num += begun and '"event":"applied"' in line and '"label":"train' in line and f'"replica":{replica},"rank":0' in line
    raise AssertionError(f"no save of {iteration} ended")


def content(checkpoint: pathlib.Path, folder: pathlib.Path) -> dict[str, object]:
    """Everything in a checkpoint that is state (`trainer/state.py`), by name, tensors as bytes."""
    file = folder / "plain.pt"
    dcp_to_torch_save(checkpoint, file)
    loaded = torch.load(file, weights_only=False)
    return {
        name: value.view(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else pickle.dumps(value)
        for name, value in loaded.items()
        if not name.startswith(("common_state", "rng_state"))  # arguments, with folders of the run; no state
    }


@pytest.mark.parametrize(
    "job",
    [
        Job(pp=2, save_interval=2, steps=6, eval_interval=3),
        Job(lanes=2, save_interval=2, steps=6, extra=(*ZERO1, "--ckpt-assume-constant-structure")),
    ],
    ids=["stages, evaluations", "lanes"],
)
def test_what_is_written_late_is_what_all_had_agreed_on(job: Job, tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """Steps later the state is another one; the checkpoint is that of a job that waits while it saves."""
    waiting, late = tmp_path / "waiting", tmp_path / "late"
    run_job(job, tmp_path / "run1", data, save=waiting).expect()
    saving = dataclasses.replace(job, extra=(*job.extra, *ASYNC))
    outcome = run_job(saving, tmp_path / "run2", data, save=late, script=LATE).expect()
    assert "--use-persistent-ckpt-worker has no effect with replicas" in outcome.output
    assert outcome.saves() == [(iteration, phase) for iteration in (2, 4, 6) for phase in ("started", "finished")]
    assert between(outcome, 2) >= 1, "it waited for the write"
    for iteration in (2, 6):
        name = f"iter_{iteration:07d}"
        found, wanted = content(late / name, tmp_path), content(waiting / name, tmp_path)
        assert found.keys() == wanted.keys() and len(found) > 10
        assert not [key for key in found if found[key] != wanted[key]], iteration
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report
    if job.pp > 1:
        longer = dataclasses.replace(saving, steps=7, extra=(*saving.extra, "--override-opt-param-scheduler"))
        resumed = run_job(longer, tmp_path / "run3", data, save=late).expect()
        assert resumed.events("committed")[0]["label"] == "train 7"


@pytest.mark.parametrize(
    ("fault", "is_partial"),
    [("0 1 backward step=6 microbatch=0", True), ("0 0 checkpoint_tracker occurrence=1", False)],
    ids=["while it is written", "before it is named"],
)
def test_the_next_writer_repeats_a_save_whose_writer_dies(
    fault: str, is_partial: bool, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """Protocol step 6 is the training step behind `save 5`, in which the write goes on."""
    job, save = Job(pp=2, save_interval=5, steps=9, extra=ASYNC), tmp_path / "save"
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos_text(fault), save=save, script=LATE).expect()
    saves = outcome.saves()
    assert saves[0] == (5, "started") and (5, "finished") not in saves, saves
    assert ((5, "removed_partial") in saves) == is_partial, saves
    if is_partial:  # else the writer dies a second later, perhaps in the last steps
        assert [phase for iteration, phase in saves if iteration in (7, 8)] == ["started", "finished"], "it was lost"
    assert saves[-1] == (9, "finished")
    assert not list((save / ".partial").iterdir())
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report


def test_a_write_that_fails_in_the_background_costs_nothing_and_is_repeated(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILING", "0 1")
    job, save = Job(pp=2, save_interval=2, steps=4, extra=ASYNC), tmp_path / "save"
    outcome = run_job(job, tmp_path / "run", data, save=save, script=LATE).expect()
    assert outcome.saves() == [(2, "started"), (2, "failed"), (4, "started"), (4, "finished")]
    assert "the checkpoint of iteration 2 could not be saved" in outcome.output
    assert "FileNotFoundError" in outcome.output


def test_format_torch_is_refused(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    job = Job(extra=(*ASYNC, "--ckpt-format", "torch"))
    outcome = run_job(job, tmp_path / "run", data, save=tmp_path / "save").expect(2)
    assert "--async-save is not supported with replicas: Megatron writes that format only while it waits" in outcome.output
