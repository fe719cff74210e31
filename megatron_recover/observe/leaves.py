"""Find the replicas that were asked to leave the job, and what became of each.

The words are those of `megatron-recover check` and of the report's page.
"""

from __future__ import annotations

import msgspec

from megatron_recover import trace
from megatron_recover.observe.history import History
from megatron_recover.observe.work import Lost


class LeaveSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that was asked to leave."""

    t: float
    """Seconds since the start of the run, when it was asked for."""
    replica: int
    reason: str
    """Name of what asked for it."""
    generation: int | None = None
    """The first generation without it; None if it did not leave."""
    label: str | None = None
    """Newest committed step when it left; None if the trace has none, or it did not leave."""
    microbatches_lost: int = 0
    stays: str = ""
    """Reason why it did not leave; empty if it left."""

    @property
    def words(self) -> str:
        """Return a sentence about it."""
        who = f"replica {self.replica}"
        if self.generation is None:
            return f"{who} did not leave, asked by {self.reason}: {self.stays}"
        lost = self.microbatches_lost
        cost = f"{lost or 'no'} microbatch{'es' if lost > 1 else ''} lost"
        return f"{who} left{f' after {self.label}' if self.label else ''}, asked by {self.reason}: {cost}"


def leaves(history: History, lost: tuple[Lost, ...]) -> tuple[LeaveSummary, ...]:
    """Return all requests to leave, by replica in the order of time; `lost` is that of the run."""
    left = {replica: (line, event) for line, event in history.of(trace.Generation) for replica in event.left}
    why = {refused.replica: refused.why for _, event in history.of(trace.LeaveAsked) for refused in event.refused}
    found: list[LeaveSummary] = []
    for _, asked in history.of(trace.LeaveAsked):
        found += [
            LeaveSummary(t=asked.t, replica=refused.replica, reason=asked.reason, stays=refused.why)
            for refused in asked.refused if refused.replica not in {one.replica for one in found}
        ]  # fmt: skip
        for replica in asked.replicas:
            if replica not in left:
                removed = history.lost_at.get(replica)
                stays = "it was lost before" if removed else why.get(replica, "the run ended before")
                found.append(LeaveSummary(t=asked.t, replica=replica, reason=asked.reason, stays=stays))
                continue
            line, event = left[replica]
            labels = [record.label for record in history.records.values() if record.line < line]
            found.append(
                LeaveSummary(
                    t=asked.t, replica=replica, reason=asked.reason, generation=event.generation,
                    label=labels[-1] if labels else None,
                    microbatches_lost=sum(one[:2] == (event.generation, replica) for one in lost),
                )
            )  # fmt: skip
    return tuple(found)
