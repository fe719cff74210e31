"""Failure-free overhead with FSDP2: CPU-seconds per step, compared with unmodified Megatron.

As `overhead`, with `--use-torch-fsdp2` on both sides, the sides of a pair in turn. The baseline is
one FSDP2 over all ranks under torchrun, since plain Megatron has no other. Ours shards over the
lanes of each replica alone. So the two also differ in what FSDP2 itself does: a gather over two
ranks moves less than one over all, and each rank holds more of the optimizer.
"""

from __future__ import annotations

import pathlib
import tempfile

from benchmarks.common import Row, row
from benchmarks.overhead import Case, pairs
from tests.system.jobs import FSDP2, Job, text_data

JOB = Job(replicas=3, lanes=2, microbatches=12, extra=FSDP2)
"""Half as many microbatches as in the first case of `overhead`: each is one of each lane."""
CASES = (
    Case("3 replicas x 2 lanes, 12 microbatches of 2 x 256 tokens", JOB, 256, 25, 4),
    Case("the same with --overlap-grad-reduce on both sides", JOB, 256, 25, 4, overlap=True),
)


def rows() -> list[Row]:
    """Return the percentage of additional CPU time per step, one row per case, over its pairs."""
    against = "unmodified Megatron's FSDP2 over the same ranks under torchrun, same work"
    result = []
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        for index, case in enumerate(CASES):
            values = pairs(case, data, folder, str(index), at_once=False)
            title = f"FSDP2: overhead, CPU-seconds a step ({case.title}), in turn"
            result.append(row(title, values, "%", baseline=against, goal="<= 3"))
    return result
