"""Losses over 200 steps, compared with unmodified Megatron data parallelism under torchrun.

Both sides train a tiny GPT from the same seed on the same data, without dropout, whose masks differ
by design. Three replicas stand against three data-parallel ranks. `exact` loses a replica on the
way. Losses are those of the log, which has seven digits. From 65536 on fp16 overflows: in other
steps than upstream, since gradients in flight are smaller.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from benchmarks.common import Row, row
from tests.system.jobs import ROOT, Job, chaos_text, run_job, text_data

STEPS, REPLICAS = 200, 3
JOB = Job(
    replicas=REPLICAS, steps=STEPS, determinism="fast", extra=("--hidden-dropout", "0", "--attention-dropout", "0")
)  # fmt: skip
VARIANTS = {
    "fp32, fast": (JOB, ()),
    "fp32, exact, one death": (dataclasses.replace(JOB, determinism="exact"), (f"1 0 backward step={STEPS // 2}",)),
    "bf16, fast": (dataclasses.replace(JOB, extra=(*JOB.extra, "--bf16")), ()),
    "fp16, fast": (dataclasses.replace(JOB, extra=(*JOB.extra, "--fp16", "--initial-loss-scale", "1024")), ()),
    "fp16, fast, with overflows": (dataclasses.replace(JOB, extra=(*JOB.extra, "--fp16", "--initial-loss-scale", "65536")), ()),
}
DEADLINE_S = 600.0
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)")


def losses(output: str) -> dict[int, float]:
    """Return the logged loss of each iteration; that of a step that overflowed is left out."""
    return {int(found[1]): float(found[2]) for found in LOSS.finditer(output) if float(found[2])}


def plain(job: Job, data: pathlib.Path) -> dict[int, float]:
    """Return the losses of unmodified Megatron. Raises CalledProcessError if it fails."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.replicas),
        str(ROOT / "scripts" / "pretrain_gpt.py"), *job.megatron_flags(data, None),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return losses(done.stdout)


def differences(job: Job, faults: tuple[str, ...]) -> list[float]:
    """Return the relative difference of each step's loss that both sides logged."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        wanted = plain(job, data)
        run = run_job(job, folder / "run", data, chaos=chaos_text(*faults), quiet=True, deadline_s=DEADLINE_S).expect()
        found = losses(run.output)
    both = sorted(wanted.keys() & found.keys())
    assert len(both) > 0.9 * STEPS and both[-1] >= STEPS - 1, f"{len(wanted)} and {len(found)} losses of {STEPS}"
    return [abs(found[step] - wanted[step]) / wanted[step] for step in both]


def rows() -> list[Row]:
    """Return two rows for each variant: the largest difference, and the last."""
    found = []
    for name, (job, faults) in VARIANTS.items():
        each = differences(job, faults)
        against = "unmodified Megatron data parallelism under torchrun"
        found += [
            row(f"losses, {name}: largest relative difference", [max(each)], "ratio", baseline=against),
            row(f"losses, {name}: relative difference at the end", [each[-1]], "ratio", baseline=against),
        ]
    return found
