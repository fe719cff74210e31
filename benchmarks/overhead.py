"""Failure-free overhead: CPU-seconds a step of `megatron-recover run` over those of unmodified Megatron data parallelism.

Both sides train the same GPT on the same number of processes, microbatches and tokens: the baseline under `torchrun` with
upstream's data parallelism (our pretrain script without the launcher is plain Megatron), ours as replicas. Everything alive
counts on both sides: ranks, launcher or torchrun, agents, fork server. CPU-seconds are taken twice during steady state (at two
logged iterations), so start-up and shut-down are left out; runs alternate (A B A B ...) and the ratio is taken pair by pair.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import psutil

from benchmarks.common import Row, row
from tests.system.jobs import ROOT, Job, text_data

ITERATION = re.compile(r"iteration\s+(\d+)/")


@dataclasses.dataclass(frozen=True)
class Window:
    """CPU and wall seconds a step between two logged iterations."""

    cpu_s: float
    wall_s: float


def _tree_cpu_s(root: psutil.Process) -> float:
    """User and system seconds of a process and all its live descendants."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(command: list[str], first: int, last: int, deadline_s: float, env: dict[str, str] | None = None) -> Window:
    """Run a training command and measure it between the log lines of iterations `first` and `last`."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
                               start_new_session=True)
    tree = psutil.Process(process.pid)
    begin: tuple[float, float] | None = None
    end: tuple[float, float] | None = None
    tail: list[str] = []
    deadline = time.monotonic() + deadline_s
    assert process.stdout is not None
    try:
        for line in process.stdout:
            tail = [*tail[-40:], line]
            found = ITERATION.search(line)
            if found and int(found.group(1)) == first:
                begin = (_tree_cpu_s(tree), time.monotonic())
            elif found and int(found.group(1)) == last:
                end = (_tree_cpu_s(tree), time.monotonic())
                break
            if time.monotonic() > deadline:
                break
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if begin is None or end is None:
        raise RuntimeError(f"the run did not reach iteration {last}: {' '.join(command)}\n{''.join(tail)}")
    num_steps = last - first
    return Window((end[0] - begin[0]) / num_steps, (end[1] - begin[1]) / num_steps)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(job: Job, data: pathlib.Path, folder: pathlib.Path, name: str) -> tuple[list[str], list[str]]:
    """The command line of ours and of the baseline for one job."""
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    flags = job.megatron_flags(data, None)
    ours = [sys.executable, "-m", "megatron_recover", "run", "--replicas", str(job.replicas), "--run-dir", str(folder / name),
            "--", script, *flags]
    plain = [flag for flag in flags]
    for option in ("--recover-determinism", "--recover-bucket-elements"):
        at = plain.index(option)
        del plain[at:at + 2]
    world = job.replicas * job.tp * job.pp
    baseline = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(_free_port()),
                script, *plain]
    return ours, baseline


SHAPES = (("3 replicas, TP1 PP2", Job(replicas=3, pp=2, microbatches=12)), ("4 replicas, TP1 PP1", Job(replicas=4, microbatches=16)))
FIRST, LAST = 5, 45
PAIRS = 5


def rows() -> list[Row]:
    """Percent of additional CPU and wall time a step, one row a shape, over `PAIRS` pairs of runs."""
    result = []
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        for title, shape in SHAPES:
            job = dataclasses.replace(
                shape, steps=10_000, determinism="fast", bucket_elements=40_000_000,  # the default
                extra=("--hidden-size", "128", "--seq-length", "128", "--max-position-embeddings", "128", "--num-layers", "4"),
            )
            cpu, wall = [], []
            for pair in range(PAIRS):
                ours, baseline = commands(job, data, folder, f"{job.replicas}-{pair}")
                a = measure(ours, FIRST, LAST, 300)
                b = measure(baseline, FIRST, LAST, 300)
                cpu.append(100 * (a.cpu_s / b.cpu_s - 1))
                wall.append(100 * (a.wall_s / b.wall_s - 1))
            against = "unmodified Megatron data parallelism under torchrun, same work, paired runs"
            result.append(row(f"overhead, CPU-seconds a step ({title})", cpu, "%", baseline=against, goal="<= 2"))
            result.append(row(f"overhead, wall seconds a step ({title})", wall, "%", baseline=against))
    return result
