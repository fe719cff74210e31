"""What a training script may ask of the job that it runs in, and what becomes of what it gives."""

from __future__ import annotations

import functools
import inspect
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.training
import megatron.training.arguments
import megatron.training.training
import pytest

from megatron_recover.config import RecoverConfig
from megatron_recover.megatron import is_writer, training
from megatron_recover.megatron.launch import script


class Entry:
    """Replica 1, which becomes the writer."""

    def __init__(self) -> None:
        self.writes = False

    def is_writer(self) -> bool:
        return self.writes


@pytest.fixture
def upstreams() -> Iterator[None]:
    """Leave behind upstream's functions, whatever the test has put in their place."""
    upstream = (
        megatron.training.arguments.parse_and_validate_args, megatron.training.pretrain, megatron.training.training.pretrain,
    )  # fmt: skip
    yield
    (
        megatron.training.arguments.parse_and_validate_args, megatron.training.pretrain, megatron.training.training.pretrain,
    ) = upstream  # fmt: skip


@pytest.fixture
def entry(upstreams: None) -> Entry:
    made = Entry()
    script.wrap(made)  # type: ignore[arg-type]
    return made


def test_under_plain_torchrun_every_rank_is_the_writers() -> None:
    assert is_writer()


def test_a_script_learns_when_its_replica_becomes_the_writer(entry: Entry) -> None:
    assert script.is_wrapped() and not is_writer()
    entry.writes = True
    assert is_writer()


@pytest.fixture
def received(upstreams: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What upstream's `pretrain` gets, by name, from a rank of which the parts around it are left out."""
    found: dict[str, Any] = {}

    @functools.wraps(megatron.training.pretrain)
    def pretrain(*values: Any, **named: Any) -> None:
        found.update(inspect.signature(pretrain).bind(*values, **named).arguments)

    megatron.training.pretrain = megatron.training.training.pretrain = pretrain
    rank = object.__new__(training._Training)
    rank._context = Namespace(rank=1, dry_run=False)  # type: ignore[assignment]
    rank._page = None  # type: ignore[assignment]
    rank._wandb = SimpleNamespace(end=lambda: True)  # type: ignore[assignment]
    args = Namespace(
        dataloader_type="single", iteration=0, train_iters=1, data_path=None, train_data_path=None, data_cache_path=None
    )
    rank._settings = args, RecoverConfig()
    loop = SimpleNamespace(close=lambda: None, has_trained=True, has_joined=True, meet=None)
    monkeypatch.setattr(training, "join_store", lambda *_: "the replica's own store")
    rank._key, rank._log, rank._clock = b"", SimpleNamespace(record=None), None  # type: ignore[assignment]
    driver = SimpleNamespace(requests=frozenset(), close=lambda: None)
    checkpoints = SimpleNamespace(settle=lambda *_, **__: None)
    monkeypatch.setattr(rank, "_create_driver", lambda config: driver)
    monkeypatch.setattr(rank, "_install", lambda *_: (checkpoints, loop))
    script.wrap(rank)
    return found


def test_all_that_a_script_gives_to_pretrain_reaches_upstreams_and_the_store_is_the_replicas(received: dict[str, Any]) -> None:
    """`pretrain_vlm.py` gives it functions for the embedding's ranks, and `pretrain_gpt.py` a store."""

    def provider(samples: list[int]) -> None:
        pass

    def ranks(pipeline: list[int]) -> list[int]:
        return pipeline[:1]

    given = {"get_embedding_ranks": ranks, "get_position_embedding_ranks": ranks, "non_loss_data_func": provider}
    with pytest.raises(SystemExit) as ended:
        megatron.training.pretrain("configuration", provider, "type", "forward", "model", store=None, **given)
    assert ended.value.code == 0
    assert received.pop("train_valid_test_dataset_provider").__wrapped__ is provider
    assert received == given | {
        "cfg_container": "configuration", "model_type": "type", "forward_step_func": "forward", "model_provider": "model",
        "store": "the replica's own store",
    }  # fmt: skip


def test_a_store_of_the_scripts_own_is_refused(received: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        megatron.training.pretrain("configuration", None, "type", "forward", store="a store")
    assert ended.value.code == 2 and not received
    assert "store is not supported: each replica has a store of its own; leave it out" in capsys.readouterr().err


def test_upstreams_wrapper_for_restarts_gives_back_the_pretrain_of_the_job(
    received: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which parses the command line by itself, with our flags in it."""
    from megatron.training import inprocess_restart

    monkeypatch.setattr(sys, "argv", ["script.py", "--micro-batch-size", "1", "--recover-rebalance", "off"])
    wrapped, store = inprocess_restart.maybe_wrap_for_inprocess_restart(megatron.training.pretrain)
    assert wrapped is megatron.training.pretrain and store is None


@pytest.mark.parametrize(("words", "named"), [
    (["train.py"], "train.py"), (["-m", "train"], "train.py"), (["-m", "recipe.large"], "recipe/large.py"),
    (["-m", "recipe"], "recipe/__main__.py"),
])  # fmt: skip
def test_the_dry_run_reads_the_script_or_the_module_before_it_runs(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not that alone: the file imports one beside it, which the user's folder has."""
    for name in ("train.py", "recipe/__init__.py", "recipe/large.py", "recipe/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import beside\nprint('runs')\n" if name == named else "")
    (tmp_path / "beside.py").write_text("import os\nif os.environ.get('RANK') == '0':\n    open(os.devnull, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["the folder of this file", *sys.path])
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    for module in ("train", "beside", "recipe", "recipe.large", "recipe.__main__"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    script.run(words, warns=True)
    place, guide, runs = capsys.readouterr().out.splitlines()
    assert place.startswith("for the console: beside.py:2: `open` is for one rank here")
    assert guide.startswith("for the console: RANK and WORLD_SIZE are those of one replica") and runs == "runs"
    for module in ("train", "beside", "recipe", "recipe.large", "recipe.__main__"):
        sys.modules.pop(module, None)
