"""The events of faults, of the processes that they ended, and of the recovery from them."""

from __future__ import annotations

from typing import Literal

from megatron_recover.trace.event import Event

MAX_REASON = 500
"""Characters of an exception that are reported at most. An exception may print all of its data, and
a message has a limited size."""


def reason_of(error: BaseException) -> str:
    """Return type and text of an exception, in at most `MAX_REASON` characters."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


class Fault(Event, frozen=True, kw_only=True):
    """Rank: it is about to carry out an injected fault.

    `step`, `microbatch` and `bucket` are those of the point that the rank passes; None where the
    point has none. No rank records `generation`.
    """

    replica: int
    rank: int
    point: str
    kind: str
    """Value of `faults.FaultKind`."""
    step: int | None = None
    generation: int | None = None
    microbatch: int | None = None
    bucket: int | None = None
    until: str | None = None
    """Name of the event that ends a freeze; None for other faults."""


class Thawed(Event, frozen=True, kw_only=True):
    """Launcher: it is about to continue a rank that a fault had frozen."""

    replica: int
    rank: int


class Failure(Event, frozen=True, kw_only=True):
    """Agent: a rank's process has ended unexpectedly."""

    replica: int
    rank: int
    cause: str
    """Signal name or exit code."""


class Fenced(Event, frozen=True, kw_only=True):
    """Agent: these ranks of a fenced replica are confirmed dead."""

    replica: int
    ranks: tuple[int, ...]


class SetAside(Event, frozen=True, kw_only=True):
    """Agent: a rank does not end although it was killed.

    No decision waits for the rank. It runs no more code of its own, and its replica is in no later
    roster. Until its process ends, the rank keeps its file locks, its memory and its device.
    """

    replica: int
    rank: int
    pid: int
    state: str
    """State letter in /proc/PID/stat (`D`: in an uninterruptible wait); empty if it cannot be
    read."""
    wchan: str
    """Kernel function in which the rank waits; empty if it cannot be read."""


Phase = Literal["detect", "agree", "redeal", "recompute", "reduce", "commit"]
"""Phases of a recovery, in their order."""


class Recovery(Event, frozen=True, kw_only=True):
    """Leader: one phase of a recovery has ended."""

    replica: int
    generation: int
    step: int
    phase: Phase
    seconds: float
