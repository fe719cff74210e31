"""Steps of a rank on a device, and how often the host waits for it in one, counted on a pretended GPU.

`CommitLoop`, the reduction, the digests and the machines are the product's. The model is a gradient buffer and a list of
parameters, and a schedule runs here that only calls its listener: what upstream waits for is not counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_recover.config import RecoverConfig
from megatron_recover.core.digest import combined
from megatron_recover.megatron import commit
from megatron_recover.megatron.data.loaders import MicrobatchCursor
from megatron_recover.trainer.checksum import checksums
from megatron_recover.trainer.regions import Region
from megatron_recover.trainer.work_queue import WorkQueue
from tests.megatron.loopback import Job, LoopbackDriver
from tests.pretend_gpu import pretended

Place = Callable[[Tensor], Tensor]

BUCKET = 20_000
"""Elements of a bucket: more than a row of a checksum."""


class Buffers:
    """A gradient buffer on a device."""

    num_chunks, can_watch = 1, False

    def __init__(self, place: Place, num_buckets: int) -> None:
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        self.checks_finite = True
        local = place(torch.zeros(num_buckets * BUCKET))
        self.regions = [Region(local, chunk=0, group=alone, scale=1.0, sharded=False, bucket_elements=BUCKET)]

    def collect_into(self, into: Any) -> None:
        pass


class Size(NamedTuple):
    """How large a model and its step are."""

    num_buckets: int
    num_microbatches: int
    num_parameters: int


SMALL, LARGE = Size(1, 1, 1), Size(9, 7, 5)


def waits_of_a_step(size: Size, *, determinism: str = "fast", digests_state: bool = False) -> Counter[str]:
    """Return how often the host waits for a pretended GPU in the third training step, by what it waits for."""
    with pretended() as gpu:

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            gpu.waits.clear()
            yield
            found.append(gpu.waits.copy())

        found: list[Counter[str]] = []
        train(gpu.tensor, size, around, determinism=determinism, digests_state=digests_state)
        return found[-1]


def train(
    place: Place, size: Size, around: Callable[[], contextlib.AbstractContextManager[None]], *, determinism: str = "fast",
    digests_state: bool = False,
) -> None:  # fmt: skip
    """Train three steps on the device to which `place` brings a tensor, each within `around()`."""
    buffers = Buffers(place, size.num_buckets)
    parameters = [place(torch.ones(BUCKET)) for _ in range(size.num_parameters)]
    report, tokens = {"lm loss": place(torch.tensor([2.0, 4.0]))}, place(torch.tensor(4))

    def run_pass(arguments: Any, queue: WorkQueue, *, listener: Any, **_: Any) -> None:
        queue.prepare()
        while (task := queue.next()) is not None:
            listener.forward_begins(task, 0)
            listener.forward_ended(task, 0, tokens, report)
            listener.backward_begins(task, 0, last=False)
            buffers.regions[0].local += 1.0
            listener.backward_ended(task, 0)
            queue.prepare()

    loss_scale = place(torch.ones(1))

    def grad_scale(loss: Tensor) -> Tensor:  # as upstream's `MegatronOptimizer.scale_loss`
        return loss_scale * loss

    digest = SimpleNamespace(has_optimizer=True, layout_digest=lambda: 0, digest=lambda: combined(checksums(parameters)))
    config = SimpleNamespace(
        calculate_per_token_loss=False, finalize_model_grads_func=None, grad_scale_func=grad_scale, mtp_num_layers=None
    )
    named = [(f"parameter{number}", each) for number, each in enumerate(parameters)]
    chunk = SimpleNamespace(
        config=config, named_parameters=lambda: named, parameters=lambda: iter(parameters),
        buffers=[SimpleNamespace(grad_data=parameters[0])],
        ddp_config=SimpleNamespace(check_for_large_grads=False, overlap_param_gather=False),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("run_pass", run_pass), ("TrainingState", lambda *_: digest)):
            patch.setattr(commit, name, value)
        patch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
        patch.setattr(parallel_state, "is_pipeline_last_stage", lambda ignore_virtual: True)
        patch.setattr(parallel_state, "get_data_parallel_group", lambda **_: SimpleNamespace(size=lambda: 1))
        patch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 1)
        iteration = [0]
        loop = commit.CommitLoop(
            LoopbackDriver(Job(1, 1, [], 0), 0, 0),
            RecoverConfig(
                bucket_elements=BUCKET, determinism=determinism, rebalance="off",
                state_digest_interval=1 if digests_state else 10**9,
            ),
            {"train_step": lambda *_: loop.run(model=[chunk], data_iterator=None, num_microbatches=size.num_microbatches)},
            cursor=MicrobatchCursor(), seed=lambda *_: None, iteration=lambda: iteration[0], alike=dict,
            gather=lambda value: [value], gradients=lambda *_: buffers,
        )  # fmt: skip
        for iteration[0] in (1, 2, 3):
            with around():
                loop.train_step(None, None, [chunk], None, None)
            found = buffers.regions[0].local.tolist()
            assert found[::BUCKET] == [size.num_microbatches] * size.num_buckets, "another gradient was applied"
            buffers.regions[0].local.zero_()
