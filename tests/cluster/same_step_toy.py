"""A joining toy whose step of a loss lasts until a newcomer has joined: it waits in its pass, so that no clock decides."""

from __future__ import annotations

import time

from megatron_recover.core.rank_messages import Compute
from megatron_recover.progress_page import Phase
from tests.cluster import toy
from tests.cluster.joining_toy import JoiningToy

_LOSS = 2
"""The generation that the loss makes."""


class SameStepToy(JoiningToy):
    """Keeps its pass open in the generation of the loss until it has promised the next one."""

    def compute(self, step: int, generation: int, compute: Compute, *, again: bool) -> None:
        super().compute(step, generation, compute, again=again)
        while again and generation == _LOSS and self.member._state.promised <= generation:
            self.page.enter(Phase.FORWARD, (0,))
            time.sleep(0.01)


if __name__ == "__main__":
    toy.main(SameStepToy)
