"""How real jobs end, save and go on: too few replicas, poisoned microbatches, hung ranks, interrupted saves, resumption."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from megatron_recover.core.exit_code import ExitCode
from tests.system.jobs import DEADLINE_S, ROOT, Job, chaos_text, check, run_job

pytestmark = pytest.mark.timeout(300)
IN_A_SAVE = ("checkpoint", "checkpoint_tracker")
"""Fault points that only the writer passes."""


def losses(run_dir: pathlib.Path) -> dict[int, float]:
    """Training loss by iteration, from the trace."""
    found = {}
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "applied" and event["label"].startswith("train ") and event["loss"] is not None:
            found[int(event["label"].split()[1])] = event["loss"]
    return found


def tracker(save: pathlib.Path) -> int:
    """The iteration that Megatron would load."""
    return int((save / "latest_checkpointed_iteration.txt").read_text())


def test_below_min_replicas_ends_with_a_checkpoint_that_resumes_with_the_same_samples(
    tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    job = Job(replicas=2, extra=("--recover-min-replicas", "2"))
    save = tmp_path / "checkpoints"
    # Inside a sum: the other has begun the step as well, and has to compute in it what is lost.
    first = run_job(job, tmp_path / "first", data, chaos=chaos_text("1 0 reduce step=2"), save=save)
    first.expect(ExitCode.TOO_FEW_REPLICAS)
    # The step in which the replica died was finished by the survivor: nothing was lost.
    assert tracker(save) == 3
    again = {replicas: tmp_path / f"checkpoints-{replicas}" for replicas in (1, 3)}
    runs = {}
    for replicas, copy in again.items():
        shutil.copytree(save, copy)
        resumed = dataclasses.replace(job, replicas=replicas, extra=())
        runs[replicas] = run_job(resumed, tmp_path / f"second-{replicas}", data, save=copy).expect(0)
    verdict, report = check(runs[3].run_dir, runs[1].run_dir)
    assert verdict == 0, report
    # The same samples as the run that was never interrupted; the last bits differ, since the grid of `exact` starts afresh.
    undisturbed = losses(reference(dataclasses.replace(job, extra=())))
    resumed_losses = losses(runs[3].run_dir)
    assert sorted(resumed_losses) == [4, 5, 6]
    for iteration, loss in resumed_losses.items():
        assert abs(loss - undisturbed[iteration]) < 1e-5


@pytest.mark.parametrize("evaluations", [0, 4])
def test_a_finished_job_that_is_started_again_ends_well(evaluations: int, tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    job = Job(replicas=2, steps=2, extra=("--eval-iters", str(evaluations // 2)))
    save = tmp_path / "checkpoints"
    run_job(job, tmp_path / "first", data, save=save).expect(0)
    again = run_job(job, tmp_path / "again", data, save=save).expect(0)
    assert "nothing was left to train: the checkpoint is of iteration 2 of 2" in again.output
    assert again.output.count("megatron-recover: training on the CPU: ") == 1
    assert (again.summary["steps"], again.summary["evaluation_steps"]) == (0, evaluations)
    assert not again.saves(), "the only checkpoint was written over"
    verdict, report = check(again.run_dir)
    assert verdict == 0, report


def test_microbatch_that_raises_in_two_replicas_stops_the_job_and_is_named(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    job = Job(replicas=3)
    # Replica 1 has microbatch 3; whoever has it next raises again, be it that it has begun the step already or not.
    faults = ["1 0 forward step=2 microbatch=3 kind=raise"]
    for replica, point in itertools.product((0, 2), ("recompute", "forward")):
        faults.append(f"{replica} 0 {point} step=2 microbatch=3 kind=raise")
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos_text(*faults)).expect(ExitCode.POISONED_MICROBATCH)
    assert "microbatch 3" in outcome.output and "train 3" in outcome.output
    assert len(outcome.events("fault")) == 2, "the microbatch was dealt a third time"


@pytest.mark.parametrize(("stages", "step", "label"), [(1, 2, "train 3"), (2, 2, "train 3"), (1, 3, "evaluate ")])
def test_a_loss_that_is_no_number_stops_the_job_and_its_microbatch_is_named(
    stages: int, step: int, label: str, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    broken = pathlib.Path(__file__).with_name("broken_pretrain.py")
    job = Job(pp=stages, eval_interval=3)
    outcome = run_job(job, tmp_path / "run", data, script=broken, environment={"BROKEN": f"{step} 4"})
    outcome.expect(ExitCode.POISONED_MICROBATCH)
    assert f"computing microbatch 4 of {label}" in outcome.output
    assert "the loss of microbatches [4] is not finite" in outcome.output


@pytest.mark.parametrize("point", IN_A_SAVE)
def test_writer_killed_in_a_save_is_taken_over(
    point: str, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    job = Job(replicas=3, save_interval=3)
    save = tmp_path / "checkpoints"
    late = pathlib.Path(__file__).with_name("late_save_pretrain.py")
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos_text(f"0 0 {point}"), save=save, script=late).expect(0)
    assert [event["point"] for event in outcome.events("fault")] == [point]
    assert outcome.summary["replicas_end"] == 2
    saves = [(event["replica"], event["iteration"], event["phase"]) for event in outcome.events("checkpoint")]
    assert (0, 3, "started") in saves and (0, 3, "finished") not in saves, saves
    # It asks for another save after iteration 4; the record of iteration 5 carries that.
    assert (1, 5, "finished") in saves, f"the next writer did not make up for it: {saves}"
    assert tracker(save) == 6
    verdict, report = check(outcome.run_dir, reference(dataclasses.replace(job, save_interval=1000)))
    assert verdict == 0, report


@pytest.mark.parametrize("killed", [False, True], ids=["all live", "one is killed meanwhile"])
def test_save_that_takes_many_stall_timeouts_costs_no_replica(
    killed: bool, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    # Replica 0 saves for four waits of a sum after step 2, in which all agree to; the others are in step 3 and cannot end it.
    job = Job(replicas=3, save_interval=2, steps=3, extra=("--recover-deadline-s", "45"))
    chaos = chaos_text("2 0 before_reduce step=3") if killed else ""
    slow = pathlib.Path(__file__).with_name("slow_save_pretrain.py")
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos, save=tmp_path / "checkpoints", script=slow).expect(0)
    assert outcome.summary["replicas_end"] == (2 if killed else 3)
    assert tracker(tmp_path / "checkpoints") == 3
    events = [json.loads(line) for line in (outcome.run_dir / "events.jsonl").read_text().splitlines()]
    begun, over = (
        next(index for index, event in enumerate(events) if (event.get("iteration"), event.get("phase")) == (2, phase))
        for phase in ("started", "finished")
    )
    struck = next((index for index, event in enumerate(events) if event["event"] == "fault"), begun)
    assert struck < over
    # On a busy machine the next step can be so far before the first line of the save.
    losses_of = [event["losses"] for event in events[min(begun, struck) : over] if event["event"] == "generation"]
    assert len(losses_of) <= 2, f"a storm of generations while a replica saves: {losses_of}"
    assert [loss["replica"] for lost in losses_of for loss in lost] == ([2] if killed else []), "not seen at once"
    verdict, report = check(outcome.run_dir, reference(dataclasses.replace(job, save_interval=1000, extra=())))
    assert verdict == 0, report


def test_save_that_takes_many_stall_timeouts_is_waited_for_without_a_coordinator(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    # Nobody can excuse the writer. The others wait for it all the same: the alternative is to end without its checkpoint.
    job = Job(replicas=3, save_interval=20, steps=1000, extra=("--recover-deadline-s", "45"))
    slow = pathlib.Path(__file__).with_name("slow_save_pretrain.py")

    def kills_the_coordinator() -> None:
        events = tmp_path / "run" / "events.jsonl"
        while not (events.exists() and '"label":"train 2"' in events.read_text()):  # `run_job` has a deadline
            time.sleep(0.05)
        [coordinator] = [each for each in psutil.Process().children(recursive=True) if each.name() == "coordinator"]
        coordinator.kill()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        killing = pool.submit(kills_the_coordinator)
        outcome = run_job(job, tmp_path / "run", data, save=tmp_path / "checkpoints", script=slow)
        killing.result()
    outcome.expect(ExitCode.INTERRUPTED)
    assert outcome.saves() == [(20, "started"), (20, "finished")]
    assert tracker(tmp_path / "checkpoints") == 20
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report


def test_signals_of_a_scheduler_in_mid_save_leave_a_checkpoint(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    job = Job(replicas=2, save_interval=2, steps=1000)
    script = pathlib.Path(__file__).with_name("signalled_save_pretrain.py")
    outcome = run_job(job, tmp_path / "run", data, save=tmp_path / "checkpoints", script=script)
    outcome.expect(ExitCode.INTERRUPTED)
    saves = outcome.saves()
    assert saves[:2] == [(2, "started"), (2, "finished")]
    assert saves[-1] == (tracker(tmp_path / "checkpoints"), "finished"), saves
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_full_disk_costs_no_replica_and_the_next_save_point_tries_again(
    ckpt_format: str, tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOM_FROM", "4")
    job = Job(replicas=2, pp=2, save_interval=2, steps=4, extra=("--ckpt-format", ckpt_format))
    full = pathlib.Path(__file__).with_name("full_disk_pretrain.py")
    outcome = run_job(job, tmp_path / "run", data, save=tmp_path / "checkpoints", script=full).expect(0)
    assert outcome.summary["replicas_end"] == 2
    assert outcome.saves() == [(2, "started"), (2, "failed"), (4, "started"), (4, "finished")]
    assert "WARNING: the checkpoint of iteration 2 could not be saved to --save" in outcome.output
    assert tracker(tmp_path / "checkpoints") == 4
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report


def test_disk_that_stays_full_has_an_exit_code_of_its_own(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATIENCE_S", "0.1")
    job = Job(replicas=2, steps=2)
    full = pathlib.Path(__file__).with_name("full_disk_pretrain.py")
    outcome = run_job(job, tmp_path / "run", data, save=tmp_path / "checkpoints", script=full).expect(ExitCode.UNSAVED)
    assert outcome.summary["replicas_end"] == 2
    assert "its last checkpoint could not be written" in outcome.output
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report


def test_folder_that_cannot_be_read_when_all_is_saved_ends_no_replica(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOM_FROM", "0")
    monkeypatch.setenv("LOST_AT_END", "1")
    job = Job(replicas=2, pp=2, steps=2)
    script = pathlib.Path(__file__).with_name("full_disk_pretrain.py")
    outcome = run_job(job, tmp_path / "run", data, save=tmp_path / "checkpoints", script=script).expect(0)
    assert outcome.summary["replicas_end"] == 2
    assert tracker(tmp_path / "aside") == 2 and (tmp_path / "checkpoints").is_symlink()


@pytest.mark.parametrize("point", ["reduce", "optimizer"])
def test_tensorboard_misses_no_iteration_when_its_writer_is_killed(
    point: str, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    job = Job(replicas=2, steps=5, extra=("--tensorboard-dir", str(tmp_path / "board")))
    # Inside a sum all have logged the step before. In the optimizer step 2 is committed, and who survives goes on to step 3.
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos_text(f"0 0 {point} step=2")).expect(0)
    found: dict[int, list[float]] = {}
    for file in sorted((tmp_path / "board").iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag == "lm loss":
                    found.setdefault(event.step, []).append(value.tensor.float_val[0])
    assert sorted(found) == [1, 2, 3, 4, 5], f"an iteration is missing: {found}"
    twice = {iteration: values for iteration, values in found.items() if len(values) > 1}
    assert len(twice) <= 1 and all(len(values) == 2 and len(set(values)) == 1 for values in twice.values()), twice
    for iteration, loss in losses(outcome.run_dir).items():
        assert found[iteration][0] == pytest.approx(loss, rel=1e-6)


def test_replica_whose_parameters_drift_is_outvoted_and_leaves_no_trace_in_the_result(
    tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    job = Job(replicas=3)
    drifting = pathlib.Path(__file__).with_name("drifting_pretrain.py")
    outcome = run_job(job, tmp_path / "run", data, script=drifting).expect(0)
    losses_of = [loss for event in outcome.events("generation") for loss in event["losses"]]
    assert [(loss["replica"], loss["kind"]) for loss in losses_of] == [(1, "diverged")]
    found, undisturbed = digests(outcome.run_dir), digests(reference(job))
    assert found[1, "train 3"] != found[0, "train 3"] == found[2, "train 3"] == undisturbed[0, "train 3"]
    # It was outvoted in the very next step, which the others made again without it.
    assert (1, "train 4") not in found
    for step in range(4, job.steps + 1):
        assert found[0, f"train {step}"] == found[2, f"train {step}"] == undisturbed[0, f"train {step}"]
    verdict, report = check(outcome.run_dir, reference(job))
    assert verdict == 0, report


def digests(run_dir: pathlib.Path) -> dict[tuple[int, str], str]:
    """Parameter digest of rank 0 by replica and step."""
    found = {}
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "applied" and event["rank"] == 0 and event["parameter_digest"]:
            found[event["replica"], event["label"]] = event["parameter_digest"]
    return found


def test_a_full_disk_under_the_run_directory_costs_the_trace_and_not_the_run(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    job = Job(replicas=2, steps=60)
    run_dir, command = tmp_path / "run", [sys.executable, "-m", "megatron_recover", "run", "--replicas", "2"]
    run = subprocess.Popen(
        [*command, "--run-dir", str(run_dir), "--", str(ROOT / "scripts" / "pretrain_gpt.py"), *job.megatron_flags(data, None)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert run.stdout is not None and "] megatron-recover: importing " in run.stdout.readline()
        # No file of the recorder may grow beyond it, and none of the ranks, which inherit it from the fork server.
        children = psutil.Process(run.pid).children()
        assert len(children) == 3, "recorder, fork server and coordinator"
        for child in children:
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (150_000, 150_000))
        out, err = run.communicate(timeout=DEADLINE_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == ExitCode.OK, out + err
    assert re.search(r"iteration +60/ +60", out), "it was trained to the end"
    assert out.count("WARNING: the trace cannot be written to") == 1, out
    assert "Traceback" not in out + err
    assert f"the end of the trace is missing in {run_dir}: File too large. At least " in err
    assert 0 < (run_dir / "events.jsonl").stat().st_size <= 150_000
    verdict, report = check(run_dir)
    assert verdict == ExitCode.UNFINISHED, report
