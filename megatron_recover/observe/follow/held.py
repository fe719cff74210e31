"""Count the microbatches that are lost and dealt again, from plans and commits as they come.

The words are those of `observe.work`, which reads a whole trace and knows which microbatches a rank
really computed. Here a microbatch counts when a plan deals it, at every level of the trace that has
steps. The two differ where a replica dies that was dealt what another one lost, and where a step is
made void.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_recover import trace


class _Deal(NamedTuple):
    """Microbatches that a plan of one replica deals, and the buckets that take their gradient."""

    generation: int
    replica: int
    microbatches: tuple[int, ...]
    into: frozenset[int]


class HeldWork:
    """The microbatches of open steps, and who holds them.

    Memory holds the deals of steps that are not committed, the rosters since the oldest of them,
    and a number for each replica.
    """

    def __init__(self) -> None:
        self.num_lost = 0
        """Microbatches that were dealt to a replica that was lost before all of their buckets were
        safe with others; each once a step."""
        self.num_dealt_again = 0
        """Microbatches in plans although an older plan had dealt them for the same bucket."""
        self._deals: dict[int, list[_Deal]] = {}
        self._lost: dict[int, list[int]] = {}
        """Step that is not committed -> replicas lost in it, in the order of their losses."""
        self._last_planned: dict[int, int] = {}
        self._rosters: dict[int, frozenset[int]] = {}
        self._newest_commit = -1

    def take(self, event: trace.AnyEvent) -> None:
        """Take the next event of the run."""
        match event:
            case trace.Plan() if event.step > self._newest_commit:
                self._planned(event)
            case trace.Generation():
                self._announced(event)
            case trace.Committed() if event.step > self._newest_commit:
                self._committed(event.step, {each.bucket: each.version for each in event.versions})
            case trace.RunFinished():
                for step in sorted(self._deals):  # what was never committed is lost with its replicas
                    self._count_lost(step, {})

    def _planned(self, event: trace.Plan) -> None:
        deals = self._deals.setdefault(event.step, [])
        self._last_planned[event.replica] = event.step
        for compute in event.computes:  # no two plans of one generation deal a microbatch for the same bucket
            into = frozenset(compute.into)
            holders = [one for one in deals if one.generation < event.generation and not one.into.isdisjoint(into)]
            self.num_dealt_again += sum(
                any(microbatch in one.microbatches for one in holders)
                for microbatch in (compute.microbatches if holders else ())
            )
            deals.append(_Deal(event.generation, event.replica, compute.microbatches, into))

    def _announced(self, event: trace.Generation) -> None:
        self._rosters[event.generation] = frozenset(event.roster)
        for replica in (*(loss.replica for loss in event.losses), *event.left):
            step = self._last_planned.pop(replica, None)
            if step in self._deals:
                self._lost.setdefault(step, []).append(replica)
        if event.void is not None and event.void[0] in self._deals:
            step, since = event.void
            self._deals[step] = [one for one in self._deals[step] if one.generation >= since]

    def _committed(self, step: int, versions: dict[int, int]) -> None:
        self._newest_commit = step
        for each in [each for each in self._deals if each <= step]:
            self._count_lost(each, versions if each == step else {})
        oldest = min((one.generation for deals in self._deals.values() for one in deals), default=max(self._rosters, default=0))
        self._rosters = {number: roster for number, roster in self._rosters.items() if number >= oldest}

    def _count_lost(self, step: int, versions: dict[int, int]) -> None:
        """Count what was lost in a step that is over, and forget the step.

        `versions`: the version of each bucket that is committed; empty if the step never was.
        """
        deals, gone = self._deals.pop(step), set[int]()
        for replica in self._lost.pop(step, ()):
            for one in deals:
                is_safe = versions and all(replica in self._rosters.get(versions.get(bucket, 0), ()) for bucket in one.into)
                if one.replica == replica and not is_safe:
                    gone.update(one.microbatches)
        self.num_lost += len(gone)
