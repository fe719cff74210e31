"""`scripts/pretrain_gpt.py` where data is corrupted silently: replica 1 changes a weight after its third optimizer step."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_recover.config import rank_context

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def main() -> None:
    """Train; drift."""
    context = rank_context()
    steps: list[int] = []

    def drift(optimizer: Any, *_: Any) -> None:
        steps.append(1)
        if context is not None and context.replica == 1 and len(steps) == 3:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].view(-1)[0] += 0.5

    register_optimizer_step_post_hook(drift)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
