"""What the memory of simulated ranks holds: nothing, where only time matters, or how often each microbatch is in it.

`Memory` is the former, for jobs of any size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_recover.core.values import Apply, Plan

if TYPE_CHECKING:
    from megatron_recover.sim.training import Operation, TimedRank


class Memory:
    """Holds nothing: all results are equal."""

    def compute(self, rank: TimedRank, plan: Plan) -> None:
        """A rank computes all of a plan."""

    def read(self, rank: TimedRank, operation: Operation) -> object:
        """What a rank hands in to an operation."""
        return None

    def add(self, parts: list[object]) -> object:
        """The sum over all members."""
        return None

    def result(self, rank: TimedRank, operation: Operation, result: object) -> int:
        """A rank holds what an operation brought; its checksum."""
        return operation.version

    def apply(self, rank: TimedRank, order: Apply) -> None:
        """The results become the gradient."""
