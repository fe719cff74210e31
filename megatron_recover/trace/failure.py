"""The events of faults, of what they ended, and of the recovery from them."""

from __future__ import annotations

from typing import Literal

from megatron_recover.trace.event import Event

MAX_REASON = 500
"""Characters of an exception that are told: it may print all of the data that it is about, and no message takes that."""


def reason_of(error: BaseException) -> str:
    """Return type and text of an exception, in `MAX_REASON` characters at most."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


class Fault(Event, frozen=True, kw_only=True):
    """Rank, just before it carries an injected fault out."""

    replica: int
    rank: int
    point: str
    kind: str
    """As in `faults.FaultKind`."""
    step: int | None = None
    generation: int | None = None
    microbatch: int | None = None
    bucket: int | None = None
    until: str | None = None
    """Of a freeze: the name of the event that ends it."""


class Thawed(Event, frozen=True, kw_only=True):
    """Launcher: a rank that a fault had frozen goes on."""

    replica: int
    rank: int


class Failure(Event, frozen=True, kw_only=True):
    """Agent: a rank's process has ended or does not answer."""

    replica: int
    rank: int
    cause: str
    """Signal name or exit code."""


class Fenced(Event, frozen=True, kw_only=True):
    """Agent: these ranks of a broken replica are confirmed dead."""

    replica: int
    ranks: tuple[int, ...]


class SetAside(Event, frozen=True, kw_only=True):
    """Agent: a rank does not end although it was killed. Nobody waits for it, and its slot is not used again.

    Whatever it still does has no effect: its replica is in no roster, and it ends before it runs another instruction.
    """

    replica: int
    rank: int
    pid: int
    state: str
    """As /proc/PID/stat has it (`D`: in an uninterruptible wait); empty where it cannot be read."""
    wchan: str
    """The kernel function in which it waits; empty where it cannot be read."""


Phase = Literal["detect", "agree", "redeal", "recompute", "reduce", "commit"]
"""Phases of a recovery, in their order."""


class Recovery(Event, frozen=True, kw_only=True):
    """Leader: one phase of a recovery has ended."""

    replica: int
    generation: int
    step: int
    phase: Phase
    seconds: float
