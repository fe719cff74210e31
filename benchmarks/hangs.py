"""Ranks that hang: time until they are fenced, false accusations, and cost of the progress page.

Real jobs have forwards that are paced to a fixed wall time. One replica after the other is stopped
(SIGSTOP), or loops for ever in a forward or backward while its control thread answers. The last
replica trains to the end. Everything is read from the trace. A step time is the median of the
undisturbed steps before the fault. The goal for SIGSTOP is 3 steps or 1 s, and for a loop 5 steps
or 3 s, the larger of the two each.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
import timeit
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import paced
from benchmarks.common import Row, row
from megatron_recover.core.progress import Phase
from megatron_recover.deadlines import Deadlines
from megatron_recover.progress_page import PageReader, ProgressPage
from tests.core.hang_world import Watched, drive, lognormal_steps
from tests.system.jobs import Job, text_data

ROUNDS = 6
"""Runs of each kind; each run strikes all replicas but one."""
REPLICAS, BETWEEN, PACE_S = 6, 12, 0.1
JOB = Job(replicas=REPLICAS, microbatches=12, steps=BETWEEN * (REPLICAS - 1) + 6, determinism="fast")
POINTS = {
    "stop": ("forward", "backward", "reduce", "in_vote", "optimizer"),
    "loop": ("forward", "backward", "forward", "backward", "forward"),
}
GOALS = {"stop": (3.0, 1.0), "loop": (5.0, 3.0)}
"""Goals in steps and in seconds; the larger counts."""
NAMES = {"stop": "SIGSTOP to fenced", "loop": "endless loop to fenced"}
SIMULATED_STEPS, STEPS_A_GENERATION = 1_000_000, 1000
DEADLINE_S = 300.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """One hang: seconds from the fault to the fence, and seconds of an undisturbed step."""

    seconds: float
    step_s: float

    def over_goal(self, kind: str) -> float:
        """Return the duration of the hang as a fraction of its goal."""
        steps, seconds = GOALS[kind]
        return self.seconds / max(steps * self.step_s, seconds)


def measure(kind: str, folder: pathlib.Path, data: pathlib.Path) -> list[Measured]:
    """Run one job of a kind in `folder`; return its hangs."""
    tables = []
    for index, point in enumerate(POINTS[kind]):
        tables += [
            "[[fault]]", f"replica = {REPLICAS - 1 - index}", "rank = 0", f'point = "{point}"', f'kind = "{kind}"',
            f"step = {BETWEEN * (index + 1)}",
        ]  # fmt: skip
    events = paced.run(JOB, folder, data, "\n".join(tables), PACE_S, deadline_s=DEADLINE_S)
    return [_hang(events, fault) for fault in events if fault["event"] == "fault"]


def _hang(events: Sequence[dict[str, Any]], fault: dict[str, Any]) -> Measured:
    fenced = next(event["t"] for event in events if event["event"] == "fenced" and event["replica"] == fault["replica"])
    commits: dict[int, float] = {}
    for event in events:
        if event["event"] == "committed":
            commits[event["step"]] = max(commits.get(event["step"], 0.0), event["t"])
    before = [commits[step] - commits[step - 1] for step in range(fault["step"] - 6, fault["step"])]
    return Measured(fenced - fault["t"], statistics.median(before))


def false_alarms() -> float:
    """Return how many replicas the detector condemns in simulated steps without a hang.

    Steps have lognormal length, and one of three replicas is 3 times slower.
    """
    watched = Watched()
    steps = lognormal_steps(SIMULATED_STEPS, 1, mean_s=3.0)
    drive(watched, steps, look_s=Deadlines.of().gap_s, generation_every=STEPS_A_GENERATION)
    return float(len(watched.condemned))


def page_event_ns() -> list[float]:
    """Return the nanoseconds that an event on the progress page costs the training thread.

    The page is one that an agent holds.
    """
    reader = PageReader("benchmark")
    page = ProgressPage(reader.descriptor)
    reader.descriptor = -1
    page.begin_step(1, "train 2")
    num = 100_000
    return [timeit.timeit(lambda: page.enter(Phase.FORWARD, (3,)), number=num) / num * 1e9 for _ in range(10)]


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    yield row("an event on the progress page", page_event_ns(), "ns", goal="< 1000")
    yield row(f"false alarms in {SIMULATED_STEPS} simulated steps", [false_alarms()], "count", goal="== 0")
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        for kind, what in NAMES.items():
            hangs = [hang for index in range(ROUNDS) for hang in measure(kind, folder / f"{kind}-{index}", data)]
            seconds, steps = [hang.seconds for hang in hangs], [hang.seconds / hang.step_s for hang in hangs]
            of_goal = [hang.over_goal(kind) for hang in hangs]
            baseline = "the larger of {:g} steps and {:g} s".format(*GOALS[kind])
            yield row(what, seconds, "s")
            yield row(f"{what}, worst", seconds, "s", value=max(seconds))
            yield row(what, steps, "steps")
            yield row(f"{what}, worst, over its goal", of_goal, "ratio", baseline=baseline, value=max(of_goal), goal="< 1")
