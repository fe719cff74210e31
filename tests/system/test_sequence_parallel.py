"""`--sequence-parallel`, which a CPU has by a substitute, beside a check of gradients and a profile of one replica."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import shutil

import pytest

from tests.system.jobs import Job, Outcome, chaos_text, check, run_job
from tests.system.test_endings import losses

pytestmark = pytest.mark.timeout(300)
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
PROFILE = ("--profile", "--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "2")
"""Upstream counts these steps from the resumption on, and torch crashes if it stops the profiler in between, as from 3 to 4."""


def test_a_job_with_a_death_is_one_replica_and_nearly_one_without_the_flag(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """Each rank's norms see half of the tokens: without the sum over both, their parameters drift apart, which `check` finds.

    All go on from one checkpoint: before it builds a model, upstream draws other random numbers with the flag.
    """
    plain = Job(replicas=1, tp=2, steps=6, save_interval=2, extra=NO_DROPOUT)
    without = run_job(plain, tmp_path / "run0", data, save=tmp_path / "save0").expect()
    watched = ("--check-for-large-grads", *PROFILE, "--tensorboard-dir", str(tmp_path / "tensorboard"))
    found: dict[int, Outcome] = {}
    for replicas, extra in ((1, ()), (2, watched)):
        save = tmp_path / f"save{replicas}"
        shutil.copytree(tmp_path / "save0" / "iter_0000002", save / "iter_0000002")
        (save / "latest_checkpointed_iteration.txt").write_text("2")
        job = dataclasses.replace(plain, replicas=replicas, extra=(*NO_DROPOUT, "--sequence-parallel", *extra))
        chaos = chaos_text("1 1 backward step=1") if replicas > 1 else ""
        found[replicas] = run_job(job, tmp_path / f"run{replicas}", data, save=save, chaos=chaos).expect()
    alone, two = found[1], found[2]
    wanted = {step: loss for step, loss in losses(without.run_dir).items() if step > 2}
    assert losses(alone.run_dir) == pytest.approx(wanted, rel=1e-5)
    assert len(two.events("fault")) == 1
    assert losses(two.run_dir) == losses(alone.run_dir)
    assert "--profile has no effect in other replicas than 0: every replica would write the same files" in two.output
    profiles = sorted((tmp_path / "torch_profile").iterdir())
    assert [path.name for path in profiles] == ["rank-0.json.gz", "rank-1.json.gz"]
    assert all(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in profiles)
    verdict, report = check(two.run_dir)
    assert verdict == 0, report
