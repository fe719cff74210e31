"""Small scenarios for the simulator's tests, and a job of them."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_recover.faults import Fault, FaultPoint
from megatron_recover.sim.timed.job import TimedJob
from megatron_recover.sim.timed.models import Scenario, Timing
from megatron_recover.sim.timed.recover import timers_of

SMALL: dict[str, Any] = {
    "job": {"replicas": 4, "ranks": 2, "stages": 2, "microbatches": 32, "steps": 4, "buckets": 2},
    "compute": {"microbatch_s": 1.0, "optimizer_s": 0.25},
    "network": {"bytes_per_s": 1e9, "gradient_bytes": 1e9},
    "failures": {},
    "checkpoint": {"save_s": 2.0, "restart_s": 100.0},
    "drop": {"regroup_s": 1.0},
}


def scenario(**changes: Any) -> Scenario:
    """A small scenario; `job={...}` and the like change keys of a table, everything else is set."""
    content = {
        key: {**SMALL.get(key, {}), **changes.get(key, {})} if isinstance(changes.get(key, {}), dict) else changes[key]
        for key in {*SMALL, *changes}
    }
    return msgspec.convert(content, Scenario)


def job_of(what: Scenario, *faults: Fault) -> TimedJob:
    """A job that is hit by these faults."""
    timing = Timing(what.job, what.compute, what.network)
    failures = what.failures
    return TimedJob(
        what.job,
        timing,
        timers_of(failures),
        detect_s=failures.detect_s,
        stall_s=failures.stall_s,
        faults=faults,
    )


def kill(replica: int, rank: int, point: str, step: int, **others: Any) -> Fault:
    """A fault."""
    return Fault(replica=replica, rank=rank, point=FaultPoint(point), step=step, **others)


def step_seconds(job: TimedJob) -> list[float]:
    """Of each step, from commit to commit."""
    ends = [0.0, *(time.ended for _, time in sorted(job.account.steps.items()))]
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]
