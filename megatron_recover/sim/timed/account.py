"""Account of a simulated run: its steps, its recoveries and its end. Times are virtual seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepAccount:
    """One committed step."""

    ended: float = 0.0
    """Time at which the last member committed the step."""
    num_members: int = 0
    """Members of the newest generation in which microbatches of the step were dealt."""


@dataclass
class RecoveryAccount:
    """Times and work of one generation after the first."""

    began: float
    """Time of the first death that led to it; without a death, that of the announcement."""
    announced: float = 0.0
    """Time of the announcement."""
    planned: float = 0.0
    """Time at which the last member had its plan."""
    step: int | None = None
    """Step that was planned again."""
    redone: int = 0
    """Microbatches that were dealt again."""
    in_schedule: int = 0
    """Microbatches dealt again that were computed in passes still running."""


@dataclass
class JobAccount:
    """Steps, recoveries, messages and the end of a run."""

    steps: dict[int, StepAccount] = field(default_factory=dict)
    """Committed steps, by number."""
    recoveries: dict[int, RecoveryAccount] = field(default_factory=dict)
    """Recoveries, by generation."""
    messages: int = 0
    """Messages between leaders, and between leaders and the coordinator."""
    exit_code: int | None = None
    reason: str = ""
