"""Find the newcomers of a run, what each of them did until it was a member, and what became of it.

The words are those of `megatron-recover check` and of the report's page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec

from megatron_recover import trace
from megatron_recover.core.label import label_of
from megatron_recover.observe.follow.members import Members
from megatron_recover.observe.history import History, Numbered


class JoinSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A newcomer: a replica that was formed while others trained."""

    t: float
    """Seconds since the start of the run, when it began to form."""
    replica: int
    in_place_of: tuple[int, ...] = ()
    """Replicas whose slots it got."""
    reason: str = ""
    freed_s: float | None = None
    """Seconds from the death of the first of these replicas until it began to form: until every
    process of theirs had ended; None if there was none."""
    formed_s: float | None = None
    """Seconds until its world stood; None if it never did."""
    states_read: int = 0
    """Number of states that all or some of its ranks have read."""
    bytes_read: int = 0
    """Bytes of the newest state, over all ranks."""
    read_s: float | None = None
    """Seconds in which the newest state was read, from its first rank's begin to the last one's
    end."""
    reading_s: float | None = None
    """Seconds from the moment at which its world stood until the newest state was read: it waits
    for the begin of a step, reads, and does so again after each refusal."""
    refusals: tuple[str, ...] = ()
    """Reasons why it could not join with what it had read, in order of time."""
    generation: int | None = None
    """The generation in which it became a member; None if it did not."""
    label: str | None = None
    """Its first step; None if the trace has none, or it did not become a member."""
    joined_s: float | None = None
    """Seconds from the begin of its forming until its first step was committed."""
    admitted_s: float | None = None
    """Seconds from the end of the newest reading until then."""
    failed: str = ""
    """Reason why it did not become a member; empty if it did."""

    @property
    def back_s(self) -> float | None:
        """Return the seconds from the death of the replicas whose slots it got to its first commit.

        They are the sum of `freed_s`, `formed_s`, `reading_s` and `admitted_s`.
        """
        return None if self.freed_s is None or self.joined_s is None else self.freed_s + self.joined_s

    @property
    def words(self) -> str:
        """Return a sentence about it."""
        place = f", in the place of replica {' '.join(map(str, self.in_place_of))}," if self.in_place_of else ""
        who = f"replica {self.replica}{place}"
        times = len(self.refusals)
        refused = "" if not times else f", refused {'once' if times == 1 else f'{times} times'}"
        if self.generation is None:
            last = f" (the last time: {self.refusals[-1]})" if self.refusals else ""
            return f"{who} was formed and did not join: {self.failed}{refused}{last}"
        parts = [] if self.formed_s is None else [f"{self.formed_s:.1f} s to form"]
        if self.read_s is not None:
            parts.append(
                f"{self.states_read} state{'s' if self.states_read != 1 else ''} read, the last in {self.read_s:.1f} s"
            )
        took = "" if self.joined_s is None else f" {self.joined_s:.1f} s after it began to form"
        where = f"at {self.label}" if self.label else f"in generation {self.generation}"
        return f"{who} joined {where}{took}{f' ({", ".join(parts)})' if parts else ''}{refused}"


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """Progress of an older member from the begin of a newcomer's forming on."""

    replica: int
    num_steps: int
    """Number of training steps that the member committed until the newcomer was announced."""
    num_microbatches: int
    """Number of microbatches that one of its ranks finished until then. A newcomer may be announced
    in the very step in which it began to form; then these alone show progress."""
    longest_s: float
    """Longest time in which the member finished nothing, until the newcomer's first commit."""
    is_on_time: bool
    """True if the member had committed all steps before the newcomer's first one when the newcomer
    was announced. These are no steps if the newcomer began to form in that very step."""
    is_finished: bool
    """True if the member committed the newcomer's first step, and all later steps of the run. For a
    member that was lost or left, these are the steps until then."""


@dataclass(frozen=True, slots=True)
class Doing:
    """One activity of a newcomer. Times are seconds since the start of the run."""

    kind: Literal["forming", "reading", "asking", "joining"]
    begin: float
    end: float
    text: str


def newcomers(history: History) -> dict[int, trace.Forming]:
    """Return all newcomers of a run, with the event of each; one that lacks it gets one at 0 s."""
    found = {event.newcomer: event for _, event in history.of(trace.Forming)}
    for event in history.generations.values():
        for replica in event.newcomers:
            found.setdefault(replica, trace.Forming(newcomer=replica))
    return dict(sorted(found.items()))


def joins(history: History) -> tuple[JoinSummary, ...]:
    """Return all newcomers, in the order of their ids."""
    greeted = {event.replica: event.t for _, event in history.of(trace.Joined)}
    read = _read(history)
    refusals: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for _, event in history.of(trace.ClaimRefused):
        refusals[event.newcomer].append((event.t, event.reason))
    for _, turned in history.of(trace.TurnedAway):
        for replica in turned.newcomers:
            refusals[replica].append((turned.t, turned.why(replica)))
    proven = {replica: event for _, event in history.of(trace.Proven) for replica in event.newcomers}
    found = []
    for replica, forming in newcomers(history).items():
        states = read.get(replica, [])
        joined = proven.get(replica)
        died = min((t for each in forming.in_place_of if (t := died_at(history, each)) is not None), default=None)
        read_at = states[-1][2] if states else None
        step = history.first_step(joined.generation) if joined is not None else None
        found.append(
            JoinSummary(
                t=forming.t, replica=replica, in_place_of=forming.in_place_of, reason=forming.reason,
                freed_s=_seconds(died, forming.t), formed_s=_seconds(forming.t, greeted.get(replica)),
                states_read=len(states), bytes_read=states[-1][3] if states else 0,
                read_s=_seconds(states[-1][1], read_at) if states else None, reading_s=_seconds(greeted.get(replica), read_at),
                refusals=tuple(reason for _, reason in sorted(refusals[replica])),
                generation=joined.generation if joined is not None else None, label=history.label(step),
                joined_s=_seconds(forming.t, joined.t) if joined is not None else None,
                admitted_s=_seconds(read_at, joined.t) if joined is not None else None,
                failed="" if joined is not None else _why_not(history, replica),
            )
        )  # fmt: skip
    return tuple(found)


def _seconds(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(end - begin, 6)


def meanwhile(history: History, one: JoinSummary) -> tuple[Meanwhile, ...]:
    """Return the progress of each older member while a newcomer formed, read and joined.

    Older members were members before the generation in which the newcomer joined. Return nothing
    for a newcomer that did not become a member. Reads the trace once more.
    """
    if one.generation is None or one.joined_s is None:
        return ()
    older = sorted({*history.roster(one.generation)} - history.newcomers(one.generation))
    commits: dict[int, dict[int, float]] = {replica: {} for replica in older}
    finished: dict[int, dict[tuple[int, int], float]] = {replica: {} for replica in older}
    for _, event in history.events:
        if isinstance(event, trace.Committed) and event.replica in commits:
            commits[event.replica].setdefault(event.step, event.t)
        elif isinstance(event, trace.MicrobatchFinished) and event.replica in finished and event.t > one.t:
            finished[event.replica].setdefault((event.step, event.microbatch), event.t)
    announced, first = history.generations[one.generation].t, history.first_step(one.generation)
    planned = ((step, facts.planned_at) for step, facts in history.steps.items())
    running = max((step for step, t in planned if t is not None and t <= one.t), default=0)
    return tuple(
        Meanwhile(
            replica=replica,
            num_steps=sum(
                one.t < t < announced and label_of(history.label(step) or "").is_training
                for step, t in commits[replica].items()
            ),
            num_microbatches=sum(t < announced for t in finished[replica].values()),
            longest_s=_longest_s(one.t, first, commits[replica], sorted(finished[replica].values()), history.seconds),
            is_on_time=all(
                commits[replica].get(step, announced) < announced
                for step in range(max(running, min(commits[replica], default=0)), first or 0)
            ),
            is_finished=_is_finished(history, replica, first, commits[replica]),
        )
        for replica in older
    )


def _longest_s(begin: float, first: int | None, commits: Mapping[int, float], finished: Sequence[float], end: float) -> float:
    """Return the longest time in which a member finished nothing, in seconds.

    The time counts from `begin` to the member's commit of the step `first`; to `end` if there is
    none. A member that was a newcomer itself at `begin` counts from its own first commit.
    """
    end = commits.get(first, end) if first is not None else end
    if not any(t <= begin for t in commits.values()):
        begin = min(commits.values(), default=begin)
    times = [begin, *sorted(t for t in (*commits.values(), *finished) if begin < t < end), end]
    return max(after - before for before, after in pairwise(times))


def _is_finished(history: History, replica: int, first: int | None, commits: Mapping[int, float]) -> bool:
    """Return whether a member committed all steps from `first` to its end, or that of the run."""
    last = history.last_committed.get(replica) if replica in history.gone_at else history.last_step
    return first is not None and last is not None and first <= last and all(step in commits for step in range(first, last + 1))


def died_at(history: History, replica: int) -> float | None:
    """Return when a replica died: its newest fault, else the first sign; None if it lives."""
    end = ended_at(history, replica)
    struck = [fault.t for fault in history.strikes if fault.replica == replica and end is not None and fault.t <= end]
    return struck[-1] if struck else end


def _read(history: History) -> dict[int, list[tuple[str, float, float, int]]]:
    """Return the states that each newcomer has read: label, begin, end, bytes over all ranks."""
    found: dict[int, dict[str, tuple[float, float, int]]] = defaultdict(dict)
    for _, event in history.of(trace.StateRead):
        begin, end, num_bytes = found[event.replica].get(event.label, (event.t - event.seconds, event.t, 0))
        found[event.replica][event.label] = (
            min(begin, event.t - event.seconds), max(end, event.t), num_bytes + event.num_bytes,
        )  # fmt: skip
    return {replica: [(label, *read) for label, read in of.items()] for replica, of in found.items()}


def ended_at(history: History, replica: int) -> float | None:
    """Return when a replica was lost, has left or ended; None if it lived to the end."""
    times = [history.gone_at[replica][1].t] if replica in history.gone_at else []
    times += [event.t for _, event in history.of(trace.Failure) if event.replica == replica]
    times += [event.t for _, event in history.of(trace.Fenced) if event.replica == replica]
    return min(times, default=None)


def _why_not(history: History, replica: int) -> str:
    lost = history.lost_at.get(replica)
    if lost is not None:
        [detail] = [f"{loss.kind.value} {loss.detail}".strip() for loss in lost[1].losses if loss.replica == replica]
        return f"it was lost ({detail})"
    if lost_outside := [event for _, event in history.of(trace.NewcomerLost) if event.newcomer == replica]:
        return f"it was lost ({lost_outside[0].kind.value} {lost_outside[0].detail})"
    causes = [event.cause for _, event in history.of(trace.Failure) if event.replica == replica]
    if causes:
        return f"it ended ({causes[0]})"
    fenced = [event.t for _, event in history.of(trace.Fenced) if event.replica == replica]
    last = max((record.t for record in history.records.values()), default=0.0)
    return "it was lost" if fenced and min(fenced) < last else "the run ended before"


def doings(history: History) -> dict[int, list[Doing]]:
    """Return what each newcomer did until it was a member, in the order of time."""
    found: dict[int, list[Doing]] = {}
    greeted = {event.replica: event.t for _, event in history.of(trace.Joined)}
    read = _read(history)
    for replica, forming in newcomers(history).items():
        until = ended_at(history, replica)
        end = history.seconds if until is None else until
        mine = [Doing("forming", forming.t, greeted.get(replica, end), "its world forms")]
        mine += [Doing("reading", begin, to, f"it reads the state of {label}") for label, begin, to, _ in read.get(replica, ())]
        announced = [event for event in history.generations.values() if replica in event.newcomers]
        answers = [event.t for _, event in history.of(trace.ClaimRefused) if event.newcomer == replica]
        answers += [event.t for event in announced]
        for _, claim in history.of(trace.Claimed):
            if claim.replica == replica:
                answer = min((t for t in answers if t >= claim.t), default=end)
                mine.append(
                    Doing("asking", claim.t, answer, f"it asks replica {claim.member}, with the state of {claim.label}")
                )
        judged = [event.t for _, event in history.of(trace.TurnedAway) if replica in event.newcomers]
        judged += [event.t for _, event in history.of(trace.Proven) if replica in event.newcomers]
        newer = [event.t for event in history.generations.values()]
        for event in announced:
            over = min((t for t in (*judged, *newer) if t > event.t), default=end)
            mine.append(Doing("joining", event.t, over, f"it is announced in generation {event.generation}"))
        found[replica] = [one for one in sorted(mine, key=lambda one: one.begin) if one.begin < one.end]
    return found


def sizes(history: History) -> list[tuple[float, int]]:
    """Return the times at which the number of members may have changed, each with the number.

    A newcomer counts from the moment at which it is proven. Each generation has an entry.
    """
    members = Members()
    found: list[tuple[float, int]] = []
    events: list[Numbered] = [*history.of(trace.Generation), *history.of(trace.TurnedAway), *history.of(trace.Proven)]
    for _, event in sorted(events, key=lambda one: one[0]):
        members.take(event)
        if isinstance(event, trace.Generation | trace.Proven):
            found.append((event.t, len(members.roster)))
    return found
