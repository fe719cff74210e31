"""The cost of a death with FSDP2: the failing step against an ideal one, work redone.

As `recovery` without a pipeline: real jobs, paced forwards, `--overlap-grad-reduce`, one kill, and
the same ideal. Here a replica has two lanes, which FSDP2 shards.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

from benchmarks import recovery
from benchmarks.common import Row, row
from tests.system.jobs import FSDP2, text_data

JOB = dataclasses.replace(
    recovery.FLAT, replicas=3, lanes=2, microbatches=12, extra=(*recovery.FLAT.extra, *FSDP2)
)  # fmt: skip
ROUNDS, PACE_S = 2, 0.2


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        runs = [
            recovery.measure(JOB, folder / str(number), data, point, PACE_S)
            for number, point in enumerate(recovery.POINTS * ROUNDS)
        ]
    ideal = "the best schedule that knows of the death only at the kill"
    yield row(
        "FSDP2: SIGKILL to the last survivor's new plan, 2 lanes", [run.kill_to_plan_ms for run in runs], "ms", goal="< 150"
    )
    yield row(
        "FSDP2: failing step over ideal, 2 lanes", [run.step_s / run.ideal_s for run in runs], "ratio", baseline=ideal,
        goal="<= 1.1",
    )  # fmt: skip
    yield row("FSDP2: microbatches redone over lost", [run.redone / run.lost for run in runs], "ratio", goal="== 1")
    yield row("FSDP2: microbatches wasted", [float(run.wasted) for run in runs], "count", goal="== 0")
