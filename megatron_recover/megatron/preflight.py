"""Judges a Megatron command line before any worker starts: shapes, data, and what is not supported.

Reads only the flags that matter here, without torch and without Megatron (a second instead of ten), and leaves all others
to Megatron's own parser. It decides nothing: it returns the layout of a replica, or says everything that is wrong at once.
"""

from __future__ import annotations

import difflib
import os
import re
import struct
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec

from megatron_recover.config import RecoverConfig
from megatron_recover.megatron import seams
from megatron_recover.megatron.arguments import add_recover_arguments, flag_of, recover_config, refusals
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
    "--num-layers-per-virtual-pipeline-stage": _INT,
    "--num-virtual-stages-per-pipeline-rank": _INT,
    "--pipeline-model-parallel-layout": _TEXT,
    "--decoder-first-pipeline-num-layers": _INT,
    "--decoder-last-pipeline-num-layers": _INT,
    "--account-for-embedding-in-pipeline-split": _ON,
    "--account-for-loss-in-pipeline-split": _ON,
    "--num-layers": _INT,
    "--num-attention-heads": _INT,
    # Batch.
    "--micro-batch-size": _INT,
    "--global-batch-size": _INT,
    "--step-batch-size-schedule": _TEXT,
    "--rampup-batch-size": {"nargs": 3, "default": None},
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
    "--seed": {"type": int, "default": 1234},
    # What may be refused.
    "--moe-router-enable-expert-bias": _ON,
    "--moe-router-load-balancing-type": {"nargs": "+", "default": "aux_loss"},
    "--fp8-format": {"dest": "fp8", "default": None},
    "--fp4-format": {"dest": "fp4", "default": None},
    "--qk-clip": _ON,
    "--log-max-attention-logit": _ON,
    "--check-weight-hash-across-dp-replicas-interval": _INT,
    "--defer-embedding-wgrad-compute": _ON,
    "--overlap-moe-expert-parallel-comm": _ON,
    "--moe-expert-rank-capacity-factor": {"type": float, "default": None},
    "--skip-train": _ON,
    "--save-dgrads-interval": _INT,
    "--save-params-interval": _INT,
    "--save-activations-interval": _INT,
    "--save-tokens-per-expert-interval": _INT,
    "--ckpt-convert-format": _TEXT,
    "--moe-use-upcycling": _ON,
    "--record-memory-history": _ON,
    "--log-world-size-to-tensorboard": _ON,
    "--log-energy": _ON,
    "--ddp-average-in-collective": _ON,
    "--overlap-grad-reduce": _ON,
    "--overlap-param-gather": _ON,
    "--num-distributed-optimizer-instances": _ONE,
    "--use-megatron-fsdp": _ON,
    "--use-torch-fsdp2": _ON,
    "--save-wgrads-interval": _INT,
    "--cuda-graph-impl": {"default": "none"},
    "--enable-cuda-graph": _ON,
    "--external-cuda-graph": _ON,
    "--optimizer-cuda-graph": _ON,
    "--rerun-mode": {"default": None},
    "--error-injection-rate": {"type": int, "default": 0},
    "--inprocess-restart": _ON,
    "--enable-ft-package": _ON,
    "--log-straggler": _ON,
    "--adlr-autoresume": _ON,
    "--exit-signal-handler-for-training": _ON,
    "--dataloader-type": _TEXT,
    "--iterations-to-skip": {"nargs": "+", "type": int, "default": []},
    "--full-validation": _ON,
    "--multiple-validation-sets": _ON,
    "--hybrid-context-parallel": _ON,
    "--perform-rl-step": _ON,
    "--sft": _ON,
    "--mtp-num-layers": _INT,
    "--tensor-parallel-num-weight-shards": _INT,
    "--async-save": _ON,
    "--non-persistent-save-interval": _INT,
    "--ckpt-format": {"default": "torch_dist"},
    "--log-progress": _ON,
    "--wandb-project": _TEXT,
    "--yaml-cfg": _TEXT,
}
"""Megatron's flags that are judged here, declared as Megatron declares them (a test compares the two)."""

_INDEX_MAGIC: Final = b"MMIDIDX\x00\x00"
_INDEX_HEADER: Final = struct.Struct("<9sQBQQ")
"""Of an `.idx` file: magic, version, type of a token, number of sequences, number of documents."""
_DEFAULT_SPLIT: Final = "969, 30, 1"
"""Upstream's, where `--split` is missing."""


class Preflight(msgspec.Struct, frozen=True):
    """What the launcher learns from a command line that it may start."""

    layout: Layout
    config: RecoverConfig
    seed: int
    num_microbatches: int
    """M of the first training step."""
    batch_changes: bool = False
    """Whether later steps can have another M: a ramp-up or a schedule of the batch size."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("argument ", "", 1))


def preflight(argv: Sequence[str], *, num_replicas: int, lanes: int = 1) -> Preflight:
    """Judge `argv`, the flags after the training script's name, for a job of so many replicas with so many lanes each.

    Raises ValueError with one line per mistake, each with the offending flag and the remedy.
    """
    declared = seams.load()
    unsupported = seams.unsupported_version(declared)
    if unsupported:
        raise ValueError(seams.refusal(declared, unsupported))
    parser = _Parser(allow_abbrev=False, add_help=False)
    for flag, declaration in FLAGS.items():
        parser.add_argument(flag, **declaration)
    add_recover_arguments(parser)
    args, others = parser.parse_known_args(list(argv))
    found = [*_unknown(others), *refusals(args, lanes=lanes)]
    if num_replicas < 1 or lanes < 1:
        raise ValueError(f"--replicas is {num_replicas} and --lanes is {lanes}; both must be at least 1")
    settings = RecoverConfig()
    try:
        settings = recover_config(args)
    except ValueError as error:
        found.append(str(error))
    if settings.min_replicas > num_replicas:
        found.append(
            f"--recover-min-replicas is {settings.min_replicas}, but the job starts with --replicas {num_replicas}; lower it"
        )
    layout, wrong = _layout(args, lanes)
    num_microbatches, too_few = _num_microbatches(args, num_replicas, lanes)
    found += [*wrong, *too_few, *_data(args)]
    if found:
        raise ValueError("\n".join(found))
    batch_changes = args.rampup_batch_size is not None or args.step_batch_size_schedule is not None
    return Preflight(layout, settings, args.seed, num_microbatches, batch_changes)


def _unknown(others: Sequence[str]) -> list[str]:
    known = [flag_of(name) for name in RecoverConfig.__struct_fields__]
    found = []
    for word in others:
        flag = word.partition("=")[0]
        if flag.startswith("--recover-"):
            close = difflib.get_close_matches(flag, known, n=1)
            found.append(f"{flag} is unknown; " + (f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"))
    return found


def _layout(args: Namespace, lanes: int) -> tuple[Layout, list[str]]:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    found = [
        f"{flag} is {size}; it must be at least 1"
        for flag, size in (
            ("--tensor-model-parallel-size", tp),
            ("--pipeline-model-parallel-size", pp),
            ("--context-parallel-size", cp),
        )
        if size < 1
    ]
    if found:
        return Layout(tp=1, pp=1), found
    heads, ep = args.num_attention_heads, args.expert_model_parallel_size
    if heads is not None and heads % tp:
        found.append(f"--tensor-model-parallel-size {tp} does not divide --num-attention-heads {heads}; change one of them")
    if (tp * cp * lanes) % ep:
        found.append(
            f"--expert-model-parallel-size {ep} does not divide TP x CP x lanes = {tp} x {cp} x {lanes}; "
            "experts are spread inside a replica: raise --lanes of megatron-recover run"
        )
    vpp = 1
    uneven = (
        args.pipeline_model_parallel_layout,
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        args.account_for_embedding_in_pipeline_split or None,
        args.account_for_loss_in_pipeline_split or None,
    )
    if args.num_layers is not None and not any(setting is not None for setting in uneven):
        vpp, wrong = _num_chunks(args, pp)
        found += wrong
    elif args.num_virtual_stages_per_pipeline_rank is not None:
        vpp = args.num_virtual_stages_per_pipeline_rank
    return Layout(tp=tp, pp=pp, cp=cp, lanes=lanes, vpp=vpp), found


def _num_chunks(args: Namespace, pp: int) -> tuple[int, list[str]]:
    """Model chunks per stage of an even split, and what is wrong with it."""
    layers, per_chunk, chunks = (
        args.num_layers,
        args.num_layers_per_virtual_pipeline_stage,
        args.num_virtual_stages_per_pipeline_rank,
    )
    if layers % pp:
        return 1, [f"--pipeline-model-parallel-size {pp} does not divide --num-layers {layers}; change one of them"]
    if per_chunk is None and chunks is None:
        return 1, []
    flag = "--num-layers-per-virtual-pipeline-stage" if per_chunk is not None else "--num-virtual-stages-per-pipeline-rank"
    size, layers_of_stage = (per_chunk if per_chunk is not None else chunks), layers // pp
    if per_chunk is not None and chunks is not None:
        return 1, ["--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other"]
    if pp < 2:
        return 1, [f"{flag} needs --pipeline-model-parallel-size of at least 2"]
    if size < 1 or layers_of_stage % size:
        return 1, [f"{flag} {size} does not divide the {layers_of_stage} layers of a pipeline stage; change one of them"]
    return (layers_of_stage // size if per_chunk is not None else size), []


def _num_microbatches(args: Namespace, num_replicas: int, lanes: int) -> tuple[int, list[str]]:
    """M of the first step, and what is wrong with the batch sizes."""
    micro = args.micro_batch_size
    if micro is None or micro < 1:
        return 0, ["--micro-batch-size is missing or below 1; it is needed to count the microbatches of a step"]
    if args.step_batch_size_schedule is not None:
        first = re.match(r"\D*\d+\D+(\d+)", args.step_batch_size_schedule)
        batch, flag = (int(first.group(1)) if first else None), "--step-batch-size-schedule"
    elif args.rampup_batch_size is not None:
        batch, flag = int(args.rampup_batch_size[0]), "--rampup-batch-size"
    else:
        batch, flag = args.global_batch_size, "--global-batch-size"
    if batch is None:
        return 0, [f"{flag} is missing; it is the batch of the whole job, split over the replicas"]
    num, found = _count(flag, batch, "--micro-batch-size", micro, num_replicas, lanes)
    evaluated, eval_micro = args.eval_global_batch_size, args.eval_micro_batch_size
    if evaluated is not None or eval_micro is not None:
        _, wrong = _count(
            "--eval-global-batch-size", evaluated or args.global_batch_size or batch,
            "--eval-micro-batch-size", eval_micro or micro, 1, lanes,
        )  # fmt: skip
        found += wrong
    return num, found


def _count(flag: str, batch: int, micro_flag: str, micro: int, num_replicas: int, lanes: int) -> tuple[int, list[str]]:
    one = micro * lanes
    of = f"{micro_flag} {micro}" + (f" x --lanes {lanes}" if lanes > 1 else "")
    if batch < 1 or batch % one:
        return 0, [f"{flag} {batch} is not a multiple of {of} = {one}, the samples of a microbatch; change one of them"]
    if batch // one < num_replicas:
        return 0, [
            f"{flag} {batch} is {batch // one} microbatches of {of}, fewer than --replicas {num_replicas}; "
            f"raise it to at least {num_replicas * one}, or use fewer replicas"
        ]
    return batch // one, []


def _data(args: Namespace) -> list[str]:
    if args.mock_data:
        return []
    given = {
        "--data-path": args.data_path,
        "--train-data-path": args.train_data_path,
        "--valid-data-path": args.valid_data_path,
        "--test-data-path": args.test_data_path,
    }
    files = {"--data-args-path": args.data_args_path, "--per-split-data-args-path": args.per_split_data_args_path}
    found = [
        f"{flag} {path} does not exist; give a file that lists the data"
        for flag, path in files.items()
        if path is not None and not os.path.isfile(path)
    ]
    if not any(given.values()) and not any(files.values()):
        found.append("--data-path is missing; make data with 'megatron-recover data --output PREFIX' and give that PREFIX")
    for flag, words in given.items():
        for prefix in _prefixes(words or []):
            missing = [end for end in (".bin", ".idx") if "://" not in prefix and not os.path.isfile(prefix + end)]
            if missing:
                found.append(
                    f"{flag} {prefix}: {' and '.join(prefix + end for end in missing)} not found; "
                    f"make them with 'megatron-recover data --output {prefix} PATH...'"
                )
            elif "://" not in prefix:
                found += _splits(args, flag, prefix)
    return found


def _splits(args: Namespace, flag: str, prefix: str) -> list[str]:
    """Whether each split of one data set has something in it; upstream looks for a sample of an empty one for ever."""
    with open(prefix + ".idx", "rb") as file:
        header = file.read(_INDEX_HEADER.size)
    if len(header) < _INDEX_HEADER.size or not header.startswith(_INDEX_MAGIC):
        return [f"{flag} {prefix}: {prefix}.idx is no index of Megatron's; make it with 'megatron-recover data'"]
    num = _INDEX_HEADER.unpack(header)[3]
    if flag != "--data-path":  # one data set a split
        empty = not num and (flag == "--train-data-path" or args.eval_iters)
        return [f"{flag} {prefix} has no documents; make it with 'megatron-recover data'"] if empty else []
    split = args.split or _DEFAULT_SPLIT
    ratios = [float(ratio) for ratio in re.findall(r"[.0-9]+", split)]
    ends = [sum(ratios[: index + 1]) / (sum(ratios) or 1) for index in range(len(ratios))]
    return [
        f"--split {split} leaves none of the {num} documents of {prefix} for {name}; give more documents, or it a share of 0"
        for name, ratio, begin, end in zip(("training", "validation", "testing"), ratios, [0.0, *ends], ends, strict=False)
        if ratio > 0 and round(begin * num) == round(end * num) and (name == "training" or args.eval_iters)
    ]


def _prefixes(words: Sequence[str]) -> list[str]:
    """The data sets of a blend: every word, or every second one where the others are weights."""
    weights = words[::2] if len(words) % 2 == 0 else []
    return [*words[1::2]] if weights and all(_is_number(word) for word in weights) else [*words]


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) is not None
