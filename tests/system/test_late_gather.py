"""With `--overlap-param-gather` and lanes, parameters are gathered in the next forward: with deaths and saves."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from tests.system.jobs import Job, chaos_text, check, run_job
from tests.system.test_async_save import content
from tests.system.test_endings import losses

pytestmark = pytest.mark.timeout(300)
ZERO1 = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--recover-state-digest-interval", "1")
LATE = ("--overlap-param-gather",)


@pytest.mark.parametrize(
    ("job", "faults"),
    [
        (
            Job(lanes=2, steps=5, save_interval=2, eval_interval=2, extra=(*ZERO1, "--bf16", "--async-save")),
            ("0 1 reduce step=2",),
        ),
        (
            Job(
                lanes=2, pp=2, steps=4, microbatches=4,
                extra=(*ZERO1, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"),
            ),
            ("1 0 optimizer step=2",),
        ),
        (
            Job(
                lanes=2, steps=4,
                extra=(*ZERO1, "--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
            ),
            ("1 1 backward step=2 microbatch=5",),
        ),
    ],
    ids=["bf16, evaluations", "virtual stages", "experts"],
)  # fmt: skip
def test_it_computes_what_a_job_computes_that_gathers_at_once(
    job: Job, faults: tuple[str, ...], tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    at_once, late = tmp_path / "at_once", tmp_path / "late"
    wanted = run_job(job, tmp_path / "run1", data, save=at_once).expect()
    overlapping = dataclasses.replace(job, extra=(*job.extra, *LATE))
    found = run_job(overlapping, tmp_path / "run2", data, save=late, chaos=chaos_text(*faults)).expect()
    assert "--overlap-param-gather has no effect" not in found.output
    assert len(found.events("fault")) == len(faults)
    assert losses(found.run_dir) == losses(wanted.run_dir)
    last = f"iter_{job.steps:07d}"
    checkpoint, expected = content(late / last, tmp_path), content(at_once / last, tmp_path)
    assert checkpoint.keys() == expected.keys() and not [key for key in checkpoint if checkpoint[key] != expected[key]]
    verdict, report = check(found.run_dir)
    assert verdict == 0, report
