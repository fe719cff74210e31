"""Checks a Megatron command line before any rank starts: shapes, data, folders, unsupported flags.

Reads only the flags that matter here and leaves all others to Megatron's own parser. Imports
neither torch nor Megatron, and so takes one second instead of ten. Returns the facts about the job,
or reports all mistakes that do not hide behind others at once.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from megatron_recover import packages
from megatron_recover.config import RecoverConfig, below_one
from megatron_recover.core.wording import counted
from megatron_recover.flags import did_you_mean
from megatron_recover.megatron.checkpoint import disk_format
from megatron_recover.megatron.launch import preflight_data as data
from megatron_recover.megatron.launch.arguments import (
    add_recover_arguments,
    joining_refusals,
    recover_config,
    recover_flags,
    refusals,
    without_interval,
)
from megatron_recover.megatron.launch.batch_schedule import first_batch, least_batch
from megatron_recover.megatron.layout import sizes
from megatron_recover.megatron.seams import seams
from megatron_recover.trace import Layout

_INT: Final = {"type": int, "default": None}
_ONE: Final = {"type": int, "default": 1}
_TEXT: Final = {"default": None}
_ON: Final = {"action": "store_true"}

FLAGS: Final[Mapping[str, Mapping[str, Any]]] = {
    # Shape.
    "--tensor-model-parallel-size": _ONE,
    "--pipeline-model-parallel-size": _ONE,
    "--context-parallel-size": _ONE,
    "--expert-model-parallel-size": _ONE,
    "--expert-tensor-parallel-size": _INT,
    "--num-layers-per-virtual-pipeline-stage": _INT,
    "--num-virtual-stages-per-pipeline-rank": _INT,
    "--pipeline-model-parallel-layout": _TEXT,
    "--decoder-first-pipeline-num-layers": _INT,
    "--decoder-last-pipeline-num-layers": _INT,
    "--account-for-embedding-in-pipeline-split": _ON,
    "--account-for-loss-in-pipeline-split": _ON,
    "--num-layers": _INT,
    "--hidden-size": _INT,
    "--num-attention-heads": _INT,
    "--kv-channels": _INT,
    "--ffn-hidden-size": _INT,
    "--seq-length": _INT,
    "--vocab-size": _INT,
    "--log-interval": {"type": int, "default": 100},
    "--group-query-attention": _ON,
    "--num-query-groups": _ONE,
    "--train-iters": _INT,
    "--train-samples": _INT,
    # Batch.
    "--micro-batch-size": _INT,
    "--global-batch-size": _INT,
    "--step-batch-size-schedule": _TEXT,
    "--eval-micro-batch-size": _INT,
    "--eval-global-batch-size": _INT,
    # Data.
    "--data-path": {"nargs": "*", "default": None},
    "--train-data-path": {"nargs": "*", "default": None},
    "--valid-data-path": {"nargs": "*", "default": None},
    "--test-data-path": {"nargs": "*", "default": None},
    "--data-args-path": _TEXT,
    "--per-split-data-args-path": _TEXT,
    "--mock-data": _ON,
    "--split": _TEXT,
    "--eval-iters": {"type": int, "default": 100},
    "--eval-interval": _INT,
    "--seed": {"type": int, "default": 1234},
    # Folders.
    "--save": _TEXT,
    "--save-interval": _INT,
    "--persistent-save-interval": _INT | {"dest": "save_interval"},
    "--tensorboard-dir": _TEXT,
    "--data-cache-path": _TEXT,
    # Flags that may be refused.
    "--rampup-batch-size": {"nargs": 3, "default": None},
    "--moe-router-load-balancing-type": {"nargs": "+", "default": "aux_loss"},
    "--fp8-format": {"dest": "fp8", "default": None},
    "--fp4-format": {"dest": "fp4", "default": None},
    "--qk-clip": _ON,
    "--log-max-attention-logit": _ON,
    "--defer-embedding-wgrad-compute": _ON,
    "--overlap-moe-expert-parallel-comm": _ON,
    "--no-overlap-p2p-communication": {"action": "store_false", "dest": "overlap_p2p_comm"},
    "--overlap-p2p-communication-warmup-flush": _ON | {"dest": "overlap_p2p_comm_warmup_flush"},
    "--fine-grained-activation-offloading": _ON,
    "--moe-paged-stash": _ON,
    "--moe-expert-rank-capacity-factor": {"type": float, "default": None},
    "--skip-train": _ON,
    "--save-dgrads-interval": _INT,
    "--save-params-interval": _INT,
    "--save-activations-interval": _INT,
    "--save-tokens-per-expert-interval": _INT,
    "--ckpt-convert-format": _TEXT,
    "--moe-use-upcycling": _ON,
    "--record-memory-history": _ON,
    "--moe-routing-trace-path": _TEXT,
    "--config-logger-dir": {"default": ""},
    "--dump-param-to-param-group-map": _TEXT,
    "--log-world-size-to-tensorboard": _ON,
    "--ddp-average-in-collective": _ON,
    "--ddp-reduce-scatter-with-fp32-accumulation": _ON,
    "--decrease-batch-size-if-needed": _ON,
    "--optimizer": {"default": "adam"},
    "--overlap-param-gather": _ON,
    "--overlap-param-gather-with-optimizer-step": _ON,
    "--use-megatron-fsdp": _ON,
    "--use-torch-fsdp2": _ON,
    "--save-wgrads-interval": _INT,
    "--cuda-graph-impl": {"default": "none"},
    "--enable-cuda-graph": _ON,
    "--external-cuda-graph": _ON,
    "--optimizer-cuda-graph": _ON,
    "--error-injection-rate": {"type": int, "default": 0},
    "--inprocess-restart": _ON,
    "--enable-ft-package": _ON,
    "--log-straggler": _ON,
    "--run-workload-inspector-server": _ON,
    "--fault-injector-ranks": _TEXT,
    "--fault-injector-num-ranks": _INT,
    "--result-rejected-tracker-filename": _TEXT,
    "--te-precision-config-file": _TEXT,
    "--kitchen-config-file": _TEXT,
    "--kitchen-recipe-number": _INT,
    "--adlr-autoresume": _ON,
    "--exit-signal-handler-for-training": _ON,
    "--dataloader-inter-document-masking": _ON,
    "--num-workers": {"type": int, "default": 2},
    "--iterations-to-skip": {"nargs": "+", "type": int, "default": []},
    "--full-validation": _ON,
    "--multiple-validation-sets": _ON,
    "--hybrid-context-parallel": _ON,
    "--transformer-impl": {"default": "transformer_engine"},
    "--perform-rl-step": _ON,
    "--sft": _ON,
    "--rl-profile": _ON,
    "--logits-load-dir": _TEXT,
    "--logits-save-dir": _TEXT,
    "--tensor-parallel-num-weight-shards": _INT,
    "--expert-tensor-parallel-num-weight-shards": _INT,
    "--async-save": _ON,
    "--non-persistent-save-interval": _INT,
    "--ckpt-format": {"default": "torch_dist"},
    "--yaml-cfg": _TEXT,
    # Flags that may be refused with FSDP2.
    "--untie-embeddings-and-output-weights": _ON,
    "--use-distributed-optimizer": _ON,
    "--fp16": _ON,
    "--num-experts": _INT,
    "--mtp-num-layers": _INT,
    "--init-model-with-meta-device": _ON,
    "--check-for-large-grads": _ON,
    "--load": _TEXT,
    "--finetune": _ON,
    "--no-load-optim": _ON | {"default": None},
    "--no-save-optim": _ON | {"default": None},
    "--no-save-rng": _ON | {"default": None},
    "--pretrained-checkpoint": _TEXT,
    "--ckpt-step": _INT,
    "--auto-detect-ckpt-format": _ON,
    # No replica can join.
    "--optimizer-cpu-offload": _ON,
    "--phase-transition-iterations": _TEXT,
    "--vision-pretraining": _ON,
    "--vision-pretraining-type": {"default": "classify"},
}
"""Megatron's flags that are read here, declared as Megatron does (a test compares both)."""


class Preflight(msgspec.Struct, frozen=True):
    """Facts about a job that the launcher reads from an accepted command line."""

    layout: Layout
    config: RecoverConfig
    seed: int
    num_microbatches: int
    """M, the number of microbatches of a training step; with a schedule, of its first entry."""
    least_microbatches: int
    """The smallest M of any training step; with a schedule, of its smallest batch."""
    microbatch_samples: int
    """Number of samples of one microbatch, over all lanes."""
    batch_changes: bool = False
    """True if later steps can have another M, by a schedule of the batch size."""
    train_iters: int | None = None
    """Number of iterations to train; None where `--train-samples` gives the length."""
    joining_refusals: tuple[str, ...] = ()
    """A line for each flag with which no replica can join while others train."""
    save: str | None = None
    """The folder of `--save`; None without it, and for a name with `://`."""


def preflight(argv: Sequence[str], *, num_replicas: int, lanes: int = 1) -> Preflight:
    """Check `argv`, the flags after the training script's name, and return the facts about the job.

    Each of the `num_replicas` replicas has `lanes` lanes. Raises ValueError with one line per
    mistake, which names the flag; also if the installed Megatron is not supported. A mistake may
    hide others: a value that cannot be read, for example, or fewer than one replica or lane.
    """
    args, others, unreadable = _read(argv)
    found = [*unreadable.values(), *_unknown(others), *refusals(args, lanes=lanes)]
    if num_replicas < 1 or lanes < 1:
        raise ValueError(f"--replicas is {num_replicas} and --lanes is {lanes}; both must be at least 1")
    settings = RecoverConfig()
    try:
        settings = recover_config(args)
    except ValueError as error:
        found += str(error).splitlines()
    if settings.min_replicas > num_replicas:
        found.append(
            f"--recover-min-replicas is {settings.min_replicas}, but the job starts with "
            f"{counted(num_replicas, 'replica')}; lower it"
        )
    # A flag without a readable value cannot be compared with the others.
    if not unreadable.keys() <= {*recover_flags()}:
        raise ValueError("\n".join(found))
    layout, wrong = _layout(args, lanes)
    num_microbatches, too_few = _num_microbatches(args, num_replicas, lanes)
    found += [
        *wrong,
        *too_few,
        *_length(args),
        *([] if args.eval_interval is None else without_interval(args)),  # else a script may set it
        *data.mistakes(args),
        *_saving(args),
        *_unwritable(args),
        *(disk_format.refusals(args) if args.use_torch_fsdp2 else []),  # else a script may set it: the dry run looks
    ]
    found += _without_package(args)
    if found:
        raise ValueError("\n".join(found))
    schedule, microbatch = args.step_batch_size_schedule, args.micro_batch_size * lanes
    least = num_microbatches if schedule is None else max(1, least_batch(schedule) // microbatch)
    return Preflight(
        layout, settings, args.seed, num_microbatches, least, microbatch, schedule is not None, args.train_iters,
        tuple(joining_refusals(args)), None if args.save is None or "://" in args.save else args.save,
    )  # fmt: skip


def unsupported(argv: Sequence[str]) -> list[str]:
    """Return one line for each flag of `argv` that is refused for what it asks, or is unreadable.

    Shapes, data and folders are not judged. Raises ValueError as `Undecided` does.
    """
    args, _, unreadable = _read(argv)
    return [*unreadable.values(), *refusals(args, lanes=shape_of(argv).lanes)]


def shape_of(argv: Sequence[str], lanes: int | None = None) -> sizes.Layout:
    """Return the shape of one replica.

    Without `lanes` a replica has the fewest lanes over which its experts can be spread. Sizes below
    1 that `preflight` refuses count as 1, and a size that cannot be read counts as not given.
    Raises ValueError as `Undecided` does.
    """
    args, _, _ = _read(argv)
    given = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    tp, pp, cp = (max(1, size) for size in given)
    ep, expert_tp = max(1, args.expert_model_parallel_size), max(1, args.expert_tensor_parallel_size or tp)
    if lanes is None:
        lanes = ep * expert_tp // math.gcd(ep * expert_tp, tp * cp)
    return sizes.Layout(tp=tp, pp=pp, cp=cp, ep=ep, expert_tp=expert_tp, lanes=max(1, lanes))


class Sized(Protocol):
    """Replicas, and the shape of each: a layout that `plan` considers (`layout/sizes.py`)."""

    @property
    def replicas(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...


class Undecided:
    """A command line for a job whose replicas and whose shape of a replica are not decided yet.

    Its data and folders need not be on this machine. All lines are worded as in `preflight`.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        """Parse `argv`; a value that cannot be read is one of the `mistakes`.

        Raises ValueError if argparse refuses `argv` for another reason, or the installed Megatron
        is not supported.
        """
        self._args, self._others, self._unreadable = _read(argv)

    def mistakes(self) -> list[str]:
        """Return one line for each mistake that no layout cures.

        Data, folders, `--eval-interval` and packages are not checked. Sizes of a replica that
        `argv` gives are ignored. A mistake may hide others, such as a value that cannot be read.
        """
        args = self._with(tp=1, pp=1, cp=1, ep=1)
        args.tensor_parallel_num_weight_shards = args.expert_tensor_parallel_num_weight_shards = None
        found = [*self._unreadable.values(), *_unknown(self._others), *refusals(args, lanes=1)]
        try:
            recover_config(args)
        except ValueError as error:
            found += str(error).splitlines()
        if not self._unreadable.keys() <= {*recover_flags()}:
            return found
        shape = _model(args, tp=1)
        if not shape and args.num_layers is not None and not _is_uneven(args):
            sizes = [size for size in range(2, args.num_layers + 1) if args.num_layers % size == 0]
            in_chunks = [_num_chunks(args, size)[1] for size in sizes]
            shape = in_chunks[0] if in_chunks and all(in_chunks) else []
        return [*found, *shape, *_num_microbatches(args, 1, 1)[1], *_length(args), *_saving(args)]

    @property
    def config(self) -> RecoverConfig:
        """Return the flags of this project. Raises ValueError if one of them is a mistake."""
        return recover_config(self._args)

    def refused(self, layout: Sized) -> list[str]:
        """Return the lines by which `preflight` refuses a layout, if `argv` has no mistakes.

        `--recover-min-replicas` is not compared: `layout/choice.py` considers no layout that it
        forbids.
        """
        args = self._with(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
        _, in_shape = _layout(args, layout.lanes)
        _, in_batch = _num_microbatches(args, layout.replicas, layout.lanes)
        return [*refusals(args, lanes=layout.lanes), *in_shape, *in_batch]

    def allows(self, layout: Sized) -> bool:
        """Return whether `preflight` accepts a layout, if `argv` has no mistakes."""
        return not self.refused(layout)

    def _with(self, *, tp: int, pp: int, cp: int, ep: int) -> Namespace:
        """Return the arguments with these sizes of a replica."""
        return Namespace(**{
            **vars(self._args), "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp, "expert_model_parallel_size": ep,
        })  # fmt: skip


def _read(argv: Sequence[str]) -> tuple[Namespace, list[str], dict[str, str]]:
    """Parse `argv` as `_parsed` does. Raises ValueError for an unsupported Megatron, too."""
    declared = seams.load()
    unsupported = seams.unsupported_version(declared)
    if unsupported:
        raise ValueError(seams.refusal(declared, unsupported))
    parser = ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for flag, declaration in FLAGS.items():
        parser.add_argument(flag, **declaration)
    add_recover_arguments(parser)
    return _parsed(parser, argv)


def _parsed(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, list[str], dict[str, str]]:
    """Parse `argv`; return the arguments, the unknown words, and messages by mistaken flag.

    argparse stops at the first flag whose value cannot be read. So that flag is removed, and the
    other words are parsed again. Raises ValueError where that does not help.
    """
    words, wrong = list(argv), dict[str, str]()
    while True:
        try:
            return *parser.parse_known_args(words), wrong
        except ArgumentError as error:
            flag = error.argument_name or ""
            rest = _without(flag, words)
            if rest == words:
                raise ValueError(str(error)) from error
            wrong[flag], words = f"{flag}: {error.message}", rest


def _without(flag: str, words: Sequence[str]) -> list[str]:
    """Return `words` without `flag` and the words after it, up to the next with a leading `--`."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] == flag
        if not dropping:
            kept.append(word)
    return kept


def _unknown(others: Sequence[str]) -> list[str]:
    known = recover_flags()
    mistyped = [flag for flag in (word.partition("=")[0] for word in others) if flag.startswith("--recover-")]
    return [f"{flag} is unknown; " + did_you_mean(flag, known, f"there are {', '.join(known)}") for flag in mistyped]


def _layout(args: Namespace, lanes: int) -> tuple[Layout, list[str]]:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    found = below_one(
        {"--tensor-model-parallel-size": tp, "--pipeline-model-parallel-size": pp, "--context-parallel-size": cp}
    )  # fmt: skip
    if found:
        return Layout(tp=1, pp=1), found
    found, ep = _model(args, tp), args.expert_model_parallel_size
    expert_tp = args.expert_tensor_parallel_size or tp  # as in Megatron
    if ep < 1 or expert_tp < 1 or (tp * cp * lanes) % (ep * expert_tp):
        found.append(
            f"--expert-model-parallel-size {ep} does not divide the groups of ranks of an expert, TP x CP x lanes / "
            f"--expert-tensor-parallel-size = {tp} x {cp} x {lanes} / {expert_tp}; experts are spread inside a replica: raise "
            "--lanes of megatron-recover run"
        )
    vpp = 1
    if args.num_layers is not None and not _is_uneven(args):
        vpp, wrong = _num_chunks(args, pp)
        found += wrong
    elif args.num_virtual_stages_per_pipeline_rank is not None:
        vpp = args.num_virtual_stages_per_pipeline_rank
    return Layout(tp=tp, pp=pp, cp=cp, lanes=lanes, vpp=vpp), found


def _is_uneven(args: Namespace) -> bool:
    """Return whether the stages of the pipeline may have different numbers of layers."""
    settings = (
        args.pipeline_model_parallel_layout,
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        args.account_for_embedding_in_pipeline_split or None,
        args.account_for_loss_in_pipeline_split or None,
    )
    return any(setting is not None for setting in settings)


def _model(args: Namespace, tp: int) -> list[str]:
    """Return mistakes in the model's numbers: values below 1, or else values that do not divide.

    Without `--num-attention-heads` no division is checked.
    """
    heads, hidden, groups = args.num_attention_heads, args.hidden_size, args.num_query_groups
    numbers = {
        "--num-attention-heads": heads,
        "--hidden-size": hidden,
        "--num-layers": args.num_layers,
        "--ffn-hidden-size": args.ffn_hidden_size,
        "--seq-length": args.seq_length,
        "--vocab-size": args.vocab_size,
        "--log-interval": args.log_interval,
    }
    found = below_one(numbers)
    if found or heads is None:
        return found
    pairs = [("--tensor-model-parallel-size", tp, "--num-attention-heads", heads)]
    if hidden is not None and args.kv_channels is None:  # else --kv-channels is the size of a head
        pairs.append(("--num-attention-heads", heads, "--hidden-size", hidden))
    if args.group_query_attention:
        pairs.append(("--num-query-groups", groups, "--num-attention-heads", heads))
    return [
        f"{flag} {divisor} does not divide {whole_flag} {whole}; change one of them"
        for flag, divisor, whole_flag, whole in pairs
        if divisor < 1 or whole % divisor
    ]


def num_chunks(layers: int, pp: int, per_chunk: int | None, chunks: int | None) -> tuple[int, list[str]]:
    """Return the number of model chunks per stage of an even split, and the mistakes in it.

    `per_chunk` and `chunks` are the values of the two flags for virtual pipeline stages. The number
    is 1 without these flags, and where there is a mistake.
    """
    if layers % pp:
        return 1, [f"--pipeline-model-parallel-size {pp} does not divide --num-layers {layers}; change one of them"]
    if per_chunk is None and chunks is None:
        return 1, []
    flag = "--num-layers-per-virtual-pipeline-stage" if per_chunk is not None else "--num-virtual-stages-per-pipeline-rank"
    size, layers_of_stage = per_chunk if per_chunk is not None else chunks or 0, layers // pp
    if per_chunk is not None and chunks is not None:
        return 1, ["--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other"]
    if pp < 2:
        return 1, [f"{flag} needs --pipeline-model-parallel-size of at least 2"]
    if size < 1 or layers_of_stage % size:
        return 1, [f"{flag} {size} does not divide the {layers_of_stage} layers of a pipeline stage; change one of them"]
    return (layers_of_stage // size if per_chunk is not None else size), []


def _num_chunks(args: Namespace, pp: int) -> tuple[int, list[str]]:
    flags = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    return num_chunks(args.num_layers, pp, *flags)


def _num_microbatches(args: Namespace, num_replicas: int, lanes: int) -> tuple[int, list[str]]:
    """Return M of a training step, 0 if it cannot be told, and the mistakes in all batch sizes.

    With a schedule of the batch size only its first entry is read.
    """
    micro = args.micro_batch_size
    if micro is None or micro < 1:
        return 0, ["--micro-batch-size is missing or below 1; it is needed to count the microbatches of a step"]
    if args.step_batch_size_schedule is not None:
        batch, flag = first_batch(args.step_batch_size_schedule), "--step-batch-size-schedule"
        if batch is None:
            return 0, [f"{flag} {args.step_batch_size_schedule} is no list of THRESHOLD:BATCH, such as 0:256,100B:512"]
    else:
        batch, flag = args.global_batch_size, "--global-batch-size"
    if batch is None:
        return 0, [f"{flag} is missing or no number; it is the batch of the whole job, split over the replicas"]
    num, found = _count(flag, batch, "--micro-batch-size", micro, num_replicas, lanes)
    evaluated, eval_micro = args.eval_global_batch_size, args.eval_micro_batch_size
    if wrong := below_one({"--eval-global-batch-size": evaluated, "--eval-micro-batch-size": eval_micro}):
        return num, [*found, *wrong]
    if evaluated is not None or eval_micro is not None:
        # What is not given is that of training; a mistake names the flag with that number.
        whole = ("--eval-global-batch-size", evaluated) if evaluated else (flag, batch)
        if not evaluated and args.step_batch_size_schedule is not None:  # one microbatch of each rank: `take_default_batch`
            whole, lanes = ("--micro-batch-size", micro), 1
        part = ("--eval-micro-batch-size", eval_micro) if eval_micro else ("--micro-batch-size", micro)
        found += _count(*whole, *part, 1, lanes)[1]
    return num, found


def _length(args: Namespace) -> list[str]:
    if args.train_iters is None and args.train_samples is None:
        return ["--train-iters is missing; say how many iterations to train (or how many samples, with --train-samples)"]
    return below_one({"--train-iters": args.train_iters, "--train-samples": args.train_samples})


def _count(flag: str, batch: int, micro_flag: str, micro: int, num_replicas: int, lanes: int) -> tuple[int, list[str]]:
    """Return the number of microbatches in `batch` samples, or 0 and the mistake in a list.

    `flag` and `micro_flag` are the flags that the mistake names. Each replica needs a microbatch.
    """
    one = micro * lanes
    of = f"{micro_flag} {micro}" + (f" x --lanes {lanes}" if lanes > 1 else "")
    if batch < 1 or batch % one:
        return 0, [f"{flag} {batch} is not a multiple of {of} = {one}, the samples of a microbatch; change one of them"]
    if batch // one < num_replicas:
        return 0, [
            f"{flag} {batch} is {counted(batch // one, 'microbatch', 'microbatches')} of {of}, fewer than the "
            f"{num_replicas} replicas; raise it to at least {num_replicas * one}, or use fewer replicas"
        ]
    return batch // one, []


def _saving(args: Namespace) -> list[str]:
    if args.save is None or (args.save_interval is not None and args.save_interval > 0):
        return []
    return ["--save needs --save-interval, and that of at least 1; say every how many iterations to save"]


def _without_package(args: Namespace) -> list[str]:
    """Return one line for each flag whose package is missing or too old."""
    lacking = packages.mistakes(packages.TENSORBOARD) if args.tensorboard_dir is not None else []
    found = [f"--tensorboard-dir: {line}, or leave the flag out" for line in lacking]
    if args.optimizer not in packages.BUILT_IN:
        found += [f"--optimizer {args.optimizer}: {line}, or use adam" for line in packages.mistakes(packages.OPTIMIZERS)]
    return found


def _unwritable(args: Namespace) -> list[str]:
    """Return one line for each folder that cannot be created or written.

    The job would notice only when it first writes there, at the latest at its first checkpoint. A
    name with `://` is not checked.
    """
    found = []
    folders = {"--save": args.save, "--tensorboard-dir": args.tensorboard_dir, "--data-cache-path": args.data_cache_path}
    for flag, folder in folders.items():
        if folder is None or "://" in folder:
            continue
        there = os.path.abspath(folder)
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        if not os.path.isdir(there):
            found.append(f"{flag} {folder} cannot be made: {there} is no folder; give another")
        elif not os.access(there, os.W_OK | os.X_OK):
            found.append(f"{flag} {folder} cannot be written: no permission in {there}; give another")
    return found
