"""Healing of a simulated job: lost replicas are formed anew, and what becomes of the newcomers.

It does what `control_plane/healing.py` does for a real job: `core/slots.py` decides where a
newcomer is formed, and the machine of membership gives it an id.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_recover.core import coordinator, slots
from megatron_recover.core.membership_messages import Loss, LossKind
from megatron_recover.core.placement import Slot
from megatron_recover.core.values import ReplicaId
from megatron_recover.sim.timed.newcomer import TRIES
from megatron_recover.sim.timed.places import Cause, Places


@dataclass
class Newcomers:
    """Account of the newcomers of a run. Times are seconds since its start, left-out ones too."""

    num_formed: int = 0
    """Newcomers that could train (their ranks were ready)."""
    num_asked: int = 0
    """Newcomers whose forming has begun."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Reasons for which tries to join came to nothing, and how often."""
    num_gave_up: int = 0
    """Newcomers that gave up after `TRIES` tries."""
    num_lost: int = 0
    """Newcomers that were lost before they were members, those that gave up not included."""
    entries_s: list[float] = field(default_factory=list)
    """Seconds of each newcomer that has joined, from ready to the commit of its first step."""
    to_full_s: list[float] = field(default_factory=list)
    """Seconds of each loss of a member until the job had all its replicas again."""
    num_open: int = 0
    """Losses of members after which the job has not had all its replicas again."""

    @property
    def num_joined(self) -> int:
        """Return the number of newcomers that have joined."""
        return len(self.entries_s)

    @property
    def num_refused(self) -> int:
        """Return the number of tries to join that came to nothing."""
        return sum(self.refusals.values())


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, 95th percentile (nearest rank) and maximum of values; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "95 %": ordered[math.ceil(0.95 * len(ordered)) - 1], "max": ordered[-1]}


class HealedJob(Protocol):
    """The job, as its healing uses it (`recover.RecoverJob`)."""

    @property
    def now_s(self) -> float: ...
    @property
    def num_committed(self) -> int: ...
    def later(self, seconds: float, call: Callable[[], None]) -> None: ...
    def feed(self, message: coordinator.Input) -> None: ...


class Healing:
    """Brings the lost replicas of one job back."""

    def __init__(self, job: HealedJob, places: Places) -> None:
        self._job, self.places = job, places
        self.account = Newcomers()
        self.entering: dict[ReplicaId, float] = {}
        """Newcomers that are ready and not proven yet, and when they were ready."""
        self._next: slots.Newcomer | None = None
        self.members: set[ReplicaId] = {*places.living}
        """Members that live and, if they were newcomers, are proven."""
        self._open: list[float] = []
        """Times of the losses since the job had all its replicas."""
        self._causes: dict[ReplicaId, Cause] = {}
        self._num_faults: dict[ReplicaId, int] = {}
        self._doubtful: dict[ReplicaId, int] = {}
        """Newcomers that are proven -> the number of committed steps at which they were."""

    # --- Losses -----------------------------------------------------------------------------------

    def died(self, replica: ReplicaId) -> None:
        """Note the death of a replica that nobody knows of yet, of a cause that is drawn here."""
        if replica in self.places.living and replica not in self._causes:
            self._leave(replica)
            self._causes[replica] = self.places.cause()

    def fenced(self, replica: ReplicaId) -> None:
        """Note that the coordinator has a replica fenced; its slots are free in a while."""
        if replica not in self.places.living:
            return
        self._leave(replica)
        cause = self._causes.get(replica)
        kind = LossKind.EXCEPTION if cause is not None or replica in self._num_faults else LossKind.SUSPECTED
        node = self.places.lost(replica, kind, cause, self._job.now_s)
        if node is not None and self.places.repair_s is not None:
            self._job.later(self.places.repair_s, lambda: self._repaired(node))
        self._job.later(self.places.table.vacate_s, lambda: self._vacated(replica))

    def _leave(self, replica: ReplicaId) -> None:
        if replica in self.members:
            self.members.discard(replica)
            self._open.append(self._job.now_s)
        elif replica not in self._causes and self._num_faults.get(replica, 0) < TRIES:
            self.account.num_lost += 1
        self.entering.pop(replica, None)
        self._doubtful.pop(replica, None)
        self.account.num_open = len(self._open)

    def _vacated(self, replica: ReplicaId) -> None:
        self.places.vacated(replica)
        self.heal()

    def _repaired(self, node: Slot) -> None:
        self.places.repaired(node)
        self.heal()

    # --- Newcomers --------------------------------------------------------------------------------

    def heal(self) -> None:
        """Have newcomers formed where there are slots now."""
        plan = self.places.plan(self._job.now_s)
        for newcomer in plan.newcomers:
            self._next = newcomer
            self._job.feed(coordinator.FormAsked(1))
            self._next = None
        if plan.again_at_s is not None:
            self._job.later(max(0.0, plan.again_at_s - self._job.now_s), self.heal)

    def form(self, replica: ReplicaId) -> None:
        """Seat a newcomer to which the machine of membership has given this id."""
        assert self._next is not None
        self.places.taken(replica, self._next)
        self.account.num_asked += 1

    def ready(self, replica: ReplicaId) -> None:
        """Note that the ranks of a newcomer are ready."""
        self.account.num_formed += 1
        self.entering[replica] = self._job.now_s

    def refused(self, replica: ReplicaId, reason: str, *, is_fault: bool) -> None:
        """Note that a try of a newcomer came to nothing; after `TRIES` faults it gives up."""
        self.account.refusals[reason] = self.account.refusals.get(reason, 0) + 1
        self._num_faults[replica] = self._num_faults.get(replica, 0) + is_fault
        if self._num_faults[replica] == TRIES:
            self.account.num_gave_up += 1
            lost = coordinator.ReplicaLost(Loss(replica, LossKind.EXCEPTION, "it gives up"))
            self._job.later(0.0, lambda: self._job.feed(lost))

    def voted(self, replica: ReplicaId) -> None:
        """Note that a replica has committed a step with its own vote."""
        since = self.entering.pop(replica, None)
        if since is not None:
            self.members.add(replica)
            self.account.entries_s.append(self._job.now_s - since)
            self._doubtful[replica] = self._job.num_committed
            if len(self.members) == self.places.wanted:
                self.account.to_full_s += (self._job.now_s - loss for loss in self._open)
                self._open.clear()
            self.account.num_open = len(self._open)

    def committed(self, count: int) -> None:
        """Note that the job has committed `count` steps: newcomers may be trusted by now."""
        for replica, since in [*self._doubtful.items()]:
            if count - since >= self.places.settings.proven_steps:
                del self._doubtful[replica]
                self.places.proven(replica)
