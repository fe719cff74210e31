"""Flags of upstream's own configurations in small jobs, each with a kill in it, against one replica that computed all.

`tests/megatron/test_acceptance.py` asks that every flag of a configuration that is accepted be in a job here or in another
test, or listed with the reason why it cannot be.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
import shutil
from collections.abc import Callable

import pytest

from tests.system.jobs import Job, chaos_text, check, run_job
from tests.system.test_endings import losses
from tests.system.test_fp16 import same_state

pytestmark = pytest.mark.timeout(300)


@dataclasses.dataclass(frozen=True)
class Case:
    """A job of three replicas, and the faults that strike in it."""

    name: str
    flags: str
    faults: tuple[str, ...]
    job: Job = Job(steps=4)  # noqa: RUF009


DENSE = Case(
    "dense",
    "--position-embedding-type rope --no-position-embedding --rotary-base 500 --rotary-percent 0.5 --rotary-interleaved "
    "--no-rope-fusion --qk-layernorm --apply-wd-to-qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 "
    "--no-persist-layer-norm --squared-relu --init-method-std 0.0134 --attention-softmax-in-fp32 --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-gradient-accumulation-fusion --use-mcore-models --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl native --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --decoupled-lr 5e-4 "
    "--decoupled-min-lr 4.5e-5 --untie-embeddings-and-output-weights --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split --num-layers 2 --enable-experimental --ddp-average-in-collective "
    "--eval-global-batch-size 4 --make-vocab-size-divisible-by 64 --logging-level 40 --timing-log-level 0 "
    "--log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-timers-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --tensorboard-dir {folder} --manual-gc --manual-gc-interval 2 "
    "--no-check-for-nan-in-loss-and-grad --no-mmap-bin-files --distributed-timeout-minutes 60 --exit-duration-in-mins 230 "
    "--use-tp-pp-dp-mapping --use-flash-attn",
    ("1 1 backward step=1", "0 0 before_vote step=3"),
    Job(pp=2, steps=4),
)
CASES = (
    DENSE,
    Case(
        "gated attention, uneven stages",
        "--position-embedding-type none --attention-output-gate --qk-layernorm --decoder-first-pipeline-num-layers 2 "
        "--decoder-last-pipeline-num-layers 1 --num-layers 3 --use-mup --mup-base-hidden-size 16",
        ("1 0 reduce step=2",),
        Job(pp=2, steps=4),
    ),
    Case(
        "layout of virtual stages",
        "--num-layers 4 --pipeline-model-parallel-layout Et|t|t|tL --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --overlap-param-gather-with-optimizer-step --ckpt-format torch",
        ("2 1 backward step=2",),
        Job(pp=2, steps=4),
    ),
    Case(
        "experts",
        "--num-experts 8 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk "
        "2 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
        "--moe-token-dispatcher-type alltoall --moe-layer-freq ([0]*1+[1]*1) --moe-shared-expert-intermediate-size 32 "
        "--moe-ffn-hidden-size 32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 "
        "--disable-bias-linear --use-distributed-optimizer --expert-tensor-parallel-size 1 --moe-shared-expert-overlap "
        "--num-distributed-optimizer-instances 2 --disable-gloo-process-groups",
        ("1 1 reduce step=2 bucket=0",),
        Job(lanes=2, steps=4),
    ),
    Case(
        "experts, sinkhorn",
        "--num-experts 4 --moe-router-topk 1 --exit-interval 3 --deterministic-mode --moe-router-load-balancing-type sinkhorn "
        "--moe-router-pre-softmax --moe-shared-expert-gate --moe-shared-expert-intermediate-size 32 "
        "--moe-token-dispatcher-type allgather --disable-bias-linear",
        ("0 0 backward step=2",),
    ),
    Case(
        "muon",
        "--optimizer muon --muon-momentum 0.9 --muon-extra-scale-factor 0.2 --muon-scale-mode spectral",
        ("1 0 reduce step=2",),
    ),
    Case("lion", "--optimizer lion", ("1 0 reduce step=2",)),
    Case("soap", "--optimizer soap", ("1 0 reduce step=2",)),
    Case(
        "half precision",
        "--fp16 --initial-loss-scale 1024 --apply-query-key-layer-scaling --lr-warmup-iters 0 --lr-warmup-fraction 0.5 "
        "--lr-warmup-init 1e-7",
        ("2 0 before_vote step=2",),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_with_a_flag_of_upstreams_loses_a_replica_and_ends_as_one_that_computed_all(
    case: Case,
    tmp_path: pathlib.Path,
    reference: Callable[[Job], pathlib.Path],
    data: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = dataclasses.replace(
        case.job, extra=(*shlex.split(case.flags.format(folder=tmp_path / "board")), "--recover-state-digest-interval", "1")
    )
    monkeypatch.setenv("NCCL_ALGO", "Ring")  # --deterministic-mode asks for it
    found = run_job(dataclasses.replace(job, replicas=3), tmp_path / "run", data, chaos=chaos_text(*case.faults)).expect()
    assert len(found.events("fault")) == len(case.faults)
    verdict, report = check(found.run_dir, reference(job))
    assert verdict == 0, report


SAVING = {
    "muon over lanes": Job(
        lanes=2,
        extra=(
            *shlex.split(
                "--optimizer muon --bf16 --use-distributed-optimizer --muon-momentum 0.9 --muon-extra-scale-factor 0.2 "
                "--muon-scale-mode spectral --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
                "--disable-bias-linear --overlap-grad-reduce"
            ),
            *shlex.split("--async-save --async-strategy mcore --async-ckpt-use-cpu-shm --ckpt-fully-parallel-load"),
        ),
    ),
    "muon over lanes, no layout": Job(
        lanes=2,
        extra=(
            *shlex.split("--optimizer muon --bf16 --use-distributed-optimizer --no-use-layer-wise-param-layout"),
            *shlex.split(
                "--ckpt-fully-parallel-save --auto-detect-ckpt-format --dist-ckpt-strictness log_all --verify-integrity"
            ),
        ),
    ),
    "the checkpoint's schedule": Job(
        pp=2, extra=("--use-checkpoint-opt_param-scheduler", "--no-ckpt-fully-parallel-save", "--save-retain-interval", "2")
    ),
}


@pytest.mark.parametrize("name", SAVING)
def test_a_job_with_a_flag_about_checkpoints_goes_on_as_if_it_had_not_ended(
    name: str, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    digests = ("--recover-state-digest-interval", "1")
    job = dataclasses.replace(SAVING[name], steps=4, save_interval=2, extra=(*SAVING[name].extra, *digests))
    one, two, three = (dataclasses.replace(job, replicas=number) for number in (1, 2, 3))
    alone = run_job(one, tmp_path / "run1", data, save=tmp_path / "alone").expect()
    save = tmp_path / "three"
    first = run_job(three, tmp_path / "run3", data, save=save, chaos=chaos_text("1 1 reduce step=1")).expect()
    shutil.rmtree(save / "iter_0000004")
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run_job(two, tmp_path / "run2", data, save=save, chaos=chaos_text("0 0 reduce step=1")).expect()
    wanted = losses(alone.run_dir)
    assert losses(first.run_dir) == wanted
    assert losses(resumed.run_dir) == {step: loss for step, loss in wanted.items() if step > 2}
    assert same_state(save / "iter_0000004", tmp_path / "alone" / "iter_0000004", tmp_path)
    for outcome in (first, resumed):
        assert len(outcome.events("fault")) == 1
        verdict, report = check(outcome.run_dir)
        assert verdict == 0, report


def test_training_begins_with_the_weights_of_a_checkpoint_alone(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    made = run_job(Job(replicas=1, steps=2, save_interval=2), tmp_path / "run0", data, save=tmp_path / "made").expect()
    assert made.saves()[-1] == (2, "finished")
    flags = f"--load {tmp_path / 'made'} --finetune --no-load-optim --no-load-rng --override-opt_param-scheduler"
    job = Job(steps=3, extra=tuple(flags.split()))
    alone = run_job(dataclasses.replace(job, replicas=1), tmp_path / "run1", data).expect()
    found = run_job(job, tmp_path / "run2", data, chaos=chaos_text("1 0 reduce step=1")).expect()
    assert len(found.events("fault")) == 1
    assert losses(found.run_dir) == losses(alone.run_dir) and [*losses(found.run_dir)] == [1, 2, 3]
    assert losses(found.run_dir)[1] < losses(made.run_dir)[1]
