"""Flags of upstream's own configurations in small jobs, each with a kill in it, against one replica that computed all.

`tests/megatron/test_flag_evidence.py` asks that every flag of a configuration that is accepted be in a job here or in another
test, or listed with the reason why it cannot be.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Callable

import pytest

from tests.system.jobs import Job, chaos_text, check, run_job

pytestmark = pytest.mark.timeout(300)


@dataclasses.dataclass(frozen=True)
class Case:
    """A job of three replicas, and the faults that strike in it."""

    name: str
    flags: str
    faults: tuple[str, ...]
    job: Job = Job(steps=4, eval_interval=2)  # noqa: RUF009


DENSE = Case(
    "dense",
    "--position-embedding-type rope --rotary-base 500 --rotary-percent 0.5 --rotary-interleaved --no-rope-fusion "
    "--qk-layernorm --apply-wd-to-qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 --no-persist-layer-norm "
    "--squared-relu --init-method-std 0.0134 --attention-softmax-in-fp32 --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-gradient-accumulation-fusion --use-mcore-models --cross-entropy-loss-fusion --cross-entropy-fusion-impl native "
    "--adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --decoupled-lr 5e-4 --decoupled-min-lr 4.5e-5 "
    "--untie-embeddings-and-output-weights --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    "--num-layers 2 --manual-gc --manual-gc-interval 2 --no-check-for-nan-in-loss-and-grad --no-mmap-bin-files "
    "--distributed-backend nccl --distributed-timeout-minutes 60 --exit-duration-in-mins 230 --use-tp-pp-dp-mapping",
    ("1 1 backward step=1", "0 0 before_vote step=3"),
    Job(pp=2, steps=4, eval_interval=2),
)
CASES = (
    DENSE,
    Case(
        "gated attention, uneven stages",
        "--attention-output-gate --qk-layernorm --decoder-last-pipeline-num-layers 1 --num-layers 3 --no-position-embedding "
        "--use-mup --mup-base-hidden-size 16",
        ("1 0 reduce step=2",),
        Job(pp=2, steps=4, eval_interval=2),
    ),
    Case(
        "layout of virtual stages",
        "--num-layers 4 --pipeline-model-parallel-layout Et|t|t|tL --overlap-grad-reduce",
        ("2 1 backward step=2",),
        Job(pp=2, steps=4, eval_interval=2),
    ),
    Case(
        "experts",
        "--num-experts 8 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk "
        "2 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
        "--moe-token-dispatcher-type alltoall --moe-layer-freq ([0]*1+[1]*1) --moe-shared-expert-intermediate-size 32 "
        "--moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-4 --disable-bias-linear --use-distributed-optimizer "
        "--num-distributed-optimizer-instances 2 --disable-gloo-process-groups",
        ("1 1 reduce step=2 bucket=0",),
        Job(lanes=2, steps=4, eval_interval=2),
    ),
    Case(
        "experts, sinkhorn",
        "--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax "
        "--moe-shared-expert-gate --moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type allgather "
        "--disable-bias-linear",
        ("0 0 backward step=2",),
    ),
    Case(
        "latent attention",
        "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 "
        "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --position-embedding-type rope --qk-layernorm "
        "--enable-experimental",
        ("1 1 reduce step=2",),
        Job(tp=2, steps=4, eval_interval=2),
    ),
    Case(
        "half precision",
        "--fp16 --initial-loss-scale 1024 --apply-query-key-layer-scaling --lr-warmup-fraction 0.5 --lr-warmup-init 1e-7",
        ("2 0 before_vote step=2",),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_with_a_flag_of_upstreams_loses_a_replica_and_ends_as_one_that_computed_all(
    case: Case, tmp_path: pathlib.Path, reference: Callable[[Job], pathlib.Path], data: pathlib.Path
) -> None:
    job = dataclasses.replace(case.job, extra=(*shlex.split(case.flags), "--recover-state-digest-interval", "1"))
    found = run_job(dataclasses.replace(job, replicas=3), tmp_path / "run", data, chaos=chaos_text(*case.faults)).expect()
    assert len(found.events("fault")) == len(case.faults)
    verdict, report = check(found.run_dir, reference(job))
    assert verdict == 0, report
