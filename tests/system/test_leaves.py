"""A real job lets its writer leave, and the next one: no microbatch is lost, and each checkpoint is named once."""

from __future__ import annotations

import pathlib

from tests.system.jobs import Job, check, run_job


def test_writers_leave_and_hand_over_without_a_lost_microbatch(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """The first is asked while it may write a checkpoint in the background, which it names before it goes."""
    job = Job(replicas=3, pp=2, steps=14, save_interval=3, extra=("--async-save",), module="tests.system.draining_run")
    outcome = run_job(job, tmp_path / "run", data, save=tmp_path / "save").expect(0)
    saves = [iteration for iteration, phase in outcome.saves() if phase == "finished"]
    assert saves == [3, 6, 9, 12, 14], "each once, in order"
    assert [event["left"] for event in outcome.events("generation")] == [[], [0], [1]]
    assert not outcome.events("failure") and not outcome.events("fenced"), "their ranks ended with code 0"
    code, told = check(tmp_path / "run")
    assert code == 0 and "(microbatches: 0 lost, 0 computed again, 0 wasted)" in told, told
    assert told.count("asked by drain: no microbatch lost") == 2
