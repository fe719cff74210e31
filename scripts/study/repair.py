"""Repair of lost replicas in published settings, what decides it, and joins at many sizes.

    python -m scripts.study.repair --out DIR [--only settings|sizes|assumptions] [--days N]
        [--jobs N]

This module decides only which scenarios are simulated, and prints three tables:

- `settings`: the scenario files with a `[repair]` table, each with its policies, beside the papers'
  numbers.
- `sizes`: one join in jobs of 4 to 1,024 replicas.
- `assumptions`: one number of `[repair]` at a time is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_recover.core.membership_messages import NewGeneration
from megatron_recover.core.values import ReplicaId, Vote, Votes
from megatron_recover.sim.timed import result, scenario_file
from megatron_recover.sim.timed.actors import Actor, TimedCoordinator, TimedReplica
from megatron_recover.sim.timed.healing import spread
from megatron_recover.sim.timed.models import (
    HOUR_S,
    ComputeTable,
    JobTable,
    NetworkTable,
    PolicyName,
    RepairTable,
    Scenario,
    Timing,
)
from megatron_recover.sim.timed.outcome import Outcome
from megatron_recover.sim.timed.policies import simulate
from megatron_recover.sim.timed.recover import RecoverJob
from megatron_recover.sim.workers import CTRL_C_CODE, ended_by_ctrl_c, workers

COMMAND = "python -m scripts.study.repair"
SCENARIOS = Path("scenarios")
LLAMA, META = "llama3-16384", "ft-hsdp-98304"
SETTINGS = (
    (LLAMA, 3.0, "ETTR above 0.9 in its 54 days (arXiv 2407.21783)"),
    (META, 7.0, "effective training time 0.44 synchronous, 0.80 with FT-HSDP (arXiv 2602.00277)"),
    ("deadpool-512", 30.0, "training again in less than 40 s (arXiv 2607.01646)"),
    ("flashrecovery-4800", 5.0, "training again in 150 s (arXiv 2509.03047)"),
)
"""Scenario file, days that are simulated, and what its paper reports."""
VARIATIONS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    (META, "forming_s", (30, 60, 120, 300, 600, 1200)),
    (META, "spares", (0, 48, 96)),
    (META, "hardware_share", (0.0, 0.4, 0.78, 1.0)),
    (META, "repair_h", (6, 24, 72)),
    (META, "state_bytes_per_s", (25e9, 5e9, 2e9, 1e9)),
    (LLAMA, "state_bytes_per_s", (25e9, 12.5e9, 5e9)),
)
"""Scenario file, key of `[repair]` and its values, for `recover-spares`."""
VARIED_DAYS = {META: 2.0, LLAMA: 1.0}
MESSAGE_S = 1e-4
"""Time that a message of a join costs its sender and its receiver, in `sizes`."""
REPLICAS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Sizes of a job with one join."""
SETTINGS_HEAD = (
    "setting", "policy", "days", "losses", "ettr", "goodput_of_ideal", "formed", "joined", "refused", "gave_up", "lost",
    "full_strength_median_s", "full_strength_95_s", "full_strength_max_s", "not_made_up", "in_the_paper",
)  # fmt: skip
ASSUMPTIONS_HEAD = ("setting", "key", "value", *SETTINGS_HEAD[3:14])
SIZES_HEAD = (
    "replicas", "newcomer_messages", "coordinator_messages", "announcements", "window_to_admitted_s", "asked_to_admitted_s",
    "step_over_the_one_before",
)  # fmt: skip
HEADS = {"settings": SETTINGS_HEAD, "assumptions": ASSUMPTIONS_HEAD, "sizes": SIZES_HEAD}

Row = tuple[Any, ...]
"""One line of a table, as in its head."""
Task = Any
"""The arguments from which a line is computed."""


def lasting(scenario: Scenario, days: float) -> Scenario:
    """Return a scenario with as many steps as a whole job trains in `days`."""
    step_s = Timing.of(scenario).ideal_step_s(scenario.job.replicas, scenario.job.microbatches)
    steps = max(1, round(days * 24 * HOUR_S / step_s))
    return msgspec.structs.replace(scenario, job=msgspec.structs.replace(scenario.job, steps=steps))


def measures(outcome: Outcome) -> Row:
    """Return what the tables show of an outcome, from `losses` to `full_strength_max_s`."""
    new = outcome.newcomers
    counts = (new.num_formed, new.num_joined, new.num_refused, new.num_gave_up, new.num_lost) if new else ("",) * 5
    times = spread(new.to_full_s) if new else None
    return (
        outcome.losses, round(outcome.ettr, 4), round(outcome.goodput_of_ideal, 4), *counts,
        *((round(each) for each in times.values()) if times else ("",) * 3),
    )  # fmt: skip


def setting(task: Task) -> Row:
    """Return a line of `settings`: from folder, name, policy, days and the paper's number."""
    folder, name, policy, days, paper = task
    scenario = lasting(scenario_file.load(folder / f"{name}.toml"), days)
    outcome = simulate(msgspec.structs.replace(scenario, policies=(policy,)))[policy]
    left = outcome.newcomers.num_open if outcome.newcomers else ""
    return (name, policy, days, *measures(outcome), left, paper)


def settings(folder: Path, days: float | None) -> Iterator[Task]:
    """Yield the tasks of `settings`. `days`: instead of those of `SETTINGS`."""
    for name, usual_days, paper in SETTINGS:
        for policy in scenario_file.load(folder / f"{name}.toml").policies:
            yield (folder, name, policy, days or usual_days, paper)


def assumption(task: Task) -> Row:
    """Return a line of `assumptions`: from folder, name, key, value and days."""
    folder, name, key, value, days = task
    policy: PolicyName = "recover-spares"
    base = lasting(scenario_file.load(folder / f"{name}.toml"), days)
    assert base.repair is not None
    changes: dict[str, Any] = {key: value}
    repair = msgspec.structs.replace(base.repair, **changes)
    outcome = simulate(msgspec.structs.replace(base, policies=(policy,), repair=repair))[policy]
    return (name, key, f"{value:g}", *measures(outcome))


def assumptions(folder: Path, days: float | None) -> Iterator[Task]:
    """Yield the tasks of `assumptions`. `days`: instead of those of `VARIED_DAYS`."""
    for name, key, values in VARIATIONS:
        for value in values:
            yield (folder, name, key, value, days or VARIED_DAYS[name])


class JoinJob(RecoverJob):
    """A job in which one replica dies and one newcomer joins, with its messages counted."""

    num_sources = 0
    """Most members from which a rank of the newcomer reads at once."""

    def __init__(self, scenario: Scenario) -> None:
        self.num_of_newcomer = self.num_of_coordinator = self.num_announcements = 0
        self.is_ready = False
        self.read_at = self.asked_at = self.admitted_at = 0.0
        super().__init__(scenario, policy="recover-in-place")
        step_s = Timing.of(scenario).ideal_step_s(scenario.job.replicas, scenario.job.microbatches)
        self.clock.at(1.5 * step_s, self.kill, scenario.job.replicas - 1)

    def send(self, source: Actor, destination: TimedReplica | TimedCoordinator, departs: float, message: Any) -> None:
        super().send(source, destination, departs, message)
        if self.admitted_at:
            return
        if isinstance(message, NewGeneration):
            self.num_announcements += self.is_ready
        elif not isinstance(message, Vote | Votes):  # those of the step that runs
            is_of_newcomer = any(isinstance(one, TimedReplica) and one.is_newcomer for one in (source, destination))
            before_announcement = not self.num_announcements
            self.num_of_newcomer += is_of_newcomer  # those of its formation, too
            is_counted = self.is_ready and before_announcement
            self.num_of_coordinator += is_counted and self.coordinator in (source, destination)

    def sources(self, serving: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
        found = super().sources(serving)
        self.num_sources = max(self.num_sources, len(found))
        return found

    def reached(self, one: TimedReplica, phase: str) -> None:
        super().reached(one, phase)
        now = self.clock.now
        if phase == "is ready":
            self.is_ready = True
        elif phase == "reads":
            self.read_at = now
        elif phase == "asks":
            self.asked_at = now
        elif phase == "is admitted":
            self.admitted_at = now


def one_join(replicas: Task) -> Row:
    """Return the line of `sizes` for a job of that many replicas: one is lost and formed anew.

    Messages of the newcomer are counted until it is admitted. Those of the coordinator are counted
    from when the ranks of the newcomer are ready, without the announcement. The window opens with a
    step.
    """
    job = join_job(replicas)
    ends = [*itertools.accumulate(job.step_seconds)]
    step = next(number for number, end in enumerate(ends) if end > job.admitted_at)
    return (
        replicas, job.num_of_newcomer, job.num_of_coordinator, job.num_announcements,
        round(job.admitted_at - job.read_at, 3), round(job.admitted_at - job.asked_at, 3),
        round(job.step_seconds[step] / job.step_seconds[step - 1], 4),
    )  # fmt: skip


def join_job(replicas: int) -> JoinJob:
    """Return the job of that line, at its end."""
    scenario = Scenario(
        job=JobTable(replicas=replicas, ranks=1, microbatches=16 * replicas, steps=8, buckets=1),
        compute=ComputeTable(microbatch_s=1.0),
        network=NetworkTable(bytes_per_s=25e9, gradient_bytes=1e9, message_s=MESSAGE_S, read_bytes_per_s=7e6),
        repair=RepairTable(vacate_s=1.0, forming_s=13.0, state_bytes=25e9, state_bytes_per_s=25e9, node_gpus=1),
    )
    job = JoinJob(scenario)
    job.run()
    return job


def sizes(folder: Path, days: float | None) -> Iterator[Task]:
    """Yield the tasks of `sizes`, which depend on nothing."""
    yield from REPLICAS


TABLES: dict[str, tuple[Callable[[Path, float | None], Iterator[Task]], Callable[[Task], Row]]] = {
    "settings": (settings, setting), "sizes": (sizes, one_join), "assumptions": (assumptions, assumption),
}  # fmt: skip
"""Name of each table, its tasks, and what computes the line of a task."""


def rows(name: str, folder: Path, days: float | None, jobs: int) -> Iterator[Row]:
    """Yield the lines of a table, computed in `jobs` processes."""
    find, compute = TABLES[name]
    tasks = [*find(folder, days)]
    found: list[Row] = []
    with workers(jobs) if jobs > 1 else contextlib.nullcontext() as pool:
        for row in map(compute, tasks) if pool is None else pool.imap(compute, tasks):
            found.append(row)
            yield row
    if name == "sizes":
        yield ("last over first", *(round(last / first, 3) for first, last in zip(found[0][1:], found[-1][1:], strict=True)))


def markdown(head: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table for the documents."""
    yield f"| {' | '.join(name.replace('_', ' ') for name in head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


@ended_by_ctrl_c()
def main(arguments: list[str] | None = None) -> int:
    """Compute the tables and return the exit code: 2 for a wrong scenario, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where a CSV file of each table goes")
    parser.add_argument("--only", choices=tuple(TABLES), help="one of the tables")
    parser.add_argument("--days", type=float, help="simulated days of each line (default: 2 to 30, by setting)")
    parser.add_argument("--scenarios", type=Path, default=SCENARIOS, metavar="DIR", help="folder of the scenario files")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    if options.days is not None and not 0 < options.days <= 365:
        parser.error(f"--days is {options.days:g}; it must be above 0 and at most 365")
    result.make_folder(parser, options.out)
    began = time.monotonic()
    for name in (options.only,) if options.only else TABLES:
        found: list[Row] = []
        is_interrupted = False
        try:
            for row in rows(name, options.scenarios, options.days, options.jobs):
                found.append(row)
                print(f"{time.monotonic() - began:6.0f} s  {name}: {' | '.join(map(str, row))}", file=sys.stderr, flush=True)
                result.write_csv(options.out / f"{name}.csv", HEADS[name], found)
        except ValueError as error:
            parser.error(str(error))
        except KeyboardInterrupt:
            is_interrupted = True
        print("\n".join([f"{name}:", "", *markdown(HEADS[name], found), ""]), flush=True)
        if is_interrupted:
            return CTRL_C_CODE
    print(f"wrote {', '.join(str(options.out / f'{name}.csv') for name in ((options.only,) if options.only else TABLES))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
