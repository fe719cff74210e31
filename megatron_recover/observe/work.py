"""Find the microbatches of a run that were lost, computed again or computed for nothing.

The words mean here:

- *lost*: dealt to a replica that died or was fenced before every bucket of the microbatch was safe
  with others;
- *redone*: computed although an older plan had dealt them for the same bucket;
- *wasted*: finished by a replica that committed the step, and part of no committed bucket.

Attempts at a step that were made void are left out (`replay`): none of their microbatches counts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_recover.observe.facts import Line
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import each_step
from megatron_recover.observe.step import Ids, Step

Lost = tuple[int, int, int, int]
"""Generation that announces the loss, replica, step and microbatch."""
Wasted = tuple[Line, int, int, int]
"""Line, replica, step and microbatch."""


@dataclass(frozen=True)
class Redone:
    """A microbatch computed by `replica` that an older plan had dealt for the same bucket."""

    line: Line
    replica: int
    generation: int
    step: int
    microbatch: int
    dealt_before_to: tuple[int, ...]
    in_schedule: bool
    """True if the running pass was extended by the microbatch; False if the plan that dealt it
    opened its pass."""


def lost_in(history: History, step: Step) -> list[Lost]:
    """Return the microbatches that were lost with replicas whose last planned step is `step`.

    A replica that leaves as requested must lose none.

    A microbatch may be lost, dealt again, and lost again with the next replica. It is listed again
    only if that replica had finished it.
    """
    found: list[Lost] = []
    gone: set[int] = set()
    here = [
        (replica, event) for replica, (_, event) in history.gone_at.items() if history.last_planned.get(replica) == step.number
    ]
    versions = {result.bucket: result.version for result in step.record[1].versions} if step.record else {}
    for replica, announced in sorted(here, key=lambda one: one[1].generation):
        work = step.ranks.get((replica, 0))
        groups = work.groups.items() if work else ()
        for _, plan in step.plans:
            for one in plan.computes if plan.replica == replica else ():
                # A committed bucket that counts this replica has kept the gradient.
                if versions and all(replica in history.roster(versions.get(bucket, 0)) for bucket in one.into):
                    continue
                for microbatch in one.microbatches:
                    is_finished = any(key[:2] == (plan.generation, 0) and microbatch in ids for key, ids in groups)
                    if microbatch not in gone or is_finished:
                        found.append((announced.generation, replica, step.number, microbatch))
                    gone.add(microbatch)
    return found


def redone_in(step: Step) -> list[Redone]:
    """Return the microbatches that a rank 0 computed although an older plan had dealt them.

    Only an older deal for a bucket that the gradient went into counts.
    """
    oldest = min((plan.generation for _, plan in step.plans), default=None)
    newer = [place for place in step.first_stage_lines if oldest is not None and place[1] > oldest]
    if not newer:
        return []
    extended = {
        (event.replica, event.generation, microbatch) for _, event in step.extended for microbatch in event.microbatches
    }
    dealt: dict[int, list[tuple[int, int, frozenset[int]]]] = defaultdict(list)
    for _, plan in step.plans:
        for one in plan.computes:
            deal = plan.generation, plan.replica, frozenset(one.into)  # one deal for all ranks: `into` names the buckets of all
            for microbatch in one.microbatches:
                dealt[microbatch].append(deal)
    groups: dict[tuple[int, int], list[tuple[frozenset[int], Ids]]] = defaultdict(list)
    for (replica, _), work in step.ranks.items():
        for (generation, _, into), ids in work.groups.items():
            groups[replica, generation].append((frozenset(into), ids))
    found = []
    for replica, generation in newer:
        for microbatch, line in step.first_stage_lines[replica, generation].items():
            went_into = frozenset[int]().union(*(some for some, ids in groups[replica, generation] if microbatch in ids))
            holders = {
                holder for when, holder, held in dealt[microbatch] if when < generation and not held.isdisjoint(went_into)
            }
            if holders:
                taken_in = (replica, generation, microbatch) in extended
                found.append(
                    Redone(line, replica, generation, step.number, microbatch, tuple(sorted(holders)), taken_in)
                )  # fmt: skip
    return found


def wasted_in(history: History, step: Step) -> list[Wasted]:
    """Return the microbatches that a replica finished and that are part of no committed bucket.

    Only replicas that committed the step are looked at: the work of a dying replica is lost, not
    wasted. A microbatch is listed once for each replica and generation.
    """
    if step.record is None:
        return []
    versions = {result.bucket: result.version for result in step.record[1].versions}
    counted: dict[tuple[int, int, tuple[int, ...]], bool] = {}
    unused: dict[tuple[int, int], list[Ids]] = defaultdict(list)
    used: dict[tuple[int, int], list[Ids]] = defaultdict(list)
    for (replica, _), work in step.ranks.items():
        for (generation, _, into), ids in work.groups.items():
            key = (replica, generation, into)
            if key not in counted:
                counted[key] = any(
                    generation <= versions.get(bucket, 0) and replica in history.roster(versions.get(bucket, 0))
                    for bucket in into
                )
            (used if counted[key] else unused)[replica, generation].append(ids)
    return [
        (step.lines[replica, generation][microbatch], replica, step.number, microbatch)
        for (replica, generation), some in unused.items() if replica in step.commits
        for microbatch in sorted({one for ids in some for one in ids.each()})
        if not any(microbatch in ids for ids in used[replica, generation])
    ]  # fmt: skip


class WorkAccount:
    """The lost, redone and wasted microbatches of a history, over all steps."""

    def __init__(self, history: History, *, is_fed: bool = False) -> None:
        """Create the accounts of a history.

        `is_fed`: the caller replays the steps and gives each to `add`. Without it the first access
        reads the trace again.
        """
        self._history, self._is_complete = history, is_fed
        self._lost: list[Lost] = []
        self._redone: list[Redone] = []
        self._wasted: list[Wasted] = []

    def add(self, step: Step) -> None:
        """Add a whole step."""
        self._lost += lost_in(self._history, step)
        self._redone += redone_in(step)
        self._wasted += wasted_in(self._history, step)

    def _complete(self) -> None:
        if not self._is_complete:
            self._is_complete = True
            for step in each_step(self._history):
                self.add(step)

    @property
    def lost(self) -> tuple[Lost, ...]:
        """Return the lost microbatches, ordered by the generation that announces the loss."""
        self._complete()
        return tuple(sorted(self._lost, key=lambda one: one[0]))

    @property
    def redone(self) -> tuple[Redone, ...]:
        """Return the microbatches that were computed again."""
        self._complete()
        return tuple(self._redone)

    @property
    def wasted(self) -> tuple[Wasted, ...]:
        """Return the microbatches that were computed for nothing."""
        self._complete()
        return tuple(self._wasted)
