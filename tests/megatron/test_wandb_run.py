"""What the stand-in for `wandb` calls when a job ends. The real package is in `tests/system/test_wandb.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_recover.megatron.wandb_run import Wandb


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
