"""With `--mtp-num-layers` the log has the losses of all microbatches, whoever computed them and whoever died."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from tests.system.jobs import Job, Outcome, chaos_text, check, run_job
from tests.system.test_endings import losses

pytestmark = pytest.mark.timeout(300)
LINE = re.compile(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+).*mtp_1 loss: ([0-9.E+-]+)")
MTP = ("--position-embedding-type", "rope", "--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.3")


def logged(outcome: Outcome) -> dict[str, tuple[str, str]]:
    return {found[1]: (found[2], found[3]) for found in LINE.finditer(outcome.output)}


@pytest.mark.parametrize(
    ("job", "faults"),
    [
        (Job(pp=2, steps=5, eval_interval=2, extra=MTP), ("1 1 backward step=1", "2 0 reduce step=4")),
        (Job(lanes=2, steps=4, extra=(*MTP, "--use-distributed-optimizer", "--overlap-grad-reduce")), ("0 1 reduce step=2",)),
    ],
    ids=["stages", "lanes, overlap"],
)
def test_a_job_with_deaths_logs_the_losses_of_one_replica_that_computed_all(
    job: Job, faults: tuple[str, ...], tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    alone = run_job(dataclasses.replace(job, replicas=1), tmp_path / "run1", data).expect()
    found = run_job(dataclasses.replace(job, replicas=3), tmp_path / "run3", data, chaos=chaos_text(*faults)).expect()
    assert len(found.events("fault")) == len(faults)
    assert losses(found.run_dir) == losses(alone.run_dir)
    assert logged(found) == logged(alone) and len(logged(found)) == job.steps
    verdict, report = check(found.run_dir)
    assert verdict == 0, report
