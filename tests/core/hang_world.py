"""A job on a virtual clock, seen through its progress pages: drives the production detector (`core/detector.py`)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from megatron_recover.core import detector
from megatron_recover.core.detector import DetectorState
from megatron_recover.core.progress import Phase, Progress
from megatron_recover.core.verdict import Condemned, Effect, Look, SeenAtWork, Sight
from megatron_recover.deadlines import Deadlines

DEADLINE_S = 1800.0
GAP_S, HUNG_S, AFTER_WORK_S = Deadlines.of().gap_s, Deadlines.of().hung_s, Deadlines.of().after_work_s


class Watched:
    """The detector, and what it has said."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        deadlines = Deadlines.of(deadline_s)
        limits = detector.Limits(*(getattr(deadlines, name) for name in detector.Limits.__struct_fields__))
        self.state = DetectorState(limits)
        self.at_work: tuple[int, ...] = ()
        self.said: list[tuple[float, Effect]] = []
        """Of ranks; what was said of replicas at work is in `at_work` alone."""

    def look(self, now_s: float, sights: Sequence[Sight], generation: int = 1) -> tuple[Effect, ...]:
        self.state, effects = detector.step(self.state, Look(now_s, generation, tuple(sights)))
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
