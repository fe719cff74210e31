"""What a simulated run has shown: its steps, its recoveries, its end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepTime:
    """One committed step."""

    ended: float = 0.0
    """When the last member committed it."""
    members: int = 0
    """Whose work it holds: those of the newest generation in which microbatches of it were dealt."""


@dataclass
class RecoveryTime:
    """What one generation after the first cost."""

    began: float
    """The death, where there was one, or the request."""
    announced: float = 0.0
    planned: float = 0.0
    """When the last member had its plan."""
    step: int | None = None
    """The one that was planned again."""
    redone: int = 0
    """Microbatches dealt again."""
    in_schedule: int = 0
    """Of those: dealt to passes that still ran."""


@dataclass
class Account:
    """What a run has shown."""

    steps: dict[int, StepTime] = field(default_factory=dict)
    recoveries: dict[int, RecoveryTime] = field(default_factory=dict)
    """By generation."""
    messages: int = 0
    """Between leaders, and between them and the coordinator."""
    exit_code: int | None = None
    reason: str = ""
