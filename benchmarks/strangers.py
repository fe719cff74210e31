"""The cost of 10,000 strangers for a running job: its step time during a siege, and before it.

    python -m benchmarks.run --only strangers

The job is a toy (tests/cluster/toy.py) whose microbatches take a fixed time. Strangers are
connections without the key to every port of the job, with garbage, silence, a byte a second and
forged openings (tests/cluster/strangers.py). Step times are measured while the strangers come and
while they are there.

Sieges of the job alternate with the same siege of as many other ports, where nobody accepts. What a
step then takes longer is the price of the CPU time that the strangers themselves use. If the hard
limit on descriptors allows fewer strangers, the rows name their number.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.common import Row, row
from megatron_recover import trace
from megatron_recover.control_plane.wire import listen
from tests.cluster.jobs import Spec
from tests.cluster.running import FOR_EVER, Running
from tests.cluster.strangers import Siege, ports_of, raise_descriptor_limit

NUM_STRANGERS = 10_000
ROUNDS = 5
WINDOW_S = 3.0
SPEC = {"replicas": 2, "ranks": 1, "microbatches": 4, "pace_s": 0.02, "steps": FOR_EVER}


class Window(NamedTuple):
    """A siege: positions in the list of steps that rank 0 of replica 0 has applied."""

    began: int
    comes: int
    there: int
    over: int
    let_go: int
    came_in_s: float


def _siege(job: Running, ports: Sequence[int], num_strangers: int) -> Window:
    began = job.num_applied()
    time.sleep(WINDOW_S)
    comes, at = job.num_applied(), time.monotonic()
    siege = Siege(ports, num_strangers)
    try:
        assert siege.full.wait(120)
        came_in_s = time.monotonic() - at
        there = max(job.num_applied(), comes + 2)
        time.sleep(WINDOW_S)
        return Window(began, comes, there, job.num_applied(), siege.num_let_go, came_in_s)
    finally:
        siege.lift()


def _elsewhere(job: Running, num_ports: int, num_strangers: int) -> Window:
    """Besiege listeners of this process, which accepts nobody, in the same way."""
    with contextlib.ExitStack() as stack:
        here: list[socket.socket] = [stack.enter_context(listen("127.0.0.1:0")) for _ in range(num_ports)]
        return _siege(job, [each.getsockname()[1] for each in here], num_strangers)


def _step_s(applied: list[float], first: int, last: int) -> float:
    """Return the median time of the steps between two positions in the applied steps."""
    return statistics.median(after - before for before, after in itertools.pairwise(applied[first : last + 1]))


def rows() -> Iterable[Row]:
    """Return the ratios of step times, and how many strangers were disconnected."""
    num_strangers = min(NUM_STRANGERS, raise_descriptor_limit() - 1000)
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        job = Running(Spec(run_dir=str(Path(name) / "run"), **SPEC))
        besieged: list[Window] = []
        elsewhere: list[Window] = []
        try:
            job.until_training()
            ports = ports_of([psutil.Process(job.launcher.pid), *job.processes])
            for _ in range(ROUNDS):
                besieged.append(_siege(job, ports, num_strangers))
                elsewhere.append(_elsewhere(job, len(ports), num_strangers))
            assert job.launcher.poll() is None, "the job has ended"
        finally:
            job.close()
        events = [event for _, event in trace.read(Path(name) / "run" / trace.EVENTS_FILE)]
    assert not any(isinstance(event, trace.Failure) for event in events), "somebody was lost"
    applied = [event.t for event in events if isinstance(event, trace.Applied) and (event.replica, event.rank) == (0, 0)]

    def came(windows: list[Window]) -> list[float]:
        return [_step_s(applied, each.comes, each.there) / _step_s(applied, each.began, each.comes) for each in windows]

    def stayed(windows: list[Window]) -> list[float]:
        return [_step_s(applied, each.there, each.over) / _step_s(applied, each.began, each.comes) for each in windows]

    against = "the same run without strangers"
    return [
        row(f"step time while {num_strangers} strangers come", came(besieged), "x", baseline=against, goal="< 1.1"),
        row(f"step time while {num_strangers} strangers come to ports elsewhere", came(elsewhere), "x", baseline=against),
        row(f"step time while {num_strangers} strangers are there", stayed(besieged), "x", baseline=against, goal="< 1.1"),
        row(f"step time while {num_strangers} strangers are elsewhere", stayed(elsewhere), "x", baseline=against),
        row(f"time in which {num_strangers} strangers come", [each.came_in_s for each in besieged], "s"),
        row(f"strangers let go, of {num_strangers}", [each.let_go for each in besieged], ""),
    ]
