"""Lay out the picture of an episode: a lane for each rank, bars for its work, lines for events.

Like `charts` this module places things and leaves things out; it does not decide how they look. A
picture stays small for runs of any size: some ranks represent all, and above `MAX_BARS` bars of
work, narrow neighbours are drawn as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_recover import trace
from megatron_recover.observe.history import History
from megatron_recover.observe.joins import Doing, doings, ended_at
from megatron_recover.observe.report import charts
from megatron_recover.observe.report.timeline import Episode, Span, Still, Timeline, within

MAX_LANES = 24
MIN_REPLICAS = 6
"""Number of replicas that are shown at least, if there are as many. With many ranks only a part of
the ranks of each is shown."""
MAX_BARS = 1500
WIDE = 2.4
"""Smallest width of a bar with room for its number, in percent. The picture is at least 40rem
wide."""


@dataclass(frozen=True)
class Bar:
    """A span in percent of the picture's width."""

    kind: str
    """Style, for example a span's kind; `busy`: several kinds are drawn as one."""
    at: float
    width: float
    text: str
    label: str = ""
    """Text on the bar, if there is room."""
    count: int = 1


@dataclass(frozen=True)
class Row:
    """The work of one rank."""

    name: str
    computing: tuple[Bar, ...]
    reducing: tuple[Bar, ...]
    frozen: tuple[Bar, ...]
    """Periods in which an injected fault had stopped the process and no `stopped` standstill shows
    it."""
    still: tuple[Bar, ...]
    """Periods of standstill, and of waiting for another rank that showed no progress."""
    gone: float | None
    """Place at which the process ended."""
    struck: tuple[float, ...]
    """Places at which faults struck the rank."""


@dataclass(frozen=True)
class ReplicaRows:
    """A replica: the phases of its recovery, and its ranks."""

    name: str
    phases: tuple[Bar, ...]
    lanes: tuple[Row, ...]
    is_lost: bool


@dataclass(frozen=True)
class Picture:
    """An episode as it is drawn."""

    about: str
    groups: tuple[ReplicaRows, ...]
    marks: tuple[charts.Mark, ...]
    ticks: tuple[charts.Tick, ...]
    x_label: str
    num_shown: int
    num_ranks: int
    is_coarse: bool
    """True if several bars were drawn as one."""

    @property
    def tops(self) -> tuple[int, ...]:
        """Return the top of each group, and the end of the last, in pixels.

        The groups are below the names of the lines. Each has a row for its phases.
        """
        tops, top = [], 22 + 18 * max((mark.row for mark in self.marks), default=0)
        for group in self.groups:
            tops.append(top)
            top += 22 + 24 * len(group.lanes) + 6
        return (*tops, top)

    @property
    def height(self) -> int:
        """Return the height in pixels."""
        return self.tops[-1]


def picture(history: History, timeline: Timeline, episode: Episode) -> Picture:
    """Return the picture of an episode.

    Above `MAX_BARS` bars of computing and reducing, narrow neighbours become one, and wider ones
    too, until at most so many are left.
    """
    chosen, num_ranks = _chosen(history, timeline, episode)
    x = charts.Scale(episode.begin_shown, episode.end_shown)
    groups = tuple(_group(timeline, episode, x, replica, ranks) for replica, ranks in chosen.items())
    room = 0.0
    while sum(len(lane.computing) + len(lane.reducing) for group in groups for lane in group.lanes) > MAX_BARS:
        room = 2 * room or 0.1
        groups = tuple(_coarser(group, room) for group in groups)
    what = "the loss of " + ", ".join(f"replica {replica}" for replica in episode.lost) if episode.lost else "the fault"
    unit, per = ("ms", 1e3) if episode.end - episode.fault < 10 else ("s", 1.0)
    relative = charts.Scale(per * (episode.begin_shown - episode.fault), per * (episode.end_shown - episode.fault))
    return Picture(
        about=f"What each rank did around {what}: {(episode.end - episode.fault) * 1e3:.0f} ms from the fault to the commit.",
        groups=groups, marks=_marks(history, episode, x), ticks=charts.ticks(relative, 9), x_label=f"{unit} since the fault",
        num_shown=sum(len(ranks) for ranks in chosen.values()), num_ranks=num_ranks, is_coarse=room > 0,
    )  # fmt: skip


def _chosen(history: History, timeline: Timeline, episode: Episode) -> tuple[dict[int, list[int]], int]:
    """Return the ranks that are shown of each replica, and the number of all ranks.

    If not all replicas are shown, those that were lost or struck are preferred, then those that
    computed lost microbatches again. Of the ranks of a replica, those that faults struck are
    preferred.
    """
    before = [one for one in history.generations.values() if one.t <= episode.fault]
    members = sorted({member for one in (*before[-1:], *episode.generations) for member in one.roster} | {*episode.lost})
    members += [
        replica for replica, mine in timeline.joining.items() if replica not in members
        and any(one.begin < episode.end_shown and one.end > episode.begin_shown for one in mine)
    ]  # fmt: skip
    started = history.first(trace.RunStarted)
    known = {rank for _, rank in timeline.computing}
    num_ranks = max(started.layout.num_ranks if started else 0, max(known, default=0) + 1)
    most = max(MIN_REPLICAS, MAX_LANES // num_ranks)
    newer = {one.generation for one in episode.generations}
    helpers = {
        replica for (replica, _), spans in timeline.computing.items()
        if any(span.is_again and span.generation in newer for span in spans)
    }  # fmt: skip
    struck = {
        replica for (replica, _), times in timeline.struck_at.items()
        if any(episode.begin_shown <= t <= episode.end_shown for t in times)
    }  # fmt: skip
    shown = sorted(sorted(members, key=lambda one: (one not in {*episode.lost, *struck}, one not in helpers))[:most])
    each = max(1, MAX_LANES // max(1, len(shown)))
    chosen = {}
    for replica in shown:
        first = [rank for (of, rank) in timeline.struck_at if of == replica]
        known_ranks = range(num_ranks if timeline.rank_limit is None else min(num_ranks, timeline.rank_limit))
        chosen[replica] = sorted([*first, *(rank for rank in known_ranks if rank not in first)][:each])
    return chosen, num_ranks * len(members)


def _group(timeline: Timeline, episode: Episode, x: charts.Scale, replica: int, ranks: Sequence[int]) -> ReplicaRows:
    phases = within(timeline.recovering.get(replica, ()), x.low, x.high)
    joining = [one for one in timeline.joining.get(replica, ()) if one.begin < x.high and one.end > x.low]
    lanes = []
    for rank in ranks:
        place = (replica, rank)
        gone = timeline.gone_at.get(place)
        still = [one for one in timeline.still.get(place, ()) if one.begin < x.high and one.end > x.low]
        frozen = [
            (max(begin, x.low), min(end, x.high)) for begin, end in timeline.frozen.get(place, ())
            if not any(one.kind == "stopped" and one.begin < end and one.end > begin for one in still)
        ]  # fmt: skip
        lanes.append(
            Row(
                f"rank {rank}",
                tuple(_bar(x, span) for span in within(timeline.computing.get(place, ()), x.low, x.high)),
                tuple(_bar(x, span) for span in within(timeline.reducing.get(place, ()), x.low, x.high)),
                tuple(
                    Bar("frozen", x.at(begin), round(x.at(end) - x.at(begin), 3), "the process is stopped")
                    for begin, end in frozen
                    if begin < end
                ),
                tuple(_still(x, one) for one in still),
                gone=x.at(gone) if gone is not None and gone <= x.high else None,
                struck=tuple(x.at(at) for at in timeline.struck_at.get(place, ()) if x.low <= at <= x.high),
            )
        )
    is_lost = replica in episode.lost
    bars = (*(_bar(x, span, 10.0) for span in phases), *(_doing(x, one) for one in joining))
    return ReplicaRows(f"replica {replica}", bars, tuple(lanes), is_lost)


def _still(x: charts.Scale, one: Still) -> Bar:
    at = x.at(max(one.begin, x.low))
    width = round(x.at(min(one.end, x.high)) - at, 3)
    fits = [label for label in (one.text.partition(",")[0], one.kind) if width >= 0.45 * WIDE * len(label)]
    return Bar(f"still {one.kind}", at, width, f"{one.text}, {one.end - one.begin:.2f} s", fits[0] if fits else "")


def _bar(x: charts.Scale, span: Span, wide: float = WIDE) -> Bar:
    at, width = x.at(span.begin), round(x.at(span.end) - x.at(span.begin), 3)
    length = f"{1000 * (span.end - span.begin):.1f} ms"
    if span.number is None:
        return Bar(span.kind, at, width, f"{span.kind}, {length}", span.kind if width >= wide else "")
    if span.kind == "reduce":
        return Bar(span.kind, at, width, f"sum of bucket {span.number} in generation {span.generation}, {length}")
    kind = span.kind + (" lost" if span.is_lost else " again" if span.is_again else "")
    what = f"{span.kind} of microbatch {span.number}" + (f", chunk {span.chunk}" if span.chunk else "")
    what += ", computed again" if span.is_again else ""
    what += "; its backward never ended" if span.is_lost else f", {length}"
    label = f"{'↻' if span.is_again else ''}{span.number}"
    return Bar(kind, at, width, what, label if width >= wide * max(1.0, 0.4 * len(label)) else "")


def newcomers_picture(history: History) -> Picture | None:
    """Return what each newcomer did until it was a member; None without any.

    The time is that of the chart of members: from the first generation to the end. Of more than
    `MAX_LANES` newcomers the first ones are drawn.
    """
    found = doings(history)
    if not found:
        return None
    shown = dict(list(found.items())[:MAX_LANES])
    x = charts.Scale(min((one.t for one in history.generations.values()), default=0.0), history.seconds)
    groups = tuple(
        ReplicaRows(f"replica {replica}", tuple(_doing(x, one) for one in mine), (), ended_at(history, replica) is not None)
        for replica, mine in shown.items()
    )
    events = list(history.generations.values())[1:]
    marks = [(one.t, f"generation {one.generation}", one.reason) for one in events if one.losses or one.newcomers]
    rows = charts.rows([x.at(t) for t, _, _ in marks], room=14.0) if len(marks) <= MAX_LANES else []
    return Picture(
        about=f"What newcomers did until they were members: {len(shown)} of {len(found)}.", groups=groups,
        marks=tuple(charts.Mark(x.at(t), name, text, row) for (t, name, text), row in zip(marks, rows, strict=False)),
        ticks=charts.ticks(x, 9), x_label="s since the start of the run", num_shown=len(shown), num_ranks=len(found),
        is_coarse=False,
    )  # fmt: skip


def _doing(x: charts.Scale, one: Doing) -> Bar:
    at = x.at(one.begin)
    width = round(x.at(one.end) - at, 3)
    label = one.kind if width >= 0.45 * WIDE * len(one.kind) else ""
    return Bar(one.kind, at, width, f"{one.text}, {one.end - one.begin:.2f} s", label)


def _marks(history: History, episode: Episode, x: charts.Scale) -> tuple[charts.Mark, ...]:
    """Return the vertical lines of the drawn period.

    These are the first fault and the generations of the episode, the first commit of its step, from
    which on the result is fixed, and the waits of the run.
    """
    found = [(episode.fault, "fault", "the fault")]
    found += [(one.t, f"generation {one.generation}", one.reason) for one in episode.generations]
    found += [(event.t, "waits", event.reason) for _, event in history.of(trace.Waiting)]
    record = history.records.get(episode.step) if episode.step is not None else None
    if record is not None:
        found.append((record.t, "commit", f"{record.label} is committed"))
    found = sorted(one for one in found if x.low <= one[0] <= x.high)
    rows = charts.rows([x.at(t) for t, _, _ in found], room=14.0)
    return tuple(charts.Mark(x.at(t), name, text, row) for (t, name, text), row in zip(found, rows, strict=True))


def _coarser(group: ReplicaRows, room: float) -> ReplicaRows:
    lanes = (
        replace(lane, computing=_joined(lane.computing, room), reducing=_joined(lane.reducing, room)) for lane in group.lanes
    )
    return replace(group, lanes=tuple(lanes))


def _joined(bars: Iterable[Bar], room: float) -> tuple[Bar, ...]:
    """Join neighbours that are all narrower than `room` percent and no farther apart than that."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if last and max(last.width, bar.width, bar.at - last.at - last.width) < room:
            kind, count = last.kind if last.kind == bar.kind else "busy", last.count + bar.count
            width = round(max(bar.at + bar.width - last.at, last.width), 3)
            found[-1] = Bar(kind, last.at, width, f"{count} times {_verb(kind)}", count=count)
        else:
            found.append(bar)
    return tuple(found)


def _verb(kind: str) -> str:
    return "forward or backward" if kind == "busy" else kind.replace("reduce", "sum of a bucket")
