"""Judge a run for `megatron-recover check`, from its trace and, with a reference, its parameters.

The rules are `rules.RULES`. Nothing in the run directory is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.label import label_of
from megatron_recover.core.wording import counted
from megatron_recover.observe.compare import Comparison, compare
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import LAUNCHER, Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker, replay
from megatron_recover.observe.step import Step
from megatron_recover.observe.summary import Accounts, Summary, summarize
from megatron_recover.observe.verify.exactly_once import miscounts
from megatron_recover.observe.verify.rule import LEVELS, Finding, Rule, provides
from megatron_recover.observe.verify.rules import RULES

SHOWN_VIOLATIONS = 20
"""Largest number of violations of one invariant that are printed; further ones are counted."""
KEPT_VIOLATIONS = 10_000
"""Largest number of violations of one invariant that are kept, so that a thoroughly broken trace
does not fill the memory."""


@dataclass(frozen=True)
class Violation:
    """A broken invariant, and the line of the event that shows it."""

    invariant: str
    line: Line
    message: str


@dataclass(frozen=True)
class Verdict:
    """The result of `check`: the run, its violations, and what could not be judged."""

    history: History
    reference: History | None
    """Run that the run is compared with, if any."""
    summary: Summary
    violations: tuple[Violation, ...]
    problems: tuple[str, ...]
    """Reasons, other than violations, why the run does not count as proven."""
    not_judged: tuple[str, ...] = ()
    """Parts that could not be judged, such as steps with a gap, rules that need more than was
    recorded, and comparisons with the reference."""
    uncounted: Mapping[str, int] = field(default_factory=dict)
    """Invariant -> number of violations that are not kept."""

    @property
    def is_finished(self) -> bool:
        """Return whether the run has ended, so that its trace is final."""
        return self.summary.exit_code is not None

    @property
    def is_whole(self) -> bool:
        """Return whether all of the run was judged."""
        return not self.not_judged

    @property
    def holds(self) -> bool:
        """Return whether there is neither a violation nor a problem."""
        return not self.violations and not self.problems


class _Judge:
    """A rule as a watcher of `replay`, with the invariant that the rule belongs to."""

    def __init__(self, invariant: str, rule: Rule) -> None:
        self.invariant, self.rule = invariant, rule

    def takes(self) -> Mapping[type, Taker]:
        return self.rule.takes()

    def takes_void(self) -> Mapping[type, Taker]:
        return self.rule.takes_void()

    def closed(self, step: Step) -> Iterable[Finding]:
        return self.rule.closed(step)


@dataclass
class _Found:
    """Collected violations of all invariants."""

    kept: dict[str, list[Finding]] = field(default_factory=lambda: defaultdict(list))
    uncounted: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, invariant: str, finding: Finding) -> None:
        """Keep a finding, or count it if `KEPT_VIOLATIONS` are kept already."""
        if len(self.kept[invariant]) < KEPT_VIOLATIONS:
            self.kept[invariant].append(finding)
        else:
            self.uncounted[invariant] += 1

    def violations(self) -> tuple[Violation, ...]:
        """Return the violations that are kept, by invariant and then by line."""
        return tuple(Violation(number, line, message) for number, _, _ in RULES for line, message in sorted(self.kept[number]))


def _judge(history: History, gaps: Gaps, accounts: Iterable[Accounts] = ()) -> _Found:
    """Replay a trace for `accounts` and for all rules that its level suffices for.

    Nothing is found where the order of the events is unknown (`History.is_unordered`).
    """
    level = LEVELS.index(provides(history))
    judges = [
        _Judge(number, rule(history, gaps)) for number, _, rules in RULES for rule in rules if LEVELS.index(rule.needs) <= level
    ] if not history.is_unordered else []  # fmt: skip
    found = _Found()
    watchers: list[_Judge | Accounts] = [*judges, *accounts]
    for watcher, step, finding in replay(history, watchers):
        assert isinstance(watcher, _Judge), "accounts find nothing"
        if step is None or step.number not in gaps.touched:
            found.add(watcher.invariant, finding)
    for judge in judges:
        for finding in judge.rule.ended():
            found.add(judge.invariant, finding)
    return found


def violations(history: History) -> tuple[Violation, ...]:
    """Return the violations, by invariant and then by line: at most `KEPT_VIOLATIONS` of each."""
    return _judge(history, Gaps(history)).violations()


def check(run_dir: Path, against: Path | None = None) -> Verdict:
    """Judge a run directory.

    Raise FileNotFoundError or `trace.TraceError` if there is no readable trace. Raise
    `packages.Lacking` if a comparison needs torch and it is not there, and OSError if a checkpoint
    to compare cannot be read.
    """
    history, reference = History.read(run_dir), History.read(against) if against else None
    gaps, accounts, comparison = Gaps(history), Accounts(history), None
    found = _judge(history, gaps, [accounts])
    unjudged = list(_not_judged(history, gaps))
    may_still_begin = not history.records and history.first(trace.RunFinished) is None
    problems = [] if history.records or unjudged or may_still_begin else ["no step was committed, so there is nothing to prove"]
    if history.first(trace.RunStarted) is None and history.num_events:
        problems.append("there is no run_started, so some rules have nothing to go by; check the whole trace")
    if reference is not None and may_still_begin:
        unjudged.append(f"no step was committed yet that could be compared with {against}")
    elif reference is not None:
        comparison = compare(history, reference, str(against))
        starts = [one.first(trace.RunStarted) for one in (history, reference)]
        problems += _differences(comparison, all(start and start.determinism == "exact" for start in starts))
        # Without the end of the run in the trace, what cannot be compared is no fault of the run.
        uncompared = unjudged if _hides_end(history, gaps) else problems
        if comparison.loss_max_abs_diff is None:
            uncompared.append(f"losses cannot be compared: the run has no step in common with {against}")
        if not _tells_parameters(comparison):
            uncompared.append(
                f"parameters cannot be compared with {against}: layouts or last steps differ, and so do the last checkpoints"
            )
    summary = summarize(history, comparison, accounts, gaps)
    return Verdict(history, reference, summary, found.violations(), tuple(problems), tuple(unjudged), dict(found.uncounted))


def _tells_parameters(comparison: Comparison) -> bool:
    return comparison.param_bit_identical is not None or comparison.param_max_rel_diff is not None


def _hides_end(history: History, gaps: Gaps) -> bool:
    """Return whether the trace may lack the last training step or events of its ranks."""
    trained = (number for number, record in history.records.items() if label_of(record.label).is_training)
    last = max(trained, default=-1)
    return history.first(trace.RunFinished) is None or gaps.hides_later or any(number >= last for number in gaps.touched)


def _not_judged(history: History, gaps: Gaps) -> Iterator[str]:
    if history.is_unordered:
        yield (
            "clocks of nodes differ by more than a minute (clock_refused), so that nothing shows the order of their events: no "
            "step is judged; set the clocks, for example by NTP"
        )
    yield from history.node_troubles
    if gaps:
        places = [f"{_place(replica, rank)} ({count})" for (replica, rank), count in gaps.by_rank().items()]
        shown = ", ".join(places[:SHOWN_VIOLATIONS])
        shown = shown or "nodes whose traces are not whole"
        shown += f" and {len(places) - SHOWN_VIOLATIONS} more" if len(places) > SHOWN_VIOLATIONS else ""
        ranges = [f"{first} to {last}" if last > first else str(first) for first, last in gaps.ranges()]
        ranges += [f"any after {max(history.steps, default=-1)}"] if gaps.hides_later else []
        touched = f"not judged are steps {', '.join(ranges)}" if ranges else "no step is touched"
        yield f"events are missing, of {shown}: {touched}"
    if gaps.of_launcher:
        yield "events of the launcher are missing: not judged is whether all that was lost was named and fenced"
    elif gaps.of_agents:
        yield "events of agents are missing: not judged is whether all that was lost was fenced"
    level = provides(history)
    lacking = [
        f"{number} ({', '.join(rule.__name__ for rule in rules if LEVELS.index(rule.needs) > LEVELS.index(level))})"
        for number, _, rules in RULES if any(LEVELS.index(rule.needs) > LEVELS.index(level) for rule in rules)
    ]  # fmt: skip
    if lacking:
        yield f"the trace shows no more than {level}: not judged are the rules of {', '.join(lacking)}"


def _place(replica: int, rank: int) -> str:
    if replica != LAUNCHER:
        return f"replica {replica} rank {rank}"
    return "the launcher" if rank >= 0 else f"the agent of node {-rank}"


def _differences(comparison: Comparison, are_exact: bool) -> Iterator[str]:
    against = comparison.reference
    if are_exact:
        if comparison.param_bit_identical is False:
            yield f"both runs are exact, but the parameters after the last step are not bit-identical to those of {against}"
        if comparison.loss_max_abs_diff:
            yield f"both runs are exact, but a loss differs from that of {against} by {comparison.loss_max_abs_diff:g}"


def describe(verdict: Verdict) -> str:
    """Return the verdict for people, in several lines."""
    history, summary = verdict.history, verdict.summary
    lines = [
        f"{history.path}: {counted(history.num_events, 'event')}; {counted(summary.steps, 'training step')} and "
        f"{counted(summary.evaluation_steps, 'evaluation step')}; {counted(summary.generations, 'generation')}, "
        f"{summary.replicas_start} -> {counted(summary.replicas_end, 'replica')}"
    ]
    for line, _ in history.cuts:
        lines.append(f"  line {line} was cut short: its writer was killed in mid-write; that is no fault of the log")
    by_invariant = {number: [one for one in verdict.violations if one.invariant == number] for number, _, _ in RULES}
    texts = _texts(history, {one.line for some in by_invariant.values() for one in some[:SHOWN_VIOLATIONS]})
    for number, name, _ in RULES:
        broken = by_invariant[number]
        times = len(broken) + verdict.uncounted.get(number, 0)
        lines.append(f"{number} {name:<15} {f'BROKEN, {times} times' if broken else 'holds'}{_detail(number, summary)}")
        for violation in broken[:SHOWN_VIOLATIONS]:
            lines += [f"  line {violation.line}: {violation.message}", f"    {texts.get(violation.line, '')}"]
        if times > SHOWN_VIOLATIONS:
            lines.append(f"  and {times - SHOWN_VIOLATIONS} more")
    lines += [one.words for one in summary.leaves]
    lines += [one.words for one in summary.joins]
    lines += [f"computed anew: {message}" for message in miscounts(history)]
    if summary.reference is not None:
        answers = {True: "bit-identical", False: "not bit-identical", None: "digests not comparable"}
        identical = answers[summary.param_bit_identical]
        relative, absolute = summary.param_max_rel_diff, summary.loss_max_abs_diff
        differ = "not comparable" if relative is None else f"max relative difference {relative}"
        losses = "are not comparable" if absolute is None else f"differ by at most {absolute}"
        lines.append(f"against {summary.reference}: parameters {identical} ({differ}), losses {losses}")
    lines += [f"PROBLEM: {problem}" for problem in verdict.problems]
    lines += [f"NOT JUDGED: {what}" for what in verdict.not_judged]
    if (ended := how_it_ended(history)) is not None:
        lines.append(f"the run {ended}")
    else:
        lines.append(
            "UNFINISHED: the trace has no run_finished, so the run still goes on, or its launcher was killed, or its disk did "
            f"not take the end of the trace; the above is about the first {summary.seconds:.0f} s"
        )
    return "\n".join(lines)


def how_it_ended(history: History) -> str | None:
    """Return how the run ended and why, for people; None if the trace has no end of the run."""
    ended = history.first(trace.RunFinished)
    if ended is None:
        return None
    code = ended.exit_code
    reasons = [event.reason for _, event in history.of(trace.Stopping) if event.exit_code == code]
    reason = ended.reason or (reasons[-1] if reasons else "")
    return f"ended with exit code {code} ({ExitCode.words(code)}){f': {reason}' if reason else ''}"


def _detail(number: str, summary: Summary) -> str:
    if number == "INV-7":
        return (
            f"  (microbatches: {summary.microbatches_lost} lost, {summary.microbatches_redone} computed again, "
            f"{summary.microbatches_wasted} wasted)"
        )
    if number == "INV-2" and summary.replicas_bit_identical is None:
        return "  (parameters not compared: no digests of two replicas in the trace)"
    return ""


def _texts(history: History, lines: Iterable[Line]) -> dict[Line, str]:
    """Return the events of some lines, each as JSON that is encoded anew."""
    wanted = set(lines)
    if not wanted:
        return {}
    return {line: msgspec.json.encode(event).decode() for line, event in history.events if line in wanted}
