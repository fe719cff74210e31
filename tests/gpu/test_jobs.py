"""Real jobs on a GPU: sums over replicas beside a replica's own collectives, and the memory of a rank."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from megatron_recover.cli.demo import flags_without_kernels
from tests.system import upstream
from tests.system.jobs import ROOT, Job, Outcome, chaos_text, check, run_job, text_data

DEADLINE_S = 400
"""Seconds that a job may take. Both jobs of a test fit into its time limit, which would not say what the job has printed."""
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(2 * DEADLINE_S + 100)]

WORKSPACE_KIB, NUM_WORKSPACES = 4096 * 8, 3
"""torch keeps a workspace of cuBLAS for each thread and stream that has multiplied, and counts it as allocated: forwards in the
training thread, backwards in torch's own, and checksums on the stream of the reduction."""


def run(
    made: Job,
    tmp_path: pathlib.Path,
    *,
    flags: str = "",
    chaos: str = "",
    queues: int = 8,
    script: pathlib.Path = ROOT / "scripts" / "pretrain_gpt.py",
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a job to its end; its ranks share GPUs where there are fewer."""
    contexts = int(found[1]) if (found := re.search(r"--context-parallel-size (\d+)", flags)) else 1
    shared = -(-made.replicas * made.tp * made.pp * contexts * made.lanes // torch.cuda.device_count())
    asked = f"--bf16 --deterministic-mode --recover-ranks-per-gpu {shared} {flags}"
    extra = (*flags_without_kernels(), *shlex.split(asked), *made.extra)
    made = dataclasses.replace(made, extra=extra)
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "CUBLAS_WORKSPACE_CONFIG": f":{WORKSPACE_KIB // 8}:8"}
    return run_job(
        made, tmp_path / "run", text_data(tmp_path), chaos=chaos, deadline_s=DEADLINE_S, script=script,
        environment=variables | dict(environment or {}),
    )  # fmt: skip


@pytest.mark.finding("G17")
def test_sums_beside_a_replicas_own_collectives_come_to_an_end(tmp_path: pathlib.Path) -> None:
    """Both communicators of a rank have kernels on one device; a death in the middle breaks one of them.

    The replica's own are between stages: with tensor parallelism Megatron asks for one hardware queue before Blackwell. A
    sum that read a gradient too early would lead to other losses and parameters than a run without the flag.
    """
    made = Job(pp=2, steps=8)
    (tmp_path / "reference").mkdir()
    reference = run(made, tmp_path / "reference").expect()
    chaos = chaos_text("1 1 reduce step=5 occurrence=2")
    outcome = run(made, tmp_path, flags="--overlap-grad-reduce", queues=32, chaos=chaos).expect()
    assert outcome.events("bucket_passed"), "nothing was reduced beside a backward"
    code, report = check(outcome.run_dir, reference.run_dir)
    assert code == 0 and "parameters bit-identical" in report, report


@pytest.mark.finding("FSDP")
@pytest.mark.parametrize("overlap", ["", "--overlap-grad-reduce"])
def test_a_job_that_fsdp2_shards_survives_a_death(overlap: str, tmp_path: pathlib.Path) -> None:
    """FSDP2 adds to a gradient on a stream of its own; a sum that read it too early would lead to other parameters."""
    made = Job(lanes=2, steps=8)
    flags = "--use-torch-fsdp2 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion"
    (tmp_path / "reference").mkdir()
    reference = run(made, tmp_path / "reference", flags=flags, queues=32).expect()
    chaos = chaos_text("1 1 reduce step=5 occurrence=2")
    outcome = run(made, tmp_path, flags=f"{flags} {overlap}", queues=32, chaos=chaos).expect()
    assert bool(outcome.events("bucket_passed")) == bool(overlap)
    code, report = check(outcome.run_dir, reference.run_dir)
    assert code == 0 and "parameters bit-identical" in report, report


CONTEXTS = {
    "one lane": (1, "--context-parallel-size 2"),
    "two lanes": (2, "--context-parallel-size 2"),
    "hierarchical": (
        1,
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
        "--seq-length 64 --max-position-embeddings 64",
    ),
}
"""Lanes and flags of jobs with context parallelism."""


@pytest.mark.finding("CP")
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize(("lanes", "split"), CONTEXTS.values(), ids=CONTEXTS)
def test_a_job_with_context_parallelism_survives_a_death(lanes: int, split: str, tmp_path: pathlib.Path) -> None:
    """Elsewhere a substitute of Transformer Engine's attention stands in (tests/megatron/split_attention.py)."""
    made, flags = Job(lanes=lanes), f"{split} --use-distributed-optimizer"
    (tmp_path / "reference").mkdir()
    reference = run(made, tmp_path / "reference", flags=flags, queues=1).expect()  # upstream asks for one before Blackwell
    chaos = chaos_text("1 1 backward step=3 occurrence=2")
    outcome = run(made, tmp_path, flags=flags, chaos=chaos, queues=1).expect()
    code, report = check(outcome.run_dir, reference.run_dir)
    assert code == 0 and "parameters bit-identical" in report, report


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of upstream's configurations for which no job on a CPU exists (tests/megatron/flag_evidence.toml)."""

    flags: str
    packages: tuple[str, ...] = ()
    """What they need beside Transformer Engine."""
    script: str = ""
    """Upstream's script that makes them, where it is not ours for a GPT."""


LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear"
KERNELS = {
    "latent attention": Layers(
        f"{LATENT} --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --position-embedding-type rope"
    ),
    "sparse attention": Layers(
        f"{LATENT} --experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8 "
        "--dsa-indexer-loss-coeff 0.01 --disable-bias-linear --no-gradient-accumulation-fusion",
        packages=("fast_hadamard_transform",),
    ),
    "gated delta net": Layers(
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-conv-kernel-dim 4 "
        "--linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 2 --linear-num-value-heads 4 --swiglu "
        "--disable-bias-linear --no-gradient-accumulation-fusion",
        packages=("fla",),
    ),
    "experts": Layers(f"{EXPERTS} --moe-permute-fusion --moe-router-fusion --moe-token-dispatcher-type alltoall"),
    "squared experts": Layers(f"{EXPERTS} --squared-relu --use-fused-weighted-squared-relu"),
    "fused experts": Layers(f"{EXPERTS} --swiglu --use-transformer-engine-op-fuser --no-gradient-accumulation-fusion"),
    "mamba": Layers(
        f"{EXPERTS} --num-layers 4 --hybrid-override-pattern M*ME --is-hybrid-model --mamba-num-heads 8 --mamba-head-dim 16 "
        "--mamba-num-groups 2 --mamba-state-dim 16 --position-embedding-type none "
        "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
        packages=("mamba_ssm", "causal_conv1d"),
        script="pretrain_hybrid.py",
    ),
}


def one_shape(folder: pathlib.Path) -> dict[str, str]:
    """Variables that give a kernel one shape in all processes. Each would choose by time, and shapes sum in several orders.

    Without the first, Megatron refuses fused experts with a gated activation.
    """
    for kernel in ("l2norm_fwd_kernel", "l2norm_bwd_kernel"):
        shape = {"kwargs": {"BT": 8}, "num_warps": 1, "num_stages": 1, "num_ctas": 1}
        (folder / f"{kernel}.json").write_text(json.dumps({"default_config": shape}))
    fixed = {"MAMBA_DETERMINISTIC": "1", "FLA_CACHE_MODE": "default", "FLA_CONFIG_DIR": str(folder)}
    return {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1", **fixed}


@pytest.mark.finding("TE")
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("layers", KERNELS.values(), ids=KERNELS)
def test_a_job_with_layers_that_only_cuda_has_survives_a_death(layers: Layers, tmp_path: pathlib.Path) -> None:
    if missing := [name for name in layers.packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    made, given = Job(pp=2), {"flags": layers.flags, "environment": one_shape(tmp_path)}
    if layers.script:
        given["script"] = upstream.script(layers.script)
    (tmp_path / "reference").mkdir()
    reference = run(made, tmp_path / "reference", **given).expect()
    outcome = run(made, tmp_path, **given, chaos=chaos_text("1 1 backward step=3")).expect()
    code, report = check(outcome.run_dir, reference.run_dir)
    assert code == 0 and "parameters bit-identical" in report, report


@pytest.mark.finding("G15")
@pytest.mark.parametrize(("replicas", "lanes"), [(4, 2), (2, 4)])
def test_replicas_stay_alike_over_their_own_sums_of_four_ranks(replicas: int, lanes: int, tmp_path: pathlib.Path) -> None:
    """Two floats have one sum in any order, four have not: gradients over the replicas, or over the lanes, and the norm.

    With `exact` any order has one sum, so it is left out. Every step votes on the parameters of all replicas.
    """
    made = Job(replicas=replicas, lanes=lanes, steps=8, microbatches=2 * replicas, determinism="fast", bucket_elements=4000)
    outcome = run(made, tmp_path, flags="--use-distributed-optimizer").expect()
    assert len({event["bucket"] for event in outcome.events("reduced")}) > 4, "the gradient and the ledger"
    assert not outcome.events("disagreed")
    code, report = check(outcome.run_dir)
    assert code == 0, report


@pytest.mark.finding("G6")
def test_a_rank_holds_between_steps_what_the_plan_says(tmp_path: pathlib.Path) -> None:
    """Upstream prints what torch has allocated after a step, when results and activations are free."""
    made = Job(steps=4, determinism="fast", bucket_elements=4_000_000)
    size = "--hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --num-layers 8"
    flags = made.megatron_flags(tmp_path / "text", None)
    command = [sys.executable, "-m", "megatron_recover", "plan", "--json", "--gpus-per-node", "2", "--"]
    asked = [*command, "scripts/pretrain_gpt.py", *flags, *flags_without_kernels(), *shlex.split(f"{size} --bf16")]
    process = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    planned = json.loads(process.stdout)
    [parts] = [each["bytes"] for each in planned["layouts"] if each["replicas"] == 2]
    log = (run(made, tmp_path, flags=size).expect().run_dir / "train.log").read_text()
    [allocated, *_] = [float(found) * 2**20 for found in re.findall(r"memory \(MB\) \| allocated: ([\d.]+)", log)]
    held = parts["weights"] + parts["gradient"] + parts["optimizer"] + parts["sums"] + NUM_WORKSPACES * WORKSPACE_KIB * 1024
    assert allocated == pytest.approx(held, rel=0.05), (allocated, parts)


@pytest.mark.finding("JOIN")
@pytest.mark.parametrize(
    ("shape", "flags"),
    [({}, ""), ({"pp": 2}, "--overlap-grad-reduce"), ({"lanes": 2}, "--use-distributed-optimizer")],
    ids=["one rank", "two stages", "two lanes"],
)
def test_a_lost_replica_comes_back(shape: dict[str, int], flags: str, tmp_path: pathlib.Path) -> None:
    """Its processes import while the others train, so the job has many steps."""
    made = Job(**shape, steps=100, microbatches=24, heal="in-place")
    (tmp_path / "reference").mkdir()
    reference = run(Job(**shape, steps=100, microbatches=24), tmp_path / "reference", flags=flags, queues=32).expect()
    outcome = run(made, tmp_path, flags=flags, chaos=chaos_text("1 0 backward step=5"), queues=32).expect()
    assert outcome.events("generation")[-1]["roster"] == [0, 2], outcome.output
    code, report = check(outcome.run_dir, reference.run_dir)
    assert code == 0 and "parameters bit-identical" in report, report
