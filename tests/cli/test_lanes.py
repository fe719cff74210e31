"""The lanes that the memory of a GPU asks for, where the user gives the number of processes only."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from megatron_recover.cli import describing, lanes, plan, run, run_flags
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.flags import split
from megatron_recover.host import gpus
from megatron_recover.megatron.layout.memory import memory
from megatron_recover.megatron.layout.sizes import Fsdp2, Layout, Sizes
from tests.megatron.test_layout import eight_billion

FLAGS = "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 --train-iters 2 --mock-data "
FLAGS += "--eval-interval 9"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Sizes | Exception]:
    """A machine with 8 GPUs of 80 GB, and a model of 8 billion parameters whose optimizer lanes share."""
    found: list[Sizes | Exception] = [eight_billion()]

    def read_sizes(script: str, flags: list[str], verb: str) -> Sizes:
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    monkeypatch.setattr(lanes, "read_sizes", read_sizes)
    see(monkeypatch, *[80 * 10**9] * 8)
    return found


def see(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    """Have torch see GPUs of these sizes."""
    monkeypatch.setattr(lanes, "gpu_bytes", lambda: sizes)


def needs(number: int) -> int:
    return memory(eight_billion(), Layout(tp=2, lanes=number)).recovery


def test_lanes_are_the_fewest_with_which_a_rank_fits(
    measured: list[Sizes | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may use 90% of its GPU. The smallest GPU that is used counts."""
    one, two, four = (needs(number) for number in (1, 2, 4))
    assert one > two > four
    for room, expected in ((one, 1), (one - 1, 2), (two, 2), (two - 1, 4), (four, 4)):
        see(monkeypatch, *[10**12] * 7, -(-room * 10 // 9), 1)
        found = lanes.lanes_that_fit(["s.py"], FLAGS.split(), 8)
        assert found is not None and found[0] == expected, (room, found)
    assert found[1].startswith(
        f"4 lanes a replica, the fewest that fit: by plan's estimate a rank needs {one / 1e9:.1f} GB with 1 "
    )
    assert f"{two / 1e9:.1f} GB with 2 lanes, {four / 1e9:.1f} GB with 4 lanes, and may use" in found[1]
    see(monkeypatch, *[four] * 8)
    number, line = lanes.lanes_that_fit(["s.py"], FLAGS.split(), 8) or (0, "")
    assert number == 1 and line.startswith("WARNING: 1 lane a replica, though none fits")


def test_with_fsdp2_more_lanes_share_all_of_the_state(
    measured: list[Sizes | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs of 40 GB 16 bytes a parameter of each of two tensor-parallel ranks, and activations, fit with 4 lanes."""
    numerics = msgspec.structs.replace(measured[0].numerics, gradient=2, step_copy=4, fsdp2=Fsdp2())
    measured[0] = msgspec.structs.replace(measured[0], numerics=numerics)
    see(monkeypatch, *[40 * 10**9] * 8)
    flags = [*FLAGS.split(), "--use-torch-fsdp2", "--untie-embeddings-and-output-weights"]
    number, line = lanes.lanes_that_fit(["s.py"], flags, 8) or (0, "")
    assert number == 4 and line.startswith("4 lanes a replica, the fewest that fit"), line


def test_the_fewest_lanes_are_those_over_which_experts_can_be_spread(
    measured: list[Sizes | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = measured[0].model
    measured[0] = msgspec.structs.replace(measured[0], model=msgspec.structs.replace(model, num_experts=8))
    see(monkeypatch, *[10**12] * 16)
    flags = [*FLAGS.split(), "--expert-model-parallel-size", "4"]
    number, line = lanes.lanes_that_fit(["s.py"], flags, 16) or (0, "")
    assert number == 4 and line.startswith("4 lanes a replica, the fewest that fit"), line
    number, _ = lanes.lanes_that_fit(["s.py"], [*flags, "--expert-tensor-parallel-size", "1"], 16) or (0, "")
    assert number == 2, "an expert has one rank, so 2 x 2 ranks have 4 groups of experts"
    assert lanes.lanes_that_fit(["s.py"], flags, 8) is None, "8 processes are one replica of 4 lanes"


@pytest.mark.parametrize("error", [ValueError("no plan\nat all"), plan.ScriptError("no plan"), OSError("no plan"), None])
def test_a_model_that_cannot_be_measured_starts_with_the_fewest(
    error: Exception | None, measured: list[Sizes | Exception]
) -> None:
    measured[0] = error or msgspec.structs.replace(measured[0], activations=())
    number, line = lanes.lanes_that_fit(["s.py"], FLAGS.split(), 8) or (0, "")
    assert number == 1 and ("(no plan)" if error else "(the model cannot be split over TP 2 x PP 1)") in line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--nproc-per-node 8", (2, 2)),
        ("--nproc-per-node 8 --lanes 1", (4, 1)),
        ("--nproc-per-node 8 --replicas 4", (4, 1)),
        ("--replicas 4", (4, 1)),
    ],
)
def test_only_a_job_whose_size_is_open_is_measured(
    line: str, expected: tuple[int, int], measured: list[Sizes | Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(describing, "has_gpu", lambda: True)
    see(monkeypatch, *[-(-needs(2) * 10 // 9)] * 8)
    (script := tmp_path / "s.py").touch()
    ours, command = split([*line.split(), "--run-dir", str(tmp_path / "run"), str(script), *FLAGS.split()], run_flags.parser())
    job, _, _ = describing.job_of(run_flags.parser().parse_args(ours), command)
    assert (job.num_replicas, job.layout.lanes) == expected
    told = capsys.readouterr().err
    assert ("2 lanes a replica, the fewest that fit" in told) == (expected == (2, 2))
    assert "4 processes (TP 2 x PP 1 x CP 1 x lanes 2)" in told or expected != (2, 2)


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "read_sizes", lambda *_: pytest.fail("the model was measured"))
    see(monkeypatch)
    assert lanes.lanes_that_fit(["s.py"], FLAGS.split(), 8) is None


def test_mistakes_are_told_before_the_model_is_measured(
    measured: list[Sizes | Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(describing, "has_gpu", lambda: True)
    measured[0] = AssertionError("the model was measured")
    (script := tmp_path / "s.py").touch()
    with pytest.raises(SystemExit) as end:
        run.main(["--nproc-per-node", "8", str(script), *FLAGS.split(), "--rampup-batch-size", "2", "2", "2"])
    assert end.value.code == ExitCode.BAD_INPUT and "--rampup-batch-size" in capsys.readouterr().err


def test_the_memory_of_gpus_is_read_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine torch sees as many as it sees here."""
    import torch

    gpus.gpu_bytes.cache_clear()
    assert len(gpus.gpu_bytes()) == torch.cuda.device_count()
    gpus.gpu_bytes.cache_clear()
    monkeypatch.setattr(gpus, "_BYTES", "print(80, 81)")
    assert gpus.gpu_bytes() == (80, 81)
    gpus.gpu_bytes.cache_clear()
    monkeypatch.setattr(gpus, "_BYTES", "print(80, 81); raise RuntimeError")
    assert gpus.gpu_bytes() == ()
    gpus.gpu_bytes.cache_clear()
