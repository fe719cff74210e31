"""Define the rules of the checker, each of which finds what breaks an invariant.

A rule observes a replay of a trace (`replay`). The rule gets the events in the order of their
lines, each with its step as it was before the event. It gets each step when the step is whole, and
then the end. A rule itself holds the little that it needs from one step to the next.

What a rule finds at a step that a gap in the trace touches is dropped (`gaps`). A rule must look
for gaps itself only if it compares several steps, judges events without a step, or judges the end
of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from megatron_recover import trace
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step

Finding = tuple[Line, str]
"""Line of the event that shows a violation, and its description."""
Findings = Iterator[Finding]
LEVELS: tuple[str, ...] = tuple(reversed(trace.LEVELS))
"""Levels of detail of a trace, from least to most."""


class Rule:
    """A rule during one reading of a trace. The subclass names what it requires."""

    needs: str = "steps"
    """Least level of a trace that the rule can judge."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        self.history, self.gaps = history, gaps

    def takes(self) -> Mapping[type, Taker]:
        """Return the function that takes each type of event; the function returns findings."""
        return {}

    def takes_void(self) -> Mapping[type, Taker]:
        """Return the function that takes each type of event of attempts that were made void."""
        return {}

    def closed(self, step: Step) -> Iterable[Finding]:
        """Return what is wrong with a whole step."""
        return ()

    def ended(self) -> Iterable[Finding]:
        """Return what is wrong with the whole run."""
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
    """Return the level of a trace; without `run_started` the most detailed level."""
    started = history.first(trace.RunStarted)
    return started.level if started else LEVELS[-1]
