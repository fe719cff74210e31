"""What tests share that run Megatron's schedules in one process; a module asks by `pytest.mark.usefixtures`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_recover.megatron.cpu import enable_cpu, leave_out_what_needs_a_gpu

leave_out_what_needs_a_gpu()  # before anything imports Megatron, as in every process of a run

from megatron.core import parallel_state  # noqa: E402

from tests.megatron.toy import Threads, start_world  # noqa: E402


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A torch world of one rank with Megatron's groups, for the tests of a module."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        enable_cpu()
    start_world()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def threads(world: None) -> Iterator[Threads]:
    """Threads that play the ranks of a job in that world."""
    threads = Threads()
    threads.install()
    yield threads
    threads.remove()
