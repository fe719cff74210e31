"""What ranks of a job on several nodes applied, on the one clock of the machine, and whether that is one history.

This reads what the toys themselves left on the shared folder, and nothing of the trace: also of a node that lost its power, and
also if the trace is wrong.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Applied:
    """A rank has applied a step."""

    at: float
    """Seconds of the machine's monotonic clock."""
    replica: int
    rank: int
    generation: int
    step: int
    node: str = ""


@dataclass(frozen=True)
class Named:
    """A replica has named a checkpoint."""

    at: float
    """A time after that."""
    replica: int
    iteration: int


@dataclass(frozen=True)
class Naming:
    """A replica has begun to name a checkpoint: from then on it has the right to, until it ends the attempt."""

    since: float
    """A time before that."""
    at: float
    """A time after that."""
    replica: int
    iteration: int


@dataclass(frozen=True)
class Latest:
    """The newest name was seen to be of this iteration, from outside."""

    at: float
    iteration: int


class History:
    """What all ranks of a job applied, and the checkpoints that they named."""

    def __init__(
        self,
        applied: Iterable[Applied],
        named: Iterable[Named] = (),
        naming: Iterable[Naming] = (),
        latest: Iterable[Latest] = (),
    ) -> None:
        self.applied = sorted(applied)
        self.named = sorted(named, key=lambda each: each.at)
        self.naming = sorted(naming, key=lambda each: each.since)
        self.latest = sorted(latest, key=lambda each: each.at)

    @classmethod
    def read(cls, folder: Path) -> History:
        """Read what `tests.nodes.toy` and `names.Watch` have left."""
        applied = []
        for path in sorted(folder.glob("applied-*-*.jsonl")):
            [(replica, rank)] = re.findall(r"(\d+)-(\d+)", path.name)
            applied += [Applied(replica=int(replica), rank=int(rank), **line) for line in _lines(path)]
        named = [Named(**line) for path in folder.glob("named-*.jsonl") for line in _lines(path)]
        naming = [Naming(**line) for path in folder.glob("naming-*.jsonl") for line in _lines(path)]
        latest = [Latest(**line) for path in folder.glob("latest.jsonl") for line in _lines(path)]
        return cls(applied, named, naming, latest)

    def by_rank(self) -> dict[tuple[int, int], list[Applied]]:
        """Return what each rank applied, in order."""
        found: dict[tuple[int, int], list[Applied]] = defaultdict(list)
        for each in self.applied:
            found[each.replica, each.rank].append(each)
        return found

    def replicas(self, since: float) -> set[int]:
        """Return the replicas that applied something after a time."""
        return {each.replica for each in self.applied if each.at > since}

    def pause_s(self, replicas: Iterable[int]) -> float:
        """Return the longest time between two steps of any rank of these replicas."""
        wanted = set(replicas)
        times = [[each.at for each in events] for (replica, _), events in self.by_rank().items() if replica in wanted]
        return max((later - earlier for each in times for earlier, later in itertools.pairwise(each)), default=0.0)

    def faults(self) -> list[str]:
        """Return what is wrong with it; empty: it is one history."""
        return [*self._gaps(), *self._forks(), *self._names()]

    def _gaps(self) -> Iterator[str]:
        """Each rank applies each step once, in order, in generations that do not go back."""
        for (replica, rank), events in self.by_rank().items():
            for earlier, later in itertools.pairwise(events):
                if later.step != earlier.step + 1:
                    yield f"replica {replica} rank {rank} applied step {later.step} after step {earlier.step}"
                if later.generation < earlier.generation:
                    yield f"replica {replica} rank {rank} went back from generation {earlier.generation} to {later.generation}"

    def _forks(self) -> Iterator[str]:
        """No step is applied in a generation after one that a newer generation began with: at most one side goes on."""
        steps: dict[int, list[int]] = defaultdict(list)
        for each in self.applied:
            steps[each.generation].append(each.step)
        for older, newer in itertools.combinations(sorted(steps), 2):
            if max(steps[older]) > min(steps[newer]):
                who = {each.replica for each in self.applied if each.generation == older and each.step == max(steps[older])}
                yield (
                    f"replicas {sorted(who)} applied step {max(steps[older])} in generation {older}, when generation {newer} "
                    f"had begun with step {min(steps[newer])}"
                )

    def _names(self) -> Iterator[str]:
        """At most one replica names: after one that joined the writers later none begins, and the newest name never goes back.

        The writer is the lowest of the roster, so the ids of writers only grow. Ranks write their times down before and after
        what they do, since they may stand still between.
        """
        for later in self.naming:
            for earlier in self.naming:
                if earlier.at < later.since and earlier.replica > later.replica:
                    yield (
                        f"replica {later.replica} began to name the checkpoint of iteration {later.iteration} after replica "
                        f"{earlier.replica} had begun to name that of iteration {earlier.iteration}"
                    )
        for before, after in itertools.pairwise(self.latest):
            if after.iteration < before.iteration:
                yield f"the newest name went back from iteration {before.iteration} to {after.iteration}"


def _lines(path: Path) -> Iterator[dict]:
    for line in path.read_text().splitlines():
        if line.endswith("}"):  # a power loss can leave half a line
            yield json.loads(line)
