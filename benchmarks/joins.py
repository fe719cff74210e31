"""A killed replica comes back: how long each part takes, and what the survivors notice of it.

    python -m benchmarks.run --only joins

A real job of 3 replicas gets SIGKILL from outside, one replica after the other, each time when all
are members again. Time counts from the signal until the coordinator has recorded the first step
with the newcomer's vote. The goal of a return on the first try is the sum of three parts, all
measured in this run:

- The start of processes: a job of one replica, that nobody disturbs, from the request for its rank
  until its first microbatch is done. A newcomer computes one, too, before it reads.
- The bytes of the state over the bandwidth of a bare socket (`benchmarks.state`).
- Two steps of the survivors.

The survivors' steps are compared with those of the same job in which nobody is formed in place of
the last replica (`--recover-heal off`), before and after the job with returns. Forwards and
backwards are paced to a fixed wall time, so the number of cores does not matter. *CPU-bound*: the
same without a pace, so newcomers and survivors compete for the cores.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks import join_times, state
from benchmarks.common import Row, row
from benchmarks.join_times import Cost, Return, Usual
from benchmarks.joining import Pace, Watched, shaped, strike, without_newcomer
from tests.system.jobs import Job, text_data

KILLS, BOUND_KILLS, SETTLED_STEPS, USUAL_STEPS = 8, 3, 2, 12
"""Kills of a job with a pace, and without; steps with all members before each; steps of survivors
in each job without newcomers."""
ALONE, SOCKETS = 3, 5
"""Runs of a job of one replica, and of the bare socket."""
MICROBATCHES = 6
JOB = shaped(Job(replicas=3, microbatches=MICROBATCHES, heal="in-place"))
PACED, CPU_BOUND = Pace(0.1, 0.1), Pace(0.001, 0.001)


class Observed(NamedTuple):
    """Returns of one job, and what they cost the survivors."""

    returns: list[Return]
    normal: Usual
    forming: list[Cost]
    """Steps after the one with the kill, of which at least half ran while a newcomer formed."""
    moving: list[Cost]
    """Steps in which state was read that was not used."""
    entering: list[Cost]
    """Steps whose state was read, and with which a newcomer entered."""


def bandwidth() -> float:
    """Return the bytes a second of a bare socket."""
    tensors = state.made(0.0)
    with state.members() as found:
        seconds = [state.bare_s(found[0], tensors) for _ in range(SOCKETS + 1)][1:]  # the first touches fresh memory
    return state.SIZE_BYTES / statistics.median(seconds)


def start_s(folder: pathlib.Path, data: pathlib.Path) -> float:
    """Return the seconds from the request for a lone rank to the end of its first microbatch."""
    with Watched(shaped(Job(replicas=1, microbatches=MICROBATCHES)), folder, data, PACED) as job:
        done = job.until(
            lambda: next((each["t"] for each in join_times.of(job.events, "microbatch_finished")), None), "microbatch"
        )
        return done - job.requested(0)


def observe(folder: pathlib.Path, data: pathlib.Path, pace: Pace, kills: int = KILLS) -> Observed:
    """Kill replicas of a job; run the job without newcomers before and after it."""
    folder.mkdir()
    usual = [without_newcomer(JOB, folder / "before", data, pace, USUAL_STEPS)]
    with Watched(JOB, folder / "returns", data, pace) as job:
        returns = []
        for kill in range(kills):
            job.until_steps(SETTLED_STEPS)
            members = job.members()
            returns.append(strike(job, members[-1 - kill % len(members)]))
        job.until_steps(1)
    usual.append(without_newcomer(JOB, folder / "after", data, pace, USUAL_STEPS))
    normal = Usual(*(statistics.mean(values) for values in zip(*usual, strict=True)))
    print(*returns, *usual, sep="\n", file=sys.stderr, flush=True)
    return judged(job.events, returns, normal)


def judged(events: join_times.Events, returns: Sequence[Return], normal: Usual) -> Observed:
    """Return what the returns cost the survivors, from the trace."""
    steps = join_times.steps(events)
    forming, moving, entering = [], [], []
    for each in returns:
        after = [step for step in steps if step.begin > each.kill]
        forming += join_times.mostly_within(after, each.forming, each.formed)
        moving += join_times.moving(events, steps, each.newcomer)
        if (step := join_times.at(steps, each.announced)) is not None:
            entering.append(step)
    costs = ([join_times.cost(events, step, normal) for step in some] for some in (forming, moving, entering))
    return Observed([*returns], normal, *costs)


def goal_s(each: Return, start: float, bytes_a_second: float, normal: Usual) -> float:
    """Return the goal of a return on the first try, in seconds."""
    return start + each.num_bytes / bytes_a_second + 2 * normal.step_s


def _returns(observed: Observed, alone: Sequence[float], bytes_a_second: float) -> Iterator[Row]:
    """Yield the rows of the time to full strength."""
    returns = observed.returns
    start = statistics.median(alone)
    yield row("kill to full strength", [each.total_s for each in returns], "s")
    for part in returns[0].parts:
        yield row(f"of it until: {part}", [each.parts[part] for each in returns], "s")
    yield row("of it the reading of the state alone", [1e3 * each.read_s for each in returns], "ms")
    yield row("states that a newcomer began to read", [float(each.tries) for each in returns], "tries", goal="<= 1")
    yield row("newcomers formed for a return", [float(each.num_formed) for each in returns], "count", goal="== 1")
    yield row("start of a lone replica, to its first microbatch", alone, "s")
    yield row("state, over a bare socket", [1e3 * each.num_bytes / bytes_a_second for each in returns], "ms")
    yield row("usual step of the survivors", [observed.normal.step_s], "s")
    for what, some in (("", returns), (", first try", [each for each in returns if each.tries == 1])):
        ratios = [each.total_s / goal_s(each, start, bytes_a_second, observed.normal) for each in some]
        if ratios:
            sum_of = "start of a lone replica + state over a bare socket + 2 steps"
            yield row(f"kill to full strength{what}, over its goal", ratios, "ratio", baseline=sum_of, goal="<= 1")


def _survivors(observed: Observed, how: str, *, has_goals: bool) -> Iterator[Row]:
    """Yield the rows of what the survivors notice. A hold is no part of a step, and told apart."""
    alike = "the same members without a newcomer"
    for what, costs in (
        ("while a newcomer forms", observed.forming), ("in which an unused state moves", observed.moving),
        ("in which the state moves and a newcomer enters", observed.entering),
    ):  # fmt: skip
        if costs:
            steps = [each.step for each in costs]
            yield row(f"survivors' step {what}, {how}", steps, "ratio", baseline=alike, goal="<= 1.05" if has_goals else "")
    pauses = [100 * each.in_pass for each in observed.entering]
    goal = "< 10" if has_goals else ""
    yield row(f"survivors' pause between microbatches at admission, {how}", pauses, "% of a step", baseline=alike, goal=goal)
    worst = f"survivors' pause between microbatches at admission, worst, {how}"
    yield row(worst, pauses, "% of a step", baseline=alike, goal=goal, value=max(pauses))
    yield row(f"hold of the pass at admission, {how}", [100 * each.hold for each in observed.entering], "% of a step")
    yield row(f"hold of the pass at admission, {how}", [1e3 * each.hold_s for each in observed.entering], "ms")


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    bytes_a_second = bandwidth()
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        alone = [start_s(folder / f"alone-{index}", data) for index in range(ALONE + 1)][1:]  # the first builds the index cache
        paced = observe(folder / "paced", data, PACED)
        bound = observe(folder / "cpu-bound", data, CPU_BOUND, BOUND_KILLS)
    yield from _returns(paced, alone, bytes_a_second)
    yield from _survivors(paced, "paced", has_goals=True)
    yield row("kill to full strength, CPU-bound", [each.total_s for each in bound.returns], "s")
    yield from _survivors(bound, "CPU-bound", has_goals=False)
