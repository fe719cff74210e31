"""`megatron-recover plan`: its table, its choice, and its refusals; and once with a real script, from start to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_recover import cli
from megatron_recover.cli import plan, run_flags
from megatron_recover.megatron.launch.preflight import preflight
from megatron_recover.megatron.layout.sizes import Fsdp2, Layout, Sizes
from tests.megatron.test_layout import BF16, eight_billion

SCRIPT = "scripts/pretrain_gpt.py"
BATCH = "--micro-batch-size 1 --global-batch-size 128 --train-iters 1"


def told(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    """Run the verb; return exit code, output and the lines of its complaints."""
    try:
        code = cli.main(["plan", *words.split()])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    said = capsys.readouterr()
    return code, said.out, said.err.splitlines()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """Have the verb find the sizes of a model of 8 billion parameters; a test may put others in the list."""
    sizes = [eight_billion()]
    monkeypatch.setattr(plan, "read_sizes", lambda script, flags: sizes[0])
    return sizes


def test_the_layouts_that_fit_are_listed_and_the_best_is_chosen(
    measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(f"-- {SCRIPT} {BATCH} --bf16", capsys)
    assert (code, err) == (0, [])
    assert out.startswith("8.03 billion parameters on 8 GPUs of 80.0 GB, of which 72.0 GB may be used.")
    marked = [line.split() for line in out.splitlines() if line.startswith("* ")]
    assert marked[0][1:5] == ["2", "1", "2", "2"] and marked[0][-5:] == ["4", "GPUs", "(50%)", "1", "fits"]
    assert "too large" not in out and "layouts fit; --all prints all of them" in out
    command = f"megatron-recover run --replicas 2 --lanes 2 -- {SCRIPT} <your other flags> "
    assert f"{command}--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2\n" in out
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in out
    assert "takes up to 100% longer" in out and "survives 1 death." in out


def test_the_printed_layout_is_complete_so_that_it_overrides_the_flags_before_it() -> None:
    sizes = eight_billion(cp=2, expert_tp=1)
    sizes = msgspec.structs.replace(sizes, model=msgspec.structs.replace(sizes.model, num_experts=8))
    layout = Layout(replicas=2, tp=4, pp=2, cp=2, ep=2, expert_tp=1)
    assert plan.flags_of(layout, sizes) == (
        "--replicas 2",
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    )


def test_with_fsdp2_what_is_gathered_has_a_column_and_no_layout_has_a_pipeline(
    measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    titles = "result optimizer activations sums redirected peak recovery"
    assert titles in " ".join(told(f"-- {SCRIPT} {BATCH} --bf16", capsys)[1].split())
    numerics = msgspec.structs.replace(measured[0].numerics, gradient=2, step_copy=4, fsdp2=Fsdp2())
    measured[0] = msgspec.structs.replace(measured[0], numerics=numerics)
    flags = f"{BATCH} --bf16 --use-torch-fsdp2 --untie-embeddings-and-output-weights"
    code, out, err = told(f"-- {SCRIPT} {flags}", capsys)
    assert (code, err) == (0, []) and titles.replace("peak", "gathered peak") in " ".join(out.split())
    marked = [line.split() for line in out.splitlines() if line.startswith("* ")]
    assert marked[0][1:5] == ["2", "1", "1", "4"], "4 lanes: 2 would need 100 GB"
    found = json.loads(told(f"--json -- {SCRIPT} {flags}", capsys)[1])["layouts"]
    assert {each["pp"] for each in found} == {1} and len({(each["tp"], each["lanes"]) for each in found}) == len(found) > 3
    assert all(each["bytes"]["gathered"] for each in found)
    code, _, [line] = told(f"--gpu-memory 20GB -- {SCRIPT} {flags}", capsys)
    assert code == 2 and "--nodes" in line and "--use-distributed-optimizer" not in line


@pytest.mark.parametrize("cp", [1, 2])
def test_the_environment_that_megatron_wants_is_named_beside_the_command(
    cp: int, measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = eight_billion(cp=cp)
    without_pipeline = tuple(each for each in sizes.activations if each.pp == 1)
    measured[0] = msgspec.structs.replace(sizes, activations=without_pipeline if cp == 1 else sizes.activations)
    _, out, _ = told(f"-- {SCRIPT} {BATCH}", capsys)
    assert "Megatron wants CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment of this command" in out


def test_all_lists_what_does_not_fit_as_well(measured: list[Sizes], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(f"--all -- {SCRIPT} {BATCH}", capsys)
    assert code == 0 and "too large" in out and "--all" not in out


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "COLUMNS": "80"}])
def test_the_table_is_whole_however_narrow_the_terminal_is(
    environment: dict[str, str], measured: list[Sizes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sizes = eight_billion(cp=2, expert_tp=1, sequence_parallel=True)
    layer = msgspec.structs.replace(sizes.model.layers[0], split=10**14)
    model = msgspec.structs.replace(sizes.model, num_experts=8, layers=(layer,) * 32)
    measured[0] = msgspec.structs.replace(sizes, model=model)
    _, out, _ = told(f"--all --nodes 16 --gpu-memory 9000000GB -- {SCRIPT} {BATCH}", capsys)
    lines = out.splitlines()
    header = next(number for number, line in enumerate(lines) if "weights" in line)
    titles = "replicas TP PP CP EP lanes weights gradient result optimizer activations sums redirected peak recovery"
    assert " ".join(lines[header].split()) == f"{titles} a death takes deaths" and len(lines[header]) > 160
    rows = lines[header + 1 : lines.index("", header)]
    assert len(rows) > 50 and all(re.search(r"GPUs? \(.+%\) +\d+  (fits|too large) *$", row) for row in rows)
    assert [row for row in rows if row.startswith("* ")] == rows[:1]


def test_json_has_the_bytes_of_every_layout(measured: list[Sizes], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(f"--json --nodes 2 --gpu-memory 80GiB -- {SCRIPT} {BATCH}", capsys)
    found = json.loads(out)
    assert code == 0 and found["gpus"] == {"num_nodes": 2, "per_node": 8, "bytes": 80 * 2**30}
    assert [row["chosen"] for row in found["layouts"]] == [True] + [False] * (len(found["layouts"]) - 1)
    assert {"weights", "gradient", "result", "optimizer", "peak", "recovery"} < found["layouts"][0]["bytes"].keys()


def test_where_none_fits_the_smallest_is_shown_with_the_remedy(
    measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(f"--gpu-memory 24GB -- {SCRIPT} {BATCH}", capsys)
    assert code == 2 and out.count("too large") == 3 and "Chosen" not in out
    assert err[0].startswith("megatron-recover plan: no layout fits: the smallest needs ") and "(--nodes)" in err[0]


NO_SCRIPT = (
    "the training script is missing; write it and its flags behind those of plan, for example: scripts/pretrain_gpt.py ..."
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", NO_SCRIPT),
        ("--", NO_SCRIPT),
        ("-- no.py", "there is no training script no.py; write its path behind the flags of plan"),
        (f"--num-layers 2 -- {SCRIPT}",
         "--num-layers is the trainer's; write it behind the script's name"),
        (f"-- {SCRIPT} --train-iters 1 --global-batch-size 8",
         "--micro-batch-size is missing or below 1; it is needed to count the microbatches of a step"),
        (f"-- {SCRIPT} {BATCH} --qk-clip",
         "--qk-clip is not supported with replicas: it rescales weights by a maximum over one replica's samples, so the "
         "replicas drift apart; leave it out"),
        (f"-- {SCRIPT} {BATCH} --num-layers 4 --num-virtual-stages-per-pipeline-rank 3",
         "--num-virtual-stages-per-pipeline-rank 3 does not divide the 2 layers of a pipeline stage; change one of them"),
        (f"--gpu-memory 80 -- {SCRIPT}", "--gpu-memory: 80 is no memory of a GPU; write one like 80GB or 80GiB"),
        (f"--gpu-memory 0GB -- {SCRIPT}", "--gpu-memory: 0GB is no memory of a GPU; write one like 80GB or 80GiB"),
        (f"--nodes 0 -- {SCRIPT}", "--nodes: 0 is no number of at least 1"),
        (f"--gpu-per-node 4 -- {SCRIPT}", "--gpu-per-node is unknown; did you mean --gpus-per-node?"),
        (f"--gpus-per-node 1 -- {SCRIPT} {BATCH}",
         "the model allows no layout that uses all of 1 GPU and survives a death: TP x PP x CP x lanes has to divide them; "
         "change --nodes"),
        (f"--lanes 2 --run-dir=x -- {SCRIPT} {BATCH}",
         "--lanes is a flag of run; plan compares all numbers of lanes: leave it out\n"
         "--run-dir is a flag of run; plan starts no rank: leave it out"),
        (f"--replicas 2 {SCRIPT} {BATCH}",
         "--replicas is a flag of run; plan compares all numbers of replicas: leave it out"),
        (f"-- {SCRIPT} --micro-batch-size 1 --global-batch-size 1 --train-iters 1",
         "run would refuse every layout; that of --replicas 2 --lanes 1, since\n"
         "--global-batch-size 1 is 1 microbatch of --micro-batch-size 1, fewer than the 2 replicas; raise it to at least 2, "
         "or use fewer replicas"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_the_remedy(
    words: str, expected: str, measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(words, capsys) == (2, "", [f"megatron-recover plan: {line}" for line in expected.splitlines()])


@pytest.mark.parametrize(
    ("cp", "pp", "is_overlapped", "expected"),
    [
        (2, 1, True, ["=1 in", "With that,\n  --overlap-grad-reduce overlaps nothing."]),
        (2, 1, False, ["=1 in"]),
        (1, 2, True, ["--overlap-grad-reduce overlaps nothing on a GPU without CUDA_DEVICE_MAX_CONNECTIONS=32 in"]),
        (1, 2, False, []),
        (1, 1, True, []),
    ],
)
def test_the_environment_in_which_sums_overlap_is_named(cp: int, pp: int, is_overlapped: bool, expected: list[str]) -> None:
    numerics = msgspec.structs.replace(BF16, is_overlapped=is_overlapped)
    said = plan._environment(Layout(replicas=2, cp=cp, pp=pp), numerics)
    assert all(each in said for each in expected) and bool(said) == bool(expected)
    assert ("overlap" in said) == (is_overlapped and bool(expected))


@pytest.mark.parametrize(("tp", "is_overlapped"), [(1, False), (1, True), (2, False), (2, True)])
def test_the_environment_that_megatron_refuses_with_fsdp2_is_named(tp: int, is_overlapped: bool) -> None:
    numerics = msgspec.structs.replace(BF16, is_overlapped=is_overlapped, fsdp2=Fsdp2())
    said = plan._environment(Layout(replicas=2, tp=tp, lanes=2), numerics)
    assert ("refuses CUDA_DEVICE_MAX_CONNECTIONS=1" in said) == (tp > 1)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=32" in said) == (tp == 1 and is_overlapped)
    assert ("overlaps nothing" in said) == is_overlapped


@pytest.mark.parametrize(("nodes", "is_told"), [(1000, False), (1001, True)])
def test_more_replicas_than_were_ever_measured_are_told(
    nodes: int, is_told: bool, measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--micro-batch-size 1 --global-batch-size 2000 --train-iters 1"
    _, out, _ = told(f"--nodes {nodes} --gpus-per-node 1 --gpu-memory 900GB -- {SCRIPT} {flags}", capsys)
    assert ("No measurement has more than 1,000 replicas" in out) == is_told


def test_every_flag_of_run_is_known_to_be_one() -> None:
    options = {option for action in run_flags.parser()._actions for option in action.option_strings}
    assert options - {"-h", "--help", "-m", "--module"} == {*plan._OF_RUN}


def test_the_megatron_of_the_scripts_own_checkout_is_judged_as_run_judges_it(tmp_path: Path) -> None:
    """Also a module's, of which the working directory counts."""
    core, training = (tmp_path / "megatron" / part for part in ("core", "training"))
    for part in (core, training):
        part.mkdir(parents=True)
        (part / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 0\nPRE_RELEASE = ''\n")
    (script := tmp_path / "train.py").touch()
    megatron = f"megatron-core is 0.18.0 in {tmp_path}, but 0.19 or newer is needed, and older than 0.20; check out a release "
    for command, cwd in (
        (["run", "--replicas", "2", str(script)], Path.cwd()), (["plan", str(script)], Path.cwd()),
        (["plan", "-m", "train"], tmp_path),
    ):  # fmt: skip
        refused = subprocess.run(
            [sys.executable, "-m", "megatron_recover", *command, *BATCH.split()], cwd=cwd, capture_output=True, text=True,
            timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        assert refused.returncode == 2 and refused.stderr.startswith(f"megatron-recover {command[0]}: {megatron}"), refused


def test_a_module_is_planned_like_a_file(
    measured: list[Sizes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(plan, "read_sizes", lambda *words: seen.append([*words]) or measured[0])
    for flag in ("-m", "--module"):
        code, out, err = told(f"{flag} scripts.pretrain_gpt {BATCH} --bf16", capsys)
        assert (code, err) == (0, []) and "megatron-recover run --replicas 2 --lanes 2 -m -- scripts.pretrain_gpt <your" in out
    assert seen == [["-m", ["scripts.pretrain_gpt", *BATCH.split(), "--bf16"]]] * 2


def test_a_module_that_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MEASURE", "this")
    with pytest.raises(ValueError, match="^my_package.train never calls Megatron's pretrain"):
        plan.read_sizes("-m", ["my_package.train"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"min_replicas": 8}, "; lower --recover-min-replicas"),
        ({"cp": 8}, "; lower --context-parallel-size"),
    ],
)
def test_where_no_layout_is_allowed_the_flag_that_is_the_reason_is_named(
    given: dict[str, int], expected: str, measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    measured[0] = eight_billion(**given)
    code, _, [line] = told(f"-- {SCRIPT} {BATCH}", capsys)
    assert code == 2 and line.endswith(expected)


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ("--ddp-average-in-collective", "lanes == 1"),
        ("--eval-global-batch-size 2", "lanes < 4"),
        ("--global-batch-size 4", "replicas * lanes <= 4"),
        ("--num-layers 32 --num-layers-per-virtual-pipeline-stage 8", "1 < pp < 8"),
    ],
)
def test_no_layout_is_listed_that_run_refuses(
    flags: str, shape: str, measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(words: str) -> list[dict[str, int]]:
        return json.loads(told(f"--json --gpu-memory 900GB -- {SCRIPT} {words}", capsys)[1])["layouts"]

    everything = listed(BATCH)
    found = listed(f"{BATCH} {flags}")
    names = ("replicas", "tp", "pp", "lanes")
    chosen = [tuple(each[name] for name in names) for each in found]
    assert sorted(chosen) == sorted(tuple(each[name] for name in names) for each in everything if eval(shape, {}, each))
    for replicas, tp, pp, lanes in chosen:
        layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --mock-data"
        given = [*BATCH.split(), "--eval-interval", "9", *flags.split(), *layout.split()]
        preflight(given, num_replicas=replicas, lanes=lanes)


def test_the_batch_of_a_schedule_is_that_of_its_first_step(measured: list[Sizes], capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--micro-batch-size 1 --train-iters 1 --step-batch-size-schedule 0:4,10:128"
    code, out, _ = told(f"--json --gpu-memory 900GB -- {SCRIPT} {flags}", capsys)
    found = json.loads(out)["layouts"]
    assert code == 0 and max(each["replicas"] * each["lanes"] for each in found) == 4


@pytest.mark.parametrize(
    ("flags", "splits", "expected"),
    [
        ("--bf16 --recompute-activations", False, ["--nodes", "--grad-reduce-in-bf16", "--sequence-parallel"]),
        ("--bf16 --grad-reduce-in-bf16 --recompute-granularity selective", True, ["--nodes"]),
        ("--fp16", True, ["--nodes", "--recompute-activations"]),
        ("", False, ["--nodes", "--sequence-parallel", "--recompute-activations"]),
    ],
)
def test_only_flags_that_would_lower_the_memory_are_offered(
    flags: str, splits: bool, expected: list[str], measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = eight_billion(sequence_parallel=splits)
    gradient = 2 if "--grad-reduce-in-bf16" in flags else 4
    fewer = () if splits and "--recompute" in flags else tuple(
        msgspec.structs.replace(each, bytes=each.bytes // 2) for each in sizes.activations
    )  # fmt: skip
    numerics = msgspec.structs.replace(sizes.numerics, gradient=gradient)
    measured[0] = msgspec.structs.replace(sizes, split_activations=fewer, numerics=numerics)
    code, _, [line] = told(f"--gpu-memory 20GB -- {SCRIPT} {BATCH} {flags}", capsys)
    assert code == 2 and re.findall(r"--[a-z0-9-]+", line) == expected


@pytest.mark.parametrize(("evaluated", "is_offered"), [("128", True), ("1", False)])
def test_a_shared_optimizer_is_offered_only_where_there_can_be_lanes(
    evaluated: str, is_offered: bool, measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = measured[0]
    numerics = msgspec.structs.replace(sizes.numerics, is_sharded=False)
    of_one_rank = tuple(each for each in sizes.activations if each.tp == each.pp == 1)
    measured[0] = msgspec.structs.replace(sizes, numerics=numerics, activations=of_one_rank)
    _, _, [line] = told(f"--gpu-memory 20GB -- {SCRIPT} {BATCH} --eval-global-batch-size {evaluated}", capsys)
    assert ("--use-distributed-optimizer" in line) == is_offered


def test_without_a_remedy_larger_gpus_are_named(measured: list[Sizes], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = measured[0]
    measured[0] = msgspec.structs.replace(
        sizes, activations=tuple(each for each in sizes.activations if each.tp * each.pp == 1)
    )
    flags = "--micro-batch-size 1 --global-batch-size 2 --train-iters 1"
    code, out, [line] = told(f"--json --gpus-per-node 2 --gpu-memory 20GB -- {SCRIPT} {flags}", capsys)
    assert code == 2 and json.loads(out)["layouts"][0]["fits"] is False
    assert line.endswith(" GB a rank; use GPUs with more memory")


def test_min_replicas_are_named_where_fewer_would_fit(measured: list[Sizes], capsys: pytest.CaptureFixture[str]) -> None:
    measured[0] = eight_billion(min_replicas=3)
    _, _, [line] = told(f"-- {SCRIPT} {BATCH}", capsys)
    assert "lower --recover-min-replicas" in line


def test_what_another_layout_or_machine_would_cure_is_no_mistake(
    measured: list[Sizes], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--data-path elsewhere --save /proc/no --save-interval 1 --tensor-model-parallel-size 3 --num-attention-heads 4 "
    code, _, err = told(f"-- {SCRIPT} {BATCH} {flags} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2", capsys)
    assert (code, err) == (0, [])


def test_bytes_have_a_unit() -> None:
    assert [plan._bytes(text) for text in ("80GB", "80 GiB", "1.5GB")] == [80 * 10**9, 80 * 2**30, 15 * 10**8]


def test_a_real_script_is_measured_without_training_it() -> None:
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192 --tokenizer-type NullTokenizer "
        "--vocab-size 128256 --make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size 128 --train-iters 1 "
        "--lr 1e-4 --bf16 --use-distributed-optimizer --sequence-parallel --recompute-activations --mock-data"
    )  # fmt: skip
    found = plan.read_sizes(SCRIPT, [*flags.split(), "--tensor-model-parallel-size", "2"])
    expected = eight_billion(sequence_parallel=True)
    assert found.model == expected.model
    assert found.numerics == expected.numerics
    assert found.flags == expected.flags
    assert {(each.tp, each.pp) for each in expected.activations} <= {(each.tp, each.pp) for each in found.activations}


def test_a_real_script_is_measured_with_fsdp2() -> None:
    flags = f"{SMALL} --global-batch-size 8 --use-torch-fsdp2 --untie-embeddings-and-output-weights"
    numerics = plan.read_sizes(SCRIPT, [*flags.split(), "--no-gradient-accumulation-fusion"]).numerics
    assert (numerics.weight, numerics.gradient, numerics.optimizer, numerics.fsdp2) == (2, 4, 12, Fsdp2())
    with pytest.raises(
        ValueError, match=r"^--use-torch-fsdp2 is not supported with fused .*--no-gradient-accumulation-fusion$"
    ):
        plan.read_sizes(SCRIPT, flags.split())


SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --bf16 --lr 1e-4 "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --micro-batch-size 1 --train-iters 1 --mock-data "
)


def test_flags_that_need_transformer_engine_are_planned_without_it_and_so_is_a_schedule_of_the_batch() -> None:
    flags = (
        f"{SMALL} --step-batch-size-schedule 0:8 --use-distributed-optimizer --use-precision-aware-optimizer "
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --apply-layernorm-1p "
        "--recover-determinism exact --deterministic-mode"  # without the second the first is refused, see below
    )  # fmt: skip
    assert plan.read_sizes(SCRIPT, flags.split()).numerics.optimizer == 2 + 2 + 2


def test_what_a_gpu_refuses_and_what_suits_no_plan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--global-batch-size 8 --recover-determinism exact --recover-ranks-per-gpu 2"
    code, _, lines = told(f"-- {SCRIPT} {SMALL} {flags}", capsys)
    assert code == 2 and lines[1:] == [
        "megatron-recover plan: --recover-determinism exact needs --deterministic-mode on a GPU, or a microbatch computed "
        "twice differs; add --deterministic-mode",
        "megatron-recover plan: --recover-ranks-per-gpu is for trials on few GPUs, and in a plan each rank has its own; "
        "leave it out",
    ]


@pytest.mark.parametrize(
    ("code", "errors", "expected"),
    [
        (0, "", f"{SCRIPT} never calls Megatron's pretrain; see docs/how_to/train.md"),
        (2, "warning\nbad arguments: --one is wrong\nbad arguments: --two is wrong\n", "--one is wrong\n--two is wrong"),
        (1, "a.py:1: UserWarning: old\n  warn()\nNo data\n", f"{SCRIPT} ended with exit code 1 before it trained: No data"),
        (
            1,
            "Traceback (most recent call last):\n  first\nOSError\n\nTraceback (most recent call last):\n  File a.py, line 1\n"
            "KeyError: 'x'\nlib.py:7: FutureWarning: soon\n  old()\n"
            "[rank0]: Traceback (most recent call last):\n[rank0]:   File a.py, line 1\n[rank0]: KeyError: 'x'\n"
            "[rank0]:[W1] late\n",
            f"{SCRIPT} ended with exit code 1 before it trained:\nTraceback (most recent call last):\n  File a.py, line 1\n"
            "KeyError: 'x'",
        ),
        (-9, "warned\n", f"{SCRIPT} was ended by SIGKILL before it trained, perhaps out of memory"),
        (-15, "", f"{SCRIPT} was ended by SIGTERM before it trained"),
    ],
)
def test_what_a_script_complains_of_is_told(code: int, errors: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, "", errors))
    with pytest.raises(ValueError if code in (0, 2) else plan.ScriptError) as raised:
        plan.read_sizes(SCRIPT, [])
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (plan.ScriptError("it fell"), 1, "it fell"),
        (ValueError("it is wrong"), 2, "it is wrong"),
        (PermissionError(13, "Permission denied", "a.py"), 2,
         "a.py cannot be read (Permission denied); make it readable, or name another"),
    ],
)  # fmt: skip
def test_an_error_of_the_script_ends_with_the_exit_code_that_run_has(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(script: str, flags: list[str]) -> Sizes:
        raise error

    monkeypatch.setattr(plan, "read_sizes", fail)
    assert told(f"-- {SCRIPT} {BATCH}", capsys) == (code, "", [f"megatron-recover plan: {line}"])


def test_a_shell_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("train.sh", "python train.py"), ("train", "#!/usr/bin/env bash\npython train.py")):
        (tmp_path / name).write_text(content)
        code, _, [line] = told(f"-- {tmp_path / name}", capsys)
        assert code == 2 and f"{name} is a shell script; write the Python script, not the shell script" in line


def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; fail if it does not for a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_to_plan_leaves_neither_its_child_nor_a_folder(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_recover", "plan", "--", "slow.py", *BATCH.split()], cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": os.getcwd()}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        assert process.stderr.readline() == "megatron-recover plan: reading the sizes of the model\n"
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        child = Path("/proc") / (tmp_path / "pid").read_text()
        process.terminate()
        assert process.wait() == -15
        until(lambda: not child.exists())
    # Megatron imports wandb, which makes folders of its own while it is imported.
    assert not [each for each in (tmp_path / "temporary").iterdir() if "wandb" not in each.name]


def test_sizes_survive_their_file() -> None:
    sizes = eight_billion()
    assert msgspec.json.decode(msgspec.json.encode(sizes), type=Sizes) == sizes
