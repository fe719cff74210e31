"""The agent's eye on its ranks: their progress pages, process states and deaths, and what is to be said of them.

Joins the pages (`progress_page.py`), `/proc` and the machine of `core/detector.py`. It decides nothing about membership: the
launcher feeds what is found here to the coordinator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from megatron_recover.cluster.agent import Agent, End
from megatron_recover.cluster.out_of_memory import OomKills
from megatron_recover.core.policy import first_to_die, loss_of
from megatron_recover.core.values import Failing, Loss, LossKind
from megatron_recover.progress_page import DESCRIPTOR, PageReader


class Watch:
    """Watches the ranks of one agent. Used by the agent's thread."""

    def __init__(self, agent: Agent, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._agent, self._clock = agent, clock
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

    def look(self) -> None:
        """Note what is to be noted while the ranks live; cheap, call it at every poll."""
        self._oom_kills.look(self._clock())

    def loss(self, end: End, *, started: bool) -> tuple[Loss, Failing | None]:
        """Return what the first end of a replica is, and which microbatches it is charged to (INV-9), if any.

        `started`: generation 1 has been made.
        """
        pid = self._agent.pid(end.replica, end.rank)
        out_of_memory = end.status == -_SIGKILL and self._oom_kills.rose(pid)
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


def explaining_first(ends: Sequence[End]) -> Iterable[End]:
    """Yield ends that were seen in one look so that of each replica the one that explains the others comes first."""
    for replica in dict.fromkeys(end.replica for end in ends):
        mine = [end for end in ends if end.replica == replica]
        first = first_to_die([end.status for end in mine])
        yield mine[first]
        yield from (end for index, end in enumerate(mine) if index != first)
