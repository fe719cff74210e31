"""What torch really raises where a rank of a replica finds another one gone or silent is told from a failed computation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from megatron_recover.trainer.communication import is_communication_error, is_device_error
from tests.cluster.jobs import ROOT

RANK = """
import datetime, os, sys
import torch, torch.distributed as dist
from megatron_recover.trainer.communication import is_communication_error
rank, how, operation = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(sys.argv[4], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
tensor = torch.zeros(10)
dist.all_reduce(tensor)
# Who has come late to the first group, importing for long, would not have met the other in time in this one.
patience = datetime.timedelta(seconds=5 if how == "is silent" else 60)
group = dist.new_group([0, 1], timeout=patience)
if rank == 1:
    store.wait(["connected"])  # else the other, still in new_group, would fail there
    if how == "dies":
        os.kill(os.getpid(), 9)
    sys.stdin.read()  # says nothing until the test lets it go
    os._exit(0)
store.set("connected", "1")
try:
    if operation == "reduce":
        dist.all_reduce(tensor, group=group)
    elif operation == "receive":
        dist.recv(tensor, 1, group=group)
    else:
        both = [dist.P2POp(each, tensor, 1, group) for each in (dist.irecv, dist.isend)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
except Exception as error:
    print("error", is_communication_error(error), type(error).__name__, error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("how", "operation"), [("dies", "reduce"), ("dies", "pipeline"), ("is silent", "receive")])
def test_what_gloo_raises_is_known(tmp_path: object, how: str, operation: str) -> None:
    words = [how, operation, f"{tmp_path}/store"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        output = ranks[0].communicate(timeout=60)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert output.startswith("error True"), output


def test_the_error_behind_an_error_counts_and_a_text_alone_does_not() -> None:
    try:
        try:
            raise dist.DistBackendError("the watchdog gave up")
        except RuntimeError as error:
            raise ValueError("the step failed") from error
    except ValueError as error:
        assert is_communication_error(error)
    assert not is_communication_error(OSError("Connection reset by peer"))
    assert not is_communication_error(RuntimeError("shape mismatch"))
    assert not is_communication_error(None)


HINT = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
"""The end of every error of a device in torch (get_cuda_check_suffix)."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered\n{HINT}"), True),
        (torch.AcceleratorError(f"CUDA error: device-side assert triggered\n{HINT}"), False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error"), False),
        (ValueError("x"), False),
    ],
)
def test_a_device_that_fails_is_told_from_a_computation_that_does(error: Exception, expected: bool) -> None:
    assert is_device_error(error) == expected
    try:
        raise RuntimeError("a layer") from error
    except RuntimeError as outer:
        assert is_device_error(outer) == expected
