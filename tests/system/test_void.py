"""A sum that does not count every microbatch once, in real jobs: computed anew once, and the end of the job the second time."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import pytest

from megatron_recover.core.values import ExitCode
from tests.system.jobs import Job, check, run_job

pytestmark = pytest.mark.timeout(300)
SCRIPT = pathlib.Path(__file__).with_name("miscounting_pretrain.py")


def test_a_miscount_costs_one_attempt_and_a_second_one_stops_the_job(
    tmp_path: pathlib.Path,
    data: pathlib.Path,
    reference: Callable[[Job], pathlib.Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(replicas=2)
    monkeypatch.setenv("MISCOUNTS", "1")
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

    monkeypatch.setenv("MISCOUNTS", "2")
    save = tmp_path / "checkpoints"
    job = dataclasses.replace(job, save_interval=1)
    twice = run_job(job, tmp_path / "twice", data, script=SCRIPT, save=save).expect(ExitCode.INVARIANT_VIOLATED)
    assert not twice.events("failure"), "a replica ended before it was told to"
    assert "when the step was computed for the first time; resume from the last checkpoint" in twice.output
    (label,) = {event["label"] for event in twice.events("plan") if event["step"] == 2}
    assert str(label).startswith("train ")
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) == int(str(label).split()[1]) - 1
