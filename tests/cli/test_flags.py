"""A mistyped flag is answered with the one that was meant, by every verb and by the rank that judges Megatron's."""

from __future__ import annotations

import argparse

import pytest

from megatron_recover import cli, flags
from megatron_recover.megatron.launch.arguments import recover_flags

NO_SCRIPT = (
    "run: the training script is missing; write it and its flags behind those of run, for example: scripts/pretrain_gpt.py ..."
)
NO_PATH = "run: there is no training script {}; write its path behind the flags of run"
NO_SCRIPT_LEAVE_OUT = " is no training script; leave out the word: megatron-recover run takes its place"
TAKEN = "setup.py is taken for the value of --tee; if it is the script, write the value of --tee in front of it"
NO_NUMBER = "run: the number of processes is missing; give --nproc-per-node, as for torchrun, or --replicas"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run --replica 3 -- script.py --replicaz 1", ["run: --replica is unknown; did you mean --replicas?"]),
        ("run --replicas 3 --lane=2 --colour x -- script.py", [
            "run: --lane is unknown; did you mean --lanes?",
            "run: --colour is unknown; megatron-recover run --help lists all; Megatron's flags go behind the script's name",
        ]),
        ("run --replicas 3 --lr 1 --recover-min-replicas=2 --micro-batch-size 4 -- script.py --quiet --lanes=2", [
            "run: --recover-min-replicas is the trainer's; write it behind the script's name",
            "run: --micro-batch-size is the trainer's; write it behind the script's name",
        ]),
        ("run --replicas 3 --micro-batch-size 4 script.py", [
            "run: --micro-batch-size is the trainer's; write it behind the script's name",
        ]),
        ("run --replicas three -- script.py", ["run: --replicas: invalid int value: 'three'"]),
        ("run setup.py", [NO_NUMBER]),
        ("run -- setup.py --nproc-per-node 4", [
            NO_NUMBER, "run: --nproc-per-node 4 behind setup.py is the script's; if it is for the launcher, write: "
            "megatron-recover run --nproc-per-node 4 ... setup.py ...",
        ]),
        ("run --replicas 3 x -- script.py", [NO_PATH.format("x")]),
        ("run --replicas 3 script.py --num-layers 4", [NO_PATH.format("script.py")]),
        ("run --replicas 3 -m no_such_module.train", [
            "run: there is no module no_such_module.train: no_such_module is neither in the working directory, nor in "
            "PYTHONPATH, nor installed; correct the name, or leave out --module and write the path of a script",
        ]),
        ("run torchrun --nproc-per-node 2 setup.py", ["run: torchrun" + NO_SCRIPT_LEAVE_OUT]),
        ("run --replicas 3 /usr/bin/python3.12 setup.py", ["run: /usr/bin/python3.12" + NO_SCRIPT_LEAVE_OUT]),
        ("run --replicas 3 -m torch.distributed.run setup.py", [
            "run: -m torch.distributed.run is no training script; leave out both words: megatron-recover run takes their place",
        ]),
        ("run --replicas 3 srun setup.py", [
            "run: srun is no training script; write srun and its options in front of megatron-recover run",
        ]),
        ("plan python setup.py", ["plan: python" + NO_SCRIPT_LEAVE_OUT.replace("run", "plan")]),
        ("run --replicas 3 scripts/setup.sh", [
            "run: scripts/setup.sh is a shell script; write the Python script, not the shell script, and its flags",
        ]),
        ("run --tee setup.py --num-layers 2", [
            "run: --num-layers is the trainer's; write it behind the script's name", "run: " + TAKEN,
        ]),
        ("run --tee setup.py --data-cache x", [
            "run: --data-cache is unknown; megatron-recover run --help lists all; Megatron's flags go behind the script's name",
            "run: " + TAKEN,
        ]),
        ("run --replicas 3 --tee setup.py", [NO_SCRIPT, "run: " + TAKEN]),
        ("run", [NO_SCRIPT]),
        ("run --replicas 3 --", [NO_SCRIPT]),
        ("simulate x --bogus", ["simulate: --bogus is unknown; megatron-recover simulate --help lists all"]),
        ("demo --jsn", ["demo: --jsn is unknown; did you mean --json?"]),
        ("check --agains x", ["check: --agains is unknown; did you mean --against?"]),
        ("check", ["check: the following arguments are required: RUN_DIR"]),
        ("report x --aganst y", ["report: --aganst is unknown; did you mean --against?"]),
        ("data --sufix .py --outptu x", [
            "data: --sufix is unknown; did you mean --suffix?",
            "data: --outptu is unknown; did you mean --output?",
        ]),
        ("data --out x", ["data: --out is unknown; did you mean --output?"]),
    ],
)  # fmt: skip
def test_every_verb_says_what_was_meant(words: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words.split())
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err.splitlines() == [f"megatron-recover {line}" for line in expected]


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--recover-save-timeout-s", "it was replaced by --recover-deadline-s, from which all waits follow; see "
         "`megatron-recover explain timeouts`"),
        ("--recover-stall-timeout-s", "it was replaced by --recover-deadline-s, from which all waits follow; see "
         "`megatron-recover explain timeouts`"),
        ("--recover-bogus", "x lists all"),
        ("--recover-min-replica", "did you mean --recover-min-replicas?"),
        ("--recover-digest-intervall", "did you mean --recover-digest-interval?"),
        ("--recover-deadline", "did you mean --recover-deadline-s?"),
    ],
)  # fmt: skip
def test_a_prefix_that_all_flags_have_makes_no_two_of_them_alike(flag: str, remedy: str) -> None:
    assert flags.did_you_mean(flag, recover_flags(), "x lists all") == remedy


def test_values_and_what_stands_behind_a_bare_dash_dash_are_no_flags() -> None:
    parser = argparse.ArgumentParser(prog="x")
    parser.add_argument("--number", type=float)
    assert flags.unknown(["--number=--one", "--number", "-1", "--", "--two"], parser) == []
    assert flags.unknown(["--numbr=--one", "--two", "--numbr"], parser) == [
        "--numbr is unknown; did you mean --number?",
        "--two is unknown; x --help lists all",
    ]
