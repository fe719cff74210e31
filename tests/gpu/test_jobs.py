"""Real jobs on a GPU: sums over replicas beside a replica's own collectives."""

from __future__ import annotations

import importlib.util
import pathlib
import shlex

import pytest
import torch

from megatron_recover.cli.demo import PLAIN_TORCH
from tests.system.jobs import Job, Outcome, chaos_text, run_job, text_data

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
TENSOR_PARALLEL = 2


def job(tmp_path: pathlib.Path, *, tp: int = 1, extra: str = "", chaos: str = "", queues: int = 8) -> Outcome:
    """Run two replicas to their end, sharing GPUs where there are fewer than ranks."""
    shared = -(-2 * tp // torch.cuda.device_count())
    plain = "" if importlib.util.find_spec("transformer_engine") else PLAIN_TORCH
    flags = f"{plain} --bf16 --deterministic-mode --recover-ranks-per-gpu {shared} {extra}"
    made = Job(tp=tp, extra=tuple(shlex.split(flags)), steps=8)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return run_job(made, tmp_path / "run", text_data(tmp_path), chaos=chaos, deadline_s=600, environment=environment)


@pytest.mark.finding("G17")
def test_sums_beside_a_replicas_own_collectives_come_to_an_end(tmp_path: pathlib.Path) -> None:
    """Both communicators of a rank have kernels on one device; a death in the middle breaks one of them."""
    outcome = job(
        tmp_path, tp=TENSOR_PARALLEL, extra="--overlap-grad-reduce", queues=32,
        chaos=chaos_text("1 1 reduce step=5 occurrence=2"),
    ).expect()  # fmt: skip
    assert outcome.events("bucket_passed"), "nothing was reduced beside a backward"
