"""Render the report of a run as one HTML page without scripts that needs no network.

Everything on the page comes from the trace and from the comparison with a reference run. Its
numbers are those of `summary.Summary`, and its verdict is `check`'s. This module assembles the
content; `charts` places it, and `templates/` decide how it looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import jinja2

from megatron_recover import __version__, trace
from megatron_recover.core.label import label_of
from megatron_recover.observe.goodput import Goodput, StepTime
from megatron_recover.observe.history import History
from megatron_recover.observe.joins import sizes as joined_sizes
from megatron_recover.observe.report import charts
from megatron_recover.observe.report.lanes import Picture, newcomers_picture, picture
from megatron_recover.observe.report.perfetto import TRACE_FILE
from megatron_recover.observe.report.timeline import MAX_DRAWN, Episode, Timeline
from megatron_recover.observe.standstills import Standstill
from megatron_recover.observe.summary import FaultSummary, RecoverySummary, Summary
from megatron_recover.observe.verify.check import SHOWN_VIOLATIONS, Verdict, Violation, how_it_ended
from megatron_recover.observe.verify.rules import RULES

PAGE_FILE = "report.html"

MAX_MARKS = 24
"""Largest number of faults whose lines in a chart bear numbers. More numbers would hide each
other."""
MAX_PICTURES = MAX_DRAWN
MAX_QUOTA_ROWS = 60
MAX_STANDSTILLS = 100
"""Largest number of standstills that are listed; of more the longest are listed."""
MAX_SEGMENTS = 32
"""Largest number of members whose quotas are drawn; larger rows are described by a range."""


def render(
    verdict: Verdict,
    timeline: Timeline,
    *,
    is_whole: bool = True,
    perfetto_file: str = TRACE_FILE,
    links_to_logs: bool = True,
) -> str:
    """Return the page of a judged run, with the loss of its reference run if it has one.

    `is_whole`: result of `perfetto.write`. `perfetto_file`: name of the file that it wrote beside
    the page. `links_to_logs`: the page lies in the run directory, so it can link to the logs of
    ranks.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_recover.observe.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"ms": _milliseconds, "seconds": _seconds, "percent": _percent, "plural": _plural}
    history, summary = verdict.history, verdict.summary
    goodput = Goodput(history)
    items = _items(history, timeline, summary)
    late = [one for one in items if one.picture is None] if len(items) > MAX_MARKS else []
    last_line = history.last_line
    return environment.get_template("report.html").render(
        version=__version__,
        title=_title(history),
        path=history.path,
        started=history.first(trace.RunStarted),
        shape=_shape(history),
        summary=summary,
        cut_lines=[line for line, _ in history.cuts if line <= last_line],
        end_line=next((line for line, _ in history.cuts if line > last_line), None),
        status=_status(verdict),
        ending=_ending(verdict),
        loss=_loss_chart(history, summary.faults, verdict.reference),
        speed=_speed_chart(goodput, summary.faults),
        faults=[one for one in items if one not in late],
        late_faults=late,
        num_pictures=sum(one.picture is not None for one in items),
        is_part=sum(one.picture is not None for one in items) == MAX_PICTURES,
        still_kinds=_still_kinds(timeline),
        standstills=_standstills(summary),
        num_standstills=len(summary.standstills),
        links_to_logs=links_to_logs,
        phases=get_args(trace.Phase),
        recoveries=[(one, _bar(one)) for one in summary.recoveries],
        slowest=max((one.total_s for one in summary.recoveries if one.total_s is not None and not one.newcomers), default=None),
        members=_members_chart(history),
        newcomers=newcomers_picture(history),
        quotas=_quotas(history),
        max_quota_rows=MAX_QUOTA_ROWS,
        max_segments=MAX_SEGMENTS,
        rules=_rules(verdict),
        perfetto=perfetto_file,
        is_whole=is_whole,
        problems=verdict.problems,
        not_judged=verdict.not_judged,
    )


# --- Words ----------------------------------------------------------------------------------------


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f}" if seconds < 0.01 else f"{1000 * seconds:,.0f}"


def _seconds(seconds: float) -> str:
    """Return a duration in a suitable unit."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _title(history: History) -> str:
    """Return the name of the run's folder."""
    path = Path(history.path).resolve()
    return path.parent.name if path.name == trace.EVENTS_FILE else path.name


def _shape(history: History) -> str:
    """Return the layout of a replica, without sizes CP, VPP and lanes of 1."""
    started = history.first(trace.RunStarted)
    if started is None:
        return ""
    layout = started.layout
    sizes = (("TP", layout.tp), ("PP", layout.pp), ("CP", layout.cp), ("VPP", layout.vpp))
    parts = [f"{name}{size}" for name, size in sizes if size > 1 or name in ("TP", "PP")]
    return " × ".join(parts) + (f" × {layout.lanes} lanes" if layout.lanes > 1 else "")


@dataclass(frozen=True)
class Headline:
    """The page's first sentence."""

    kind: str
    """`good`, `bad` or `open`."""
    text: str


def _status(verdict: Verdict) -> Headline:
    broken = sorted({violation.invariant for violation in verdict.violations})
    if broken:
        return Headline("bad", f"Broken: {', '.join(broken)}")
    if verdict.problems:
        return Headline("bad", "Not proven")
    if verdict.not_judged:
        return Headline("open", "What could be judged holds")
    return Headline("good", "All invariants hold") if verdict.is_finished else Headline("open", "All invariants hold so far")


def _ending(verdict: Verdict) -> str:
    """Return how the run ended."""
    return how_it_ended(verdict.history) or "has not ended"


@dataclass(frozen=True)
class RuleRow:
    """One invariant and what breaks it."""

    number: str
    name: str
    times: int
    shown: tuple[Violation, ...]


def _rules(verdict: Verdict) -> list[RuleRow]:
    rows = []
    for number, name, _ in RULES:
        broken = tuple(one for one in verdict.violations if one.invariant == number)
        times = len(broken) + verdict.uncounted.get(number, 0)
        rows.append(RuleRow(number, name, times, broken[:SHOWN_VIOLATIONS]))
    return rows


# --- Charts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FaultRow:
    """A fault and what came of it."""

    number: int
    fault: FaultSummary
    outcome: str
    """Description of the outcome; empty if no episode is about the fault."""
    picture: Picture | None = None
    computing: tuple[tuple[int, str], ...] = ()
    """Generation, and description of the microbatches that each replica was computing at its
    announcement; empty without a picture."""


def _items(history: History, timeline: Timeline, summary: Summary) -> list[FaultRow]:
    """Return every fault, with a picture at the first fault of each episode that is drawn."""
    episodes, of = timeline.answers_to(summary.faults)
    first: dict[int, int] = {}
    for number, index in of.items():
        first.setdefault(index, number)
    items = []
    for number, fault in enumerate(summary.faults, start=1):
        episode = episodes[of[number]] if number in of else None
        if episode is None:
            items.append(FaultRow(number, fault, ""))
        elif first[of[number]] != number:
            items.append(FaultRow(number, fault, f"{_outcome(episode)}, see fault {first[of[number]]}"))
        elif episode not in timeline.drawn:
            items.append(FaultRow(number, fault, _outcome(episode)))
        else:
            generations = {one.generation for one in episode.generations}
            computing = tuple(
                (one.generation, _computing(one)) for one in summary.recoveries
                if one.generation in generations and one.computing
            )  # fmt: skip
            items.append(FaultRow(number, fault, _outcome(episode), picture(history, timeline, episode), computing))
    return items


def _outcome(episode: Episode) -> str:
    names = [str(one.generation) for one in episode.generations]
    if not names:
        return "nothing had to be recovered"
    where = f"generation{'s' if len(names) > 1 else ''} {' and '.join(names)}"
    return f"over after {_seconds(episode.end - episode.fault)}, in {where}"


def _computing(recovery: RecoverySummary) -> str:
    told = [f"replica {replica}: {' '.join(map(str, ids))}" for replica, ids in recovery.computing.items()]
    rest = [f"{_plural(len(told) - MAX_SEGMENTS, 'more replica')}"] if len(told) > MAX_SEGMENTS else []
    return "; ".join([*told[:MAX_SEGMENTS], *rest])


def _still_kinds(timeline: Timeline) -> list[str]:
    """Return the kinds of standstill that the legend of the pictures explains."""
    found = {one.kind for spans in timeline.still.values() for one in spans} | ({"stopped"} if timeline.frozen else set())
    return [kind for kind in ("slow", "hung", "stopped", "traced", "waiting") if kind in found]


def _standstills(summary: Summary) -> list[tuple[Standstill, float]]:
    """Return the listed standstills with their durations in seconds, in the order of time."""
    timed = [(one, (summary.seconds if one.end is None else one.end) - one.begin) for one in summary.standstills]
    if len(timed) > MAX_STANDSTILLS:
        timed = sorted(timed, key=lambda each: -each[1])[:MAX_STANDSTILLS]
    return sorted(timed, key=lambda each: each[0].begin)


def _points(history: History) -> list[tuple[float, float]]:
    return [(label_of(label).iteration, loss) for label, loss in history.losses().items() if label_of(label).is_training]


def _loss_chart(history: History, faults: tuple[FaultSummary, ...], reference: History | None) -> charts.Chart | None:
    """Return the chart of losses; None if the trace has no loss of a training step."""
    mine = _points(history)
    if not mine:
        return None
    shown = {iteration for iteration, _ in mine}
    theirs = [point for point in _points(reference) if point[0] in shown] if reference else []
    values = [loss for _, loss in (*mine, *theirs)]
    margin = 0.06 * (max(values) - min(values)) or 0.5
    x, y = charts.Scale(mine[0][0], mine[-1][0]), charts.Scale(min(values) - margin, max(values) + margin)
    dots = mine if len(mine) <= charts.MAX_DOTS else []
    curves = [
        charts.Curve("the reference run", "reference", charts.path([charts.thinned(theirs)], x, y)),
        charts.Curve(
            "this run", "run", charts.path([charts.thinned(mine)], x, y),
            tuple(charts.Dot(x.at(one), 100 - y.at(loss), f"iteration {one:g}: loss {loss:.4f}") for one, loss in dots),
        ),
    ]  # fmt: skip
    marks = [
        (number, label_of(fault.label).iteration, fault.words)
        for number, fault in enumerate(faults, start=1)
        if fault.label is not None and label_of(fault.label).is_training
    ]
    return charts.Chart(
        name="Loss", x_label="iteration", y_label="loss",
        about=f"The loss of {len(mine)} training steps, from {mine[0][1]:.4f} to {mine[-1][1]:.4f}, with "
        f"{_plural(len(marks), 'fault')} marked.",
        x_ticks=charts.ticks(x, 7, whole=True), y_ticks=charts.ticks(y, 5), curves=tuple(curves if theirs else curves[1:]),
        marks=_marks(x, marks),
    )  # fmt: skip


def _marks(x: charts.Scale, marks: Sequence[tuple[int, float, str]]) -> tuple[charts.Mark, ...]:
    named = len(marks) <= MAX_MARKS
    rows = charts.rows([x.at(at) for _, at, _ in marks]) if named else [0] * len(marks)
    return tuple(
        charts.Mark(x.at(at), str(number) if named else "", text, row)
        for (number, at, text), row in zip(marks, rows, strict=True)
    )


def _speed_chart(goodput: Goodput, faults: tuple[FaultSummary, ...]) -> charts.Chart | None:
    """Return the chart of microbatches per second that training steps committed, or None."""
    steps = [one for one in goodput.steps if one.is_training and one.seconds > 0]
    if not steps:
        return None
    groups = _grouped(steps)
    rates = [(group[0].begin, group[-1].end, sum(one.num_microbatches for one in group) / _total(group)) for group in groups]
    undisturbed = [
        (one.begin, one.end, one.num_microbatches / seconds) for one in steps if (seconds := goodput.undisturbed_s(one))
    ]
    x = charts.Scale(steps[0].begin, steps[-1].end)
    y = charts.Scale(0.0, 1.15 * max(rate for _, _, rate in (*rates, *undisturbed)))
    curves = [
        charts.Curve("undisturbed, with as many replicas", "ideal", charts.path(_stairs(undisturbed), x, y)),
        charts.Curve("this run", "run", charts.path(_stairs(rates), x, y)),
    ]
    marks = [(number, fault.t, fault.words) for number, fault in enumerate(faults, start=1)]
    return charts.Chart(
        name="Goodput over time", x_label="seconds since the start of the run", y_label="microbatches/s",
        about=f"Microbatches per second that entered committed training steps, between {min(rate for *_, rate in rates):.1f} "
        f"and {max(rate for *_, rate in rates):.1f}.",
        x_ticks=charts.ticks(x, 7), y_ticks=charts.ticks(y, 5), curves=tuple(curves),
        marks=_marks(x, [mark for mark in marks if x.low <= mark[1] <= x.high]),
    )  # fmt: skip


def _members_chart(history: History) -> charts.Chart | None:
    """Return the chart of the number of members over time, or None if it never changes."""
    sizes = joined_sizes(history)
    if len({size for _, size in sizes}) < 2:
        return None
    pieces = [(t, end, float(size)) for (t, size), (end, _) in zip(sizes, [*sizes[1:], (history.seconds, 0)], strict=True)]
    x, y = charts.Scale(sizes[0][0], history.seconds), charts.Scale(0.0, 1.15 * max(size for _, size in sizes))
    return charts.Chart(
        name="Replicas over time", x_label="seconds since the start of the run", y_label="replicas",
        about=f"Number of members, from {sizes[0][1]} to {sizes[-1][1]}; at least {min(size for _, size in sizes)}.",
        x_ticks=charts.ticks(x, 7), y_ticks=charts.ticks(y, 5, whole=True),
        curves=(charts.Curve("members", "run", charts.path(_stairs(pieces), x, y)),),
    )  # fmt: skip


def _total(steps: list[StepTime]) -> float:
    return sum(one.seconds for one in steps)


def _grouped(steps: list[StepTime]) -> list[list[StepTime]]:
    """Group neighbouring steps: at most `charts.MAX_POINTS` groups, and one for each pause."""
    size = -(-len(steps) // charts.MAX_POINTS)
    groups: list[list[StepTime]] = []
    for one in steps:
        if groups and len(groups[-1]) < size and groups[-1][-1].end == one.begin:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _stairs(rates: list[tuple[float, float, float]]) -> list[list[tuple[float, float]]]:
    """Return the points of a staircase from (begin, end, value), in pieces where time is left out.

    Equal neighbours are joined.
    """
    pieces: list[list[tuple[float, float]]] = []
    for begin, end, value in rates:
        last = pieces[-1] if pieces else []
        if last and last[-1] == (begin, value):
            last[-1] = (end, value)
        elif last and last[-1][0] == begin:
            last += [(begin, value), (end, value)]
        else:
            pieces.append([(begin, value), (end, value)])
    return pieces


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar, in percent of the bar."""

    kind: str
    at: float
    width: float
    text: str


def _bar(recovery: RecoverySummary) -> tuple[BarSegment, ...]:
    """Return one part of a bar for each phase: its share of the seconds of all phases.

    A phase that did not happen has width 0.
    """
    took = [(phase, getattr(recovery, f"{phase}_s") or 0.0) for phase in get_args(trace.Phase)]
    total = sum(seconds for _, seconds in took) or 1.0
    segments, at = [], 0.0
    for phase, seconds in took:
        width = 100.0 * seconds / total
        segments.append(BarSegment(phase, round(at, 2), round(width, 2), f"{phase} {_milliseconds(seconds)} ms"))
        at += width
    return tuple(segments)


@dataclass(frozen=True)
class QuotaRow:
    """Consecutive steps with equal quotas."""

    generation: int
    first: str
    last: str
    roster: tuple[int, ...]
    quotas: tuple[int, ...]
    segments: tuple[BarSegment, ...]


def _quotas(history: History) -> list[QuotaRow]:
    """Return the rows of training steps with equal quotas, ordered by step and generation."""
    return [
        QuotaRow(one.generation, one.first, one.last, one.roster, one.quotas, _shares(one.roster, one.quotas))
        for one in sorted(history.quota_runs, key=lambda one: (one.step, one.generation))
    ]


def _shares(roster: tuple[int, ...], quotas: tuple[int, ...]) -> tuple[BarSegment, ...]:
    total = sum(quotas) or 1
    segments, at = [], 0.0
    for replica, quota in zip(roster, quotas, strict=True):
        width = 100.0 * quota / total
        segments.append(BarSegment(str(replica), round(at, 2), round(width, 2), str(quota)))
        at += width
    return tuple(segments)
