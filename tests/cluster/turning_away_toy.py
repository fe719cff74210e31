"""A joining toy whose members admit nobody, and kill the coordinator before they say so. They end some steps later."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

import psutil
from msgspec.structs import replace

from megatron_recover.core import replica_generation
from megatron_recover.core.values import Claim
from tests.cluster import toy
from tests.cluster.joining_toy import JoiningToy

_STEPS = 5
_recover = replica_generation.recover
_turned_away: list[int] = []
"""The step in which a newcomer was turned away."""


class TurningAwayToy(JoiningToy):
    """Ends its training when all others do."""

    def step(self, iteration: int, sums: Any) -> tuple[str, ...]:
        requests = super().step(iteration, sums)
        return ("exit: enough",) if _turned_away and iteration > _turned_away[0] + _STEPS else requests


def recover(*given: Any, claims: Sequence[Claim], **others: Any) -> Any:
    """Plan as if each newcomer had read another state."""
    if claims:
        _end_coordinator()
    plan = _recover(*given, claims=tuple(replace(claim, digest=claim.digest ^ 1) for claim in claims), **others)
    if claims:
        _turned_away.append(plan.step)
    return plan


def _end_coordinator() -> None:
    launcher = psutil.Process(psutil.Process(os.getppid()).ppid())
    with contextlib.suppress(psutil.NoSuchProcess):  # another member was faster
        for coordinator in (each for each in launcher.children() if each.name() == "coordinator"):
            coordinator.kill()
            while coordinator.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.001)


if __name__ == "__main__":
    replica_generation.recover = recover
    toy.main(TurningAwayToy)
