"""One replica as real processes: a small GPT of upstream's, trained by upstream alone and through the commit loop.

`run(layout, ...)` starts the ranks from a fork server that has imported Megatron already, and returns what each rank returned.
"""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_recover.config import RecoverConfig
from megatron_recover.core.rank_messages import Apply, Plan
from megatron_recover.core.values import BucketVersion, Compute, Held, Record, Shape, Work
from megatron_recover.data_plane.transport import Revoked
from tests.forks import CONTEXT, results_of
from tests.megatron import token_exchange
from tests.megatron.split_attention import SplitAttention, part

DEADLINE_S = 120.0
LEARNING_RATE = 0.01
"""About how far Adam moves a parameter in one of the first steps, however small its gradient is."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's layout and the options under test."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    lanes: int = 1
    ep: int = 1
    num_experts: int | None = None
    dispatcher: str = "allgather"
    """Who brings tokens to their experts: of upstream's three types, or a backend of its flex dispatcher."""
    distributed_optimizer: bool = False
    bf16: bool = False
    per_token: bool = False
    num_microbatches: int = 4
    determinism: str = "fast"
    overlap: bool = False
    """`--overlap-grad-reduce`, in the recovered run."""
    fsdp2: bool = False
    """FSDP2 shards parameters, gradients and optimizer over the lanes."""
    reduce_in_bf16: bool = False
    """`--grad-reduce-in-bf16`, with FSDP2 alone."""
    recompute: bool = False
    """Activations are computed again in the backward."""

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.lanes

    @property
    def sums_in_fp32(self) -> bool:
        return self.bf16 and not self.reduce_in_bf16


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that a scripted leader gives: passes, and which of the buckets are reduced (`odd`, `even`, or all)."""

    passes: tuple[tuple[int, ...], ...]
    parity: int | None = None
    """Only buckets with this remainder by two take the gradient and are reduced."""
    revoked: bool = False
    """A newer generation comes before the reduction."""


class AloneTransport:
    """The sum over a roster of one."""

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], **_: Any) -> None:
        for source, result in zip(sources, results, strict=True):
            assert source.data_ptr() != result.data_ptr()
            result.copy_(source)

    def copy_into(self, tensors: Sequence[Tensor], **_: Any) -> None:
        raise AssertionError("nobody to copy from")


class ScriptedDriver:
    """A member whose leader orders the rounds of a script, then commits."""

    replica, rank, generation, roster = 0, 0, 0, (0,)

    def __init__(self, rounds: Sequence[Round]) -> None:
        self.rank = dist.get_rank()
        self._script = rounds
        self.held: dict[int, Held] = {}

    def is_writer(self) -> bool:
        return True

    def join(self, shape: Shape, fingerprint: str, parts: Any = (), beginning: Any = (), state_address: str = "") -> None:
        self.shape = shape

    def begin(self, work: Work, requests: Sequence[str] = (), digest: int | None = None) -> int:
        self.work, self._left = work, list(self._script)
        self.held.clear()
        return 0

    def next_order(self) -> Plan | Apply:
        if not self._left:
            versions = tuple(BucketVersion(bucket, 1, ()) for bucket in self.work.buckets)
            return Apply(Record(0, self.work.label, versions), self.generation)
        self._round = self._left.pop(0)
        self.generation += 1
        into = tuple(bucket for bucket in self.work.buckets if self._round.parity in (None, bucket % 2))
        computes = tuple(Compute(ids, into) for ids in self._round.passes)
        return Plan(0, self.generation, (0,), self.work, (len(self.work.buckets),), (), computes, into)

    def more_work(self) -> Plan | None:
        return None

    def has_order(self) -> bool:
        return True

    def ask_close(self) -> None:
        pass

    def started(self, microbatch: int) -> None:
        pass

    def finished(self, microbatch: int) -> None:
        pass

    def pass_timed(self, num_microbatches: int, elapsed_ns: int) -> None:
        pass

    def pass_ended(self, generation: int) -> None:
        pass

    def overlap_refusal(self, generation: int, operands: object) -> str:
        return ""

    def transport(self, generation: int) -> AloneTransport:
        if self._round.revoked:
            raise Revoked("a newer generation was promised")
        return AloneTransport()

    def hold(self, held: Held) -> bool:
        self.held[held.bucket] = held
        return True

    def blocked(self, generation: int, error: BaseException) -> None:
        raise error

    def failing(self, microbatches: Sequence[int], error: BaseException) -> None:
        raise error


class Tokens:
    """Sample i is a text that only i has."""

    seq_length, vocabulary = 16, 64

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index + 1)
        text = torch.randint(self.vocabulary, (self.seq_length + 1,), generator=generator)
        mask = torch.ones(self.seq_length)
        mask[: index % 5] = 0.0  # unlike numbers of tokens
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask}


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """As upstream's pretrain_gpt.py: the sum of the losses, the number of tokens, and both for the log."""
    positions = torch.arange(Tokens.seq_length).unsqueeze(0)
    batch = {name: part(tensor) for name, tensor in {**next(iterator), "positions": positions}.items()}
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])

    def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = torch.sum(output.float().view(-1) * batch["loss_mask"].view(-1))
        tokens = batch["loss_mask"].sum().to(torch.int)
        return total, tokens, {"lm loss": torch.cat([total.detach().reshape(1), tokens.float().reshape(1)])}

    return output, loss


class Training:
    """A model, its optimizer and its data on one rank."""

    def __init__(self, layout: Layout, *, overlap: bool = False) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            TorchFullyShardedDataParallel,
            TorchFullyShardedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import Float16Module
        from megatron.training.training import wrap_model_chunks_with_ddp

        from megatron_recover.megatron.data.loaders import MicrobatchCursor, MicrobatchIterator

        self.layout = layout
        dtype = torch.bfloat16 if layout.bf16 else torch.float32
        torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
        model_parallel_cuda_manual_seed(1234)
        moe = (
            {}
            if layout.num_experts is None
            else {"moe_router_topk": 2, "moe_aux_loss_coeff": 0.1, "moe_ffn_hidden_size": 32, "add_bias_linear": False,
                  "moe_router_dtype": "fp32",  # DeepEP's kernels take no other weights
                  **dispatcher(layout.dispatcher)}
        )  # fmt: skip
        config = TransformerConfig(
            num_layers=2 * layout.pp if layout.vpp else 2, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True,
            hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp, virtual_pipeline_model_parallel_size=layout.vpp, pipeline_dtype=dtype,
            context_parallel_size=layout.cp,
            params_dtype=dtype, bf16=layout.bf16, calculate_per_token_loss=layout.per_token, num_moe_experts=layout.num_experts,
            expert_model_parallel_size=layout.ep, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
            persist_layer_norm=False, bias_dropout_fusion=False, overlap_p2p_comm=layout.vpp is not None,
            batch_p2p_comm=layout.vpp is None, deallocate_pipeline_outputs=layout.vpp is None,
            transformer_impl="local",
            **({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
               if layout.recompute else {}),
            **moe,
        )  # fmt: skip
        config.timers = None
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = None
        spec = get_gpt_layer_local_spec(num_experts=layout.num_experts)
        if layout.cp > 1:
            spec.submodules.self_attention.submodules.core_attention = SplitAttention
        modules = []
        for chunk in range(layout.vpp or 1):
            vp_stage = chunk if layout.vpp else None
            module = GPTModel(
                config, spec, Tokens.vocabulary, Tokens.seq_length, vp_stage=vp_stage,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            )  # fmt: skip
            module.model_type = 1
            modules.append(Float16Module(config, module) if layout.bf16 else module)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=layout.distributed_optimizer, overlap_grad_reduce=overlap
        )
        if layout.fsdp2:
            ddp_config = TorchFullyShardedDataParallelConfig()
        self.config = config
        self.chunks = wrap_model_chunks_with_ddp(
            modules, config, ddp_config, DP=TorchFullyShardedDataParallel if layout.fsdp2 else DistributedDataParallel
        )
        for chunk in self.chunks:
            chunk.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=LEARNING_RATE, bf16=layout.bf16, params_dtype=dtype, clip_grad=0.5,
                            use_distributed_optimizer=layout.distributed_optimizer),
            self.chunks,
        )  # fmt: skip
        self.cursor = MicrobatchCursor()
        self.iterators = [
            MicrobatchIterator(
                Tokens(), self.cursor, consumed_samples=0, micro_batch_size=1,
                lane=parallel_state.get_data_parallel_rank(), num_lanes=parallel_state.get_data_parallel_world_size(),
            )
            for _ in self.chunks
        ]  # fmt: skip

    def step(self, run: Callable[..., Any]) -> dict[str, Any]:
        """Upstream's train step around `run`, which stands for its forward-backward function."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = run(
            forward_step_func=forward_step, data_iterator=self.iterators, model=self.chunks,
            num_microbatches=self.layout.num_microbatches, seq_length=Tokens.seq_length, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        gradients = [whole(getattr(parameter, "main_grad", parameter.grad)).clone() for parameter in parameters]
        success, norm, _ = self.optimizer.step()
        return {
            "gradients": gradients,
            "losses": [report["lm loss"].clone() for report in losses],
            "parameters": [whole(parameter.detach()).clone() for parameter in parameters],
            "norm": float(norm),
            "success": success,
        }


def whole(tensor: Any) -> Tensor:
    """A tensor that FSDP2 has sharded, gathered over the lanes; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def dispatcher(name: str) -> dict[str, str]:
    """The settings of a dispatcher; kernels that need a GPU get their substitute."""
    if name not in token_exchange.BACKENDS:
        return {"moe_token_dispatcher_type": name}
    token_exchange.install()
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": name}


def upstream_alone(layout: Layout) -> list[dict[str, Any]]:
    """Two steps of upstream's own, on all microbatches in order."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    training = Training(layout)
    steps = []
    for _ in range(2):
        training.cursor.begin(training.iterators, layout.num_microbatches)
        training.iterators = [_InOrder(iterator, training.cursor) for iterator in training.iterators]
        steps.append(training.step(get_forward_backward_func()))
        training.iterators = [iterator.iterable for iterator in training.iterators]
    return steps


class _InOrder:
    """A data iterator that moves on by itself, as upstream's do."""

    def __init__(self, iterable: Any, cursor: Any) -> None:
        self.iterable, self._cursor, self._next = iterable, cursor, 0

    def __next__(self) -> Any:
        self._cursor.microbatch, self._next = self._next, self._next + 1
        return next(self.iterable)


def recovered(layout: Layout, rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Two steps through the commit loop; each by these rounds."""
    from megatron.core import parallel_state

    from megatron_recover.fsdp2.gradients import scale_gradients
    from megatron_recover.fsdp2.parameter_gradient import Sharding
    from megatron_recover.megatron.commit import CommitLoop
    from megatron_recover.megatron.gradient_buffers import gradients_of
    from megatron_recover.megatron.seams import seams

    ours = [seam for seam in seams.load() if "CommitLoop" in seam.replacement or "chedule" in seam.replacement]
    ours += [seam for seam in seams.load() if seam.name in ("finish_grad_sync", "scale_gradients", "fully_shard")]
    installation = seams.Installation(ours)
    sharding = Sharding(installation.originals["fully_shard"], in_fp32=layout.sums_in_fp32)
    installation.install({"fully_shard": sharding.fully_shard})
    training = Training(layout, overlap=layout.overlap)
    driver = ScriptedDriver(rounds)
    iteration = iter(range(1, 100))
    loop = CommitLoop(
        driver, RecoverConfig(bucket_elements=3000, determinism=layout.determinism, rebalance="off"), installation.originals,
        cursor=training.cursor, seed=lambda *_: None, iteration=lambda: next(iteration), alike=dict,
        gradients=gradients_of(
            Namespace(
                use_torch_fsdp2=layout.fsdp2, overlap_grad_reduce=layout.overlap, check_for_nan_in_loss_and_grad=True,
                bf16=layout.bf16, accumulate_allreduce_grads_in_fp32=layout.sums_in_fp32,
            )  # fmt: skip
        ),
    )  # fmt: skip
    installation.install({**loop.replacements(), "scale_gradients": scale_gradients})
    try:
        steps = []
        for _ in range(2):
            steps.append(training.step(loop.run))
            mine = {bucket for bucket, ranks in enumerate(driver.shape.bucket_ranks) if driver.rank in ranks}
            assert mine == driver.held.keys(), "not all buckets of this rank were held"
    finally:
        installation.remove()
    steps[0]["shape"] = driver.shape
    assert parallel_state.get_data_parallel_world_size() == layout.lanes
    return steps


def run(layout: Layout, *jobs: tuple[Callable[..., Any], tuple[Any, ...]]) -> list[list[Any]]:
    """Do the jobs one after the other in each of the layout's ranks. Returns per job what each rank returned.

    Raises AssertionError with a rank's traceback, or when a rank does not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            CONTEXT.Process(target=_rank, args=(layout, rank, folder, jobs), daemon=True) for rank in range(layout.num_ranks)
        ]
        for process in ranks:
            process.start()
        results = [pickle.loads(path.read_bytes()) for path in results_of(ranks, Path(folder), DEADLINE_S)]
    return [[result[index] for result in results] for index in range(len(jobs))]


def _rank(layout: Layout, rank: int, folder: str, jobs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    try:
        from megatron.core import parallel_state

        from megatron_recover.megatron.cpu import enable_cpu

        logging.getLogger("megatron").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        if not torch.cuda.is_available():
            enable_cpu()
        store = dist.FileStore(f"{folder}/store", layout.num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.num_ranks)
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, layout.vpp, context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep
        )
        results = [job(layout, *arguments) for job, arguments in jobs]
        Path(f"{folder}/result.{rank}").write_bytes(pickle.dumps(results))
        dist.barrier()
    except BaseException:
        Path(f"{folder}/error.{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
