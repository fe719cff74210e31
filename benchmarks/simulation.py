"""The simulator against real runs: the same scenarios on both, compared step by step.

Three scenarios of `scenarios/` run on the virtual clock and on real processes: undisturbed, a
replica killed early in a step, two kills in pipelines (the first after the last backward). Step
times run from commit to commit. The first step of a run, in which processes warm up, is left out.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.common import Row, row
from tests.system.jobs import ROOT

SCENARIOS = ("local-undisturbed", "local-early-kill", "local-two-kills")
DEADLINE_S = 180.0


def ratios(name: str, folder: pathlib.Path) -> list[float]:
    """Return simulated over real seconds of every step."""
    command = [
        sys.executable, "-m", "megatron_recover", "simulate", str(ROOT / "scenarios" / f"{name}.toml"),
        "--processes", str(folder / name), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    return [step["simulated_over_real"] for step in json.loads(done.stdout)["steps"]]


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        for scenario in SCENARIOS:
            found = ratios(scenario, pathlib.Path(name))
            yield row(f"simulated over real step, {scenario}", found, "ratio", baseline="real processes, paced microbatches")
            off = [abs(ratio - 1) for ratio in found]
            yield row(f"simulated step off the real one, worst, {scenario}", off, "fraction", value=max(off), goal="<= 0.15")
