"""Memory that recoverability adds over unmodified Megatron, in bytes per parameter and rank.

The baseline is unmodified Megatron data parallelism. For each system, the private memory of the
ranks is measured in steady state at two sizes of the model. The slope between the sizes is bytes
per parameter; interpreter, imports and activations cancel in it. The promise in `fast` is 4 bytes
per parameter divided by the number of lanes. They are for the result of the reduction, which is out
of place.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import tempfile
import time

import psutil

from benchmarks.common import Row, end, row
from benchmarks.overhead import commands
from tests.system.jobs import ROOT, Job, text_data

ITERATION, DEADLINE_S, RUNS = 5, 240.0, 3
SMALL, LARGE = 128, 640
LAYERS, VOCABULARY, SEQUENCE = 4, 384, 32


def num_parameters(hidden: int) -> int:
    """Return the number of parameters of the benchmark's GPT (tied embeddings)."""
    block = 12 * hidden * hidden + 13 * hidden
    return LAYERS * block + (VOCABULARY + SEQUENCE) * hidden + 2 * hidden


def private_bytes(command: list[str], num_ranks: int) -> float:
    """Return the mean private memory of the `num_ranks` largest processes at a logged iteration."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip
    deadline = time.monotonic() + DEADLINE_S
    sizes: list[int] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = re.search(r"iteration\s+(\d+)/", line)
            if found and int(found.group(1)) >= ITERATION:
                children = psutil.Process(process.pid).children(recursive=True)
                sizes = sorted((child.memory_full_info().uss for child in children), reverse=True)[:num_ranks]
                break
            if time.monotonic() > deadline:
                break
    finally:
        end(process)
    if len(sizes) != num_ranks:
        raise RuntimeError(f"the run did not reach iteration {ITERATION}: {' '.join(command)}")
    return sum(sizes) / num_ranks


def rows() -> list[Row]:
    """Return the added bytes per parameter."""
    job = Job(replicas=2, microbatches=2, steps=10_000, determinism="fast", bucket_elements=40_000_000)
    added = []
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        for run in range(RUNS):
            measured: dict[str, list[float]] = {"ours": [], "baseline": []}
            for hidden in (SMALL, LARGE):
                sized = dataclasses.replace(job, extra=("--hidden-size", str(hidden), "--num-layers", str(LAYERS)))
                ours, baseline = commands(sized, data, folder, f"{run}-{hidden}")
                measured["ours"].append(private_bytes(ours, job.replicas))
                measured["baseline"].append(private_bytes(baseline, job.replicas))
            size = num_parameters(LARGE) - num_parameters(SMALL)
            slopes = {key: (large - small) / size for key, (small, large) in measured.items()}
            added.append(slopes["ours"] - slopes["baseline"])
    against = "unmodified Megatron data parallelism under torchrun"
    return [row("memory added a parameter and rank (fast, one lane)", added, "bytes", baseline=against, goal="<= 5")]
