"""Upstream's launch scripts under examples/ on the CPU: shrunk, one word changed, a kill, and torchrun's losses.

A script runs unchanged under bash, with a `torchrun` that only prints its words. So the line is the one that upstream's
authors wrote, with their quotes, or without. `Example.changes` names all that is changed in the line, each with its reason.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
import subprocess
from collections.abc import Sequence

import pytest

from tests.system import upstream
from tests.system.jobs import ROOT, chaos_text, check

STUB = '#!/bin/bash\nprintf "%s\\0" "$@" >"$WORDS"\n'
SIZE, MACHINE = "size", "size of the machine"
NO_DROPOUT = "added: masks of dropout are no torchrun's (guarantees.md)"
NO_TOKENIZER = "added: GPT-2's vocabulary is not there, and the package transformers is not installed"


@dataclasses.dataclass(frozen=True)
class Change:
    """What stands in a line in place of a flag's values."""

    value: str | None
    """The new value; None if the flag is left out."""
    because: str
    """The reason; it begins with `added` if upstream's line does not have the flag."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A launch script of upstream's."""

    script: str
    arguments: tuple[str, ...]
    """Arguments of the script: folders and files of its user."""
    changes: dict[str, Change]

    def keeps(self, flag: str) -> bool:
        """Whether a flag of the line is in the job."""
        return flag not in self.changes or self.changes[flag].value is not None


GPT3 = Example(
    "examples/gpt3/train_gpt3_175b_distributed.sh",
    ("SAVE", "TENSORBOARD", "no-vocab.json", "no-merges.txt", "DATA"),
    {
        "--nproc_per_node": Change("2", MACHINE),
        "--tensor-model-parallel-size": Change("1", MACHINE),
        "--pipeline-model-parallel-size": Change("1", MACHINE),
        "--num-layers": Change("2", SIZE),
        "--hidden-size": Change("32", SIZE),
        "--num-attention-heads": Change("4", SIZE),
        "--seq-length": Change("32", SIZE),
        "--max-position-embeddings": Change("32", SIZE),
        "--step-batch-size-schedule": Change("0:8,0.768K:16", "size; without quotes in the script it is six words besides"),
        "--global-batch-size": Change(None, "Megatron 0.19 refuses it beside --step-batch-size-schedule"),
        "--train-iters": Change("4", SIZE),
        "--lr-decay-iters": Change("40", SIZE),
        "--log-interval": Change("1", SIZE),
        "--eval-iters": Change("1", SIZE),
        "--split": Change("90,5,5", "size: a thousandth of a small data set is empty"),
        "--hidden-dropout": Change("0", NO_DROPOUT),
        "--attention-dropout": Change("0", NO_DROPOUT),
        "--initial-loss-scale": Change("65536", "added, size: from 2^32 all of so few iterations would be skipped"),
        "--tokenizer-type": Change("NullTokenizer", NO_TOKENIZER),
        "--vocab-size": Change("257", NO_TOKENIZER),
    },
)
LLAMA = Example(
    "examples/llama/train_llama3_8b_h100_fp8.sh",
    ("SAVE", "TENSORBOARD"),  # no tokenizer and no data: upstream's mock mode
    {
        "--nproc_per_node": Change("2", MACHINE),
        "--num-layers": Change("2", SIZE),
        "--hidden-size": Change("32", SIZE),
        "--ffn-hidden-size": Change("112", SIZE),
        "--num-attention-heads": Change("4", SIZE),
        "--num-query-groups": Change("2", SIZE),
        "--kv-channels": Change("8", SIZE),
        "--seq-length": Change("32", SIZE),
        "--max-position-embeddings": Change("32", SIZE),
        "--vocab-size": Change("257", SIZE),
        "--global-batch-size": Change("8", SIZE),
        "--train-samples": Change("24", SIZE),
        "--lr-decay-samples": Change("2400", SIZE),
        "--lr-warmup-samples": Change("3", SIZE),
        "--eval-iters": Change("1", SIZE),
        "--apply-layernorm-1p": Change(None, "needs Transformer Engine or Apex: torch's norms have no zero-centred weights"),
        "--fp8-format": Change(None, "needs Transformer Engine, and is refused"),
        "--fp8-amax-history-len": Change(None, "a setting of fp8"),
        "--fp8-amax-compute-algo": Change(None, "a setting of fp8"),
        "--fp8-param-gather": Change(None, "a setting of fp8"),
    },
)


def words(example: Example, folder: pathlib.Path, *arguments: str) -> list[str]:
    """Return the words behind `torchrun` in the line that bash makes of a script, in the root of a checkout."""
    (programs := folder / "bin").mkdir()
    (programs / "torchrun").write_text(STUB)
    (programs / "torchrun").chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "WORDS": str(folder / "words")}
    subprocess.run(
        ["bash", str(upstream.script(example.script)), *arguments], cwd=folder, env=environment, check=True, timeout=60
    )  # fmt: skip
    return (folder / "words").read_text().split("\0")[:-1]


def changed(line: Sequence[str], changes: dict[str, Change]) -> list[str]:
    """Return a line with the values of some flags replaced; fails for a change that the line has no need of."""
    left = dict(changes)
    found: list[str] = []
    keeps = True
    for word in line:
        if word.startswith("--") or word.endswith(".py"):
            change = left.pop(word, None)
            keeps = change is None
            if change is not None and change.value is not None:
                found += [word, change.value]
        if keeps:
            found.append(word)
    added = {flag: change for flag, change in left.items() if change.because.startswith("added")}
    assert added.keys() == left.keys(), f"the line has no {left.keys() - added.keys()}"
    return [*found, *(word for flag, change in added.items() for word in (flag, change.value or ""))]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.timeout(3 * upstream.DEADLINE_S)
@pytest.mark.parametrize("example", [GPT3, LLAMA], ids=["gpt3", "llama"])
def test_a_line_of_upstreams_examples_runs_with_one_word_changed_survives_a_kill_and_keeps_torchruns_losses(
    example: Example, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    (tmp_path / "pretrain_gpt.py").symlink_to(upstream.script("pretrain_gpt.py"))  # the root of a checkout
    places = {"DATA": str(data), "SAVE": "save", "TENSORBOARD": "board"}
    line = words(example, tmp_path, *(places.get(each, each) for each in example.arguments))
    port = {"--master_port": Change(free_port(), "another job of this machine may have upstream's")}
    line = changed(line, example.changes | port)
    at = line.index("pretrain_gpt.py")
    launch, command = " ".join(line[:at]), " ".join(line[at:])
    script = f"{ROOT / 'tests/system/upstream.py'} {command}"
    reference = upstream.run("torch.distributed.run", launch, script, cwd=tmp_path)
    (tmp_path / "save").rename(tmp_path / "save-of-torchrun")  # upstream's lines resume what is in --save
    faults = tmp_path / "faults.toml"
    faults.write_text(chaos_text("1 0 backward step=2 microbatch=5"))
    ours = f"{launch} --run-dir run --chaos {faults}", f"{command} --recover-rebalance off --recover-heal off"
    output = upstream.run("megatron_recover run", *ours, cwd=tmp_path)
    assert "1 of 2 replicas left" in output
    found = upstream.figures(output)
    assert len(found) >= 3
    upstream.assert_alike(found, upstream.figures(reference))
    assert len(upstream.evaluations(output)) == 2  # of the validation set and of the test set
    assert upstream.evaluations(output) == pytest.approx(upstream.evaluations(reference), rel=1e-4)
    code, verdict = check(tmp_path / "run")
    assert code == 0, verdict
