"""A run's trace as the checker and the summary look at it: what is small is kept, the rest is read again.

A trace can be larger than memory. `History` reads it once and keeps what concerns the whole run (its *facts*: membership,
losses, faults, and a few numbers of each step); whoever needs more goes through `events` again, as `replay` does, step by step.
It decides nothing: no rule, no tolerance. Everything keeps the line of its event, so that a verdict can point at it.

What is kept: about 900 bytes a step; one event a member for joining, and the announcement of each generation; of each
generation the results that its members held. It does not grow with microbatches, ranks or buckets where nothing fails.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from megatron_recover import trace
from megatron_recover.core.label import label_of
from megatron_recover.core.values import ExitCode, LossKind
from megatron_recover.faults import FaultKind
from megatron_recover.trace import event_files

Line = int
Numbered = tuple[Line, trace.AnyEvent]
Finding = tuple[Line, str]
"""The line of the event that shows it, and what is wrong."""
Findings = Iterator[Finding]


def who(event: trace.AnyEvent) -> str:
    """Who wrote an event."""
    rank = getattr(event, "rank", None)
    return f"replica {getattr(event, 'replica', '?')}" + (f" rank {rank}" if rank is not None else "")


class Record(msgspec.Struct, frozen=True, gc=False):
    """The first commit of a step in the trace, which stands for its record."""

    line: Line
    t: float
    label: str
    generation: int
    has_digest: bool
    """Whether it carries the state digest."""


class StepFacts(msgspec.Struct, gc=False):
    """What is kept of each step that an event names."""

    last_line: Line
    begin: float
    """When the first of its events happened."""
    end: float
    """When the last of them did."""
    label: str | None = None
    """Of its first plan, like `num_microbatches`, or of that by which it is given up; None where nobody planned it."""
    num_microbatches: int | None = None
    planned_at: float | None = None
    """When the earliest of its plans was made."""
    record: Record | None = None
    committed_at: float | None = None
    """When the last of its members committed it."""
    loss_label: str | None = None
    loss: float | None = None
    loss_at: float | None = None


class QuotaRun(msgspec.Struct):
    """Training steps in a row that a generation dealt alike."""

    generation: int
    step: int
    first: str
    last: str
    roster: tuple[int, ...]
    quotas: tuple[int, ...]
    last_step: int


@dataclass
class RecoveryFacts:
    """What the members of a generation told of its phases."""

    step: int
    """The step of the first that was told."""
    last_step: int
    """The step of the last."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> the slowest member's seconds."""
    committed_at: float | None = None
    """When the last member had committed."""
    end: float = 0.0
    """The last that is known of it."""


class _File:
    """The events of a trace file: each iteration reads it again, up to the line at which the first one ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last_line: Line | None = None

    def __iter__(self) -> Iterator[Numbered]:
        for numbered in trace.read(self._path):
            if self.last_line is not None and numbered[0] > self.last_line:
                return
            yield numbered

    def first_pass(self, on_cut: Callable[[int, str], None]) -> Iterator[Numbered]:
        """Read to the end, wherever that is by now, and tell of cut lines."""
        line = 0
        for numbered in trace.read(self._path, on_cut):
            line = numbered[0]
            yield numbered
        self.last_line = line


class History:
    """The facts of a run, and its events. Treat it as frozen."""

    def __init__(
        self, events: Iterable[Numbered], cuts: Iterable[tuple[Line, str]] = (), path: str = "", *, file: _File | None = None
    ) -> None:
        """Take events that are in memory; `read` makes a history of a file."""
        self.path = path
        self.cuts = list(cuts)
        """(line, fragment) of events whose writer was killed in the middle of the write."""
        if file is None:
            self.events: Iterable[Numbered] = tuple(events)
        else:
            self.events = file
        self.num_events = 0
        self.last_line: Line = 0
        self.seconds = 0.0
        """When the last event happened."""
        self.steps: dict[int, StepFacts] = {}
        self.quota_runs: list[QuotaRun] = []
        self.recoveries: dict[int, RecoveryFacts] = {}
        """By generation."""
        self.num_spans = 0
        """How many forwards, backwards and sums there are to draw."""
        self.last_planned: dict[int, int] = {}
        """Replica -> the last step that it planned."""
        self.last_committed: dict[int, int] = {}
        """Replica -> the last step that it committed."""
        self.last_step: int | None = None
        """The last step that anybody committed."""
        self.final_commits: dict[int, Line] = {}
        """Replica -> line of its first commit of that step."""
        self.planned_at_failure: dict[Line, int] = {}
        """Line of a failure -> the newest step that the failed replica had planned."""
        self._last_digests: tuple[int, str | None, dict[int, dict[int, str]]] = (-1, None, {})
        """The newest step that has parameter digests, its label, and the digest of each replica and rank position after it."""
        self._by_type: dict[type, list[Numbered]] = defaultdict(list)
        self._complete: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
        """(generation, step) -> (bucket, version) -> replicas whose status tells that they hold it complete."""
        self._quotas_of: dict[int, QuotaRun] = {}
        self._newest_plan: dict[int, int] = {}
        first_pass = self.events if file is None else file.first_pass(lambda line, fragment: self.cuts.append((line, fragment)))
        self._collect(first_pass)

    @classmethod
    def read(cls, run_dir: str | Path) -> History:
        """Read the trace of a run directory (or a trace file itself).

        Raises FileNotFoundError where there is none and `trace.TraceError` for a line that is no event or cannot be read.
        """
        path = Path(run_dir)
        with event_files.reading(path):
            path = path / trace.EVENTS_FILE if path.is_dir() else path
        return cls((), path=str(path), file=_File(path))

    # --- The first pass ---------------------------------------------------------------------------

    def _collect(self, events: Iterable[Numbered]) -> None:
        take: Mapping[type, Callable[[Line, Any], None]] = {
            trace.Joined: self._joined, trace.Plan: self._planned, trace.Committed: self._committed,
            trace.Applied: self._applied, trace.Status: self._told, trace.Recovery: self._recovered,
            trace.MicrobatchFinished: self._computed, trace.Reduced: self._reduced, trace.Failure: self._failed,
        }  # fmt: skip
        steps, kept, by_type = self.steps, frozenset(KEPT), self._by_type
        line, seconds, count = 0, 0.0, 0
        for line, event in events:
            count += 1
            kind, seconds = type(event), event.t
            number = getattr(event, "step", None)
            if number is not None:
                facts = steps.get(number)
                if facts is None:
                    steps[number] = StepFacts(line, seconds, seconds)
                else:
                    facts.last_line = line
                    if seconds > facts.end:
                        facts.end = seconds
                    elif seconds < facts.begin:
                        facts.begin = seconds
            if kind in take:
                take[kind](line, event)
            elif kind in kept:
                by_type[kind].append((line, event))
        self.num_events, self.last_line, self.seconds = count, line, seconds

    def _joined(self, line: Line, event: trace.Joined) -> None:
        found = self._by_type[trace.Joined]
        if found and cast(trace.Joined, found[0][1]).bucket_ranks == event.bucket_ranks:  # one copy for all replicas
            event = msgspec.structs.replace(event, bucket_ranks=cast(trace.Joined, found[0][1]).bucket_ranks)
        found.append((line, event))

    def _planned(self, line: Line, event: trace.Plan) -> None:
        facts = self.steps[event.step]
        if facts.label is None or facts.planned_at is None or label_of(event.label).is_given_up:
            facts.label, facts.num_microbatches, facts.planned_at = event.label, event.num_microbatches, event.t
        else:
            facts.planned_at = min(facts.planned_at, event.t)
        self._newest_plan[event.replica] = event.step
        self.last_planned[event.replica] = max(event.step, self.last_planned.get(event.replica, event.step))
        run = self._quotas_of.get(event.generation)
        if not label_of(event.label).is_training or (run is not None and event.step <= run.last_step):
            return
        if run is not None and (run.roster, run.quotas) == (event.roster, event.quotas):
            run.last, run.last_step = event.label, event.step
            return
        run = QuotaRun(event.generation, event.step, event.label, event.label, event.roster, event.quotas, event.step)
        self._quotas_of[event.generation] = run
        self.quota_runs.append(run)

    def _committed(self, line: Line, event: trace.Committed) -> None:
        facts = self.steps[event.step]
        if facts.record is None:
            label = facts.label if facts.label == event.label else event.label  # one copy of the text
            facts.record = Record(line, event.t, label or event.label, event.generation, event.state_digest is not None)
        facts.committed_at = event.t if facts.committed_at is None else max(facts.committed_at, event.t)
        if self.last_step is None or event.step > self.last_step:
            self.last_step, self.final_commits = event.step, {event.replica: line}
        elif event.step == self.last_step:
            self.final_commits.setdefault(event.replica, line)
        self.last_committed[event.replica] = max(event.step, self.last_committed.get(event.replica, event.step))

    def _applied(self, line: Line, event: trace.Applied) -> None:
        if event.loss is not None:
            facts = self.steps[event.step]
            if facts.loss is None:
                facts.loss_label, facts.loss, facts.loss_at = event.label, event.loss, event.t
        if event.parameter_digest is not None:
            step, _, digests = self._last_digests
            if event.step > step:
                step, digests = event.step, defaultdict(dict)
                self._last_digests = step, event.label, digests
            if event.step == step:
                digests[event.replica][event.rank] = event.parameter_digest

    def _told(self, line: Line, event: trace.Status) -> None:
        if event.complete:
            held = self._complete[event.generation, event.step]
            for key in event.complete:
                held[key].append(event.replica)

    def _failed(self, line: Line, event: trace.Failure) -> None:
        self._by_type[trace.Failure].append((line, event))
        if event.replica in self._newest_plan:
            self.planned_at_failure[line] = self._newest_plan[event.replica]

    def _recovered(self, line: Line, event: trace.Recovery) -> None:
        facts = self.recoveries.setdefault(event.generation, RecoveryFacts(event.step, event.step))
        facts.last_step = event.step
        facts.seconds[event.phase] = max(event.seconds, facts.seconds.get(event.phase, 0.0))
        facts.end = max(facts.end, event.t)
        if event.phase == "commit":
            facts.committed_at = event.t if facts.committed_at is None else max(facts.committed_at, event.t)

    def _computed(self, line: Line, event: trace.MicrobatchFinished) -> None:
        self.num_spans += 2 if event.backward_s else 1

    def _reduced(self, line: Line, event: trace.Reduced) -> None:
        self.num_spans += 1

    # --- What the facts say -----------------------------------------------------------------------

    def of[E](self, kind: type[E]) -> list[tuple[Line, E]]:
        """All events of one type. Those that are not kept (`KEPT`) are read again, into memory: not for a large trace."""
        if kind in KEPT:
            return self._by_type[kind]  # type: ignore[return-value]
        return [(line, event) for line, event in self.events if isinstance(event, kind)]

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
    def members(self) -> dict[int, frozenset[int]]:
        """Generation -> its members."""
        return {number: frozenset(event.roster) for number, event in self.generations.items()}

    @cached_property
    def bucket_ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket the ranks that hold it."""
        joined = self.first(trace.Joined)
        return joined.bucket_ranks if joined else ()

    def ranks_of(self, bucket: int) -> tuple[int, ...]:
        """Ranks that hold a bucket; empty for a bucket that nobody announced."""
        return self.bucket_ranks[bucket] if 0 <= bucket < len(self.bucket_ranks) else ()

    @cached_property
    def records(self) -> dict[int, Record]:
        """Step -> its record, for the committed ones, in the order of the steps."""
        return {number: facts.record for number, facts in sorted(self.steps.items()) if facts.record is not None}

    def label(self, step: int | None) -> str | None:
        """The label of a step, as its first plan has it."""
        facts = self.steps.get(step) if step is not None else None
        return facts.label if facts else None

    def num_microbatches(self, step: int) -> int | None:
        """M of a step."""
        facts = self.steps.get(step)
        return facts.num_microbatches if facts else None

    @cached_property
    def voids(self) -> dict[int, int]:
        """Step -> the generation from which on it was computed anew, since a sum did not count every microbatch once."""
        return dict(event.void for _, event in self.of(trace.Generation) if event.void is not None)

    def is_void(self, event: trace.AnyEvent) -> bool:
        """Whether it is of an attempt at a step that was made void: it is as if that had never been."""
        if not self.voids or not isinstance(event, OF_AN_ATTEMPT):
            return False
        return event.generation < self.voids.get(event.step, 0)

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
        """Replica that a majority disagreed with -> (first generation without it, last step that it committed or -1).

        Where no majority says who is right, which ends the run, these are all that disagreed, and there is no such generation.
        """
        found = {
            lost.replica: (event.generation, self.last_committed.get(lost.replica, -1))
            for event in self.generations.values() for lost in event.losses if lost.kind is LossKind.DIVERGED
        }  # fmt: skip
        ended = self.first(trace.RunFinished)
        if ended is not None and ended.exit_code == ExitCode.DIVERGED:
            for _, event in self.of(trace.Disagreed):
                if self.last_step is None or event.step > self.last_step:
                    found.setdefault(event.replica, (sys.maxsize, self.last_committed.get(event.replica, -1)))
        return found

    @cached_property
    def last_digests(self) -> tuple[str | None, dict[int, str]]:
        """The label of the newest step that has parameter digests, and the digest of each rank position after it.

        Without those for which a replica was outvoted: they are not the parameters that the run ended with.
        """
        step, label, digests = self._last_digests
        outvoted = {replica for replica, (_, last) in self.outvoted.items() if step >= last}
        found: dict[int, str] = {}
        for replica, of_ranks in digests.items():
            if replica not in outvoted:
                found.update(of_ranks)
        return label, found

    def withdrawn(self, step: int, version: int, generation: int) -> bool:
        """Whether a version counts no more in `generation`: who took part was outvoted before it committed the step."""
        if not self.outvoted:
            return False
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

    @cached_property
    def decided(self) -> dict[tuple[int, int], dict[int, int]]:
        """(generation, step) -> bucket -> the newest version that a member held complete on entering; empty ones left out."""
        found: dict[tuple[int, int], dict[int, int]] = {}
        for (generation, step), held in self._complete.items():
            members, buckets = self.members.get(generation, frozenset()), dict[int, int]()
            for (bucket, version), replicas in held.items():
                if not members.isdisjoint(replicas) and not self.withdrawn(step, version, generation):
                    buckets[bucket] = max(version, buckets.get(bucket, 0))
            if buckets:
                found[generation, step] = buckets
        return found

    def losses(self) -> dict[str, float]:
        """Label of each step -> its loss, in the order of the steps."""
        return {
            facts.loss_label or "": facts.loss for _, facts in sorted(self.steps.items()) if facts.loss is not None
        }  # fmt: skip


_STEPWISE = (
    trace.Status, trace.Plan, trace.MicrobatchStarted, trace.MicrobatchFinished, trace.BucketPassed, trace.Extended,
    trace.Reduced, trace.Transferred, trace.ReductionFailed, trace.StateDigested, trace.Voted, trace.Committed,
    trace.Applied, trace.Entered, trace.Recovery,
)  # fmt: skip
OF_AN_ATTEMPT = (
    trace.Status, trace.Plan, trace.MicrobatchStarted, trace.MicrobatchFinished, trace.BucketPassed, trace.Extended,
    trace.Reduced, trace.Transferred,
)  # fmt: skip
"""What members do of a step in a generation."""
KEPT = tuple(kind for kind in get_args(trace.AnyEvent) if kind not in _STEPWISE)
"""Types of events that concern the whole run: all of them are kept. The others come with every step or member."""
