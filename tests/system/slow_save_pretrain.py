"""`scripts/pretrain_gpt.py` on a slow disk: replica 0 takes `SECONDS` for every checkpoint that it saves.

With SLOW_SAVES=N it takes so long for the first N only.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import runpy
import time
from typing import Any

from megatron_recover.config import rank_context

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
SECONDS = 10.0


def main() -> None:
    """Train; save slowly."""
    from megatron.training import training

    context, upstream = rank_context(), training.save_checkpoint
    slow = iter(range(int(os.environ["SLOW_SAVES"]))) if "SLOW_SAVES" in os.environ else itertools.count()

    @functools.wraps(upstream)
    def save_slowly(*args: Any, **kwargs: Any) -> None:
        if context is not None and context.replica == 0 and next(slow, None) is not None:
            time.sleep(SECONDS)
        upstream(*args, **kwargs)

    training.save_checkpoint = save_slowly
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
