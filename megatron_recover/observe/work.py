"""What a run computed: which microbatches were lost, computed again, or computed for nothing.

The words are those of docs/guarantees.md: *lost* microbatches were dealt to a replica that died or was fenced before every
bucket that they go into was safe with others; *redone* ones were computed by another replica after that; *wasted* ones were
finished by a replica that went on, and entered no committed bucket.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from megatron_recover import trace
from megatron_recover.observe.history import History, Line


@dataclass(frozen=True)
class Redone:
    """A microbatch computed by `replica` although an older plan had dealt it to somebody for a bucket that it went into."""

    line: Line
    replica: int
    generation: int
    step: int
    microbatch: int
    dealt_before_to: tuple[int, ...]
    in_schedule: bool
    """A running pass took it in."""


class Work:
    """Accounts of a history's microbatches, over all steps."""

    def __init__(self, history: History) -> None:
        self._history = history

    @cached_property
    def lost(self) -> tuple[tuple[int, int, int, int], ...]:
        """(generation that announces the loss, replica, step, microbatch), one for each lost microbatch.

        A microbatch that was lost, dealt again and not computed again before that replica was lost, too, is lost once.
        """
        history = self._history
        found: list[tuple[int, int, int, int]] = []
        gone: set[tuple[int, int]] = set()
        for replica, (_, announced) in sorted(history.lost_at.items(), key=lambda item: item[1][1].generation):
            planned = (step for step, plans in history.plans.items() if any(plan.replica == replica for _, plan in plans))
            step = max(planned, default=None)
            if step is None:
                continue
            record = history.records.get(step)
            versions = {result.bucket: result.version for result in record[1].versions} if record else {}
            finished = {
                (event.generation, event.microbatch) for _, event in history.finished.get(step, ())
                if (event.replica, event.rank, event.chunk) == (replica, 0, 0)
            }  # fmt: skip
            for _, plan in history.plans[step]:
                for one in plan.computes if plan.replica == replica else ():
                    # Into a bucket whose committed version counts this replica, the gradient was not lost.
                    if versions and all(replica in history.roster(versions.get(bucket, 0)) for bucket in one.into):
                        continue
                    for microbatch in one.microbatches:
                        if (step, microbatch) not in gone or (plan.generation, microbatch) in finished:
                            found.append((announced.generation, replica, step, microbatch))
                        gone.add((step, microbatch))
        return tuple(found)

    @cached_property
    def redone(self) -> tuple[Redone, ...]:
        """Every backward on a first rank of a microbatch that an older plan had dealt already."""
        history = self._history
        extended = {
            (event.replica, event.generation, event.step, microbatch)
            for _, event in history.of(trace.Extended)
            for microbatch in event.microbatches
        }
        found = []
        for step, events in history.finished.items():
            dealt: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
            for _, plan in history.plans.get(step, ()):
                for one in plan.computes:
                    for microbatch in one.microbatches:
                        for bucket in one.into:
                            dealt[microbatch, bucket].add((plan.generation, plan.replica))
            into: dict[tuple[int, int, int], set[int]] = defaultdict(set)
            lines: dict[tuple[int, int, int], Line] = {}
            for line, event in events:
                key = (event.replica, event.generation, event.microbatch)
                into[key].update(event.into)
                if event.rank == 0 and event.chunk == 0:
                    lines[key] = line
            for (replica, generation, microbatch), line in lines.items():
                holders = {
                    holder for bucket in into[replica, generation, microbatch] for when, holder in dealt[microbatch, bucket]
                    if when < generation
                }  # fmt: skip
                if holders:
                    taken_in = (replica, generation, step, microbatch) in extended
                    found.append(Redone(line, replica, generation, step, microbatch, tuple(sorted(holders)), taken_in))
        return tuple(found)

    @cached_property
    def wasted(self) -> tuple[tuple[Line, int, int, int], ...]:
        """(line, replica, step, microbatch) of finished backwards that entered no committed bucket.

        Only replicas that committed the step themselves count: what a dying replica threw away is lost, not wasted.
        """
        history = self._history
        found = []
        for step, events in history.finished.items():
            record = history.records.get(step)
            if record is None:
                continue
            versions = {result.bucket: result.version for result in record[1].versions}
            used: dict[tuple[int, int, int], tuple[Line, bool]] = {}
            for line, event in events:
                entered = any(
                    event.generation <= versions.get(bucket, 0) and event.replica in history.roster(versions.get(bucket, 0))
                    for bucket in event.into
                )
                key = (event.replica, event.generation, event.microbatch)
                used[key] = (line, entered or used.get(key, (line, False))[1])
            for (replica, _, microbatch), (line, entered) in used.items():
                if not entered and replica in history.commits[step]:
                    found.append((line, replica, step, microbatch))
        return tuple(found)
