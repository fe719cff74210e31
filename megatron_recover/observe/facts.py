"""The facts of a run that `History` collects: of each step, each recovery, and the quotas."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

Line = int
"""Number of an event's line in the trace."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """The first commit of a step in the trace, which represents the record of the step."""

    line: Line
    t: float
    label: str
    generation: int


class StepFacts(msgspec.Struct, gc=False):
    """Facts of one step that an event names."""

    last_line: Line
    begin: float
    """Time of the first event of the step."""
    end: float
    """Time of the last event of the step."""
    label: str | None = None
    """Label of the first plan, or of the last plan that gives the step up; None without a plan. The
    plan also gives `num_microbatches`."""
    num_microbatches: int | None = None
    planned_at: float | None = None
    """Time of the earliest plan; of a step that is given up, time of the last plan that gives it
    up."""
    record: Record | None = None
    committed_at: float | None = None
    """Time of the last commit of the step by a member."""
    loss_label: str | None = None
    loss: float | None = None
    loss_at: float | None = None


class QuotaRun(msgspec.Struct):
    """Consecutive training steps that a generation dealt with equal quotas."""

    generation: int
    step: int
    first: str
    last: str
    roster: tuple[int, ...]
    quotas: tuple[int, ...]
    last_step: int


@dataclass
class RecoveryFacts:
    """Facts of the recovery in one generation, from the phases that its members recorded."""

    step: int
    """Step of the first phase that was recorded."""
    last_step: int
    """Step of the last phase that was recorded."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds of the slowest member."""
    committed_at: float | None = None
    """Time of the last commit by a member; others may not have committed."""
    end: float = 0.0
    """Time of the last recorded phase."""
