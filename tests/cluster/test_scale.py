"""`scale` of a running job, from its folder alone: real processes, launcher, coordinator and transfer of state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.cli import drain, scale
from megatron_recover.cluster.requests import Requests
from megatron_recover.cluster.status import REQUESTS, Answer, Request, Status, read, write
from megatron_recover.control_plane.node_messages import JobState, ScaleAnswer, ScaleAsked
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import Outcome, Spec
from tests.cluster.running import FOR_EVER, Running, Start
from tests.cluster.test_drain import STATE, carrier, running
from tests.cluster.test_joins import IN_PLACE, TOY

pytestmark = pytest.mark.timeout(240)


def growing(start: Start, run_dir: Path, **others: Any) -> Running:
    """A job of two replicas of one rank, whose newcomers join, with one spare slot."""
    spec = Spec(
        run_dir=str(run_dir), replicas=2, ranks=1, num_spares=1, steps=FOR_EVER, microbatches=6, pace_s=0.03, config=IN_PLACE,
        heals=True, script=str(TOY),
    )  # fmt: skip
    job = start(msgspec.structs.replace(spec, **others))
    job.until(lambda: (now := read(run_dir)) and now.generation, "the state of the job")
    return job


def ended(job: Running) -> Outcome:
    """The job after its end was asked for: nothing was lost, and whoever has trained in a step has applied the same."""
    job.launcher.terminate()
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    outcome.assert_exactly_once()
    assert not [loss for event in outcome.of(trace.Generation) for loss in event.losses], "nothing was lost"
    verdict = check(job.spec.run_dir)
    assert verdict.holds, describe(verdict)
    by_step: dict[int, set[str]] = {}
    for replica in range(10):
        for line in outcome.sums(replica, 0):
            by_step.setdefault(line["step"], set()).add(line["digest"])
    assert sorted(by_step) == list(range(len(by_step))), "no step is left out"
    assert all(len(digests) == 1 for digests in by_step.values()), "replicas have applied alike"
    return outcome


def test_a_job_grows_into_its_spare_shrinks_again_and_uses_what_drain_has_given_back(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    job = growing(start, run_dir)
    assert scale.main([str(run_dir), "--replicas", "3"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert told == "1 replica is formed while the others train\n3 replicas train (0 1 2)\n"
    assert "there are slots for 3 replicas; ask for 3 or fewer" in refusal(["--replicas", "4", str(run_dir)], capsys)
    assert scale.main([str(run_dir), "--replicas", "2"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert told == "replica 2 leaves after a common step\n2 replicas train (0 1)\n"
    assert drain.main(["0", str(run_dir)]) == ExitCode.OK
    now = read(run_dir)
    assert now is not None and (now.wanted, now.roster) == (1, (1,))
    assert scale.main([str(run_dir), "--replicas", "3"]) == ExitCode.OK
    assert "2 replicas are formed while the others train\n3 replicas train (1 3 4)\n" in capsys.readouterr().out
    outcome = ended(job)
    assert [event.left for event in outcome.of(trace.Generation) if event.left] == [(2,), (0,)]
    assert sorted(event.in_place_of for event in outcome.of(trace.Forming)) == [(), (0,), (2,)]
    assert not list((run_dir / REQUESTS).iterdir())


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `scale` prints where it refuses."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        scale.main(words)
    assert end.value.code == ExitCode.BAD_INPUT
    return capsys.readouterr().err


def test_the_next_record_after_a_refused_request_is_that_of_a_job_without_one(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[dict[int, Any]] = []
    for name in ("asked", "undisturbed"):
        run_dir = tmp_path / name
        job = growing(start, run_dir, num_spares=0, steps=150, config=msgspec.structs.replace(IN_PLACE, min_replicas=2))
        if name == "asked":
            assert "--recover-min-replicas is 2; ask for 2 or more" in refusal(["--replicas", "1", str(run_dir)], capsys)
            assert "there are slots for 2 replicas" in refusal(["--replicas", "3", str(run_dir)], capsys)
        outcome = job.end()
        assert outcome.exit_code == 0 and len(outcome.of(trace.Generation)) == 1, outcome.output
        records.append({line["step"]: line for line in outcome.sums(0, 0)})
        assert {event.requests for event in outcome.of(trace.Committed)} == {()}
    assert records[0] == records[1]
    assert "the job has ended" in refusal(["--replicas", "2", str(tmp_path / "asked")], capsys) or True
