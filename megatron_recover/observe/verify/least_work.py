"""INV-7: only microbatches that no survivor holds are computed again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_recover import trace
from megatron_recover.core.request import RequestKind, details
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step
from megatron_recover.observe.verify.common import who
from megatron_recover.observe.verify.rule import Finding, Findings, Rule, of_step
from megatron_recover.observe.work import redone_in, wasted_in


def least_work(history: History, step: Step) -> Findings:
    """Require that no survivor's work is computed again or thrown away."""
    for again in redone_in(step):
        for holder in set(again.dealt_before_to) & set(history.roster(again.generation)):
            what = f"replica {again.replica} computed microbatch {again.microbatch} of step {again.step} again"
            yield again.line, f"{what} in generation {again.generation}, though replica {holder} holds it"
    for line, replica, number, microbatch in wasted_in(history, step):
        yield line, f"replica {replica} computed microbatch {microbatch} of step {number}, which entered no committed bucket"


class HeldIsNotComputedAgain(Rule):
    """A rule: no rank computes a microbatch into a bucket in which the rank already has it."""

    needs = "microbatches"

    def takes(self) -> Mapping[type, Taker]:
        return {trace.MicrobatchFinished: self._computes}

    def _computes(self, line: Line, event: trace.MicrobatchFinished, step: Step) -> Iterable[Finding]:
        work = step.ranks.get((event.replica, event.rank))
        if work is None:
            return ()
        for (_, _, into), ids in work.groups.items():
            if event.microbatch in ids and not set(into).isdisjoint(event.into):
                what = f"{who(event)} computed microbatch {event.microbatch} of step {event.step} again"
                return ((line, f"{what}, though it holds it"),)
        return ()


class LeaversHoldNothing(Rule):
    """A rule: no microbatch is lost or computed again because a replica leaves.

    A replica leaves after a record that requests it. It computes nothing in the steps after that
    record, unless too few others stay. When it leaves, nobody has yet to commit a step in which it
    was dealt a microbatch.
    """

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        started = history.first(trace.RunStarted)
        self._least = max(1, started.min_replicas if started is not None else 1)
        self._asked: dict[int, int] = {}
        """Replica -> first step whose record asks it to leave."""
        self._dealt: dict[int, int] = {}
        """Replica -> newest step in which it was dealt a microbatch."""
        self._committed = -1
        self._newcomers: dict[int, frozenset[int]] = {}
        """Generation -> its newcomers, which do not count as who stays."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Committed: self._commits, trace.Plan: self._plans, trace.Generation: self._announced}

    def _commits(self, line: Line, event: trace.Committed, step: Step) -> Iterable[Finding]:
        self._committed = max(self._committed, event.step)
        for number in details(event.requests, RequestKind.LEAVE):
            self._asked.setdefault(int(number), event.step)
        return ()

    def _plans(self, line: Line, event: trace.Plan, step: Step) -> Findings:
        if not any(each.microbatches for each in event.computes):
            return
        self._dealt[event.replica] = event.step
        leaving = {replica for replica, since in self._asked.items() if since < event.step}
        stay = {*event.roster} - leaving - self._newcomers.get(event.generation, frozenset())
        if event.replica in leaving and len(stay) >= self._least:
            asked = f"the record of step {self._asked[event.replica]} asked it to leave"
            yield line, f"replica {event.replica} computes in step {event.step}, though {asked}"

    def _announced(self, line: Line, event: trace.Generation, step: None) -> Findings:
        if event.newcomers:
            self._newcomers[event.generation] = frozenset(event.newcomers)
        for replica in event.left if not self.gaps.touched else ():
            who = f"replica {replica} leaves in generation {event.generation}"
            if replica not in self._asked:
                yield line, f"{who}, and no record asks for it"
            if self._dealt.get(replica, -1) > self._committed:
                yield line, f"{who}, and was dealt microbatches of step {self._dealt[replica]}, which nobody has committed"


RULES: tuple[type[Rule], ...] = (
    of_step(least_work, "microbatches"),
    HeldIsNotComputedAgain,
    LeaversHoldNothing,
)
"""Rules of the invariant, in the order in which their findings are reported."""
