"""Measure how long before a time limit a job has to begin to end, from a former run's trace."""

from __future__ import annotations

import itertools
import math

import msgspec

from megatron_recover import trace
from megatron_recover.core.label import label_of
from megatron_recover.observe.history import History

_RESERVE_S = 60
"""Seconds for what no run shows: a signal that comes late, files to close, ranks that end."""


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the time that the end of a job takes, in seconds."""

    step_s: float
    """Longest time between the ends of two training steps, with what was between them: a recovery,
    an evaluation, a periodic save. All that may have to be waited for after the signal."""
    save_s: float
    """Longest save."""

    @property
    def seconds(self) -> int:
        """Return the sum with a reserve, rounded up."""
        return math.ceil(self.step_s + self.save_s) + _RESERVE_S

    @property
    def words(self) -> str:
        """Return the sum in words."""
        return (
            f"the job begins to end {self.seconds} s before its time limit: longest step {self.step_s:.1f} s, longest save "
            f"{self.save_s:.1f} s, reserve {_RESERVE_S} s"
        )


def margin(history: History) -> Margin | None:
    """Return the margin of a run; None if it has committed fewer than two training steps."""
    ends = [record.t for record in history.records.values() if label_of(record.label).is_training]
    if len(ends) < 2:
        return None
    begun: dict[int, float] = {}
    saves = [0.0]
    for _, event in history.of(trace.Checkpoint):
        if event.phase == "started":
            begun[event.iteration] = event.t
        elif event.phase == "finished" and event.iteration in begun:
            saves.append(event.t - begun[event.iteration])
    return Margin(step_s=max(after - before for before, after in itertools.pairwise(ends)), save_s=max(saves))
