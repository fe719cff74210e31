"""What 10,000 strangers cost a running job: its step time while they come and while they are there, against before and after.

    python -m benchmarks.run --only strangers

A toy job (tests/cluster/toy.py) whose microbatches take a fixed time; strangers without the key besiege every port of it, with
garbage, silence, a byte a second and forged openings (tests/cluster/strangers.py). Quiet and besieged windows of one run take
turns. Where the hard limit on descriptors allows fewer strangers, the row's name says how many there were.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from benchmarks.common import Row, row
from megatron_recover import trace
from tests.cluster.jobs import Spec
from tests.cluster.running import FOR_EVER, Running
from tests.cluster.strangers import Siege, ports_of, raise_descriptor_limit

NUM_STRANGERS = 10_000
ROUNDS = 5
WINDOW_S = 3.0
SPEC = {"replicas": 2, "ranks": 1, "microbatches": 4, "pace_s": 0.02, "steps": FOR_EVER}


def _step_s(applied: list[float], first: int, last: int) -> float:
    """The median time of the steps between two positions in what was applied."""
    return statistics.median(after - before for before, after in itertools.pairwise(applied[first : last + 1]))


def rows() -> Iterable[Row]:
    """The ratios of step times, and how many strangers were let go."""
    num_strangers = min(NUM_STRANGERS, raise_descriptor_limit() - 1000)
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        job = Running(Spec(run_dir=str(Path(name) / "run"), **SPEC))
        windows: list[tuple[int, int, int, int]] = []
        let_go: list[float] = []
        try:
            job.until_training()
            ports = ports_of([psutil.Process(job.launcher.pid), *job.processes])
            for _ in range(ROUNDS):
                began = job.num_applied()
                time.sleep(WINDOW_S)
                comes = job.num_applied()
                siege = Siege(ports, num_strangers)
                assert siege.full.wait(120)
                there = max(job.num_applied(), comes + 2)
                time.sleep(WINDOW_S)
                over = job.num_applied()
                siege.lift()
                windows.append((began, comes, there, over))
                let_go.append(siege.num_let_go)
            assert job.launcher.poll() is None, "the job has ended"
        finally:
            job.close()
        events = [event for _, event in trace.read(Path(name) / "run" / trace.EVENTS_FILE)]
    assert not any(isinstance(event, trace.Failure) for event in events), "somebody was lost"
    applied = [event.t for event in events if isinstance(event, trace.Applied) and (event.replica, event.rank) == (0, 0)]
    quiet = [_step_s(applied, began, comes) for began, comes, _, _ in windows]
    came = [_step_s(applied, comes, there) / at for (_, comes, there, _), at in zip(windows, quiet, strict=True)]
    stayed = [_step_s(applied, there, over) / at for (_, _, there, over), at in zip(windows, quiet, strict=True)]
    against = "the same run without strangers"
    return [
        row(f"step time while {num_strangers} strangers are there", stayed, "x", baseline=against, goal="< 1.1"),
        row(f"step time while {num_strangers} strangers come", came, "x", baseline=against),
        row(f"strangers let go, of {num_strangers}", let_go, ""),
    ]
