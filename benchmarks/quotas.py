"""Quotas compared with ReCoVer's rule and with the optimum, and the cost of the journal.

No process is started. ReCoVer's static-world policy is `ulfm_collectives/policy.py` of
github.com/alvin-zyl/pytorch. For B microbatches on W replicas, G is the least quota with W G >= B.
B // G *majors* get G microbatches, one *minor* gets what is left of B, and the others are *spares*.
All compute G rounds, and what is beyond B is multiplied by zero. The rule knows no speeds.
"""

from __future__ import annotations

import itertools
import random
import time
import timeit
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.common import Row, row
from megatron_recover.config import RankContext, RecoverConfig
from megatron_recover.core import rank
from megatron_recover.core.quota import ONE_STAGE, balanced, makespan
from megatron_recover.core.values import Pipeline
from megatron_recover.trace.node_clock import NodeClock

BATCH, WORLDS = 8192, (64, 63, 60, 48, 40, 32)
"""Batch and numbers of replicas of ReCoVer's evaluation."""
CASES = 300


class MajorMinor(NamedTuple):
    """The shares that ReCoVer's rule deals."""

    quota: int
    majors: int
    minor: int
    spares: int

    @property
    def zeroed(self) -> int:
        """Return the number of microbatches that are computed and multiplied by zero."""
        members = self.majors + bool(self.minor) + self.spares
        return members * self.quota - self.majors * self.quota - self.minor


def major_minor(num_microbatches: int, num_members: int) -> MajorMinor:
    """Return the shares by ReCoVer's rule."""
    quota = -(-num_microbatches // num_members)
    majors, minor = divmod(num_microbatches, quota)
    return MajorMinor(quota, majors, minor, num_members - majors - bool(minor))


def every(num_microbatches: int, num_members: int) -> Iterator[tuple[int, ...]]:
    """Return all possible quotas."""
    choices = itertools.product(range(num_microbatches + 1), repeat=num_members - 1)
    return ((*some, num_microbatches - sum(some)) for some in choices if sum(some) <= num_microbatches)


def over_recover(num_microbatches: int, paces: Sequence[int], pipeline: Pipeline = ONE_STAGE) -> float:
    """Return our makespan over that of ReCoVer's rule, with which all compute as many rounds."""
    rounds = [major_minor(num_microbatches, len(paces)).quota] * len(paces)
    ours = balanced(num_microbatches, tuple(paces), pipeline)
    return makespan(ours, paces, pipeline) / makespan(rounds, paces, pipeline)


def over_optimum(num_microbatches: int, paces: Sequence[int], pipeline: Pipeline = ONE_STAGE) -> float:
    """Return our makespan over the least makespan of all quotas."""
    best = min(makespan(quotas, paces, pipeline) for quotas in every(num_microbatches, len(paces)))
    return makespan(balanced(num_microbatches, tuple(paces), pipeline), paces, pipeline) / best


def small_cases(chance: random.Random) -> Iterator[tuple[int, list[int], Pipeline]]:
    """Yield batches, paces and pipelines that can be searched exhaustively."""
    for _ in range(CASES):
        pipeline = Pipeline(chance.randint(1, 4), chance.randint(1, 3))
        yield chance.randint(1, 16), [chance.randint(50, 400) for _ in range(chance.randint(2, 4))], pipeline


def journal_ns() -> list[float]:
    """Return the CPU nanoseconds of the journal per microbatch, in rank 0's training thread.

    A microbatch is begun and finished; a step has 128 microbatches.
    """
    from megatron_recover.authentication.handshake import KEY_BYTES
    from megatron_recover.control_plane.rank_driver import RankDriver
    from megatron_recover.data_plane.direct import DirectEndpoint

    context = RankContext(
        replica=0, rank=0, num_ranks=1, num_replicas=1, coordinator="", leader="127.0.0.1:0", run_dir="", started_at=0.0
    )  # fmt: skip
    key = bytes(KEY_BYTES)
    member = RankDriver(
        context, RecoverConfig(), DirectEndpoint(key=key, rank=0), key=key, clock=NodeClock(None), record=lambda event: None
    )

    def step() -> None:
        member._state = rank.RankState(0, 0, ())
        for microbatch in range(128):
            member.started(microbatch)
            member.finished(microbatch)

    return [1e9 * seconds / 128 / 20 for seconds in timeit.repeat(step, timer=time.thread_time, number=20, repeat=7)]


def rows() -> list[Row]:
    """Return the rows of this benchmark."""
    found = []
    for world in WORLDS:
        rule = major_minor(BATCH, world)
        ours = balanced(BATCH, (1,) * world)
        found.append(row(f"computed and zeroed by ReCoVer, {BATCH} on {world}", [100 * rule.zeroed / BATCH], "%"))
        assert sum(ours) == BATCH and max(ours) == rule.quota
    chance = random.Random(1)
    unlike = [over_recover(BATCH, [chance.randint(90, 110) for _ in range(world)]) for world in WORLDS]
    straggler = [over_recover(BATCH, [100] * (world - 1) + [200]) for world in WORLDS]
    cases = list(small_cases(chance))
    recover, least = "ReCoVer's major / minor / spare rule", "the best of all quotas"
    small = [over_recover(*case) for case in cases]
    optimum = [over_optimum(*case) for case in cases]
    return [
        *found,
        row("computed and zeroed by us", [0.0], "%", goal="== 0"),
        row(
            "step at equal speeds",
            [over_recover(BATCH, [1] * world) for world in WORLDS],
            "ratio",
            baseline=recover,
            goal="<= 1",
        ),
        row("step with speeds of +-10 %", unlike, "ratio", baseline=recover, goal="<= 1"),
        row("step with one replica at half speed", straggler, "ratio", baseline=recover, goal="<= 1"),
        row(
            "step of small random jobs, the worst against ReCoVer",
            small,
            "ratio",
            baseline=recover,
            value=max(small),
            goal="<= 1",
        ),
        row(
            "step of small random jobs, the worst against the best",
            optimum,
            "ratio",
            baseline=least,
            value=max(optimum),
            goal="<= 1.01",
        ),
        row("journal of a microbatch", journal_ns(), "ns"),
    ]
