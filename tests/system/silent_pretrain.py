"""`scripts/pretrain_gpt.py` where one bit of state changes silently, and where a process may be told to end.

DRIFT is "replica rank step what": after that optimizer step of that rank the lowest bit of one element changes, of a moment or
of a weight that the optimizer keeps (`what`: exp_avg, weight). EXIT is "replica step": SIGTERM comes after that optimizer step.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import signal
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_recover.config import rank_context

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def main() -> None:
    """Train; drift; end."""
    context = rank_context()
    steps: list[int] = []

    def after(optimizer: Any, *_: Any) -> None:
        steps.append(1)
        if context is None:
            return
        *place, what = os.environ["DRIFT"].split()
        if [str(context.replica), str(context.rank), str(len(steps))] == place:
            weight = optimizer.param_groups[0]["params"][0]
            tensor = weight if what == "weight" else optimizer.state[weight][what]
            with torch.no_grad():
                tensor.view(-1).view(torch.int32)[0] ^= 1
        if os.environ.get("EXIT") == f"{context.replica} {len(steps)}" and context.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(after)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
