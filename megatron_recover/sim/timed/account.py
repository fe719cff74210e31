"""Account of a simulated run: its steps, its recoveries and its end. Times are virtual seconds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import BucketId, Generation, MicrobatchId


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
    """Microbatches of the generation's plans whose backward ended although an older plan had dealt
    them for the same bucket, as `observe/work.py` counts them in a trace."""
    in_schedule: int = 0
    """Microbatches among these that were added to passes still running."""


class Deals:
    """The microbatches that the plans of the newest steps have dealt.

    Attempts at a step that became void count too, unlike in a trace: no loss makes a step void.
    """

    def __init__(self) -> None:
        self._dealt: dict[int, dict[MicrobatchId, list[tuple[Generation, frozenset[BucketId]]]]] = {}
        """Step -> microbatch -> (generation, buckets) of each deal."""
        self._oldest: dict[int, Generation] = {}
        """Step -> the oldest generation that dealt a microbatch of it."""

    def add(self, plan: Plan) -> None:
        """Add what a plan deals. The steps of two members differ by at most one."""
        if not plan.computes:
            return
        if plan.step not in self._dealt:
            self._dealt = {step: dealt for step, dealt in self._dealt.items() if step >= plan.step - 1} | {plan.step: {}}
            self._oldest = {step: self._oldest[step] for step in self._dealt if step in self._oldest}
        self._oldest[plan.step] = min(plan.generation, self._oldest.get(plan.step, plan.generation))
        dealt = self._dealt[plan.step]
        for compute in plan.computes:
            deal = plan.generation, frozenset(compute.into)
            for microbatch in compute.microbatches:
                dealt.setdefault(microbatch, []).append(deal)

    def num_redone(self, plan: Plan, microbatches: Collection[MicrobatchId]) -> int:
        """Return how many of a plan's `microbatches` an older plan dealt for the same bucket."""
        if self._oldest.get(plan.step, plan.generation) >= plan.generation:
            return 0
        dealt = self._dealt[plan.step]
        return sum(
            any(generation < plan.generation and not into.isdisjoint(compute.into) for generation, into in dealt[microbatch])
            for compute in plan.computes
            for microbatch in {*compute.microbatches} & {*microbatches}
        )


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
