"""`scripts/pretrain_gpt.py` where one bit of state changes silently, and where a process may be told to end.

DRIFT is "replica rank step what": after that optimizer step of that rank the lowest bit of one element changes, of a moment, of
a weight that the optimizer keeps, or of a persistent buffer that every model chunk gets here (`what`: exp_avg, exp_avg_sq,
weight, buffer). EXIT is "replica step": SIGTERM comes after that optimizer step. LONG_SAVES is "replica seconds": saves of that
replica take so much longer, so that the others are in their next step before one is done.
"""

from __future__ import annotations

import functools
import os
import pathlib
import runpy
import signal
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_recover.config import rank_context
from megatron_recover.megatron.state import State

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def main() -> None:
    """Train; drift; end."""
    context = rank_context()
    steps: list[int] = []
    buffers = _add_buffers()

    def after(optimizer: Any, *_: Any) -> None:
        steps.append(1)
        if context is None:
            return
        *place, what = os.environ["DRIFT"].split()
        if [str(context.replica), str(context.rank), str(len(steps))] == place:
            weight = optimizer.param_groups[0]["params"][0]
            kept = {"weight": weight, "buffer": buffers[0]} | optimizer.state[weight]
            with torch.no_grad():
                kept[what].view(-1).view(torch.int32)[0] ^= 1
        if os.environ.get("EXIT") == f"{context.replica} {len(steps)}" and context.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(after)
    if os.environ.get("LONG_SAVES"):
        replica, seconds = os.environ["LONG_SAVES"].split()
        if context is not None and str(context.replica) == replica:
            _lengthen_saves(float(seconds))
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _lengthen_saves(seconds: float) -> None:
    from megatron.training import training

    upstream = training.save_checkpoint

    @functools.wraps(upstream)
    def save_slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(seconds)
        upstream(*args, **kwargs)

    training.save_checkpoint = save_slowly


def _add_buffers() -> list[torch.Tensor]:
    """Give every model chunk a persistent buffer before its state is first looked at; the list fills up then."""
    init, added = State.__init__, list[torch.Tensor]()

    def init_with_buffers(self: State, chunks: Any, *others: Any, **named: Any) -> None:
        for chunk in chunks:
            if not hasattr(chunk, "drifting"):
                chunk.register_buffer("drifting", torch.zeros(3))
                added.append(chunk.drifting)
        init(self, chunks, *others, **named)

    State.__init__ = init_with_buffers  # type: ignore[method-assign]
    return added


if __name__ == "__main__":
    main()
