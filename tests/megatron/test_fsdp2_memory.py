"""The memory that `plan` computes for FSDP2 against the tensors that real ranks hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import torch_fully_sharded_data_parallel as upstreams_fsdp2
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_recover.config import RecoverConfig
from megatron_recover.fsdp2 import shards
from megatron_recover.fsdp2.gradients import ShardedGradients
from megatron_recover.fsdp2.parameter_gradient import sharding_in_fp32
from megatron_recover.megatron.layout import memory, sizes
from tests.megatron.processes import Layout, ScriptedDriver, Training, forward_step, run
from tests.megatron.test_layout_memory import storages, whole_model

pytestmark = pytest.mark.timeout(180)

BUCKET = 1500
LAYOUTS = {
    "fp32": Layout(fsdp2=True, lanes=2),
    "lanes3": Layout(fsdp2=True, lanes=3),  # divides no parameter of the model
    "lanes1": Layout(fsdp2=True),
    "tp2-recompute": Layout(fsdp2=True, tp=2, lanes=2, recompute=True),
    "bf16-lanes3": Layout(fsdp2=True, lanes=3, bf16=True),
    "bf16-exact": Layout(fsdp2=True, lanes=2, bf16=True, determinism="exact"),
    "in-bf16": Layout(fsdp2=True, lanes=2, bf16=True, reduce_in_bf16=True),
}


class Gathered(TorchDispatchMode):
    """Notes the most bytes of whole parameters, their gradients and FSDP2's buffers, after each operation of torch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, torch.distributed.tensor.DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        held = storages(each for each in self._held() if each is not None)
        self.most = max(self.most, sum(held.values()))
        return result

    def _held(self) -> Iterator[Tensor | None]:
        for group in itertools.chain.from_iterable(state._fsdp_param_groups for state in self._states):
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs
                yield getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if group._all_gather_result is not None:
                yield group._all_gather_result.all_gather_output
        context = self._states[0]._comm_ctx
        if getattr(context, "all_gather_state", None) is not None:
            yield context.all_gather_state.all_gather_result.all_gather_output
        for state in getattr(context, "reduce_scatter_states", ()):
            yield state.reduce_scatter_input


def own_output_layer() -> None:
    """Have FSDP2 wrap the output layer, as with Megatron's layers of Transformer Engine, by Megatron's own means."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import gpt_model

    class Output(tensor_parallel.ColumnParallelLinear):
        """Unlike its base, a class of the output layer alone."""

    gpt_model.tensor_parallel = SimpleNamespace(**{**vars(tensor_parallel), "ColumnParallelLinear": Output})
    gpt_model.GPTModel._fsdp_modules = [Output]


def held(layout: Layout, keeps_output: bool, reshards: bool) -> dict[str, int]:
    """Compute two microbatches and a step, and return the bytes that this rank has held, by part."""
    from megatron_recover.trainer.reduction import Reduction

    if not keeps_output:
        own_output_layer()
    if layout.sums_in_fp32:
        upstreams_fsdp2.fully_shard = sharding_in_fp32(upstreams_fsdp2.fully_shard)
    training = Training(layout)
    [chunk] = training.chunks
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(reshards)
    gradients = ShardedGradients(training.chunks, BUCKET, in_fp32=layout.sums_in_fp32)
    reduction = Reduction(
        gradients, stage=0, is_last_stage=True, driver=ScriptedDriver(()),
        config=RecoverConfig(bucket_elements=BUCKET, determinism=layout.determinism),
    )  # fmt: skip
    parameters = [parameter for _, parameter in shards.parameters(chunk)]
    weights = storages(shards.local(each) for each in parameters)
    local = storages([region.local for region in gradients.regions] + list(reduction._accumulators.values()))
    for region in gradients.regions:
        region.begin()

    def compute() -> None:
        training.cursor.begin(training.iterators, layout.num_microbatches)
        training.cursor.microbatch = 0
        output, loss = forward_step(training.iterators[0], chunk)
        loss(output)[0].backward()

    with Gathered(chunk) as gathered:
        compute()
        compute()
    gradients.collect_into((gradients.regions[0].buckets[0].id,))
    compute()
    made = storages(shards.local(each.grad) for each in parameters if each.grad is not None)
    redirected = {place: number for place, number in made.items() if place not in {*local} and not _is_in(place, gradients)}
    gradients.collect_into(None)
    for each in reduction._gradient_sums:
        each.allocate()  # as a reduction does
    result = storages(each.result for each in reduction._gradient_sums)
    training.optimizer.step()
    optimizers = [each.optimizer for each in getattr(training.optimizer, "chained_optimizers", [training.optimizer])]
    tensors = [
        shards.local(each)
        for optimizer in optimizers
        for each in [
            *(each for group in optimizer.param_groups for each in group["params"]),
            *(each for state in optimizer.state.values() for each in state.values() if each.numel() > 1),
        ]
    ]
    optimizer = {place: number for place, number in storages(tensors).items() if place not in weights}
    parts = {"weights": weights, "gradient": local, "result": result, "optimizer": optimizer, "redirected": redirected}
    return {"gathered": gathered.most, **{name: sum(found.values()) for name, found in parts.items()}}


def _is_in(place: int, gradients: ShardedGradients) -> bool:
    """Whether an address is one of a region's local gradient."""
    return any(region.local.data_ptr() <= place < region.local.data_ptr() + region.local.nbytes for region in gradients.regions)


@pytest.fixture(scope="module")
def model() -> sizes.Model:
    [[found]] = run(Layout(), (whole_model, ()))
    return found  # type: ignore[no-any-return]


WRAPPED = [(True, True), (False, True), (False, False)]
"""Whether FSDP2's root module has the output layer, and whether parameters are sharded again after a forward."""


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_parts_are_those_that_ranks_of_fsdp2_hold(layout: Layout, model: sizes.Model) -> None:
    described = sizes.Layout(tp=layout.tp, lanes=layout.lanes, expert_tp=layout.tp)
    on_rank = sizes.on_stage(model, described, 0, [range(2)])
    ranks = run(layout, *((held, each) for each in WRAPPED))
    for (keeps_output, reshards), [found, *_] in zip(WRAPPED, ranks, strict=True):
        numerics = sizes.Numerics(
            weight=2 if layout.bf16 else 4, gradient=2 if layout.reduce_in_bf16 else 4, optimizer=12 if layout.bf16 else 8,
            is_sharded=True, fsdp2=sizes.Fsdp2(reshards=reshards, keeps_output=keeps_output),
            is_exact=layout.determinism == "exact", bucket_elements=BUCKET,
        )  # fmt: skip
        expected = memory.of_rank(on_rank, numerics, described)
        redirected = found.pop("redirected")
        print(found, expected)
        assert found == {name: pytest.approx(getattr(expected, name), rel=0.03) for name in found}
        if layout.determinism == "fast":
            assert 0.9 * expected.redirected <= redirected <= 1.03 * expected.redirected
