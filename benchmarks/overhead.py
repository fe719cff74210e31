"""Failure-free overhead: CPU-seconds per step, compared with unmodified Megatron data parallelism.

Both sides train the same GPT on the same number of processes, microbatches and tokens. The baseline
runs under `torchrun` with upstream's data parallelism: our pretrain script without the launcher is
plain Megatron. Ours runs as replicas under `megatron-recover run`. Every live process counts on
both sides: ranks, launcher or torchrun, agents, fork server.

The sides of a pair run one after the other, in changing order, since a real job has the machine to
itself. In further rows they run at the same time, so that other load on the machine affects both.
Each then has half of the processors and a step takes twice as long. So work that looks at the ranks
at intervals costs twice as much per step. The ratio is taken pair by pair. It covers the part in
which the side, or both sides, are in steady state (between log lines of iterations). Start-up and
shut-down are left out.

Neither side has worker processes that read data (`--num-workers 0`). Ours never has, and on a CPU
they would cost the baseline more than they save.

Ours forms nobody anew in these rows (`--recover-heal off`). A last row compares ours with
`--recover-heal in-place` with that, in turn, in small steps. Nobody dies there.

On neither side does the C library give memory back to the kernel within a step (`KEEP_MEMORY`). By
default it does so when the top of the heap happens to be free. Upstream's forward and backward then
fault these pages in again: 3,000 to 10,000 per step, different for each rank of either side. That
is more CPU time than everything that is measured here.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil

from benchmarks.common import Row, end, row
from megatron_recover.config import inherited_environment
from tests.system.jobs import ROOT, Job, text_data

ITERATION = re.compile(rb"iteration\s+(\d+)/")
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Settings of glibc, in bytes; 32 MiB is the largest threshold for mmap that it accepts."""
_LOOK_S = 0.02
"""Seconds between two looks at the logs."""


class Stamp(NamedTuple):
    """The use of a job up to a logged iteration, and the time of that line."""

    iteration: int
    used: float
    at_s: float


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape of job, and the settings with which it is measured."""

    title: str
    job: Job
    sequence: int
    """Tokens of a microbatch."""
    steps: int
    """Least number of steps of each side in steady state; twice as many where a side runs alone."""
    pairs: int
    overlap: bool = False
    """True if both sides reduce gradients beside the backward (`--overlap-grad-reduce`)."""


def tree_cpu_s(pid: int) -> float:
    """Return user and system seconds of a process and all its live descendants."""
    total, root = 0.0, psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


class Side:
    """One of the two jobs that are compared."""

    def __init__(
        self, command: list[str], output: pathlib.Path, log: pathlib.Path, used: Callable[[int], float] = tree_cpu_s
    ) -> None:
        """Start the command, with its output in `output`. The file `log` gets its iterations.

        `used(pid)` returns the use of the measured quantity so far.
        """
        environment = {"OMP_NUM_THREADS": "1"} | inherited_environment() | KEEP_MEMORY  # one thread: the launchers' choice
        with open(output, "wb") as stream:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )  # fmt: skip
        self._output, self._log, self._num_read, self._used = output, log, 0, used
        self.stamps: list[Stamp] = []

    def look(self) -> None:
        """Record a new iteration. Raises RuntimeError if the job has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the run has ended: {self.process.args!r}\n{self._output.read_text(errors='replace')[-4000:]}")
        with open(self._log, "rb") if self._log.exists() else io.BytesIO() as stream:
            stream.seek(self._num_read)
            news = stream.read().rpartition(b"\n")[0]
        self._num_read += len(news)
        if found := ITERATION.findall(news):
            self.stamps.append(Stamp(int(found[-1]), self._used(self.process.pid), time.monotonic()))

    def between(self, begin_s: float, end_s: float) -> tuple[int, float]:
        """Return the number of steps between two instants, and the use per step."""
        stamps = [stamp for stamp in self.stamps if begin_s <= stamp.at_s <= end_s]
        if len(stamps) < 2:
            return 0, 0.0
        steps = stamps[-1].iteration - stamps[0].iteration
        return steps, (stamps[-1].used - stamps[0].used) / steps


def measure(starts: Sequence[Callable[[], Side]], steps: int, deadline_s: float) -> list[float]:
    """Start the sides; return the use of each per step.

    The use is measured over at least `steps` steps of each side, while all sides are in steady
    state.
    """
    deadline = time.monotonic() + deadline_s
    sides: list[Side] = []
    try:
        for start in starts:
            sides.append(start())
        while time.monotonic() < deadline:
            for side in sides:
                side.look()
            if all(side.stamps and side.stamps[-1].iteration > WARM_UP for side in sides):
                begin_s = max(next(stamp.at_s for stamp in side.stamps if stamp.iteration > WARM_UP) for side in sides)
                measured = [side.between(begin_s, deadline) for side in sides]
                if all(num_steps >= steps for num_steps, _ in measured):
                    return [used for _, used in measured]
            time.sleep(_LOOK_S)
    finally:
        end(*(side.process for side in sides))
    raise RuntimeError(f"{steps} steps took more than {deadline_s:g} s; iterations: {[side.stamps[-1:] for side in sides]}")


def ranks(job: Job) -> int:
    """Return the number of ranks of a replica."""
    return job.tp * job.pp * job.lanes


def commands(job: Job, data: pathlib.Path, folder: pathlib.Path, name: str) -> tuple[list[str], list[str]]:
    """Return the command lines of ours and of the baseline for one job."""
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    flags = job.megatron_flags(data, None)
    ours = [
        sys.executable, "-m", "megatron_recover", "run", "--replicas", str(job.replicas), "--lanes", str(job.lanes),
        "--run-dir", str(folder / name), "--", script, *flags,
    ]  # fmt: skip
    plain = list(flags)
    for option in ("--recover-determinism", "--recover-bucket-elements", "--recover-rebalance", "--recover-heal"):
        at = plain.index(option)
        del plain[at : at + 2]
    world = job.replicas * ranks(job)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]  # holds its port
    baseline = [*torchrun, script, *plain]
    return ours, baseline


CASES = (
    Case("3 replicas x PP2, 24 microbatches of 256 tokens", Job(replicas=3, pp=2, microbatches=24), 256, 25, 4),
    Case(
        "3 replicas x PP2, 24 microbatches of 256 tokens, --overlap-grad-reduce on both sides",
        Job(replicas=3, pp=2, microbatches=24),
        256,
        25,
        4,
        overlap=True,
    ),
    Case("small steps: 12 microbatches of 128 tokens", Job(replicas=3, pp=2, microbatches=12), 128, 40, 3),
)
"""The usual case has 2048 tokens per replica and step, fewer than training of language models has.
The small case shows the costs per step rather than per token."""
WARM_UP = 3
"""Iterations that are not counted."""
DEADLINE_S = 400.0


def shaped(case: Case, *, steps: int) -> Job:
    """Return the job of a case, with the size and settings that are measured."""
    sequence = str(case.sequence)
    size = f"--hidden-size 128 --num-layers 4 --seq-length {sequence} --max-position-embeddings {sequence} --num-workers 0"
    return dataclasses.replace(
        case.job, steps=steps, determinism="fast", bucket_elements=40_000_000,  # the default
        extra=(*case.job.extra, *size.split(), *(("--overlap-grad-reduce",) if case.overlap else ())),
    )  # fmt: skip


def pair(case: Case, data: pathlib.Path, folder: pathlib.Path, name: str, *, at_once: bool, ours_first: bool = True) -> float:
    """Return the percentage of CPU-seconds per step that ours needs more than the baseline.

    `at_once`: the two run at the same time.
    """
    job = shaped(case, steps=10_000)
    log = folder / name / "logs" / f"replica-0-rank-{ranks(job) - 1}.log"
    output = folder / f"{name}.baseline.log"
    # The baseline's port is chosen when the baseline starts.
    begin = (
        lambda: Side(commands(job, data, folder, name)[0], folder / f"{name}.log", log),
        lambda: Side(commands(job, data, folder, name)[1], output, output),
    )
    if at_once:
        ours_s, baseline_s = measure(begin, case.steps, DEADLINE_S)
    else:
        used = {which: measure([begin[which]], 2 * case.steps, DEADLINE_S)[0] for which in ((0, 1) if ours_first else (1, 0))}
        ours_s, baseline_s = used[0], used[1]
    print(f"{case.title}: {ours_s:.3f} against {baseline_s:.3f} CPU-seconds a step", file=sys.stderr, flush=True)
    return 100 * (ours_s / baseline_s - 1)


def pairs(case: Case, data: pathlib.Path, folder: pathlib.Path, name: str, *, at_once: bool) -> list[float]:
    """Return what `pair` measures, for all pairs of a case; either side begins in turn."""
    return [
        pair(case, data, folder, f"{name}-{number}", at_once=at_once, ours_first=number % 2 == 0)
        for number in range(case.pairs)
    ]


def _readiness(case: Case, data: pathlib.Path, folder: pathlib.Path, number: int) -> float:
    """Return the percentage of CPU-seconds a step that a job needs more to be ready to heal."""
    used = {}
    for heal in ("off", "in-place") if number % 2 else ("in-place", "off"):
        name = f"{heal}-{number}"
        job = dataclasses.replace(shaped(case, steps=10_000), heal=heal)
        log = folder / name / "logs" / f"replica-0-rank-{ranks(job) - 1}.log"

        def begin(job: Job = job, name: str = name, log: pathlib.Path = log) -> Side:
            return Side(commands(job, data, folder, name)[0], folder / f"{name}.log", log)

        [used[heal]] = measure([begin], 2 * case.steps, DEADLINE_S)
    print(f"{case.title}, healing: {used} CPU-seconds a step", file=sys.stderr, flush=True)
    return 100 * (used["in-place"] / used["off"] - 1)


def rows() -> list[Row]:
    """Return the percentage of additional CPU time per step, two rows per case, over its pairs."""
    against = "unmodified Megatron data parallelism under torchrun, same work"
    result = []
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        for index, case in enumerate(CASES):
            for at_once, when in ((False, "in turn"), (True, "at the same time")):
                values = pairs(case, data, folder, f"{index}-{when}", at_once=at_once)
                title = f"overhead, CPU-seconds a step ({case.title}), {when}"
                result.append(row(title, values, "%", baseline=against, goal="<= 2"))
        small = CASES[-1]
        values = [_readiness(small, data, folder, number) for number in range(small.pairs)]
    title = f"--recover-heal in-place, CPU-seconds a step ({small.title}), in turn"
    return [*result, row(title, values, "%", baseline="--recover-heal off")]
