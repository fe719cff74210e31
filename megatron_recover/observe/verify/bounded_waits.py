"""INV-8: every wait ends, as far as a trace shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.verify.common import survivors
from megatron_recover.observe.verify.rule import Finding, Findings, Rule, of_run

NEVER_ALONE = (
    ExitCode.TOO_FEW_REPLICAS, ExitCode.POISONED_MICROBATCH, ExitCode.DIVERGED, ExitCode.NO_REPLICA_LEFT,
)  # fmt: skip
"""Exit codes that the coordinator gives. It records `stopping` with them. Nodes without a
coordinator end with `NO_REPLICA_LEFT` by themselves."""


def _is_coordinator_lost(history: History) -> bool:
    """Return whether nodes may have ended without a coordinator.

    It has given up, a replica took it for lost, or a replica has heard nothing of it to the end.
    """
    silent = {event.replica: event.phase for _, event in history.of(trace.CoordinatorSilent)}
    return bool(history.of(trace.CoordinatorLeft) or history.of(trace.CoordinatorLost)) or "began" in silent.values()


def honest_end(history: History, gaps: Gaps) -> Findings:
    """Require that the exit code agrees with the trace.

    - A run that was stopping ends with the exit code of a `stopping`, unless it was killed.
    - A code of `NEVER_ALONE` comes with `stopping`, and `DIVERGED` with a `disagreed` event.
      Without a coordinator the nodes end alone, with `NO_REPLICA_LEFT`.
    - With code 0 no step after the last committed one was planned, and every survivor has committed
      the last step.
    - Steps and codes that gaps of the trace may explain are not judged.
    """
    found = history.of(trace.RunFinished)
    if not found:
        return
    line, ended = found[-1]
    stops = [event.exit_code for _, event in history.of(trace.Stopping)]
    killed_on_request = ended.exit_code > 128
    never_alone = {*NEVER_ALONE} - ({ExitCode.NO_REPLICA_LEFT} if _is_coordinator_lost(history) else set())
    if stops and ended.exit_code not in stops and not killed_on_request:
        yield line, f"the run ended with exit code {ended.exit_code}, but was stopping with {stops[-1]}"
    elif not stops and ended.exit_code in never_alone and not gaps.of_launcher:
        yield line, f"the run ended with exit code {ended.exit_code}, but no `stopping` was recorded"
    elif ended.exit_code == ExitCode.DIVERGED and not history.of(trace.Disagreed) and not gaps:
        yield line, "the run ended because replicas disagreed, but none of them recorded `disagreed`"
    if ended.exit_code != ExitCode.OK or history.last_step is None:
        return
    last = history.last_step
    begun = sorted(step for step, facts in history.steps.items() if step > last and facts.planned_at is not None)
    if begun := [step for step in begun if step not in gaps.touched]:
        yield line, f"the run ended with exit code 0, but steps {begun} were planned and never committed"
    if last in gaps.touched:
        return
    if behind := [replica for replica in survivors(history) if replica not in history.final_commits]:
        yield line, f"the run ended with exit code 0, but replicas {behind} live and never committed step {last}"


class EntersTheLast(Rule):
    """A rule: every member of the last generation enters it, unless the member had finished.

    A newcomer need not enter: nobody waits for it. A run is not judged that has not ended, that was
    killed on request, or for which `stopping` or `coordinator_left` was recorded. A member whose
    entry a gap of the trace may hide is not judged.
    """

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        announced = history.of(trace.Generation)
        self._newest = announced[-1] if announced else None
        self._entered: set[int] = set()

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Entered: self._enters}

    def _enters(self, line: Line, event: trace.Entered, step: None) -> Iterable[Finding]:
        if self._newest is not None and event.generation == self._newest[1].generation:
            self._entered.add(event.replica)
        return ()

    def ended(self) -> Findings:
        history = self.history
        has_failed = any(event.exit_code for _, event in history.of(trace.Stopping)) or history.of(trace.CoordinatorLeft)
        finished = history.first(trace.RunFinished)
        if self._newest is None or finished is None or finished.exit_code > 128 or has_failed:
            return
        line, newest = self._newest
        awaited = {*newest.roster} - history.newcomers(newest.generation)
        for replica in sorted(awaited):
            is_excused = replica in history.final_commits or self.gaps.explain(replica, newest.t, float("inf"))
            if replica not in self._entered and not is_excused:
                yield line, f"replica {replica} never entered generation {newest.generation}"


RULES: tuple[type[Rule], ...] = (
    of_run(honest_end),
    EntersTheLast,
)
"""Rules of the invariant, in the order in which their findings are reported."""
