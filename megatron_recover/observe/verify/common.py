"""What rules of several invariants share."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_recover import trace
from megatron_recover.core.values import ExitCode
from megatron_recover.observe.history import History

RANK_WORK = (
    trace.MicrobatchStarted, trace.MicrobatchFinished, trace.BucketPassed, trace.Reduced, trace.Transferred, trace.Applied,
)  # fmt: skip
"""What a rank does for a step."""


def survivors(history: History) -> Iterator[int]:
    """Replicas that lived to the end of a run that ended as planned; none for any other run."""
    ended, announced = history.first(trace.RunFinished), history.of(trace.Generation)
    if ended is None or ended.exit_code != ExitCode.OK or not announced:
        return
    # A loss after the others had finished makes no generation any more.
    broken = {event.replica for _, event in history.of(trace.Failure)}
    broken |= {event.replica for _, event in history.of(trace.Fenced)}
    yield from (replica for replica in announced[-1][1].roster if replica not in broken | history.lost_at.keys())
