"""`scripts/pretrain_gpt.py` where a forward or backward takes 5 ms of a clock of its own, times the factor of a slow rank.

Passes are measured by that clock, so that quotas do not depend on what else the machine does.
"""

from __future__ import annotations

import pathlib
import runpy

from megatron_recover.trainer.microbatches import Microbatches
from megatron_recover.trainer.stopwatch import Stopwatch

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
SECONDS = 0.005


def main() -> None:
    """Train by that clock."""
    now_ns = 1

    def elapsed_s(self: Microbatches) -> float:
        nonlocal now_ns
        seconds = SECONDS if self._faults is None else self._faults.stretch(self._step, SECONDS)
        now_ns += int(1e9 * seconds)
        return seconds

    Microbatches._elapsed_s = elapsed_s
    Stopwatch._now = lambda self: now_ns
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
