"""INV-3: nothing but backward changes a local gradient until its step is committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from megatron_recover import trace
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step
from megatron_recover.observe.verify.common import who
from megatron_recover.observe.verify.rule import Finding, Findings, Rule, of_step


def applied_when_committed(history: History, step: Step) -> Findings:
    """Require that no rank applies a step before its leader has committed it."""
    for line, event in step.applied:
        commit = step.commits.get(event.replica)
        if commit and commit[0] > line:
            yield line, f"{who(event)} applied step {event.step} before its leader committed it (line {commit[0]})"


class SummedWhenPassed(Rule):
    """A rule: a bucket is summed only after the backwards that it counts have passed it.

    With `--overlap-grad-reduce` the sum may begin before the last backward has ended, but not
    before it has passed the bucket.
    """

    needs = "microbatches"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._told: dict[int, set[Line]] = defaultdict(set)
        """Step -> lines of the sums that were reported."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.MicrobatchFinished: self._finished, trace.BucketPassed: self._passed}

    def closed(self, step: Step) -> Iterable[Finding]:
        self._told.pop(step.number, None)
        return ()

    def _finished(self, line: Line, event: trace.MicrobatchFinished, step: Step) -> Iterable[Finding]:
        work = step.ranks.get((event.replica, event.rank))
        return self._late(line, event, event.into, step) if work is not None and work.has_summed else ()

    def _passed(self, line: Line, event: trace.BucketPassed, step: Step) -> Iterable[Finding]:
        work = step.ranks.get((event.replica, event.rank))
        return self._late(line, event, (event.bucket,), step) if work is not None and work.has_summed else ()

    def _late(
        self, line: Line, event: trace.MicrobatchFinished | trace.BucketPassed, into: tuple[int, ...], step: Step
    ) -> Findings:
        work, put = step.rank(event.replica, event.rank), (event.generation, event.microbatch)
        for bucket in into:
            sums = [
                at for version in step.versions.get(bucket, ()) if event.generation <= version
                for at in _sums(step, bucket, version, event.replica, event.rank)
            ]  # fmt: skip
            if not sums or put in work.passed.get(bucket, ()):
                continue
            if any(key[0] == put[0] and bucket in key[2] and put[1] in ids for key, ids in work.groups.items()):
                continue
            for at in sums:
                if at not in self._told[step.number]:
                    self._told[step.number].add(at)
                    what = f"{who(event)} summed bucket {bucket} of step {step.number}"
                    yield at, f"{what} before microbatch {event.microbatch} was in it (line {line})"


def _sums(step: Step, bucket: int, version: int, replica: int, rank: int) -> Iterator[Line]:
    """Yield the lines of the sums that a rank made of a version."""
    held = step.results[bucket, version]
    if replica in held.plain and rank in held.plain[replica]:
        yield held.plain[replica][rank]
    for line, event in held.odd:
        if isinstance(event, trace.Reduced) and (event.replica, event.rank) == (replica, rank):
            yield line


class ExactSums(Rule):
    """A rule: in `exact` runs all versions of a gradient bucket are the same sum.

    Otherwise a gradient was changed, since the sum does not depend on who computed what. Versions
    that were withdrawn are left out.
    """

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        started = history.first(trace.RunStarted)
        self._is_exact = started is not None and started.determinism == "exact"
        self._ledger = len(history.bucket_ranks) - 1  # it holds measured seconds, which differ in every computation
        self._newest = max(history.generations, default=0)
        self._first: dict[int, dict[tuple[int, int], tuple[int, int]]] = defaultdict(dict)
        """Step -> (bucket, rank) -> version and checksum of the first sum."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Reduced: self._sums} if self._is_exact else {}

    def closed(self, step: Step) -> Iterable[Finding]:
        self._first.pop(step.number, None)
        return ()

    def _sums(self, line: Line, event: trace.Reduced, step: Step) -> Iterable[Finding]:
        if self.history.withdrawn(event.step, event.version, self._newest):
            return ()
        mine = event.version, event.checksum
        version, checksum = self._first[event.step].setdefault((event.bucket, event.rank), mine)
        if event.bucket == self._ledger or event.version == version or event.checksum == checksum:
            return ()
        what = f"step {event.step}, bucket {event.bucket}, rank {event.rank}: versions {version} and {event.version}"
        return ((line, f"{what} differ ({checksum} and {event.checksum}), though sums are exact"),)


RULES: tuple[type[Rule], ...] = (
    SummedWhenPassed,
    of_step(applied_when_committed),
    ExactSums,
)
"""Rules of the invariant, in the order in which their findings are reported."""
