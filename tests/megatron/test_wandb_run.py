"""What the stand-in for `wandb` calls when a job ends. The real package is in `tests/system/test_wandb.py`."""

from __future__ import annotations

import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_recover.config import RankContext
from megatron_recover.megatron import training, wandb_run
from megatron_recover.megatron.wandb_run import Wandb, WandbFactory


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a package that is made up."""
    found: list[str] = []
    package = ModuleType("wandb")
    package.init = lambda **settings: found.append("init")  # type: ignore[attr-defined]
    package.log = lambda values, step: found.append(f"log {step}")  # type: ignore[attr-defined]
    package.finish = lambda: found.append("finish")  # type: ignore[attr-defined]
    package.Artifact = lambda *args, **kwargs: SimpleNamespace()  # type: ignore[attr-defined]
    package.run = SimpleNamespace(  # type: ignore[attr-defined]
        log_artifact=lambda artifact, aliases: found.append(f"artifact {aliases[0]}")
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    return found


def stand_in(folder: Path, driver: Any) -> Wandb:
    return Wandb(driver, {"dir": str(folder), "project": "p", "entity": None}, lambda: 5.0)


def test_a_checkpoint_that_is_named_after_training_is_an_artifact(calls: list[str], tmp_path: Path) -> None:
    """As the last one with `--async-save`, which upstream's training loop does not wait for."""
    wandb = stand_in(tmp_path, SimpleNamespace(replica=0, roster=(0, 1), is_writer=lambda: True))
    wandb.log({"lm loss": 1.0}, 1)
    wandb.finish()
    wandb.log_artifact(wandb.Artifact("save"), ["iter_0000001"])
    wandb.end()
    assert calls == ["init", "log 1", "artifact iter_0000001", "finish"]


def test_whoever_becomes_the_writer_after_training_logs_what_was_missed(calls: list[str], tmp_path: Path) -> None:
    driver = SimpleNamespace(replica=1, roster=(0, 1), is_writer=lambda: driver.writes, writes=False)
    wandb = stand_in(tmp_path, driver)
    wandb.log({"lm loss": 1.0}, 1)
    wandb.finish()
    driver.writes = True
    wandb.end()
    assert calls == ["init", "log 1", "finish"]


def test_who_is_not_the_writer_at_the_end_calls_nothing(calls: list[str], tmp_path: Path) -> None:
    wandb = stand_in(tmp_path, SimpleNamespace(replica=1, roster=(0, 1), is_writer=lambda: False))
    wandb.log({"lm loss": 1.0}, 1)
    wandb.finish()
    wandb.end()
    assert calls == []


def test_a_package_that_cannot_begin_costs_no_memory_later(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("no server")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    wandb = stand_in(tmp_path, SimpleNamespace(replica=0, roster=(0, 1), is_writer=lambda: True))
    wandb.log({"lm loss": 1.0}, 1)
    assert wandb._thread is not None
    wandb._thread.join(5.0)
    for step in range(2, 100):
        wandb.log({"lm loss": 1.0}, step)
    assert wandb._calls.qsize() <= 1 and wandb.end() and calls == []
    assert "could not begin the run" in capsys.readouterr().err


def test_a_package_that_answers_no_call_is_given_up_and_does_not_hold_the_end(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **_: answers.wait(30.0))
    monkeypatch.setattr(wandb_run, "_MOST_CALLS", 50)
    wandb = Wandb(
        SimpleNamespace(replica=0, roster=(0, 1), is_writer=lambda: True),  # type: ignore[arg-type]
        {"dir": str(tmp_path), "project": "p", "entity": None}, lambda: 0.05,
    )  # fmt: skip
    for step in range(200):
        wandb.log({"lm loss": 1.0}, step)
    assert 50 < wandb._calls.qsize() < 60
    assert not wandb.end(), "its exit handler would wait"
    told = capsys.readouterr().err
    assert "nothing is logged there after 50 calls" in told and "it has not begun the run" in told
    answers.set()


def test_the_run_is_that_of_the_job_and_not_of_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch saves elsewhere than it loads; in two containers the run directories have one path."""
    context = RankContext(
        replica=0, rank=0, num_ranks=2, num_replicas=2, coordinator="127.0.0.1:1", leader="", run_dir="/results", started_at=1.5
    )  # fmt: skip
    later = msgspec.structs.replace(context, started_at=2.5)
    other_rank = msgspec.structs.replace(context, replica=1, rank=1, leader="127.0.0.1:2")

    def run_id(rank: RankContext, load: str | None = None, save: str = "save") -> str:
        factory = WandbFactory(lambda: None, "", training._start_of(rank))  # type: ignore[arg-type, return-value]
        factory.set_writer(Namespace(
            wandb_project="p", wandb_save_dir=str(tmp_path / "wandb"), save=str(tmp_path / save), rank=0, world_size=2,
            load=load and str(tmp_path / load), finetune=False, ckpt_step=None,
        ))  # fmt: skip
        return factory.run_id

    assert run_id(context) == run_id(other_rank) != run_id(later)
    (tmp_path / "save" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "save" / "iter_0000003" / "wandb_run_id.txt").write_text("first")
    assert run_id(later, load="save") == "first" and run_id(later, load="save", save="branch") == run_id(later)


def test_a_process_that_ends_without_exit_handlers_waits_for_a_deletion() -> None:
    """Upstream deletes older checkpoints in a thread that is no daemon."""
    program = (
        "import atexit, threading, time; from megatron_recover.megatron import wandb_run\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('deleted'))).start(); atexit.register(print, 'waits')\n"
        "wandb_run.end_process(15)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (15, "deleted\n"), done.stderr
