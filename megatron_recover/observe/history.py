"""A run's trace as the checker and the summary look at it: read once, indexed by what the rules ask for.

It decides nothing: no rule, no tolerance. Every index keeps the line of the event, so that a verdict can point at it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from megatron_recover import trace
from megatron_recover.core.values import LossKind
from megatron_recover.faults import FaultKind

Line = int
Numbered = tuple[Line, trace.AnyEvent]
Finding = tuple[Line, str]
"""The line of the event that shows it, and what is wrong."""
Findings = Iterator[Finding]
_TRAINING = re.compile(r"train \d+")


_OF_AN_ATTEMPT = (
    trace.Status, trace.Plan, trace.MicrobatchStarted, trace.MicrobatchFinished, trace.BucketPassed, trace.Extended,
    trace.Reduced, trace.Transferred,
)  # fmt: skip
"""What members do of a step in a generation, and what is void with it."""


def _voids(events: Iterable[Numbered]) -> dict[int, int]:
    announced = (event.void for _, event in events if isinstance(event, trace.Generation) and event.void is not None)
    return dict(announced)


def who(event: trace.AnyEvent) -> str:
    """Who wrote an event."""
    rank = getattr(event, "rank", None)
    return f"replica {getattr(event, 'replica', '?')}" + (f" rank {rank}" if rank is not None else "")


def is_training(label: str) -> bool:
    """Whether a step's label names a training step (``train 17``), not an evaluation."""
    return _TRAINING.fullmatch(label) is not None


def is_end(label: str) -> bool:
    """Whether a step's label names the agreement to end, after the last save: nothing is computed in it."""
    return label.startswith("end ")


def iteration_of(label: str) -> int:
    """Megatron's iteration in the label of a training step."""
    return int(label.split()[1])


class History:
    """All events of a run in the order of their lines, and indexes over them. Treat it as frozen."""

    def __init__(self, events: Iterable[Numbered], cuts: Iterable[tuple[Line, str]] = (), path: str = "") -> None:
        everything = tuple(events)
        self.voids = _voids(everything)
        """Step -> the generation from which on it was computed anew, since a sum did not count every microbatch once."""
        self.events: tuple[Numbered, ...] = tuple(each for each in everything if not self._is_void(each[1]))
        """Without the attempts at a step that were made void: they are as if they had never been."""
        self.void_attempts: tuple[Numbered, ...] = tuple(each for each in everything if self._is_void(each[1]))
        self.cuts = tuple(cuts)
        """(line, fragment) of events whose writer was killed in the middle of the write."""
        self.path = path
        self._by_type: dict[type, list[Numbered]] = defaultdict(list)
        for line, event in self.events:
            self._by_type[type(event)].append((line, event))

    def _is_void(self, event: trace.AnyEvent) -> bool:
        since = self.voids.get(event.step) if self.voids and isinstance(event, _OF_AN_ATTEMPT) else None
        return since is not None and event.generation < since  # type: ignore[union-attr]

    @classmethod
    def read(cls, run_dir: str | Path) -> History:
        """Read the trace of a run directory (or a trace file itself).

        Raises FileNotFoundError where there is none and `trace.TraceError` for a line that is no event.
        """
        path = Path(run_dir)
        path = path / trace.EVENTS_FILE if path.is_dir() else path
        cuts: list[tuple[Line, str]] = []
        events = list(trace.read(path, lambda line, fragment: cuts.append((line, fragment))))
        return cls(events, cuts, str(path))

    def of[E](self, kind: type[E]) -> list[tuple[Line, E]]:
        """All events of one type."""
        return self._by_type[kind]  # type: ignore[return-value]

    def first[E](self, kind: type[E]) -> E | None:
        """The first event of a type, if any."""
        found = self.of(kind)
        return found[0][1] if found else None

    @cached_property
    def generations(self) -> dict[int, trace.Generation]:
        """The first announcement of each generation."""
        found: dict[int, trace.Generation] = {}
        for _, event in self.of(trace.Generation):
            found.setdefault(event.generation, event)
        return found

    def roster(self, generation: int) -> tuple[int, ...]:
        """Members of a generation; empty where it was never announced."""
        event = self.generations.get(generation)
        return event.roster if event else ()

    @cached_property
    def bucket_ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket the ranks that hold it."""
        joined = self.first(trace.Joined)
        return joined.bucket_ranks if joined else ()

    def ranks_of(self, bucket: int) -> tuple[int, ...]:
        """Ranks that hold a bucket; empty for a bucket that nobody announced."""
        return self.bucket_ranks[bucket] if 0 <= bucket < len(self.bucket_ranks) else ()

    @cached_property
    def commits(self) -> dict[int, dict[int, tuple[Line, trace.Committed]]]:
        """Step -> replica -> its first commit of the step."""
        found: dict[int, dict[int, tuple[Line, trace.Committed]]] = defaultdict(dict)
        for line, event in self.of(trace.Committed):
            found[event.step].setdefault(event.replica, (line, event))
        return dict(sorted(found.items()))

    @cached_property
    def records(self) -> dict[int, tuple[Line, trace.Committed]]:
        """Step -> the first commit of it in the trace, which stands for its record."""
        return {step: min(by_replica.values(), key=lambda one: one[0]) for step, by_replica in self.commits.items()}

    @cached_property
    def plans(self) -> dict[int, list[tuple[Line, trace.Plan]]]:
        """Step -> plans of all replicas."""
        found: dict[int, list[tuple[Line, trace.Plan]]] = defaultdict(list)
        for line, event in self.of(trace.Plan):
            found[event.step].append((line, event))
        return found

    def num_microbatches(self, step: int) -> int | None:
        """M of a step."""
        plans = self.plans.get(step)
        return plans[0][1].num_microbatches if plans else None

    @cached_property
    def results(self) -> dict[tuple[int, int, int], list[tuple[Line, trace.Reduced | trace.Transferred]]]:
        """(step, bucket, version) -> every time that a rank came to hold it, by a sum or a transfer."""
        found: dict[tuple[int, int, int], list[tuple[Line, trace.Reduced | trace.Transferred]]] = defaultdict(list)
        events: list[tuple[Line, trace.Reduced | trace.Transferred]] = [*self.of(trace.Reduced), *self.of(trace.Transferred)]
        for line, event in events:
            found[event.step, event.bucket, event.version].append((line, event))
        return found

    @cached_property
    def held_since(self) -> dict[tuple[int, int, int, int, int], Line]:
        """(step, bucket, version, replica, rank) -> line from which on this rank holds the result."""
        found: dict[tuple[int, int, int, int, int], Line] = {}
        for (step, bucket, version), events in self.results.items():
            for line, event in events:
                key = (step, bucket, version, event.replica, event.rank)
                found[key] = min(line, found.get(key, line))
        return found

    @cached_property
    def started(self) -> dict[int, list[tuple[Line, trace.MicrobatchStarted]]]:
        """Step -> begun microbatches of all ranks."""
        found: dict[int, list[tuple[Line, trace.MicrobatchStarted]]] = defaultdict(list)
        for line, event in self.of(trace.MicrobatchStarted):
            found[event.step].append((line, event))
        return found

    @cached_property
    def finished(self) -> dict[int, list[tuple[Line, trace.MicrobatchFinished]]]:
        """Step -> finished microbatches of all ranks.

        Of one in whose last backward a rank died: as far as it came, if it had passed a bucket (`trace.BucketPassed`).
        """
        found: dict[int, list[tuple[Line, trace.MicrobatchFinished]]] = defaultdict(list)
        for line, event in self.of(trace.MicrobatchFinished):
            found[event.step].append((line, event))
        ended = {_backward_of(event) for events in found.values() for _, event in events}
        cut: dict[tuple[int, ...], tuple[Line, trace.MicrobatchFinished]] = {}
        for line, event in self.of(trace.BucketPassed):
            if (key := _backward_of(event)) not in ended:
                line, before = cut.get(key, (line, None))
                into = (*(before.into if before else ()), event.bucket)
                replica, rank, generation, step, microbatch, chunk = key
                cut[key] = line, trace.MicrobatchFinished(
                    replica=replica, rank=rank, generation=generation, step=step, microbatch=microbatch, chunk=chunk,
                    seconds=0.0, into=into, t=event.t,
                )  # fmt: skip
        for line, event in cut.values():
            found[event.step].append((line, event))
        return found

    @cached_property
    def lost_at(self) -> dict[int, tuple[Line, trace.Generation]]:
        """Replica -> the announcement of its loss."""
        found: dict[int, tuple[Line, trace.Generation]] = {}
        for line, event in self.of(trace.Generation):
            for lost in event.losses:
                found.setdefault(lost.replica, (line, event))
        return found

    @cached_property
    def strikes(self) -> list[trace.Fault]:
        """Injected faults that end a rank, stop it, or raise in it: all but slowness."""
        return [event for _, event in self.of(trace.Fault) if event.kind != FaultKind.SLOW.value]

    @cached_property
    def outvoted(self) -> dict[int, tuple[int, int]]:
        """Replica that a majority disagreed with -> (first generation without it, last step that it committed or -1)."""
        last = {replica: step for step, by_replica in self.commits.items() for replica in by_replica}
        return {
            lost.replica: (event.generation, last.get(lost.replica, -1))
            for event in self.generations.values() for lost in event.losses if lost.kind is LossKind.DIVERGED
        }  # fmt: skip

    def withdrawn(self, step: int, version: int, generation: int) -> bool:
        """Whether a version counts no more in `generation`: who took part was outvoted before it committed the step."""
        members = self.roster(version)
        return any(
            replica in members and since <= generation and step > last for replica, (since, last) in self.outvoted.items()
        )

    def outvoted_for(self, event: trace.Applied | trace.Reduced | trace.Transferred) -> bool:
        """Whether it was for this that its writer was outvoted: its results of the step, or its parameters before that step."""
        if event.replica not in self.outvoted:
            return False
        _, last = self.outvoted[event.replica]
        return event.step >= last if isinstance(event, trace.Applied) else event.step > last

    def losses(self) -> dict[str, float]:
        """Label of each step -> its loss, in the order of the steps."""
        found: dict[int, tuple[str, float]] = {}
        for _, event in self.of(trace.Applied):
            if event.loss is not None:
                found.setdefault(event.step, (event.label, event.loss))
        return dict(found[step] for step in sorted(found))


def _backward_of(event: trace.MicrobatchFinished | trace.BucketPassed) -> tuple[int, ...]:
    return event.replica, event.rank, event.generation, event.step, event.microbatch, event.chunk
