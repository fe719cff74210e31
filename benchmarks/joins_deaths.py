"""Newcomers that die, stop or are refused: what the members notice of it.

    python -m benchmarks.run --only joins_deaths

In a real job one newcomer after the other gets SIGKILL where it hurts (at the fault points of
newcomers, and in its first step), one stops, and one is refused: it stops before it asks to join
and goes on when the step is over. The step in which that happens is compared with a step of the
same members without newcomers, of a job right before it. What the members have held for a newcomer
is told apart, and so is the time until the stopped one was seen. Forwards and backwards are paced.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks import join_times
from benchmarks.common import Row, row
from benchmarks.join_times import Cost, Step, Usual
from benchmarks.joining import Pace, Watched, shaped, without_newcomer
from tests.system.jobs import Job, chaos_text, text_data

JOB = shaped(Job(replicas=3, microbatches=12, heal="in-place"))
PACE = Pace(0.1, 0.1)
USUAL_STEPS = 8
BEFORE, AFTER = ("form", "state_read", "claim"), ("admitted", "before_reduce", "in_vote")
"""Points at which newcomers get SIGKILL: before they are members, and in their first step."""
LAST_S = 240.0
"""The longest wait for the last newcomer to become a member; after lost members joins back off."""


class Struck(NamedTuple):
    """The costs of one newcomer for the members."""

    cost: Cost
    detection: float = 0.0
    """Time until the end of the stopped newcomer was confirmed, over a usual step."""


def faults() -> list[str]:
    """Return the faults: newcomers get the ids from 3, in the order in which they are formed."""
    kills = [f"{replica} 0 {point}" for replica, point in enumerate((*BEFORE, *AFTER), 3)]
    stops = 3 + len(kills)
    return ["2 0 backward step=3", *kills, f"{stops} 0 admitted kind=stop", f"{stops + 1} 0 claim kind=freeze until=applied"]


def struck(events: join_times.Events, normal: Usual) -> dict[str, list[Struck]]:
    """Return what each kind of fault of a newcomer has cost, from the trace."""
    found: dict[str, list[Struck]] = {"killed outside": [], "killed inside": [], "stopped": [], "refused": []}
    steps = join_times.steps(events)
    for event in join_times.of(events, "fault"):
        step = join_times.at(steps, event["t"])
        if event["replica"] < JOB.replicas or event["kind"] == "freeze" or step is None:
            continue
        detection = 0.0
        if event["kind"] == "stop":
            detection = (_fenced(events, event) - event["t"]) / normal.step_s
        kind = "stopped" if event["kind"] == "stop" else "killed outside" if event["point"] in BEFORE else "killed inside"
        found[kind].append(Struck(join_times.cost(events, step, normal), detection))
    refusals: dict[int, Step] = {}
    for event in join_times.of(events, "claim_refused", "turned_away"):
        step = join_times.at(steps, event["t"])
        if step is not None:
            refusals[step.step] = step
    found["refused"] += [Struck(join_times.cost(events, step, normal)) for step in refusals.values()]
    return found


def _fenced(events: join_times.Events, fault: Mapping[str, object]) -> float:
    times = (event["t"] for event in join_times.of(events, "fenced") if event["replica"] == fault["replica"])
    return float(next(times))


def measure(folder: pathlib.Path, data: pathlib.Path) -> dict[str, list[Struck]]:
    """Run both jobs."""
    normal = without_newcomer(JOB, folder / "without", data, PACE, USUAL_STEPS)
    texts = faults()
    last = JOB.replicas + len(texts) - 2
    with Watched(JOB, folder / "deaths", data, PACE, chaos=chaos_text(*texts)) as job:
        job.until(
            lambda: next((each for each in join_times.of(job.events, "proven") if last in each["newcomers"]), None),
            f"membership of replica {last}", LAST_S,
        )  # fmt: skip
        job.until_steps(1)
    found = struck(job.events, normal)
    print(normal, *found.items(), sep="\n", file=sys.stderr, flush=True)
    return found


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        found = measure(folder, text_data(folder))
    alike = "the same members without a newcomer"
    titles = {
        "killed outside": "is killed before it is announced", "killed inside": "is killed in its first step",
        "refused": "is refused",
    }  # fmt: skip
    for kind, title in titles.items():
        if some := found[kind]:
            pauses = [100 * (each.cost.step - 1) for each in some]
            yield row(f"members' pause when a newcomer {title}", pauses, "% of a step", baseline=alike, goal="< 10")
            yield row(f"the same, worst ({title})", pauses, "% of a step", value=max(pauses), baseline=alike, goal="< 10")
            yield row(f"hold of the pass ({title})", [100 * each.cost.hold for each in some], "% of a step")
    if some := found["stopped"]:
        pauses = [100 * (each.cost.step - 1 - each.detection) for each in some]
        title = "members' pause when a newcomer stops, beyond its detection"
        yield row(title, pauses, "% of a step", baseline=alike, goal="< 10")
        yield row("detection of it", [100 * each.detection for each in some], "% of a step")
