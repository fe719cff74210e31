"""A command line is judged before any worker starts: what is wrong, with the flag and the remedy, and nothing else."""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recover.cli.data import write_dataset
from megatron_recover.config import RecoverConfig
from megatron_recover.deadlines import DEFAULT_S
from megatron_recover.megatron.checkpoint import disk_format
from megatron_recover.megatron.launch.arguments import (
    FSDP2_REFUSALS,
    REFUSALS,
    Refusal,
    adapt,
    fsdp2_notes,
    gpu_refusals,
    kernel_refusals,
    refusals,
)
from megatron_recover.megatron.launch.preflight import FLAGS, Preflight, preflight
from megatron_recover.trace import Layout


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "text.bin").touch()
    (tmp_path / "text.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1000, 1001))
    return str(tmp_path / "text")


def judge(data: str, flags: str = "", *, replicas: int = 2, lanes: int = 1) -> Preflight:
    base = f"--num-layers 4 --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 16 --data-path {data} "
    base += "--train-iters 10 --eval-interval 10 "
    return preflight((base + flags).split(), num_replicas=replicas, lanes=lanes)


def refused(data: str, flags: str, **shape: int) -> list[str]:
    with pytest.raises(ValueError) as refusal:
        judge(data, flags, **shape)
    return str(refusal.value).splitlines()


def test_layout_of_a_job(data: str) -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --seed 7"
    found = judge(data, flags + " --recover-determinism exact", replicas=3, lanes=2)
    assert found.layout == Layout(tp=2, pp=2, cp=1, lanes=2, vpp=2)
    assert (found.config.determinism, found.seed, found.num_microbatches) == ("exact", 7, 4)


@pytest.mark.parametrize(
    ("flags", "lanes", "least"),
    [
        ("", 1, 8),
        ("", 2, 4),
        ("--step-batch-size-schedule 64:8,0:16,1K:32", 2, 2),
        ("--step-batch-size-schedule 0:16,64:2", 2, 1),
    ],
)
def test_the_fewest_microbatches_of_a_step_are_those_of_the_smallest_batch(
    data: str, flags: str, lanes: int, least: int
) -> None:
    assert judge(data, flags, lanes=lanes).least_microbatches == least


@pytest.mark.parametrize(
    ("flags", "shape", "expected"),
    [
        ("--global-batch-size 4", {"replicas": 3}, "--global-batch-size 4 is 2 microbatches"),
        ("--global-batch-size 15", {}, "--global-batch-size 15 is not a multiple of --micro-batch-size 2"),
        ("", {"lanes": 3}, "--global-batch-size 16 is not a multiple of --micro-batch-size 2 x --lanes 3"),
        ("", {"replicas": 0}, "--replicas is 0"),
        ("--micro-batch-size x", {}, "--micro-batch-size: invalid int value"),
        ("--pipeline-model-parallel-size 3", {}, "--pipeline-model-parallel-size 3 does not divide --num-layers 4"),
        ("--tensor-model-parallel-size 3", {}, "--tensor-model-parallel-size 3 does not divide --num-attention-heads 4"),
        ("--tensor-model-parallel-size 0", {}, "--tensor-model-parallel-size is 0"),
        ("--num-layers-per-virtual-pipeline-stage 1", {}, "needs --pipeline-model-parallel-size of at least 2"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", {}, "does not divide the 2 layers"),
        ("--expert-model-parallel-size 2", {}, "--expert-model-parallel-size 2 does not divide"),
        ("--eval-global-batch-size 5", {}, "--eval-global-batch-size 5 is not a multiple"),
        ("--eval-global-batch-size 5", {}, "5 is not a multiple of --micro-batch-size 2 = 2"),
        ("--eval-micro-batch-size 0", {}, "--eval-micro-batch-size is 0; it must be at least 1"),
        ("--eval-global-batch-size 0", {}, "--eval-global-batch-size is 0; it must be at least 1"),
        ("--eval-micro-batch-size 3", {}, "--global-batch-size 16 is not a multiple of --eval-micro-batch-size 3 = 3"),
        ("--eval-micro-batch-size 3 --eval-global-batch-size 4", {}, "--eval-global-batch-size 4 is not a multiple of --eval"),
        ("--step-batch-size-schedule 0:2,10:16", {}, "--step-batch-size-schedule 2 is 1 microbatch"),
        ("--data-path /nowhere/text", {}, "megatron-recover data --output /nowhere/text"),
        ("--data-path 0.5 {data} 0.5 /nowhere/text", {}, "/nowhere/text.bin and /nowhere/text.idx not found"),
        ("--data-path {data}.bin", {}, "text.bin: name the data without .bin, as "),
        ("--data-path {data}.idx", {}, "text.idx: name the data without .idx, as "),
        ("--data-path", {}, "--data-path is missing"),
        ("--train-iters 0", {}, "--train-iters is 0; it must be at least 1"),
        ("--eval-interval 0", {}, "--eval-interval is missing or below 1; Megatron divides by it even with --eval-iters 0"),
        ("--split 9999,1,0", {}, "--split 9999,1,0 leaves none of the 1000 documents"),
        ("--split 90,0,10", {}, "--split 90,0,10 has nothing for validation, and --eval-iters is 100; give it a share, or set"),
        ("--split 0,5,5", {}, "--split 0,5,5 has nothing for training; give it a share"),
        ("--split 90,5,5,5", {}, "--split 90,5,5,5 does not give the shares"),
        ("--split 90,5,..", {}, "--split 90,5,.. does not give the shares"),
        ("--split 90,5,5-", {}, "--split 90,5,5- does not give the shares"),
        ("--split 0", {}, "--split 0 does not give the shares"),
        ("--train-data-path {data}", {}, "--data-path and --train-data-path exclude each other"),
        ("--data-args-path /nowhere", {}, "--data-args-path /nowhere cannot be read (No such file or directory)"),
        ("--data-args-path /tmp", {}, "--data-args-path /tmp cannot be read (Is a directory)"),
        ("--hidden-size 30", {}, "--num-attention-heads 4 does not divide --hidden-size 30; change one of them"),
        ("--num-attention-heads 0", {}, "--num-attention-heads is 0; it must be at least 1"),
        ("--group-query-attention --num-query-groups 3", {}, "--num-query-groups 3 does not divide --num-attention-heads 4"),
        ("--step-batch-size-schedule few", {}, "--step-batch-size-schedule few is no list of THRESHOLD:BATCH"),
        ("--step-batch-size-schedule 10:16,0:2", {}, "--step-batch-size-schedule 2 is 1 microbatch"),
        ("--step-batch-size-schedule 0:4 --eval-micro-batch-size 4", {}, "--micro-batch-size 2 is not a multiple"),
        ("--recover-min-replica 1", {}, "did you mean --recover-min-replicas?"),
        ("--recover-min-replicas 3", {}, "--recover-min-replicas is 3, but the job starts with 2 replicas; lower it"),
        ("--recover-deadline-s 0", {}, "--recover-deadline-s is 0; it must be at least 20 and below 1000000 seconds"),
        ("--recover-deadline-s nan", {}, "--recover-deadline-s is nan; it must be at least 20 and below 1000000 seconds"),
        ("--recover-deadline-s inf", {}, "--recover-deadline-s is inf"),
        ("--recover-heal-budget -1", {}, "--recover-heal-budget is -1; it must be 0 (set aside for good at once) or more"),
        (f"--recover-heal-budget {2**63}", {}, f"{2**63}, which does not fit into 64 bits; give {2**63 - 1} or less"),
        ("--vocab-size 0", {}, "--vocab-size is 0; it must be at least 1"),
        ("--log-interval 0", {}, "--log-interval is 0; it must be at least 1"),
        ("--recover-determinism sometimes", {}, "--recover-determinism: invalid choice"),
    ],
)
def test_mistakes_are_named(flags: str, shape: dict[str, int], expected: str, data: str) -> None:
    [line] = refused(data, flags.format(data=data), **shape)
    assert expected in line


def test_a_mistake_in_the_batch_of_an_evaluation_names_only_flags_of_the_command_line(data: str) -> None:
    for flags in ("--eval-micro-batch-size 3", "--eval-global-batch-size 5"):
        [line] = refused(data, flags)
        assert [word for word in line.split() if word.startswith("--eval")] == [flags.split()[0]]


def test_all_mistakes_at_once(data: str) -> None:
    lines = refused(data, "--global-batch-size 2 --data-path /nowhere --qk-clip --recover-min-replicas 9")
    assert len(lines) == 4
    zeros = "--recover-min-replicas 0 --recover-bucket-elements 0 --recover-digest-interval -1 --recover-tree-above 0"
    assert len(refused(data, zeros)) == 4


def test_a_value_of_a_wrong_type_hides_no_other_mistake(data: str) -> None:
    recover = "--recover-min-replicas=two --recover-determinism sometimes --recover-bucket-elements 0 --recover-min-replica 1"
    lines = refused(data, f"{recover} --global-batch-size 2 --qk-clip")
    assert [line.split()[0].strip(":") for line in lines] == [
        "--recover-min-replicas", "--recover-determinism", "--recover-min-replica", "--qk-clip",
        "--recover-bucket-elements", "--global-batch-size",
    ]  # fmt: skip
    assert len(refused(data, f"{recover} --num-layers few --seed")) == 6


def test_a_job_that_saves_says_how_often(data: str, tmp_path: Path) -> None:
    for flags in ("", " --save-interval 0"):
        assert refused(data, f"--save {tmp_path}{flags}") == [
            "--save needs --save-interval, and that of at least 1; say every how many iterations to save"
        ]
    judge(data, f"--save {tmp_path} --persistent-save-interval 5")


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir", "--data-cache-path"])
def test_folders_are_tried_before_a_job_needs_them(
    flag: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    interval = "--save-interval 1 " if flag == "--save" else ""
    judge(data, f"{interval}{flag} {tmp_path / 'new' / 'folder'}")
    assert list(tmp_path.glob("new")) == [], "judging made it"
    assert refused(data, f"{interval}{flag} {file}/x") == [f"{flag} {file}/x cannot be made: {file} is no folder; give another"]
    monkeypatch.setattr("os.access", lambda path, mode: path != str(tmp_path))  # root may write everywhere
    assert refused(data, f"{interval}{flag} {tmp_path}/x") == [
        f"{flag} {tmp_path}/x cannot be written: no permission in {tmp_path}; give another"
    ]


def test_index_must_be_one(data: str) -> None:
    Path(f"{data}.idx").write_bytes(b"text")
    assert "no index of Megatron's" in refused(data, "")[0]
    Path(f"{data}.idx").unlink()
    assert "text.idx not found" in refused(data, "")[0]


def test_header_is_read_as_megatron_writes_it(tmp_path: Path) -> None:
    """With 6 documents 90,5,5 leaves nothing to test on; without evaluation nobody asks for it."""
    prefix = tmp_path / "json"
    num_documents, _ = write_dataset(prefix, iter(sorted(Path(argparse.__file__).parent.glob("json/*.py"))))
    [line] = refused(str(prefix), "--split 90,5,5")
    assert f"none of the {num_documents} documents of {prefix} for testing" in line
    judge(str(prefix), "--split 90,5,5 --eval-iters 0")


VALUES = {
    "--moe-router-load-balancing-type": "global_aux_loss",
    "--fp8-format": "hybrid",
    "--fp4-format": "e2m1",
    "--ckpt-convert-format": "torch",
    "--cuda-graph-impl": "local",
    "--dataloader-inter-document-masking": "",
    "--rampup-batch-size": "2 2 100",
    "--num-workers": "-1",
    "--ckpt-format": "fsdp_dtensor",
    "--yaml-cfg": "job.yaml",
}
"""Values that are refused, of flags that take one and for which 4 is none."""
TOGETHER = {
    "--async-save": "--ckpt-format torch",
    "--context-parallel-size": "--transformer-impl local",
    "--overlap-param-gather": "--optimizer muon",
    "--no-overlap-p2p-communication": (
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    ),
}
"""What a flag is refused with."""


@pytest.mark.parametrize("flag", [refusal.flag for refusal in REFUSALS])
def test_what_is_not_supported_is_refused_by_name(flag: str, data: str) -> None:
    takes_value = FLAGS[flag].get("action") is None
    argument = f"{flag} {VALUES.get(flag, '4')}" if takes_value else flag
    [line] = refused(data, f"{argument} {TOGETHER.get(flag, '')}", lanes=2)
    assert line.startswith(f"{flag} is not supported with replicas: ")
    assert "; " in line


FSDP2 = "--use-torch-fsdp2 --untie-embeddings-and-output-weights"
WITH_FSDP2 = {
    "--pipeline-model-parallel-size": "--pipeline-model-parallel-size 2",
    "--expert-model-parallel-size": "--expert-model-parallel-size 2",
    "--num-experts": "--num-experts 4",
    "--context-parallel-size": "--context-parallel-size 2 --transformer-impl transformer_engine",
    "--mtp-num-layers": "--mtp-num-layers 1",
    "--optimizer": "--optimizer sgd",
    "--save": "--save {folder} --save-interval 1 --tensor-model-parallel-size 2 --ckpt-format torch_dcp",
    "--load": "--load {folder} --tensor-model-parallel-size 2 --ckpt-format torch_dcp",
    "--ckpt-format": "--load {folder}",
    "--pretrained-checkpoint": "--pretrained-checkpoint {folder}",
}
"""What asks for the thing that is refused, where that is not the flag alone."""


@pytest.mark.parametrize("refusal", FSDP2_REFUSALS, ids=lambda refusal: refusal.flag)
def test_what_is_not_supported_with_fsdp2_is_refused_by_name(refusal: Refusal, data: str, tmp_path: Path) -> None:
    flags = f"{FSDP2} {WITH_FSDP2.get(refusal.flag, refusal.flag)}".format(folder=tmp_path)
    if not refusal.flag.startswith("--"):
        flags = "--use-torch-fsdp2"
    lines = refused(data, flags, lanes=2)
    assert lines == [f"{refusal.flag} is not supported with --use-torch-fsdp2: {refusal.because}; {refusal.instead}"]
    if refusal.flag not in (
        "--ckpt-format",
        "--load",
        "--pretrained-checkpoint",
        "a weight that embedding and output layer share",
    ):
        judge(data, flags.replace(FSDP2, "").replace("--ckpt-format torch_dcp", ""), lanes=2)


def test_what_is_supported_with_fsdp2_is_taken(data: str, tmp_path: Path) -> None:
    judge(data, f"{FSDP2} --bf16 --calculate-per-token-loss --overlap-grad-reduce --tensor-model-parallel-size 2", lanes=2)
    judge(data, f"{FSDP2} --save {tmp_path} --save-interval 1 --load {tmp_path} --ckpt-format torch_dcp --async-save", lanes=4)
    judge(data, FSDP2, lanes=1)
    assert refused(data, f"--ckpt-format torch_dcp --load {tmp_path}")[0].startswith("--ckpt-format is not supported with rep")


FORMATS = {"torch_dist": ["metadata.json", ".metadata"], "torch": ["mp_rank_00/"], "torch_dcp": [".metadata"], None: []}
"""What a checkpoint has, by its format."""


def checkpoint(path: Path, ckpt_format: str | None) -> Path:
    for name in FORMATS[ckpt_format]:
        if name.endswith("/"):
            (path / name).mkdir(parents=True)
            continue
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return path


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_the_format_of_a_checkpoint_is_what_megatron_takes_it_for(ckpt_format: str | None, tmp_path: Path) -> None:
    from megatron.training.checkpointing import _get_checkpoint_format

    path = checkpoint(tmp_path / "iter_0000002", ckpt_format)
    assert disk_format.format_of(path) == ckpt_format
    if ckpt_format is not None:
        assert _get_checkpoint_format(str(path), argparse.Namespace()) == ckpt_format


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
@pytest.mark.parametrize(
    ("tracker", "name", "flags"),
    [("2", "iter_0000002", ""), ("9", "iter_0000002", "--ckpt-step 2"), ("release", "release", "")],
)
def test_a_checkpoint_of_another_format_is_refused_with_fsdp2_before_any_rank_starts(
    tracker: str, name: str, flags: str, ckpt_format: str, data: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path / name, ckpt_format)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(f"{tracker}\n")
    [line] = refused(data, f"{FSDP2} --ckpt-format torch_dcp --load {tmp_path} {flags}", lanes=2)
    told = f"--load {tmp_path}: {name} has the format {ckpt_format}, and with --use-torch-fsdp2 Megatron loads torch_dcp alone"
    assert line.startswith(told)
    (tmp_path / name).rename(tmp_path / "old")
    checkpoint(tmp_path / name, "torch_dcp")
    judge(data, f"{FSDP2} --ckpt-format torch_dcp --load {tmp_path} {flags}", lanes=2)


@pytest.mark.parametrize(
    ("found", "wanted", "detects", "told"),
    [
        ("torch_dcp", "torch_dist", False, "which Megatron loads with --use-torch-fsdp2 alone; add --use-torch-fsdp2 and --"),
        ("torch_dcp", "torch", True, "which Megatron loads with --use-torch-fsdp2 alone; add --use-torch-fsdp2 and --"),
        ("torch_dist", "torch", False, "and --ckpt-format is torch; use --ckpt-format torch_dist"),
        ("torch_dist", "torch", True, ""),
        ("torch", "torch_dist", False, ""),
        (None, "torch_dist", False, ""),
    ],
)
@pytest.mark.parametrize("flag", ["load", "pretrained_checkpoint"])
def test_a_checkpoint_that_is_not_loaded_without_fsdp2_is_refused_by_the_dry_run(
    found: str | None, wanted: str, detects: bool, told: str, flag: str, tmp_path: Path
) -> None:
    """Only then all arguments are known: a script may set those for FSDP2."""
    checkpoint(tmp_path / "iter_0000003", found)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    folders = {"load": str(tmp_path / "none"), "pretrained_checkpoint": None} | {flag: str(tmp_path)}
    args = argparse.Namespace(
        ckpt_format=wanted, auto_detect_ckpt_format=detects, ckpt_step=None, use_torch_fsdp2=False, **folders
    )  # fmt: skip
    lines = disk_format.refusals(args)
    start = f"--{flag.replace('_', '-')} {tmp_path}: iter_0000003 has the format {found}, {told}"
    assert [line.startswith(start) for line in lines] == ([True] if told else [])


@pytest.mark.parametrize(
    "flags",
    ["--optimizer-cpu-offload", "--phase-transition-iterations 5", "--vision-pretraining --vision-pretraining-type dino"],
)
def test_lost_replicas_are_replaced_unless_a_flag_forbids_it(flags: str, data: str) -> None:
    assert judge(data, "").config.heal == judge(data, "--recover-heal in-place").config.heal == "in-place"
    assert judge(data, flags).config.heal == judge(data, "--recover-heal off").config.heal == "off"


def test_a_flag_that_the_installed_megatron_has_dropped_is_no_defect_and_not_passed_over() -> None:
    lines = refusals(argparse.Namespace(), lanes=2)
    assert len(lines) == len([refusal for refusal in REFUSALS if not refusal.flag.startswith("--kitchen")])
    line = "--qk-clip cannot be judged: the installed Megatron has no argument `qk_clip`; see docs/how_to/"
    assert [line for each in lines if each.startswith(line)] == [line]


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-load-balancing-type aux_loss seq_aux_loss",
        "--ddp-average-in-collective",
        "--no-overlap-p2p-communication",
        "--context-parallel-size 2 --seq-length 64",
        "--dataloader-type single --ckpt-format torch --cuda-graph-impl none",
        "--dataloader-type cyclic --tp-comm-overlap --check-for-large-grads --profile --use-pytorch-profiler",
        "--use-distributed-optimizer --calculate-per-token-loss --bf16 --log-throughput --swiglu",
    ],
)
def test_what_is_supported_is_taken(flags: str, data: str) -> None:
    judge(data, flags)


@pytest.mark.parametrize(
    ("given", "lanes", "expected"),
    [
        ({"overlap_param_gather": True}, 1, {"overlap_param_gather": False}),
        ({"overlap_param_gather": True}, 2, {"overlap_param_gather": True}),  # and refused
        ({"overlap_param_gather_with_optimizer_step": True}, 1, {"overlap_param_gather_with_optimizer_step": False}),
        ({"rerun_mode": "validate_results"}, 2, {"rerun_mode": "disabled"}),
        ({"distributed_timeout_minutes": 60}, 1, {"distributed_timeout_minutes": 10}),
        ({"log_energy": True, "log_progress": True}, 1, {"log_energy": False, "log_progress": False}),
        ({"check_weight_hash_across_dp_replicas_interval": 5}, 2, {"check_weight_hash_across_dp_replicas_interval": None}),
        ({"tp_comm_overlap": True}, 1, {"tp_comm_overlap": False}),
        ({"dataloader_type": "cyclic", "data_sharding": False}, 1, {"dataloader_type": "cyclic", "data_sharding": True}),
        ({}, 2, {}),
    ],
)
def test_what_means_nothing_in_a_replica_has_no_effect_and_is_told(
    given: dict[str, object], lanes: int, expected: dict[str, object]
) -> None:
    """Each name is one of Megatron's own arguments, whose defaults need no adaptation."""
    from megatron.training.arguments import add_megatron_arguments

    plain = vars(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])) | {
        "rerun_mode": "disabled"
    }
    args = argparse.Namespace(**plain | given)
    lines = adapt(args, lanes=lanes, replica=1, replicas=2)
    assert vars(args) == plain | expected
    assert len(lines) == sum(plain[name] != given[name] and expected[name] != given[name] for name in given)
    assert all(" has no effect with replicas: " in line for line in lines)


@pytest.mark.parametrize(
    ("fsdp2", "bf16", "in_fp32", "lanes", "told"),
    [
        (False, True, True, 1, []),
        (True, False, True, 2, []),
        (True, False, True, 1, ["shards nothing"]),
        (True, True, True, 1, ["shards nothing", "sums gradients in fp32"]),
        (True, True, False, 2, ["--grad-reduce-in-bf16 sums"]),
    ],
)
def test_what_fsdp2_does_that_is_not_expected_is_told(
    fsdp2: bool, bf16: bool, in_fp32: bool, lanes: int, told: list[str]
) -> None:  # fmt: skip
    args = argparse.Namespace(use_torch_fsdp2=fsdp2, bf16=bf16, accumulate_allreduce_grads_in_fp32=in_fp32)
    lines = fsdp2_notes(args, lanes=lanes)
    assert len(lines) == len(told) and all(word in line for word, line in zip(told, lines, strict=True))


@pytest.mark.parametrize(("replica", "replicas", "kept"), [(0, 2, True), (1, 2, False), (0, 1, True)])
def test_one_replica_is_profiled_and_one_replica_alone_overlaps_what_tensor_parallel_ranks_send(
    replica: int, replicas: int, kept: bool
) -> None:
    from megatron.training.arguments import add_megatron_arguments

    given = ["--profile", "--tp-comm-overlap", "--rerun-mode", "disabled"]
    args = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(given)
    lines = adapt(args, lanes=1, replica=replica, replicas=replicas)
    assert (args.profile, args.tp_comm_overlap) == (kept, replicas == 1)
    assert lines == [] if replicas == 1 else [line.split(":")[0] for line in lines] == [
        "--tp-comm-overlap has no effect with replicas", "--profile has no effect in other replicas than 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "heal"),
    [
        ("", "in-place"),
        ("--recover-heal off", "off"),
        ("--optimizer-cpu-offload", "off"),
        ("--phase-transition-iterations 5", "off"),
        ("--vision-pretraining --vision-pretraining-type dino", "off"),
        ("--vision-pretraining", "in-place"),
    ],
)
def test_the_launcher_knows_whether_lost_replicas_are_replaced(data: str, flags: str, heal: str) -> None:
    assert judge(data, flags).config.heal == heal


def test_flags_are_declared_as_megatron_declares_them() -> None:
    from megatron.training.arguments import add_megatron_arguments

    actions = {
        option: action
        for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions
        for option in action.option_strings
    }
    parser = argparse.ArgumentParser()
    for flag, declaration in FLAGS.items():
        ours = parser.add_argument(flag, **declaration)
        if flag.startswith("--kitchen") and flag not in actions:  # Megatron has it where kitchen is installed
            continue
        upstream = actions[flag]
        assert (ours.dest, ours.nargs) == (upstream.dest, upstream.nargs), flag
        assert ours.default == upstream.default, flag


@pytest.mark.parametrize("words", ["{data} {small}", "0.5 {data} 0.5 {small}"])
def test_every_data_set_of_a_blend_has_something_in_every_split(words: str, data: str, tmp_path: Path) -> None:
    small = _index(tmp_path / "small", 1)
    lines = refused(data, "--data-path " + words.format(data=data, small=small) + " --split 8,1,1")
    assert lines and all(f"none of the 1 documents of {small}" in line for line in lines)


def test_data_of_one_split_is_not_empty(data: str, tmp_path: Path) -> None:
    empty = _index(tmp_path / "empty", 0)
    flags = PLAIN + "--train-data-path {} --valid-data-path {} --eval-iters {}"
    for train, valid, evaluations in ((empty, data, 0), (data, empty, 1)):
        with pytest.raises(ValueError, match=f"{empty} has no documents"):
            preflight(flags.format(train, valid, evaluations).split(), num_replicas=2)
    preflight(flags.format(data, empty, 0).split(), num_replicas=2)


PLAIN = "--micro-batch-size 2 --global-batch-size 16 --train-iters 10 --eval-interval 10 "


def _refused_data(flags: str) -> str:
    with pytest.raises(ValueError) as refusal:
        preflight((PLAIN + flags).split(), num_replicas=2)
    return str(refusal.value)


def test_a_list_of_data_is_opened(data: str, tmp_path: Path) -> None:
    """Upstream looks for ever for a sample of an empty split, wherever its name stands."""
    listed, small = tmp_path / "list", _index(tmp_path / "small", 1)
    flag = f"--data-args-path {listed}"
    for text, flags, expected in (
        (f"0.5 {data}\n0.5 {small}\n", "--split 8,1,1", f"none of the 1 documents of {small} for "),
        (data, "", f"--split is missing; {flag} needs it"),
        ("/nowhere", "--split 8,1,1", f"{flag} /nowhere: /nowhere.bin and /nowhere.idx not found"),
        (" \n", "--split 8,1,1", f"{flag} names no data"),
        (data, "--split 8,0,1", "nothing for validation"),
    ):
        listed.write_text(text)
        assert expected in _refused_data(f"{flag} {flags}")
    listed.write_bytes(b"\xff\xfe")
    assert f"{flag} cannot be read (no text)" in _refused_data(flag)
    listed.write_text(f"0.5 {data} 0.5 {data}")
    preflight(f"{PLAIN} {flag} --split 8,1,1".split(), num_replicas=2)


def test_a_list_of_data_for_each_split_is_opened(data: str, tmp_path: Path) -> None:
    listed, empty = tmp_path / "list.json", _index(tmp_path / "empty", 0)
    flag = f"--per-split-data-args-path {listed}"
    for content, expected in (
        ({"train": [data], "valid": empty, "test": None}, f"{flag} {empty} has no documents"),
        ({"train": [data], "valid": [], "test": [data]}, "comes without data for validation, and --eval-iters is 100"),
        ({"train": None, "valid": [data], "test": []}, "comes without data for training"),
        ({"train": [data], "valid": [data]}, 'is not {"train": [PREFIX, ...], "valid": [...], "test": [...]} in JSON'),
        ({"train": 1, "valid": [data], "test": []}, "in JSON: Expected `str | array | null`, got `int`"),
        ([data], "in JSON: Expected `object`, got `array`"),
    ):
        listed.write_text(json.dumps(content))
        assert expected in _refused_data(flag)
    listed.write_text("train")
    assert "in JSON: Expecting value: line 1" in _refused_data(flag)
    listed.write_text(json.dumps({"train": f"0.5 {data} 0.5 {data}", "valid": [data], "test": None}))
    assert "--split 8,1,1 has no meaning" in _refused_data(f"{flag} --split 8,1,1")
    preflight(f"{PLAIN} {flag}".split(), num_replicas=2)


def test_a_split_that_nobody_reads_may_be_empty(data: str) -> None:
    judge(data, "--split 90,10,0")
    judge(data, "--split 100,0,0 --eval-iters 0")
    judge(data, "--train-data-path /nowhere --mock-data")


def _index(prefix: Path, num_documents: int) -> str:
    prefix.with_suffix(".bin").touch()
    prefix.with_suffix(".idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, num_documents, num_documents + 1))
    return str(prefix)


def test_needs_no_torch() -> None:
    code = (
        "import sys, megatron_recover.megatron.launch.preflight; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def on_gpus(
    shared: int = 1, *, num_ranks: int = 6, num_gpus: int, exact: bool = False, deterministic: bool = False
) -> list[str]:
    config = RecoverConfig(ranks_per_gpu=shared, determinism="exact" if exact else "fast")
    return gpu_refusals(config, num_ranks=num_ranks, num_gpus=num_gpus, deterministic=deterministic)


def test_ranks_need_gpus() -> None:
    assert on_gpus(1, num_gpus=0) == on_gpus(1, num_gpus=6) == on_gpus(4, num_gpus=2) == []
    [line] = on_gpus(4, num_ranks=9, num_gpus=2)
    assert "the job has 9 ranks, which need 3 GPUs, and there are 2" in line
    [line] = on_gpus(2, num_gpus=0)
    assert "--recover-ranks-per-gpu needs CUDA" in line


def test_where_gpus_are_too_few_the_variable_that_hides_some_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, named in ((None, ""), ("0,1", " (CUDA_VISIBLE_DEVICES is 0,1)")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        [line] = on_gpus(num_ranks=3, num_gpus=2)
        assert f"and there are 2{named}; use fewer" in line


def test_exact_needs_deterministic_kernels_on_a_gpu() -> None:
    [line] = on_gpus(num_gpus=6, exact=True)
    assert "add --deterministic-mode" in line
    assert on_gpus(num_gpus=6, exact=True, deterministic=True) == on_gpus(num_gpus=0, exact=True) == []


@pytest.mark.parametrize(("fused", "on_gpu", "installed", "refused"), [
    (True, True, False, True), (True, True, True, False), (False, True, False, False), (True, False, False, False),
])  # fmt: skip
def test_fused_gradients_need_apex_on_a_gpu(
    fused: bool, on_gpu: bool, installed: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it each rank raised as it made its model, after all replicas had started (seen on an H200)."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    found = kernel_refusals(argparse.Namespace(gradient_accumulation_fusion=fused), on_gpu=on_gpu)
    assert bool(found) == refused
    assert not refused or "add --no-gradient-accumulation-fusion" in found[0]


def test_nccl_needs_time_to_connect_on_a_gpu() -> None:
    def judged(deadline_s: float, num_gpus: int = 6) -> list[str]:
        return gpu_refusals(RecoverConfig(deadline_s=deadline_s), num_ranks=6, num_gpus=num_gpus, deterministic=False)

    assert judged(DEFAULT_S) == judged(250.0) == judged(20.0, num_gpus=0) == []
    [line] = judged(20.0)
    assert "--recover-deadline-s is 20, which leaves NCCL 1.2 s" in line and line.endswith("give at least 250")
    assert len(judged(249.0)) == 1


def test_the_length_of_training_is_needed(data: str) -> None:
    flags = f"--num-layers 4 --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 16 --data-path {data}"
    with pytest.raises(ValueError, match="--train-iters is missing; say how many iterations to train"):
        preflight(flags.split(), num_replicas=2)
    preflight([*flags.split(), "--train-samples", "160", "--eval-interval", "9"], num_replicas=2)
