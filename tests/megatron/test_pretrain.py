"""`scripts/pretrain_gpt.py` with the real `pretrain()`: plain Megatron under torchrun, and the same job as replicas."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recover.cli.data import write_dataset
from megatron_recover.core.exit_code import ExitCode
from tests import forks
from tests.system.upstream import FIGURES, assert_alike, figures

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/pretrain_gpt.py"
DEADLINE_S = 150
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-decay-iters 100 --hidden-dropout 0 --attention-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5 --log-interval 1 --eval-interval 1000 --eval-iters 1 "
    "--data-path {data} "
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("data") / "text"
    write_dataset(prefix, iter(sorted(Path(os.__file__).parent.glob("[a-c]*.py"))))
    return FLAGS.format(data=prefix)


@contextlib.contextmanager
def started(command: list[str], *, is_fresh: bool = False) -> Iterator[forks.Program | subprocess.Popen[str]]:
    """A job in a process group of its own, of which nothing is left. Ranks of torchrun's are fresh interpreters."""
    process = forks.start(command, cwd=ROOT, environment=os.environ | {"OMP_NUM_THREADS": "1"}, is_fresh=is_fresh)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(command: list[str], expected: int = 0) -> str:
    with started(command) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == expected, f"{' '.join(command)}\n{output[-5000:]}"
    return output


def torchrun(num_ranks: int, flags: str) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]  # on a port that it holds
    return [sys.executable, *launch, SCRIPT, *flags.split()]


def replicas(num: int, run_dir: Path, flags: str, *, lanes: int = 1) -> list[str]:
    run = ["run", "--replicas", str(num), "--lanes", str(lanes), "--run-dir", str(run_dir), "--"]
    return [sys.executable, "-m", "megatron_recover", *run, SCRIPT, *flags.split()]


@pytest.mark.timeout(2 * DEADLINE_S)
def test_torchrun_pipeline_trains(flags: str) -> None:
    output = finish(torchrun(2, flags + "--pipeline-model-parallel-size 2"))
    found = figures(output)
    assert list(found) == [1, 2, 3, 4]
    assert found[4][0] < found[1][0] - 0.1
    assert "| generation:" not in output, "without the launcher it is plain Megatron"


@pytest.mark.timeout(5 * DEADLINE_S)
def test_checkpoint_of_lanes_goes_on_in_plain_megatron_and_at_another_number_of_replicas(flags: str, tmp_path: Path) -> None:
    """2 replicas of 2 lanes with ZeRO-1 stop half-way; one plain process and 3 replicas finish as a plain job does."""
    flags += "--use-distributed-optimizer "
    saved, load = tmp_path / "saved", "--load {} --dist-ckpt-optim-fully-reshardable"
    reference = figures(finish(torchrun(2, flags)))
    first = finish(replicas(2, tmp_path / "run", flags + f"--save {saved} --save-interval 2 --exit-interval 2", lanes=2))
    assert_alike(figures(first), {iteration: reference[iteration] for iteration in (1, 2)})
    for name in ("plain", "ours"):
        shutil.copytree(saved, tmp_path / name)
    plain = figures(finish(torchrun(1, flags + load.format(tmp_path / "plain"))))
    assert plain[3] == pytest.approx(reference[3], rel=1e-3)
    assert plain[4][1] == pytest.approx(reference[4][1], rel=1e-2)
    assert_alike(figures(finish(replicas(3, tmp_path / "again", flags + load.format(tmp_path / "ours")))), plain)


@pytest.mark.timeout(2 * DEADLINE_S)
def test_signal_ends_all_replicas_at_one_iteration_with_a_checkpoint(flags: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    command = replicas(2, tmp_path / "run", flags + f"--train-iters 100000 --save {saved} --save-interval 100000")
    output = ""
    with started(command, is_fresh=True) as process:
        assert isinstance(process, subprocess.Popen) and process.stdout is not None
        for line in process.stdout:
            output += line
            if FIGURES.search(line) and int(FIGURES.search(line)[1]) == 2:  # type: ignore[index]
                process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
    assert process.returncode == ExitCode.INTERRUPTED, output
    last = max(figures(output))
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert [each.name for each in saved.glob("iter_*")] == [f"iter_{last:07d}"]


@pytest.mark.timeout(DEADLINE_S)
def test_bad_argument_is_one_message(flags: str) -> None:
    """What only Megatron's own parser knows, in a worker."""
    output = finish([sys.executable, SCRIPT, *f"{flags} --micro-batch-size 3".split()], expected=ExitCode.BAD_INPUT)
    assert "bad arguments: " in output
    assert "Traceback" not in output
