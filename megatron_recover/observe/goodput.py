"""How fast a run got on, step by step, and how much of its time faults took.

A step lasts from the commit of the step before it (the first step: from its first plan) to its own, so the steps leave no
time out. What a step would have taken without its fault is told by the median of the undisturbed steps of its kind with as
many replicas (where there was none, with the nearest number of them, time going with the largest quota); the rest is *lost to
faults*, and the *goodput* is the share of the time that was not. Only measures.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from megatron_recover.core.label import label_of
from megatron_recover.observe.history import History


@dataclass(frozen=True)
class StepTime:
    """One committed step."""

    step: int
    label: str
    begin: float
    """Seconds since the start of the run, like `end`."""
    end: float
    replicas: int
    """Members when it began; those that are lost in it included."""
    num_microbatches: int
    is_disturbed: bool
    """Whether a new generation was made in it, other than to carry a request to end."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.begin

    @property
    def largest_quota(self) -> int:
        """Microbatches of the replica that has most, when they are dealt evenly."""
        return -(-self.num_microbatches // self.replicas) if self.replicas else 0

    @property
    def is_training(self) -> bool:
        """Whether it is a training step, not an evaluation."""
        return label_of(self.label).is_training


class Goodput:
    """Accounts of a history's time, over all committed steps."""

    def __init__(self, history: History) -> None:
        self._history = history

    @cached_property
    def steps(self) -> tuple[StepTime, ...]:
        """All committed steps that computed something, in their order."""
        history = self._history
        announced = sorted((event.t, event) for event in history.generations.values())
        found: list[StepTime] = []
        passed = 0
        roster: tuple[int, ...] = ()
        for step, record in history.records.items():
            facts = history.steps[step]
            microbatches = facts.num_microbatches
            if not microbatches or facts.planned_at is None:  # an agreement to end, or its plan is missing from the trace
                continue
            begin = found[-1].end if found else facts.planned_at
            while passed < len(announced) and announced[passed][0] <= begin:
                roster, passed = announced[passed][1].roster, passed + 1
            replicas, is_disturbed = len(roster), False
            while passed < len(announced) and announced[passed][0] <= record.t:
                newer, passed = announced[passed][1], passed + 1
                is_disturbed |= newer.request is None
                roster = newer.roster
            found.append(StepTime(step, record.label, begin, record.t, replicas, microbatches, is_disturbed))
        return tuple(found)

    @cached_property
    def _paces(self) -> dict[tuple[bool, int], float]:
        """(training, replicas) -> seconds per microbatch of the largest quota, the median of undisturbed steps."""
        times: dict[tuple[bool, int], list[float]] = defaultdict(list)
        for one in self.steps:
            if not one.is_disturbed and one.largest_quota:
                times[one.is_training, one.replicas].append(one.seconds / one.largest_quota)
        return {key: median(values) for key, values in times.items()}

    def undisturbed_s(self, one: StepTime) -> float | None:
        """Seconds that a step would have taken without a fault in it; None where the run has nothing to measure that by."""
        sizes = [replicas for training, replicas in self._paces if training == one.is_training]
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: abs(size - one.replicas))
        return self._paces[one.is_training, nearest] * one.largest_quota

    @cached_property
    def lost_s(self) -> float | None:
        """Seconds that faults took; None where that of a disturbed step cannot be told."""
        lost = 0.0
        for one in self.steps:
            if one.is_disturbed:
                undisturbed = self.undisturbed_s(one)
                if undisturbed is None:
                    return None
                lost += max(0.0, one.seconds - undisturbed)
        return lost

    @cached_property
    def share(self) -> float | None:
        """The share of the time of all steps that faults did not take, 0..1."""
        total = sum(one.seconds for one in self.steps)
        return None if self.lost_s is None or not total else 1.0 - self.lost_s / total
