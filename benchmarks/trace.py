"""The cost of recording an event for a rank: into a ring, compared with a write to the trace file.

    python -m benchmarks.run --only trace

A rank without a recorder uses one `write` to the trace file. The benchmark measures thread CPU
time, both sides in turn in one process, and the cost on the recorder's side.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from collections.abc import Callable

from benchmarks.common import Row, row
from megatron_recover import trace
from megatron_recover.trace import ring
from megatron_recover.trace.node_clock import NodeClock

RUNS = 15
EVENTS = 5_000
EVENT = trace.MicrobatchFinished(
    replica=1, rank=0, generation=1, step=3, microbatch=5, seconds=0.25, backward_s=0.125, into=(0, 2)
)
"""The most common event."""


def _nanoseconds(work: Callable[[], object], count: int) -> float:
    begin = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - begin) / count


def rows() -> list[Row]:
    """Return the rows of this benchmark."""
    into_ring: list[float] = []
    into_file: list[float] = []
    merged: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name,
        trace.EventLog(pathlib.Path(name) / trace.EVENTS_FILE, 0.0) as file,
    ):
        for _ in range(RUNS):
            descriptor = ring.create()
            log, merge = ring.RingLog(descriptor, NodeClock(None)), ring.Merge(settle=lambda: None)
            merge.add(0, ring.RingReader(descriptor))
            os.close(descriptor)
            for record, found in ((log.record, into_ring), (file.record, into_file)):
                found.append(_nanoseconds(lambda record=record: [record(EVENT) for _ in range(EVENTS)], EVENTS))
            merged.append(_nanoseconds(lambda merge=merge: merge.drain(time.monotonic_ns() + 1), EVENTS))
    against = "one write to the trace file"
    ratios = [ours / theirs for ours, theirs in zip(into_ring, into_file, strict=True)]
    return [
        row("recording an event in a ring", into_ring, "ns"),
        row("recording an event, ring over file", ratios, "ratio", baseline=against, goal="<= 1"),
        row("merging an event (recorder)", merged, "ns"),
    ]
