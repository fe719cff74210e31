"""Fault points: named instants of a rank's life at which a fault may strike the rank on purpose.

This module decides what a fault is and carries faults out in its own process. It never decides
which faults a run gets (`cluster.chaos`), and never writes the trace itself. Code with fault points
keeps `FaultInjector | None` and calls ``if faults is not None: faults.at(...)``, so that a run
without faults pays one comparison at each point.
"""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec


class FaultPoint(enum.Enum):
    """The points at which a fault can strike.

    docs/reference/chaos.md lists for each point the ranks that pass it, and its step, microbatch
    and bucket.
    """

    START_UP = "start_up"
    """The instant before the rank joins; this point has no step."""
    FORWARD = "forward"
    BACKWARD = "backward"
    COMPUTE = "compute"
    """Every forward and backward of a step; for faults of kind `slow` only."""
    BEFORE_REDUCE = "before_reduce"
    REDUCE = "reduce"
    """Inside the sum of a bucket over the replicas."""
    BEFORE_VOTE = "before_vote"
    IN_VOTE = "in_vote"
    """Leader only: the vote was sent to the first other member, if any, and not yet to the rest."""
    AFTER_VOTE = "after_vote"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_TRACKER = "checkpoint_tracker"
    """The instant between writing a checkpoint's data and naming it in the tracker."""
    PROMISE = "promise"
    """A newer generation is known and not yet acknowledged."""
    STATUS = "status"
    """Leader only: the status was sent to the first other member, if any, and not to the rest."""
    RECOMPUTE = "recompute"
    """The forward of each microbatch of a later plan of a training step.

    A plan is later if its generation is newer than that of the rank's first plan of the step. The
    microbatch need not have been dealt before. In the first plan each one passes `forward`.
    """
    TRANSFER = "transfer"
    SECOND_REDUCE = "second_reduce"
    """Inside the sum of a bucket over the replicas, in a later plan (`recompute`) of any step."""
    FORM = "form"
    """Newcomer only, as the next three: its model is built, and it has computed nothing."""
    STATE_READ = "state_read"
    """A range of the state was copied into this rank's tensors, and does not count yet."""
    CLAIM = "claim"
    """Leader only: all ranks have read the state, and no member was asked to vouch for it."""
    ADMITTED = "admitted"
    """The order to begin training is here, and the first step has not begun."""


class FaultKind(enum.Enum):
    """The effect of a fault on its rank."""

    KILL = "kill"
    """SIGKILL: nothing of the rank runs any more."""
    STOP = "stop"
    """SIGSTOP: the rank keeps its sockets open and answers nothing."""
    FREEZE = "freeze"
    """SIGSTOP, then SIGCONT once the trace has the event `Fault.until` (`cluster.thawing`).

    The event has to be one of another replica or of the launcher.
    """
    RAISE = "raise"
    """A Python exception, as a NaN check or a lack of memory would raise."""
    SEGV = "segv"
    """SIGSEGV: like the next four, a signal that a computation raises in its own process."""
    BUS = "bus"
    """SIGBUS, as when a data file was cut under its memory map."""
    FPE = "fpe"
    ILL = "ill"
    ABORT = "abort"
    """SIGABRT, as when a check in a library fails."""
    LOOP = "loop"
    """The thread at the fault point loops for ever; the other threads of the rank run on."""
    SLOW = "slow"
    """Forward and backward take `Fault.factor` times as long in `Fault.steps` steps; none fails."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault: its rank, point, kind and instant.

    `step`, `microbatch` and `bucket` match anything where they are None.
    """

    replica: int
    rank: int
    point: FaultPoint
    kind: FaultKind = FaultKind.KILL
    step: int | None = None
    """Step of the passage. Of a slow rank: its first slow step; None: the first step of all."""
    microbatch: int | None = None
    bucket: int | None = None
    occurrence: int = 1
    """Strike at this passage that matches everything above, counted from 1 in this process."""
    until: str | None = None
    """Name of the trace event that ends a freeze; None for other kinds."""
    factor: float | None = None
    """Ratio by which forward and backward of a slow rank take longer; None for other kinds."""
    steps: int | None = None
    """Number of slow steps from `step` on; None: to the end of the run, and for other kinds."""

    def matches(self, point: FaultPoint, step: int | None, microbatch: int | None, bucket: int | None) -> bool:
        """Return whether a passage of `point` counts for this fault, apart from `occurrence`."""
        return (
            self.point is point
            and self.step in (None, step)
            and self.microbatch in (None, microbatch)
            and self.bucket in (None, bucket)
        )

    def slows(self, step: int) -> bool:
        """Return whether this fault makes the step slow."""
        first = self.step or 0
        return self.kind is FaultKind.SLOW and first <= step and (self.steps is None or step < first + self.steps)


STANDS_STILL = frozenset({FaultKind.STOP.value, FaultKind.FREEZE.value, FaultKind.LOOP.value})
"""Kinds, as written in a trace, that leave the rank alive and silent."""
LEADER_ONLY = frozenset({FaultPoint.IN_VOTE, FaultPoint.STATUS, FaultPoint.CLAIM})
"""Points of the protocol that only rank 0 of a replica passes."""
NEWCOMER_ONLY = frozenset({FaultPoint.FORM, FaultPoint.STATE_READ, FaultPoint.CLAIM, FaultPoint.ADMITTED})
"""Points that only replicas pass that are formed while others train."""
_WITHOUT_STEP = frozenset({FaultPoint.START_UP, FaultPoint.FORM, FaultPoint.STATE_READ, FaultPoint.CLAIM})

_POINTS_WITH = {
    "microbatch": (FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.RECOMPUTE, FaultPoint.EVALUATE),
    "bucket": (FaultPoint.REDUCE, FaultPoint.SECOND_REDUCE, FaultPoint.TRANSFER),
    "step": tuple(point for point in FaultPoint if point not in _WITHOUT_STEP),
}
"""Points that have a microbatch, a bucket or a step, by key of `Fault`."""


def never_passed(table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield each key of a fault that does not fit its point, with a text that has the remedy.

    `table` is the fault as written in a file. Such a fault would strike nowhere. The keys are
    `step`, `microbatch` and `bucket`, which not every point is passed with, and a `rank` above 0
    where only rank 0 passes the point. Yield nothing for an unknown point or for `compute`.
    """
    point = next((point for point in FaultPoint if point.value == table.get("point")), None)
    if point in (None, FaultPoint.COMPUTE):
        return
    for key, points in _POINTS_WITH.items():
        if key in table and point not in points:
            others = "" if key == "step" else f", or take {', '.join(other.value for other in points)}"
            yield key, f"{point.value} is passed for no {key}; leave {key} out{others}"
    rank = table.get("rank", 0)
    if point in LEADER_ONLY and type(rank) is int and rank != 0:  # another type is a mistake of its own
        yield "rank", f"only rank 0, the leader of its replica, passes {point.value}; give rank = 0"


class Passages:
    """A count of how often one rank passes the points of its faults.

    The count decides when each fault strikes, in a rank and in the simulator.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._left: list[tuple[Fault, int]] = []
        """(fault that has not struck, matching passages that are left until it does)."""
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Add a fault of this rank; earlier passages do not count for it."""
        self._left.append((fault, fault.occurrence))

    def take(
        self, point: FaultPoint, *, step: int | None = None, microbatch: int | None = None, bucket: int | None = None
    ) -> Fault | None:
        """Count a passage for every fault that it matches; remove and return the first due one.

        Return None if no fault is due. Further due faults strike at their next matching passages.
        """
        due: Fault | None = None
        left = []
        for fault, num_left in self._left:
            matches = fault.matches(point, step, microbatch, bucket)
            num_left -= matches
            if due is None and matches and num_left <= 0:
                due = fault
            else:
                left.append((fault, num_left))
        self._left = left
        return due


_SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.STOP: signal.SIGSTOP,
    FaultKind.FREEZE: signal.SIGSTOP,
    FaultKind.SEGV: signal.SIGSEGV,
    FaultKind.BUS: signal.SIGBUS,
    FaultKind.FPE: signal.SIGFPE,
    FaultKind.ILL: signal.SIGILL,
    FaultKind.ABORT: signal.SIGABRT,
}


class InjectedFault(Exception):
    """The exception that a fault of kind `raise` raises."""


class FaultInjector:
    """The faults of one rank, and their execution; any thread may pass a fault point."""

    def __init__(self, faults: Sequence[Fault], *, replica: int, rank: int, record: Callable[..., None]) -> None:
        """Keep those `faults` that are meant for this rank.

        `record(replica=, rank=, point=, kind=, step=, microbatch=, bucket=, until=)` (the fields of
        `trace.Fault`) is called just before a fault is carried out. When the call returns, the
        record must outlive this process.
        """
        self._replica, self._rank, self._record = replica, rank, record
        mine = [fault for fault in faults if (fault.replica, fault.rank) == (replica, rank)]
        self._passages = Passages(fault for fault in mine if fault.kind is not FaultKind.SLOW)
        self._slow = [fault for fault in mine if fault.kind is FaultKind.SLOW]
        self._begun: set[Fault] = set()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, texts: Sequence[str], *, replica: int, rank: int, record: Callable[..., None]) -> FaultInjector | None:
        """Return the injector for `RankContext.faults`, or None if there are no faults."""
        faults = [msgspec.json.decode(text, type=Fault) for text in texts]
        return cls(faults, replica=replica, rank=rank, record=record) if faults else None

    def at(
        self, point: FaultPoint, *, step: int | None = None, microbatch: int | None = None, bucket: int | None = None
    ) -> None:
        """Pass a fault point; a due fault ends, stops or loops the rank or raises `InjectedFault`.

        Each fault strikes once.
        """
        with self._lock:
            due = self._passages.take(point, step=step, microbatch=microbatch, bucket=bucket)
        if due is None:
            return
        self._record(
            replica=self._replica, rank=self._rank, point=point.value, kind=due.kind.value,
            step=step, microbatch=microbatch, bucket=bucket, until=due.until,
        )  # fmt: skip
        if due.kind is FaultKind.RAISE:
            raise InjectedFault(f"injected at {point.value} (step {step}, microbatch {microbatch}, bucket {bucket})")
        if due.kind is FaultKind.LOOP:
            while True:  # until it is fenced
                pass
        # Sent to this thread the signal strikes before its next instruction; to the process, later.
        signal.pthread_kill(threading.get_ident(), _SIGNALS[due.kind])

    def stretch(self, step: int, seconds: float) -> float:
        """Wait as long as a slow rank takes longer for a forward or backward of `seconds`.

        Return the seconds with that wait. The training thread calls this. The first call that a
        fault slows records that fault.
        """
        factor = 1.0
        for fault in self._slow:
            if fault.factor is None or not fault.slows(step):
                continue
            factor *= fault.factor
            if fault not in self._begun:
                self._begun.add(fault)
                self._record(
                    replica=self._replica, rank=self._rank, point=fault.point.value, kind=fault.kind.value,
                    step=step, microbatch=None, bucket=None, until=None,
                )  # fmt: skip
        if factor > 1:
            time.sleep((factor - 1) * seconds)
        return factor * seconds
