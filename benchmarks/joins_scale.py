"""The formation of a newcomer beside 1, 3 and 7 survivors: it must not grow with their number.

    python -m benchmarks.run --only joins_scale

Real jobs of 2, 4 and 8 tiny replicas with paced forwards and backwards; each survivor has the same
number of microbatches in each job. Replicas get SIGKILL from outside, one after the other. *Last*
is the job of the most replicas and *first* that of the fewest, by their medians.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator

from benchmarks.common import Row, row
from benchmarks.join_times import Return
from benchmarks.joining import Pace, Watched, shaped, strike
from tests.system.jobs import Job, text_data

REPLICAS, KILLS, QUOTA = (2, 4, 8), 5, 4
PACE = Pace(0.15, 0.15)


def measure(replicas: int, folder: pathlib.Path, data: pathlib.Path, kills: int = KILLS) -> list[Return]:
    """Kill replicas of a job, one after the other."""
    job = shaped(Job(replicas=replicas, microbatches=QUOTA * (replicas - 1), heal="in-place"), 32, 2, 32)
    found = []
    with Watched(job, folder / f"{replicas}", data, PACE) as watched:
        for _ in range(kills):
            watched.until_steps(2)
            found.append(strike(watched, watched.members()[-1]))
    print(*found, sep="\n", file=sys.stderr, flush=True)
    return found


TIMES: dict[str, Callable[[Return], float]] = {
    "forming to formed": lambda each: each.formed - each.forming,
    "forming to member": lambda each: each.proven - each.forming,
}


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        found = {replicas: measure(replicas, folder, data) for replicas in REPLICAS}
    for what, seconds in TIMES.items():
        for replicas, returns in found.items():
            yield row(f"{what}, {replicas} replicas", list(map(seconds, returns)), "s")
        first, last = (statistics.median(map(seconds, found[replicas])) for replicas in (REPLICAS[0], REPLICAS[-1]))
        yield row(f"{what}, last over first", [last / first], "ratio", baseline="the fewest replicas", goal="<= 1.2")
