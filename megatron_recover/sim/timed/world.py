"""What the parts of a simulated job see of each other: a rank, what ranks meet for, and what their memory holds.

`job.TimedJob` is the only module that knows all parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, Protocol

from megatron_recover.core.plan import Operation
from megatron_recover.core.rank import RankState
from megatron_recover.core.values import Apply, BucketId, Plan, ReplicaId, Report, Work
from megatron_recover.faults import FaultPoint
from megatron_recover.sim.channels import Channels
from megatron_recover.sim.timed.clock import Clock
from megatron_recover.sim.timed.models import JobTable, Timing


class Replica(Protocol):
    """The replica of a rank, as the rank sees it."""

    number: ReplicaId

    def reported(self, position: int, report: Report) -> None: ...


class Rank(Protocol):
    """A rank, as the memory sees it."""

    position: int
    machine: RankState

    @property
    def replica(self) -> Replica: ...


class Memory(Protocol):
    """What simulated ranks hold (`memory.Memory`)."""

    def compute(self, rank: Any, plan: Plan) -> None: ...
    def read(self, rank: Any, operation: Operation) -> object: ...
    def add(self, parts: list[object]) -> object: ...
    def miscounted(self, result: object) -> bool: ...
    def result(self, rank: Any, operation: Operation, result: object) -> int: ...
    def state_digest(self, rank: Any) -> int: ...
    def apply(self, rank: Any, order: Apply) -> None: ...


class MeetingPlace(Protocol):
    """Where ranks meet for sums and copies (`meetings.Meetings`)."""

    def arrive(self, rank: Any, operation: Operation) -> None: ...
    def leave(self, rank: Any, operation: Operation) -> None: ...


class World(Protocol):
    """The job around its parts."""

    clock: Clock
    timing: Timing
    table: JobTable
    memory: Memory
    meetings: MeetingPlace
    buckets_of: Sequence[tuple[BucketId, ...]]
    """By position of a rank."""
    forward_share: float
    num_steps: int
    save_interval: int
    durable: Collection[int]
    stall_s: float
    broken: Channels
    undiscovered: Set[ReplicaId]
    replicas: Sequence[Any] | Mapping[ReplicaId, Any]

    @property
    def awaits_faults(self) -> bool: ...
    def awaits_fault(self, rank: Any) -> bool: ...
    def pass_fault(
        self, rank: Any, point: FaultPoint, *, step: int | None = None, bucket: int | None = None, at: float | None = None
    ) -> None: ...
    def work(self, step: int, label: str) -> Work: ...
    def computing(self, plan: Plan, count: int, *, in_schedule: bool) -> None: ...
    def reading_s(self, rank: Any) -> float: ...
    def is_reading(self, number: ReplicaId) -> bool: ...
    def is_dead(self, number: ReplicaId, position: int) -> bool: ...
    def saving_s(self, rank: Any) -> float: ...
    def may_write(self, rank: Any, order: Apply) -> None: ...
    def saved(self, rank: Any, trained: int) -> None: ...
