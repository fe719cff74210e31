"""`scripts/pretrain_gpt.py` where a replica counts a microbatch of a step twice, in the first attempts.

MISCOUNT is "replica step attempts"; steps are counted from 0. With DRIFT it is `silent_pretrain.py` in which that happens.
"""

from __future__ import annotations

import os
import pathlib
import runpy
from typing import Any

from megatron_recover.config import rank_context
from megatron_recover.trainer.reduction import Reduction

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
SILENT = pathlib.Path(__file__).with_name("silent_pretrain.py")


def main() -> None:
    """Train; miscount."""
    context = rank_context()
    replica, step, num_attempts = map(int, os.environ["MISCOUNT"].split())
    count, void = Reduction._count, Reduction.void
    attempts = [1]
    struck: set[int] = set()

    def miscount(self: Reduction, slot: Any, microbatch: int) -> None:
        count(self, slot, microbatch)
        here = context is not None and (context.replica, context.rank) == (replica, 0) and self._step == step
        if here and attempts[-1] <= num_attempts and attempts[-1] not in struck:
            struck.add(attempts[-1])
            count(self, slot, microbatch)

    def again(self: Reduction) -> None:
        void(self)
        attempts.append(attempts[-1] + 1)

    Reduction._count, Reduction.void = miscount, again  # type: ignore[method-assign]
    runpy.run_path(str(SILENT if os.environ.get("DRIFT") else SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
