"""`status` and `drain` of a running job, from its folder alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recover import trace
from megatron_recover.cli import drain, status
from megatron_recover.cluster.requests import Requests
from megatron_recover.cluster.status import REQUESTS, Request, ask, read, requests
from megatron_recover.core.values import ExitCode
from megatron_recover.host.addresses import host_name
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import Spec
from tests.cluster.running import FOR_EVER, Start

pytestmark = pytest.mark.timeout(180)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `drain` prints where it refuses."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        drain.main(words)
    assert end.value.code == ExitCode.BAD_INPUT
    return capsys.readouterr().err


def test_a_replica_is_given_back_and_the_last_ones_are_not(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    job = start(Spec(run_dir=str(run_dir), steps=FOR_EVER))
    job.until(lambda: (now := read(run_dir)) and now.generation, "the state of the job")
    assert status.main([str(run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["roster"], told["losses"], told["exit_code"]) == ([0, 1, 2], 0, None)
    assert [(node["name"], node["state"], node["replicas"]) for node in told["nodes"]] == [(host_name(), "here", [0, 1, 2])]
    assert "7 is no replica and no node of the job; replicas are 0 1 2" in refusal(["7", str(run_dir)], capsys)
    assert drain.main(["0", str(run_dir)]) == ExitCode.OK
    assert "replicas 0 have left; 2 go on" in capsys.readouterr().out
    assert "no replica would stay" in refusal([host_name(), str(run_dir)], capsys)
    reached = len(job.output.read_text())
    job.launcher.terminate()
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED and len(outcome.output) > reached
    outcome.assert_exactly_once()
    assert [event.left for event in outcome.of(trace.Generation) if event.left] == [(0,)]
    assert not [loss for event in outcome.of(trace.Generation) for loss in event.losses], "nothing was lost"
    verdict = check(run_dir)
    assert verdict.holds, describe(verdict)
    assert status.main([str(run_dir)]) == 0
    assert "ended with exit code 15" in capsys.readouterr().out
    assert "no job trains in" in refusal(["1", str(run_dir)], capsys)
    assert not list((run_dir / REQUESTS).iterdir())
    job.assert_nothing_left()


def test_a_folder_without_a_job_has_no_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        status.main([str(tmp_path)])
    assert end.value.code == ExitCode.BAD_INPUT and "give the --run-dir of a job" in capsys.readouterr().err
    assert "no job trains in" in refusal(["1", str(tmp_path)], capsys)


def test_requests_come_in_their_order_once_and_what_is_none_is_removed(tmp_path: Path) -> None:
    first, second = ask(tmp_path, "1", "a@b"), ask(tmp_path, "2", "a@b")
    (tmp_path / REQUESTS / "0-no-request.json").write_text("{")
    (tmp_path / REQUESTS / "1-partial").write_text("{")
    (tmp_path / REQUESTS / "1-long.json").write_text(json.dumps({"id": "x" * 5000, "drain": "1", "by": "a@b"}))
    (tmp_path / REQUESTS / "1-unreadable.json").mkdir()
    found = list(requests(tmp_path))
    assert found == [Request(id=first, drain="1", by="a@b"), Request(id=second, drain="2", by="a@b")]
    assert list(requests(tmp_path)) == []
    assert sorted(os.listdir(tmp_path / REQUESTS)) == ["1-partial", "1-unreadable.json"]


def test_a_number_that_no_message_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[str, str]] = []
    wanted = [Request(id="i", drain="9" * 30, by="a@b"), Request(id="k", drain="1", by="a@b")]
    sent: list[Any] = []
    recording: Any = SimpleNamespace(requests=lambda: wanted)
    job: Any = SimpleNamespace(num_replicas=2)
    carrier = Requests(job, recording, sent.append)
    monkeypatch.setattr(carrier, "_answer", lambda *answer: answers.append(answer))
    carrier.carry_out()
    assert answers == [("i", f"the job has no replica and no node {'9' * 30}")]
    assert [each.replicas for each in sent] == [(1,)]


@pytest.mark.parametrize("words", [["3"], ["3", "RUN", "--jobid", "7"]])
def test_drain_wants_either_the_folder_or_the_slurm_job(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drain.main(words)
    assert "give the folder of a job, or --jobid" in capsys.readouterr().err
