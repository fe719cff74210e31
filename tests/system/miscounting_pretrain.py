"""`scripts/pretrain_gpt.py` where replica 1 counts a microbatch of training step 3 twice, in the first `MISCOUNTS` attempts."""

from __future__ import annotations

import os
import pathlib
import runpy
from typing import Any

from megatron_recover.config import rank_context
from megatron_recover.megatron.reduction import Reduction

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
STEP = 2


def main() -> None:
    """Train; miscount."""
    context = rank_context()
    count, void = Reduction._count, Reduction.void
    attempts = [1]
    struck: set[int] = set()

    def miscount(self: Reduction, slot: Any, microbatch: int) -> None:
        count(self, slot, microbatch)
        here = context is not None and context.replica == 1 and context.rank == 0 and self._step == STEP
        if here and attempts[-1] <= int(os.environ["MISCOUNTS"]) and attempts[-1] not in struck:
            struck.add(attempts[-1])
            count(self, slot, microbatch)

    def again(self: Reduction) -> None:
        void(self)
        attempts.append(attempts[-1] + 1)

    Reduction._count, Reduction.void = miscount, again  # type: ignore[method-assign]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
