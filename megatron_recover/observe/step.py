"""Keep what the readers of a trace need of one step, in a small form.

- Of each microbatch: a bit for each rank, chunk and generation, and a few numbers for the whole
  job.
  Events that grow with microbatches x ranks are not kept.
- Of each result (ranks x buckets): a line.
- Plans, statuses and votes, a few for each replica: the events, with equal parts stored once.

A step takes about ``M/8`` bytes a rank, 150 bytes a rank and bucket, 400 bytes a rank, and 200
bytes a microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import msgspec

from megatron_recover import trace
from megatron_recover.observe.facts import Line
from megatron_recover.observe.history import History

MAX_BITS = 1 << 17
"""Microbatch ids from this one on, and negative ones, are counted without a bit mask, which would
be long. No real job has such an id."""

Result = trace.Reduced | trace.Transferred
Backward = tuple[int, int, int, int, int]
"""Replica, rank, generation, microbatch and chunk of a backward."""


class Ids:
    """Multiset of microbatches: a bit for the first occurrence, a number for further ones.

    An id below 0 or from `MAX_BITS` on has no bit: its number counts all occurrences.
    """

    __slots__ = ("bits", "more")

    def __init__(self, microbatches: Iterable[int] = ()) -> None:
        self.bits = 0
        self.more: dict[int, int] = {}
        for microbatch in microbatches:
            self.add(microbatch)

    def add(self, microbatch: int) -> None:
        """Count a microbatch once more."""
        if 0 <= microbatch < MAX_BITS:
            bit = 1 << microbatch
            if not self.bits & bit:
                self.bits |= bit
                return
        self.more[microbatch] = self.more.get(microbatch, 0) + 1

    def __contains__(self, microbatch: int) -> bool:
        return (0 <= microbatch < MAX_BITS and bool(self.bits >> microbatch & 1)) or microbatch in self.more

    def once(self) -> list[int]:
        """Return every microbatch that has its bit set."""
        found, bits = [], self.bits
        while bits:
            low = bits & -bits
            found.append(low.bit_length() - 1)
            bits ^= low
        return found

    def each(self) -> list[int]:
        """Return every microbatch of the multiset once, in their order."""
        return sorted({*self.once(), *self.more})


def not_once(counts: Mapping[int, int], num_microbatches: int) -> dict[int, int]:
    """Return the count of each microbatch that is not counted as it should be.

    Each of 0..M-1 should be counted once, any other id not at all.
    """
    ids = sorted({*range(num_microbatches), *counts})
    return {i: counts.get(i, 0) for i in ids if counts.get(i, 0) != (0 <= i < num_microbatches)}


def not_each_once(parts: Iterable[Ids], num_microbatches: int) -> dict[int, int]:
    """Return the same as `not_once` for the sum of several multisets."""
    union, found, is_doubled = 0, list(parts), False
    for ids in found:
        is_doubled = is_doubled or bool(ids.more) or bool(union & ids.bits)
        union |= ids.bits
    if not is_doubled and union == (1 << num_microbatches) - 1:
        return {}
    counts: dict[int, int] = defaultdict(int)
    for ids in found:
        for microbatch in ids.once():
            counts[microbatch] += 1
        for microbatch, more in ids.more.items():
            counts[microbatch] += more
    return not_once(counts, num_microbatches)


class Held:
    """The ranks that hold one version of a bucket, with lines and checksums."""

    __slots__ = ("usual", "plain", "odd", "_odd_since")

    def __init__(self) -> None:
        self.usual: dict[int, trace.Reduced] = {}
        """Rank position -> the first sum there that counts (`History.outvoted_for`)."""
        self.plain: dict[int, dict[int, Line]] = defaultdict(dict)
        """Replica -> rank -> line of the rank's sum, if its checksum is the usual one."""
        self.odd: list[tuple[Line, Result]] = []
        """All other results: transfers, and sums that do not count, differ or are repeated."""
        self._odd_since: dict[tuple[int, int], Line] = {}

    def add_odd(self, line: Line, event: Result) -> None:
        """Add a result to `odd`."""
        self.odd.append((line, event))
        self._odd_since.setdefault((event.replica, event.rank), line)

    def since(self, replica: int, rank: int) -> Line | None:
        """Return the line from which on a rank holds the version; None if it never does."""
        line = self.plain[replica].get(rank) if replica in self.plain else None
        odd = self._odd_since.get((replica, rank)) if self._odd_since else None
        return odd if line is None or (odd is not None and odd < line) else line


Group = tuple[int, int, tuple[int, ...]]
"""Generation, chunk, and the buckets that took the gradient."""


class RankWork:
    """The computation of one rank for a step."""

    __slots__ = ("groups", "passed", "has_summed")

    def __init__(self) -> None:
        self.groups: dict[Group, Ids] = {}
        self.passed: dict[int, set[tuple[int, int]]] = {}
        """Bucket -> (generation, microbatch) of backwards that passed the bucket before they ended
        (`trace.BucketPassed`)."""
        self.has_summed = False
        """True if the rank has completed a sum of the step."""


class Cut:
    """A last backward that has passed buckets.

    When the step is whole, it is known whether the backward ended.
    """

    __slots__ = ("line", "into")

    def __init__(self, line: Line) -> None:
        self.line, self.into = line, list[int]()


class Step:
    """The events of one step, as far as the trace has been read."""

    def __init__(self, history: History, number: int) -> None:
        self.history, self.number = history, number
        self.plans: list[tuple[Line, trace.Plan]] = []
        self.statuses: list[tuple[Line, trace.Status]] = []
        self.votes: list[tuple[Line, trace.Voted]] = []
        self.committed: list[tuple[Line, trace.Committed]] = []
        self.commits: dict[int, tuple[Line, trace.Committed]] = {}
        """Replica -> its first commit of the step."""
        self.digests: dict[int, dict[int, tuple[Line, str]]] = defaultdict(dict)
        """Replica -> rank -> the first state digest of the step that the rank recorded."""
        self.applied: list[tuple[Line, trace.Applied]] = []
        self.extended: list[tuple[Line, trace.Extended]] = []
        self.results: dict[tuple[int, int], Held] = {}
        """Holders of each (bucket, version)."""
        self.versions: dict[int, list[int]] = defaultdict(list)
        """Bucket -> versions that a rank has summed."""
        self.miscounted: list[tuple[Line, trace.Reduced]] = []
        """Sums whose provenance is not all ones."""
        self.ranks: dict[tuple[int, int], RankWork] = {}
        self.cuts: dict[Backward, Cut] = {}
        self.lines: dict[tuple[int, int], dict[int, Line]] = defaultdict(dict)
        """(replica, generation) -> microbatch -> line of its last backward, on any rank."""
        self.first_stage_lines: dict[tuple[int, int], dict[int, Line]] = defaultdict(dict)
        """(replica, generation) -> microbatch -> line of its backward on the first chunk of rank
        0."""
        self.begun: dict[int, list[int]] = defaultdict(list)
        """Replica -> microbatches whose first forward has begun."""
        self.ended: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Replica -> (microbatch, chunk) whose backward has ended on rank 0."""
        self.at_announcement: dict[int, tuple[Line, dict[int, list[int]], dict[int, list[tuple[int, int]]]]] = {}
        """Generation whose recovery was in this step -> line of its announcement, and `begun` and
        `ended` at that line."""
        self.unfinished: list[tuple[Line, trace.Status, list[int]]] = []
        """Statuses, with the microbatches that each calls finished although no backward of them had
        ended on rank 0 by that line."""
        self._parts: dict[Hashable, Any] = {}

    def shared[T: Hashable](self, part: T) -> T:
        """Return the one stored copy of a part that many events of the step have."""
        found: T = self._parts.setdefault(part, part)
        return found

    @property
    def record(self) -> tuple[Line, trace.Committed] | None:
        """Return the first commit of the step in the trace, or None."""
        return self.committed[0] if self.committed else None

    def num_microbatches(self) -> int | None:
        """Return M, as the first plan of the step has it, or None without a plan."""
        return self.plans[0][1].num_microbatches if self.plans else None

    def rank(self, replica: int, rank: int) -> RankWork:
        """Return the computation of a rank for this step."""
        found = self.ranks.get((replica, rank))
        if found is None:
            found = self.ranks[replica, rank] = RankWork()
        return found

    # --- Events of the step -----------------------------------------------------------------------

    def take_plan(self, line: Line, event: trace.Plan) -> None:
        shared = self.shared
        computes = tuple(trace.Compute(microbatches=one.microbatches, into=shared(one.into)) for one in event.computes)
        self.plans.append((line, msgspec.structs.replace(
            event, roster=shared(event.roster), quotas=shared(event.quotas), reduces=shared(event.reduces),
            transfers=shared(event.transfers), decided=shared(event.decided), computes=computes,
        )))  # fmt: skip

    def take_status(self, line: Line, event: trace.Status) -> None:
        contributions = tuple(
            trace.Contribution(buckets=self.shared(one.buckets), microbatches=self.shared(one.microbatches))
            for one in event.contributions
        )
        event = msgspec.structs.replace(event, contributions=contributions, complete=self.shared(event.complete))
        self.statuses.append((line, event))
        if event.finished:
            work = self.ranks.get((event.replica, 0))
            done = list(work.groups.values()) if work else []
            missing = [microbatch for microbatch in event.finished if not any(microbatch in ids for ids in done)]
            if missing:
                self.unfinished.append((line, event, missing))

    def take_started(self, line: Line, event: trace.MicrobatchStarted) -> None:
        if event.rank == 0 and event.chunk == 0:
            self.begun[event.replica].append(event.microbatch)

    def take_finished(self, line: Line, event: trace.MicrobatchFinished) -> None:
        work, key = self.rank(event.replica, event.rank), (event.generation, event.chunk, event.into)
        ids = work.groups.get(key)
        if ids is None:
            ids = work.groups[event.generation, event.chunk, self.shared(event.into)] = Ids()
        ids.add(event.microbatch)
        place = (event.replica, event.generation)
        self.lines[place][event.microbatch] = line
        if event.rank == 0:
            self.ended[event.replica].append((event.microbatch, event.chunk))
            if event.chunk == 0:
                self.first_stage_lines[place][event.microbatch] = line

    def take_passed(self, line: Line, event: trace.BucketPassed) -> None:
        key = (event.replica, event.rank, event.generation, event.microbatch, event.chunk)
        cut = self.cuts.get(key)
        if cut is None:
            cut = self.cuts[key] = Cut(line)
        cut.into.append(event.bucket)
        passed = self.rank(event.replica, event.rank).passed
        passed.setdefault(event.bucket, set()).add((event.generation, event.microbatch))

    def take_result(self, line: Line, event: Result) -> None:
        key = (event.bucket, event.version)
        held = self.results.get(key)
        if held is None:
            held = self.results[key] = Held()
        if isinstance(event, trace.Transferred):
            held.add_odd(line, event)
            return
        if event.version not in self.versions[event.bucket]:
            self.versions[event.bucket].append(event.version)
        self.rank(event.replica, event.rank).has_summed = True
        if event.provenance != "ones":
            self.miscounted.append((line, event))
        if self.history.outvoted_for(event):
            held.add_odd(line, event)
            return
        usual, mine = held.usual.setdefault(event.rank, event), held.plain[event.replica]
        if event.checksum != usual.checksum or event.rank in mine:
            held.add_odd(line, event)
        else:
            mine[event.rank] = line

    def take_digested(self, line: Line, event: trace.StateDigested) -> None:
        self.digests[event.replica].setdefault(event.rank, (line, self.shared(event.digest)))

    def take_voted(self, line: Line, event: trace.Voted) -> None:
        self.votes.append((line, event))

    def take_committed(self, line: Line, event: trace.Committed) -> None:
        event = msgspec.structs.replace(event, versions=self.shared(event.versions), paces=self.shared(event.paces))
        self.committed.append((line, event))
        self.commits.setdefault(event.replica, (line, event))

    def take_applied(self, line: Line, event: trace.Applied) -> None:
        self.applied.append((line, event))

    def take_extended(self, line: Line, event: trace.Extended) -> None:
        self.extended.append((line, event))

    def announced(self, line: Line, generation: int) -> None:
        """Store which microbatches had begun and ended when a generation was announced."""
        begun = {replica: [*ids] for replica, ids in self.begun.items()}
        self.at_announcement.setdefault(generation, (line, begun, {replica: [*ids] for replica, ids in self.ended.items()}))

    def close(self) -> None:
        """Add backwards that passed buckets and never ended. Call this once the step is whole.

        Such a backward counts for the buckets that it has passed, as ended at the line at which it
        passed the first of them.
        """
        for (replica, rank, generation, microbatch, chunk), cut in self.cuts.items():
            work = self.rank(replica, rank)
            if any(key[:2] == (generation, chunk) and microbatch in ids for key, ids in work.groups.items()):
                continue
            for at, status, missing in self.unfinished:
                if (status.replica, rank) == (replica, 0) and cut.line < at:
                    missing[:] = [one for one in missing if one != microbatch]
            for before, _, ended in self.at_announcement.values():
                if rank == 0 and cut.line < before:
                    ended.setdefault(replica, []).append((microbatch, chunk))
            group = (generation, chunk, self.shared(tuple(cut.into)))
            work.groups.setdefault(group, Ids()).add(microbatch)
            self.lines[replica, generation][microbatch] = cut.line
            if rank == 0 and chunk == 0:
                self.first_stage_lines[replica, generation][microbatch] = cut.line


TAKE: Mapping[type, Callable[[Step, Line, Any], None]] = {
    trace.Plan: Step.take_plan,
    trace.Status: Step.take_status,
    trace.MicrobatchStarted: Step.take_started,
    trace.MicrobatchFinished: Step.take_finished,
    trace.BucketPassed: Step.take_passed,
    trace.Extended: Step.take_extended,
    trace.Reduced: Step.take_result,
    trace.Transferred: Step.take_result,
    trace.StateDigested: Step.take_digested,
    trace.Voted: Step.take_voted,
    trace.Committed: Step.take_committed,
    trace.Applied: Step.take_applied,
}
"""Method of `Step` that takes each type of event; other types are ignored."""
