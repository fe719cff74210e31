"""fp16 with loss scaling and a cyclic loader: overflows, ends of epochs, deaths and a resumption change nothing."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil

import pytest

from tests.system.jobs import Job, Outcome, chaos_text, check, run_job
from tests.system.short_data_pretrain import NUM_SAMPLES
from tests.system.test_async_save import content
from tests.system.test_endings import losses

pytestmark = pytest.mark.timeout(300)
SHORT = pathlib.Path(__file__).with_name("short_data_pretrain.py")
DYNAMIC = ("--fp16", "--initial-loss-scale", str(2**20), "--hysteresis", "1", "--loss-scale-window", "2")
CYCLIC = ("--dataloader-type", "cyclic", "--recover-state-digest-interval", "1")
SCALE = re.compile(r"iteration +(\d+)/.*loss scale: ([0-9.]+).*number of skipped iterations: +(\d)")


def scales(outcome: Outcome) -> dict[str, tuple[str, bool]]:
    """Loss scale after an iteration, and whether the iteration was skipped."""
    return {found[1]: (found[2], found[3] != "0") for found in SCALE.finditer(outcome.output)}


def same_state(one: pathlib.Path, other: pathlib.Path, folder: pathlib.Path) -> bool:
    found, wanted = content(one, folder), content(other, folder)
    return found.keys() == wanted.keys() and len(found) > 10 and not [key for key in found if found[key] != wanted[key]]


def test_overflows_deaths_and_a_resumption_in_the_middle_of_an_epoch_change_nothing(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """Six samples a step of an epoch of 16: epochs end in steps 3, 6 and 8, and the second run begins with step 6."""
    job = Job(replicas=1, steps=8, save_interval=5, extra=(*DYNAMIC, *CYCLIC))
    alone = run_job(job, tmp_path / "run1", data, save=tmp_path / "alone", script=SHORT).expect()
    wanted = scales(alone)
    skipped = [step for step, (_, is_skipped) in wanted.items() if is_skipped]
    assert skipped[:2] == ["1", "2"] and len(skipped) < job.steps - 2, wanted
    three, save = dataclasses.replace(job, replicas=3), tmp_path / "three"
    # One death in a step that overflows, one in the first step of an epoch that does not.
    faults = ("1 0 reduce step=0 bucket=1", "2 0 backward step=6")
    first = run_job(three, tmp_path / "run3", data, save=save, chaos=chaos_text(*faults), script=SHORT).expect()
    assert len(first.events("fault")) == len(faults)
    assert (scales(first), losses(first.run_dir)) == (wanted, losses(alone.run_dir))
    assert same_state(save / "iter_0000008", tmp_path / "alone" / "iter_0000008", tmp_path)
    logs = [path.read_text(errors="replace") for path in (first.run_dir / "logs").iterdir()]
    assert not [log for log in logs if "is not exact" in log], "an overflow is one in any order"
    shutil.rmtree(save / "iter_0000008")
    (save / "latest_checkpointed_iteration.txt").write_text("5")
    second = dataclasses.replace(job, replicas=2)
    resumed = run_job(
        second, tmp_path / "run2", data, save=save, chaos=chaos_text("1 0 reduce step=1 bucket=0"), script=SHORT
    ).expect()
    assert len(resumed.events("fault")) == 1
    assert scales(resumed) == {step: wanted[step] for step in ("6", "7", "8")}
    assert losses(resumed.run_dir) == {step: loss for step, loss in losses(alone.run_dir).items() if step > 5}
    assert same_state(save / "iter_0000008", tmp_path / "alone" / "iter_0000008", tmp_path)
    for outcome in (first, resumed):
        verdict, report = check(outcome.run_dir)
        assert verdict == 0, report
    assert NUM_SAMPLES % job.microbatches, "an epoch has to end inside a step"
    smaller = dataclasses.replace(second, extra=(*DYNAMIC, "--micro-batch-size", "2", *CYCLIC))
    refused = run_job(smaller, tmp_path / "run4", data, save=save, script=SHORT).expect(2)
    assert "--micro-batch-size was 1 and is 2" in refused.output


def test_a_constant_scale_over_lanes_and_sharded_optimizers(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """What is not finite would end this job, as upstream does with a constant scale."""
    job = Job(lanes=2, steps=3, microbatches=4, extra=("--fp16", "--loss-scale", "512", "--use-distributed-optimizer"))
    alone = run_job(dataclasses.replace(job, replicas=1), tmp_path / "run1", data, save=tmp_path / "alone").expect()
    found = run_job(job, tmp_path / "run2", data, save=tmp_path / "two", chaos=chaos_text("0 1 reduce step=1")).expect()
    assert len(found.events("fault")) == 1 and "loss scale: 512.0" in found.output
    assert losses(found.run_dir) == losses(alone.run_dir)
    assert same_state(tmp_path / "two" / "iter_0000003", tmp_path / "alone" / "iter_0000003", tmp_path)
    verdict, report = check(found.run_dir)
    assert verdict == 0, report
