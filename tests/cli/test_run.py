"""`megatron-recover run` before and after the job itself, which is made up here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recover import trace
from megatron_recover.cli import run
from megatron_recover.cluster.job import Job, create_run_dir
from megatron_recover.config import RecoverConfig
from megatron_recover.core.values import ExitCode


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job that `run` finds on any command line."""
    job = Job(
        argv=("script.py",), num_replicas=2, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(),
        run_dir=create_run_dir(tmp_path / "run"),
    )  # fmt: skip
    monkeypatch.setattr(run, "_job", lambda arguments, command: (job, ""))
    return job


def ends(monkeypatch: pytest.MonkeyPatch, exit_code: int) -> None:
    monkeypatch.setattr(run, "Launcher", lambda job, console: SimpleNamespace(run=lambda: exit_code))


COMMAND = ["--replicas", "2", "--", "script.py"]


def test_nobody_who_has_asked_twice_for_the_end_waits_for_a_plot(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(monkeypatch, 130)
    monkeypatch.setattr(run, "_report", lambda run_dir: pytest.fail("made a report"))
    assert run.main(COMMAND) == 130


def test_ctrl_c_while_the_plot_is_made_changes_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run_dir: Path) -> None:
        raise KeyboardInterrupt

    ends(monkeypatch, ExitCode.OK)
    monkeypatch.setattr(run, "_report", interrupted)
    assert run.main(COMMAND) == ExitCode.OK
