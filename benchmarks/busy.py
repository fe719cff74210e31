"""All cores busy for ten minutes: how many ranks the detector accuses, how many replicas are lost.

A real job of 3 replicas with a pipeline of 2 trains beside endless loops of the same priority.
There are twice as many loops as cores. Steps take as long as the scheduler makes them, and
processes wait for whole time slices. But no rank hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

from benchmarks import paced
from benchmarks.common import Row, row
from megatron_recover.core.exit_code import ExitCode
from tests.system.jobs import ROOT, Job, text_data

BUSY_S, END_S = 600.0, 120.0
LOOPS_A_CORE = 2
JOB = Job(replicas=3, pp=2, microbatches=12, steps=1_000_000, determinism="fast")


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy within this context."""
    with contextlib.ExitStack() as stack:
        for _ in range(LOOPS_A_CORE * (os.cpu_count() or 1)):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield


def events_beside_busy_cores(folder: pathlib.Path) -> Counter[str]:
    """Train for `BUSY_S` seconds beside busy cores; count the trace's events (`paced.counted`)."""
    command = [
        sys.executable, "-m", "megatron_recover", "run", "--replicas", str(JOB.replicas), "--run-dir", str(folder / "run"),
        "--", str(ROOT / "scripts" / "pretrain_gpt.py"), *JOB.megatron_flags(text_data(folder), None),
    ]  # fmt: skip
    with busy_cores():
        job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = job.communicate(timeout=BUSY_S)
                raise RuntimeError(f"the job ended by itself with exit code {job.returncode}:\n{output}")
            job.send_signal(signal.SIGTERM)
            output, _ = job.communicate(timeout=END_S)
        finally:
            job.kill()
    if job.returncode != ExitCode.INTERRUPTED:
        raise RuntimeError(f"the job ended with exit code {job.returncode}:\n{output}")
    return paced.counted(map(json.loads, (folder / "run" / "events.jsonl").open()))


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        found = events_beside_busy_cores(pathlib.Path(name))
    beside = f"{LOOPS_A_CORE} endless loops a core, {time.monotonic() - began:.0f} s"
    yield row("ranks accused of a hang beside busy cores", [found["accused"]], "count", baseline=beside, goal="== 0")
    yield row("ranks called slow beside busy cores", [found["rank_silent slow"]], "count", baseline=beside)
    yield row("replicas lost beside busy cores", [found["lost"]], "count", baseline=beside, goal="== 0")
    yield row("votes beside busy cores", [found["voted"]], "count", baseline=beside)
