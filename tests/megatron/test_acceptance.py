"""Upstream's own configurations: how many are refused must not grow."""

from __future__ import annotations

import contextlib
import itertools
import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from scripts.study import acceptance, launch_lines
from tests.system import test_upstream_examples, upstream

AT_MOST = {"example": 15, "functional": 29, "release": 2}
"""Of 23, 215 and 14 at core_v0.19.0. Lower these numbers with each flag that is supported.

Of the examples 9 below `multimodal` and 3 of the 5 below `mimo` have external data loaders, 3 are in fp8."""


EVIDENCE = Path(__file__).with_name("flag_evidence.toml")
ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "supported.md"


@pytest.fixture(scope="module")
def lines() -> list[acceptance.Line]:
    """The lines of all of upstream's configurations that train."""
    checkout = upstream.script("pretrain_gpt.py").parent
    with contextlib.chdir(checkout.parent):  # scripts run elsewhere, and find files of the checkout all the same
        return [*acceptance.lines(Path(checkout.name))]


def test_at_most_so_many_of_upstreams_configurations_are_refused(lines: list[acceptance.Line]) -> None:
    configurations = [*acceptance.judged(lines)]
    print(acceptance.table(configurations))
    assert {each.kind for each in configurations} == {*AT_MOST}
    for kind, number in AT_MOST.items():
        refused = [each.name for each in configurations if each.kind == kind and each.refused]
        assert len(refused) <= number, (kind, refused)
    rows = re.findall(r"^\| .+ \| (\d+) \| (\d+) \| (\d+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    listed = tomllib.loads(EVIDENCE.read_text())
    without_kernels = {**listed["substitute"], **listed["cuda"], **listed["upstream"]}
    untried = [
        line.kind
        for line, each in zip(lines, configurations, strict=True)
        if not each.refused and any(flag in without_kernels for flag in needed(line.words))
    ]
    kinds = ("release", "functional", "example")
    counts = [(AT_MOST[kind], untried.count(kind), sum(one.kind == kind for one in configurations)) for kind in kinds]
    assert [tuple(map(int, row)) for row in rows] == counts


def needed(words: Sequence[str]) -> list[str]:
    """The flags among words; a context-parallel size of 1 asks for nothing."""
    pairs = itertools.pairwise([*words, ""])
    return [word.partition("=")[0] for word, after in pairs if (word, after) != ("--context-parallel-size", "1")]


def test_the_reasons_why_so_many_files_are_not_counted_are_those_of_the_document() -> None:
    checkout = upstream.script("pretrain_gpt.py").parent
    described = [each for _, each in acceptance.configurations(checkout)]
    scripts = [file.read_text() for file in (checkout / "examples").rglob("*.sh")]
    modes = [each.get("MODE") for each in described if each.get("MODEL_ARGS")]
    found = [len(described), modes.count("inference"), modes.count("rl"), len(described) - len(modes), len(scripts)]
    found.append(sum("torchrun" in text or "torch.distributed" in text for text in scripts))
    paragraph = DOCUMENT.read_text().split("a plain count of files")[1].partition("\n\n")[0]
    assert [int(number) for number in re.findall(r"\b\d+\b", paragraph)] == [*found, 23]


def test_flags_become_words_as_upstreams_runner_makes_them() -> None:
    flags = {"--bf16": True, "--fp16": False, "--lr": 1e-4, "--split": "9,1", "--save": None, "--data-path": "0.5 a 0.5 'b c'",
             "--seed": "${REPEAT}"}  # fmt: skip
    assert acceptance.words(flags)[-2:] == ["--seed", "1"]
    assert acceptance.words(flags)[:-2] == [
        "--bf16",
        "--lr",
        "0.0001",
        "--split",
        "9,1",
        "--data-path",
        "0.5",
        "a",
        "0.5",
        "b c",
    ]


def test_the_table_counts_each_configuration_once_and_names_what_one_is_refused_for_alone() -> None:
    told = acceptance.table([
        acceptance.Judged("a", "release", ("--x", "--x", "--y")),
        acceptance.Judged("b", "release", ("--y",)),
        acceptance.Judged("c", "release", ()),
        acceptance.Judged("d", "functional", ()),
    ])  # fmt: skip
    assert told.splitlines() == [
        "functional: 0 of 1 refused", "release: 2 of 3 refused", "", "functional, by flag (for it alone):", "",
        "release, by flag (for it alone):", "    2 (  1)  --y", "    1 (  0)  --x", "",
        "functional, by name:", "", "release, by name:", "  a: --x --y", "  b: --y",
    ]  # fmt: skip


def test_a_folder_without_configurations_is_refused(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert acceptance.main([str(tmp_path)]) == 2
    assert "has no model_config.yaml; give a clone of Megatron-LM" in capsys.readouterr().err


def test_a_launch_line_is_what_bash_makes_of_it_and_nothing_else_runs(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        "set -e\nwhich srun && exit 3\nif [[ -z $NEEDED ]]; then exit 1; fi\nmkdir /made/by/nobody\n"
        'FLAGS=(--train-iters 5 --data-path "a b")\ntouch here\nuv run torchrun --nproc-per-node 8 train.py ${FLAGS[@]} $1\n'
    )
    (tmp_path / "talk.sh").write_text("torchrun generate.py --temperature 0.7 # --train-iters\n")
    line = ["--nproc-per-node", "8", "train.py", "--train-iters", "5", "--data-path", "a", "b", "1"]
    assert [*launch_lines.below(tmp_path)] == [("train.sh", line)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talk.sh", "train.sh"]


EXAMPLES = {
    "gpt3/train_gpt3_175b_distributed.sh": test_upstream_examples.GPT3,
    "llama/train_llama3_8b_h100_fp8.sh": test_upstream_examples.LLAMA,
}
"""Lines of which `tests/system/test_upstream_examples.py` makes a job."""


def test_every_flag_of_an_accepted_configuration_is_named_where_jobs_are_or_has_a_reason(lines: list[acceptance.Line]) -> None:
    """The text of `tests/system` names the flag. Whether its job has a kill is not judged here.

    Flags that Megatron's parser does not have are the script's own, and not judged.
    """
    known = {word for action in add_megatron_arguments(ArgumentParser())._actions for word in action.option_strings}
    accepted = [line for line, each in zip(lines, acceptance.judged(lines), strict=True) if not each.refused]
    flags = {word.partition("=")[0] for line in accepted for word in line.words} & known
    jobs = "\n".join(
        line
        for file in (ROOT / "tests/system").glob("*.py")
        if file.stem not in ("test_refusals", "strikes", "test_upstream_examples")
        for line in file.read_text().splitlines()
        if not re.search(r"\bassert |match=", line)  # what is told of a flag is in no job
    )
    in_examples = {
        word for line in lines if line.name in EXAMPLES for word in needed(line.words) if EXAMPLES[line.name].keeps(word)
    }
    tested = flags & ({*re.findall(r"--[\w-]+", jobs)} | in_examples)
    listed = tomllib.loads(EVIDENCE.read_text())
    elsewhere, others = listed["elsewhere"], {**listed["cuda"], **listed["upstream"]}
    left = flags - tested - elsewhere.keys() - others.keys()
    assert sorted(left) == [], "give it in a job with a kill, or list it"
    assert sorted((elsewhere.keys() | others.keys()) - flags) == [], "no accepted configuration has it"
    assert sorted(tested & (elsewhere.keys() | others.keys())) == [], "a job has it"
    assert sorted(listed["substitute"].keys() - tested) == [], "no job has it"
    for flag, told in listed["substitute"].items():
        assert (ROOT / told.partition(" for ")[0]).is_file(), flag
    for flag, file in elsewhere.items():
        assert re.search(rf"{flag}\b(?!-)|\b{flag[2:].replace('-', '_')}\b", (ROOT / file).read_text()), (flag, file)
