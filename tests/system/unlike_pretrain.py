"""`scripts/pretrain_gpt.py` where replica 1 is not started like the others: with another weight decay."""

from __future__ import annotations

import pathlib
import runpy
import sys

from megatron_recover.config import rank_context

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def main() -> None:
    """Train; differ."""
    context = rank_context()
    if context is not None and context.replica == 1:
        sys.argv += ["--weight-decay", "0.02"]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
