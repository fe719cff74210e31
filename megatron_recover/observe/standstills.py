"""Find the standstills of a run: who showed no progress, where, for how long, and how it ended.

A standstill is of a rank, a leader, the coordinator or the whole job. The verdicts were given at
the time by agents, leaders and the coordinator (`trace/standstill.py`); none is judged anew. The
end of a standstill follows from later events of the trace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from megatron_recover import trace
from megatron_recover.core.verdict import STOPPED, TRACED, UNINTERRUPTIBLE
from megatron_recover.observe.files import log_name
from megatron_recover.observe.history import History

RankPlace = tuple[int, int]
"""Replica, and rank inside the replica."""
_GRAVITY = ("slow", "traced", "stopped", "hung")
"""Verdicts on a rank by gravity. The last of them in this order stands for a standstill with
several."""


class Standstill(msgspec.Struct, frozen=True, kw_only=True):
    """A period without progress. Times are seconds since the start of the run."""

    who: str
    """Name of a rank, a leader, the coordinator or the job, for people."""
    verdict: Literal["slow", "hung", "stopped", "traced", "silent", "waiting"]
    begin: float
    """Start of the period that the verdict counts."""
    last_progress: float
    """Start of the newest operation before the standstill; equal to `begin` except for ranks, which
    have a progress page."""
    told_at: float
    """Time of the first verdict."""
    end: float | None
    """Time at which the standstill ended; None if it lasted to the end of the trace or the trace
    does not show its end."""
    outcome: str
    """Description of the reaction and of the end of the standstill."""
    replica: int | None = None
    rank: int | None = None
    phase: str = ""
    """Phase of a rank (`core/progress.py`); for others a description of what is waited for."""
    step: int | None = None
    label: str = ""
    microbatches: tuple[int, ...] = ()
    state: str = ""
    """State of the process, as in /proc/PID/stat."""
    lost_in: int | None = None
    """Generation that removed the replica during the standstill."""
    waiting: tuple[tuple[int, int, float], ...] = ()
    """(replica, rank, time since which it waited) of ranks that waited meanwhile."""
    log: str = ""
    """Path of the rank's log, relative to the run directory."""
    stacks: str = ""
    """Sentence on whether the log has the rank's stacks."""

    @property
    def where(self) -> str:
        """Describe the interrupted work: phase, microbatches and label of the step."""
        what = self.phase.replace("_", " ") if self.rank is not None else self.phase
        if self.microbatches:
            noun = "microbatch" if len(self.microbatches) == 1 else "microbatches"
            what += f" of {noun} {', '.join(map(str, self.microbatches))}"
        return f"{what}, {self.label}" if self.label else what


def about_stacks(verdict: str, state: str) -> str:
    """Return a sentence on whether the log of a rank has the rank's stacks."""
    if verdict == "slow":
        return "no stacks were asked for"
    if state == STOPPED:
        return "it was stopped (SIGSTOP), so its log has no stacks of it"
    if state == TRACED:
        return "its log has no stacks of it"
    if state == UNINTERRUPTIBLE:
        return "its log may have no stacks of it"
    return "the stack of its training thread is in its log"


def standstills(history: History) -> tuple[Standstill, ...]:
    """Return all standstills of a run, in the order in which they began."""
    found = [*_of_ranks(history), *_of_leaders(history), *_of_coordinator(history), *_of_job(history)]
    return tuple(sorted(found, key=lambda one: (one.begin, one.who)))


# --- Ranks ----------------------------------------------------------------------------------------


def _of_ranks(history: History) -> Iterator[Standstill]:
    told: dict[RankPlace, list[trace.RankSilent]] = defaultdict(list)
    for _, event in history.of(trace.RankSilent):
        told[event.replica, event.rank].append(event)
    if not told:
        return
    moved: dict[RankPlace, list[float]] = defaultdict(list)
    for _, each in history.of(trace.RankMoved):
        moved[each.replica, each.rank].append(each.t)
    commits = sorted((record.t, step, record.generation) for step, record in history.records.items())
    for rank, events in told.items():
        for verdicts in _silences(events, moved[rank]):
            yield _of_rank(history, rank, verdicts, moved[rank], commits)


def _silences(events: Iterable[trace.RankSilent], moved: list[float]) -> Iterator[list[trace.RankSilent]]:
    """Yield the verdicts on one rank in groups, one group for each silence.

    A silent rank is judged slow at first, then hung.
    """
    group: list[trace.RankSilent] = []
    for event in events:
        if group:
            last = group[-1]
            is_same = (last.step, last.phase, last.microbatches) == (event.step, event.phase, event.microbatches)
            if not is_same or bisect_left(moved, last.t) != bisect_left(moved, event.t):
                yield group
                group = []
        group.append(event)
    if group:
        yield group


def _of_rank(
    history: History,
    rank: RankPlace,
    verdicts: list[trace.RankSilent],
    moved: list[float],
    commits: list[tuple[float, int, int]],
) -> Standstill:
    worst = max(verdicts, key=lambda one: _GRAVITY.index(one.verdict))
    last = verdicts[-1]
    end, lost_in, outcome = _end_of(history, rank, last, moved, commits)
    progress = round(worst.t - (worst.seconds if worst.idle_s is None else worst.idle_s), 6)
    # The agent counts by looks. So this may be up to one look too early for a stop, and up to one
    # look too late for a silence. It is later still if the agent was held up.
    begin = round(min(one.t - one.seconds for one in verdicts), 6)
    return Standstill(
        who=f"replica {rank[0]} rank {rank[1]}", replica=rank[0], rank=rank[1], verdict=worst.verdict,
        begin=max(begin, progress), last_progress=progress, told_at=verdicts[0].t, end=end, outcome=outcome,
        phase=worst.phase, step=worst.step if worst.step >= 0 else None, label=worst.label, microbatches=worst.microbatches,
        state=worst.state, lost_in=lost_in,
        waiting=tuple((each.replica, each.rank, round(worst.t - each.seconds, 6)) for each in worst.waiting),
        log=log_name(*rank), stacks=about_stacks(worst.verdict, worst.state),
    )  # fmt: skip


def _end_of(
    history: History, rank: RankPlace, last: trace.RankSilent, moved: list[float], commits: list[tuple[float, int, int]]
) -> tuple[float | None, int | None, str]:
    """Return the time, the removing generation and the outcome of the end of a silence."""
    index = bisect_left(moved, last.t)
    ends: list[tuple[float, int | None, str]] = []
    if index < len(moved):
        ends.append((moved[index], None, "went on by itself"))
    # A step is not committed without its members: the rank has moved by then, though the trace may
    # lack its event.
    first = bisect_left(commits, (last.t,))
    for t, step, generation in commits[first:]:
        if step >= last.step and rank[0] in history.members.get(generation, ()):
            ends.append((t, None, "went on by itself"))
            break
    for _, event in history.of(trace.Failure):
        if (event.replica, event.rank) == rank and event.t >= last.t and rank[0] not in history.lost_at:
            ends.append((event.t, None, f"ended: {event.cause}"))
    if rank[0] in history.lost_at and (lost := history.lost_at[rank[0]][1]).t >= last.t:
        why = next(one.detail or one.kind.value for one in lost.losses if one.replica == rank[0])
        ends.append((lost.t, lost.generation, f"its replica was fenced in generation {lost.generation} ({why})"))
    end, lost_in, outcome = min(ends, default=(None, None, ""), key=lambda one: one[0])
    for _, aside in history.of(trace.SetAside):
        if (aside.replica, aside.rank) == rank and lost_in is not None:
            wchan = f" in {aside.wchan}" if aside.wchan else ""
            outcome += f"; its process does not end (state {aside.state or 'unknown'}{wchan}) and is waited for no more"
    return (end, lost_in, outcome) if end is not None else (None, None, _at_the_end(history))


def _at_the_end(history: History) -> str:
    """Describe the outcome of a standstill that nothing ended."""
    stopping = history.first(trace.Stopping)
    if stopping is not None:
        return f"nobody was fenced; the run stopped ({stopping.reason})"
    return "nobody was fenced; the run ended" if history.first(trace.RunFinished) else "it still lasts at the end of the trace"


# --- Others ---------------------------------------------------------------------------------------


def _of_leaders(history: History) -> Iterator[Standstill]:
    began: dict[int, trace.LeaderSilent] = {}
    for _, event in history.of(trace.LeaderSilent):
        if event.phase == "began":
            began.setdefault(event.member, event)
        elif (first := began.pop(event.member, None)) is not None:
            yield _of_leader(first, event.t, None, f"answers again after {event.seconds:.1f} s; no replica is removed for that")
    for member, first in began.items():
        lost = history.lost_at.get(member)
        if lost is not None and lost[1].t >= first.t:
            yield _of_leader(first, lost[1].t, lost[1].generation, f"its replica was lost in generation {lost[1].generation}")
        else:
            yield _of_leader(first, None, None, _at_the_end(history))


def _of_leader(first: trace.LeaderSilent, end: float | None, lost_in: int | None, outcome: str) -> Standstill:
    awaited = ", ".join(map(str, first.waiting_for))
    return Standstill(
        who=f"leader of replica {first.member}", replica=first.member, verdict="silent",
        begin=round(first.t - first.seconds, 6), last_progress=round(first.t - first.seconds, 6), told_at=first.t, end=end,
        outcome=outcome,
        phase=f"it had waited for replicas {awaited}" if awaited else "", lost_in=lost_in, log=log_name(first.member, 0),
        stacks="no stacks were asked for",
    )  # fmt: skip


def _of_coordinator(history: History) -> Iterator[Standstill]:
    """Yield each silence of the coordinator once, however many replicas noticed it."""
    noticed: list[trace.CoordinatorSilent] = []
    silent: set[int] = set()
    for _, event in history.of(trace.CoordinatorSilent):
        if event.phase == "began":
            noticed.append(event)
            silent.add(event.replica)
            continue
        silent.discard(event.replica)
        if noticed and not silent:
            yield _of_silent_coordinator(noticed, event.t, "sends again; nothing was done, training needs it only at a failure")
            noticed = []
    if noticed:
        yield _of_silent_coordinator(noticed, None, _at_the_end(history))


def _of_silent_coordinator(noticed: list[trace.CoordinatorSilent], end: float | None, outcome: str) -> Standstill:
    replicas = sorted({event.replica for event in noticed})
    waits = "; ".join(dict.fromkeys(f"replica {event.replica} waits for {event.waits}" for event in noticed if event.waits))
    process = next((f" (pid {event.pid})" for event in noticed if event.pid), "")
    begin = round(min(one.t - one.seconds for one in noticed), 6)
    return Standstill(
        who=f"coordinator{process}", verdict="silent", begin=begin, last_progress=begin,
        told_at=noticed[0].t, end=end, outcome=outcome, state=noticed[-1].state,
        phase=f"noticed by replicas {', '.join(map(str, replicas))}; {waits or 'nobody needed it'}",
    )  # fmt: skip


def _of_job(history: History) -> Iterator[Standstill]:
    """Yield the periods in which the run waited for replicas (`trace.Waiting`)."""
    stops = [event.t for _, event in history.of(trace.Stopping)]
    generations = sorted([one.t for one in history.generations.values()] + stops)
    losses = [one.t for one in history.generations.values() if one.losses]
    steps = sorted([record.t for record in history.records.values()] + losses + stops)
    for _, event in history.of(trace.Waiting):
        # With a limit the job waits for a rank at work, and generations are made meanwhile: a step
        # or a loss ends the wait.
        ends, what = (generations, "generation") if event.limit_s is None else (steps, "step or loss")
        index = bisect_left(ends, event.t)
        end = ends[index] if index < len(ends) else None
        awaited = ", ".join(map(str, event.replicas))
        yield Standstill(
            who=f"the job, for {'replica' if len(event.replicas) == 1 else 'replicas'} {awaited}", verdict="waiting",
            begin=event.t, last_progress=event.t, told_at=event.t, end=end, phase=event.reason,
            outcome=f"over with the next {what}" if end is not None else _at_the_end(history),
        )  # fmt: skip
