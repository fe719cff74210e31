"""The cost of a death: time to the new plan, failing step against an ideal one, work redone.

Real jobs have forwards that are paced to a fixed wall time, with `--overlap-grad-reduce`; in each
run one replica is killed once. Everything is read from the trace. The time to the new plan is from
SIGKILL until the last survivor holds that plan.

The ideal of the failing step is the best schedule that knows of the death only at the kill. Let t
be the time of a microbatch on a stage. The lost microbatches are spread evenly over the survivors,
so one of them computes at most e = ceil(quota / survivors) more. The ideal step has two lower
bounds:

- Its pipeline has to run quota + e microbatches, (quota + e + PP - 1) t after the beginning of the
  step.
- e new microbatches have to go through a pipeline that is free at the kill, (e + PP - 1) t after
  the kill.

Reduction and commit then take as long as in the median undisturbed step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import paced
from benchmarks.common import Row, row
from tests.system.jobs import Job, text_data

STEPS, STEP = 6, 3
"""Length of a run in steps, and the step in which the victim, the last replica, is killed."""
FLAT = Job(replicas=4, microbatches=16, steps=STEPS, determinism="fast", extra=("--overlap-grad-reduce",))
PIPELINE = dataclasses.replace(FLAT, replicas=3, pp=2, microbatches=24)
DEEP = dataclasses.replace(PIPELINE, replicas=2, pp=4, microbatches=16)
"""One of two replicas is killed, so the other is dealt as many microbatches as it already has. By
the model of docs/design/schedule.md a second pass then takes 22 forwards, and a running one 19."""
POINTS = ("backward occurrence=1", "backward occurrence=2", "forward occurrence=4", "before_reduce", "reduce bucket=0")
"""Fault points at which replicas without a pipeline are killed."""
FRACTIONS = {"10 %": "backward occurrence=1", "50 %": "backward occurrence=4", "90 %": "backward occurrence=8"}
"""Part of the step -> fault point at which a replica of the pipelines, with a quota of 8, is
killed. At the last point its passes are closed."""
ROUNDS, DEEP_ROUNDS = 3, 2
DEADLINE_S = 180.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run with one kill."""

    kill_to_plan_ms: float
    """Milliseconds from the kill until the last survivor holds the plan of the new generation."""
    step_s: float
    """Seconds of the failing step."""
    ideal_s: float
    lost: int
    redone: int
    in_schedule: int
    """Redone microbatches that a running pass computed."""
    wasted: int


def _span(events: Sequence[dict[str, Any]], step: int) -> tuple[float, float]:
    """Return the times of the first plan and the last commit of a step."""
    first = min(event["t"] for event in events if event["event"] == "plan" and event["step"] == step)
    last = max(event["t"] for event in events if event["event"] == "committed" and event["step"] == step)
    return first, last


def ideal_s(job: Job, events: Sequence[dict[str, Any]], kill_t: float) -> float:
    """Return the seconds of the ideal failing step."""
    slot_s = statistics.median(event["seconds"] for event in events if event["event"] == "microbatch_finished")
    quota = job.microbatches // job.replicas
    extra = math.ceil(quota / (job.replicas - 1))
    undisturbed = [last - first for first, last in (_span(events, step) for step in range(1, STEP))]
    tail_s = max(0.0, statistics.median(undisturbed) - (quota + job.pp - 1) * slot_s)
    begun, _ = _span(events, STEP)
    in_pipeline, after_kill = (quota + extra + job.pp - 1) * slot_s, kill_t - begun + (extra + job.pp - 1) * slot_s
    return max(in_pipeline, after_kill) + tail_s


def measure(job: Job, folder: pathlib.Path, data: pathlib.Path, point: str, pace_s: float, *flags: str) -> Measured:
    """Run one job in `folder`; return its measurements."""
    name, *conditions = point.split()
    chaos = "\n".join([
        "[[fault]]", f"replica = {job.replicas - 1}", "rank = 0", f'point = "{name}"', f"step = {STEP}",
        *(condition.replace("=", " = ") for condition in conditions),
    ])  # fmt: skip
    events = paced.run(job, folder, data, chaos, pace_s, *flags, deadline_s=DEADLINE_S)
    kill_t = next(event["t"] for event in events if event["event"] == "fault")
    plans = [event["t"] for event in events if event["event"] == "plan" and event["generation"] == 2 and event["step"] == STEP]
    assert len(plans) == job.replicas - 1
    begun, ended = _span(events, STEP)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return Measured(
        kill_to_plan_ms=1000 * (max(plans) - kill_t), step_s=ended - begun, ideal_s=ideal_s(job, events, kill_t),
        lost=summary["microbatches_lost"], redone=summary["microbatches_redone"],
        in_schedule=summary["microbatches_redone_in_schedule"], wasted=summary["microbatches_wasted"],
    )  # fmt: skip


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        flat = [measure(FLAT, folder / f"flat-{i}", data, point, 0.1) for i, point in enumerate(POINTS * 2)]
        fractions = {
            fraction: [measure(PIPELINE, folder / f"{point[-1]}-{i}", data, point, 0.2) for i in range(ROUNDS)]
            for fraction, point in FRACTIONS.items()
        }
        apart = [
            measure(PIPELINE, folder / f"apart-{i}", data, FRACTIONS["50 %"], 0.2, "--second-pass-only") for i in range(ROUNDS)
        ]
        deep = [
            [measure(DEEP, folder / f"deep-{i}-{len(flags)}", data, FRACTIONS["10 %"], 0.3, *flags) for flags in how]
            for i, how in enumerate([((), ("--second-pass-only",))] * DEEP_ROUNDS)
        ]
    assert not any(run.in_schedule for run in (*apart, *(second for _, second in deep)))
    everything = [*flat, *apart, *(run for runs in fractions.values() for run in runs)]
    to_plan = [run.kill_to_plan_ms for run in everything]
    ideal = "the best schedule that knows of the death only at the kill"
    yield row("SIGKILL to the last survivor's new plan", to_plan, "ms", goal="< 150")
    yield row("SIGKILL to the last survivor's new plan, worst", to_plan, "ms", value=max(to_plan))
    yield row("failing step over ideal, no pipeline", [run.step_s / run.ideal_s for run in flat], "ratio", baseline=ideal)
    for fraction, runs in fractions.items():
        taken_in = all(run.in_schedule == run.redone for run in runs)
        yield row(
            f"failing step over ideal, PP 2, killed at {fraction} ({'in the schedule' if taken_in else 'second pass'})",
            [run.step_s / run.ideal_s for run in runs], "ratio", baseline=ideal, goal="<= 1.1" if taken_in else "<= 1.35",
        )  # fmt: skip
    pairs = [apart_.step_s / taken.step_s for apart_, taken in zip(apart, fractions["50 %"], strict=True)]
    yield row("failing step by a second pass, killed at 50 %", pairs, "ratio", baseline="taken into the running schedule")
    pairs = [second.step_s / taken.step_s for taken, second in deep]
    yield row("failing step by a second pass, PP 4", pairs, "ratio", baseline="taken into the running schedule")
    yield row("microbatches redone over lost", [run.redone / run.lost for run in everything], "ratio", goal="== 1")
    yield row("microbatches wasted", [float(run.wasted) for run in everything], "count", goal="== 0")
