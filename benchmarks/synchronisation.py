"""Waits of the host for the device in a training step, on a pretended GPU.

A wait leaves the device with nothing to do until the host has enqueued more. Each synchronous copy,
each number that is read from the device and each event that is waited for is counted
(`tests/pretend_gpu.py`). Waits in upstream's own code are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common import Row, row
from tests.megatron.synchronisation import LARGE, SMALL, waits_of_a_step

RUNS = 3


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    for determinism in ("fast", "exact"):
        for name, size in (("smallest", SMALL), ("larger", LARGE)):
            waits = [waits_of_a_step(size, determinism=determinism).total() for _ in range(RUNS)]
            of = f"{size.num_buckets} buckets, {size.num_microbatches} microbatches, {size.num_parameters} parameters"
            yield row(f"waits a step, {determinism}, {name} ({of})", waits, "waits", goal="<= 4")
