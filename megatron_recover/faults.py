"""Fault points: named instants of a rank's life at which a test or a chaos run may end it.

This module decides what a fault is and carries it out in its own process; it never decides which faults a run gets
(`cluster.chaos`) and never writes the trace itself. Code that has fault points keeps `FaultInjector | None` and asks
``if faults is not None: faults.at(...)``, so that a run without faults pays one comparison.
"""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec


class FaultPoint(enum.Enum):
    """Where a fault can strike. docs/chaos.md says which rank passes each, and with which step, microbatch and bucket."""

    START_UP = "start_up"
    """Before the rank joins; it has no step."""
    FORWARD = "forward"
    BACKWARD = "backward"
    COMPUTE = "compute"
    """Every forward and backward of a step; only to be slowed down."""
    BEFORE_REDUCE = "before_reduce"
    REDUCE = "reduce"
    """Inside the sum of a bucket over the replicas."""
    BEFORE_VOTE = "before_vote"
    IN_VOTE = "in_vote"
    """Leader: some members have been sent the vote, the others have not."""
    AFTER_VOTE = "after_vote"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_TRACKER = "checkpoint_tracker"
    """Between writing a checkpoint's data and naming it in the tracker."""
    PROMISE = "promise"
    """A newer generation is known and not yet acknowledged."""
    STATUS = "status"
    """Leader: some members have been sent the status, the others have not."""
    RECOMPUTE = "recompute"
    """Forward of a microbatch that was dealt again."""
    TRANSFER = "transfer"
    SECOND_REDUCE = "second_reduce"
    """Inside a reduction of a step that was planned again: it has lost a replica, or a link broke."""


class FaultKind(enum.Enum):
    """What is done to the rank."""

    KILL = "kill"
    """SIGKILL: nothing of it runs any more."""
    STOP = "stop"
    """SIGSTOP: it keeps its sockets open and answers nothing."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT as soon as the trace has an event `Fault.until` of somebody else (`cluster.thawing`)."""
    RAISE = "raise"
    """A Python exception, as a NaN check or a lack of memory would raise."""
    SEGV = "segv"
    """SIGSEGV, and below other signals that a computation raises in its own process: it ends at once."""
    BUS = "bus"
    """SIGBUS, as of a data file that was cut under its memory map."""
    FPE = "fpe"
    ILL = "ill"
    ABORT = "abort"
    """SIGABRT, as of a check in a library."""
    LOOP = "loop"
    """The thread at the fault point loops for ever; the other threads of the rank, control included, go on."""
    SLOW = "slow"
    """Every forward and backward takes `Fault.factor` times as long, for `Fault.steps` steps; nothing fails."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault: who, where, when. Fields that are None match anything."""

    replica: int
    rank: int
    point: FaultPoint
    kind: FaultKind = FaultKind.KILL
    step: int | None = None
    microbatch: int | None = None
    bucket: int | None = None
    occurrence: int = 1
    """Strike at the n-th passage that matches everything above, counted from 1 in this process."""
    until: str | None = None
    """Of a freeze, and of nothing else: what ends it, by the name that the event has in the trace."""
    factor: float | None = None
    """Of `slow`, and of nothing else, like `steps`: how many times as long."""
    steps: int | None = None
    """From `step` on (None: the first); None: to the end of the run."""

    def matches(self, point: FaultPoint, step: int | None, microbatch: int | None, bucket: int | None) -> bool:
        """Whether a passage of `point` counts for this fault (occurrence aside)."""
        return (
            self.point is point
            and self.step in (None, step)
            and self.microbatch in (None, microbatch)
            and self.bucket in (None, bucket)
        )

    def slows(self, step: int) -> bool:
        """Whether it makes a step slow."""
        first = self.step or 0
        return self.kind is FaultKind.SLOW and first <= step and (self.steps is None or step < first + self.steps)


STANDS_STILL = frozenset({FaultKind.STOP.value, FaultKind.FREEZE.value, FaultKind.LOOP.value})
"""Kinds, as in a trace, that leave the rank alive and silent."""
LEADER_ONLY = frozenset({FaultPoint.IN_VOTE, FaultPoint.STATUS})
"""Points that only rank 0 of a replica passes."""

_POINTS_WITH = {
    "microbatch": (FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.RECOMPUTE, FaultPoint.EVALUATE),
    "bucket": (FaultPoint.REDUCE, FaultPoint.SECOND_REDUCE, FaultPoint.TRANSFER),
    "step": tuple(point for point in FaultPoint if point is not FaultPoint.START_UP),
}
"""Points that are passed for one of a kind."""


def never_passed(table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Why a fault, written as in a file, can strike nowhere: each key that does not fit its point, and the remedy."""
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
    """Counts how often one rank passes the points of its faults: what says, here and in the simulator, when each strikes."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._left: list[tuple[Fault, int]] = []
        """Faults that have not struck, and how many matching passages are left until they do."""
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """One more fault of this rank; what was passed before does not count for it."""
        self._left.append((fault, fault.occurrence))

    def take(
        self, point: FaultPoint, *, step: int | None = None, microbatch: int | None = None, bucket: int | None = None
    ) -> Fault | None:
        """Count a passage for every fault that it matches; the first whose turn has come is used up and returned."""
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
    """What a fault of kind `raise` raises."""


class FaultInjector:
    """Carries out the faults of one rank. Any thread may pass a fault point."""

    def __init__(self, faults: Sequence[Fault], *, replica: int, rank: int, record: Callable[..., None]) -> None:
        """Keep those `faults` that are meant for this rank.

        `record(replica=, rank=, point=, kind=, step=, microbatch=, bucket=, until=)` (the fields of `trace.Fault`) is called
        just before a fault is carried out and has to be durable when it returns.
        """
        self._replica, self._rank, self._record = replica, rank, record
        mine = [fault for fault in faults if (fault.replica, fault.rank) == (replica, rank)]
        self._passages = Passages(fault for fault in mine if fault.kind is not FaultKind.SLOW)
        self._slow = [fault for fault in mine if fault.kind is FaultKind.SLOW]
        self._begun: set[Fault] = set()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, texts: Sequence[str], *, replica: int, rank: int, record: Callable[..., None]) -> FaultInjector | None:
        """The injector for `RankContext.faults`, or None when there are none."""
        faults = [msgspec.json.decode(text, type=Fault) for text in texts]
        return cls(faults, replica=replica, rank=rank, record=record) if faults else None

    def at(
        self, point: FaultPoint, *, step: int | None = None, microbatch: int | None = None, bucket: int | None = None
    ) -> None:
        """Pass a fault point: return, or be killed, stopped, or raise `InjectedFault`, once per fault."""
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
        # To this thread, which meets it before its next instruction; one sent to the process may let it run on a little.
        signal.pthread_kill(threading.get_ident(), _SIGNALS[due.kind])

    def stretch(self, step: int, seconds: float) -> float:
        """A forward or backward took so long: wait as long as slow ranks take more. Returns how long it took in all."""
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
