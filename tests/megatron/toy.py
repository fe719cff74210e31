"""Toy models whose gradients are codes: microbatch i contributes 2**i to every element, times a number that names the element.

So the sum of a step proves by itself which microbatches are in it, and how often: with M a power of two every number here is
exact in fp32, and the gradient of a full batch is (2**M - 1) / M times the element's number.
"""

from __future__ import annotations

import math
import threading
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.distributed import torch_fully_sharded_data_parallel as upstreams_fsdp2
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_recover.config import RecoverConfig
from megatron_recover.faults import FaultInjector
from megatron_recover.fsdp2.parameter_gradient import sharding_in_fp32
from megatron_recover.megatron.commit import CommitLoop, gradient_is_reduced
from megatron_recover.megatron.data.loaders import MicrobatchCursor, MicrobatchIterator
from megatron_recover.megatron.gradient_buffers import gradients_of
from tests.megatron.loopback import Job, Link, LoopbackDriver

SIZES = (21, 16, 5)
"""Elements of a stage's parameters; buckets of 16 elements cut them in two."""


class Samples:
    """Sample i of a step of M is the number 2**i, or (`noisy`) a number with all its bits in use."""

    def __init__(self, num_microbatches: int, noisy: bool = False, broken: int | None = None) -> None:
        """`broken`: the id whose code is no number."""
        self._num, self._noisy, self._broken = num_microbatches, noisy, broken

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        code = torch.tensor(math.sin(index + 1.0)) if self._noisy else torch.tensor(2.0 ** (index % self._num))
        return {"code": code * math.nan if index % self._num == self._broken else code, "index": torch.tensor(index)}


class Stage(MegatronModule):
    """A pipeline stage that adds its coded sum to what the stage before it gave."""

    def __init__(self, config: TransformerConfig, fused: bool = False) -> None:
        super().__init__(config)
        self.fused = fused
        self.is_first_microbatch = True
        """Set by upstream's `set_is_first_microbatch`, with fp8, fp4, kitchen or a quantisation recipe."""
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for size in SIZES)
        self.model_type = ModelType.encoder_or_decoder
        self.received: Tensor | None = None

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, code: Tensor) -> Tensor:
        factors = [(weight.float(), names(weight.numel()) * code) for weight in self.weights]  # of bf16, too, it is fp32
        if self.fused:
            value = sum(Fused.apply(weight, factor, self.is_first_microbatch) for weight, factor in factors)
        else:
            value = sum(torch.dot(weight, factor) for weight, factor in factors)
        self.is_first_microbatch = False
        return value.reshape(1) if self.received is None else value.reshape(1) + self.received


class Fused(torch.autograd.Function):
    """A product that adds to the main gradient by itself, as upstream's does with `--gradient-accumulation-fusion` on a GPU.

    In the first microbatch of a step it writes over the main gradient, as Transformer Engine does.
    To the one that its forward has found, which its backward makes the main gradient again
    (`core/tensor_parallel/layers.py`, `LinearWithGradAccumulationAndAsyncCommunication`).
    """

    @staticmethod
    def forward(ctx: Any, weight: Any, factor: Tensor, is_first: bool) -> Tensor:
        ctx.weight, ctx.factor, ctx.main_grad, ctx.is_first = weight, factor, weight.main_grad, is_first
        return torch.dot(weight, factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.weight
        weight.main_grad = ctx.main_grad
        if ctx.is_first:
            weight.main_grad.zero_()
        weight.main_grad.add_(gradient * ctx.factor)
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight), None, None


class FusedAdam(torch.optim.Optimizer):
    """Counts steps in its groups, as FusedAdam of Apex and of Transformer Engine does, and scales a moment.

    A new one has no count and no moment until its first step; one that has made `steps` has the count in all groups.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], steps: int = 0, scale: float = 1.0) -> None:
        super().__init__([{"params": parameters}, {"params": []}], {"lr": 0.1})
        self._scales = {parameter: {"exp_avg": scale} for parameter in parameters}
        if steps:
            for group in self.param_groups:
                group["step"] = steps
            for parameter in parameters:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter)).add_(parameter.grad)


def names(size: int) -> Tensor:
    """A number for each element, so that a gradient in the wrong place is seen."""
    return 1.0 + torch.arange(size) % 7


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Upstream's contract: an output, and a function that makes (loss, tokens, report) of it."""
    batch = next(iterator)
    code = batch["code"].sum()

    def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        tokens = torch.tensor(3, dtype=torch.int)
        report = torch.cat([code.reshape(1), tokens.reshape(1).float()])
        # The schedule divides by the tokens unless it is told that the whole step's are divided by.
        scale = 1 if model.config.calculate_per_token_loss else 3
        return output.sum() * scale, tokens, {"code": report, "index": batch["index"].double().reshape(1)}

    return model(code), loss


def model_config(num_stages: int = 1, **fields: Any) -> TransformerConfig:
    config = TransformerConfig(
        hidden_size=8, num_attention_heads=1, use_cpu_initialization=True, pipeline_model_parallel_size=num_stages,
        pipeline_dtype=torch.float32, **{"num_layers": num_stages, **fields},
    )  # fmt: skip
    config.timers = None
    return config


def wrap(module: MegatronModule, **fields: Any) -> DistributedDataParallel:
    """Upstream's DDP around a module: the gradient buffers that the product reduces."""
    return DistributedDataParallel(module.config, DistributedDataParallelConfig(**fields), module)


_WRAPPING = threading.Lock()
"""Held while what upstream calls may be replaced: replicas are threads, and each wraps its own module."""


def wrap_sharded(module: MegatronModule, *, in_fp32: bool = False, **fields: Any) -> TorchFullyShardedDataParallel:
    """Upstream's FSDP2 around a module: the sharded gradients that the product reduces; `in_fp32` whatever their type is."""
    with _WRAPPING, pytest.MonkeyPatch.context() as patch:
        if in_fp32:
            patch.setattr(upstreams_fsdp2, "fully_shard", sharding_in_fp32(upstreams_fsdp2.fully_shard))
        return TorchFullyShardedDataParallel(module.config, TorchFullyShardedDataParallelConfig(**fields), module)


class Threads:
    """Lets every thread of a process be a pipeline stage of its own: what upstream keeps once a process, kept once a thread.

    `install` puts dispatchers where the product's seams stand in a real process.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._originals = {
            "rank": parallel_state.get_pipeline_model_parallel_rank,
            "last": parallel_state.is_pipeline_last_stage,
            "finish": DistributedDataParallel.finish_grad_sync,
        }

    def install(self) -> None:
        local = self._local
        parallel_state.get_pipeline_model_parallel_rank = lambda: local.stage
        parallel_state.is_pipeline_last_stage = lambda *_, **__: local.is_last
        DistributedDataParallel.finish_grad_sync = gradient_is_reduced

    def remove(self) -> None:
        parallel_state.get_pipeline_model_parallel_rank = self._originals["rank"]
        parallel_state.is_pipeline_last_stage = self._originals["last"]
        DistributedDataParallel.finish_grad_sync = self._originals["finish"]

    def enter(self, stage: int, num_stages: int) -> None:
        self._local.stage, self._local.is_last = stage, stage == num_stages - 1


class Trainer:
    """One rank's life: the toy's steps through the product's commit loop. Keeps what each step came to."""

    def __init__(
        self, job: Job, threads: Threads, driver: LoopbackDriver, faults: FaultInjector, config: RecoverConfig, *,
        num_microbatches: int, num_chunks: int = 1, noisy: bool = False, broken: int | None = None, overlap: bool = False,
        fused: bool = False, num_ahead: int = 0, fsdp2: bool = False, dtype: torch.dtype = torch.float32,
        in_fp32: bool = True, log: Any = None, **model_fields: Any,
    ) -> None:  # fmt: skip
        """`dtype`: of the parameters, with FSDP2; `in_fp32`: their gradients are summed in fp32, not in that type."""
        self.num_microbatches, self.noisy, self.broken = num_microbatches, noisy, broken
        num_stages = job.num_ranks
        if num_chunks > 1:
            model_fields |= {
                "num_layers": num_stages * num_chunks, "virtual_pipeline_model_parallel_size": num_chunks,
                "overlap_p2p_comm": True, "batch_p2p_comm": False,
            }  # fmt: skip
        self.config = model_config(num_stages, **model_fields)
        self.config.use_kitchen = fused  # has no effect but that upstream marks first microbatches
        self.config.finalize_model_grads_func = self._finalize if num_stages > 1 else finalize_model_grads
        self.fsdp2, is_wide = fsdp2, in_fp32 and dtype != torch.float32
        self.chunks = [
            wrap_sharded(Stage(self.config).to(dtype), in_fp32=is_wide)
            if fsdp2
            else wrap(Stage(self.config, fused), check_for_nan_in_grad=broken is not None, overlap_grad_reduce=overlap)
            for _ in range(num_chunks)
        ]
        self.cursor = MicrobatchCursor(num_ahead=num_ahead)
        self.iteration = 0
        self.link = Link(job, driver.replica, driver.rank, num_stages, self.config) if num_stages > 1 else None
        self.loop = CommitLoop(
            driver, config, {}, cursor=self.cursor, seed=lambda *_: None, iteration=lambda: self.iteration,
            alike=lambda: {"toy": ""}, log=log, faults=faults,
            gather=lambda holding: job.gather(driver.replica, driver.rank, holding),
            gradients=gradients_of(
                Namespace(
                    use_torch_fsdp2=fsdp2, overlap_grad_reduce=overlap, check_for_nan_in_loss_and_grad=broken is not None,
                    bf16=dtype == torch.bfloat16, accumulate_allreduce_grads_in_fp32=in_fp32,
                )  # fmt: skip
            ),
        )  # fmt: skip
        threads.enter(driver.rank, num_stages)
        self.iterators, self.validation = ([self._samples() for _ in self.chunks] for _ in range(2))
        self.gradients: list[list[Tensor]] = []
        """Per training step the gradient of each parameter, as the optimizer finds it."""
        self.losses: list[list[dict[str, Tensor]]] = []
        """What Megatron was given back, per step."""
        self.tokens: list[int] = []

    def _samples(self) -> MicrobatchIterator:
        return MicrobatchIterator(
            Samples(self.num_microbatches, self.noisy, self.broken),
            self.cursor,
            consumed_samples=0,
            micro_batch_size=1,
            lane=0,
            num_lanes=1,
        )

    def _finalize(self, chunks: list[Any], num_tokens: Tensor | None, **_: Any) -> None:
        for chunk in chunks:
            chunk.finish_grad_sync()
        if num_tokens is not None:
            self.tokens.append(int(num_tokens))

    def step(self, forward_only: bool = False) -> None:
        """Upstream's `train_step` in short: zero, forward-backward, optimizer (or an evaluation step)."""
        if not forward_only:
            self.iteration += 1
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
                chunk.zero_grad(set_to_none=True)  # as the optimizer does
        link = {"p2p_communicator": self.link, "pg_collection": schedules._build_default_pg_collection()} if self.link else {}
        losses = self.loop.run(
            forward_step_func=forward_step, data_iterator=self.validation if forward_only else self.iterators,
            model=self.chunks, num_microbatches=self.num_microbatches, seq_length=1, micro_batch_size=1,
            forward_only=forward_only, **link,
        )  # fmt: skip
        self.losses.append(losses)
        if not forward_only:
            weights = [weight for chunk in self.chunks for weight in chunk.module.weights]
            found = [getattr(weight, "main_grad", weight.grad) for weight in weights]
            found = [gradient.to_local() if self.fsdp2 else gradient for gradient in found]
            self.gradients.append([gradient.clone() for gradient in found])
            with torch.no_grad():
                for weight, gradient in zip(weights, found, strict=True):
                    (weight.to_local() if self.fsdp2 else weight).sub_(gradient * 0.5)
            self.loop.stepped()

    def expected(self) -> list[Tensor]:
        """The gradient of a full batch, exactly."""
        code = (2.0**self.num_microbatches - 1) / self.num_microbatches
        return [names(size) * code for size in SIZES * len(self.chunks)]


def start_world() -> None:
    """This process's `torch.distributed` world and upstream's groups in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


class Events:
    """The event log of all ranks, in memory."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._lock = threading.Lock()

    def record(self, event: Any) -> None:
        """Keep an event, from any thread."""
        with self._lock:
            self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        """Return the events of a type."""
        return [event for event in self.events if isinstance(event, kind)]
