"""What only the parser of the training script can judge is refused before there is a rank."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from megatron_recover.core.exit_code import ExitCode
from tests.system.jobs import Job, chaos_text, run_job

TOLD = (
    "replicas that are lost will not be replaced: --phase-transition-iterations lets no replica join while others train: data "
    "sets are built for the phase of the iteration with which training begins; leave it out"
)


class Phased(Job):
    """A job that ends after iteration 3, with its first phase. Upstream wants a length in samples for that."""

    def megatron_flags(self, data: pathlib.Path, save: pathlib.Path | None) -> list[str]:
        flags = " ".join(super().megatron_flags(data, save)).replace("--lr-warmup-iters 1", "--lr-warmup-samples 6")
        return [*flags.replace("--train-iters 6", "--train-samples 36").split(), "--phase-transition-iterations", "3"]


SCRIPT = """\
from megatron_recover import megatron as recover

def add_mine(parser):
    parser.add_argument("--my-rate", type=float)
    return parser

recover.pretrain(None, None, None, None, extra_args_provider=add_mine)
"""


def test_a_mistyped_flag_of_megatron_or_of_the_script_is_answered_with_the_one_that_was_meant(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "run").mkdir()  # a folder of the user's own, empty before and empty after
    mistyped = Job(extra=("--my-rate", "1", "--my-rat", "2", "--tensor-model-paralel-size=1", "--max-restarts", "3"))
    outcome = run_job(mistyped, tmp_path / "run", data, script=script).expect(ExitCode.BAD_INPUT)
    lines = [line for line in outcome.output.splitlines() if "importing" not in line]
    [unknown] = [line for line in lines if "--max-restarts is unknown; " in line]
    behind = (
        f"megatron-recover run: --max-restarts 3 behind {script} is the script's; if it is for the launcher, write: "
        f"megatron-recover run --max-restarts 3 ... {script} ..."
    )
    lines.remove(unknown)
    lines.remove(behind)
    assert lines == [
        "megatron-recover run: --my-rat is unknown; did you mean --my-rate?",
        "megatron-recover run: --tensor-model-paralel-size is unknown; did you mean --tensor-model-parallel-size?",
        f"megatron-recover run: nothing was trained, so {tmp_path / 'run'} was emptied again",
    ]
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("begins", "why"),
    [
        (
            "from megatron.training import pretrain\npretrain(None, None, None, None)",
            "calls pretrain without arguments of Megatron; call parse_and_validate_args of megatron.training.arguments first, "
            "as upstream's pretrain_gpt.py does",
        ),
        (
            "import torch.distributed as dist\ndist.init_process_group('gloo')  # and then no pretrain",
            "calls torch.distributed.init_process_group; call parse_and_validate_args and pretrain of megatron.training "
            "instead, as upstream's pretrain_gpt.py does, or megatron_recover.megatron.pretrain",
        ),
    ],
    ids=["no arguments", "own world"],
)
def test_a_script_that_trains_by_itself_is_refused_before_it_does(
    begins: str, why: str, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """Run once, alone, it would write to the checkpoints, or wait for ranks that are never started."""
    script = tmp_path / "script.py"
    script.write_text(begins)
    outcome = run_job(Job(), tmp_path / "run", data, script=script, save=tmp_path / "ck").expect(ExitCode.BAD_INPUT)
    [line] = [line for line in outcome.output.splitlines() if "pretrain" in line and "importing" not in line]
    assert line == f"megatron-recover run: {script} {why}"
    assert not (tmp_path / "ck").exists()


def test_what_megatrons_parser_prints_before_it_exits_is_the_reason(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    outcome = run_job(Job(extra=("--checkpoint-activations",)), tmp_path / "run", data).expect(ExitCode.BAD_INPUT)
    line = "megatron-recover run: --checkpoint-activations is no longer valid, use --recompute-activations, or"
    assert line in outcome.output, outcome.output


def test_interrupted_before_training_leaves_the_run_directory_free(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(int(os.environ['LAUNCHER']), signal.SIGINT)\nsignal.pause()\n")
    flags = ["--replicas", "2", "--run-dir", str(tmp_path / "run"), "--", str(script), *Job().megatron_flags(data, None)]
    code = "import os, sys; os.environ['LAUNCHER'] = str(os.getpid()); from megatron_recover.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "run", *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.INTERRUPTED, done.stdout + done.stderr
    assert "SIGINT: ending before training has begun" in done.stdout
    assert not (tmp_path / "run").exists(), "the same command would be refused"


def test_a_script_beside_a_part_of_another_megatron_is_refused(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """A part of the job would import the one, a part the other."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    fresh = {"PYTHONHASHSEED": "0"}  # no fork, which would have imported Megatron (`forks._can_fork`)
    outcome = run_job(Job(), tmp_path / "run", data, script=script, environment=fresh).expect(ExitCode.BAD_INPUT)
    assert f"megatron-recover run: two Megatrons would be imported: megatron.core of {tmp_path} and megatron.training of " in (
        outcome.output
    )
    assert f"; complete that in {tmp_path}, or start a script of a whole one" in outcome.output


def test_what_the_script_asserts_between_its_arguments_and_the_training_is_bad_input(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron.training.arguments import parse_and_validate_args\n"
        "args = parse_and_validate_args()\n"
        "assert args.num_layers > 1000, 'too shallow for me'\n"
    )
    outcome = run_job(Job(), tmp_path / "run", data, script=script).expect(ExitCode.BAD_INPUT)
    assert "megatron-recover run: too shallow for me\n" in outcome.output


def test_a_flag_with_which_no_replica_can_join_is_told_at_the_start_and_a_loss_is_not_replaced(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    job, chaos = Phased(replicas=3, heal="in-place"), chaos_text("1 0 forward step=0")
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos).expect()
    told, lost = outcome.output.index(f"megatron-recover: {TOLD}\n"), outcome.output.index("replica 1 lost")
    assert told < lost, "before anything is lost"
    assert [event["point"] for event in outcome.events("fault")] == ["forward"] and not outcome.events("forming")
    assert (outcome.summary["replicas_end"], outcome.summary["steps"]) == (2, 3)
    with_spares = Phased(replicas=3, heal="in-place", run_flags=("--spares", "1"))
    refused = run_job(with_spares, tmp_path / "other", data).expect(ExitCode.BAD_INPUT)
    assert "--spares is 1, but no lost replica is replaced: --phase-transition-iterations lets no replica" in refused.output
