"""`scale` of a running job, from its folder alone: real processes, launcher, coordinator and transfer of state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.cli import drain, scale
from megatron_recover.cluster.status import REQUESTS, Answer, Request, Status, read
from megatron_recover.control_plane.node_messages import ScaleAnswer, ScaleAsked
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
            fewest = "a training step has 6 microbatches, fewer than 7 replicas; ask for 6 or fewer"
            assert fewest in refusal(["--replicas", "7", str(run_dir)], capsys)
        outcome = job.end()
        assert outcome.exit_code == 0 and len(outcome.of(trace.Generation)) == 1, outcome.output
        records.append({line["step"]: line for line in outcome.sums(0, 0)})
        assert {event.requests for event in outcome.of(trace.Committed)} == {()}
    assert records[0] == records[1]
    assert "no job trains in" in refusal(["--replicas", "2", str(tmp_path / "asked")], capsys)


# --- The command alone -----------------------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Have these states of a job read one after the other, the last one for ever; return its folder."""

    def telling(*states: Status) -> Path:
        left = list(states)
        monkeypatch.setattr("megatron_recover.cluster.status.read", lambda run_dir: left.pop(0) if len(left) > 1 else left[0])
        monkeypatch.setattr("megatron_recover.cluster.status.ask", lambda *arguments: "i")
        monkeypatch.setattr(scale, "_LOOK_S", 0.01)
        return tmp_path

    return telling


GROWS = (Answer("i", "", "1 replica is formed while the others train"),)


def test_the_number_counts_once_a_step_is_committed_with_it(
    told: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    grown = running(roster=(0, 1, 2), answers=GROWS, step=5)
    turned_away = running(answers=GROWS, step=6)
    run_dir = told(running(), running(answers=GROWS), grown, turned_away, grown)
    assert scale.main([str(run_dir), "--replicas", "3", "--wait", "0.3"]) == ExitCode.UNFINISHED
    out = capsys.readouterr().out
    assert out == f"{GROWS[0].text}\nthe job does not have 3 replicas after 0.3 s; it goes on to that number by itself\n"
    later = msgspec.structs.replace(grown, step=7)
    run_dir = told(running(), grown, later)
    assert scale.main([str(run_dir), "--replicas", "3"]) == ExitCode.OK
    assert capsys.readouterr().out.endswith("\n3 replicas train (0 1 2)\n")


def test_one_that_is_lost_before_it_leaves_is_told(told: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    leaves = (Answer("i", "", "replica 1 leaves after a common step", (1,)),)
    run_dir = told(running(), running(answers=leaves, roster=(0,), losses=1, lost=(1,)))
    assert scale.main([str(run_dir), "--replicas", "1"]) == ExitCode.FAILED
    assert capsys.readouterr().out.endswith("replica 1 was lost before it left; 1 replica trains (0)\n")


def test_a_number_that_a_later_request_has_replaced_is_not_waited_for(
    told: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first = running(answers=GROWS, wanted=3)
    run_dir = told(running(), running(wanted=2), first, msgspec.structs.replace(first, wanted=1))
    assert scale.main([str(run_dir), "--replicas", "3", "--wait", "20"]) == ExitCode.UNFINISHED
    assert capsys.readouterr().out.endswith("\nthe job wants 1 replica by now, not 3; 2 replicas train (0 1)\n")


def test_without_an_answer_the_request_stays(told: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = told(running())
    assert scale.main([str(run_dir), "--replicas", "3", "--wait", "0.1"]) == ExitCode.UNFINISHED
    assert "the job has not answered within 0.1 s; the request stays in" in capsys.readouterr().out


def test_a_job_that_ends_meanwhile_is_told(told: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = told(running(), running(exit_code=12, reason="no replica is left"))
    assert "the job has ended with exit code 12: no replica is left" in refusal([str(run_dir), "--replicas", "3"], capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN"], "the following arguments are required: --replicas"),
        (["RUN", "--replicas", "two"], "invalid int value: 'two'"),
        (["RUN", "--replicas", "9" * 30], f"--replicas is {'9' * 30}, which no job can have; ask for fewer"),
        (["RUN", "--replicas", "0"], "--replicas is 0; ask for 1 or more, or end the job by SIGTERM to its launcher"),
        (["--replicas", "2"], "give the folder of a job, or --jobid"),
        (["/nowhere", "--replicas", "2"], "no job trains in /nowhere"),
        ([__file__, "--replicas", "2"], f"{__file__} is no folder; give the --run-dir of a job"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(words, capsys)


def test_the_launcher_gives_the_coordinator_the_number_once_and_keeps_its_answer() -> None:
    found = [Request(id="k", replicas=3, by="a@b")]
    made, sent, kept = carrier(found)
    made.keep(msgspec.structs.replace(STATE, wanted=2))
    made.carry_out()
    assert sent == [ScaleAsked(3, "scale to 3 of a@b", "k")] and kept[-1].wanted == 2
    found.append(Request(id="k", replicas=3, by="a@b"))
    made.carry_out()
    assert len(sent) == 1, "a new recorder passes it again"
    made.answered(ScaleAnswer("k", "", "replica 1 leaves after a common step", (1,)))
    assert kept[-1].answers == (Answer("k", "", "replica 1 leaves after a common step", (1,)),)
