"""The list of all events, their names, and the events that a trace of each level has."""

from __future__ import annotations

from typing import get_args

from megatron_recover.trace.event import Event, snake_case
from megatron_recover.trace.failure import Failure, Fault, Fenced, Recovery, SetAside, Thawed
from megatron_recover.trace.newcomer import (
    Claimed,
    ClaimRefused,
    Forming,
    NewcomerLost,
    PassHeld,
    Proven,
    StateRead,
    TurnedAway,
)
from megatron_recover.trace.node import CoordinatorLeft, NodeJoined, NodeLost, NodeSilent, NodesMet
from megatron_recover.trace.run import (
    Checkpoint,
    ClockRefused,
    Entered,
    Gap,
    Generation,
    Granted,
    Joined,
    LeaveAsked,
    Level,
    NodeStarted,
    RunFinished,
    RunStarted,
    Stopping,
)  # fmt: skip
from megatron_recover.trace.standstill import (
    CoordinatorLost,
    CoordinatorSilent,
    LeaderSilent,
    RankMoved,
    RankSilent,
    Strangers,
    Waiting,
)
from megatron_recover.trace.step import (
    Applied,
    BucketPassed,
    Committed,
    Disagreed,
    Extended,
    MicrobatchFinished,
    MicrobatchStarted,
    Miscounted,
    Plan,
    Reduced,
    ReductionFailed,
    StateDigested,
    Status,
    Transferred,
    Voted,
)

AnyEvent = (
    RunStarted | NodeStarted | ClockRefused
    | Joined | Generation | Granted | LeaveAsked | Entered | Stopping | RunFinished | Checkpoint | Gap
    | Forming | StateRead | Claimed | ClaimRefused | PassHeld | NewcomerLost | TurnedAway | Proven
    | Status | Plan | MicrobatchStarted | MicrobatchFinished | BucketPassed | Extended | Reduced | Transferred | Miscounted
    | ReductionFailed | StateDigested | Voted | Disagreed | Committed | Applied
    | Fault | Thawed | Failure | Fenced | SetAside | Recovery
    | NodesMet | NodeJoined | NodeSilent | NodeLost | CoordinatorLeft
    | RankSilent | RankMoved | LeaderSilent | CoordinatorSilent | CoordinatorLost | Waiting | Strangers
)  # fmt: skip
"""Every event of a log."""


def name_of(event: AnyEvent) -> str:
    """Return the name of an event in a log."""
    return snake_case(type(event).__name__)


NAMES = tuple(snake_case(kind.__name__) for kind in get_args(AnyEvent))
"""The names of all events in a log."""


LEVELS: tuple[Level, ...] = get_args(Level)
_OF_MICROBATCHES: frozenset[type[Event]] = frozenset({MicrobatchStarted, MicrobatchFinished, BucketPassed, Extended})
_OF_STEPS: frozenset[type[Event]] = frozenset({Plan, Reduced, Transferred, Voted, Committed, Applied})
LEFT_OUT: dict[Level, frozenset[type[Event]]] = {
    "microbatches": frozenset(),
    "steps": _OF_MICROBATCHES,
    "faults": _OF_MICROBATCHES | _OF_STEPS,
}
"""The events that a trace of each level leaves out."""
