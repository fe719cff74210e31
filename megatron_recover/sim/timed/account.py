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
    """Time at which the last leader had its plan of `step`; 0: no leader has one."""
    step: int | None = None
    """First step that was planned in the generation; None: none was."""
    redone: int = 0
    """Microbatches that the common plan deals because no member held them. Those of a member that
    had not begun the step are among them, although nobody had computed them."""
    in_schedule: int = 0
    """Microbatches of plans of the generation that were added to passes still running."""


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
    """None: the job has not ended."""
    reason: str = ""
