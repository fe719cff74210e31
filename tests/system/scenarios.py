"""What a run of the campaign is: a job of some shape and the faults that strike it, both decided by one seed.

Every fault point, every kind of fault and every shape of up to eight processes comes up; at least one replica is never hit.
The first fault of a scenario is sure to strike; one in a recovery strikes if the recovery gets there.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from megatron_recover.cluster.chaos import IN_A_RECOVERY, IN_A_STEP
from megatron_recover.faults import LEADER_ONLY, Fault, FaultKind, FaultPoint
from tests.system.jobs import Job

MAX_PROCESSES = 8
STEPS = 6
UNEVEN = "tests/system/uneven_pretrain.py"
PATIENT = "tests/system/patient_pretrain.py"
PLAIN = "scripts/pretrain_gpt.py"
OVERLAP = "--overlap-grad-reduce"
TREE = ("--recover-tree-above", "2")
TIMEOUTS = ("--recover-deadline-s", "90")

LAYOUTS = ((1, 1, 1), (1, 1, 1), (1, 2, 1), (1, 2, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1), (1, 1, 2), (1, 2, 2))
"""(TP, PP, lanes), the more often the cheaper."""
FLAVOURS = (
    (),
    ("--bf16",),
    ("--use-distributed-optimizer",),
    ("--bf16", "--use-distributed-optimizer"),
    ("--calculate-per-token-loss",),
)

IN_A_PASS = (FaultPoint.FORWARD, FaultPoint.BACKWARD)
BEFORE_RESULTS = (*IN_A_PASS, FaultPoint.BEFORE_REDUCE, FaultPoint.REDUCE)
RAISING = frozenset({*BEFORE_RESULTS, FaultPoint.OPTIMIZER, FaultPoint.RECOMPUTE})
"""Where user code, Megatron or a device could raise."""
CHARGED = (
    FaultKind.RAISE, FaultKind.SEGV, FaultKind.BUS, FaultKind.FPE, FaultKind.ILL, FaultKind.ABORT, FaultKind.LOOP,
)  # fmt: skip
"""What is charged to the microbatch that is computed."""
ENDS_OF_A_FREEZE = ("generation", "microbatch_finished", "reduced", "status", "voted")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job and its faults."""

    job: Job
    faults: tuple[Fault, ...]
    script: str = PLAIN
    saves: bool = False

    def reference(self) -> Job:
        """The failure-free job of one replica that it has to end like. Overlap and saves make no difference."""
        extra = tuple(flag for flag in self.job.extra if flag != OVERLAP)
        return dataclasses.replace(self.job, replicas=1, extra=extra, timeouts=(), save_interval=1000)

    def __str__(self) -> str:
        job = self.job
        words = [f"R{job.replicas} TP{job.tp} PP{job.pp}", f"L{job.lanes} M{job.microbatches}", job.determinism]
        words += [
            flag.removeprefix("--") for flag in job.extra if flag.startswith("--") and not flag.startswith("--num-layers")
        ]
        if any(flag.startswith("--num-layers-per") for flag in job.extra):
            words[0] += " VP2"
        words += ["rebalance"] if job.rebalance == "on" else []
        words += ["saves"] if self.saves else []
        return " ".join(words + [name for script, name in ((UNEVEN, "uneven"), (PATIENT, "patient")) if script == self.script])


class _Draw:
    """The dice of one scenario, and what they have decided so far."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.job = self._shape()
        self.victims = self.dice.sample(range(self.job.replicas), self.job.replicas - 1)
        """In the order in which they are hit; one is left out."""
        self.num_ranks = self.job.tp * self.job.pp * self.job.lanes
        self.faults: list[Fault] = []

    def _shape(self) -> Job:
        dice = self.dice
        tp, pp, lanes = dice.choice(LAYOUTS)
        extra = dice.choice(FLAVOURS)
        if pp > 1 and dice.random() < 0.3:
            extra += ("--num-layers", str(2 * pp), "--num-layers-per-virtual-pipeline-stage", "1")
        if dice.random() < 0.6:
            extra += (OVERLAP,)
        if dice.random() < 0.3:
            extra += TREE
        most = min(5, MAX_PROCESSES // (tp * pp * lanes))
        return Job(
            replicas=max(dice.randint(2, most), dice.randint(2, most)), tp=tp, pp=pp, lanes=lanes, steps=STEPS,
            rebalance=dice.choice(("on", "off")),
            microbatches=dice.choice((6, 9, 12)), determinism="fast" if dice.random() < 0.2 else "exact", extra=extra,
            timeouts=TIMEOUTS,
        )  # fmt: skip

    def strike(self, point: FaultPoint, step: int | None, **where: int) -> None:
        """A fault at `point` for the next victim."""
        kind = self._kind(point)
        self.faults.append(
            Fault(
                replica=self.victims.pop(), rank=0 if point in LEADER_ONLY else self.dice.randrange(self.num_ranks),
                point=point, step=step, kind=kind,
                until=self.dice.choice(ENDS_OF_A_FREEZE) if kind is FaultKind.FREEZE else None, **where,
            )
        )  # fmt: skip

    def _kind(self, point: FaultPoint) -> FaultKind:
        has_charged = any(fault.kind in CHARGED for fault in self.faults)
        # One of these a run: a microbatch that ends two replicas by them ends the job (INV-9).
        charged = self.dice.choice([kind for kind in CHARGED if kind is not FaultKind.LOOP or point in IN_A_PASS])
        may_be_charged = point in RAISING and not has_charged
        kinds = (FaultKind.KILL, FaultKind.STOP, FaultKind.FREEZE, charged if may_be_charged else FaultKind.KILL)
        return self.dice.choices(kinds, (6, 1, 2, 2))[0]

    def occurrence(self) -> int:
        """Which of its microbatches of a step: every member has at least so many."""
        sure = 1 if self.job.rebalance == "on" else max(1, self.job.microbatches // self.job.replicas)
        return 1 + self.dice.randrange(sure)

    # --- What can happen in a step ---------------------------------------------------------------------------------------

    def single(self, step: int) -> None:
        """One replica fails."""
        point = self.dice.choice(IN_A_STEP)
        self.strike(point, step, **({"occurrence": self.occurrence()} if point in IN_A_PASS else {}))

    def together(self, step: int) -> None:
        """Two replicas fail in the same instant, or nearly."""
        point, occurrence = self.dice.choice(IN_A_STEP), self.occurrence()
        for _ in range(min(2, len(self.victims))):
            self.strike(point, step, **({"occurrence": occurrence} if point in IN_A_PASS else {}))

    def chain(self, step: int) -> None:
        """One fails, another in the recovery from that; late in a step nothing is computed or summed again in it."""
        self.single(step)
        if self.victims:
            self.strike(self.dice.choice(IN_A_RECOVERY if self.faults[-1].point in BEFORE_RESULTS else IN_A_RECOVERY[:2]), step)

    def in_flight(self, step: int) -> None:
        """One fails so early that the running passes take in what it had; one of those that do fails then."""
        self.strike(self.dice.choice(IN_A_PASS), step, occurrence=1)
        if self.victims:
            self.strike(FaultPoint.RECOMPUTE, step, occurrence=1)

    def slow_down(self) -> None:
        """Any rank is slow for three steps, also of the replica that nothing else hits: quotas change, nothing fails."""
        replica, rank = self.dice.randrange(self.job.replicas), self.dice.randrange(self.num_ranks)
        self.faults.append(
            Fault(
                replica=replica, rank=rank, point=FaultPoint.COMPUTE, kind=FaultKind.SLOW, step=self.dice.randrange(3),
                steps=3, factor=2.0,
            )
        )  # fmt: skip


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    draw = _Draw(seed)
    special = draw.dice.random()
    if special < 0.3:
        return _special(draw)
    step = draw.dice.randrange(2)
    while draw.victims and step < STEPS:
        # Faults in a recovery are what is hardest to get right, and what few of them reach.
        often = (draw.single, draw.together, draw.chain, draw.chain, draw.chain, draw.in_flight)
        happens: Callable[[int], None] = draw.dice.choice(often)
        happens(step)
        step += draw.dice.randint(1, 2)  # where a replica lags behind, the next one strikes inside the recovery from this one
    if draw.dice.random() < 0.15:
        draw.slow_down()
    return Scenario(job=draw.job, faults=tuple(draw.faults))


def _special(draw: _Draw) -> Scenario:
    """The rarer points, each of which needs something of its job; and one more fault later."""
    dice, job, victims = draw.dice, draw.job, draw.victims
    what = dice.choice(("start_up", "evaluate", "checkpoint", "transfer", "in_flight"))
    script, saves, later = PLAIN, False, IN_A_STEP[:4]
    if what == "start_up":
        draw.faults.append(Fault(replica=victims.pop(), rank=dice.randrange(draw.num_ranks), point=FaultPoint.START_UP))
    elif what == "evaluate":
        job = dataclasses.replace(job, eval_interval=2)
        draw.strike(FaultPoint.EVALUATE, None, occurrence=dice.randint(1, 2))
    elif what == "checkpoint":
        job, saves = dataclasses.replace(job, save_interval=2), True
        if 0 not in victims:
            victims[0] = 0
        victims.remove(0)
        point = dice.choice((FaultPoint.CHECKPOINT, FaultPoint.CHECKPOINT_TRACKER))
        draw.faults.append(Fault(replica=0, rank=0, point=point, occurrence=2))
    elif what == "in_flight":
        # As `_Draw.in_flight`, and for certain. The script waits for who is to die in a pass: nobody else may fail in one.
        script, later = PATIENT, IN_A_STEP[2:4]
        draw.faults.append(
            Fault(replica=victims.pop(), rank=dice.randrange(draw.num_ranks), point=dice.choice(IN_A_PASS), step=1)
        )
        if victims:
            draw.strike(FaultPoint.RECOMPUTE, 1)
    else:
        # In its step 1 replica 0 alone holds all: it is the source, the others are targets.
        script = UNEVEN
        draw.strike(FaultPoint.TRANSFER, 1)
    if victims:
        draw.strike(dice.choice(later), 4)
    return Scenario(job=job, faults=tuple(draw.faults), script=script, saves=saves)
