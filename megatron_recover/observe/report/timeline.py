"""Turn the events of a trace into spans of time for each rank, and find the periods around faults.

Events of forwards, backwards and sums carry their begin or end and their duration. A microbatch
that a rank never finished has only a begin, so its forward gets the usual duration of the rank.
Nothing is drawn here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Literal

from megatron_recover import trace
from megatron_recover.faults import STANDS_STILL, FaultKind
from megatron_recover.observe.history import History, Numbered
from megatron_recover.observe.joins import Doing, doings
from megatron_recover.observe.report.details import Details, Window, collect
from megatron_recover.observe.standstills import standstills
from megatron_recover.observe.summary import FaultSummary, faults, struck_at

RankPlace = tuple[int, int]
"""Replica, and rank inside the replica."""
MAX_SPANS = 300_000
"""Largest number of spans of a run that is looked at whole. Of a larger run only the periods around
drawn faults are looked at, with at most `details.MAX_EVENTS` events."""
MAX_DRAWN = 8
"""Largest number of episodes that are drawn; of more the slowest are drawn."""


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of a rank. Times are seconds since the start of the run."""

    kind: Literal["forward", "backward", "reduce", "step"] | trace.Phase
    begin: float
    end: float
    step: int
    generation: int
    number: int | None = None
    """Microbatch, or bucket of a sum."""
    chunk: int = 0
    is_again: bool = False
    """True if an older plan had dealt the microbatch already."""
    is_lost: bool = False
    """True for a forward of a microbatch that the rank never finished."""


@dataclass(frozen=True)
class Episode:
    """The reaction to one or more faults.

    It consists of the generations up to the one in which the step was committed, or up to the last
    of the run. It has no generation if none was made: for example a rank was slow, stood still for
    too short a time, or was the last one.
    """

    generations: tuple[trace.Generation, ...]
    step: int | None
    fault: float
    """Time at which the first of the faults struck or was noticed."""
    end: float
    """Time of the last member's commit, or else of the last known event of the recovery."""
    begin_shown: float
    end_shown: float
    """End of the period that is drawn, from `begin_shown`: some time before the fault to a little
    after the end."""

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the replicas that were lost in the episode."""
        return tuple(lost.replica for one in self.generations for lost in one.losses)

    def answers(self, fault: FaultSummary) -> bool:
        """Return whether the episode is about a fault.

        - Without generations: the episode begins with this fault.
        - With generations: the fault is no slowness and struck between the begin of the episode and
          its last generation. If the fault's replica was lost in the episode, the fault may strike
          up to the end.
        """
        if not self.generations or fault.kind == FaultKind.SLOW.value:
            return not self.generations and fault.t == self.fault
        return self.fault <= fault.t <= (self.end if fault.replica in self.lost else self.generations[-1].t)


@dataclass(frozen=True, slots=True)
class Still:
    """A period in which a rank showed no progress, or waited for such a rank (`waiting`).

    Times are seconds since the start of the run.
    """

    kind: Literal["slow", "hung", "stopped", "traced", "waiting"]
    begin: float
    end: float
    text: str


class Timeline:
    """The spans of a history: all if `is_whole`, else those around the faults that are drawn."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.is_whole = history.num_spans <= MAX_SPANS

    @cached_property
    def _details(self) -> Details:
        if self.is_whole:
            return Details(tuple(self._history.events), None)
        windows = [Window(one.begin_shown, one.end_shown) for one in self.drawn]
        return collect(self._history, windows, self.struck_at.keys())

    @property
    def _events(self) -> Sequence[Numbered]:
        return self._details.events

    @property
    def rank_limit(self) -> int | None:
        """Return the rank from which on events were not kept, for want of memory; None: all were.

        The limit is the same for all replicas. Ranks that faults struck are kept.
        """
        return self._details.rank_limit

    @cached_property
    def computing(self) -> dict[RankPlace, list[Span]]:
        """Return the forwards and backwards of each rank in the order of time.

        No two of a rank overlap, since one thread computed them.
        """
        dealt = self._dealt
        found: dict[RankPlace, list[Span]] = defaultdict(list)
        open_since: dict[tuple[int, int, int, int, int, int], float] = {}
        for _, event in self._events:
            if not isinstance(event, trace.MicrobatchStarted | trace.MicrobatchFinished):
                continue
            key = (event.replica, event.rank, event.step, event.generation, event.microbatch, event.chunk)
            if isinstance(event, trace.MicrobatchStarted):
                open_since[key] = event.t
                continue
            begin = open_since.pop(key, event.t - event.seconds)
            is_again = event.generation > dealt.get((event.step, event.microbatch), event.generation)
            forward = Span(
                "forward", begin, begin + event.seconds - event.backward_s, event.step, event.generation, event.microbatch,
                event.chunk, is_again,
            )  # fmt: skip
            spans = found[event.replica, event.rank]
            spans.append(forward)
            if event.backward_s:
                spans.append(replace(forward, kind="backward", begin=event.t - event.backward_s, end=event.t))
        usual = {rank: median(_seconds(spans, "forward")) for rank, spans in found.items()}
        for (replica, rank, step, generation, microbatch, chunk), begin in open_since.items():
            end = begin + usual.get((replica, rank), 0.0)
            is_again = generation > dealt.get((step, microbatch), generation)
            found[replica, rank].append(
                Span("forward", begin, end, step, generation, microbatch, chunk, is_again, is_lost=True)
            )
        return {rank: _apart(found[rank], self.gone_at.get(rank)) for rank in sorted(found)}

    @cached_property
    def _dealt(self) -> dict[tuple[int, int], int]:
        """Return (step, microbatch) -> the first generation that dealt the microbatch.

        Only steps with plans of several generations are included.
        """
        found: dict[tuple[int, int], int] = {}
        planned: dict[int, list[trace.Plan]] = defaultdict(list)
        for _, event in self._events:
            if isinstance(event, trace.Plan):
                planned[event.step].append(event)
        for step, plans in planned.items():
            if len({plan.generation for plan in plans}) > 1:
                for plan in plans:
                    for one in plan.computes:
                        for microbatch in one.microbatches:
                            found[step, microbatch] = min(plan.generation, found.get((step, microbatch), plan.generation))
        return found

    @cached_property
    def gone_at(self) -> dict[RankPlace, float]:
        """Return when the process of each rank was killed or seen to have ended."""
        history = self._history
        found: dict[RankPlace, float] = {}
        for _, fenced in history.of(trace.Fenced):
            found |= {(fenced.replica, rank): fenced.t for rank in fenced.ranks}
        for _, failure in history.of(trace.Failure):
            key = (failure.replica, failure.rank)
            found[key] = min(failure.t, found.get(key, failure.t))
        for _, fault in history.of(trace.Fault):
            key = (fault.replica, fault.rank)
            if fault.kind == FaultKind.KILL.value and key in found:
                found[key] = min(fault.t, found[key])
        return found

    @cached_property
    def frozen(self) -> dict[RankPlace, list[tuple[float, float]]]:
        """Return the periods in which an injected fault had stopped the process of a rank.

        Such a period ends when the process is thawed or gone; else its end is infinite.
        """
        found: dict[RankPlace, list[tuple[float, float]]] = defaultdict(list)
        thawed = [event for _, event in self._history.of(trace.Thawed)]
        for _, fault in self._history.of(trace.Fault):
            rank = (fault.replica, fault.rank)
            if fault.kind in STANDS_STILL and fault.kind != FaultKind.LOOP.value:
                ends = [event.t for event in thawed if (event.replica, event.rank) == rank and event.t >= fault.t]
                found[rank].append((fault.t, min([*ends, self.gone_at.get(rank, float("inf"))])))
        return dict(found)

    @cached_property
    def still(self) -> dict[RankPlace, list[Still]]:
        """Return the periods in which a rank showed no progress, or waited for such a rank.

        No two of a rank overlap.
        """
        judged: dict[RankPlace, list[Still]] = defaultdict(list)
        waits: dict[RankPlace, list[Still]] = defaultdict(list)
        for one in standstills(self._history):
            if one.replica is None or one.rank is None or one.verdict == "silent" or one.verdict == "waiting":
                continue
            end = self._history.seconds if one.end is None else one.end
            text = f"{one.verdict} in {one.where}"
            judged[one.replica, one.rank].append(Still(one.verdict, one.begin, end, text))
            for replica, rank, since in one.waiting:
                waits[replica, rank].append(Still("waiting", since, end, f"waits, as {one.who} is {one.verdict}"))
        return {
            place: _free_of_overlaps([*judged[place], *waits[place]], self.gone_at.get(place))
            for place in sorted(judged.keys() | waits.keys())
        }

    @cached_property
    def struck_at(self) -> dict[RankPlace, list[float]]:
        """Return the times at which faults (`summary.faults`) struck each rank."""
        found: dict[RankPlace, list[float]] = defaultdict(list)
        for fault in faults(self._history):
            found[fault.replica, fault.rank].append(fault.t)
        return dict(found)

    @cached_property
    def reducing(self) -> dict[RankPlace, list[Span]]:
        """Return the completed sums over replicas of each rank.

        They may overlap the computation of the rank, and each other.
        """
        found: dict[RankPlace, list[Span]] = defaultdict(list)
        for _, event in self._events:
            if not isinstance(event, trace.Reduced):
                continue
            span = Span("reduce", event.t - event.seconds, event.t, event.step, event.generation, event.bucket)
            found[event.replica, event.rank].append(span)
        return {rank: sorted(found[rank], key=_begin) for rank in sorted(found)}

    @cached_property
    def recovering(self) -> dict[int, list[Span]]:
        """Return the phases of the recoveries, as the leader of each replica measured them.

        `detect` begins with the fault instead. No two of a replica overlap.
        """
        found: dict[int, list[Span]] = defaultdict(list)
        for _, event in self._events:
            if not isinstance(event, trace.Recovery):
                continue
            spans, begin = found[event.replica], event.t - event.seconds
            if event.phase == "detect":  # recorded together with `agree`, which shows when the detection ended
                continue
            if event.phase == "agree":
                since = max(self._faults_of.get(event.generation, begin), spans[-1].end if spans else 0.0)
                spans.append(Span("detect", min(since, begin), begin, event.step, event.generation))
            spans.append(Span(event.phase, begin, event.t, event.step, event.generation))
        return {replica: _apart(found[replica], None) for replica in sorted(found)}

    @cached_property
    def joining(self) -> dict[int, list[Doing]]:
        """Return what each newcomer did until it was a member: it forms, reads, asks and joins."""
        return doings(self._history)

    @cached_property
    def steps(self) -> dict[RankPlace, list[Span]]:
        """Return a span for each rank and step: from the first forward to the optimizer's end.

        Without an end of the optimizer the span ends with the last known backward or forward.
        """
        ends = {
            (event.replica, event.rank, event.step): event.t for _, event in self._events if isinstance(event, trace.Applied)
        }
        found: dict[RankPlace, list[Span]] = {}
        for rank, spans in self.computing.items():
            by_step: dict[int, list[Span]] = defaultdict(list)
            for span in spans:
                by_step[span.step].append(span)
            found[rank] = []
            for step, inside in sorted(by_step.items()):
                end = max(ends.get((*rank, step), 0.0), inside[-1].end)
                found[rank].append(Span("step", inside[0].begin, end, step, inside[0].generation))
        return found

    @cached_property
    def episodes(self) -> tuple[Episode, ...]:
        """Return every recovery, in the order of time.

        A generation that only carries a request, or lets replicas leave or join, is no recovery.
        """
        history = self._history
        announced = [one for one in list(history.generations.values())[1:] if one.is_recovery]
        finished = {number for number, told in history.recoveries.items() if told.committed_at is not None}
        groups: list[list[trace.Generation]] = []
        for one in announced:
            if groups and groups[-1][-1].generation not in finished:
                groups[-1].append(one)
            else:
                groups.append([one])
        return tuple(self._episode(group) for group in groups)

    @cached_property
    def drawn(self) -> tuple[Episode, ...]:
        """Return the episodes of faults that are drawn: at most `MAX_DRAWN`, the slowest first.

        Episodes without generations come last.
        """
        episodes, of_fault = self.answers_to(faults(self._history))
        return tuple(sorted((episodes[index] for index in dict.fromkeys(of_fault.values())), key=_slowness)[:MAX_DRAWN])

    def answers_to(self, struck: Sequence[FaultSummary]) -> tuple[list[Episode], dict[int, int]]:
        """Return all episodes, and the index of the episode of each fault.

        Faults are numbered from 1. Episodes of faults without a reaction are included; a fault may
        have no episode.
        """
        episodes: list[Episode] = list(self.episodes)
        of_fault: dict[int, int] = {}
        for number, fault in enumerate(struck, start=1):
            index = next((index for index, episode in enumerate(episodes) if episode.answers(fault)), None)
            if index is None and (unanswered := self.around(fault)) is not None:
                index = len(episodes)
                episodes.append(unanswered)
            if index is not None:
                of_fault[number] = index
        return episodes, of_fault

    def around(self, fault: FaultSummary) -> Episode | None:
        """Return an episode for a fault without a reaction: the step that the fault struck.

        Return None if that step is unknown or the trace has no plan of it.
        """
        facts = self._history.steps.get(fault.step) if fault.step is not None else None
        if facts is None or facts.planned_at is None:
            return None
        begin = facts.planned_at
        end = max(fault.t, facts.committed_at or 0.0, fault.until or 0.0)
        return Episode((), fault.step, fault.t, end, min(begin, fault.t), end + max(0.05 * (end - begin), 1e-3))

    def _episode(self, group: list[trace.Generation]) -> Episode:
        told = self._history.recoveries
        step = next((told[one.generation].last_step for one in reversed(group) if one.generation in told), None)
        fault = min(self._faults_of[one.generation] for one in group)
        newest = group[-1]
        end = max(told[newest.generation].end if newest.generation in told else 0.0, newest.t)
        seconds = max(end - fault, 1e-3)
        facts = self._history.steps.get(step) if step is not None else None
        planned = fault if facts is None or facts.planned_at is None else facts.planned_at
        begin_shown = min(fault - 0.1 * seconds, max(planned, fault - 0.5 * seconds))
        return Episode(tuple(group), step, fault, end, begin_shown, end + 0.12 * (end - begin_shown))

    @cached_property
    def _faults_of(self) -> dict[int, float]:
        """Return for each generation when the fault that it answers to struck or was noticed."""
        history = self._history
        noticed = {number: told.seconds.get("detect", 0.0) for number, told in history.recoveries.items()}
        found = struck_at(history)
        for one in history.generations.values():
            if one.generation not in found:
                lost = {loss.replica for loss in one.losses}
                ended = [event.t for _, event in history.of(trace.Failure) if event.replica in lost and event.t <= one.t]
                found[one.generation] = min([*ended, one.t - noticed.get(one.generation, 0.0)])
        return found


def within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """Return the spans that overlap a period, cut to the period."""
    return [
        replace(span, begin=max(span.begin, begin), end=min(span.end, end))
        for span in spans
        if span.end > begin and span.begin < end
    ]


def _free_of_overlaps(spans: Iterable[Still], gone_at: float | None) -> list[Still]:
    """Return spans in the order of time, without overlaps.

    The earlier span is kept, and a later one is cut to the part beyond it. Each span is also cut
    at `gone_at`, when the process was gone. A span of which nothing is left is dropped.
    """
    found: list[Still] = []
    last = float("inf") if gone_at is None else gone_at
    for one in sorted(spans, key=lambda each: (each.begin, each.kind == "waiting")):
        begin = max([one.begin, *(each.end for each in found[-1:])])
        if begin < min(one.end, last):
            found.append(replace(one, begin=begin, end=min(one.end, last)))
    return found


def _slowness(one: Episode) -> tuple[bool, float]:
    """Return the sort key: slowest first, episodes without generations last."""
    return not one.generations, one.fault - one.end


def _begin(span: Span) -> float:
    return span.begin


def _seconds(spans: Iterable[Span], kind: str) -> list[float]:
    return [span.end - span.begin for span in spans if span.kind == kind]


def _apart(spans: list[Span], gone_at: float | None) -> list[Span]:
    """Return spans in the order of time, each cut where the next begins or the process was gone.

    Clocks are read a little apart, so that spans may overlap.
    """
    ordered = sorted(spans, key=_begin)
    last = float("inf") if gone_at is None else gone_at
    for index, one in enumerate(ordered):
        limit = min(last, ordered[index + 1].begin) if index + 1 < len(ordered) else last
        if one.end > limit:
            ordered[index] = replace(one, end=max(one.begin, limit))
    return ordered
