"""What the campaign would run: every point, kind and shape comes up, and every scenario is one that a job can take."""

from __future__ import annotations

from collections import Counter

from megatron_recover.cluster import chaos
from megatron_recover.faults import FaultKind, FaultPoint
from tests.system.scenarios import MAX_PROCESSES, OVERLAP, PATIENT, PLAIN, STEPS, UNEVEN, scenario

SEEDS = range(1, 201)


def test_scenarios_are_a_function_of_their_seed() -> None:
    assert [scenario(seed) for seed in SEEDS] == [scenario(seed) for seed in SEEDS]
    assert len({str(scenario(seed)) for seed in SEEDS}) > 50


def test_every_scenario_is_one_that_a_job_can_take() -> None:
    for seed in SEEDS:
        plan = scenario(seed)
        num_ranks = plan.job.tp * plan.job.pp * plan.job.lanes
        assert plan.job.replicas * num_ranks <= MAX_PROCESSES
        target = chaos.Target(
            num_replicas=plan.job.replicas, num_ranks=num_ranks, num_microbatches=plan.job.microbatches, num_steps=STEPS
        )
        assert chaos.parse(chaos.render(plan.faults, ""), target) == plan.faults
        hit = Counter(fault.replica for fault in plan.faults if fault.kind is not FaultKind.SLOW)
        assert hit and max(hit.values()) == 1 and len(hit) < plan.job.replicas, "nobody is left for certain"
        raised = [fault for fault in plan.faults if fault.kind is FaultKind.RAISE]
        assert len(raised) <= 1, "two exceptions over one microbatch end a job (INV-9)"


def test_everything_comes_up() -> None:
    plans = [scenario(seed) for seed in SEEDS]
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.point for fault in faults} == set(FaultPoint)
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert {(fault.point, fault.kind) for fault in faults} >= {
        (point, FaultKind.FREEZE) for point in (FaultPoint.REDUCE, FaultPoint.PROMISE, FaultPoint.IN_VOTE)
    }
    assert {plan.script for plan in plans} == {PLAIN, PATIENT, UNEVEN}
    assert {plan.job.pp for plan in plans} == {1, 2, 4} and {plan.job.tp for plan in plans} == {1, 2}
    assert {plan.job.lanes for plan in plans} == {1, 2} and {plan.job.determinism for plan in plans} == {"fast", "exact"}
    flags = {flag for plan in plans for flag in plan.job.extra}
    assert flags >= {
        OVERLAP, "--bf16", "--use-distributed-optimizer", "--calculate-per-token-loss",
        "--num-layers-per-virtual-pipeline-stage",
    }  # fmt: skip
