"""The work of a pass: what the schedule pulls its microbatches from.

Decides nothing: plans come from the leader, and the order `Close` says where in their stream the pass ends (core/rank.py, Note
[Passes]), so every rank of a replica finds the same microbatches here in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from megatron_recover.core.values import BucketId, Generation, MicrobatchId, Plan
from megatron_recover.trainer.driver import Driver


class Task(NamedTuple):
    """A microbatch to compute."""

    microbatch: MicrobatchId
    into: tuple[BucketId, ...]
    """The buckets whose local gradient it goes to."""
    generation: Generation
    """Of the plan that asks for it."""


class WorkQueue:
    """The microbatches of one pass: those of the plan that opens it, and of every plan that arrives before it is closed."""

    def __init__(self, driver: Driver, plan: Plan, extended: Callable[[Plan], None] = lambda plan: None) -> None:
        """`extended(plan)` is called for each plan that is taken in later."""
        self.plan = plan
        """The newest plan that was taken in: what is to be reduced after the pass."""
        self._driver, self._work, self._extended = driver, plan.work, extended
        self._waiting: deque[Task] = deque(_tasks(plan))
        self._is_open = True

    def prepare(self) -> None:
        """The schedule is about to call `next` after one more forward: have the pass closed, unless more is known.

        Asked now, known when it is needed. Not earlier, so that what is dealt until then is still taken in.
        """
        if not self.has_ended() and not self._waiting:
            self._driver.ask_close()

    def next(self) -> Task | None:
        """The next microbatch; None, for good, when there is none left. Waits while neither is known. Raises `JobStopped`."""
        while self._is_open and not self._waiting:
            self._take()
        if not self._waiting:
            return None
        return self._waiting.popleft()

    def has_ended(self) -> bool:
        """Whether it is known already that there is none left. Never waits."""
        while self._is_open and not self._waiting and self._driver.has_order():
            self._take()
        return not self._is_open and not self._waiting

    def _take(self) -> None:
        plan = self._driver.more_work()
        if plan is None:
            self._is_open = False
            return
        if plan.work != self._work:
            raise RuntimeError(f"ordered to work on {plan.work} in a pass of {self._work}")
        self.plan = plan
        if plan.computes:
            self._extended(plan)
        self._waiting.extend(_tasks(plan))


def _tasks(plan: Plan) -> tuple[Task, ...]:
    return tuple(
        Task(microbatch, compute.into, plan.generation) for compute in plan.computes for microbatch in compute.microbatches
    )
