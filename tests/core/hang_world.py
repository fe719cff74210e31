"""A job on a virtual clock, seen through its progress pages: drives the production detector (`core/detector.py`)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_recover.core import condemning, detector
from megatron_recover.core.detector_state import DetectorState, Limits
from megatron_recover.core.progress import Phase, Progress
from megatron_recover.core.verdict import (
    Condemned,
    Effect,
    Known,
    Look,
    Named,
    Others,
    PartSeen,
    SeenAtWork,
    Sight,
    Suspects,
    Verdict,
)
from megatron_recover.deadlines import Deadlines

DEADLINE_S = 1800.0
GAP_S, HUNG_S, AFTER_WORK_S = Deadlines.of().gap_s, Deadlines.of().hung_s, Deadlines.of().after_work_s
STOPPED_S = Deadlines.of().stopped_s


class Watched:
    """The detector, and what it has said."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        deadlines = Deadlines.of(deadline_s)
        limits = Limits(*(getattr(deadlines, name) for name in Limits.__struct_fields__))
        self.state = DetectorState(limits)
        self.at_work: tuple[int, ...] = ()
        self.said: list[tuple[float, Effect]] = []
        """Of ranks; what was said of replicas at work is in `at_work` alone."""

    def look(
        self, now_s: float, sights: Sequence[Sight], generation: int = 1, others: Others | None = None
    ) -> tuple[Effect, ...]:
        self.state, effects = detector.step(self.state, Look(now_s, generation, tuple(sights), others))
        self.said += [(now_s, effect) for effect in effects if not isinstance(effect, SeenAtWork)]
        self.at_work = next((effect.replicas for effect in effects if isinstance(effect, SeenAtWork)), self.at_work)
        return effects

    @property
    def condemned(self) -> list[Condemned]:
        return [effect for _, effect in self.said if isinstance(effect, Condemned)]


def lognormal_steps(
    num_steps: int, seed: int, *, replicas: int = 3, operations: int = 2, sigma: float = 0.3, slowest: float = 3.0,
    mean_s: float = 10.0,
) -> Iterator[list[list[tuple[Phase, float]]]]:  # fmt: skip
    """Yield for each step the operations of each replica; the last replica is `slowest` times slower."""
    dice = random.Random(seed)
    mean = mean_s / (slowest * operations)
    for _ in range(num_steps):
        yield [
            [
                (
                    Phase.FORWARD if index % 2 == 0 else Phase.BACKWARD,
                    mean * (slowest if replica == replicas - 1 else 1.0) * math.exp(dice.gauss(0.0, sigma)),
                )
                for index in range(operations)
            ]
            for replica in range(replicas)
        ]


def drive(
    watched: Watched,
    steps: Iterator[list[list[tuple[Phase, float]]]],
    *,
    look_s: float,
    generation_every: int = 1000,
    hang: Callable[[int, int], bool] = lambda step, replica: False,
    stop_s: float = 0.0,
) -> None:
    """Run the steps in time, looking every `look_s`; a replica for which `hang(step, replica)` never ends its first operation.

    `stop_s`: give up so long after a hang has begun.
    """
    start_s = now_s = 0.0
    begun: list[int] = []
    generation = 0
    for step, work in enumerate(steps):
        if step % generation_every == 0:
            generation += 1
        begun = begun or [0] * len(work)
        ends: list[list[float]] = []
        for replica, operations in enumerate(work):
            at, mine = start_s, []
            for _, seconds in operations:
                at += math.inf if hang(step, replica) else seconds
                mine.append(at)
            ends.append(mine)
        end_s = max(mine[-1] for mine in ends)
        limit_s = min(end_s, start_s + stop_s) if math.isinf(end_s) else end_s
        while now_s < limit_s:
            sights = []
            for replica, mine in enumerate(ends):
                done = 0
                while done < len(mine) and mine[done] <= now_s:
                    done += 1
                phase = work[replica][done][0] if done < len(mine) else Phase.REDUCTION
                ids = (done // 2,) if done < len(mine) else ()
                number = begun[replica] + done
                page = Progress(generation, step, f"train {step + 1}", phase, ids, number + 1, number, 0)
                sights.append(Sight(replica, 0, page, "R"))
            watched.look(now_s, sights, generation)
            now_s += look_s
        if math.isinf(end_s):
            return
        begun = [number + len(mine) + 1 for number, mine in zip(begun, ends, strict=True)]
        start_s = end_s


class Nodes:
    """A job on several nodes: a detector for the ranks of each, the coordinator's machine, and messages that take looks.

    `places` says on which node each rank is. A look of the job lasts `LOOK_S`; a message arrives `late` looks after the one in
    which it was sent, or never if its link is in `cut`.
    """

    LOOK_S = 0.1

    def __init__(self, places: Mapping[tuple[int, int], int], *, late: int = 0, deadline_s: float = DEADLINE_S) -> None:
        self.places, self.late, self.now_s, self.looks = dict(places), late, 0.0, 0
        self.agents = {node: Watched(deadline_s) for node in sorted(set(places.values()))}
        hosts: dict[int, frozenset[int]] = {}
        for (replica, _), node in places.items():
            hosts[replica] = hosts.get(replica, frozenset()) | {node}
        self.hosts = hosts
        self.reports = dict.fromkeys(self.agents, 0)
        self.asked: dict[int, list[tuple[int, int]]] = {node: [] for node in self.agents}
        """By node: (question, replica) that have arrived since its last look."""
        self.known: dict[int, list[Known]] = {node: [] for node in self.agents}
        self.cut: set[int] = set()
        """Nodes whose messages arrive nowhere, and that get none."""
        self.sent = 0
        """Messages that were sent so far."""
        self._mail: list[tuple[int, int, object]] = []
        """(look in which it arrives, node, what it is) in the order of sending."""
        self.state = condemning.CondemningState(hosts)
        self.tell(condemning.Rostered(tuple(sorted(hosts))))

    def tell(self, event: condemning.Input) -> None:
        """Feed the coordinator's machine."""
        self.state, effects = condemning.step(self.state, event)
        for effect in effects:
            self._send(effect.node, effect)

    def _send(self, node: int, message: object) -> None:
        self.sent += 1
        self._mail.append((self.looks + self.late, node, message))

    def _deliver(self) -> None:
        while due := next((each for each in self._mail if each[0] <= self.looks), None):
            self._mail.remove(due)
            _, node, message = due
            if node in self.cut:
                continue
            match message:
                case condemning.Ask(_, question, replica):
                    self.asked[node].append((question, replica))
                case condemning.Tell(_, report, known) if report == self.reports[node]:
                    self.known[node].append(known)
                case condemning.Suspected() | condemning.Answered():
                    self.tell(message)

    def look(
        self, pages: Mapping[tuple[int, int], Progress | None], states: Mapping[tuple[int, int], str] | None = None
    ) -> None:
        """Let every agent look at its ranks, and deliver what is due."""
        self.now_s += self.LOOK_S
        self.looks += 1
        self._deliver()
        for node, agent in self.agents.items():
            sights = tuple(
                Sight(*key, page, (states or {}).get(key, "R")) for key, page in pages.items() if self.places[key] == node
            )
            spanning = frozenset(replica for replica, nodes in self.hosts.items() if node in nodes and len(nodes) > 1)
            asked, known = self.asked[node], tuple(self.known[node])
            self.asked[node], self.known[node] = [], []
            others = Others(len(self.state.roster), known, tuple(replica for _, replica in asked), spanning)
            questions = iter(asked)
            for effect in agent.look(self.now_s, sights, others=others):
                if isinstance(effect, Suspects):
                    self.reports[node] += 1
                    self._send(node, condemning.Suspected(node, self.reports[node], effect.silent, effect.accused))
                elif isinstance(effect, PartSeen):
                    self._send(node, condemning.Answered(node, next(questions)[0], effect.part))
        self._deliver()

    @property
    def condemned(self) -> list[tuple[int, Condemned]]:
        return [(node, each) for node, agent in self.agents.items() for each in agent.condemned]

    @property
    def named(self) -> list[tuple[int, int, Verdict]]:
        """(replica, rank, verdict) of all that was said to people: not of slow ranks."""
        return [
            (effect.replica, effect.rank, effect.verdict)
            for agent in self.agents.values()
            for _, effect in agent.said
            if isinstance(effect, Named) and effect.verdict is not Verdict.SLOW
        ]
