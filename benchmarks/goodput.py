"""Goodput of a real run that loses half of its replicas one by one, over the best integer quotas.

16 replicas have forwards and backwards that are paced to a fixed wall time, so the number of cores
does not matter. In every second step one replica is killed, each time at another microbatch, until
8 are left.

- The ideal of a step without a death is the best integer quotas: ceil(M / replicas) microbatches of
  the run's median time.
- The ideal of a step with a death is that of the survivors. But it is at least the time up to the
  kill, plus the time in which the survivors compute the lost microbatches.

The ideal includes nothing else: reduction, vote, optimizer and recovery count against us.
"""

from __future__ import annotations

import math
import pathlib
import statistics
import tempfile
from typing import Any

from benchmarks import paced
from benchmarks.common import Row, row
from tests.system.jobs import Job, text_data

REPLICAS, LOST, FIRST_STEP, EVERY = 16, 8, 2, 2
STEPS = FIRST_STEP + EVERY * LOST + 2
PACE_S = 0.4
"""Seconds of a forward, and of a backward."""
JOB = Job(replicas=REPLICAS, microbatches=64, steps=STEPS, determinism="fast", extra=("--overlap-grad-reduce",))
DEADLINE_S = 400.0
RUNS = 3


def chaos() -> str:
    """Return the chaos file: the highest replicas die first, each in another backward."""
    return "\n".join(
        f'[[fault]]\nreplica = {REPLICAS - 1 - index}\nrank = 0\npoint = "backward"\n'
        f"step = {FIRST_STEP + EVERY * index}\noccurrence = {1 + index % 4}"
        for index in range(LOST)
    )


def goodput(events: list[dict[str, Any]]) -> float:
    """Return ideal over measured seconds, from the second step to the end.

    The first step loads and compiles.
    """
    microbatch_s = statistics.median(event["seconds"] for event in events if event["event"] == "microbatch_finished")
    kills = {event["step"]: event["t"] for event in events if event["event"] == "fault"}
    ends = {
        step: max(event["t"] for event in events if event["event"] == "committed" and event["step"] == step)
        for step in range(STEPS)
    }
    ideal_s, replicas = 0.0, REPLICAS
    for step in range(1, STEPS):
        known_at_kill_s = 0.0
        if step in kills:
            lost = JOB.microbatches // replicas
            replicas -= 1
            known_at_kill_s = kills[step] - ends[step - 1] + math.ceil(lost / replicas) * microbatch_s
        ideal_s += max(math.ceil(JOB.microbatches / replicas) * microbatch_s, known_at_kill_s)
    return ideal_s / (ends[STEPS - 1] - ends[0])


def measure() -> float:
    """Run once; return the goodput."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        more = ("--paced-backward-s", str(PACE_S))
        events = paced.run(JOB, folder / "job", text_data(folder), chaos(), PACE_S, *more, deadline_s=DEADLINE_S)
    assert len({event["replica"] for event in events if event["event"] == "fault"}) == LOST
    return goodput(events)


def rows() -> list[Row]:
    """Return the row of this benchmark."""
    return [
        row(
            f"goodput, {REPLICAS} replicas losing {LOST} one by one", [measure() for _ in range(RUNS)], "ratio",
            baseline="the best integer quotas", goal=">= 0.97",
        )
    ]  # fmt: skip
