"""A run in words: the lines of `megatron-recover run`, each with its time, in the order of time.

The recorder's thread gives the narrator events, the launcher's lines and the ranks' output. The
narrator gives each line to the console, and lines of megatron-recover itself to `launcher.log`. It
never waits, and decides nothing.

Note [Order of lines]. An event has the time of the trace. A line of the launcher has the time at
which the launcher made it. A line that a rank has printed has the time at which the recorder found
it, up to 0.2 s later. Events and lines reach the recorder by different ways. So each is kept for
`HOLD_S` seconds; older lines are shown in the order of their times. A process that stood still, or
was held up while it recorded, may deliver a line even later. Such a line is shown at once, with its
own time. Only the lines wait: the account gets an event as soon as the narrator does. The silence
of a node is shown at once, since a user is to see it within two beats.
"""

from __future__ import annotations

import heapq
import itertools
import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron_recover import trace
from megatron_recover.cluster.status import Seen
from megatron_recover.cluster.streams import Tee
from megatron_recover.core.wording import counted, named, verb
from megatron_recover.deadlines import figure
from megatron_recover.observe.ending import Account
from megatron_recover.observe.follow.members import Members
from megatron_recover.observe.follow.progress import RunProgress

HOLD_S = 0.5
"""Seconds that each line is kept (Note [Order of lines])."""
_MOST_SILENT = 8
"""Silent nodes, and silent leaders, of which each has a line; one more line tells of all others."""
_WORTH_SHOWING = re.compile(
    r"\biteration\s+\d+\s*/|validation loss|saving checkpoint|saved checkpoint|loading checkpoint|nothing was left to train"
)


class _Teed(NamedTuple):
    """A line of a teed output, with its prefix."""

    line: str
    is_error: bool


class _Silence:
    """The lines about peers that are silent: a few of many, since one cut may silence hundreds."""

    def __init__(self, more: str) -> None:
        """`more`: the line that is shown in place of further ones."""
        self._more = more
        self._told: set[int] = set()
        self._untold: set[int] = set()

    def began(self, number: int, text: str) -> Iterable[str]:
        """Yield the line to show for the silence of peer `number`, if any."""
        if len(self._told) < _MOST_SILENT:
            self._told.add(number)
            yield text
            return
        if not self._untold:
            yield self._more
        self._untold.add(number)

    def is_over(self, number: int) -> bool:
        """Forget a peer that is heard again, or lost; return whether that is to be shown."""
        is_untold = number in self._untold
        self._told.discard(number)
        self._untold.discard(number)
        return not is_untold


class Narrator:
    """The writer of a run's lines. One thread uses it."""

    WANTED = frozenset(
        {
            "run_started", "generation", "leave_asked", "leader_silent", "node_joined", "node_silent", "node_lost", "plan",
            "committed", "applied", "fault", "waiting", "checkpoint", "failure", "fenced", "rank_moved", "rank_silent",
            "recovery", "run_finished", *Members.WANTED,
        }
    )  # fmt: skip
    """Names of the events that have an effect here: all that `_event`, `RunProgress.take` or
    `Account.take` name."""

    def __init__(
        self,
        account: Account,
        *,
        began_at: float,
        show: Callable[[str], None],
        log: Callable[[str], None],
        show_error: Callable[[str], None] | None = None,
        roster: tuple[int, ...] = (),
        of_several: bool = False,
    ) -> None:
        """Continue with the `account` and the `roster` of the narrator before, if there was one.

        `began_at`: zero of the trace's clock, in seconds since the epoch. `show(line)` is called
        for every line but those that `end` returns, `log(line)` for each that megatron-recover
        itself makes. Teed lines of stderr go to `show_error(line)`, if that is given. `of_several`:
        the run has several nodes, so the silence of a node is told.
        """
        self.account = account
        self.progress = RunProgress(account.replicas, account.iterations)
        self._began_at, self._show, self._log, self._show_error = began_at, show, log, show_error or show
        self._of_several = of_several
        self._roster = roster or tuple(range(account.replicas))
        """Newest roster in the events so far, which may not be shown yet."""
        self._heap: list[tuple[float, int, trace.AnyEvent | str | _Teed, bool]] = []
        self._numbers = itertools.count()
        self._repairing = 0
        """The newest generation, if it lost a replica and no step is committed since; else 0."""
        self._labels: dict[int, str] = {}
        self._joins_in: tuple[int, str] = (0, "")
        """The newest generation with newcomers, and the label of the first step planned in it."""
        self._refused: set[int] = set()
        """Newcomers of which a refused claim was shown: only the first one is."""
        self._nodes = _Silence("more nodes are silent: `megatron-recover status` with the run directory names all")
        self._leaders = _Silence("the leaders of more replicas have not answered")

    def says(self, text: str, seconds: float) -> None:
        """Add one line of launcher or recorder, made `seconds` after the start of the run."""
        self._push(seconds, text, is_ours=True)

    def take(self, event: trace.AnyEvent) -> None:
        """Add the next event of the run."""
        if isinstance(event, trace.Generation):
            self._roster = event.roster
        self.account.take(event)
        if isinstance(event, trace.NodeSilent):
            self._take_now(event.t, event)
        else:
            self._push(event.t, event, is_ours=True)

    def take_lines(self, lines: Iterable[str], seconds: float) -> None:
        """Add those lines of the writer that are worth showing; they were found at `seconds`."""
        for line in lines:
            if _WORTH_SHOWING.search(line):
                self._push(seconds, line.strip(), is_ours=False)

    def take_teed(self, lines: Iterable[tuple[Tee, str]], seconds: float) -> None:
        """Add all lines of teed outputs; they were found at `seconds`."""
        for tee, line in lines:
            self._push(seconds, _Teed(f"{tee.prefix}{line}", tee.is_error), is_ours=False)

    @property
    def seen(self) -> Seen:
        """Return the state of the run as far as the lines are shown.

        Without a member of the roster here, the events here show no iteration any more.
        """
        account, progress = self.account, self.progress
        is_here = account.here is None or not {*account.here}.isdisjoint(self._roster)
        return Seen(
            progress.num_steps, progress.iteration if is_here else None, progress.num_iterations, account.saved,
            account.checkpoint(), is_here, progress.members.forming,
        )  # fmt: skip

    def is_writer(self, replica: int) -> bool:
        """Return whether a replica is the writer, according to the newest event taken.

        That event may not be shown yet. Before the first generation the roster is all replicas.
        With an empty roster every replica is the writer.
        """
        return replica == min(self._roster, default=replica)

    def tell(self, until: float = float("inf")) -> None:
        """Show everything that happened until then, in seconds after the start of the run."""
        while self._heap and self._heap[0][0] <= until:
            seconds, _, what, is_ours = heapq.heappop(self._heap)
            if isinstance(what, _Teed):
                (self._show_error if what.is_error else self._show)(what.line)
                continue
            if isinstance(what, str):
                self._tell(seconds, what) if is_ours else self._show(what)
                continue
            self._take_now(seconds, what)

    def end(self, exit_code: int, reason: str, seconds: float) -> list[str]:
        """Show the rest, and return the lines about how the run ended.

        Those lines are in the log by then, and the caller shows them.
        """
        self.tell()
        lines = [self._line(seconds, text) for text in self.account.lines(exit_code, reason)]
        for line in lines:
            self._log(line)
        return lines

    def _take_now(self, seconds: float, event: trace.AnyEvent) -> None:
        self.progress.take(event)
        for text in self._event(event):
            self._tell(seconds, text)

    def _push(self, seconds: float, what: trace.AnyEvent | str | _Teed, *, is_ours: bool) -> None:
        heapq.heappush(self._heap, (seconds, next(self._numbers), what, is_ours))

    def _tell(self, seconds: float, text: str) -> None:
        line = self._line(seconds, text)
        self._log(line)
        self._show(line)

    def _line(self, seconds: float, text: str) -> str:
        """Return a line of megatron-recover itself, with its time in Megatron's format."""
        microseconds = round((self._began_at + seconds) * 1e6)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(microseconds // 1_000_000))
        return f"[{when}.{microseconds % 1_000_000:06d}] megatron-recover: {text}"

    def _event(self, event: trace.AnyEvent) -> Iterable[str]:
        match event:
            case trace.Forming() | trace.ClaimRefused() | trace.NewcomerLost() | trace.TurnedAway() | trace.Proven():
                yield from self._of_newcomers(event)
            case trace.Generation():
                self._joins_in = (event.generation, "") if event.newcomers else (0, "")
                for loss in event.losses:
                    self._leaders.is_over(loss.replica)
                self._repairing = event.generation if event.losses else 0
                if event.request is not None:
                    return
                if event.generation > 1 or event.losses:
                    lost = "; ".join(f"replica {loss.replica} lost: {loss.kind.value} {loss.detail}" for loss in event.losses)
                    yield f"generation {event.generation}: {named(event.roster)} ({lost or event.reason})"
                else:
                    yield f"generation {event.generation}: {named(event.roster)}"
            case trace.LeaveAsked():
                if event.replicas:
                    leave = verb(len(event.replicas), "leaves", "leave")
                    yield f"{named(event.replicas)} {leave} after a common step, asked by {event.reason}"
                for one in event.refused:
                    yield f"WARNING: replica {one.replica} does not leave, asked by {event.reason}: {one.why}"
            case trace.LeaderSilent(phase="began"):
                text = f"the leader of replica {event.member} has not answered for {event.seconds:.0f} s"
                yield from self._leaders.began(event.member, text)
            case trace.LeaderSilent():
                self._leaders.is_over(event.member)
            case trace.NodeJoined():
                number = f"{counted(event.slots, 'slot')} {verb(event.slots, 'is', 'are')}"
                yield f"node {event.name} has come late, as node {event.node}: its {number} spare"
            case trace.NodeLost():
                self._nodes.is_over(event.node)
                if not event.replicas:
                    yield f"node {event.node} ({event.name}) is lost, which had no ranks: {event.detail}"
            case trace.NodeSilent() if not self._of_several:
                pass  # the launcher tells of a standstill of its own
            case trace.NodeSilent(phase="began"):
                text = f"node {event.name} is silent: nothing was heard of it for {event.seconds:.1f} s"
                yield from self._nodes.began(event.node, text)
            case trace.NodeSilent():
                if self._nodes.is_over(event.node):
                    yield f"node {event.name} is heard again, after {event.seconds:.1f} s"
            case trace.Plan():
                self._labels[event.step] = event.label
                if self._joins_in == (event.generation, ""):
                    self._joins_in = event.generation, event.label
                self._labels.pop(event.step - 2, None)  # members are at most one step apart
            case trace.Fault():
                where = "".join(
                    f" {name} {value}"
                    for name, value in (("microbatch", event.microbatch), ("bucket", event.bucket))
                    if value is not None
                )
                during = f" during {self._labels[event.step]}" if event.step in self._labels else ""
                yield f"FAULT {event.kind} of replica {event.replica} rank {event.rank} at {event.point}{where}{during}"
            case trace.Waiting():
                limit = f" (excused for {figure(event.limit_s)} s at most, then judged)" if event.limit_s is not None else ""
                yield f"WARNING: waiting for {named(event.replicas)}: {event.reason}{limit}"
            case trace.Checkpoint(phase="failed"):
                yield f"WARNING: {event.detail}"
            case trace.Checkpoint(phase="loaded") if self.is_writer(event.replica):
                where = f"--load {event.detail}"
                yield (
                    f"resumes after iteration {event.iteration} of {where}"
                    if event.iteration
                    else f"begins anew: no checkpoint was loaded from {where}"
                )
            case trace.Recovery(phase="commit", generation=generation) if generation == self._repairing:
                self._repairing = 0  # shown once, for the first leader to report
                label = self._labels.get(event.step, f"step {event.step}")
                yield f"{label} was finished without loss in generation {event.generation}"

    def _of_newcomers(
        self, event: trace.Forming | trace.ClaimRefused | trace.NewcomerLost | trace.TurnedAway | trace.Proven
    ) -> Iterable[str]:
        match event:
            case trace.NewcomerLost(newcomer=newcomer, kind=kind, detail=detail):
                yield f"replica {newcomer} is lost before it has joined: {kind.value} {detail}"
            case trace.Forming(newcomer=newcomer, in_place_of=places, reason=reason):
                where = reason or (f"in the place of {named(places)}" if places else "")
                yield f"replica {newcomer} forms {where}".rstrip()
            case trace.ClaimRefused(newcomer=newcomer, label=label, reason=reason) if newcomer not in self._refused:
                self._refused.add(newcomer)
                yield f"replica {newcomer} does not join in {label}: {reason}; it reads again, as often as needed"
            case trace.TurnedAway(newcomers=newcomers):
                for newcomer in newcomers:
                    yield f"replica {newcomer} is turned away: {event.why(newcomer)}"
            case trace.Proven(newcomers=newcomers, generation=generation):
                number, label = self._joins_in
                where = f"at {label}" if number == generation and label else f"in generation {generation}"
                now = len(self.progress.members.roster)
                join, train = verb(len(newcomers), "joins", "join"), verb(now, "trains", "train")
                yield f"{named(newcomers)} {join} {where}: {counted(now, 'replica')} {train}"
