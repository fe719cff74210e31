"""Bytes that a rank sends to other replicas per step, with FSDP2 and with DDP of one lane.

All bytes on the loopback of a network namespace count, as in `traffic`, and most of those of FSDP2
stay inside a replica. So a job of two replicas is compared with a job of one replica, with half of
the microbatches, twice: what two such replicas send more when they are one job crosses replicas.
That is gradients, votes, and whatever else. The promise is that each of L lanes sends 1/L of what
the only lane of a DDP replica sends. Needs root and `unshare` (util-linux).
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from functools import partial

from benchmarks import traffic
from benchmarks.common import Row, row
from benchmarks.overhead import DEADLINE_S, Case, Side, commands, measure, ranks, shaped
from tests.system.jobs import FSDP2, Job, text_data

RUNS, STEPS, LANES = 3, 20, 2
DDP = Job(replicas=2, microbatches=4, extra=FSDP2[1:])
SHARDED = Job(replicas=2, lanes=LANES, microbatches=4, extra=FSDP2)


def sent(job: Job, data: pathlib.Path, folder: pathlib.Path, name: str) -> float:
    """Return the bytes that all processes of a job send per step."""
    shape = shaped(Case("", job, 32, STEPS, 1), steps=10_000)
    command, _ = commands(shape, data, folder, name)
    log = folder / name / "logs" / f"replica-0-rank-{ranks(job) - 1}.log"
    [found] = measure(
        [partial(Side, traffic.alone(command), folder / f"{name}.log", log, traffic.sent_bytes)], STEPS, DEADLINE_S
    )
    return found


def across(job: Job, data: pathlib.Path, folder: pathlib.Path) -> float:
    """Return the bytes per step that a rank of `job`, of two replicas, sends to the other one."""
    folder.mkdir()
    half = dataclasses.replace(job, replicas=1, microbatches=job.microbatches // job.replicas)
    together, by_itself = (sent(each, data, folder, f"run-{each.replicas}") for each in (job, half))
    return (together - job.replicas * by_itself) / (job.replicas * ranks(job))


def rows() -> list[Row]:
    """Return the row of this benchmark."""
    ratios, kilobytes = [], []
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        for run in range(RUNS):
            found, expected = across(SHARDED, data, folder / f"{run}-fsdp2"), across(DDP, data, folder / f"{run}-ddp")
            ratios.append(found / expected)
            kilobytes.append(f"{found / 1e3:.0f}")
    return [
        row(
            f"FSDP2: bytes a rank sends to other replicas a step, {LANES} lanes (ours {', '.join(kilobytes)} kB)", ratios,
            "ratio", baseline="the same model with DDP in replicas of one lane", goal=f"<= {1.05 / LANES:g}",
        )
    ]  # fmt: skip
