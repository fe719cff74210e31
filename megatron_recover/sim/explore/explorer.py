"""Explore every behaviour of a small job: all orders of messages, and faults at every instant.

    python -m megatron_recover.sim.explore.explorer --config ci

The core's own machines run in it. The search is breadth first, from the announcement of generation
1. Where an invariant breaks, the shortest way found to it is printed, and the exit code is 1. Where
nothing can happen any more, the job must have ended (INV-8, INV-9). `sim/explore/moves.py` says
what is tried, and what is left out.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_recover.core import invariants
from megatron_recover.core.values import ReplicaId, Value
from megatron_recover.sim.explore.moves import Moves
from megatron_recover.sim.explore.network import JobState
from megatron_recover.sim.explore.node import Stimulus
from megatron_recover.sim.explore.scenario import CONFIGS, Scenario
from megatron_recover.sim.workers import CTRL_C_CODE, ended_by_ctrl_c, workers


class Found(Value, frozen=True):
    """A violation, and the attempts that lead to it."""

    detail: str
    lines: tuple[str, ...]


class Exploration(Value, frozen=True):
    """Size and outcome of an exploration."""

    scenario: Scenario
    states: int
    transitions: int
    ends: int
    """Distinct states in which the job is over."""
    found: Found | None


class Explorer(Moves):
    """A breadth-first search through all states of a scenario."""

    def run(self, limit: int = 50_000_000) -> Exploration:
        """Explore every state, up to the first violation, which is returned in `found`.

        Raise MemoryError beyond `limit` states.
        """
        came_from: dict[JobState, JobState | None] = {}
        world = self.initial()
        ends = 0
        found = None
        try:
            waiting = deque([self.settle(world)])
            came_from[waiting[0]] = None
            while waiting:
                world = waiting.popleft()
                if self.over(world):
                    ends += 1
                    continue
                steps = list(self.steps(world))
                if not steps:
                    self.attempt = "nothing can happen any more"
                    raise invariants.InvariantViolation(9, "the job is not over, and nobody can take a step")
                for _, after in itertools.chain(steps, self.faults(world)):
                    after = self.settle(after)
                    if after not in came_from:
                        came_from[after] = world
                        waiting.append(after)
                if len(came_from) > limit:
                    raise MemoryError(f"{self.scenario.name}: more than {limit} states")
        except (invariants.InvariantViolation, ValueError) as error:
            found = Found(str(error), self.way(world, came_from))
        return Exploration(self.scenario, len(came_from), self.transitions, ends, found)

    def way(self, world: JobState, came_from: Mapping[JobState, JobState | None]) -> tuple[str, ...]:
        """Return what happened from the beginning to a state, and the last attempt from there."""
        attempts = [self.attempt]
        before = came_from.get(world)
        while before is not None:
            for attempt, after in itertools.chain(self.steps(before), self.faults(before)):
                trail = [attempt]
                if self.settle(after, trail) == world:
                    attempts = trail + attempts
                    break
            world, before = before, came_from[before]
        return tuple(item if isinstance(item, str) else self.tell(*item) for item in attempts)

    def tell(self, number: ReplicaId, stimulus: Stimulus | int) -> str:
        """Return a line of the report of a violation."""
        return f"replica {number}: {self.messages[stimulus] if isinstance(stimulus, int) else stimulus}"


def explored(scenario: Scenario) -> tuple[Exploration, float]:
    """Return the exploration of a scenario, and the seconds that it took."""
    began = time.monotonic()
    # No value refers to itself, so there is no garbage. To look for it takes a fifth of the time.
    gc.disable()
    try:
        return Explorer(scenario).run(), time.monotonic() - began
    finally:
        gc.enable()


def explored_beside(
    scenarios: Sequence[Scenario], jobs: int, begins: Callable[[Scenario], None]
) -> Iterator[tuple[Exploration, float]]:
    """Yield each exploration when it ends, `jobs` at a time. Call `begins` when one begins."""
    waiting = iter(scenarios)
    if jobs == 1:
        for scenario in waiting:
            begins(scenario)
            yield explored(scenario)
        return
    with workers(jobs, tasks_each=1) as pool:
        ended = pool.imap_unordered(explored, scenarios)  # begins them in their order
        for scenario in itertools.islice(waiting, jobs):
            begins(scenario)
        for one in ended:
            yield one
            for scenario in itertools.islice(waiting, 1):
                begins(scenario)


@ended_by_ctrl_c()
def main(arguments: list[str] | None = None) -> int:
    """Explore the scenarios of a configuration and return the exit code.

    The code is 1 at the first scenario that breaks an invariant, 130 after Ctrl-C, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_recover.sim.explore.explorer", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--config", choices=sorted(CONFIGS), default="ci", help="which scenarios (default: ci)")
    parser.add_argument("--only", default="", help="only scenarios whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="scenarios explored at a time, each by a process (default: 1)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    scenarios = [scenario for scenario in CONFIGS[options.config] if options.only in scenario.name]
    if not scenarios:
        names = ", ".join(scenario.name for scenario in CONFIGS[options.config])
        parser.error(
            f"--only {options.only}: no scenario of --config {options.config} has that in its name; there are: {names}"
        )
    total = ended = 0
    try:
        for report, seconds in explored_beside(scenarios, options.jobs, _say_that_it_begins):
            total, ended = total + report.states, ended + 1
            print(
                f"{report.scenario.name}: {report.states} states, {report.transitions} transitions, {report.ends} ends, "
                f"{seconds:.1f} s",
                flush=True,
            )
            if report.found is not None:
                print("\n".join(report.found.lines))
                print(f"VIOLATED {report.found.detail}")
                return 1
    except KeyboardInterrupt:
        print(f"interrupted; no invariant broken in {total} states: {ended} of {len(scenarios)} scenarios are explored")
        return CTRL_C_CODE
    print(f"no invariant broken in {total} states")
    return 0


def _say_that_it_begins(scenario: Scenario) -> None:
    print(f"exploring: {scenario.name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
