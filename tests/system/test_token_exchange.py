"""Jobs with upstream's flex dispatcher, whose kernels need NVLink: with DeepEP's substitute, and a kill."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Callable

import pytest

from tests.system.jobs import ROOT, Job, chaos_text, check, run_job

pytestmark = pytest.mark.timeout(300)

SCRIPT = ROOT / "tests" / "system" / "exchanging_pretrain.py"
EXPERTS = (
    "--num-experts 6 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-router-pre-softmax --moe-router-dtype fp32 "
    "--moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2 --disable-bias-linear --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --recover-state-digest-interval 1"
)
OVER_LANES = Job(lanes=2, steps=4, extra=tuple(shlex.split(EXPERTS)))
OVER_TENSORS = Job(tp=2, steps=4, extra=(*OVER_LANES.extra, "--expert-tensor-parallel-size", "1", "--sequence-parallel"))
CASES = {
    "hybridep": (OVER_LANES, "hybridep", 3),
    "deepep": (OVER_LANES, "deepep", 3),
    "hybridep, experts over tensor-parallel ranks": (OVER_TENSORS, "hybridep", 2),
}
"""Jobs, backends and numbers of replicas."""


@pytest.mark.parametrize("name", CASES)
def test_a_job_with_the_flex_dispatcher_loses_a_replica_and_ends_as_one_with_upstreams_all_to_all(
    name: str, tmp_path: pathlib.Path, reference: Callable[[Job], pathlib.Path], data: pathlib.Path
) -> None:
    """Each token has two experts, so every sum over experts has two terms, and its order changes nothing."""
    job, backend, replicas = CASES[name]
    flags = ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", backend)
    flex = dataclasses.replace(job, extra=(*job.extra, *flags))
    all_to_all = dataclasses.replace(job, extra=(*job.extra, "--moe-token-dispatcher-type", "alltoall"))
    undisturbed = run_job(dataclasses.replace(flex, replicas=1), tmp_path / "run1", data, script=SCRIPT).expect()
    found = run_job(
        dataclasses.replace(flex, replicas=replicas), tmp_path / "run", data, script=SCRIPT,
        chaos=chaos_text("1 1 backward step=2 microbatch=3"),
    ).expect()  # fmt: skip
    assert len(found.events("fault")) == 1
    for against in (undisturbed.run_dir, reference(all_to_all)):
        verdict, report = check(found.run_dir, against)
        assert verdict == 0 and "parameters bit-identical" in report, report
