"""Measure how long each step of a run took, and how much of that time faults took.

Only steps with microbatches count. A step lasts from the commit of the one before it to its own
commit; the first step begins with its first plan. So the steps leave no time out: that of an
agreement is in the next step.

The time of a step without its fault is estimated from the undisturbed steps:

- The estimate is the median time per microbatch of the largest quota, times the largest quota of
  the step. Both quotas are those of an even deal, whatever the real quotas are.
- The median is taken over steps of the same kind (training or evaluation) with as many replicas.
- If there are none, it is taken over the steps with the nearest number of replicas.

In a disturbed step the time above the estimate is *lost to faults*. The *goodput* is the share of
the time that is not lost. A step in which newcomers join is not disturbed, nor is one in which they
form or read: the others train on meanwhile.
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
    """Time and size of one committed step."""

    step: int
    label: str
    begin: float
    """Seconds since the start of the run, like `end`."""
    end: float
    replicas: int
    """Number of members when the step began, including those lost in it."""
    num_microbatches: int
    is_disturbed: bool
    """True if a recovery was announced in the step (`trace.Generation.is_recovery`)."""

    @property
    def seconds(self) -> float:
        """Return the duration of the step."""
        return self.end - self.begin

    @property
    def largest_quota(self) -> int:
        """Return how many microbatches the busiest replica has if they are dealt evenly.

        Quotas that follow the paces, or that fill groups of model chunks, are not even. The number
        only compares steps of different sizes, and steps of the same size need no comparison.
        """
        return -(-self.num_microbatches // self.replicas) if self.replicas else 0

    @property
    def is_training(self) -> bool:
        """Return whether the step is a training step, not an evaluation."""
        return label_of(self.label).is_training


class Goodput:
    """The time of a history, accounted for step by step."""

    def __init__(self, history: History) -> None:
        self._history = history

    @cached_property
    def steps(self) -> tuple[StepTime, ...]:
        """Return all committed steps with microbatches and a plan in the trace, in their order."""
        history = self._history
        announced = sorted(history.generations.values(), key=lambda event: (event.t, event.generation))
        found: list[StepTime] = []
        passed = 0
        roster: tuple[int, ...] = ()
        for step, record in history.records.items():
            facts = history.steps[step]
            microbatches = facts.num_microbatches
            if not microbatches or facts.planned_at is None:  # no microbatches: an agreement; no plan: the trace lacks it
                continue
            begin = found[-1].end if found else facts.planned_at
            while passed < len(announced) and announced[passed].t <= begin:
                roster, passed = history.roster(announced[passed].generation), passed + 1
            replicas, is_disturbed = len(roster), False
            while passed < len(announced) and announced[passed].t <= record.t:
                newer, passed = announced[passed], passed + 1
                is_disturbed |= newer.is_recovery
                roster = history.roster(newer.generation)
            found.append(StepTime(step, record.label, begin, record.t, replicas, microbatches, is_disturbed))
        return tuple(found)

    @cached_property
    def _paces(self) -> dict[tuple[bool, int], float]:
        """Return the pace of undisturbed steps by (is training, number of replicas).

        A pace is the median of the seconds per microbatch of the largest quota.
        """
        times: dict[tuple[bool, int], list[float]] = defaultdict(list)
        for one in self.steps:
            if not one.is_disturbed and one.largest_quota:
                times[one.is_training, one.replicas].append(one.seconds / one.largest_quota)
        return {key: median(values) for key, values in times.items()}

    def undisturbed_s(self, one: StepTime) -> float | None:
        """Estimate the seconds that a step would have taken without a fault in it.

        Return None if the run has no undisturbed step of the same kind.
        """
        sizes = [replicas for training, replicas in self._paces if training == one.is_training]
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: abs(size - one.replicas))
        return self._paces[one.is_training, nearest] * one.largest_quota

    @cached_property
    def lost_s(self) -> float | None:
        """Return the seconds that faults took; None if a disturbed step has no estimate."""
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
        """Return the share of the time of all steps that faults did not take.

        The share is in 0..1; None without steps, or if the time that faults took is unknown.
        """
        total = sum(one.seconds for one in self.steps)
        return None if self.lost_s is None or not total else 1.0 - self.lost_s / total
