"""Real jobs whose replicas FSDP2 shards over their lanes: real deaths, and the losses of unmodified Megatron.

As in `test_faults.py` the verdict is `check --against` a run of one replica that computes all: bit for bit.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_recover.core.exit_code import ExitCode
from tests.system import upstream
from tests.system.jobs import FSDP2, ROOT, Job, assert_struck_and_finished, chaos_text, check, run_job
from tests.system.test_async_save import LATE, between
from tests.system.test_endings import losses, tracker
from tests.system.test_joins import DEATH, TWO, assert_exact, blamed, rosters
from tests.system.test_joins import run as run_joining

pytestmark = pytest.mark.timeout(300)
OVERLAP = ("--overlap-grad-reduce",)
KEPT = ("--torch-fsdp2-no-reshard-after-forward",)
DCP = ("--ckpt-format", "torch_dcp")
slow = pytest.mark.slow
PATIENT = "tests/system/patient_pretrain.py"
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, its faults, and how many replicas are left at the end."""

    name: str
    job: Job
    faults: tuple[str, ...]
    left: int = 1
    script: str = "scripts/pretrain_gpt.py"
    is_slow: bool = False


def _job(**fields: object) -> Job:
    return Job(**{"lanes": 2, "microbatches": 4, **fields, "extra": (*FSDP2, *fields.get("extra", ()))})  # type: ignore[arg-type]


CASES = (
    Case(
        "two lanes: backward, then a sum",
        _job(replicas=3, microbatches=6),
        ("2 1 backward step=1 microbatch=5", "0 0 reduce step=3 bucket=1"),
    ),
    Case(
        "tensor parallel, beside the backward, a loss per token, evaluations",
        _job(tp=2, eval_interval=2, extra=(*OVERLAP, "--calculate-per-token-loss", "--sequence-parallel")),
        ("1 2 reduce step=1 bucket=1",),
    ),
    Case(
        "bf16, recomputed activations, parameters kept after the forward",
        _job(extra=("--bf16", *RECOMPUTE, *KEPT)),
        ("0 1 backward step=2",),
    ),
    Case(
        "bf16, summed in bf16, beside the backward",
        _job(extra=("--bf16", "--grad-reduce-in-bf16", *OVERLAP)),
        ("1 0 reduce step=2 bucket=1",),
        is_slow=True,
    ),
    Case(
        "inside recovery: recompute, second sum",
        _job(replicas=3, microbatches=8, extra=OVERLAP),
        ("2 0 reduce step=1 bucket=1", "0 1 second_reduce step=1"),
    ),
    Case("four lanes", _job(lanes=4), ("1 3 backward step=1", ), is_slow=True),
    Case("one lane", _job(lanes=1), ("1 0 optimizer step=2",), is_slow=True),
    Case(
        "inside recovery: transfer, of the target, then of the only holder",
        _job(replicas=3, timeouts=("--recover-deadline-s", "75")),
        ("2 1 transfer step=1", "0 0 transfer step=4"),
        script="tests/system/uneven_pretrain.py",
        is_slow=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(each, id=each.name, marks=slow if each.is_slow else ()) for each in CASES])
def test_job_ends_as_if_nothing_had_died(
    case: Case, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    outcome = run_job(case.job, tmp_path / "run", data, chaos=chaos_text(*case.faults), script=ROOT / case.script).expect(0)
    assert_struck_and_finished(outcome, case.job, case.faults, case.left)
    assert ("shards nothing in a replica of one lane; give --lanes" in outcome.output) == (case.job.lanes == 1)
    in_bf16 = "--grad-reduce-in-bf16" in case.job.extra
    assert ("sums the gradients of lanes in bf16" in outcome.output) == in_bf16
    assert ("sums gradients in fp32, where Megatron alone" in outcome.output) == ("--bf16" in case.job.extra and not in_bf16)
    assert_exact(outcome, reference(case.job))


POINTS = (
    *("forward", "backward", "before_reduce", "reduce", "before_vote", "in_vote", "after_vote", "optimizer"),
    *("promise", "status", "recompute", "second_reduce"),
)


@slow
@pytest.mark.parametrize(("lanes", "tp"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_every_point(
    replicas: int, lanes: int, tp: int, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    """Points in a recovery need a death before: that of replica 1 in a sum; so two replicas have none."""
    job = _job(replicas=replicas, lanes=lanes, tp=tp, microbatches=8, steps=4)
    for number, point in enumerate(POINTS):
        in_recovery = point in ("promise", "status", "recompute", "second_reduce")
        if in_recovery and replicas < 3:
            continue
        rank = 0 if point in ("before_vote", "in_vote", "after_vote", "status") else number % (lanes * tp)
        when = "occurrence=2" if point in ("promise", "status") else "step=1"
        first = ("1 0 reduce step=1 bucket=1",) if in_recovery else ()
        faults = (*first, f"{0 if number % 2 else replicas - 1} {rank} {point} {when}")
        outcome = run_job(job, tmp_path / point, data, chaos=chaos_text(*faults)).expect(0)
        assert len(outcome.events("fault")) == len(faults), outcome.command
        assert_exact(outcome, reference(job))


@pytest.mark.parametrize("evaluates", [True, pytest.param(False, marks=slow)])
def test_a_job_that_is_killed_in_a_save_resumes_and_ends_as_the_one_that_was_not(
    evaluates: bool, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """`evaluates`: the checkpoint follows an evaluation, after which FSDP2 keeps whole parameters where it is told to."""
    job = _job(steps=6, save_interval=2, eval_interval=2 if evaluates else 1000, extra=(*DCP, "--bf16", *KEPT), train_iters=6)
    whole = run_job(job, tmp_path / "whole", data, save=tmp_path / "a").expect(0)
    save = tmp_path / "b"
    half = dataclasses.replace(job, extra=(*job.extra, "--exit-interval", "4"))
    first = run_job(half, tmp_path / "first", data, save=save, chaos=chaos_text("0 0 checkpoint_tracker occurrence=2")).expect(
        0
    )
    assert tracker(save) == 4 and len(first.events("fault")) == 1
    then = run_job(job, tmp_path / "then", data, save=save, chaos=chaos_text("1 1 backward step=1")).expect(0)
    assert "resumes after iteration 4" in then.output
    wanted = losses(whole.run_dir)
    assert losses(then.run_dir) == {step: loss for step, loss in wanted.items() if step > 4}
    assert [each["digest"] for each in then.events("state_digested")][-1] in {
        each["digest"] for each in whole.events("state_digested")
    }
    assert check(then.run_dir)[0] == 0


def content(checkpoint: pathlib.Path, folder: pathlib.Path) -> dict[str, object]:
    """All of model, optimizer and scheduler in a checkpoint of torch_dcp, by path, tensors as bytes."""
    file = folder / "plain.pt"
    dcp_to_torch_save(checkpoint, file)
    loaded = torch.load(file, weights_only=False)
    found, left = {}, [((name,), loaded[name]) for name in ("model", "optimizer", "opt_param_scheduler", "iteration")]
    while left:
        path, value = left.pop()
        if isinstance(value, dict | list):
            left += [((*path, name), each) for name, each in (value.items() if isinstance(value, dict) else enumerate(value))]
        else:
            found[str(path)] = value.view(-1).view(torch.uint8).numpy().tobytes() if torch.is_tensor(value) else repr(value)
    return found


@slow
@pytest.mark.parametrize(
    ("fault", "is_partial"),
    [("0 1 backward step=3 microbatch=0", True), ("0 0 checkpoint_tracker occurrence=1", False)],
    ids=["while it is written", "before it is named"],
)
def test_what_is_saved_in_the_background_is_what_all_had_agreed_on_also_if_its_writer_dies(
    fault: str, is_partial: bool, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """Protocol step 3 is the training step behind `save 2`, in which the write goes on; it is written steps late."""
    job = _job(steps=6, save_interval=2, extra=(*DCP, "--bf16"))
    waiting, late = tmp_path / "waiting", tmp_path / "late"
    run_job(job, tmp_path / "run1", data, save=waiting).expect()
    saving = dataclasses.replace(job, extra=(*job.extra, "--async-save"))
    outcome = run_job(saving, tmp_path / "run2", data, chaos=chaos_text(fault), save=late, script=LATE).expect()
    assert "--use-persistent-ckpt-worker has no effect with replicas" in outcome.output
    saves = outcome.saves()
    assert saves[0] == (2, "started") and (2, "finished") not in saves and saves[-1] == (6, "finished")
    assert ((2, "removed_partial") in saves) == is_partial
    assert between(outcome, 4, replica=1) >= 1, "it waited for the write"
    for iteration in (4, 6):
        name = f"iter_{iteration:07d}"
        found, wanted = content(late / name, tmp_path), content(waiting / name, tmp_path)
        assert found == wanted and sum(isinstance(value, bytes) for value in found.values()) > 30
    assert check(outcome.run_dir)[0] == 0
    longer = dataclasses.replace(saving, steps=7, extra=(*saving.extra, "--override-opt-param-scheduler"))
    resumed = run_job(longer, tmp_path / "run3", data, save=late).expect()
    assert resumed.events("committed")[0]["label"] == "train 7"


@slow
def test_a_run_goes_on_with_another_number_of_lanes(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """Without dropout, whose masks differ from lane to lane."""
    save, extra = tmp_path / "save", (*DCP, "--hidden-dropout", "0", "--attention-dropout", "0")
    job = _job(steps=2, save_interval=2, extra=extra, train_iters=4)
    run_job(dataclasses.replace(job, extra=(*job.extra, "--exit-interval", "2")), tmp_path / "a", data, save=save).expect(0)
    alone = _job(steps=4, lanes=1, microbatches=8, save_interval=2, extra=extra, train_iters=4)
    found = losses(run_job(alone, tmp_path / "b", data, save=save).expect(0).run_dir)
    wanted = losses(run_job(dataclasses.replace(job, steps=4), tmp_path / "c", data).expect(0).run_dir)
    assert found == pytest.approx({step: loss for step, loss in wanted.items() if step > 2}, rel=1e-5)


RETURN = dataclasses.replace(TWO, lanes=2, steps=24, microbatches=4)
BACK = {
    "two lanes": dataclasses.replace(RETURN, extra=FSDP2),
    "two lanes, bf16, beside the backward": dataclasses.replace(RETURN, extra=(*FSDP2, "--bf16", *OVERLAP)),
    "tensor parallel": dataclasses.replace(RETURN, tp=2, extra=FSDP2),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "two lanes" else slow) for name in BACK])
def test_a_replica_comes_back(
    name: str, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    outcome = run_joining(BACK[name], tmp_path / "run", data, DEATH).expect()
    assert rosters(outcome)[-1] == [0, 2] and blamed(outcome) == {1}
    assert_exact(outcome, reference(BACK[name]))


FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters {steps} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1 "
    "--clip-grad 1.0 --weight-decay 0.01 --seed 1234 --tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5 "
    "--log-interval 1 --eval-iters 1 --eval-interval 1000 --hidden-dropout 0 --attention-dropout 0 --data-path {data} "
)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=slow)])
def test_losses_are_those_of_unmodified_megatron_over_all_ranks(steps: int, tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """Four ranks under torchrun, one FSDP2; and two replicas of two lanes, of which one dies."""
    flags = FLAGS.format(steps=steps, data=data) + " ".join(FSDP2)
    ours = ROOT / "scripts" / "pretrain_gpt.py"
    torchrun = upstream.run("torch.distributed.run", "--nproc_per_node 4", f"{ours} {flags}")
    chaos = tmp_path / "chaos.toml"
    chaos.write_text(chaos_text(f"1 1 backward step={steps // 2}"))
    launch = f"run --replicas 2 --lanes 2 --chaos {chaos} --run-dir {tmp_path / 'run'} --"
    recovered = upstream.run("megatron_recover", launch, f"{ours} {flags} --recover-heal off")
    upstream.assert_alike(upstream.figures(recovered), upstream.figures(torchrun))
    assert "generation: 2" in recovered


def test_a_checkpoint_of_fsdp2_is_refused_without_it_before_the_job(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """By the dry run, which knows all arguments: a script may have set those for FSDP2."""
    (tmp_path / "save" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "save" / "iter_0000002" / ".metadata").touch()
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("2")
    outcome = run_job(Job(), tmp_path / "run", data, save=tmp_path / "save").expect(ExitCode.BAD_INPUT)
    assert "iter_0000002 has the format torch_dcp, which Megatron loads with --use-torch-fsdp2 alone; add" in outcome.output


@slow
@pytest.mark.timeout(700)
def test_a_checkpoint_of_plain_megatron_is_loaded_at_another_number_of_ranks(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:  # fmt: skip
    """It has one FSDP2 over three ranks, ours one over two in each of two replicas. Plain Megatron cannot load it at all."""
    flags = FLAGS.format(steps=4, data=data).replace("--global-batch-size 16", "--global-batch-size 12")
    flags += " ".join((*FSDP2, *DCP))
    ours, save = ROOT / "scripts" / "pretrain_gpt.py", tmp_path / "save"
    plain = upstream.run("torch.distributed.run", "--nproc_per_node 3", f"{ours} {flags} --save {save} --save-interval 2")
    launch = f"run --replicas 2 --lanes 2 --run-dir {tmp_path / 'run'} --"
    resumed = upstream.run("megatron_recover", launch, f"{ours} {flags} --load {save} --ckpt-step 2 --recover-heal off")
    wanted = {iteration: found for iteration, found in upstream.figures(plain).items() if iteration > 2}
    found, trained = upstream.figures(resumed), losses(tmp_path / "run")  # the loss printed second is the mean of the first two
    assert sorted(wanted) == sorted(found) == [3, 4]
    upstream.assert_alike({iteration: (trained[iteration], norm, rate) for iteration, (_, norm, rate) in found.items()}, wanted)


@pytest.mark.parametrize(
    ("extra", "connections", "told"),
    [
        (("--num-experts", "4"), "8", "--num-experts is not supported with --use-torch-fsdp2"),
        ((), "1", "FSDP always requires CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
)
def test_what_is_refused_by_us_or_by_megatron_is_told_before_the_job(
    extra: tuple[str, ...], connections: str, told: str, tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    outcome = run_job(_job(extra=extra), tmp_path / "run", data, environment=variables).expect(ExitCode.BAD_INPUT)
    assert told in outcome.output
