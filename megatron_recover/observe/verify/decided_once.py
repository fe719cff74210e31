"""INV-4: a decided bucket is final.

While a member holds the bucket, it is neither computed again nor changed within its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_recover import trace
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step
from megatron_recover.observe.verify.common import who
from megatron_recover.observe.verify.rule import Finding, Findings, Rule, of_step


class DecidedOnce(Rule):
    """A rule: a bucket that a member holds complete is committed as it is.

    The bucket is neither computed into nor reduced again. The exception is a result in which a
    replica took part that was outvoted since: such a result is withdrawn and must be made again. A
    bucket that is not decided is committed in the version of the commit's generation.
    """

    def takes(self) -> Mapping[type, Taker]:
        return {
            trace.Plan: self._plans, trace.MicrobatchFinished: self._computes, trace.BucketPassed: self._makes_one,
            trace.Reduced: self._makes_one, trace.Committed: self._commits,
        }  # fmt: skip

    def _plans(self, line: Line, event: trace.Plan, step: Step) -> Iterable[Finding]:
        held = self.history.decided.get((event.generation, event.step))
        if not held:
            return ()
        return self._again(line, event, {*event.reduces, *(bucket for one in event.computes for bucket in one.into)}, held)

    def _computes(self, line: Line, event: trace.MicrobatchFinished, step: Step) -> Iterable[Finding]:
        held = self.history.decided.get((event.generation, event.step))
        return self._again(line, event, set(event.into), held) if held else ()

    def _makes_one(self, line: Line, event: trace.BucketPassed | trace.Reduced, step: Step) -> Iterable[Finding]:
        held = self.history.decided.get((event.generation, event.step))
        return self._again(line, event, {event.bucket}, held) if held else ()

    def _again(
        self,
        line: Line,
        event: trace.Plan | trace.MicrobatchFinished | trace.BucketPassed | trace.Reduced,
        made: set[int],
        held: Mapping[int, int],
    ) -> Findings:
        for bucket in sorted(made & held.keys()):
            what = f"{who(event)} makes bucket {bucket} of step {event.step} again in generation {event.generation}"
            yield line, f"{what}, though a member held version {held[bucket]} complete"

    def _commits(self, line: Line, event: trace.Committed, step: Step) -> Findings:
        decided = self.history.decided.get((event.generation, event.step), {})
        for result in () if event.adopted else event.versions:
            expected = decided.get(result.bucket, event.generation)
            if result.version != expected:
                what = f"replica {event.replica} committed version {result.version} of bucket {result.bucket}"
                yield line, f"{what} in step {event.step}; decided was {expected}"


def counted_as_told(history: History, step: Step) -> Findings:
    """Require that a member has reported complete what a plan counts as decided or transfers."""
    complete = {(one.generation, one.replica): set(one.complete) for _, one in step.statuses}
    for line, event in step.plans:
        counted = {(one.bucket, one.version, one.source) for one in event.decided}
        counted |= {(one.bucket, one.version, one.source) for one in event.transfers}
        for bucket, version, source in sorted(counted):
            if (bucket, version) not in complete.get((event.generation, source), ()):
                what = f"replica {event.replica} plans step {event.step} with bucket {bucket} version {version} complete on"
                yield line, f"{what} replica {source}, which has not reported so in generation {event.generation}"


class HeldAsPlanned(Rule):
    """A rule: only sums and transfers that the replica's plan of that generation asks for arrive.

    They are judged whether they are held or not; `Fencing` judges the versions of sums.
    """

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._planned: dict[int, dict[tuple[int, int], tuple[frozenset[int], tuple[trace.Transfer, ...]]]] = {}
        """Step -> (replica, generation) -> buckets to reduce, and transfers."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Plan: self._plan, trace.Reduced: self._result, trace.Transferred: self._result}

    def closed(self, step: Step) -> Iterable[Finding]:
        self._planned.pop(step.number, None)
        return ()

    def _plan(self, line: Line, event: trace.Plan, step: Step) -> Iterable[Finding]:
        found = self._planned.setdefault(event.step, {})
        found[event.replica, event.generation] = step.shared(frozenset(event.reduces)), step.shared(event.transfers)
        return ()

    def _result(self, line: Line, event: trace.Reduced | trace.Transferred, step: Step) -> Iterable[Finding]:
        reduces, transfers = self._planned.get(event.step, {}).get((event.replica, event.generation), (frozenset(), ()))
        if isinstance(event, trace.Reduced):
            if event.bucket in reduces:
                return ()
        elif _is_sent(event, transfers):
            return ()
        origin = f" from replica {event.source}" if isinstance(event, trace.Transferred) else ""
        what = f"{who(event)} holds bucket {event.bucket} version {event.version} of step {event.step}{origin}"
        return ((line, f"{what}, which no plan of generation {event.generation} asks for"),)


def _is_sent(event: trace.Transferred, transfers: Iterable[trace.Transfer]) -> bool:
    sent = (event.bucket, event.version, event.source)
    return any((one.bucket, one.version, one.source) == sent and event.replica in one.targets for one in transfers)


RULES: tuple[type[Rule], ...] = (
    of_step(counted_as_told),
    HeldAsPlanned,
    DecidedOnce,
)
"""Rules of the invariant, in the order in which their findings are reported."""
