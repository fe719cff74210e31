"""What a simulated run has shown: its steps, its recoveries, its end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepAccount:
    """One committed step."""

    ended: float = 0.0
    """When the last member committed it."""
    num_members: int = 0
    """Of the newest generation in which microbatches of it were dealt: a member that dies later costs no work."""


@dataclass
class RecoveryAccount:
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

    steps: dict[int, StepAccount] = field(default_factory=dict)
    recoveries: dict[int, RecoveryAccount] = field(default_factory=dict)
    """By generation."""
    messages: int = 0
    """Between leaders, and between them and the coordinator."""
    exit_code: int | None = None
    reason: str = ""
