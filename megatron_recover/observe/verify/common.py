"""Facts and words that rules of several invariants use."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.history import History

RANK_WORK = (
    trace.MicrobatchStarted, trace.MicrobatchFinished, trace.BucketPassed, trace.Reduced, trace.Transferred, trace.Applied,
)  # fmt: skip
"""Types of events by which a rank works on a step."""


def who(event: trace.AnyEvent) -> str:
    """Return the name of the replica or rank that wrote an event."""
    rank = getattr(event, "rank", None)
    return f"replica {getattr(event, 'replica', '?')}" + (f" rank {rank}" if rank is not None else "")


def survivors(history: History) -> Iterator[int]:
    """Yield the replicas that lived to the end of a run that ended as planned.

    Yield none for any other run.
    """
    ended, announced = history.first(trace.RunFinished), history.of(trace.Generation)
    if ended is None or ended.exit_code != ExitCode.OK or not announced:
        return
    # A loss after the others have finished makes no generation, so no announcement names it.
    broken = {event.replica for _, event in history.of(trace.Failure)}
    broken |= {event.replica for _, event in history.of(trace.Fenced)}
    yield from (
        replica for replica in history.roster(announced[-1][1].generation) if replica not in broken | history.lost_at.keys()
    )
