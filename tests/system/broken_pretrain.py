"""`scripts/pretrain_gpt.py` where the loss of a microbatch is no number, whoever computes it.

BROKEN is "step microbatch"; steps are counted from 0, evaluations too.
"""

from __future__ import annotations

import math
import os
from typing import Any

from torch import Tensor

from megatron_recover.trainer.microbatches import Microbatches
from megatron_recover.trainer.work_queue import Task
from scripts import pretrain_gpt


def main() -> None:
    """Train; lose a number."""
    broken = tuple(map(int, os.environ["BROKEN"].split()))
    forward_begins, loss_of = Microbatches.forward_begins, pretrain_gpt.loss_of
    now = [(-1, -1)]

    def begins(self: Microbatches, task: Task, chunk: int) -> None:
        now[0] = (self._step, task.microbatch)
        forward_begins(self, task, chunk)

    def loss(loss_mask: Tensor, output_tensor: Tensor) -> Any:
        return loss_of(loss_mask, output_tensor * math.nan if now[0] == broken else output_tensor)

    Microbatches.forward_begins, pretrain_gpt.loss_of = begins, loss  # type: ignore[method-assign]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
