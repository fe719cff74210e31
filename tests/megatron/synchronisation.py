"""How often the host waits for the device in a step, counted on a pretended GPU (`tests/pretend_gpu.py`).

`CommitLoop`, the reduction, the digests and the machines are the product's. The model is a gradient buffer and a list of
parameters, and a schedule runs here that only calls its listener: what upstream waits for is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron_recover.config import RecoverConfig
from megatron_recover.megatron import commit
from megatron_recover.megatron.data.loaders import MicrobatchCursor
from megatron_recover.trainer.regions import Region
from megatron_recover.trainer.work_queue import WorkQueue
from tests.megatron.loopback import Job, LoopbackDriver
from tests.pretend_gpu import Gpu, pretended

BUCKET = 20_000
"""Elements of a bucket: more than a row of a checksum."""


class Buffers:
    """A gradient buffer on the pretended GPU."""

    num_chunks, can_watch = 1, False

    def __init__(self, gpu: Gpu, num_buckets: int, checks_finite: bool) -> None:
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        self.checks_finite = checks_finite
        local = gpu.tensor(torch.zeros(num_buckets * BUCKET))
        self.regions = [Region(local, chunk=0, group=alone, scale=1.0, sharded=False, bucket_elements=BUCKET)]

    def collect_into(self, into: Any) -> None:
        pass


def waits_of_a_step(
    *, num_buckets: int, num_microbatches: int, num_parameters: int, determinism: str = "fast", checks_finite: bool = True,
    digests_state: bool = False,
) -> Mapping[str, int]:  # fmt: skip
    """Return how often the host waits in the third training step, by what it waits for."""
    with pretended() as gpu, pytest.MonkeyPatch.context() as patch:
        buffers = Buffers(gpu, num_buckets, checks_finite)
        parameters = [gpu.tensor(torch.ones(BUCKET)) for _ in range(num_parameters)]
        report = {"lm loss": gpu.tensor(torch.tensor([2.0, 4.0]))}
        tokens = gpu.tensor(torch.tensor(4))

        def run_pass(arguments: Any, queue: WorkQueue, *, listener: Any, **_: Any) -> None:
            queue.prepare()
            while (task := queue.next()) is not None:
                listener.forward_begins(task, 0)
                listener.forward_ended(task, 0, tokens, report)
                listener.backward_begins(task, 0, last=False)
                buffers.regions[0].local += 1.0
                listener.backward_ended(task, 0)
                queue.prepare()

        state = SimpleNamespace(has_optimizer=True, layout_digest=lambda: 0, digest=lambda: commit_digest(parameters))
        for name, value in {
            "GradientBuffers": lambda *_: buffers, "run_pass": run_pass, "TrainingState": lambda *_: state,
            "register_optimizer_step_pre_hook": None,
        }.items():  # fmt: skip
            patch.setattr(commit, name, value)
        patch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
        patch.setattr(parallel_state, "is_pipeline_last_stage", lambda ignore_virtual: True)
        patch.setattr(parallel_state, "get_data_parallel_group", lambda **_: SimpleNamespace(size=lambda: 1))
        patch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 1)
        config = SimpleNamespace(calculate_per_token_loss=False, finalize_model_grads_func=None, grad_scale_func=None)
        chunk = SimpleNamespace(config=config, parameters=lambda: parameters, buffers=[])
        iteration = [0]
        interval = 1 if digests_state else 10**9
        loop = commit.CommitLoop(
            LoopbackDriver(Job(1, 1, [], 0), 0, 0),
            RecoverConfig(bucket_elements=BUCKET, determinism=determinism, state_digest_interval=interval),
            {"train_step": lambda *_: loop.run(model=[chunk], data_iterator=None, num_microbatches=num_microbatches)},
            cursor=MicrobatchCursor(), seed=lambda *_: None, iteration=lambda: iteration[0], alike=dict,
            gather=lambda value: [value],
        )  # fmt: skip
        for iteration[0] in (1, 2, 3):
            gpu.waits.clear()
            loop.train_step(None, None, [chunk], None, None)
        assert buffers.regions[0].local.held.tolist()[::BUCKET] == [3.0 * num_microbatches] * num_buckets
        return Counter(gpu.waits)


def commit_digest(parameters: list[torch.Tensor]) -> int:
    """Return a digest as `State.digest` makes it."""
    from megatron_recover.trainer.checksum import checksums, combined

    return combined(checksums(parameters))
