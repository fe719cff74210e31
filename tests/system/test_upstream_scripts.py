"""Upstream's own scripts under `megatron-recover run`: torchrun's line with one word changed, a kill, and torchrun's losses."""

from __future__ import annotations

import functools
import os
import pathlib

import pytest

from megatron_recover.core.exit_code import ExitCode
from tests.system import upstream
from tests.system.jobs import ROOT, chaos_text, check
from tests.system.upstream import DEADLINE_S, assert_alike, figures, run

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-decay-iters 100 --hidden-dropout 0 --attention-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5 --log-interval 1 --eval-interval 1000 --eval-iters 1 "
    "--transformer-impl local"
)
HYBRID = "--hybrid-layer-pattern *-*- --spec tests.system.hybrid_spec SPEC --mock-data " + FLAGS.removeprefix("--num-layers 2 ")
LAUNCH = "--nnodes 1 --node_rank 0 --nproc_per_node 4 --max_restarts 2"


@functools.cache
def figures_of_torchrun(launch: str, command: str) -> dict[int, tuple[float, float, float]]:
    """Return losses, gradient norms and learning rates by iteration of a script and its flags under torchrun."""
    return figures(run("torch.distributed.run", f"{launch} --standalone", f"tests/system/upstream.py {command}"))


@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("spelling", ["file", "module"])
def test_upstreams_script_runs_by_torchruns_line_survives_a_kill_and_keeps_torchruns_losses(
    spelling: str, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """The environment is that of an image that presets a world of its own, which nobody may read."""
    script = upstream.script("pretrain_gpt.py")
    flags = f"{FLAGS} --data-path {data} --pipeline-model-parallel-size 2"
    reference = figures_of_torchrun(LAUNCH, f"{script} {flags}")
    faults = tmp_path / "faults.toml"
    faults.write_text(chaos_text("1 1 backward step=2 microbatch=5"))
    flags += " --recover-rebalance off --recover-heal off"  # the fault names a microbatch of replica 1
    adapted = ("--rerun-mode", "--log-progress", "--overlap-param-gather", "--check-weight-hash-across-dp-replicas-interval")
    if spelling == "module":  # nor do the flags without effect change what is computed
        flags += f" --use-distributed-optimizer --overlap-grad-reduce {adapted[2]} {adapted[0]} validate_results {adapted[1]}"
        flags += f" {adapted[3]} 2 --save {tmp_path / 'save'} --save-interval 3"
    named, environment = (f"-m {script.stem}", str(script.parent)) if spelling == "module" else (str(script), "")
    output = run(
        "megatron_recover run", f"{LAUNCH} --run-dir {tmp_path / 'run'} --chaos {faults}", f"{named} {flags}",
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), environment])),
        is_fresh=spelling == "module", RANK="7", WORLD_SIZE="512", MASTER_ADDR="nowhere.invalid", MASTER_PORT="1",
    )  # fmt: skip
    assert "2 replicas of 2 processes (TP 1 x PP 2 x CP 1 x lanes 1)" in output
    assert "1 of 2 replicas left" in output
    assert all((f"{flag} has no effect with replicas" in output) == (spelling == "module") for flag in adapted)
    assert not list(tmp_path.rglob("progress.txt"))
    assert_alike(figures(output), reference)
    code, verdict = check(tmp_path / "run")
    assert code == 0, verdict


def test_the_variables_that_scripts_read_are_those_of_a_world_that_is_the_replica(tmp_path: pathlib.Path) -> None:
    """And what torchrun tells of its nodes and restarts is there, too.

    Its logs and its console are those of torchrun's flags, and the first rank to fail has the first word at the end.
    """
    (seen := tmp_path / "seen").mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "if '\"dry_run\":true' in os.environ['MEGATRON_RECOVER_CONTEXT']:\n"
        "    sys.exit(100)\n"
        "names = 'RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT '\n"
        "names += 'TORCHELASTIC_MAX_RESTARTS '\n"
        "names += ' '.join(f'MEGATRON_RECOVER_{name}' for name in ('REPLICA', 'REPLICAS', 'GLOBAL_RANK'))\n"
        "print('seen by', os.environ['MEGATRON_RECOVER_GLOBAL_RANK'])\n"
        "print('role', os.environ['ROLE_NAME'], os.environ['ROLE_RANK'], file=sys.stderr)\n"
        f"folder = pathlib.Path({str(seen)!r})\n"
        "(folder / str(os.getpid())).write_text(' '.join(os.environ[name] for name in names.split()))\n"
        "until = time.monotonic() + 30\n"
        "while len([*folder.iterdir()]) < 4 and time.monotonic() < until:  # the first to end takes its replica with it\n"
        "    time.sleep(0.01)\n"
        "time.sleep(1.5 * (os.environ['MEGATRON_RECOVER_GLOBAL_RANK'] != '3'))\n"
        "sys.exit(3)\n"
    )
    flags = "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --eval-interval 9 --mock-data "
    flags += "--pipeline-model-parallel-size 2"
    output = run(
        "megatron_recover run",
        f"--nproc-per-node 4 --rdzv-id job7 --log-dir {tmp_path / 'logs'} --run-dir {tmp_path / 'run'} "
        "--tee 1:1,3:3 --redirects 0:3 --role trainer",
        f"{script} {flags}", expected=ExitCode.FAILED,
        RANK="7", WORLD_SIZE="512", GROUP_RANK="3", TORCHELASTIC_RUN_ID="of the image",
    )  # fmt: skip
    assert sorted(each.read_text() for each in seen.iterdir()) == [
        "0 2 0 1 job7 0 0 0 2 0", "0 2 0 1 job7 0 0 1 2 2", "1 2 0 1 job7 0 0 0 2 1", "1 2 0 1 job7 0 0 1 2 3",
    ]  # fmt: skip
    [logs] = (tmp_path / "logs").iterdir()
    attempt = logs / "attempt_0"
    assert logs.name.startswith("job7_") and sorted(each.name for each in attempt.iterdir()) == ["0", "1", "2", "3"]
    assert [(attempt / str(rank) / "stdout.log").read_text() for rank in (0, 1, 3)] == [
        f"seen by {rank}\n" for rank in (0, 1, 3)
    ]
    assert (attempt / "3" / "stderr.log").resolve() == tmp_path / "run" / "logs" / "replica-1-rank-1.log"
    assert (attempt / "3" / "stderr.log").read_text() == "role trainer 1\n"
    assert (attempt / "2" / "stderr.log").read_text() == "seen by 2\nrole trainer 0\n", "neither teed nor redirected: one log"
    shown, end = output[: output.index("--- end of ")], output.index("--- end of ")
    assert sorted(line for line in shown.splitlines() if line.startswith("[trainer")) == [
        "[trainer1]:seen by 1", "[trainer3]:role trainer 1", "[trainer3]:seen by 3",
    ]  # fmt: skip
    assert "seen by 0" not in shown and "seen by 2" not in shown
    assert output[end:].startswith(f"--- end of {tmp_path / 'run' / 'logs' / 'replica-1-rank-1.log'}\n    role trainer 1\n")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("no_such.module", ": no_such is neither in the working directory, nor in PYTHONPATH, nor installed"),
        ("json.no_such", "; its folder has to be the working directory or in PYTHONPATH"),
    ],
    ids=["not its package", "its package"],
)
def test_a_module_that_is_not_there_is_refused_and_leaves_nothing(module: str, why: str, tmp_path: pathlib.Path) -> None:
    output = run(
        "megatron_recover.run", f"--nproc-per-node 2 --log-dir {tmp_path / 'logs'} --run-dir {tmp_path / 'run'} -m",
        f"{module} {FLAGS} --mock-data",
        expected=ExitCode.BAD_INPUT,
    )  # fmt: skip
    assert f"megatron-recover run: there is no module {module}{why}" in output
    assert not [each for each in tmp_path.rglob("*") if each != tmp_path / "logs"]


@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("name", ["pretrain_hybrid.py", "pretrain_mamba.py"])
def test_upstreams_hybrid_script_and_its_old_name_survive_a_kill_and_keep_torchruns_losses(
    name: str, tmp_path: pathlib.Path
) -> None:
    """Attention and MLP layers: Mamba's need kernels for CUDA. The old name runs the new script."""
    reference = figures_of_torchrun("--nproc_per_node 2", f"{upstream.script('pretrain_hybrid.py')} {HYBRID}")
    faults = tmp_path / "faults.toml"
    faults.write_text(chaos_text("1 0 backward step=2 microbatch=5"))
    output = run(
        "megatron_recover run", f"--nproc_per_node 2 --run-dir {tmp_path / 'run'} --chaos {faults}",
        f"{upstream.script(name)} {HYBRID} --recover-rebalance off --recover-heal off",
    )  # fmt: skip
    assert "1 of 2 replicas left" in output
    assert_alike(figures(output), reference)
    code, verdict = check(tmp_path / "run")
    assert code == 0, verdict
