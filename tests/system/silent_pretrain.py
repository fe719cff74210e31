"""`scripts/pretrain_gpt.py` where one bit of state changes silently, and where a process may be told to end.

DRIFT is "replica rank step what": after that optimizer step of that rank one bit of one element changes, of a moment, of a
weight that the optimizer keeps, or of a persistent buffer that every model chunk gets here (`what`: exp_avg, exp_avg_sq,
weight, buffer). EXIT is "replica step": SIGTERM comes after that optimizer step. With LATE_SAVES the writer saves as
`late_saves.py` says.
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
from megatron_recover.megatron.state import TrainingState
from tests.system.late_saves import save_late

_BIT = 1 << 8
"""The next steps may round a change of the lowest bit away, and then nothing has drifted."""
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
                drifting = kept[what]
                own = drifting.to_local() if hasattr(drifting, "to_local") else drifting  # of FSDP2 a rank has a shard
                own.view(-1).view(torch.int32)[0] ^= _BIT
        if os.environ.get("EXIT") == f"{context.replica} {len(steps)}" and context.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(after)
    if os.environ.get("LATE_SAVES") and context is not None and not context.dry_run:
        save_late(pathlib.Path(context.run_dir))
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _add_buffers() -> list[torch.Tensor]:
    """Give every model chunk a persistent buffer before its state is first looked at; the list fills up then."""
    init, added = TrainingState.__init__, list[torch.Tensor]()

    def init_with_buffers(self: TrainingState, chunks: Any, *others: Any, **named: Any) -> None:
        for chunk in chunks:
            if not hasattr(chunk, "drifting"):
                chunk.register_buffer("drifting", torch.zeros(3))
                added.append(chunk.drifting)
        init(self, chunks, *others, **named)

    TrainingState.__init__ = init_with_buffers  # type: ignore[method-assign]
    return added


if __name__ == "__main__":
    main()
