"""`scripts/pretrain_gpt.py` where data is corrupted silently: replica 1 changes a weight after its third optimizer step."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_recover.config import rank_context


def main() -> None:
    """Train; drift."""
    script = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
    spec = importlib.util.spec_from_file_location("pretrain_gpt", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    context = rank_context()
    steps: list[int] = []

    def drift(optimizer: Any, *_: Any) -> None:
        steps.append(1)
        if context is not None and context.replica == 1 and len(steps) == 3:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].view(-1)[0] += 0.5

    register_optimizer_step_post_hook(drift)
    module.main()


if __name__ == "__main__":
    main()
