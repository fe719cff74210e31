"""A run that resumes reads the samples that its checkpoint was trained on, or its user says otherwise."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_recover.megatron.checkpoint import resuming
from megatron_recover.megatron.checkpoint.save_folder import TRACKER, SaveFolder
from megatron_recover.megatron.data import alike


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    """Arguments of a run that has saved iteration 20, and of what resumes it."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.idx").write_text(f"index of {name}")
        (tmp_path / f"{name}.bin").write_text(f"samples of {name}")
    args = Namespace(
        data_path=["0.3", str(tmp_path / "one"), "0.7", str(tmp_path / "two")], train_data_path=None, valid_data_path=None,
        test_data_path=None, split="90,5,5", seed=1, load=str(tmp_path / "saved"), ckpt_step=None, finetune=False,
    )  # fmt: skip
    folder = SaveFolder(args.load, 1.0)
    with folder.locked():
        folder.clear()
        folder.begin(20)
        folder.describe(alike.samples(args))
        folder.publish()
    (folder.path / TRACKER).write_text("20")
    return args


def test_the_same_data_is_taken_wherever_it_lies(args: Namespace, tmp_path: Path) -> None:
    assert resuming.judge(args, "same") == ""
    for name in ("one.idx", "one.bin"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        shutil.move(tmp_path / name, tmp_path / "elsewhere" / name)
    args.data_path[1] = str(tmp_path / "elsewhere" / "one")
    assert resuming.judge(args, "same") == ""


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("the content", {}, r"data set 2 of --data-path was idx \w{16} bin (\w{16}) and is idx \w{16} bin (?!\1)\w{16};"),
    ("a weight", {"data_path": ["0.4", "one", "0.7", "two"]}, "the weights of --data-path was 0.3 0.7 and is 0.4 0.7;"),
    ("the order", {"data_path": ["0.3", "two", "0.7", "one"]}, "data set 1 of --data-path was idx"),
    ("a data set less", {"data_path": ["0.3", "one"]}, "data set 2 of --data-path was idx .* and is not there;"),
    ("the split", {"split": "80,10,10"}, "--split was 90,5,5 and is 80,10,10;"),
    ("the seed", {"seed": 2}, "--seed was 1 and is 2;"),
    ("data of its own for training", {"data_path": None, "train_data_path": ["one"]}, "was not there and is idx"),
    ("no data", {"data_path": None}, "data set 1 of --data-path was idx .* and is not there;"),
]


@pytest.mark.parametrize(("what", "change", "told"), CHANGES, ids=[what for what, _, _ in CHANGES])
def test_other_data_is_refused_with_both_values_unless_it_was_changed_on_purpose(
    what: str, change: dict[str, Any], told: str, args: Namespace, tmp_path: Path
) -> None:
    if what == "the content":
        (tmp_path / "two.bin").write_text("Samples of two")
    for name, value in change.items():
        is_list = isinstance(value, list)
        value = [str(tmp_path / word) if word in ("one", "two") else word for word in value] if is_list else value
        setattr(args, name, value)
    with pytest.raises(ValueError, match=f"checkpoint of iteration 20 was trained on other data .*{told}") as refusal:
        resuming.judge(args, "same")
    assert "--recover-resume-data other" in str(refusal.value)
    assert "with other data from here on" in resuming.judge(args, "other")


@pytest.mark.parametrize("content", [None, "", "[]", "{"], ids=["none", "empty", "a list", "torn"])
def test_a_checkpoint_that_does_not_say_what_its_data_was_is_taken_with_a_note(content: str | None, args: Namespace) -> None:
    [file] = Path(args.load).glob("iter_*/*.json")
    file.unlink() if content is None else file.write_text(content)
    assert "which does not say on which data it was trained" in resuming.judge(args, "same")


def test_what_begins_anew_is_not_judged_and_a_chosen_iteration_is(args: Namespace, tmp_path: Path) -> None:
    args.seed = 2
    assert resuming.judge(Namespace(**{**vars(args), "finetune": True}), "same") == ""
    assert resuming.judge(Namespace(**{**vars(args), "load": None}), "same") == ""
    assert resuming.judge(Namespace(**{**vars(args), "load": str(tmp_path / "nowhere")}), "same") == ""
    (Path(args.load) / TRACKER).write_text("30")
    assert "iteration 30 from" in resuming.judge(args, "same"), "nothing is known of it"
    with pytest.raises(ValueError, match="iteration 20 was trained on other data"):
        resuming.judge(Namespace(**{**vars(args), "ckpt_step": 20}), "same")
