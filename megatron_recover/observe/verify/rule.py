"""What a rule of the checker is: something that watches a trace pass by (`replay`) and tells what breaks an invariant.

A rule sees events in the order of their lines, each with its step as that was before the event; then each step when it is
whole; then the end. It holds what it needs from one step to the next itself, and that is little. What it says of one step is
dropped where a gap in the trace touches that step (`gaps`): a rule need not ask, but where it looks from one step to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from megatron_recover import trace
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import Finding, History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step

LEVELS: tuple[str, ...] = tuple(reversed(trace.LEVELS))
"""How much a trace shows, from least to most."""


class Rule:
    """A rule during one reading of a trace."""

    needs: str = "steps"
    """The least level of a trace that it can judge."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        self.history, self.gaps = history, gaps

    def takes(self) -> Mapping[type, Taker]:
        """What takes in which type of event; returns findings."""
        return {}

    def closed(self, step: Step) -> Iterable[Finding]:
        """What is wrong with a whole step."""
        return ()

    def ended(self) -> Iterable[Finding]:
        """What is wrong with the whole run."""
        return ()


def of_step(judge: Callable[[History, Step], Iterable[Finding]], needs: str = "steps") -> type[Rule]:
    """Make a rule of a function that judges whole steps one by one."""

    class OfStep(Rule):
        def closed(self, step: Step) -> Iterable[Finding]:
            return judge(self.history, step)

    OfStep.needs, OfStep.__name__, OfStep.__doc__ = needs, judge.__name__, judge.__doc__
    return OfStep


def of_run(judge: Callable[[History, Gaps], Iterable[Finding]], needs: str = "faults") -> type[Rule]:
    """Make a rule of a function that judges the facts of the run."""

    class OfRun(Rule):
        def ended(self) -> Iterable[Finding]:
            return judge(self.history, self.gaps)

    OfRun.needs, OfRun.__name__, OfRun.__doc__ = needs, judge.__name__, judge.__doc__
    return OfRun


def provides(history: History) -> str:
    """How much a trace shows."""
    started = history.first(trace.RunStarted)
    return started.level if started else LEVELS[-1]
