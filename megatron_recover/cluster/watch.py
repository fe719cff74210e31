"""The agent's eye on its ranks: their progress pages, process states and deaths, and what is to be said of them.

Joins the pages (`progress_page.py`), `/proc` and the machine of `core/detector.py`. It decides nothing about membership: the
launcher feeds what is found here to the coordinator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from megatron_recover import trace
from megatron_recover.cluster.agent import Agent, End
from megatron_recover.cluster.out_of_memory import OomKills
from megatron_recover.core import detector
from megatron_recover.core.policy import first_to_die, loss_of
from megatron_recover.core.values import Failing, Loss, LossKind
from megatron_recover.progress_page import DESCRIPTOR, PageReader


class Watch:
    """Watches the ranks of one agent. Used by the agent's thread."""

    def __init__(
        self,
        agent: Agent,
        *,
        deadline_s: float,
        record: Callable[[trace.Event], None],
        says: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s`: the user's one deadline. `says(line)` tells people."""
        self._agent, self._record, self._says, self._clock = agent, record, says, clock
        self._state = detector.DetectorState(deadline_s)
        self._writing: dict[int, tuple[detector.Condemned, float]] = {}
        """Replicas that are to be fenced when their ranks have written their stacks, and until when that is waited for."""
        self._oom_kills = OomKills()
        self._pages: dict[tuple[int, int], PageReader] = {}

    def spawn(self, replica: int, rank: int, start: Callable[[dict[str, int]], None]) -> None:
        """Start a rank by `start(descriptors)` with a progress page, and watch it."""
        page = self._pages[replica, rank] = PageReader(f"progress-{replica}.{rank}")
        start({DESCRIPTOR: page.descriptor})
        page.release()
        self._oom_kills.watch(self._agent.pid(replica, rank), self._clock())

    def close(self) -> None:
        """Give the pages up."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()

    def look(self, generation: int, replicas: Collection[int]) -> list[tuple[Loss, Failing | None]]:
        """Judge the ranks of the `replicas` that are in the job; call it at every poll.

        Returns the replicas that hang and whose ranks have written their stacks, with what that is charged to.
        """
        now_s = self._clock()
        self._oom_kills.look(now_s)
        sights = tuple(
            detector.Sight(replica, rank, page.read(), self._agent.state(replica, rank))
            for (replica, rank), page in self._pages.items()
            if replica in replicas
        )
        self._state, effects = detector.step(self._state, detector.Look(now_s, generation, sights))
        for effect in effects:
            if isinstance(effect, detector.Named):
                self._name(effect)
            else:
                self._writing[effect.named.replica] = (effect, now_s + _STACKS_S)
        return [self._fence(replica, now_s) for replica in self._due(replicas, now_s)]

    def _name(self, named: detector.Named) -> None:
        """Tell people and the trace, and have the replica write its stacks."""
        self._record(
            trace.RankSilent(
                replica=named.replica,
                rank=named.rank,
                verdict=named.verdict.value,
                phase=named.phase.name.lower(),
                seconds=round(named.seconds, 3),
                step=named.step,
                label=named.label,
                microbatches=named.microbatches,
                state=named.state,
            )  # fmt: skip
        )
        if named.verdict is detector.Verdict.SLOW:
            return
        self._agent.ask_for_stacks(named.replica)
        text = f"replica {named.replica}, {named}; {_about_stacks(named)}"
        if named.verdict is detector.Verdict.TRACED and (tracer := self._agent.tracer(named.replica, named.rank)):
            text += f"; it goes on when {tracer} lets it go"
        self._says(text)

    def _due(self, replicas: Collection[int], now_s: float) -> list[int]:
        """Return the condemned replicas that are waited for no longer; forget those that are gone anyway."""
        for replica in self._writing.keys() - set(replicas):
            del self._writing[replica]
        return [
            replica
            for replica, (_, until_s) in self._writing.items()
            if self._agent.have_written_stacks(replica) or now_s >= until_s
        ]

    def _fence(self, replica: int, now_s: float) -> tuple[Loss, Failing | None]:
        condemned, until_s = self._writing.pop(replica)
        detail = str(condemned.named)
        if now_s >= until_s and not self._agent.have_written_stacks(replica):
            detail += f"; not all of its ranks wrote their stacks within {_STACKS_S:g} s"
        return Loss(replica, LossKind.HUNG, detail), condemned.failing

    def loss(self, end: End, *, started: bool) -> tuple[Loss, Failing | None]:
        """Return what the first end of a replica is, and which microbatches it is charged to (INV-9), if any.

        `started`: generation 1 has been made.
        """
        pid = self._agent.pid(end.replica, end.rank)
        out_of_memory = end.status == -_SIGKILL and self._oom_kills.rose(pid, self._clock())
        kind = loss_of(end.status, started=started, out_of_memory=out_of_memory)
        detail = f"rank {end.rank}: {end.cause}"
        if out_of_memory:
            detail += ", by the kernel, which was out of memory"
        page = self._pages.get((end.replica, end.rank))
        progress = page.read() if page is not None else None
        if kind is not LossKind.CRASHED or progress is None or not progress.microbatches:
            return Loss(end.replica, kind, detail), None
        which = ", ".join(map(str, progress.microbatches))
        detail += f", with microbatch {which} of {progress.label} in work ({progress.phase.name.lower()})"
        return Loss(end.replica, kind, detail), Failing(
            end.replica, progress.label, progress.microbatches, detail, witnessed=True
        )


_SIGKILL = 9
_STACKS_S = 0.4
"""How long a rank that hangs may take to write its stacks before it is fenced."""


def _about_stacks(named: detector.Named) -> str:
    if named.state == detector.STOPPED:
        return "it was stopped (SIGSTOP), so its log has no stacks of it"
    if named.state == detector.TRACED:
        return "its log has no stacks of it"
    if named.state == detector.UNINTERRUPTIBLE:
        return "its log may have no stacks of it"
    return "the stacks of all its threads are in its log"


def explaining_first(ends: Sequence[End]) -> Iterable[End]:
    """Yield ends that were seen in one look so that of each replica the one that explains the others comes first."""
    for replica in dict.fromkeys(end.replica for end in ends):
        mine = [end for end in ends if end.replica == replica]
        first = first_to_die([end.status for end in mine])
        yield mine[first]
        yield from (end for index, end in enumerate(mine) if index != first)
