"""INV-7: only microbatches that no survivor holds are computed again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_recover import trace
from megatron_recover.observe.history import Finding, Findings, History, Line, who
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step
from megatron_recover.observe.verify.rule import Rule, of_step
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


RULES: tuple[type[Rule], ...] = (
    of_step(least_work, "microbatches"),
    HeldIsNotComputedAgain,
)
"""Rules of the invariant, in the order in which their findings are reported."""
