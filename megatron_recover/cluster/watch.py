"""The watch over a node's ranks: their progress pages, process states and deaths.

This module joins the pages (`progress_page.py`), `/proc` and the machine of `core/detector.py`. It
reports its findings to people, to the trace and to the launcher. It decides nothing about
membership: the launcher gives the findings to the coordinator.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_recover import trace
from megatron_recover.cluster.node import Node, ProcessEnd
from megatron_recover.cluster.other_nodes import OtherNodes
from megatron_recover.cluster.out_of_memory import OomKills
from megatron_recover.control_plane.node_messages import ReplicaGone
from megatron_recover.core import detector
from megatron_recover.core.detector_state import DetectorState, Limits, Watched
from megatron_recover.core.membership_messages import Loss, LossKind, ReplicaFailing
from megatron_recover.core.policy import first_to_die, loss_of, uncharged_abort
from megatron_recover.core.progress import COMPUTES, WAITS, Phase
from megatron_recover.core.verdict import Condemned, Look, Named, PartSeen, SeenAtWork, Sight, Suspects, Verdict
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.observe.standstills import about_stacks


class Watch:
    """The watch over the ranks of one node. The thread of the node uses it."""

    def __init__(
        self,
        node: Node,
        *,
        deadlines: Deadlines,
        log_of: Callable[[int, int], Path],
        record: Callable[[trace.Event], None],
        says: Callable[[str], None],
        at_work: Callable[[tuple[int, ...]], None],
        others: OtherNodes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch `node` within the limits of `deadlines`.

        `log_of(replica, rank)` returns the path of a rank's log. `says(line)` shows a line to
        people. `at_work(replicas)` is called with the replicas that are at work of their own, on
        each change. `others`: the other nodes of the job; None: there are none.
        """
        self._log_of = log_of
        self._node, self._record, self._says, self._clock = node, record, says, clock
        self._at_work, self._others = at_work, others
        self._deadline_s, self._stacks_s = deadlines.deadline_s, deadlines.stacks_s
        limits = Limits(deadlines.deadline_s, deadlines.gap_s, deadlines.stopped_s, deadlines.hung_s, deadlines.after_work_s)
        self._state, self._newcomers = DetectorState(limits), DetectorState(limits)
        self._writing: dict[int, tuple[Condemned, float]] = {}
        """Replicas to fence once their ranks have written their stacks, and the time limit of that
        wait."""
        self._condemned: dict[int, Named] = {}
        """Replica -> the rank for which it was condemned."""
        self._oom_kills = OomKills()
        self._ranks: list[tuple[int, int]] = []

    def watches(self, replica: int, rank: int) -> None:
        """Watch a rank that was started."""
        self._ranks.append((replica, rank))
        self._oom_kills.watch(self._node.pid(replica, rank), self._clock())

    def look(
        self, generation: int, replicas: Collection[int], newcomers: Collection[int] = ()
    ) -> list[tuple[Loss, ReplicaFailing | None]]:
        """Judge the ranks of `replicas`, and those of `newcomers`. Call it after every node poll.

        A newcomer is judged by other rules until it is in the roster (`core/detector.py`, Note
        [Newcomers]). Returns the replicas that are condemned and ready to be fenced. A replica is
        condemned for a rank that hangs, is stopped, or is traced beyond the deadline. A replica is
        ready once its ranks have written their stacks, or the time for that is over. Each replica
        comes with the microbatches that the silence is charged to, if any.
        """
        now_s = self._clock()
        self._oom_kills.look(now_s)
        before = self._known()
        others = self._others.take() if self._others is not None else None
        self._state, of_members = detector.step(self._state, Look(now_s, generation, self._sights(replicas), others))
        forming = Look(now_s, _FORMING, self._sights(newcomers), are_newcomers=True)
        self._newcomers, of_newcomers = detector.step(self._newcomers, forming)
        effects = (*of_members, *of_newcomers)
        for (replica, rank), watched in self._known().items():
            if not watched.told and (replica, rank) in before and before[replica, rank].told:
                self._record(trace.RankMoved(replica=replica, rank=rank, step=watched.progress.step))
        condemned = {effect.named.replica for effect in effects if isinstance(effect, Condemned)}
        for effect in effects:
            if isinstance(effect, Named):
                self._name(effect, is_waited_for=effect.replica not in condemned | self._writing.keys())
            elif isinstance(effect, SeenAtWork):
                self._at_work(effect.replicas)
            elif isinstance(effect, Suspects | PartSeen):
                assert self._others is not None
                self._others.report(effect)
            else:
                self._node.ask_for_stacks(effect.named.replica, of_all_threads=True)
                self._writing[effect.named.replica] = (effect, now_s + self._stacks_s)
        return [self._fence(replica, now_s) for replica in self._due({*replicas, *newcomers}, now_s)]

    def _sights(self, replicas: Collection[int]) -> tuple[Sight, ...]:
        return tuple(
            Sight(replica, rank, self._node.page(replica, rank), self._node.state(replica, rank, at_the_poll=True))
            for replica, rank in self._ranks
            if replica in replicas
        )

    def _known(self) -> Mapping[tuple[int, int], Watched]:
        return {**self._state.ranks, **self._newcomers.ranks}

    def _name(self, named: Named, *, is_waited_for: bool) -> None:
        """Report a finding on a rank to the trace, and to people unless the rank is only slow.

        `is_waited_for`: the rank's replica is not about to be fenced. Unless the rank is only slow,
        the training threads of the replica's ranks are then requested to write their stacks.
        """
        self._record(
            trace.RankSilent(
                replica=named.replica,
                rank=named.rank,
                verdict=named.verdict.value,  # type: ignore[arg-type]  # the values of the enum are those words
                phase=named.phase.name.lower(),
                seconds=round(named.seconds, 3),
                idle_s=self._idle_s(named),
                step=named.step,
                label=named.label,
                microbatches=named.microbatches,
                state=named.state,
                waiting=self._waiting(named.seconds / 2),
            )  # fmt: skip
        )
        if named.verdict is Verdict.SLOW:
            return
        if is_waited_for:
            self._node.ask_for_stacks(named.replica, of_all_threads=False)
        text = f"replica {named.replica}, {named}; {about_stacks(named.verdict.value, named.state)}"
        text += f" ({self._log_of(named.replica, named.rank)})"
        if named.verdict is Verdict.TRACED and (tracer := self._node.tracer(named.replica, named.rank)):
            text += f"; it continues when {tracer} releases it"
        if is_waited_for:
            left_s = max(0.0, self._deadline_s - named.seconds)
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + left_s))
            text += (
                f". It is waited for until {until} at the latest (--recover-deadline-s {self._deadline_s:g}); "
                f"`kill -9 {self._node.pid(named.replica, named.rank)}` ends its replica now"
            )
        self._says(text)

    def _idle_s(self, named: Named) -> float | None:
        watched = self._known().get((named.replica, named.rank))
        return None if watched is None else round(max(0.0, self._clock() - watched.progress.since_ns / 1e9), 3)

    def _waiting(self, least_s: float) -> tuple[trace.WaitingRank, ...]:
        """Return ranks that have waited for others for `least_s` seconds, longest first.

        Return at most `_MOST_WAITING`, and none that was reported as silent.
        """
        found = [
            (watched.silent_s, replica, rank, watched.progress.phase)
            for (replica, rank), watched in self._state.ranks.items()
            if (watched.progress.phase in WAITS or watched.is_kept) and watched.silent_s >= least_s and not watched.told
        ]
        return tuple(
            trace.WaitingRank(replica=replica, rank=rank, phase=phase.name.lower(), seconds=round(silent_s, 3))
            for silent_s, replica, rank, phase in heapq.nlargest(_MOST_WAITING, found)
        )

    def _due(self, replicas: Collection[int], now_s: float) -> list[int]:
        """Return the condemned replicas whose stacks are written, or whose time for that is over.

        Forget condemned replicas that are gone anyway.
        """
        for replica in self._writing.keys() - set(replicas):
            del self._writing[replica]
        return [
            replica
            for replica, (_, until_s) in self._writing.items()
            if self._node.have_written_stacks(replica) or now_s >= until_s
        ]

    def gone(self, loss: Loss, failing: ReplicaFailing | None, rank: int | None = None) -> ReplicaGone:
        """Return the report of a loss. `rank`: the rank whose end has caused it, if one did."""
        if (named := self._condemned.get(loss.replica)) is None:
            return ReplicaGone(loss, failing, rank)
        return ReplicaGone(loss, failing, named.rank, named.verdict in (Verdict.STOPPED, Verdict.TRACED))

    def _fence(self, replica: int, now_s: float) -> tuple[Loss, ReplicaFailing | None]:
        condemned, until_s = self._writing.pop(replica)
        self._condemned[replica] = condemned.named
        detail = str(condemned.named)
        if now_s >= until_s and not self._node.have_written_stacks(replica):
            detail += f"; not all of its ranks wrote their stacks within {figure(self._stacks_s)} s"
        return Loss(replica, LossKind.HUNG, detail), condemned.failing

    def loss(
        self, end: ProcessEnd, *, started: bool, said: Callable[[], str] = lambda: ""
    ) -> tuple[Loss, ReplicaFailing | None]:
        """Return how a replica is lost by the first end of a rank, and the failure charged for it.

        The failure names the microbatches that the end is charged to (INV-9); None if there are
        none. `started`: generation 1 has been made. `said()` returns the newest output of the rank.

        A rank of a condemned replica may die from the request for its stacks (`rank_process`, Note
        [Stacks]). The replica is then lost as hung, as if that rank had not died.
        """
        if end.replica in self._writing:
            condemned, _ = self._writing[end.replica]
            self._condemned[end.replica] = condemned.named
            detail = f"{condemned.named}; rank {end.rank} ended by {end.cause} before it was fenced"
            return Loss(end.replica, LossKind.HUNG, detail), condemned.failing
        pid = self._node.pid(end.replica, end.rank)
        out_of_memory = end.status == -_SIGKILL and self._oom_kills.rose(pid, self._clock())
        kind = loss_of(end.status, started=started, out_of_memory=out_of_memory)
        detail = f"rank {end.rank}: {end.cause}"
        if out_of_memory:
            detail += ", by the kernel, which was out of memory"
        if kind is LossKind.EXCEPTION and (error := exception_in(said())):
            detail += f" ({error})"
        if innocent := uncharged_abort(end.status, said()):
            detail += f", as {innocent}"
        progress = self._node.page(end.replica, end.rank)
        if kind is not LossKind.CRASHED or innocent or progress is None:
            return Loss(end.replica, kind, detail), None
        # In other phases the page may still name a microbatch whose work the device has not
        # finished.
        in_work = progress.microbatches if progress.phase in _OF_A_MICROBATCH else ()
        # Nobody knows which thread has caused the signal. So both microbatches are charged, and the
        # one that two deaths have in common counts (`trainer/read_ahead.py`).
        charged = in_work if progress.ahead is None else tuple(dict.fromkeys((*in_work, progress.ahead)))
        if not charged:
            return Loss(end.replica, kind, detail), None
        if in_work:
            detail += (
                f", with microbatch {', '.join(map(str, in_work))} of {progress.label} in work ({progress.phase.name.lower()})"
            )
        if progress.ahead is not None:
            detail += f", while it read the samples of microbatch {progress.ahead} of {progress.label}"
        return Loss(end.replica, kind, detail), ReplicaFailing(end.replica, progress.label, charged, detail, witnessed=True)


_SIGKILL = 9
_FORMING = 1
"""The generation of the detector for newcomers: in generation 0 it would leave out hangs."""
_OF_A_MICROBATCH = COMPUTES | {Phase.DATA, Phase.COMPILING, Phase.PIPELINE}
"""Phases in which a microbatch in work is charged with a crash. On a device that runs behind the
process, this includes the phases between two computations."""
_MOST_WAITING = 64
"""Maximum of waiting ranks that an event lists: in a large job all others may wait for one rank."""


def exception_in(text: str) -> str:
    """Return the exception that ends the last traceback in `text`, in its first line.

    Empty if `text` has no traceback.
    """
    _, found, traceback = text.rpartition("Traceback (most recent call last):\n")
    lines = traceback.splitlines() if found else []
    return next((line.strip()[: trace.MAX_REASON] for line in lines if line.strip() and not line.startswith(" ")), "")


def explaining_first(ends: Sequence[ProcessEnd]) -> Iterable[ProcessEnd]:
    """Yield ends that were seen in one look, ordered for each replica.

    The end that explains the replica's other ends comes first.
    """
    for replica in dict.fromkeys(end.replica for end in ends):
        mine = [end for end in ends if end.replica == replica]
        first = first_to_die([end.status for end in mine])
        yield mine[first]
        yield from (end for index, end in enumerate(mine) if index != first)
