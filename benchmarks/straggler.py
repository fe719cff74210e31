"""A replica that slows down twofold and recovers: speed of the quotas, and the step over its ideal.

In a real job of 4 replicas, forwards are paced to a fixed wall time, so the number of cores does
not matter. A chaos fault slows replica 1 for some steps. The harmonic ideal of a step is M / sum(1
/ pace) with the paces in the trace, as if microbatches could be divided. Reduction, vote and
optimizer count against us.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
from typing import Any

from benchmarks import paced
from benchmarks.common import Row, row
from tests.system.jobs import Job, text_data

PACE_S, FACTOR, SLOW_FROM, SLOW_FOR, STEPS = 0.3, 2.0, 4, 7, 16
WITHIN = 3
"""Steps within which quotas must have followed."""
REPLICAS, STRAGGLER, MICROBATCHES = 4, 1, 28
CHAOS = f"""
[[fault]]
replica = {STRAGGLER}
rank = 0
point = "compute"
kind = "slow"
factor = {FACTOR}
step = {SLOW_FROM}
steps = {SLOW_FOR}
"""


def run(folder: pathlib.Path, data: pathlib.Path, rebalance: str) -> list[dict[str, Any]]:
    """Return the events of one run."""
    job = Job(replicas=REPLICAS, microbatches=MICROBATCHES, steps=STEPS, determinism="fast", rebalance=rebalance)
    return paced.run(job, folder / rebalance, data, CHAOS, PACE_S, deadline_s=240.0)


def over_ideal(events: list[dict[str, Any]], step: int) -> float:
    """Return the seconds from the commit before to that of the step, over the harmonic ideal."""
    end, begin = (
        max(event["t"] for event in events if event["event"] == "committed" and event["step"] == at) for at in (step, step - 1)
    )
    paces = [
        statistics.median(
            event["seconds"] for event in events
            if event["event"] == "microbatch_finished" and (event["step"], event["replica"]) == (step, replica)
        )
        for replica in range(REPLICAS)
    ]  # fmt: skip
    return (end - begin) / (MICROBATCHES / sum(1 / pace for pace in paces))


def quotas(events: list[dict[str, Any]]) -> list[list[int]]:
    """Return the quotas of each step."""
    found = {event["step"]: event["quotas"] for event in events if event["event"] == "plan"}
    return [found[step] for step in range(STEPS)]


def rows() -> list[Row]:
    """Return the rows of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        with_quotas, without = (run(folder, data, rebalance) for rebalance in ("on", "off"))
    seen = quotas(with_quotas)
    found = [paced.counted(each) for each in (with_quotas, without)]
    print(*seen, sep="\n", file=sys.stderr)
    back = SLOW_FROM + SLOW_FOR
    alike = max(seen[SLOW_FROM]) - min(seen[SLOW_FROM]) <= 1
    cut = next((step for step in range(SLOW_FROM, back) if seen[step][STRAGGLER] < min(seen[SLOW_FROM])), STEPS)
    restored = next((step for step in range(back, STEPS) if max(seen[step]) - min(seen[step]) <= 1), 2 * STEPS)
    slow, after = range(SLOW_FROM + WITHIN, back), range(back + WITHIN, STEPS)
    ideal = "the harmonic ideal of the measured paces"
    return [
        row("quotas even before a straggler", [float(alike)], "yes", goal="== 1"),
        row("steps until a straggler's share is cut", [float(cut - SLOW_FROM)], "steps", goal="<= 3"),
        row("steps until it is given back", [float(restored - back)], "steps", goal="<= 3"),
        row("step with a straggler", [over_ideal(with_quotas, each) for each in slow], "ratio", baseline=ideal, goal="<= 1.1"),
        row(
            "step after it recovered", [over_ideal(with_quotas, each) for each in after], "ratio", baseline=ideal, goal="<= 1.1"
        ),
        row("ranks accused of a hang", [float(each["accused"] + each["lost"]) for each in found], "count", goal="== 0"),
        row("step with a straggler, even quotas", [over_ideal(without, each) for each in slow], "ratio", baseline=ideal),
    ]
