"""`megatron-recover check`: the verdict on a run, from its trace and, against a reference, its parameter digests.

It judges by `rules.RULES`; it changes nothing in the run directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_recover import trace
from megatron_recover.observe.compare import Comparison, compare
from megatron_recover.observe.history import History, Line
from megatron_recover.observe.plans import miscounts
from megatron_recover.observe.rules import RULES
from megatron_recover.observe.summary import Summary, summarize

SHOWN_VIOLATIONS = 20
"""So many violations of one invariant are printed; the rest is counted."""


@dataclass(frozen=True)
class Violation:
    """A broken invariant and the line of the event that shows it."""

    invariant: str
    line: Line
    message: str


@dataclass(frozen=True)
class Verdict:
    """What was looked at and what is wrong with it."""

    history: History
    reference: History | None
    """What the run is compared with."""
    summary: Summary
    violations: tuple[Violation, ...]
    problems: tuple[str, ...]
    """Reasons for which the run does not count as proven although no invariant is broken."""

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended, so that nothing can follow what was looked at."""
        return self.summary.exit_code is not None

    @property
    def holds(self) -> bool:
        """Whether everything that was claimed is proven."""
        return not self.violations and not self.problems


def violations(history: History) -> tuple[Violation, ...]:
    """All violations, by invariant and then by line."""
    return tuple(Violation(number, line, message) for number, _, rule in RULES for line, message in sorted(rule(history)))


def check(run_dir: Path, against: Path | None = None) -> Verdict:
    """Judge a run directory. Raises FileNotFoundError or `trace.TraceError` where there is no readable trace."""
    history, reference = History.read(run_dir), History.read(against) if against else None
    comparison = None
    problems = [] if history.commits else ["no step was committed, so there is nothing to prove"]
    if history.first(trace.RunStarted) is None:
        problems.append("there is no run_started, so some rules have nothing to go by; check the whole trace")
    if reference is not None:
        comparison = compare(history, reference, str(against))
        starts = [one.first(trace.RunStarted) for one in (history, reference)]
        problems += _differences(comparison, all(start and start.determinism == "exact" for start in starts))
    return Verdict(history, reference, summarize(history, comparison), violations(history), tuple(problems))


def _differences(comparison: Comparison, are_exact: bool) -> Iterator[str]:
    against = comparison.reference
    if comparison.loss_max_abs_diff is None:
        yield f"losses cannot be compared: the run has no step in common with {against}"
    if are_exact:
        if comparison.param_bit_identical is False:
            yield f"both runs are exact, but the parameters after the last step are not bit-identical to those of {against}"
        if comparison.loss_max_abs_diff:
            yield f"both runs are exact, but a loss differs from that of {against} by {comparison.loss_max_abs_diff:g}"
    if comparison.param_bit_identical is None and comparison.param_max_rel_diff is None:
        yield f"parameters cannot be compared with {against}: layouts or last steps differ, and so do the last checkpoints"


def describe(verdict: Verdict) -> str:
    """The verdict for people, several lines."""
    history, summary = verdict.history, verdict.summary
    lines = [
        f"{history.path}: {len(history.events)} events; {summary.steps} training and {summary.evaluation_steps} evaluation "
        f"steps; {summary.generations} generations, {summary.replicas_start} -> {summary.replicas_end} replicas"
    ]
    for line, _ in history.cuts:
        lines.append(f"  line {line} was cut short: its writer was killed in mid-write; that is no fault of the log")
    for number, name, _ in RULES:
        broken = [violation for violation in verdict.violations if violation.invariant == number]
        lines.append(f"{number} {name:<15} {f'BROKEN, {len(broken)} times' if broken else 'holds'}{_detail(number, summary)}")
        for violation in broken[:SHOWN_VIOLATIONS]:
            lines += [f"  line {violation.line}: {violation.message}", f"    {_text(history, violation.line)}"]
        if len(broken) > SHOWN_VIOLATIONS:
            lines.append(f"  and {len(broken) - SHOWN_VIOLATIONS} more")
    lines += [f"computed anew: {message}" for message in miscounts(history)]
    if summary.reference is not None:
        answers = {True: "bit-identical", False: "not bit-identical", None: "digests not comparable"}
        identical = answers[summary.param_bit_identical]
        relative, absolute = summary.param_max_rel_diff, summary.loss_max_abs_diff
        differ = "not comparable" if relative is None else f"max relative difference {relative}"
        losses = "are not comparable" if absolute is None else f"differ by at most {absolute}"
        lines.append(f"against {summary.reference}: parameters {identical} ({differ}), losses {losses}")
    lines += [f"PROBLEM: {problem}" for problem in verdict.problems]
    if not verdict.is_finished:
        lines.append(
            "UNFINISHED: the trace has no run_finished, so the run still goes on or was cut off (its launcher was killed); "
            f"the above is about the first {summary.seconds:.0f} s"
        )
    return "\n".join(lines)


def _detail(number: str, summary: Summary) -> str:
    if number == "INV-7":
        return (
            f"  (microbatches: {summary.microbatches_lost} lost, {summary.microbatches_redone} computed again, "
            f"{summary.microbatches_wasted} wasted)"
        )
    if number == "INV-2" and summary.replicas_bit_identical is None:
        return "  (parameters not compared: no digests of two replicas in the trace)"
    return ""


def _text(history: History, line: int) -> str:
    """The event of a line, as it is in the file."""
    event = next((event for number, event in history.events if number == line), None)
    return msgspec.json.encode(event).decode() if event else ""
