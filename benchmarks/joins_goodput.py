"""Useful work under kills from outside, with healing, without it, and of a job that nobody kills.

    python -m benchmarks.run --only joins_goodput           (an hour)
    python -m benchmarks.joins_goodput [--seconds 600] [--every-s 15 15] [--seeds 1 2]

Real jobs of 4 replicas with 16 microbatches a step. One member gets SIGKILL now and then, at random
times from a seed; the last member is spared, so a job without healing is left alone at its end.
Time counts from the end of the first step, and only whole steps that were committed count.

- *Peers' setting*: a microbatch of 4 x 128 tokens of a GPT of 6.6 M parameters takes 1.0 s of wall
  time; a kill every 20 to 30 s, for 120 s. The unit is microbatches a second.
- *Every 15 s*: a microbatch takes 0.5 s; a kill every 15 s, for ten minutes. The unit is the
  fraction of the best that 4 replicas could do whom nobody kills, with the run's median time of a
  microbatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks import join_times
from benchmarks.common import Row, row
from benchmarks.joining import Pace, Watched, shaped
from benchmarks.run import table
from tests.system.jobs import Job, text_data

LONG = True
REPLICAS, MICROBATCHES = 4, 16
SEEDS = (1, 2)
JOB = Job(replicas=REPLICAS, microbatches=MICROBATCHES, heal="in-place", rebalance="on")


class Setting(NamedTuple):
    """The kills of a job, in seconds."""

    name: str
    job: Job
    pace: Pace
    seconds: float
    every_s: tuple[float, float]
    """Least and largest time between two kills."""
    seeds: tuple[int, ...] = SEEDS


PEERS = Setting("peers' setting", shaped(JOB, 512, 2, 128, 4), Pace(0.4, 0.6), 120.0, (20.0, 30.0))
KILLS = Setting("a kill every 15 s", shaped(JOB), Pace(0.2, 0.3), 600.0, (15.0, 15.0))


class Work(NamedTuple):
    """The useful work of one job in its time."""

    rate: float
    """Useful microbatches a second."""
    of_ideal: float
    kills: int
    returns: int
    """Newcomers that became members."""


def measure(setting: Setting, folder: pathlib.Path, data: pathlib.Path, *, heal: str, seed: int | None) -> Work:
    """Run one job. `seed`: of the kills; None: nobody is killed."""
    rng = random.Random(seed)
    kills = 0
    with Watched(dataclasses.replace(setting.job, heal=heal), folder, data, setting.pace) as job:
        job.until_steps(1)
        begin = join_times.steps(job.events)[0].end
        left_s = setting.seconds
        while seed is not None and (wait_s := rng.uniform(*setting.every_s)) < left_s:
            job.wait(wait_s)
            left_s -= wait_s
            members = job.members()
            if len(members) > 1:
                job.kill(rng.choice(members))
                kills += 1
        job.wait(left_s + 1.0)  # for the recorder
    num_steps = join_times.num_steps(job.events, begin, setting.seconds)
    microbatch_s = statistics.median(event["seconds"] for event in join_times.of(job.events, "microbatch_finished"))
    rate = num_steps * MICROBATCHES / setting.seconds
    returns = sum(len(event["newcomers"]) for event in join_times.of(job.events, "proven"))
    work = Work(rate, rate * microbatch_s / REPLICAS, kills, returns)
    print(f"{setting.name}, healing {heal}, seed {seed}: {work}", file=sys.stderr, flush=True)
    return work


def compared(setting: Setting, folder: pathlib.Path, data: pathlib.Path) -> dict[str, list[Work]]:
    """Run all jobs of a setting: with healing and without it in turn, by seed, and then clean."""
    found: dict[str, list[Work]] = {"with healing": [], "without healing": [], "nobody killed": []}
    for seed in setting.seeds:
        for how, heal in (("with healing", "in-place"), ("without healing", "off")):
            found[how].append(measure(setting, folder / f"{how} {seed}", data, heal=heal, seed=seed))
    found["nobody killed"].append(measure(setting, folder / "clean", data, heal="in-place", seed=None))
    return found


def _rows(settings: Sequence[Setting]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        data = text_data(pathlib.Path(name))
        for number, setting in enumerate(settings):
            folder = pathlib.Path(name) / str(number)
            folder.mkdir()
            found = compared(setting, folder, data)
            for how, works in found.items():
                title = f"{setting.name}, {how}"
                goal = ">= 3.3" if setting == PEERS and how == "with healing" else ""
                yield row(f"{title}: useful work", [work.rate for work in works], "microbatches/s", goal=goal)
                ideal = "4 replicas that nobody kills, without reduction, vote and optimizer"
                yield row(f"{title}: goodput", [work.of_ideal for work in works], "ratio", baseline=ideal)
            for what in ("kills", "returns"):
                values = [float(getattr(work, what)) for work in found["with healing"]]
                yield row(f"{setting.name}, with healing: {what}", values, "count")


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    return _rows((PEERS, KILLS))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure with a length and a rate of kills as given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joins_goodput", description="Useful work under kills.")
    parser.add_argument("--peers", action="store_true", help="the peers' setting, instead of the one with a kill every 15 s")
    parser.add_argument("--seconds", type=float, help="length of each job")
    parser.add_argument("--every-s", type=float, nargs=2, help="least and largest time between two kills")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    given = parser.parse_args(argv)
    setting = PEERS if given.peers else KILLS
    every_s = setting.every_s if given.every_s is None else (given.every_s[0], given.every_s[1])
    seconds = setting.seconds if given.seconds is None else given.seconds
    changed = setting._replace(seconds=seconds, every_s=every_s, seeds=tuple(given.seeds))
    from rich.console import Console

    Console(width=200).print(table(list(_rows([changed]))))


if __name__ == "__main__":
    main()
