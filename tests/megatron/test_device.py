"""The device of a job: named on the console, and no CPU instead of a GPU that torch does not see."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.megatron import cpu
from megatron_recover.megatron.launch import device, parsing
from tests.pretend_gpu import DEVICE, pretended


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has a GPU, of which this torch, built for CUDA, sees nothing."""
    monkeypatch.setattr(device, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", init)


def test_a_driver_that_is_too_old_is_named() -> None:
    [line] = device.unseen_gpu()
    assert "torch sees none: The NVIDIA driver on your system is too old (found version 11040); look with `nvidia-smi`" in line
    assert "--gres" in line and "\n" not in line


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    [line] = device.unseen_gpu()
    assert f"torch {torch.__version__} is built for the CPU" in line


@pytest.mark.parametrize("visible", ["7", "NoDevFiles"])
def test_a_variable_that_names_no_gpu_is_named(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    [line] = device.unseen_gpu()
    assert f"CUDA_VISIBLE_DEVICES is {visible}" in line


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_user_who_hides_the_gpus_trains_on_the_cpu_and_reads_so(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.unseen_gpu() == []
    assert device.device_line(num_gpus=0, num_used=4) == "training on the CPU: CUDA_VISIBLE_DEVICES hides every GPU"


def test_the_line_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.device_line(num_gpus=8, num_used=6) == "training on GPUs: 6 of the 8 that torch sees"
    monkeypatch.setattr(device, "has_nvidia_gpu", lambda: False)
    assert device.unseen_gpu() == []
    assert device.device_line(num_gpus=0, num_used=6) == "training on the CPU: torch finds no GPU"


def test_a_rank_on_the_device_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
        assert device.other_device(0) == []
        [line] = device.other_device(3)
        assert "would train on cuda:0, and its own device is cuda:3" in line and "LOCAL_RANK" in line
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the CPU that stands for a device says no number
        assert device.other_device(3) == []


def test_no_argument_is_parsed_for_the_cpu_where_a_gpu_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else `--sequence-parallel` would be refused first, with the wrong remedy: to leave it out on a CPU."""
    enabled: list[bool] = []
    monkeypatch.setattr(cpu, "enable_cpu", lambda: enabled.append(True))
    monkeypatch.setattr("sys.argv", ["script.py", "--sequence-parallel"])
    with pytest.raises(SystemExit) as end:
        parsing.parse(None, {}, {})
    assert end.value.code == ExitCode.BAD_INPUT and not enabled
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("bad arguments: this machine has a GPU of NVIDIA, and torch sees none")


@pytest.mark.parametrize("is_left_out", [True, False])
def test_without_cuda_megatron_finds_no_kernels(is_left_out: bool, tmp_path: pathlib.Path) -> None:
    """Megatron's last norm is Transformer Engine's where that is installed, and on a GPU: `plan` refused every model."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libnccl.so.2: cannot open shared object file')")
    call = "cpu.leave_out_what_needs_a_gpu()" if is_left_out else ""
    block = "import megatron.core.transformer.transformer_block as block; print(block.HAVE_TE)"
    code = f"from megatron_recover.megatron import cpu; {call}\n{block}"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    if is_left_out:
        assert process.stdout == "False\n", process.stderr
    else:
        assert "OSError: libnccl.so.2" in process.stderr
