"""Bytes moved per step by `megatron-recover run`, compared with unmodified Megatron.

The baseline is unmodified Megatron data parallelism. Each side runs the same job without a fault,
in a network namespace of its own. All bytes on the namespace's loopback count: gradients, votes,
orders, pipeline messages. Needs root and `unshare` (util-linux).
"""

from __future__ import annotations

import pathlib
import shlex
import tempfile
from functools import partial

from benchmarks.common import Row, row
from benchmarks.overhead import CASES, DEADLINE_S, Side, commands, measure, shaped
from tests.system.jobs import text_data

STEPS = 20


def sent_bytes(pid: int) -> float:
    """Return the bytes sent on the loopback of a process's network namespace, with headers."""
    lines = pathlib.Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    [counters] = [line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")]
    return float(counters[8])


def alone(command: list[str]) -> list[str]:
    return ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {shlex.join(command)}"]


def rows() -> list[Row]:
    """Return the rows of this benchmark."""
    result = []
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        for index, case in enumerate(CASES):
            job = shaped(case, steps=10_000)
            ours, baseline = commands(job, data, folder, f"run-{index}")
            log = folder / f"run-{index}" / "logs" / f"replica-0-rank-{job.tp * job.pp - 1}.log"
            output = folder / f"{index}.baseline.log"
            [moved] = measure([partial(Side, alone(ours), folder / f"{index}.log", log, sent_bytes)], STEPS, DEADLINE_S)
            [expected] = measure([partial(Side, alone(baseline), output, output, sent_bytes)], STEPS, DEADLINE_S)
            result.append(
                row(
                    f"bytes moved a step ({case.title}; ours {moved / 1e6:.2f} MB)", [moved / expected], "ratio",
                    baseline="unmodified Megatron data parallelism under torchrun",
                )
            )  # fmt: skip
    return result
