"""The bias of a router follows the tokens of all microbatches, each once, whoever computed them and whoever died."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch

from tests.system.jobs import Job, chaos_text, check, run_job
from tests.system.test_async_save import content
from tests.system.test_endings import losses

pytestmark = pytest.mark.timeout(300)
BIAS = (
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate", "0.05", "--disable-bias-linear", "--recover-state-digest-interval", "1",
)  # fmt: skip
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
VIRTUAL = ("--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")


@pytest.mark.parametrize(
    ("job", "faults"),
    [
        (Job(steps=5, extra=(*BIAS, *RECOMPUTED)), ("2 0 reduce step=3 bucket=1",)),
        (Job(pp=2, steps=5, extra=(*BIAS, *VIRTUAL, "--overlap-grad-reduce")), ("0 0 before_vote step=2", "2 1 reduce step=3")),
        (
            Job(lanes=2, steps=5, extra=(*BIAS, "--expert-model-parallel-size", "2", "--use-distributed-optimizer")),
            ("1 1 backward step=2",),
        ),
    ],
    ids=["recomputed", "virtual stages, overlap", "experts over lanes"],
)
def test_a_job_with_deaths_has_the_bias_of_one_replica_that_computed_all(
    job: Job, faults: tuple[str, ...], tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """One replica sums nothing over replicas, so its routers count as upstream's."""
    alone = run_job(dataclasses.replace(job, replicas=1), tmp_path / "run1", data, save=tmp_path / "alone").expect()
    three = dataclasses.replace(job, replicas=3)
    found = run_job(three, tmp_path / "run3", data, save=tmp_path / "three", chaos=chaos_text(*faults)).expect()
    assert len(found.events("fault")) == len(faults)
    assert losses(found.run_dir) == losses(alone.run_dir)
    last = f"iter_{job.steps:07d}"
    checkpoint, expected = content(tmp_path / "three" / last, tmp_path), content(tmp_path / "alone" / last, tmp_path)
    assert checkpoint.keys() == expected.keys() and not [key for key in checkpoint if checkpoint[key] != expected[key]]
    biases = [torch.frombuffer(bytearray(expected[key]), dtype=torch.float32) for key in expected if "expert_bias" in key]
    assert biases and all(bias.abs().max() > 0 for bias in biases), f"they have not moved: {biases}"
    verdict, report = check(found.run_dir)
    assert verdict == 0, report
