"""What a death costs: time from SIGKILL to survivors at work again, the failing step against an ideal one, and the work redone.

Real jobs of 4 replicas whose forwards are paced to a fixed wall time; in each run replica 2 is killed once, at another
microbatch or inside the reduction. Everything is read from the trace.

Ideal of the failing step (the best schedule that knows of the death only at the kill): at the kill, what the survivors have
not finished and all that the dead replica held is spread over the survivors, whole microbatches, each taking the median time
of the run's own microbatches; reduction and commit then take what they took in the median undisturbed step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Row, row
from tests.system.jobs import ROOT, Job, text_data

REPLICAS, MICROBATCHES, STEPS, PACE_S = 4, 16, 6, 0.1
VICTIM, STEP = 2, 3
POINTS = ("backward occurrence=1", "backward occurrence=2", "forward occurrence=4", "before_reduce", "reduce bucket=0")
ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run with one kill."""

    kill_to_plan_ms: float
    """To the last survivor that holds the plan of the new generation."""
    step_over_ideal: float
    lost: int
    redone: int
    wasted: int


def _span(events: Sequence[dict[str, Any]], step: int) -> tuple[float, float]:
    """First plan and last commit of a step."""
    first = min(event["t"] for event in events if event["event"] == "plan" and event["step"] == step)
    last = max(event["t"] for event in events if event["event"] == "committed" and event["step"] == step)
    return first, last


def ideal_s(events: Sequence[dict[str, Any]], kill_t: float) -> float:
    """Seconds of the ideal failing step."""
    seconds = [event["seconds"] for event in events if event["event"] == "microbatch_finished"]
    microbatch_s = statistics.median(seconds)
    quota = math.ceil(MICROBATCHES / REPLICAS)
    undisturbed = [last - first for first, last in (_span(events, step) for step in range(1, STEP))]
    tail_s = statistics.median(undisturbed) - quota * microbatch_s
    begun, _ = _span(events, STEP)
    survivors = [replica for replica in range(REPLICAS) if replica != VICTIM]
    ready = []
    done_by_survivors = 0
    for replica in survivors:
        done = [
            event["t"] for event in events
            if event["event"] == "microbatch_finished" and event["step"] == STEP and event["replica"] == replica
            and event["t"] <= kill_t
        ]  # fmt: skip
        done_by_survivors += len(done)
        # What it is computing at the kill is finished where it is.
        last = max(done, default=begun)
        ready.append(max(last, begun))
    left = MICROBATCHES - done_by_survivors
    for _ in range(left):
        earliest = min(range(len(ready)), key=lambda index: ready[index])
        started = max(ready[earliest], begun)
        ready[earliest] = started + microbatch_s
    return max(max(ready), kill_t) - begun + max(tail_s, 0.0)


def measure(folder: pathlib.Path, data: pathlib.Path, point: str, index: int) -> Measured:
    """One run."""
    job = Job(replicas=REPLICAS, microbatches=MICROBATCHES, steps=STEPS, determinism="fast")
    run_dir = folder / f"run{index}"
    name, *conditions = point.split()
    chaos = folder / f"chaos{index}.toml"
    chaos.write_text("\n".join([
        "[[fault]]", f"replica = {VICTIM}", "rank = 0", f'point = "{name}"', f"step = {STEP}",
        *(condition.replace("=", " = ") for condition in conditions),
    ]))  # fmt: skip
    command = [
        sys.executable, "-m", "megatron_recover", "run", "--replicas", str(REPLICAS), "--run-dir", str(run_dir),
        "--chaos", str(chaos), "--", str(ROOT / "benchmarks" / "paced_pretrain.py"),
        *job.megatron_flags(data, None), "--paced-forward-s", str(PACE_S),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=180)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    kill_t = next(event["t"] for event in events if event["event"] == "fault")
    plans = [event["t"] for event in events if event["event"] == "plan" and event["generation"] == 2 and event["step"] == STEP]
    assert len(plans) == REPLICAS - 1
    begun, ended = _span(events, STEP)
    summary = json.loads((run_dir / "summary.json").read_text())
    return Measured(
        kill_to_plan_ms=1000 * (max(plans) - kill_t),
        step_over_ideal=(ended - begun) / ideal_s(events, kill_t),
        lost=summary["microbatches_lost"], redone=summary["microbatches_redone"], wasted=summary["microbatches_wasted"],
    )  # fmt: skip


def rows() -> list[Row]:
    """The rows of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        runs = [measure(folder, data, point, index) for index, point in enumerate(POINTS * ROUNDS)]
    to_plan = [run.kill_to_plan_ms for run in runs]
    ideal = "the best schedule that knows of the death only at the kill"
    return [
        row("SIGKILL to survivors holding the new plan", to_plan, "ms", goal="< 150"),
        row("SIGKILL to survivors holding the new plan, worst", to_plan, "ms", value=max(to_plan)),
        row("failing step over ideal", [run.step_over_ideal for run in runs], "ratio", baseline=ideal, goal="<= 1.35"),
        row("microbatches redone over lost", [run.redone / run.lost for run in runs], "ratio", goal="== 1"),
        row("microbatches wasted", [float(run.wasted) for run in runs], "count", goal="== 0"),
    ]
