"""Collect the facts of a run from its trace, for the checker, the summary and the report.

A trace can be larger than memory. `History` reads it once and keeps what concerns the whole run
(its *facts*: membership, losses, faults, and a few numbers of each step). Whoever needs more reads
`events` again, as `replay` does step by step. Nothing is decided here: there is no rule and no
tolerance. Facts that a verdict cites keep the line of their event.

Memory holds:

- about 900 bytes for each step;
- the events of the types in `KEPT`, such as joins, announcements, faults and checkpoints;
- for each generation the results that its members held;
- for each change of the quotas in a generation, the roster and the quotas;
- one digest for each rank.

No step's facts grow with microbatches, ranks or buckets while nothing fails.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

import msgspec

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.label import label_of
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.faults import FaultKind
from megatron_recover.observe import nodes
from megatron_recover.observe.facts import Line, QuotaRun, Record, RecoveryFacts, StepFacts
from megatron_recover.trace import event_files
from megatron_recover.trace.merging import MARGIN_S, MergedTrace

Numbered = tuple[Line, trace.AnyEvent]


class _File:
    """The events of a trace file, read again by each iteration.

    An iteration ends at the line at which the first pass ended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last_line: Line | None = None

    def __iter__(self) -> Iterator[Numbered]:
        for numbered in trace.read(self._path):
            if self.last_line is not None and numbered[0] > self.last_line:
                return
            yield numbered

    def first_pass(self, on_cut: Callable[[int, str], None]) -> Iterator[Numbered]:
        """Yield all events up to the present end of the file; call `on_cut` for each cut line."""
        line = 0
        for numbered in trace.read(self._path, on_cut):
            line = numbered[0]
            yield numbered
        self.last_line = line


class History:
    """The facts of a run, and its events. Treat a history as frozen."""

    def __init__(
        self, events: Iterable[Numbered], cuts: Iterable[tuple[Line, str]] = (), path: str = "",
        *, file: _File | MergedTrace | None = None, names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Collect the facts of events that are in memory. `read` does so for the files of a run.

        `names` has the names of nodes, by number.
        """
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
        """Time of the last event in the trace."""
        self.steps: dict[int, StepFacts] = {}
        self.quota_runs: list[QuotaRun] = []
        self.recoveries: dict[int, RecoveryFacts] = {}
        """Recovery facts by generation."""
        self.num_spans = 0
        """Number of forwards, backwards and sums in the trace, which a timeline draws."""
        self.last_planned: dict[int, int] = {}
        """Replica -> the last step that the replica planned."""
        self.last_committed: dict[int, int] = {}
        """Replica -> the last step that the replica committed."""
        self.last_step: int | None = None
        """Last step that any replica committed."""
        self.final_commits: dict[int, Line] = {}
        """Replica -> line of its first commit of `last_step`."""
        self.planned_at_failure: dict[Line, int] = {}
        """Line of a failure -> the step of the latest plan of the failed replica."""
        self._last_digests: tuple[int, str | None, dict[int, dict[int, str]]] = (-1, None, {})
        """Newest step with parameter digests, its label, and replica -> rank -> digest after that
        step."""
        self._by_type: dict[type, list[Numbered]] = defaultdict(list)
        self._complete: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
        """(generation, step) -> (bucket, version) -> replicas that report in their status that they
        hold it complete."""
        self._first_plan: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Generation -> the first step that was planned in it, and the roster of the first plan."""
        self._quotas_of: dict[int, QuotaRun] = {}
        self._newest_plan: dict[int, int] = {}
        first_pass = self.events if file is None else file.first_pass(lambda line, fragment: self.cuts.append((line, fragment)))
        self._collect(first_pass)
        self.is_merged = isinstance(file, MergedTrace)
        """True if the events are those of several nodes."""
        self.node_troubles: list[str] = []
        """A sentence on each node whose trace is absent, cut short or damaged."""
        if isinstance(file, MergedTrace):
            file.leave_out({event.node for _, event in self.of(trace.NodeLost) if not event.replicas})
            self._bound_gaps(file)
            self.node_troubles += [
                f"the trace of node {node}{f' ({names[node]})' if node in names else ''} {trouble}"
                for node, trouble in file.troubles.items()
            ]

    @classmethod
    def read(cls, run_dir: str | Path) -> History:
        """Read the trace of a run directory, or a trace file.

        Raise FileNotFoundError if there is none. Raise `trace.TraceError` for a line that is no
        event, or a file that cannot be read.
        """
        path = Path(run_dir)
        with event_files.reading(path):
            path = path / trace.EVENTS_FILE if path.is_dir() else path
        merged = nodes.merged(path.parent) if path.name == trace.EVENTS_FILE else None
        return cls((), path=str(path), file=merged or _File(path), names=nodes.listed(path.parent) if merged else {})

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
        first = self._first_plan.get(event.generation)
        if first is None or event.step < first[0]:
            self._first_plan[event.generation] = event.step, first[1] if first else event.roster
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
            facts.record = Record(line, event.t, label or event.label, event.generation)
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

    @property
    def is_unordered(self) -> bool:
        """Return whether the order of events of different nodes is unknown: a clock was refused."""
        return self.is_merged and bool(self.of(trace.ClockRefused))

    def _bound_gaps(self, merged: MergedTrace) -> None:
        """Have the gaps of nodes whose traces are not whole end where their replicas were lost.

        Other such gaps end with the trace.
        """
        started = self.first(trace.RunStarted)
        ranks = range(started.layout.num_ranks if started else 0)
        all_places = ((replica, rank) for replica in self.replicas for rank in ranks)
        gaps = self._by_type[trace.Gap]
        gaps[:] = [(line, gap) for line, gap in gaps if not merged.is_left_out(cast(trace.Gap, gap))]
        gaps += [(0, gap) for gap in merged.lay_on_unread(all_places)]
        for index, (line, gap) in enumerate(gaps):
            assert isinstance(gap, trace.Gap)
            if not gap.num_events:
                lost = self.lost_at.get(gap.replica)
                until = (lost[1].t if lost else max(self.seconds, gap.t)) + MARGIN_S
                gaps[index] = line, msgspec.structs.replace(gap, t=until)

    # --- The facts --------------------------------------------------------------------------------

    def of[E](self, kind: type[E]) -> list[tuple[Line, E]]:
        """Return all events of one type.

        Types that are not in `KEPT` are read again into memory: do not ask for them in a large
        trace.
        """
        if kind in KEPT:
            return self._by_type[kind]  # type: ignore[return-value]
        return [(line, event) for line, event in self.events if isinstance(event, kind)]

    def first[E](self, kind: type[E]) -> E | None:
        """Return the first event of a type, or None."""
        found = self.of(kind)
        return found[0][1] if found else None

    @cached_property
    def generations(self) -> dict[int, trace.Generation]:
        """Return the first announcement of each generation."""
        found: dict[int, trace.Generation] = {}
        for _, event in self.of(trace.Generation):
            found.setdefault(event.generation, event)
        return found

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Return all replicas of the run, ascending: those of its start, and all newcomers."""
        started = self.first(trace.RunStarted)
        found = {*range(started.replicas if started else 0)}
        found |= {event.newcomer for _, event in self.of(trace.Forming)}
        found |= {event.replica for _, event in self.of(trace.Joined)}
        return tuple(sorted(found.union(*(event.roster for event in self.generations.values()))))

    def announced(self, generation: int) -> tuple[int, ...]:
        """Return the announced roster of a generation; empty if it was never announced."""
        event = self.generations.get(generation)
        return event.roster if event else ()

    def newcomers(self, generation: int) -> frozenset[int]:
        """Return the unproven newcomers in an announced roster that has older members, too."""
        event = self.generations.get(generation)
        if event is None or not event.newcomers:
            return frozenset()
        found = frozenset(event.newcomers)
        return found if not found.issuperset(event.roster) else frozenset()

    @cached_property
    def turned_away(self) -> dict[int, frozenset[int]]:
        """Return the newcomers of each generation that its common plan has not admitted."""
        found: dict[int, frozenset[int]] = {}
        for _, event in self.of(trace.TurnedAway):
            found[event.generation] = found.get(event.generation, frozenset()) | {*event.newcomers}
        return found

    def roster(self, generation: int) -> tuple[int, ...]:
        """Return the working roster of a generation; empty if it was never announced.

        That is the announced one without the newcomers that were turned away. A coordinator that
        makes the next generation at once does not record them; then the first plan shows them.
        """
        return self._working.get(generation, ())

    @cached_property
    def _working(self) -> dict[int, tuple[int, ...]]:
        found = {number: event.roster for number, event in self.generations.items()}
        for number, announced in found.items():
            if newcomers := self.newcomers(number):
                _, planned = self._first_plan.get(number, (0, announced))
                is_told = number in self.turned_away or not newcomers.issuperset({*announced} - {*planned})
                out = self.turned_away.get(number, frozenset()) if is_told else newcomers.difference(planned)
                found[number] = tuple(replica for replica in announced if replica not in out)
        return found

    def first_step(self, generation: int) -> int | None:
        """Return the first step that was planned in a generation, or None.

        The newcomers of the generation are unproven until it is committed.
        """
        found = self._first_plan.get(generation)
        return found[0] if found else None

    @cached_property
    def members(self) -> dict[int, frozenset[int]]:
        """Return the members of each generation, by its working roster."""
        return {number: frozenset(roster) for number, roster in self._working.items()}

    @cached_property
    def bucket_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return for each bucket the ranks that hold it."""
        joined = self.first(trace.Joined)
        return joined.bucket_ranks if joined else ()

    def ranks_of(self, bucket: int) -> tuple[int, ...]:
        """Return the ranks that hold a bucket; empty for a bucket that no replica has announced."""
        return self.bucket_ranks[bucket] if 0 <= bucket < len(self.bucket_ranks) else ()

    @cached_property
    def records(self) -> dict[int, Record]:
        """Return the record of each committed step, in the order of the steps."""
        return {number: facts.record for number, facts in sorted(self.steps.items()) if facts.record is not None}

    def label(self, step: int | None) -> str | None:
        """Return the label of a step (`StepFacts.label`), or None."""
        facts = self.steps.get(step) if step is not None else None
        return facts.label if facts else None

    def num_microbatches(self, step: int) -> int | None:
        """Return M of a step, or None."""
        facts = self.steps.get(step)
        return facts.num_microbatches if facts else None

    @cached_property
    def voids(self) -> dict[int, int]:
        """Return for each void step the generation from which on its attempts count.

        A step is made void if a sum did not count every microbatch once. It is then computed anew,
        or given up if it was void before.
        """
        return dict(event.void for _, event in self.of(trace.Generation) if event.void is not None)

    def is_void(self, event: trace.AnyEvent) -> bool:
        """Return whether an event is part of a void attempt at a step; only `OF_AN_ATTEMPT` can be.

        Readers treat such an event as absent.
        """
        if not self.voids or not isinstance(event, OF_AN_ATTEMPT):
            return False
        return event.generation < self.voids.get(event.step, 0)

    @cached_property
    def lost_at(self) -> dict[int, tuple[Line, trace.Generation]]:
        """Return line and announcement of the loss of each lost replica."""
        found: dict[int, tuple[Line, trace.Generation]] = {}
        for line, event in self.of(trace.Generation):
            for lost in event.losses:
                found.setdefault(lost.replica, (line, event))
        return found

    @cached_property
    def gone_at(self) -> dict[int, tuple[Line, trace.Generation]]:
        """Return the same as `lost_at`, also for the replicas that have left as requested."""
        left = {replica: (line, event) for line, event in self.of(trace.Generation) for replica in event.left}
        return left | self.lost_at

    @cached_property
    def strikes(self) -> list[trace.Fault]:
        """Return the injected faults that end, stop or interrupt a rank: all but slowness."""
        return [event for _, event in self.of(trace.Fault) if event.kind != FaultKind.SLOW.value]

    @cached_property
    def outvoted(self) -> dict[int, tuple[int, int]]:
        """Return the replicas that a majority disagreed with.

        Each maps to the first generation without it, and its last committed step or -1.

        A run may end because no majority exists. Then the replicas that disagreed on its last step
        are added, with the generation `sys.maxsize`.
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
        """Return the newest parameter digests: the label of their step, and rank -> digest.

        Digests for which a replica was outvoted are left out: the run did not end with those
        parameters.
        """
        step, label, digests = self._last_digests
        outvoted = {replica for replica, (_, last) in self.outvoted.items() if step >= last}
        found: dict[int, str] = {}
        for replica, of_ranks in digests.items():
            if replica not in outvoted:
                found.update(of_ranks)
        return label, found

    def withdrawn(self, step: int, version: int, generation: int) -> bool:
        """Return whether a version no longer counts in `generation`.

        That is so if a member of the version's generation was outvoted before it committed the
        step.
        """
        if not self.outvoted:
            return False
        members = self.roster(version)
        return any(
            replica in members and since <= generation and step > last for replica, (since, last) in self.outvoted.items()
        )

    def outvoted_for(self, event: trace.Applied | trace.Reduced | trace.Transferred) -> bool:
        """Return whether an event shows what its writer was outvoted for.

        That is a result of the step in which the replica was outvoted, or its parameters before
        that step.
        """
        if event.replica not in self.outvoted:
            return False
        _, last = self.outvoted[event.replica]
        return event.step >= last if isinstance(event, trace.Applied) else event.step > last

    @cached_property
    def decided(self) -> dict[tuple[int, int], dict[int, int]]:
        """Return the decided buckets: (generation, step) -> bucket -> version.

        The version is the newest one that a member held complete on entering the generation, and
        that is not `withdrawn`. Pairs without a decided bucket are left out.
        """
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
        """Return the mean loss of each step that recorded one, by label, in the order of steps."""
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
"""Types of events of an attempt at a step: a member's work on the step in one generation."""
KEPT = tuple(kind for kind in get_args(trace.AnyEvent) if kind not in _STEPWISE)
"""Types of events that concern the whole run. All of them are kept; the other types come with every
step or member."""
