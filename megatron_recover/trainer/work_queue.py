"""The work queue of a pass, from which the schedule takes its microbatches.

Decides nothing. Plans come from the leader, and the order `Close` ends the pass at one place in the
stream of orders (`core/rank.py`, Note [Passes]). So every rank of a replica finds the same
microbatches here in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import BucketId, Generation, MicrobatchId
from megatron_recover.trainer.driver import Driver


class Task(NamedTuple):
    """A microbatch to compute."""

    microbatch: MicrobatchId
    into: tuple[BucketId, ...]
    """Buckets to whose local gradient its gradient is added."""
    generation: Generation
    """Generation of the plan that orders it."""


class WorkQueue:
    """The microbatches of one pass that are not taken yet.

    They come from the plan that opens the pass, and from each plan before `Close` in the stream of
    orders. A plan is read only when no microbatch waits.
    """

    def __init__(self, driver: Driver, plan: Plan, extended: Callable[[Plan], None] = lambda plan: None) -> None:
        """Open the pass with `plan`; call `extended(plan)` for each later one with computes."""
        self.plan = plan
        """Newest plan of the pass: the plan to reduce after it."""
        self._driver, self._work, self._extended = driver, plan.work, extended
        self._waiting: deque[Task] = deque(_tasks(plan))
        self._is_open = True

    def prepare(self) -> None:
        """Request the end of the pass, unless more microbatches are already known.

        Never waits. Raises what `next` raises. The schedule calls it one forward before `next`, so
        that the answer is there when needed. An earlier request would exclude microbatches that are
        dealt in the meantime.
        """
        if not self.has_ended() and not self._waiting:
            self._driver.ask_close()

    def next(self) -> Task | None:
        """Return the next microbatch, or None when the pass has no more.

        Wait while neither is known. Raises `JobStopped`, and RuntimeError for a plan of other work.
        """
        while self._is_open and not self._waiting:
            self._take()
        if not self._waiting:
            return None
        return self._waiting.popleft()

    def has_ended(self) -> bool:
        """Return whether the pass is already known to have no more.

        Never waits. Raises what `next` raises.
        """
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
