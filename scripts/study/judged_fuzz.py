"""Random jobs of the fuzzer, whose traces the rules of `check` judge.

    python -m scripts.study.judged_fuzz --seeds 10000 --seed 1 [--jobs 2]

The fuzzer judges its jobs by `core/invariants.py`. Here the same jobs write traces, and the rules
of `check`, which share nothing with those, judge them. So each proves the other: a job that holds
has to pass `check`, and `check` has to know all that a job may do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator

import msgspec

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.history import History
from megatron_recover.observe.verify.check import Violation, violations
from megatron_recover.sim.timed import fuzz
from megatron_recover.sim.timed.traced import TracedJob
from megatron_recover.sim.workers import ended_by_ctrl_c, of_seeds

COMMAND = "python -m scripts.study.judged_fuzz"


class Judged(msgspec.Struct, frozen=True):
    """The verdicts of both judges on the job of a seed."""

    verdict: fuzz.SeedVerdict
    violations: tuple[Violation, ...] = ()
    """Of its trace; none if the fuzzer has found a problem before."""
    events: int = 0
    """Number of events in the trace."""

    @property
    def problem(self) -> str | None:
        """Return what is wrong with the job or its trace, or None."""
        if self.verdict.problem is not None or not self.violations:
            return self.verdict.problem
        first = self.violations[0]
        return f"check: {first.invariant}, line {first.line}: {first.message} (violations: {len(self.violations)})"


def judge(job: TracedJob, seed: int) -> Judged:
    """Run a job to its end and judge it and its trace."""
    verdict = fuzz.run(job, seed)
    if verdict.problem is not None:
        return Judged(verdict)
    job.finish()
    found = violations(History(job.trace))
    if job.gone_drifted and verdict.exit_code != ExitCode.DIVERGED:  # `check` excuses only what was outvoted
        found = tuple(one for one in found if not _is_of_drift(one))
    return Judged(verdict, found, len(job.trace))


def _is_of_drift(one: Violation) -> bool:
    """Return whether a violation may be one result that differs from another."""
    return "checksum" in one.message or one.message.endswith("though sums are exact")


def judge_seed(seed: int) -> Judged:
    """Run the job of a seed and judge it and its trace."""
    return judge(TracedJob(seed), seed)


def judged(seeds: Iterable[int], jobs: int = 1) -> Iterator[Judged]:
    """Yield what the judges say of all seeds, which run in `jobs` processes."""
    yield from of_seeds(judge_seed, seeds, jobs)


@ended_by_ctrl_c()
def main(arguments: list[str] | None = None) -> int:
    """Judge seeds and return the exit code: 1 if one fails, else 0."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="the first (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    failed = events = newcomers = joined = 0
    for one in judged(range(options.seed, options.seed + options.seeds), options.jobs):
        if one.problem is not None:
            seed = one.verdict.seed
            lines = ["", *one.verdict.faults, f"seed {seed}: {one.problem}", f"{COMMAND} --seed {seed} --seeds 1"]
            print("\n".join(lines), flush=True)
        failed += one.problem is not None
        events += one.events
        newcomers += one.verdict.newcomers
        joined += one.verdict.joined
    seconds = time.monotonic() - began
    print(f"{options.seeds} seeds, {events} events in traces, {seconds:.0f} s; {joined} of {newcomers} newcomers joined")
    print(f"{options.seeds - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
