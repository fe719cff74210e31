"""The member as Megatron's side of a rank uses it: it remembers what passed by, for those that report and save."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recover.collectives.member import Member
from megatron_recover.core.values import Apply, Plan, Work


class RankMember(Member):
    """A `Member` that remembers the newest step, quotas and requests."""

    step = -1
    """The newest step that this rank has begun; -1 before the first."""
    quotas: tuple[int, ...] = ()
    """Microbatches of the newest plan of a training step, per member in the order of the roster."""
    requests: frozenset[str] = frozenset()
    """All requests that were committed so far; the same on every replica after the same step."""
    _has_raised = False

    def begin(self, work: Work, requests: Sequence[str] = ()) -> int:
        # The newest record says how the job ended, so what was once committed rides in every later vote as well.
        self.step = super().begin(work, (*requests, *self.requests))
        return self.step

    def next_order(self) -> Plan | Apply:
        order = super().next_order()
        if isinstance(order, Apply):
            self.requests |= frozenset(order.record.requests)
        elif order.work.label.startswith("train "):
            self.quotas = order.quotas
        return order

    def raised(self, microbatches: Sequence[int], error: BaseException) -> None:
        # The first to report knows the microbatch; whoever sees the same exception pass by later does not.
        if not self._has_raised:
            self._has_raised = True
            super().raised(microbatches, error)
