"""The event log of a run: the type of every event, and how events are written and read.

A trace is `events.jsonl` and its older parts (`event_files`), with one JSON object a line. The
recorder (`cluster.recorder`) writes it from the events that all processes of a run record (`ring`).
This package never judges a history (`observe.verify.check` does) and never formats an event for
people.

Cause comes before effect: an event is recorded before its effect can be seen outside the thread
that records it. Examples: before the vote is sent, before the result is held, before the fault
strikes. So the order of the lines is an order in which the run can have happened, and the checker
may rely on this order.

Event names are the class names in snake case, so use the package as the namespace:
``log.record(trace.Committed(...))``. docs/reference/trace.md lists which process writes which
event.
"""

# ruff: noqa: F401, I001  # the imports below are the list of what is public, subject by subject

from __future__ import annotations

from megatron_recover.trace.event_files import EVENTS_FILE, TraceError

# fmt: off
from megatron_recover.trace.run import (
    Checkpoint, ClockRefused, Entered, Gap, Generation, Granted, Joined, Layout, LeaveAsked, Level, Loss, NodeStarted, Refused,
    RunFinished, RunStarted, Stopping,
)
from megatron_recover.trace.step import (
    Applied, BucketPassed, Committed, Compute, Contribution, Decided, Disagreed, Extended, MicrobatchFinished,
    MicrobatchStarted, Miscounted, Plan, Reduced, ReductionFailed, Result, StateDigested, Status, Transfer, Transferred, Voted,
)
from megatron_recover.trace.newcomer import (
    Claimed, ClaimRefused, Forming, NewcomerLost, PassHeld, Proven, StateRead, TurnedAway,
)
from megatron_recover.trace.standstill import (
    CoordinatorLost, CoordinatorSilent, LeaderSilent, RankMoved, RankSilent, Strangers, Waiting, WaitingRank,
)
from megatron_recover.trace.node import CoordinatorLeft, NodeJoined, NodeLost, NodePlace, NodeSilent, NodesMet
from megatron_recover.trace.failure import Failure, Fault, Fenced, MAX_REASON, Phase, Recovery, SetAside, Thawed, reason_of
from megatron_recover.trace.event import Event
from megatron_recover.trace.catalog import LEFT_OUT, LEVELS, NAMES, AnyEvent, name_of
from megatron_recover.trace.log import EventLog, Log, RankTrace
from megatron_recover.trace.reading import name_in, parse, read
# fmt: on
