"""What a training script may ask of the job that it runs in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import megatron.training
import megatron.training.arguments
import megatron.training.training
import pytest

from megatron_recover.megatron import is_writer
from megatron_recover.megatron.launch import script


class Entry:
    """Replica 1, which becomes the writer."""

    def __init__(self) -> None:
        self.writes = False

    def is_writer(self) -> bool:
        return self.writes


@pytest.fixture
def entry() -> Iterator[Entry]:
    upstream = (
        megatron.training.arguments.parse_and_validate_args, megatron.training.pretrain, megatron.training.training.pretrain,
    )  # fmt: skip
    made = Entry()
    script.wrap(made)  # type: ignore[arg-type]
    yield made
    (
        megatron.training.arguments.parse_and_validate_args, megatron.training.pretrain, megatron.training.training.pretrain,
    ) = upstream  # fmt: skip


def test_under_plain_torchrun_every_rank_is_the_writers() -> None:
    assert is_writer()


def test_a_script_learns_when_its_replica_becomes_the_writer(entry: Entry) -> None:
    assert script.is_wrapped() and not is_writer()
    entry.writes = True
    assert is_writer()


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
