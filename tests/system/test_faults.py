"""Real jobs lose real processes at every fault point, and end with the parameters of the undisturbed run, bit for bit.

Each row is one job; its faults strike in different steps, so that one job covers several points. `check --against` the
failure-free run of a single replica is the verdict: it verifies INV-1..7 from the trace and compares every parameter digest.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable

import pytest

from megatron_recover.faults import NEWCOMER_ONLY, FaultPoint
from tests.system.jobs import ROOT, Job, assert_struck_and_finished, chaos_text, check, run_job
from tests.system.test_endings import IN_A_SAVE
from tests.system.test_rebalance import IN_PASSING


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, its faults, and how many replicas are left at the end."""

    name: str
    job: Job
    faults: tuple[str, ...]
    left: int
    script: str = "scripts/pretrain_gpt.py"
    taken_in: int | None = None
    """How many microbatches are computed in passes that had begun when they were dealt again; None: chance."""
    extended: tuple[int, ...] = ()
    """Replicas whose running passes take something in for certain, whether or not they live to compute it."""


BF16 = ("--bf16",)
LENIENT = "tests.system.lenient_run"
"""Who stands still is suspected soon, and has all the time to come back."""
SOON = ("--recover-deadline-s", "75")
VIRTUAL = ("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
ZERO1 = ("--use-distributed-optimizer",)
EXPERTS = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-aux-loss-coeff", "0.01", "--disable-bias-linear"),
)
OVERLAP = ("--overlap-grad-reduce",)

# A replica may lag behind by one step, so what is to strike inside a recovery must not depend on how far it is. Promise and
# status: the second of the run, whatever the step (the first is that of the first generation). Recomputing: a bucket other than
# the first is reduced only after everyone has computed a share.
CASES = (
    Case(
        "forward and backward, down to one replica",
        Job(replicas=3, pp=2),
        ("2 1 backward step=1 microbatch=5", "1 0 forward step=3 microbatch=4"),
        1,
        script="tests/system/patient_pretrain.py",
        taken_in=2 + 3,
    ),
    Case(
        "before and inside the reduction, of different stages",
        Job(replicas=4, pp=2, extra=OVERLAP),
        ("0 0 before_reduce step=1", "1 1 reduce step=3 bucket=4"),
        2,
    ),
    Case(
        "around the vote",
        Job(replicas=4, extra=BF16),
        ("3 0 before_vote step=1", "0 0 in_vote step=2", "1 0 after_vote step=4"),
        1,
    ),
    Case(
        "optimizer, then backward of the first microbatch",
        Job(replicas=3, tp=2),
        ("1 1 optimizer step=1", "0 0 backward step=3 microbatch=0"),
        1,
    ),
    Case(
        "inside recovery: promise",
        Job(replicas=4, tp=2),
        ("3 0 backward step=1", "2 0 promise occurrence=2", "0 0 reduce step=3 bucket=0"),
        1,
    ),
    Case(
        "inside recovery: status",
        Job(replicas=4),
        ("3 0 backward step=1", "2 0 status occurrence=2", "1 0 before_reduce step=3"),
        1,
    ),
    Case(
        "inside recovery: recompute",
        Job(replicas=4, microbatches=8),
        ("3 0 reduce step=1 bucket=1", "0 0 recompute step=1", "1 0 reduce step=3 bucket=1"),
        1,
    ),
    Case(
        "inside recovery: second reduction",
        Job(replicas=4, microbatches=8, extra=OVERLAP),
        ("3 0 reduce step=1 bucket=1", "2 0 second_reduce step=1", "1 0 reduce step=3 bucket=1"),
        1,
    ),
    Case("tensor and pipeline parallel", Job(replicas=2, tp=2, pp=2, extra=OVERLAP), ("1 2 reduce step=2 occurrence=2",), 1),
    Case("two lanes, plain optimizer", Job(replicas=2, lanes=2), ("0 1 backward step=2",), 1),
    Case(
        "two lanes, distributed optimizer, bf16",
        Job(replicas=2, lanes=2, extra=(*ZERO1, *BF16, *OVERLAP)),
        ("1 0 reduce step=2 bucket=0",),
        1,
    ),
    Case(
        "experts spread over two lanes",
        Job(replicas=2, lanes=2, extra=(*EXPERTS, *OVERLAP)),
        ("1 1 reduce step=2 bucket=1",),
        1,
    ),
    Case("warm processes", Job(replicas=2, run_flags=("--rank-start", "warm")), ("1 0 reduce step=2 bucket=1",), 1),
    Case("evaluation", Job(replicas=3, eval_interval=2), ("1 0 evaluate step=2", "0 0 evaluate step=7"), 1),
    Case("start-up", Job(replicas=2, pp=2), ("1 0 start_up",), 1),
    Case("two replicas in the same instant", Job(replicas=4, extra=OVERLAP), ("0 0 backward step=2", "2 0 backward step=2"), 2),
    Case(
        "per-token loss",
        Job(replicas=2, tp=2, microbatches=5, extra=("--calculate-per-token-loss",)),
        ("0 1 backward step=2 microbatch=1",),
        1,
    ),
    Case(
        "inside recovery: transfer, of the target, then of the only holder",
        Job(replicas=3, pp=2, timeouts=SOON),
        ("2 1 transfer step=1", "0 0 transfer step=4"),
        1,
        script="tests/system/uneven_pretrain.py",
    ),
    Case(
        "virtual pipeline stages",  # 7 microbatches: quotas of whole groups, and others; a loss in the pass, and one after it
        Job(replicas=3, pp=2, microbatches=7, extra=(*VIRTUAL, *OVERLAP)),
        ("2 1 backward step=1 microbatch=6", "0 0 reduce step=3 bucket=1"),
        1,
        script="tests/system/patient_pretrain.py",
        taken_in=2,
    ),
    Case(
        "work just taken over, in the pass that took it in",
        Job(replicas=3, pp=2, microbatches=24, extra=OVERLAP),  # many: each of the others is dealt some of them
        ("2 1 backward step=1", "1 0 recompute step=1"),
        1,
        script="tests/system/patient_pretrain.py",
        extended=(0, 1),
    ),
    Case(
        "ranks that are frozen and go on",
        Job(replicas=3, pp=2, extra=OVERLAP, timeouts=("--recover-deadline-s", "60"), module=LENIENT),
        (
            "1 1 reduce step=1 bucket=4 kind=freeze until=generation",
            "0 1 promise occurrence=2 kind=freeze until=generation",
            "2 0 in_vote step=3 kind=freeze until=generation",
            "1 0 optimizer step=4 kind=freeze until=generation",  # which is sure to come: others may have computed all by then
        ),
        3,
    ),
    Case(
        "ranks that stand still",
        Job(replicas=5, timeouts=SOON),
        (
            "4 0 backward step=1 kind=stop",
            "3 0 promise occurrence=2 kind=stop",
            "2 0 in_vote step=3 kind=stop",
            "1 0 reduce step=4 bucket=0 kind=stop",
        ),
        1,
    ),
)


def test_every_fault_point_strikes_a_real_process() -> None:
    # That each of these faults struck is asserted below, and in test_endings and test_rebalance. Those of newcomers are
    # in test_joins.
    points = {fault.split()[2] for case in CASES for fault in case.faults} | set(IN_A_SAVE) | set(IN_PASSING)
    assert points == {point.value for point in {*FaultPoint} - NEWCOMER_ONLY}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.timeout(300)
def test_job_ends_as_if_nothing_had_died(
    case: Case, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    outcome = run_job(case.job, tmp_path / "run", data, chaos=chaos_text(*case.faults), script=ROOT / case.script).expect(0)
    assert_struck_and_finished(outcome, case.job, case.faults, case.left)
    assert {event["replica"] for event in outcome.events("extended")} >= set(case.extended), outcome.command
    assert case.taken_in in (None, outcome.summary["microbatches_redone_in_schedule"]), outcome.command
    verdict, report = check(outcome.run_dir, reference(case.job))
    assert verdict == 0, f"{outcome.command}\n{report}"


@pytest.mark.timeout(300)
def test_fast_runs_stay_close_to_the_undisturbed_one(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    job = Job(replicas=3, determinism="fast", steps=10)
    undisturbed = run_job(job, tmp_path / "undisturbed", data, save=tmp_path / "a").expect(0)
    faults = ("1 0 backward step=2 microbatch=3", "0 0 reduce step=6 bucket=1")
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos_text(*faults), save=tmp_path / "b").expect(0)
    verdict, report = check(outcome.run_dir, undisturbed.run_dir)
    print(report)
    assert verdict == 0, f"{outcome.command}\n{report}"
    assert outcome.summary["replicas_bit_identical"] is True
    difference = re.search(r"max relative difference ([0-9.e+-]+)", report)
    assert difference is not None, report
    # Gradients differ in the order of fp32 sums; ten steps of Adam carry that on. docs/design/guarantees.md quotes the figure.
    assert float(difference.group(1)) < 1e-3, report
