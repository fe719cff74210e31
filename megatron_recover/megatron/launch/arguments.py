"""The `--recover-*` arguments, and the refusals of Megatron's arguments.

Imports neither torch nor Megatron. So the launcher can check a command line before any rank starts
(`preflight`). Each rank applies the same rules, and those for its device, to its complete
arguments.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import textwrap
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

import msgspec

from megatron_recover.config import VISIBLE_GPUS, RecoverConfig, visible_gpus
from megatron_recover.core.wording import counted, verb
from megatron_recover.deadlines import NCCL_CONNECTS_S, figure, shortest_on_gpu_s
from megatron_recover.megatron.launch.batch_schedule import least_batch
from megatron_recover.packages import BUILT_IN

SAMPLES_BY_ID = "samples_by_id"
"""Attribute by which the provider of external data sets declares that they are read by index."""
_PREFIX = "recover_"


def add_recover_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the group of `--recover-*` flags, one per field of `RecoverConfig`; return the parser."""
    group = parser.add_argument_group("resilience (megatron-recover)")
    hints, helps = typing.get_type_hints(RecoverConfig), _field_docstrings()
    for field in msgspec.structs.fields(RecoverConfig):
        hint = hints[field.name]
        if hint is bool:
            group.add_argument(flag_of(field.name), dest=_PREFIX + field.name, action="store_true", help=helps[field.name])
            continue
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
        group.add_argument(
            flag_of(field.name), dest=_PREFIX + field.name, type=str if choices else hint, choices=choices,
            metavar=None if choices else "N",
            default=field.default, help=f"{helps[field.name]} (default: {field.default})".replace("%", "%%"),
        )  # fmt: skip
    return parser


def recover_config(args: Namespace) -> RecoverConfig:
    """Return the settings in parsed arguments. Raises ValueError for values that cannot work.

    With an argument with which no replica can join (`joining_refusals`) nothing is healed.
    """
    settings = RecoverConfig(**{name: getattr(args, _PREFIX + name) for name in RecoverConfig.__struct_fields__})
    settings.check()
    return msgspec.structs.replace(settings, heal="off") if not_healed(args) else settings


def not_healed(args: Namespace) -> list[str]:
    """Return a line for each argument because of which lost replicas are not replaced.

    Empty also if that was not asked for (`--recover-heal off`).
    """
    heals = getattr(args, f"{_PREFIX}heal") != "off"
    return [f"replicas that are lost will not be replaced: {line}" for line in joining_refusals(args)] if heals else []


def recover_flags() -> list[str]:
    """Return all `--recover-*` flags."""
    return [flag_of(name) for name in RecoverConfig.__struct_fields__]


def flag_of(field: str) -> str:
    """Return the flag of a field of `RecoverConfig`."""
    return "--recover-" + field.replace("_", "-")


def _field_docstrings() -> dict[str, str]:
    """Return the docstring of each field of `RecoverConfig`, which is also the flag's help text."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(RecoverConfig))).body
    body = typing.cast(ast.ClassDef, definition).body
    return {
        typing.cast(ast.Name, field.target).id: " ".join(inspect.cleandoc(ast.literal_eval(text.value)).split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


class Refusal(msgspec.Struct, frozen=True):
    """An argument of Megatron that a run with replicas does not support."""

    flag: str
    """The flag as the user writes it."""
    when: Callable[[Namespace], object]
    """Returns a true value if the arguments request it. The arguments include `lanes`."""
    because: str
    """The reason, as a clause of the message."""
    instead: str
    """The remedy, as a clause of the message."""


def _set(name: str) -> Callable[[Namespace], object]:
    return lambda args: getattr(args, name)


def _not(name: str, *accepted: object) -> Callable[[Namespace], object]:
    return lambda args: getattr(args, name) not in (None, *accepted)


def _more_shards_than_ranks(args: Namespace) -> bool:
    # Upstream sets the number to the tensor-parallel size if it is not given.
    return (args.tensor_parallel_num_weight_shards or 1) > max(1, args.tensor_model_parallel_size)


def _more_expert_shards_than_ranks(args: Namespace) -> bool:
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return (args.expert_tensor_parallel_num_weight_shards or 1) > max(1, expert_tp)


def _has_virtual_stages(args: Namespace) -> bool:
    return bool(args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank)


_DROP = "leave it out"
_QUANTISED = "it has not been shown on a GPU that quantised layers keep the gradients of a step with a recovery"

# Note [Reductions over data parallelism]
# Megatron reduces some values that are no gradient over its data-parallel group. In a replica this
# group is the lanes, so the share of the other replicas would be missing, silently. Such a value is
# refused unless the ledger carries it for each microbatch.
REFUSALS = (
    # See Note [Reductions over data parallelism].
    Refusal("--moe-router-load-balancing-type",
            lambda args: {"global_aux_loss", "quantile_balancing"} & {*_list(args.moe_router_load_balancing_type)},
            "global_aux_loss and quantile_balancing sum over all samples, and a replica sees only its own",
            "use aux_loss or seq_aux_loss"),
    Refusal("--qk-clip", _set("qk_clip"),
            "it rescales weights by a maximum over one replica's samples, so the replicas drift apart", _DROP),
    Refusal("--log-max-attention-logit", _set("log_max_attention_logit"),
            "the maximum would be over one replica's samples", _DROP),
    Refusal("--ddp-reduce-scatter-with-fp32-accumulation",
            lambda args: args.ddp_reduce_scatter_with_fp32_accumulation and args.lanes > 1,
            "the lanes of a replica are summed in the type of the buffer", "leave out --grad-reduce-in-bf16 instead"),
    Refusal("--ddp-average-in-collective", lambda args: args.ddp_average_in_collective and args.lanes > 1,
            "gradients are summed over lanes and replicas and divided once", _DROP),
    # Gradients, and the schedule that decides when they are reduced.
    Refusal("--fp8-format", _set("fp8"), _QUANTISED, "use --bf16"),
    Refusal("--fp4-format", _set("fp4"), _QUANTISED, "use --bf16"),
    Refusal("--te-precision-config-file", _set("te_precision_config_file"), _QUANTISED, _DROP),
    Refusal("--kitchen-config-file", _set("kitchen_config_file"), _QUANTISED, _DROP),
    Refusal("--kitchen-recipe-number", _not("kitchen_recipe_number"), _QUANTISED, _DROP),
    Refusal("--defer-embedding-wgrad-compute", _set("defer_embedding_wgrad_compute"),
            "that gradient comes after the pass that it belongs to", _DROP),
    Refusal("--overlap-moe-expert-parallel-comm", _set("overlap_moe_expert_parallel_comm"),
            "it is another schedule of forward and backward", _DROP),
    Refusal("--no-overlap-p2p-communication", lambda args: not args.overlap_p2p_comm and _has_virtual_stages(args),
            "with virtual stages the schedule of a replica overlaps its messages", _DROP),
    Refusal("--overlap-p2p-communication-warmup-flush", _set("overlap_p2p_comm_warmup_flush"),
            "it receives what is next before it is known whether there is a next", _DROP),
    Refusal("--fine-grained-activation-offloading", _set("fine_grained_activation_offloading"),
            "it expects the same forwards and backwards in every step", _DROP),
    Refusal("--moe-paged-stash", _set("moe_paged_stash"),
            "it expects the same forwards and backwards in every step", _DROP),
    Refusal("--overlap-param-gather-with-optimizer-step",
            lambda args: args.overlap_param_gather_with_optimizer_step and args.lanes > 1,
            "it steps the optimizer of each model chunk by itself, and a step is committed as a whole", _DROP),
    Refusal("--overlap-param-gather",
            lambda args: args.overlap_param_gather and args.lanes > 1 and args.optimizer not in BUILT_IN,
            "lanes gather whole parameters then, and between two steps only shards of a buffer are compared", _DROP),
    Refusal("--use-megatron-fsdp", _set("use_megatron_fsdp"), "it reduces gradients itself",
            "use --use-torch-fsdp2 or --use-distributed-optimizer"),
    Refusal("--save-wgrads-interval", _set("save_wgrads_interval"), "it replaces the gradient reduction", _DROP),
    Refusal("--cuda-graph-impl", _not("cuda_graph_impl", "none"),
            "a captured graph keeps communicators that a loss retires", "use none"),
    Refusal("--enable-cuda-graph", _set("enable_cuda_graph"),
            "a captured graph keeps communicators that a loss retires", _DROP),
    Refusal("--external-cuda-graph", _set("external_cuda_graph"),
            "a captured graph keeps communicators that a loss retires", _DROP),
    Refusal("--optimizer-cuda-graph", _set("optimizer_cuda_graph"), "a captured graph replays one gradient buffer", _DROP),
    # Fault handling.
    Refusal("--moe-expert-rank-capacity-factor", _set("moe_expert_rank_capacity_factor"),
            "it repeats a step in one replica alone", _DROP),
    Refusal("--error-injection-rate", _set("error_injection_rate"),
            "it needs the rerun mode", "use --chaos of megatron-recover run"),
    Refusal("--inprocess-restart", _set("inprocess_restart"), "two systems would watch and restart the same ranks", _DROP),
    Refusal("--enable-ft-package", _set("enable_ft_package"), "two systems would watch and restart the same ranks", _DROP),
    Refusal("--log-straggler", _set("log_straggler"), "every replica would open the same port", _DROP),
    Refusal("--run-workload-inspector-server", _set("run_workload_inspector_server"),
            "every replica would open the same port", _DROP),
    Refusal("--fault-injector-ranks", _set("fault_injector_ranks"),
            "every replica would inject the same faults", "use --chaos of megatron-recover run"),
    Refusal("--fault-injector-num-ranks", _not("fault_injector_num_ranks"),
            "every replica would inject the same faults", "use --chaos of megatron-recover run"),
    Refusal("--result-rejected-tracker-filename", _set("result_rejected_tracker_filename"),
            "it skips iterations by what one replica has seen", _DROP),
    Refusal("--adlr-autoresume", _set("adlr_autoresume"),
            "each replica would stop by itself", "send SIGTERM to megatron-recover run"),
    Refusal("--exit-signal-handler-for-training", _set("exit_signal_handler_for_training"),
            "each replica would stop by itself", "send SIGTERM to megatron-recover run"),
    # Choice of samples.
    Refusal("--rampup-batch-size", _not("rampup_batch_size"), "Megatron no longer obeys it", "use --step-batch-size-schedule"),
    Refusal("--decrease-batch-size-if-needed", _set("decrease_batch_size_if_needed"),
            "it rounds by the data-parallel size, which is the number of lanes here", "give the rounded --global-batch-size"),
    Refusal("--dataloader-inter-document-masking", _set("dataloader_inter_document_masking"),
            "its batches need attention of Transformer Engine, and were never tried with replicas", _DROP),
    Refusal("--num-workers", lambda args: args.num_workers < 0,
            "it is the number of microbatches that are read ahead", "use 0 or more"),
    Refusal("--iterations-to-skip", _set("iterations_to_skip"), "a step that is skipped is not voted on", _DROP),
    Refusal("--full-validation", _set("full_validation"), "its number of steps depends on the loader", "use --eval-iters"),
    Refusal("--multiple-validation-sets", _set("multiple_validation_sets"), "it needs --full-validation", _DROP),
    Refusal("--context-parallel-size", lambda args: args.context_parallel_size > 1 and args.transformer_impl == "local",
            "Megatron splits a sequence only with Transformer Engine's attention, which needs CUDA",
            "leave it out, or use --transformer-impl transformer_engine on a GPU"),
    Refusal("--hybrid-context-parallel", _set("hybrid_context_parallel"), "it regroups the samples of a global batch", _DROP),
    Refusal("--skip-train", _set("skip_train"), "evaluation alone is no step of a job", "evaluate in plain Megatron"),
    Refusal("--perform-rl-step", _set("perform_rl_step"), "only pre-training is supported", _DROP),
    Refusal("--sft", _set("sft"), "only pre-training is supported", _DROP),
    Refusal("--rl-profile", _set("rl_profile"), "only pre-training is supported", _DROP),
    Refusal("--logits-load-dir", _set("logits_load_dir"),
            "stored logits are found and named by data-parallel rank, not by sample", _DROP),
    Refusal("--logits-save-dir", _set("logits_save_dir"),
            "stored logits are found and named by data-parallel rank, not by sample", _DROP),
    Refusal("--tensor-parallel-num-weight-shards", _more_shards_than_ranks,
            "its ranks read samples of their own", _DROP),
    Refusal("--expert-tensor-parallel-num-weight-shards", _more_expert_shards_than_ranks,
            "experts would be spread over ranks beyond the expert tensor-parallel size", _DROP),
    # Files and logs.
    Refusal("--async-save", lambda args: args.async_save and args.ckpt_format == "torch",
            "Megatron writes that format only while it waits", "use --ckpt-format torch_dist"),
    Refusal("--non-persistent-save-interval", _set("non_persistent_save_interval"),
            "every replica would write it", "use --save-interval"),
    Refusal("--ckpt-format",
            lambda args: args.ckpt_format not in ("torch", "torch_dist") and not args.use_torch_fsdp2,
            "only these formats were tried", "use torch_dist or torch"),
    Refusal("--save-dgrads-interval", _set("save_dgrads_interval"),
            "every replica would write the same files", _DROP),
    Refusal("--save-params-interval", _set("save_params_interval"),
            "every replica would write the same files", _DROP),
    Refusal("--save-activations-interval", _set("save_activations_interval"),
            "every replica would write the same files", _DROP),
    Refusal("--save-tokens-per-expert-interval", _set("save_tokens_per_expert_interval"),
            "every replica would write the same files", _DROP),
    Refusal("--ckpt-convert-format", _set("ckpt_convert_format"),
            "every replica would write the converted checkpoint", "convert it in plain Megatron"),
    Refusal("--moe-use-upcycling", _set("moe_use_upcycling"),
            "every replica would write the upcycled checkpoint", "upcycle it in plain Megatron"),
    Refusal("--record-memory-history", _set("record_memory_history"), "every replica would write the same files", _DROP),
    Refusal("--moe-routing-trace-path", _set("moe_routing_trace_path"), "every replica would write the same files", _DROP),
    Refusal("--config-logger-dir", _set("config_logger_dir"), "every replica would write the same files", _DROP),
    Refusal("--dump-param-to-param-group-map", _set("dump_param_to_param_group_map"),
            "every replica would write the same files", _DROP),
    Refusal("--log-world-size-to-tensorboard", _set("log_world_size_to_tensorboard"),
            "it is the size of one replica", "read events.jsonl of the run directory"),
    Refusal("--yaml-cfg", _set("yaml_cfg"), "the launcher has to know the shape of the job", "use flags"),
)  # fmt: skip

_OF_MEGATRON = "Megatron refuses both together"
_UNTRIED = "it was not tried together with FSDP2"
_WHOLE = "Megatron loads a checkpoint of torch_dcp whole, with the optimizer"
_NO_CHECKPOINT = "Megatron refuses --ckpt-format torch_dcp with tensor parallelism, and fails in its other formats"

# What is refused with `--use-torch-fsdp2`. Megatron refuses more; the dry run prints its words.
FSDP2_REFUSALS = (
    Refusal("--pipeline-model-parallel-size", lambda args: args.pipeline_model_parallel_size > 1, _OF_MEGATRON,
            "use tensor parallelism or more lanes"),
    Refusal("--expert-model-parallel-size", lambda args: args.expert_model_parallel_size > 1, _OF_MEGATRON,
            "use --use-distributed-optimizer instead of FSDP2"),
    Refusal("--num-experts", _not("num_experts"), _UNTRIED, "use --use-distributed-optimizer instead of FSDP2"),
    Refusal("a weight that embedding and output layer share",
            lambda args: not args.untie_embeddings_and_output_weights, _OF_MEGATRON,
            "add --untie-embeddings-and-output-weights"),
    Refusal("--use-distributed-optimizer", _set("use_distributed_optimizer"), _OF_MEGATRON,
            "leave it out: FSDP2 shards the optimizer as well"),
    Refusal("--fp16", _set("fp16"), _OF_MEGATRON, "use --bf16"),
    Refusal("--context-parallel-size", lambda args: args.context_parallel_size > 1, _UNTRIED, _DROP),
    Refusal("--mtp-num-layers", _not("mtp_num_layers", 0), _UNTRIED, _DROP),
    Refusal("--optimizer", _not("optimizer", "adam"), _UNTRIED, "use adam"),
    Refusal("--init-model-with-meta-device", _set("init_model_with_meta_device"), _UNTRIED, _DROP),
    Refusal("--check-for-large-grads", _set("check_for_large_grads"),
            "Megatron does not check gradients that FSDP2 shards", _DROP),
    # Checkpoints.
    Refusal("--save", lambda args: args.save is not None and args.tensor_model_parallel_size > 1,
            _NO_CHECKPOINT, "leave it out, or use lanes instead of tensor parallelism"),
    Refusal("--load", lambda args: args.load is not None and args.tensor_model_parallel_size > 1,
            _NO_CHECKPOINT, "leave it out, or use lanes instead of tensor parallelism"),
    Refusal("--ckpt-format", lambda args: args.ckpt_format != "torch_dcp" and (args.save is not None or args.load is not None),
            "Megatron cannot save what FSDP2 shards in another format", "add --ckpt-format torch_dcp"),
    Refusal("--finetune", _set("finetune"), _WHOLE, _DROP),
    Refusal("--no-load-optim", _set("no_load_optim"), _WHOLE, _DROP),
    Refusal("--no-save-optim", _set("no_save_optim"),
            "Megatron cannot load a checkpoint of torch_dcp without the optimizer", _DROP),
    Refusal("--no-save-rng", _set("no_save_rng"),
            "Megatron cannot load a checkpoint of torch_dcp without the random state", _DROP),
    Refusal("--pretrained-checkpoint", _not("pretrained_checkpoint"),
            _WHOLE, _DROP),
)  # fmt: skip

# A newcomer reads the state of others between two steps, while their next step runs. So what the
# next step needs has to be in that state, and may change only when a step is applied.
JOINING_REFUSALS = (
    Refusal("--optimizer-cpu-offload", _set("optimizer_cpu_offload"),
            "copies between host and device may still run between two steps", _DROP),
    Refusal("--phase-transition-iterations", _set("phase_transition_iterations"),
            "data sets are built for the phase of the iteration with which training begins", _DROP),
    Refusal("--vision-pretraining-type", lambda args: args.vision_pretraining and args.vision_pretraining_type == "dino",
            "the center of its loss changes in each forward", "use another type"),
)  # fmt: skip


class Adaptation(msgspec.Struct, frozen=True):
    """An argument of Megatron that gets another value under the launcher, which is said."""

    flag: str
    """The flag as the user writes it."""
    when: Callable[[Namespace], object]
    """Returns a true value if the arguments request it. They include `lanes` and `replicas`."""
    name: str
    """Name of the argument that is changed."""
    value: object
    """Its new value."""
    because: str
    """The reason, as a clause of the message."""
    but_in_one: bool = False
    """True if replica 0 keeps the argument as it is."""


ADAPTATIONS = (
    Adaptation("--use-persistent-ckpt-worker", lambda args: args.async_save and args.ckpt_format != "torch",
               "async_save", False, "threads of the writer write what --async-save leaves to be written"),
    Adaptation("--overlap-param-gather", lambda args: args.overlap_param_gather and args.lanes == 1,
               "overlap_param_gather", False, "with one lane nothing is gathered"),
    Adaptation("--overlap-param-gather-with-optimizer-step",
               lambda args: args.overlap_param_gather_with_optimizer_step and args.lanes == 1,
               "overlap_param_gather_with_optimizer_step", False, "with one lane nothing is gathered"),
    Adaptation("--check-weight-hash-across-dp-replicas-interval", _set("check_weight_hash_across_dp_replicas_interval"),
               "check_weight_hash_across_dp_replicas_interval", None,
               "it compares lanes only; --recover-digest-interval compares replicas and lanes"),
    Adaptation("--num-distributed-optimizer-instances", _not("num_distributed_optimizer_instances", 1),
               "num_distributed_optimizer_instances", 1,
               "replicas are the instances; --lanes of megatron-recover run is the number of shards"),
    Adaptation("--rerun-mode", _not("rerun_mode", "disabled"),
               "rerun_mode", "disabled", "it repeats a step in one replica alone; what is not finite still ends the job"),
    Adaptation("--distributed-timeout-minutes", _not("distributed_timeout_minutes", 10), "distributed_timeout_minutes", 10,
               "--recover-deadline-s bounds every wait"),
    Adaptation("--tp-comm-overlap", lambda args: args.tp_comm_overlap and args.replicas > 1, "tp_comm_overlap", False,
               "Transformer Engine's sockets have the same names in every replica of a node; it changes speed only"),
    Adaptation("--profile", lambda args: args.profile and args.replicas > 1, "profile", False,
               "every replica would write the same files", but_in_one=True),
    Adaptation("--no-data-sharding", lambda args: args.dataloader_type == "cyclic" and not args.data_sharding,
               "data_sharding", True, "samples come in the order of one data-parallel rank, to which it makes no difference"),
    Adaptation("--log-energy", _set("log_energy"), "log_energy", False, "it is the energy of one replica"),
    Adaptation("--log-progress", _set("log_progress"), "log_progress", False,
               "every replica would write the file; events.jsonl of the run directory has every step"),
)  # fmt: skip


def adapt(args: Namespace, *, lanes: int, replica: int, replicas: int) -> list[str]:
    """Change arguments that mean nothing, or something wrong, in a replica; say so in lines.

    Returns a line for each, also for one that replica 0 keeps (`Adaptation.but_in_one`). `replica`
    is the one of these arguments, of `replicas` at the start. Each rank and the dry run call this
    before `refusals`, which accepts what is changed here.
    """
    judged = Namespace(**vars(args), lanes=lanes, replicas=replicas)
    requested = [each for each in ADAPTATIONS if each.when(judged)]
    for each in requested:
        if replica or not each.but_in_one:
            setattr(args, each.name, each.value)
    where = {False: "with replicas", True: "in other replicas than 0"}
    return [f"{each.flag} has no effect {where[each.but_in_one]}: {each.because}" for each in requested]


_WITHOUT_KITCHEN = {"kitchen_config_file": None, "kitchen_recipe_number": None}
"""Arguments that Megatron has only where the package `kitchen` is installed."""


def refusals(args: Namespace, *, lanes: int) -> list[str]:
    """Return one line for each refused argument, with the flag, the reason and the remedy.

    An argument that the installed Megatron does not know cannot be judged, so it is refused too.
    """
    judged = Namespace(**{**_WITHOUT_KITCHEN, **vars(args), "lanes": lanes})
    found = _judged(REFUSALS, judged, "is not supported with replicas")
    if getattr(args, "use_torch_fsdp2", False):
        found += _judged(FSDP2_REFUSALS, judged, "is not supported with --use-torch-fsdp2")
    return found


def fsdp2_notes(args: Namespace, *, lanes: int) -> list[str]:
    """Return lines about what FSDP2 does with these arguments and the user may not expect."""
    if not args.use_torch_fsdp2:
        return []
    found = ["--use-torch-fsdp2 shards nothing in a replica of one lane; give --lanes"] if lanes == 1 else []
    if args.bf16 and args.accumulate_allreduce_grads_in_fp32:
        found.append(
            "--use-torch-fsdp2 with --bf16 sums gradients in fp32, where Megatron alone does so in bf16 with FSDP2; "
            "--grad-reduce-in-bf16 has them summed in bf16"
        )
    elif args.bf16:
        found.append(
            "--grad-reduce-in-bf16 sums the gradients of lanes in bf16, as Megatron does; microbatches and replicas are "
            "summed in float64 with --recover-determinism exact, else in bf16"
        )
    return found


def joining_refusals(args: Namespace) -> list[str]:
    """Return one line for each argument with which no replica can join while others train.

    The job runs with such an argument, and a replica that is lost is not replaced. A line has the
    flag, the reason and the remedy. An argument that Megatron does not know cannot be judged.
    """
    return _judged(JOINING_REFUSALS, args, "lets no replica join while others train")


def _judged(refusals: Sequence[Refusal], judged: Namespace, what: str) -> list[str]:
    found = []
    for refusal in refusals:
        try:
            if refusal.when(judged):
                found.append(f"{refusal.flag} {what}: {refusal.because}; {refusal.instead}")
        except AttributeError as error:
            if error.obj is not judged:  # a defect of ours
                raise
            found.append(
                f"{refusal.flag} cannot be judged: the installed Megatron has no argument `{error.name}`; "
                "see docs/how_to/move_to_another_megatron.md"
            )
    return found


def cpu_refusals(args: Namespace) -> list[str]:
    """Return one line for each argument with which Megatron would fail without CUDA.

    Megatron would fail in the middle of its start, or of the training. Call this only without CUDA.
    """
    num_steps = args.train_iters
    if num_steps is None:
        schedule = args.step_batch_size_schedule
        batch = args.global_batch_size if schedule is None else max(1, least_batch(schedule))  # upstream refuses 0 later
        num_steps = args.train_samples // batch  # at most
    found = []
    if args.profile and not args.use_pytorch_profiler and args.profile_step_start < num_steps:
        found.append("--profile needs CUDA: it marks steps for nsys; add --use-pytorch-profiler on a CPU")
    if args.distributed_backend == "nccl":
        found.append("--distributed-backend nccl needs CUDA; leave it out on a CPU")
    if args.transformer_impl != "local":
        found.append(f"--transformer-impl {args.transformer_impl} needs CUDA: leave it out on a CPU")
    return found


def without_interval(args: Namespace) -> list[str]:
    """Return one line if `--eval-interval`, by which upstream divides, is missing or below 1.

    Upstream counts the samples of all evaluations before it looks whether there are any
    (training.py, get_train_valid_test_num_samples). A script may set a default.
    """
    if args.eval_interval is not None and args.eval_interval > 0:
        return []
    return [
        "--eval-interval is missing or below 1; Megatron divides by it even with --eval-iters 0: say every how many iterations "
        "to evaluate"
    ]


def provider_refusals(args: Namespace, provider: object) -> list[str]:
    """Return one line if the data sets of `provider` cannot be read by the microbatch's id.

    `provider` is the training script's `train_valid_test_datasets_provider`.
    """
    if args.dataloader_type != "external" or getattr(provider, SAMPLES_BY_ID, False):
        return []
    return [
        "--dataloader-type external is not supported with a loader that hands out samples in an order of its own: a "
        "microbatch's samples must follow from its id; return data sets that are read by index, and set "
        f"{SAMPLES_BY_ID} = True on the provider, or use single or cyclic"
    ]


def gpu_refusals(config: RecoverConfig, *, num_ranks: int, num_gpus: int, deterministic: bool) -> list[str]:
    """Return one line for each argument that does not suit the node's GPUs.

    `num_ranks` counts the ranks of all replicas together. Without GPUs (`num_gpus` 0) the CPU
    computes, and only `--recover-ranks-per-gpu` can be refused. `deterministic`:
    `--deterministic-mode` is set.
    """
    if not num_gpus:
        return ["--recover-ranks-per-gpu needs CUDA; leave it out on a CPU"] if config.ranks_per_gpu > 1 else []
    found = []
    needed = -(-num_ranks // config.ranks_per_gpu)
    if needed > num_gpus:
        visible = visible_gpus()
        why = "" if visible is None else f" ({VISIBLE_GPUS} is {visible})"
        found.append(
            f"the job has {counted(num_ranks, 'rank')}, which {verb(num_ranks, 'needs', 'need')} {counted(needed, 'GPU')}, and "
            f"there {verb(num_gpus, 'is', 'are')} {num_gpus}{why}; use "
            "fewer replicas, or, to try things out, let ranks share a GPU with --recover-ranks-per-gpu"
        )
    if config.determinism == "exact" and not deterministic:
        found.append(
            "--recover-determinism exact needs --deterministic-mode on a GPU, or a microbatch computed twice differs; "
            "add --deterministic-mode"
        )
    if config.deadline_s < (shortest_s := shortest_on_gpu_s()):
        found.append(
            f"--recover-deadline-s is {config.deadline_s:g}, which leaves NCCL {figure(config.deadlines.connect_s)} s to "
            f"connect the replicas on a GPU, and it may take {NCCL_CONNECTS_S:g} s; give at least {shortest_s:g}"
        )
    return found


FUSED_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""Apex's extension for `--gradient-accumulation-fusion`, which is Megatron's default."""


def kernel_refusals(args: Namespace, *, on_gpu: bool) -> list[str]:
    """Return one line for each kernel that the arguments ask for and this machine lacks.

    Megatron's output layer raises without Apex's extension, also beside layers of Transformer
    Engine (`ColumnParallelLinear` in megatron/core/tensor_parallel/layers.py). On a CPU no kernel
    is asked for.
    """
    if not (on_gpu and args.gradient_accumulation_fusion) or importlib.util.find_spec(FUSED_GRADIENTS):
        return []
    return [
        f"--gradient-accumulation-fusion, which is Megatron's default, needs Apex's extension {FUSED_GRADIENTS}, and it is not "
        "installed; add --no-gradient-accumulation-fusion, or install Apex with its C++ and CUDA extensions"
    ]


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
