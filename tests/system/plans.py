"""A run of the campaign, a job of some shape and what happens to it, and the dice that draw one (`scenarios.py`)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from megatron_recover.cluster.chaos import IN_A_RECOVERY, IN_A_STEP
from megatron_recover.core.placement import Placement
from megatron_recover.faults import LEADER_ONLY, Fault, FaultKind, FaultPoint
from tests.system.jobs import FSDP2, Job
from tests.system.joining_pretrain import ORDERS, Act, Orders
from tests.system.kills import Kills
from tests.system.placing import divisions, hosted, placement
from tests.system.strikes import Strike, StrikeKind

MAX_PROCESSES = 8
STEPS = 6
STRUCK_STEPS = 12
"""Of a job that is struck from outside: the strike lasts."""
UNEVEN = "tests/system/uneven_pretrain.py"
PATIENT = "tests/system/patient_pretrain.py"
STRUCK = "tests/system/struck_pretrain.py"
SILENT = "tests/system/silent_pretrain.py"
MISCOUNTING = "tests/system/miscounting_pretrain.py"
JOINING = "tests/system/joining_pretrain.py"
NARROW = "tests.system.narrow_run"
PLAIN = "scripts/pretrain_gpt.py"
OVERLAP = "--overlap-grad-reduce"
TREE = ("--recover-tree-above", "2")
COMPARED = ("--recover-state-digest-interval", "N")
DEADLINE_S = 90.0
"""Of the job: the wait from which all others follow."""
TIMEOUTS = ("--recover-deadline-s", f"{DEADLINE_S:g}")

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
class Drift:
    """One bit of a rank's state changes silently."""

    replica: int
    rank: int
    step: int
    """After so many training steps."""
    what: str
    """See `silent_pretrain.py`."""
    interval: int
    """Every so many steps replicas compare all their state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miscount:
    """A replica counts a microbatch twice, once."""

    replica: int
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job and what happens to it."""

    kind: str
    """Of `KINDS`; it decides what is promised."""
    job: Job
    faults: tuple[Fault, ...] = ()
    script: str = PLAIN
    saves: bool = False
    slots: tuple[int, ...] = ()
    """Room for ranks on each node; empty: the job runs on this machine as its only node."""
    strike: Strike | None = None
    drift: Drift | None = None
    miscount: Miscount | None = None
    acts: tuple[Act, ...] = ()
    """What ranks do to others, or ask for, as they pass a point (`joining_pretrain.py`)."""
    kills: Kills | None = None
    """What comes from outside at any time."""
    missing: int = 0
    """Number of replicas that do not come back to the end, where the others do."""
    step_s: float = 0.75
    """What a step takes while replicas are missing, in a job in which they come back."""
    full_step_s: float = 0.0
    """What it takes at least with all of them."""
    full: int = 0
    """As `joining_pretrain.Orders.full`."""

    @property
    def heals(self) -> bool:
        """Whether newcomers are formed for what is lost."""
        return self.job.heal != "off"

    @property
    def comes_back(self) -> bool:
        """Whether the job takes its time, so that what is lost comes back."""
        return self.script == JOINING

    def never(self) -> Iterator[Fault]:
        """Yield faults for ranks with acts that never strike: a rank without any passes no points."""
        for act in self.acts:
            yield msgspec.structs.replace(act.at, occurrence=10**9)

    @property
    def lost(self) -> frozenset[int]:
        """The replicas that the strike costs: those with ranks on a node that is lost, or cut off for long."""
        if not self.slots or self.strike is None or self.strike.is_short:
            return frozenset()
        return hosted(placement(self.job, self.slots), self.strike.node)

    @property
    def spared(self) -> int | None:
        """A replica of the start that nothing hits; None: all are hit."""
        hit = {fault.replica for fault in self.faults if fault.kind is not FaultKind.SLOW} | self.lost
        hit |= {int(act.do.split()[1]) for act in self.acts if act.do.startswith(("kill", "drain"))}
        return min(set(range(self.job.replicas)) - hit, default=None)

    def sharded(self) -> Scenario:
        """The same with `sharded` replicas. A step takes as long as with stages, which sleep one after the other."""
        passes = self.job.microbatches / max(1, self.job.replicas - 1)
        step_s = self.step_s * (passes + self.job.pp - 1) / passes
        return dataclasses.replace(self, job=sharded(self.job, saves=self.saves), step_s=step_s)

    def reference(self) -> Job:
        """The failure-free job of one replica that it has to end like. What makes no difference to its result is left out."""
        extra = list(self.job.extra)
        for flags in ((OVERLAP,), TREE, COMPARED):
            if flags[0] in extra:
                first = extra.index(flags[0])
                del extra[first : first + len(flags)]
        return dataclasses.replace(
            self.job, replicas=1, extra=tuple(extra), rebalance=Job.rebalance, timeouts=(), save_interval=1000,
            module=Job.module, heal="off", run_flags=(),
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """What tells the script when to go wrong, but for a strike."""
        found = {}
        if self.drift is not None:
            found["DRIFT"] = f"{self.drift.replica} {self.drift.rank} {self.drift.step} {self.drift.what}"
        if self.miscount is not None:
            found["MISCOUNT"] = f"{self.miscount.replica} {self.miscount.step} 1"
        if self.comes_back:
            orders = Orders(
                microbatches=self.job.microbatches, step_s=self.step_s, full_step_s=self.full_step_s, full=self.full,
                acts=self.acts,
            )  # fmt: skip
            found[ORDERS] = msgspec.json.encode(orders).decode()
        return found

    @property
    def others(self) -> str:
        """What happens besides faults inside ranks, in words; empty if nothing does. Acts and kills are told as they come."""
        if self.strike is not None:
            return f"{self.strike}{', rings with little room' if self.job.module == NARROW else ''}"
        if self.drift is not None:
            drift = self.drift
            return (
                f"{drift.replica}.{drift.rank} after step {drift.step}: drift of {drift.what}, compared every {drift.interval}"
            )
        if self.miscount is not None:
            return f"{self.miscount.replica}.0 at {self.miscount.step}: miscount"
        return ""

    def __str__(self) -> str:
        job = self.job
        words = [f"R{job.replicas} TP{job.tp} PP{job.pp}", f"L{job.lanes} M{job.microbatches}", job.determinism]
        words += [
            "fsdp2" if flag == FSDP2[0] else flag.removeprefix("--")
            for flag in job.extra
            if flag.startswith("--") and not flag.startswith(("--num-layers", FSDP2[1], "--ckpt-format"))
        ]
        if any(flag.startswith("--num-layers-per") for flag in job.extra):
            words[0] += " VP2"
        words += ["rebalance"] if job.rebalance == "on" else []
        words += ["saves"] if self.saves else []
        words += [" ".join(("heals", *(flag.removeprefix("--") for flag in job.run_flags)))] if self.heals else []
        words += [f"on nodes of {'+'.join(map(str, self.slots))}"] if self.slots else []
        return " ".join(words + [name for script, name in ((UNEVEN, "uneven"), (PATIENT, "patient")) if script == self.script])


def sharded(job: Job, *, saves: bool) -> Job:
    """The job where FSDP2 shards replicas of as many ranks over lanes, with which it has neither stages nor ZeRO-1.

    What it shards is saved in a format that Megatron refuses with tensor parallelism.
    """
    ranks = job.tp * job.pp * job.lanes
    tp = job.tp if job.tp < ranks and not saves else 1
    extra = list(job.extra)
    if (number := "--num-layers") in extra:
        first = extra.index(number)
        del extra[first : first + 4]  # of virtual stages
    extra = [flag for flag in extra if flag != "--use-distributed-optimizer"]
    extra += [*FSDP2, *(("--ckpt-format", "torch_dcp") if saves else ())]
    return dataclasses.replace(job, tp=tp, pp=1, lanes=ranks // tp, extra=tuple(extra))


class Draw:
    """The dice of one scenario, and what they have decided so far."""

    def __init__(self, seed: int, *, fsdp2: bool = False) -> None:
        """`fsdp2`: the scenario will be `sharded`, where that decides who is hit."""
        self.dice = random.Random(seed)
        self._is_sharded = fsdp2
        self.kind = ""
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

    def change(self, **fields: object) -> None:
        """Another job."""
        self.job = dataclasses.replace(self.job, **fields)

    def scenario(self, **fields: object) -> Scenario:
        """What was drawn."""
        return Scenario(kind=self.kind, job=self.job, faults=tuple(self.faults), **fields)

    def struck(self, kind: StrikeKind, seconds: float | None, *, is_killed: bool) -> Scenario:
        """A strike in the middle of a longer job, and perhaps a death soon after it. The replica that asks for it is spared."""
        self.change(steps=STRUCK_STEPS)
        spared = next(replica for replica in range(self.job.replicas) if replica not in self.victims)
        step = self.dice.randint(2, STRUCK_STEPS // 2)
        if is_killed:
            self.strike(self.dice.choice(IN_A_STEP), step, kind=FaultKind.KILL)
        at = Fault(replica=spared, rank=0, point=FaultPoint.OPTIMIZER, step=step - 1)
        return self.scenario(script=STRUCK, strike=Strike(kind=kind, at=at, seconds=seconds))

    def placed(self, slots: Sequence[int]) -> Placement:
        """Where the ranks will be on nodes with so many slots; a job that saves is `saving` by now."""
        saves = self.job.save_interval != Job.save_interval
        return placement(sharded(self.job, saves=saves) if self._is_sharded else self.job, slots)

    def on_nodes(self, fits: Callable[[Placement, int], bool]) -> tuple[tuple[int, ...], int]:
        """Return the slots of nodes, and a node that is without ranks of some replica; both are as `fits` wants them."""
        self.change(steps=STRUCK_STEPS)
        if self.num_ranks == 1:  # or the first node would always have the writer
            self.change(pp=2, replicas=min(self.job.replicas, MAX_PROCESSES // 2))
            self.num_ranks = 2
        found = []
        for slots in divisions(self.job):
            placed = self.placed(slots)
            found += [
                (slots, node)
                for node in range(len(slots))
                if len(hosted(placed, node)) < self.job.replicas and fits(placed, node)
            ]
        return self.dice.choice(found)

    def saving(self) -> None:
        """Save every third step, perhaps in the background."""
        self.change(save_interval=3)
        if self.dice.random() < 0.3:
            self.change(extra=(*self.job.extra, "--async-save"))

    def anywhere(self, replica: int, *, saves: bool) -> Fault:
        """A point that a rank of `replica` passes in some step. Where the job saves, steps have other numbers."""
        point = self.dice.choice(IN_A_STEP)
        if saves:
            step, occurrence = None, self.dice.randint(2, STRUCK_STEPS - 2)
        else:
            step, occurrence = self.dice.randint(1, STRUCK_STEPS // 2), self.occurrence() if point in IN_A_PASS else 1
        rank = 0 if point in LEADER_ONLY else self.dice.randrange(self.num_ranks)
        return Fault(replica=replica, rank=rank, point=point, step=step, occurrence=occurrence)

    def kill_besides(self, lost: frozenset[int], at: Fault) -> Fault:
        """Kill a rank of one of the two or more replicas that the strike does not cost.

        Returns where the strike is to happen: at `at`, about a step before this death; or in the recovery from it.
        """
        self.victims = [self.dice.choice(sorted(set(range(self.job.replicas)) - lost - {at.replica}))]
        step = self.dice.randint(2, STRUCK_STEPS // 2) if at.step is None else at.step + 1
        self.strike(self.dice.choice(IN_A_STEP), step, kind=FaultKind.KILL)
        if self.dice.random() < 0.5:
            return at
        point = self.dice.choice((FaultPoint.PROMISE, FaultPoint.STATUS))  # each rank passes them as the job begins, too
        rank = 0 if point in LEADER_ONLY else self.dice.randrange(self.num_ranks)
        return Fault(replica=at.replica, rank=rank, point=point, occurrence=2)

    def later(self, points: Sequence[FaultPoint]) -> None:
        """One more fault, if anybody is left for it."""
        if self.victims:
            self.strike(self.dice.choice(points), 4)

    def strike(self, point: FaultPoint, step: int | None, *, kind: FaultKind | None = None, **where: int) -> None:
        """A fault at `point` for the next victim."""
        kind = kind or self._kind(point)
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
