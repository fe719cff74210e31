"""Tables of a scenario file: the parts of a simulated job, the times it needs, and its losses.

No rule of the protocol is decided here; `sim/timed/job.py` requests seconds only. Every field that
has a unit ends in it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megatron_recover.core.quota import balanced, makespan
from megatron_recover.core.values import BucketId, Pipeline, Shape
from megatron_recover.deadlines import Deadlines
from megatron_recover.faults import Fault

MEMBER_BYTES = 4.0
"""Bytes of a member's number in an announcement or a vote."""
PACE_BYTES = 12.0
"""Bytes of a member's number and pace in the record of a vote."""
HOUR_S = 3600.0
_REAL = Deadlines.of()
LEDGER_COLUMNS = 64
"""Columns of the ledger in `trainer/ledger.py`, whose import needs torch; a test compares them."""

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Duration = Annotated[float, Meta(gt=0, le=1e9)]
"""Seconds above 0, at most 10^9 (32 years), so that sums over a whole job stay finite."""
Bytes = Annotated[float, Meta(ge=1, le=1e18)]
Amount = Annotated[float, Meta(gt=0, le=1e9)]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a scenario file."""


class JobTable(Table, frozen=True, kw_only=True):
    """`[job]`: replicas of the model, and the size of a step."""

    replicas: Count
    ranks: Count
    """Ranks of one replica, one GPU each, or `gpus_a_rank`."""
    gpus_a_rank: Count = 1
    """GPUs for which one simulated rank stands. They do the same at the same time: the tensor and
    data parallel peers in a stage. They count for losses and GPU-hours, and take no time."""
    stages: Count = 1
    """Pipeline stages of a replica; `ranks` is a multiple of it, or 1. That rank is of the first
    stage, which all others wait for, and stands for the replica."""
    microbatches: Count
    """Microbatches of one step, over all replicas (M)."""
    steps: Count
    """Training steps of the job."""
    buckets: Count = 4
    """Buckets of each stage, without the ledger."""
    seed: Annotated[int, Meta(ge=0)] = 1
    """Seed of the random choices: which replica is lost, and when."""

    @property
    def held_stages(self) -> int:
        """Return the stages that have simulated ranks: all, or the first alone."""
        return min(self.stages, self.ranks)

    @property
    def gpus(self) -> int:
        """Return the GPUs of one replica."""
        return self.ranks * self.gpus_a_rank


class ComputeTable(Table, frozen=True, kw_only=True):
    """`[compute]`: the time of a replica's own work."""

    microbatch_s: Duration
    """Seconds of a forward and backward of one microbatch on one stage."""
    forward_share: Annotated[float, Meta(gt=0, lt=1)] = 1 / 3
    """Part of `microbatch_s` that the forward takes; a backward costs about two forwards."""
    optimizer_s: Seconds = 0.0
    """Seconds from the commit of a step to the begin of the next."""


class NetworkTable(Table, frozen=True, kw_only=True):
    """`[network]`: the time of communication between processes."""

    latency_s: Seconds = 50e-6
    """Seconds of a message between two replicas, or a replica and the coordinator."""
    local_latency_s: Seconds = 20e-6
    """Seconds of a message inside a replica."""
    message_s: Seconds = 20e-6
    """CPU seconds of a control thread per message that it sends or receives, besides the bytes."""
    bytes_per_s: Bytes
    """Bytes per second of one rank during a reduction, and of a long control message."""
    read_bytes_per_s: Bytes | None = None
    """Bytes of long control messages that a control thread reads in a second of CPU, with what it
    computes from them; None: this takes no time."""
    gradient_bytes: Bytes
    """Bytes that one rank reduces in a step."""


class FailuresTable(Table, frozen=True, kw_only=True):
    """`[failures]`: when replicas are lost, and how long the job waits. It has at most one rate."""

    every_steps: Count | None = None
    """Number n, for a loss in each n-th step that is run; None: no such losses."""
    per_gpu_hour: Amount | None = None
    """Losses of a GPU, and so of its replica, per hour of each GPU, at exponential intervals; None:
    no such losses."""
    at: Literal["reduction", "anywhere"] = "anywhere"
    """Instant of a loss by `every_steps`: while gradients are summed, or at random in the step."""
    until_replicas: Count = 1
    """Number of replicas at which losses end."""
    detect_s: Seconds = 0.05
    """Seconds from the death of a process until the coordinator knows it."""
    grace_s: Seconds = _REAL.grace_s
    follow_s: Duration = _REAL.follow_s
    stall_s: Duration = _REAL.stall_s
    save_s: Duration = _REAL.save_s
    """These four have the meaning and default of a real run (`Deadlines`)."""


class CheckpointTable(Table, frozen=True, kw_only=True):
    """`[checkpoint]`: the costs of the policies that restart from a checkpoint."""

    save_s: Seconds
    """Seconds of one blocking save."""
    restart_s: Seconds
    """Seconds from the detection of a loss to the first step after it, reading the checkpoint
    included."""


class DropTable(Table, frozen=True, kw_only=True):
    """`[drop]`: the costs of a change of the group, for the policies that drop or shrink."""

    regroup_s: Seconds
    """Seconds from the detection of a loss until collectives work again."""


class RepairTable(Table, frozen=True, kw_only=True):
    """`[repair]`: what brings lost replicas back, and how long each part of it takes."""

    vacate_s: Seconds = 10.0
    """Seconds from the detection of a loss until the last process of the replica has ended and the
    memory of its GPUs is free."""
    forming_s: Seconds
    """Seconds from the start of a newcomer's processes until it could train: imports, groups, model
    and data built, one microbatch run."""
    state_bytes: Bytes
    """Bytes of the state of one GPU."""
    state_bytes_per_s: Bytes
    """Bytes per second at which one GPU of a newcomer reads its state from live replicas."""
    digest_s: Seconds = 0.0
    """Seconds in which a rank digests its state, at a newcomer and at those that vouch for it."""
    node_gpus: Count = 8
    """GPUs of a node. A replica has whole nodes to itself."""
    hardware_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Part of the losses that take a node away with them. Slots of other losses are used again."""
    repair_h: Amount | None = None
    """Hours until such a node is back; None: it never is."""
    spares: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Spare nodes, which only the policy `recover-spares` has (and the restarts beside it)."""


PolicyName = Literal[
    "recover", "recover-in-place", "recover-spares", "shrink", "drop-step", "checkpoint-restart", "checkpoint-restart-equal"
]
HEALING: frozenset[PolicyName] = frozenset({"recover-in-place", "recover-spares"})
"""Policies that bring lost replicas back."""


class Scenario(Table, frozen=True, kw_only=True):
    """A scenario file."""

    job: JobTable
    compute: ComputeTable
    network: NetworkTable
    failures: FailuresTable = FailuresTable()
    fault: tuple[Fault, ...] = ()
    """Exact faults, as in a chaos file, instead of a rate."""
    checkpoint: CheckpointTable | None = None
    drop: DropTable | None = None
    repair: RepairTable | None = None
    policies: Annotated[tuple[PolicyName, ...], Meta(min_length=1)] = ("recover",)
    tokens_per_microbatch: Count | None = None
    """Tokens of a microbatch, to report throughput in tokens."""
    equal_gpu_hours: Amount | None = None
    """GPU-hours at which to report how many microbatches each policy has trained."""


class Timing:
    """Seconds of everything, without chance. Those of the fuzzer vary (`sim/timed/chance.py`)."""

    def __init__(self, job: JobTable, compute: ComputeTable, network: NetworkTable, repair: RepairTable | None = None) -> None:
        self.job, self.compute, self.network, self.repair = job, compute, network, repair

    @classmethod
    def of(cls, scenario: Scenario) -> Timing:
        """Return the seconds of everything in a scenario."""
        return cls(scenario.job, scenario.compute, scenario.network, scenario.repair)

    def latency_s(self) -> float:
        """Return the seconds of a message between leaders, or a leader and the coordinator."""
        return self.network.latency_s

    def local_latency_s(self) -> float:
        """Return the seconds of a message between a rank and its leader."""
        return self.network.local_latency_s

    def message_s(self, num_bytes: float = 0.0) -> float:
        """Return the seconds for which a message keeps the control thread of its sender busy."""
        return self.network.message_s + num_bytes / self.network.bytes_per_s

    def reading_s(self, num_bytes: float = 0.0) -> float:
        """Return the seconds for which a message keeps the control thread of its receiver busy."""
        return self.network.message_s + num_bytes / (self.network.read_bytes_per_s or math.inf)

    def microbatch_s(self, replica: int, step: int) -> float:
        """Return the seconds of a forward and backward on a stage of this replica in this step."""
        return self.compute.microbatch_s

    def optimizer_s(self) -> float:
        """Return the seconds from `Apply` to the begin of the next step."""
        return self.compute.optimizer_s

    def forming_s(self) -> float:
        """Return the seconds from the start of a newcomer's ranks until it is ready."""
        return self.repair.forming_s if self.repair is not None else 0.0

    def state_s(self) -> float:
        """Return the seconds in which a rank of a newcomer reads its state."""
        return self.repair.state_bytes / self.repair.state_bytes_per_s if self.repair is not None else 0.0

    def digest_s(self) -> float:
        """Return the seconds in which a rank digests its state."""
        return self.repair.digest_s if self.repair is not None else 0.0

    def bucket_bytes(self, bucket: BucketId) -> float:
        """Return the bytes of a bucket at one rank, provenance included.

        The ledger has a row of `LEDGER_COLUMNS` numbers a microbatch.
        """
        provenance = 8.0 * (self.job.microbatches + 1)
        if bucket == self.job.held_stages * self.job.buckets:
            return 8.0 * LEDGER_COLUMNS * self.job.microbatches + provenance
        return self.network.gradient_bytes / self.job.buckets + provenance

    def together_s(self, seconds: float, replica: int) -> float:
        """Return after how many seconds an operation of `seconds` ends at one of its members.

        Here it ends at all of them at once.
        """
        return seconds

    def reduce_s(self, bucket: BucketId, num_members: int) -> float:
        """Return the seconds of an all-reduce of a bucket by recursive halving and doubling.

        Source: Thakur, Rabenseifner, Gropp 2005, section 4.4.
        """
        if num_members < 2:
            return 0.0
        volume = 2 * (num_members - 1) / num_members * self.bucket_bytes(bucket)
        return volume / self.network.bytes_per_s + 2 * math.ceil(math.log2(num_members)) * self.network.latency_s

    def transfer_s(self, bucket: BucketId) -> float:
        """Return the seconds of a transfer of a decided bucket to a member that lacks it."""
        return self.bucket_bytes(bucket) / self.network.bytes_per_s + self.network.latency_s

    def entering_s(self, num_members: int) -> dict[str, float]:
        """Return the seconds from an announcement until the coordinator knows that all entered.

        The parts are by key of `[network]`. The coordinator sends one announcement after the
        other, each with the roster.
        """
        network = self.network
        return {
            "latency_s": 2 * network.latency_s,
            "local_latency_s": min(self.job.ranks, 2) * network.local_latency_s,  # rank 0 is the leader
            "message_s": (num_members + 2) * network.message_s,
            "bytes_per_s": MEMBER_BYTES * num_members**2 / network.bytes_per_s,
            "read_bytes_per_s": MEMBER_BYTES * num_members / (network.read_bytes_per_s or math.inf),
        }

    def reduction_s(self, num_members: int) -> float:
        """Return the seconds to reduce all buckets of a stage after the last backward.

        The last stage has the ledger too, and begins while other stages still drain.
        """
        drain_s = (self.job.stages - 1) * (1 - self.compute.forward_share) * self.compute.microbatch_s
        ledger_s = self.reduce_s(self.job.held_stages * self.job.buckets, num_members)
        return self.job.buckets * self.reduce_s(0, num_members) + max(0.0, ledger_s - drain_s)

    def ideal_step_s(self, num_members: int, num_microbatches: int) -> float:
        """Return the seconds of a step over the best integer quotas, without loss, vote or plan.

        They consist of computing, reducing and the optimizer.
        """
        alike, pipeline = (1,) * num_members, Pipeline(self.job.stages)
        slots = makespan(balanced(num_microbatches, alike, pipeline), alike, pipeline)
        return slots * self.compute.microbatch_s + self.reduction_s(num_members) + self.compute.optimizer_s


class Losses:
    """Random losses of replicas: a pure function of the seed and of the steps and seconds that run.

    Every policy gets an object of its own, with the same seed.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.failures, self.gpus = scenario.failures, scenario.job.gpus
        self.dice = random.Random(scenario.job.seed)
        self.num_steps = 0
        """Steps begun so far."""
        self.exposure = self.dice.expovariate(1.0)
        """Exposure left until the next loss, in expected losses."""

    def hazard(self, num_members: int) -> float:
        """Return the losses per second."""
        return (self.failures.per_gpu_hour or 0.0) * num_members * self.gpus / HOUR_S

    def in_step(self, num_members: int) -> float | None:
        """Begin a step; return the part of it (0..1) at which `every_steps` strikes, or None."""
        self.num_steps += 1
        every = self.failures.every_steps
        if every is None or self.num_steps % every or num_members <= self.failures.until_replicas:
            return None
        return self.dice.random()

    def within(self, seconds: float, num_members: int) -> float | None:
        """Spend `seconds`; return after how many of them a loss by rate strikes, or None."""
        hazard = self.hazard(num_members)
        if not hazard or num_members <= self.failures.until_replicas:
            return None
        if self.exposure > hazard * seconds:
            self.exposure -= hazard * seconds
            return None
        at, self.exposure = self.exposure / hazard, self.dice.expovariate(1.0)
        return at


def shape_of(job: JobTable) -> Shape:
    """Return which ranks hold which bucket.

    Each stage has `job.buckets` buckets, and the last stage the ledger too.
    """
    held, width = job.held_stages, job.ranks // job.held_stages
    ranks: Sequence[tuple[int, ...]] = [tuple(range(stage * width, (stage + 1) * width)) for stage in range(held)]
    buckets = (*(ranks[stage] for stage in range(held) for _ in range(job.buckets)), ranks[-1])
    return Shape(job.ranks, buckets, Pipeline(job.stages))


def stage_of(job: JobTable, rank: int) -> int:
    """Return the pipeline stage of a rank."""
    return rank // (job.ranks // job.held_stages)
