"""Reads the sizes of a model from the user's own training script, without memory for the model.

`python measure.py FILE SCRIPT ARGUMENT...` runs SCRIPT up to its call of `pretrain`, parses the
arguments with Megatron's parser, builds the whole model on torch's meta device, and writes its
`Sizes` to FILE as JSON. The flags that give a layout are removed before, since all layouts follow
from the whole model. Bad arguments end the process with exit code 2, as in the dry run.

The process needs no GPU and must see none: Megatron's local layers, which a CPU has, have the same
parameters as those of Transformer Engine.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
import torch

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.megatron import cpu
from megatron_recover.megatron.launch import parsing, script
from megatron_recover.megatron.launch.arguments import gpu_refusals, recover_config, refusals
from megatron_recover.megatron.launch.preflight import FLAGS
from megatron_recover.megatron.layout import choice
from megatron_recover.megatron.layout.sizes import Activations, Elements, Flags, Fsdp2, Model, Numerics, Sizes, padded

_LAYOUT: Final = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--expert-model-parallel-size", "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip
_EXPERT_TENSOR: Final = "--expert-tensor-parallel-size"
_OF_ONE_SIZE: Final = {
    "--pipeline-model-parallel-layout": "pipeline-parallel",
    "--decoder-first-pipeline-num-layers": "pipeline-parallel",
    "--decoder-last-pipeline-num-layers": "pipeline-parallel",
    "--tensor-parallel-num-weight-shards": "tensor-parallel",
    "--expert-tensor-parallel-num-weight-shards": "expert tensor-parallel",
}
"""Flags that suit one size only, with the name of that size."""
_KERNELS: Final = ("--apply-layernorm-1p", "--moe-permute-fusion", "--moe-router-fusion")
"""Flags that choose a kernel of Transformer Engine."""
_SET_ON_CPU: Final = ("--use-cpu-initialization", "--no-gradient-accumulation-fusion")
"""Flags that are set by themselves on a CPU; on a GPU the user's word counts."""


def layout_flags(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Return the flags of `argv` for layout, kernels and what a CPU decides, and all other words.

    Raises ValueError for a bad value, and for a flag that suits one size only.
    """
    parser = ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for flag in (*_LAYOUT, *_OF_ONE_SIZE):
        parser.add_argument(flag, **FLAGS[flag])
    parser.add_argument(_EXPERT_TENSOR, type=int)
    parser.add_argument("--sequence-parallel", action="store_true")
    # Kernels change no size of the model, and those of Transformer Engine need not be there.
    parser.add_argument("--transformer-impl", default=SUPPRESS)
    for flag in _KERNELS:
        parser.add_argument(flag, action="store_true", default=SUPPRESS)
    for flag in _SET_ON_CPU:
        parser.add_argument(flag, action="store_true")
    try:
        found, others = parser.parse_known_args(argv)
    except ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}") from error
    sizes = {flag: getattr(found, flag[2:].replace("-", "_")) for flag in (*_LAYOUT, _EXPERT_TENSOR)}
    small = [f"{flag} is {size}; it must be at least 1" for flag, size in sizes.items() if type(size) is int and size < 1]
    if small:
        raise ValueError("\n".join(small))
    if given := [flag for flag in _OF_ONE_SIZE if getattr(found, flag[2:].replace("-", "_")) is not None]:
        raise ValueError(
            "\n".join(f"{flag} suits one {_OF_ONE_SIZE[flag]} size, and all sizes are compared; leave it out" for flag in given)
        )
    return found, others


def elements_of(model: Any, vocabulary: int) -> tuple[Elements, tuple[Elements, ...], Elements]:
    """Return the elements of the first stage's own parameters, of each layer, and of the last's.

    `model` is the whole model, built for one rank. Its padded vocabulary has `vocabulary` entries.
    """
    first, last = Elements(), Elements()
    layers: dict[int, Elements] = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        elements = _elements(name, parameter, None if layer else vocabulary)
        if layer:
            number = int(layer[1])
            layers[number] = layers.get(number, Elements()) + elements
        elif name.startswith("embedding."):
            first += elements
        else:
            last += elements
    return first, tuple(layers[number] for number in sorted(layers)), last


def _elements(name: str, parameter: Any, vocabulary: int | None) -> Elements:
    number, is_split = parameter.numel(), getattr(parameter, "tensor_model_parallel", False)
    if ".experts." in name:
        return Elements(expert_split=number, largest_expert=number) if is_split else Elements(expert_whole=number)
    if is_split and vocabulary is not None and parameter.shape[0] == vocabulary:
        return Elements(rows=number // vocabulary)
    return Elements(split=number, largest_split=number) if is_split else Elements(whole=number, largest_whole=number)


def parts_of(model: Any, vocabulary: int) -> tuple[int, int]:
    """Return `Model.tensor_parts` and `Model.expert_parts` of a whole model, built for one rank."""
    parts, of_experts = 0, 0
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            continue
        length = parameter.shape[parameter.partition_dim]
        if ".experts." in name:
            of_experts = math.gcd(of_experts, length)
        elif length != vocabulary:  # which is padded to a multiple of each size
            parts = math.gcd(parts, length)
    return parts, of_experts


def unplannable(args: Namespace, asked: Namespace) -> list[str]:
    """Return a line for each argument that cannot be planned with: the reason and the remedy.

    `asked` has the flags that `layout_flags` takes out of the command line.
    """
    found = []
    if args.use_torch_fsdp2 and not asked.no_gradient_accumulation_fusion:
        found.append(
            "--use-torch-fsdp2 is not supported with fused gradient accumulation, Megatron's default on a GPU; "
            "add --no-gradient-accumulation-fusion"
        )
    if args.optimizer not in ("adam", "sgd"):
        found.append(f"--optimizer {args.optimizer} has state whose memory is not known; plan with adam or sgd")
    if args.optimizer_cpu_offload:
        found.append("--optimizer-cpu-offload leaves an unknown part on the GPU; leave it out to plan")
    if args.multi_latent_attention:
        found.append("--multi-latent-attention needs layers of Transformer Engine, which need a GPU; leave it out to plan")
    if args.hybrid_layer_pattern:
        found.append("--hybrid-layer-pattern makes layers whose activations upstream does not estimate; leave it out to plan")
    if recover_config(args).ranks_per_gpu > 1:
        found.append("--recover-ranks-per-gpu is for trials on few GPUs, and in a plan each rank has its own; leave it out")
    return found


def without_precision_aware(args: Namespace) -> Namespace:
    """Return a copy of `args` without the precision-aware optimizer, whose four types become fp32.

    Upstream would look for that optimizer in Transformer Engine. The model's parameters are the
    same without it. The optimizer's state is not, so `numerics_of` needs the arguments as parsed.
    """
    shown = copy.copy(args)
    shown.use_precision_aware_optimizer = False
    shown.main_params_dtype = shown.main_grads_dtype = shown.exp_avg_dtype = shown.exp_avg_sq_dtype = torch.float32
    return shown


def numerics_of(args: Namespace, asked: Namespace) -> Numerics:
    """Return the bytes for each element that the parsed arguments lead to.

    `asked` has the flags that `layout_flags` takes out of the command line.
    """
    weight = args.params_dtype.itemsize
    gradient = 4 if weight == 4 or args.accumulate_allreduce_grads_in_fp32 else weight
    main = 0 if weight == 4 else 4
    moments = 8 if args.optimizer == "adam" else 4 if args.sgd_momentum else 0
    is_aware = bool(args.use_precision_aware_optimizer)
    if is_aware:
        # Transformer Engine stores the lower half of an fp32 main parameter; the weight has the
        # upper half.
        remains = getattr(args, "store_param_remainders", True) and args.bf16 and args.main_params_dtype == torch.float32
        main = 2 if remains else args.main_params_dtype.itemsize
        moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    fsdp2 = None
    if args.use_torch_fsdp2:
        fsdp2 = Fsdp2(
            reshards=args.torch_fsdp2_reshard_after_forward, built_on_host=asked.use_cpu_initialization,
            keeps_output=getattr(asked, "transformer_impl", None) == "local",
        )  # fmt: skip
    config = recover_config(args)
    return Numerics(
        weight=weight, gradient=gradient, optimizer=main + moments, step_copy=0 if gradient == 4 or is_aware else 4,
        is_sharded=bool(args.use_distributed_optimizer or fsdp2), fsdp2=fsdp2, is_exact=config.determinism == "exact",
        bucket_elements=config.bucket_elements, is_overlapped=bool(args.overlap_grad_reduce),
    )  # fmt: skip


def activations_of(args: Namespace, model: Model, flags: Flags) -> Iterable[Activations]:
    """Yield the activations for each pair of TP and PP size: upstream's estimate, corrected.

    Upstream's estimate is linear in the number of layers. It takes each for a dense one without
    gated units, so that share of it is multiplied by `_layer_ratio`. Upstream knows no context
    parallelism either. The estimate is linear in the length of the sequence, so `memory.memory`
    divides it by the context-parallel size.
    """
    from megatron.training.theoretical_memory_usage import compute_activation_memory, compute_activation_memory_without_sp

    counted = len(model.layers) + flags.counts_embedding + flags.counts_loss
    for tp in choice.tensor_sizes(model, flags):
        splits = flags.sequence_parallel and tp > 1 and args.recompute_granularity == "selective"
        estimate = compute_activation_memory if splits else compute_activation_memory_without_sp
        ratio = _layer_ratio(args, splits=splits)
        for pp in choice.divisors(counted):
            vpp = choice.chunks_of_stage(model, flags, pp)
            if vpp is None:
                continue
            tried = copy.copy(args)
            tried.tensor_model_parallel_size, tried.pipeline_model_parallel_size = tp, pp
            tried.virtual_pipeline_model_parallel_size = vpp if vpp > 1 else None
            tried.padded_vocab_size = padded(model, tp)
            everything = estimate(tried, None)
            tried.num_layers = 0
            beside = estimate(tried, None)
            yield Activations(tp=tp, pp=pp, bytes=int(beside + ratio * (everything - beside)))


def split_activations_of(args: Namespace, model: Model, flags: Flags) -> Iterable[Activations]:
    """Yield the activations as with `--sequence-parallel` and `--recompute-activations`.

    Yields nothing where the flags ask for both already, or for full recomputation.
    """
    granularity = args.recompute_granularity
    if granularity == "full" or (granularity == "selective" and flags.sequence_parallel):
        return
    tried = copy.copy(args)
    tried.recompute_granularity = "selective"
    yield from activations_of(tried, model, msgspec.structs.replace(flags, sequence_parallel=True))


def _layer_ratio(args: Namespace, *, splits: bool) -> float:
    """Return the activations of a layer of this model, relative to the layer that upstream counts.

    With split sequences (`splits`) upstream's layer has 18 h bytes a token, and 4 for each of its
    feed-forward units: the input and the output of their non-linearity. Without, upstream's layer
    has 34 h bytes at TP 1, those of 4 h units, whatever their number is. A gated unit has one input
    more. With experts, a token passes those that its router chooses, and is copied on its way to
    each and back.
    """
    hidden, feed_forward = args.hidden_size, args.ffn_hidden_size
    unit = 6 if args.swiglu or args.quick_geglu else 4
    if args.num_experts:
        of_expert = unit * (args.moe_ffn_hidden_size or feed_forward) + 4 * hidden
        layer = 18 * hidden + args.moe_router_topk * of_expert
    else:
        layer = 18 * hidden + unit * feed_forward
    return float(layer / (18 * hidden + 4 * (feed_forward if splits else 4 * hidden)))


def measured(args: Namespace, asked: Namespace, model: Any) -> Sizes:
    """Return the sizes of `model`, which was built on the meta device.

    `asked` has the layout's flags. The sizes contain those that hold for every layout, such as the
    context-parallel size. The tensor-, pipeline- and expert-parallel sizes in `asked` are ignored.
    """
    first, layers, last = elements_of(model, args.padded_vocab_size)
    tensor_parts, expert_parts = parts_of(model, args.padded_vocab_size)
    if asked.sequence_parallel:
        tensor_parts = math.gcd(tensor_parts, args.seq_length // asked.context_parallel_size)
    described = Model(
        first=first, layers=layers, last=last,
        is_tied=bool(getattr(model, "share_embeddings_and_output_weights", False)),
        vocabulary=args.padded_vocab_size, vocabulary_step=args.make_vocab_size_divisible_by,
        num_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        num_experts=args.num_experts or 0, tensor_parts=tensor_parts, expert_parts=expert_parts,
    )  # fmt: skip
    flags = Flags(
        cp=asked.context_parallel_size, expert_tp=asked.expert_tensor_parallel_size,
        layers_per_chunk=asked.num_layers_per_virtual_pipeline_stage, num_chunks=asked.num_virtual_stages_per_pipeline_rank,
        counts_embedding=asked.account_for_embedding_in_pipeline_split,
        counts_loss=asked.account_for_loss_in_pipeline_split, sequence_parallel=asked.sequence_parallel,
        min_replicas=recover_config(args).min_replicas,
    )  # fmt: skip
    return Sizes(
        model=described, numerics=numerics_of(args, asked), flags=flags,
        activations=tuple(activations_of(args, described, flags)),
        split_activations=tuple(split_activations_of(args, described, flags)),
    )  # fmt: skip


class _Measuring:
    """Measures the model of a script instead of training it (`script.EntryPoints`)."""

    def __init__(self, asked: Namespace, file: str) -> None:
        """Write the sizes to `file`; `asked` has the values of the layout's flags."""
        self._asked, self._file = asked, file
        # A script that calls this function itself is refused.
        self._begin_world = torch.distributed.init_process_group
        self._args: Namespace | None = None

    def parse(
        self, extra_args_provider: script.Provider | None, args_defaults: Mapping[str, Any], *, ignores_unknown: bool = False
    ) -> Namespace:
        """Return the arguments; begin the world in which the model will be built."""
        args = parsing.parse(extra_args_provider, args_defaults, ignores_unknown=ignores_unknown)
        with parsing.bad_input_ends():
            on_gpu = gpu_refusals(recover_config(args), num_ranks=1, num_gpus=1, deterministic=args.deterministic_mode)
            if found := [*refusals(args, lanes=1), *on_gpu, *unplannable(args, self._asked)]:
                raise ValueError("\n".join(found))
            self._begin_world("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self._args = args
        return without_precision_aware(args)

    def is_writer(self) -> bool:
        """Return True: the process is alone."""
        return True

    def pretrain(self, arguments: dict[str, Any]) -> None:
        """Write the sizes of the model, and end the process."""
        with parsing.bad_input_ends():
            if self._args is None:
                raise ValueError(f"{sys.argv[0]} calls pretrain before parse_and_validate_args; its model cannot be measured")
            model = build(arguments["cfg_container"], arguments.get("model_provider"))
            if not all(parameter.is_meta for parameter in model.parameters()):
                raise ValueError("the model puts parameters on a device of its own choice; leave the device to torch's default")
            sizes = measured(self._args, self._asked, model)
        with open(self._file, "wb") as out:
            out.write(msgspec.json.encode(sizes))
        sys.exit(ExitCode.OK)


def main() -> None:
    """Run the script of the command line; its `pretrain` writes the sizes and ends the process."""
    cpu.leave_out_what_needs_a_gpu()
    # torch collects the functions that obey `torch.device("meta")` at their first use under it.
    # Later, `cpu.enable_cpu` replaces some, and the model would take real memory.
    with torch.device("meta"):
        torch.empty(0)
    file, *command = sys.argv[1:]
    with parsing.bad_input_ends():
        asked, flags = layout_flags(command[1:])
    script.wrap(_Measuring(asked, file))
    script.refuse_own_training()
    script.run([command[0], *flags])


def build(config: Any, model_provider: Callable[..., Any] | None) -> Any:
    """Return the whole model on the meta device, built as upstream's `pretrain` builds it.

    Creates Megatron's groups of one rank first. Raises ValueError if the script gives neither a
    model configuration nor a `model_provider`.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with torch.device("meta"):
        if getattr(config, "model", None) is not None:
            return config.model.get_builder_cls()(config.model).build_model(groups, pre_process=True, post_process=True)
        if model_provider is None:
            raise ValueError("the script gives pretrain neither a model configuration nor a model_provider; give one")
        return model_provider(pre_process=True, post_process=True, config=None, pg_collection=groups)


if __name__ == "__main__":
    main()
