"""The memory that `plan` computes against what real ranks allocate, and its splits against models that upstream builds."""

from __future__ import annotations

import itertools
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_recover.config import RecoverConfig
from megatron_recover.megatron.gradient_buffers import Collector
from megatron_recover.megatron.layout import measure, memory, sizes
from megatron_recover.trainer.regions import Region
from tests.megatron.processes import Layout, ScriptedDriver, Tokens, Training, run

pytestmark = pytest.mark.timeout(180)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its address."""
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each.numel()}


def allocated(layout: Layout) -> dict[str, int]:
    """Train a step without gradient, and return what this rank has allocated, by part."""
    from megatron.core import parallel_state

    from megatron_recover.megatron.gradient_buffers import GradientBuffers
    from megatron_recover.trainer.reduction import Reduction

    training = Training(layout)
    reduction = Reduction(
        GradientBuffers(training.chunks, 3000), stage=parallel_state.get_pipeline_model_parallel_rank(),
        is_last_stage=parallel_state.is_pipeline_last_stage(), driver=ScriptedDriver(()),
        config=RecoverConfig(bucket_elements=3000, determinism=layout.determinism),
    )  # fmt: skip
    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.step()
    buffers = [buffer for chunk in training.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    weights = storages(parameter for chunk in training.chunks for parameter in chunk.parameters())
    gradient = storages([buffer.grad_data for buffer in buffers] + list(reduction._accumulators.values()))
    for each in reduction._gradient_sums:
        each.allocate()  # as a reduction does
    result = storages(each.result for each in reduction._gradient_sums)
    optimizers = [each.optimizer for each in getattr(training.optimizer, "chained_optimizers", [training.optimizer])]
    main = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    moments = [
        each for optimizer in optimizers for state in optimizer.state.values() for each in state.values() if each.numel() > 1
    ]
    optimizer = {place: number for place, number in storages(main + moments).items() if place not in weights}
    parts = {"weights": weights, "gradient": gradient, "result": result, "optimizer": optimizer}
    return {name: sum(found.values()) for name, found in parts.items()}


def whole_model(layout: Layout) -> sizes.Model:
    """Describe the model that a single rank builds for the layout."""
    training = Training(layout)
    first, layers, last = measure.elements_of(training.chunks[0].module, Tokens.vocabulary)
    return sizes.Model(
        first=first, layers=layers, last=last, is_tied=False, vocabulary=Tokens.vocabulary, num_heads=2, num_query_groups=2,
        num_experts=layout.num_experts or 0,
    )  # fmt: skip


LAYOUTS = {
    "fp32": Layout(),
    "tp2-bf16": Layout(tp=2, bf16=True),
    "pp2": Layout(pp=2),
    "lanes2-bf16-exact": Layout(lanes=2, bf16=True, determinism="exact"),
    "zero1": Layout(lanes=2, distributed_optimizer=True),
    "zero1-bf16-tp2": Layout(lanes=2, tp=2, distributed_optimizer=True, bf16=True),
    "experts": Layout(lanes=2, ep=2, num_experts=2, distributed_optimizer=True, bf16=True),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_parts_are_those_that_ranks_allocate(layout: Layout) -> None:
    [[model]] = run(Layout(num_experts=layout.num_experts), (whole_model, ()))
    [ranks] = run(layout, (allocated, ()))
    numerics = sizes.Numerics(
        weight=2 if layout.bf16 else 4, gradient=4, optimizer=12 if layout.bf16 else 8, is_sharded=layout.distributed_optimizer,
        is_exact=layout.determinism == "exact", bucket_elements=3000,
    )  # fmt: skip
    described = sizes.Layout(tp=layout.tp, pp=layout.pp, lanes=layout.lanes, ep=layout.ep, expert_tp=layout.tp)
    flags = sizes.Flags()
    stages = sizes.layers_of_stages(len(model.layers), layout.pp, flags)
    assert stages is not None
    for rank, found in enumerate(ranks):
        held = sizes.on_stage(model, described, rank // (layout.num_ranks // layout.pp), stages)
        expected = memory.of_rank(held, numerics, described)
        assert found == {name: pytest.approx(getattr(expected, name), rel=0.05) for name in found}, rank


SCRIPT = "scripts/pretrain_gpt.py"
COMMON = (
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 64 --train-iters 2 --lr 1e-4 "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --mock-data --bf16 --hidden-size 64 --num-attention-heads 8 "
)
MODELS = {
    "llama": "--num-layers 4 --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --ffn-hidden-size 192",
    "tied": "--num-layers 4 --position-embedding-type learned_absolute",
    "mixtral": "--num-layers 4 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --sequence-parallel",
}


def counted(_: Layout, flags: str) -> tuple[sizes.Sizes, list[tuple[sizes.Layout, int, sizes.OnRank]]]:
    """Return the sizes that `plan` reads, and what upstream really builds on the stages of several layouts."""
    import runpy

    from megatron.core import parallel_state

    import megatron_recover.megatron as recover
    from megatron_recover.megatron.launch import parsing

    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()
    asked, words = measure.layout_flags(flags.split())
    sys.argv = [SCRIPT, *words]
    found: list[Any] = []

    def measured(configure: Any, *_: Any, args_defaults: dict[str, Any], **others: Any) -> None:
        args = parsing.parse(None, args_defaults, {})
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        read = measure.measured(args, asked, measure.build(configure(args), None))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        real = [built(configure, args, read, *sizes_of) for sizes_of in itertools.product((1, 2, 4), (1, 2), (1, 2))]
        found.append((read, [stage for stages in real for stage in stages]))

    recover.pretrain = measured
    runpy.run_path(SCRIPT, run_name="__main__")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # in which `run` ends
    return found[0]


def built(
    configure: Any, args: Namespace, read: sizes.Sizes, tp: int, pp: int, ep: int
) -> list[tuple[sizes.Layout, int, sizes.OnRank]]:
    """Build every stage of a layout on the meta device, in a world that torch only pretends to have."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if ep > max(1, read.model.num_experts):
        return []
    layout = sizes.Layout(tp=tp, pp=pp, ep=ep, expert_tp=tp, lanes=ep)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size = tp, pp, ep
    args.expert_tensor_parallel_size = args.tensor_parallel_num_weight_shards = tp
    args.expert_tensor_parallel_num_weight_shards, args.padded_vocab_size = tp, sizes.padded(read.model, tp)
    stages = []
    for stage in range(pp):
        dist.init_process_group("fake", store=FakeStore(), rank=stage * tp * ep, world_size=layout.num_ranks)
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, create_gloo_process_groups=False)
        config = configure(args).model
        with torch.device("meta"):
            model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
        stages.append((layout, stage, on_rank(model)))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return stages


def on_rank(model: Any) -> sizes.OnRank:
    """Count the elements that a rank holds, from the model that upstream builds for it."""
    parameters = {name: each.numel() for name, each in model.named_parameters()}
    experts = sum(number for name, number in parameters.items() if ".experts." in name)
    tables = {name: number for name, number in parameters.items() if "word_embeddings" in name or "output_layer" in name}
    largest = max(number for name, number in parameters.items() if name not in tables)
    groups: dict[str, int] = {}
    for name, number in parameters.items():
        if ".experts." not in name:
            layer = re.search(r"layers\.\d+\.", name)
            group = layer[0] if layer else "embedding" if name.startswith("embedding.") else "rest"
            groups[group] = groups.get(group, 0) + number
    return sizes.OnRank(
        sum(parameters.values()) - experts, experts, tuple(tables.values()), largest, tuple(groups.values())
    )  # fmt: skip


PARTS = {"llama": (32, 0), "tied": (64, 0), "mixtral": (64, 96)}
"""The greatest common divisors of what tensor parallelism splits, dense and in experts."""


@pytest.mark.parametrize("model", MODELS)
def test_the_splits_are_those_that_upstream_builds(model: str) -> None:
    [[(read, real)]] = run(Layout(), (counted, (COMMON + MODELS[model],)))
    assert (read.model.tensor_parts, read.model.expert_parts) == PARTS[model]
    assert len(real) >= 9
    for layout, stage, found in real:
        stages = sizes.layers_of_stages(4, layout.pp, read.flags)
        assert stages is not None
        assert sizes.on_stage(read.model, layout, stage, stages) == found, (layout, stage)


def of_llama(num_layers: int, *, has_tables: bool) -> tuple[list[int], sizes.OnRank]:
    """Return the parameters of a stage of Llama-3-8B, a thousandth of each, in the order of upstream's buffer."""
    hidden, units, table = 4096, 14336, 128256 * 4096 // 1000
    layer = [4, hidden * 6144 // 1000, hidden * hidden // 1000, 4, hidden * 2 * units // 1000, hidden * units // 1000]
    parameters = layer * num_layers
    if has_tables:
        parameters = [table, *parameters, 4, table]
    held = sizes.OnRank(sum(parameters), 0, (table,) * (2 * has_tables), max(layer))
    return parameters[::-1], held  # upstream fills its buffer from the end


def redirected(parameters: list[int], lanes: int, bucket_elements: int, undecided: Callable[[int], Iterable[range]]) -> int:
    """Return the most elements that a real collector allocates, over some ranges of buckets that are undecided.

    `undecided(number of buckets)` yields the ranges.
    """
    local = torch.zeros(sum(parameters))
    group = SimpleNamespace(size=lambda: lanes, rank=lambda: 0)
    region = Region(local, chunk=0, group=group, scale=1.0, sharded=True, bucket_elements=bucket_elements)
    for number, bucket in enumerate(region.buckets):
        bucket.id = number
    ends = list(itertools.accumulate(parameters))
    places = [(end - size, end) for size, end in zip(parameters, ends, strict=True)]
    params = [nn.Parameter(torch.empty(0)) for _ in parameters]
    for param, place in zip(params, places, strict=True):
        param.main_grad = local[slice(*place)]  # type: ignore[attr-defined]
    most = 0
    for into in undecided(len(region.buckets)):
        collector = Collector({region: dict(zip(params, places, strict=True))})
        collector.collect_into(tuple(into))
        found = storages(param.main_grad for param in params)  # type: ignore[attr-defined]
        found.pop(local.data_ptr(), None)  # of parameters that are whole in an undecided bucket
        most = max(most, sum(found.values()) // local.itemsize)
        collector.collect_into(None)
    return most


def single_and_last(number: int) -> Iterable[range]:
    """Yield each bucket alone, and each number of last buckets."""
    return itertools.chain(
        (range(each, each + 1) for each in range(number)), (range(each, number) for each in range(1, number))
    )


@pytest.mark.parametrize(
    ("num_layers", "has_tables", "lanes"),
    [(32, True, 1), (32, True, 4), (32, True, 8), (8, False, 1), (8, False, 4)],
    ids=["whole-1", "whole-4", "whole-8", "middle-1", "middle-4"],
)
def test_the_bound_of_what_a_recovery_redirects_is_near_the_worst_case(num_layers: int, has_tables: bool, lanes: int) -> None:
    parameters, held = of_llama(num_layers, has_tables=has_tables)
    numerics = sizes.Numerics(weight=2, gradient=4, optimizer=12, is_sharded=True, bucket_elements=160_000)
    planned = memory.of_rank(held, numerics, sizes.Layout(lanes=lanes)).redirected // numerics.gradient
    found = redirected(parameters, lanes, numerics.bucket_elements, single_and_last)
    assert found <= planned <= 1.5 * found


@settings(max_examples=100, deadline=None)
@given(
    parameters=st.lists(st.integers(1, 60), min_size=1, max_size=12), num_tables=st.integers(0, 2),
    lanes=st.integers(1, 5), bucket_elements=st.integers(5, 60),
)  # fmt: skip
def test_no_recovery_redirects_more_than_was_planned(
    parameters: list[int], num_tables: int, lanes: int, bucket_elements: int
) -> None:
    def ranges(number: int) -> Iterable[range]:
        return itertools.starmap(range, itertools.combinations(range(number + 1), 2))

    tables, others = parameters[:num_tables], parameters[num_tables:]
    held = sizes.OnRank(sum(parameters), 0, tuple(tables), max(others, default=0))
    numerics = sizes.Numerics(weight=2, gradient=4, optimizer=12, bucket_elements=bucket_elements)
    planned = memory.of_rank(held, numerics, sizes.Layout(lanes=lanes)).redirected // numerics.gradient
    assert redirected(parameters, lanes, bucket_elements, ranges) <= planned


def test_flags_of_kernels_alone_are_taken_out_since_a_kernel_has_no_parameters() -> None:
    words = ["--transformer-impl", "local", "--apply-layernorm-1p", "--moe-permute-fusion", "--bf16"]
    assert measure.layout_flags(words)[1] == ["--bf16"]


def test_upstream_sees_no_precision_aware_optimizer_which_it_would_look_for_in_transformer_engine() -> None:
    aware = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16, "main_grads_dtype": torch.bfloat16}
    args = Namespace(**{**ARGS, **aware})
    shown = measure.without_precision_aware(args)
    types = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    assert not shown.use_precision_aware_optimizer and {getattr(shown, name) for name in types} == {torch.float32}
    assert args.use_precision_aware_optimizer and args.main_params_dtype == torch.float16


def test_the_flags_of_the_layout_are_taken_out_of_the_command_line() -> None:
    asked, others = measure.layout_flags(
        [
            "--lr",
            "1",
            "--tensor-model-parallel-size",
            "2",
            "--split",
            "9,1",
            "--sequence-parallel",
            "--context-parallel-size=2",
            "--bf16",
        ]
    )
    assert (asked.context_parallel_size, asked.sequence_parallel) == (2, True)
    assert others == ["--lr", "1", "--split", "9,1", "--bf16"]
    with pytest.raises(ValueError, match="--decoder-first-pipeline-num-layers suits one pipeline-parallel size"):
        measure.layout_flags(["--decoder-first-pipeline-num-layers", "3"])
    with pytest.raises(ValueError, match="--tensor-parallel-num-weight-shards suits one tensor-parallel size"):
        measure.layout_flags(["--tensor-parallel-num-weight-shards", "8"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--context-parallel-size 0", "--context-parallel-size is 0; it must be at least 1"),
        ("--expert-tensor-parallel-size -1", "--expert-tensor-parallel-size is -1; it must be at least 1"),
        ("--num-virtual-stages-per-pipeline-rank 0", "--num-virtual-stages-per-pipeline-rank is 0; it must be at least 1"),
        ("--context-parallel-size two", "--context-parallel-size: invalid int value: 'two'"),
        ("--pipeline-model-parallel-size", "--pipeline-model-parallel-size: expected one argument"),
        ("--sequence-parallel=1", "--sequence-parallel: ignored explicit argument '1'"),
    ],
)
def test_a_wrong_size_is_refused_in_one_line(words: str, expected: str) -> None:
    with pytest.raises(ValueError) as raised:
        measure.layout_flags(words.split())
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 18 * 64 + 4 * 192),
        ({"swiglu": True}, 18 * 64 + 6 * 192),
        ({"num_experts": 8, "moe_router_topk": 2}, 18 * 64 + 2 * 4 * 192 + 4 * 64 * 2),
        (
            {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 96, "swiglu": True},
            18 * 64 + 2 * 6 * 96 + 4 * 64 * 2,
        ),
    ],
)
def test_gated_units_and_experts_count_in_the_activations_of_a_layer(changes: dict[str, Any], expected: int) -> None:
    args = Namespace(**{
        "seq_length": 32, "micro_batch_size": 1, "hidden_size": 64, "ffn_hidden_size": 192, "num_layers": 2, "swiglu": False,
        "quick_geglu": False, "num_experts": None, "moe_router_topk": 2, "moe_ffn_hidden_size": None,
        "recompute_granularity": "selective", **changes,
    })  # fmt: skip
    layer = sizes.Elements(split=1)
    model = sizes.Model(
        first=layer, layers=(layer, layer), last=layer, vocabulary=64, num_heads=4, num_query_groups=4,
        num_experts=args.num_experts or 0,
    )  # fmt: skip
    flags = sizes.Flags(sequence_parallel=True)
    found = {(each.tp, each.pp): each.bytes for each in measure.activations_of(args, model, flags)}
    beside = 32 * (8 * 2 + 64 * 2)  # of the embedding, for two stages
    assert found[2, 2] == (32 * expected * 2 + beside) // 2
    # Where sequences are not split, upstream counts 10 + 24 / TP bytes for each of h, and 5 % for more.
    assert found[1, 2] == int(1.05 * (32 * expected * 2 + beside))
    unsplit = {(each.tp, each.pp): each.bytes for each in measure.activations_of(args, model, sizes.Flags())}
    if not args.num_experts:
        assert unsplit[2, 2] == pytest.approx(1.05 * (32 * expected * 2 * 22 / 34 + beside), abs=2)
    split = {(each.tp, each.pp): each.bytes for each in measure.split_activations_of(args, model, sizes.Flags())}
    assert split == found
    assert not [*measure.split_activations_of(args, model, flags)]
    args.recompute_granularity = "full"
    assert not [*measure.split_activations_of(args, model, sizes.Flags())]


def test_activations_are_estimated_for_each_tensor_parallel_size_that_the_heads_allow() -> None:
    args = Namespace(
        seq_length=32, micro_batch_size=1, hidden_size=96, ffn_hidden_size=384, num_layers=1, swiglu=False, quick_geglu=False,
        num_experts=None, recompute_granularity=None,
    )  # fmt: skip
    layer = sizes.Elements(split=1)
    model = sizes.Model(first=layer, layers=(layer,), last=layer, vocabulary=64, num_heads=48, num_query_groups=48)
    assert [each.tp for each in measure.activations_of(args, model, sizes.Flags())] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]


ARGS = {
    "multi_latent_attention": False, "hybrid_layer_pattern": None, "use_torch_fsdp2": False,
    "optimizer": "adam", "optimizer_cpu_offload": False, "params_dtype": torch.bfloat16, "bf16": True, "sgd_momentum": 0.9,
    "accumulate_allreduce_grads_in_fp32": True, "use_precision_aware_optimizer": False,
    "main_params_dtype": torch.float32, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float32,
    "use_distributed_optimizer": True, "overlap_grad_reduce": False,
    **{f"recover_{name}": getattr(RecoverConfig(), name) for name in RecoverConfig.__struct_fields__},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 4, 12, 0)),
        ({"params_dtype": torch.float32, "bf16": False}, (4, 4, 8, 0)),
        ({"accumulate_allreduce_grads_in_fp32": False}, (2, 2, 12, 4)),
        ({"optimizer": "sgd"}, (2, 4, 8, 0)),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, (2, 4, 4, 0)),
        ({"use_precision_aware_optimizer": True}, (2, 4, 2 + 2 + 4, 0)),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False}, (2, 4, 4 + 2 + 4, 0)),
    ],
)
def test_bytes_of_an_element_follow_from_the_arguments(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    found = measure.numerics_of(SimpleNamespace(**{**ARGS, **changes}), measure.layout_flags([])[0])
    assert (found.weight, found.gradient, found.optimizer, found.step_copy) == expected
    assert found.fsdp2 is None


@pytest.mark.parametrize(
    ("words", "changes", "expected"),
    [
        ("", {}, sizes.Fsdp2()),
        ("--transformer-impl local", {}, sizes.Fsdp2(keeps_output=True)),
        ("--transformer-impl transformer_engine --use-cpu-initialization", {}, sizes.Fsdp2(built_on_host=True)),
        ("", {"torch_fsdp2_reshard_after_forward": False}, sizes.Fsdp2(reshards=False)),
    ],
)
def test_with_fsdp2_the_flags_decide_what_is_whole(words: str, changes: dict[str, Any], expected: sizes.Fsdp2) -> None:
    given = {"use_torch_fsdp2": True, "use_distributed_optimizer": False, "torch_fsdp2_reshard_after_forward": True, **changes}
    asked, others = measure.layout_flags(words.split())
    assert others == []
    for dtype, bytes_of in ((torch.bfloat16, (2, 4, 12, 0)), (torch.float32, (4, 4, 8, 0))):
        args = SimpleNamespace(**{**ARGS, **given, "params_dtype": dtype, "bf16": dtype == torch.bfloat16})
        found = measure.numerics_of(args, asked)
        assert (found.weight, found.gradient, found.optimizer, found.step_copy) == bytes_of
        assert found.fsdp2 == expected and found.is_sharded


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "muon"),
        ("optimizer_cpu_offload", True),
        ("multi_latent_attention", True),
        ("hybrid_layer_pattern", "M*"),
    ],
)
def test_what_cannot_be_known_is_refused(name: str, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    asked, _ = measure.layout_flags([])
    assert measure.unplannable(SimpleNamespace(**ARGS), asked) == []
    [line] = measure.unplannable(SimpleNamespace(**{**ARGS, name: value}), asked)
    assert line.startswith(flag)


def test_fsdp2_needs_the_flag_that_a_gpu_needs() -> None:
    args = SimpleNamespace(**{**ARGS, "use_torch_fsdp2": True})
    [line] = measure.unplannable(args, measure.layout_flags([])[0])
    assert line.startswith("--use-torch-fsdp2 is not supported with") and line.endswith("--no-gradient-accumulation-fusion")
    assert measure.unplannable(args, measure.layout_flags(["--no-gradient-accumulation-fusion"])[0]) == []
