"""From local gradients to results: buckets, their provenance, sums over lanes and over replicas.

Decides when a result is complete on this rank. It never writes a local gradient (INV-3), never decides whether a step is
committed, and never reports a result whose provenance is not one for every microbatch of the step (INV-1): such a step is
void, and begins anew (`Reduction.void`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.plan import Operation, operations
from megatron_recover.core.values import Apply, BucketId, Generation, Held, Pipeline, Plan, Shape
from megatron_recover.data_plane.transport import Probe, Revoked, Transport, TransportError
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.trainer import exact
from megatron_recover.trainer.checksum import checksum, combined
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.ledger import Ledger
from megatron_recover.trainer.regions import Regions, number
from megatron_recover.trainer.slots import GradientSlot, LedgerSlot, Slot
from megatron_recover.trainer.work_queue import Task

logger = logging.getLogger(__name__)


Gather = Callable[[Any], Sequence[Any]]
"""Everyone's value, by rank inside the replica."""


def gather_over_replica(value: Any) -> list[Any]:
    """`Gather` over the replica's own world."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Miscounted(TransportError):
    """The sum of a bucket does not count every microbatch of the step once: the step is void (`core.values.Void`)."""

    miscounted = True


class Reduction:
    """The buckets of one rank, for the life of the rank.

    Order of calls in a step: `begin`; `takes` with the first order; any number of passes, with `collect_into` before and
    `end_backward` after every backward, and of `reduce`; then `apply`, after which the local gradient is the step's. `reduce`
    may run beside the last backwards of a pass, in another thread (`overlap.Overlap`): it touches a bucket only when it has
    been passed.
    """

    def __init__(
        self,
        gradients: Regions,
        *,
        stage: int,
        is_last_stage: bool,
        config: RecoverConfig,
        driver: Driver,
        gather: Gather = gather_over_replica,
        record: trace.Recorder | None = None,
        faults: FaultInjector | None = None,
    ) -> None:
        """Number the buckets of `gradients`, on all ranks of the replica together (`gather`).

        `stage` is that of this rank in the pipeline. Raises ValueError if ranks of one stage differ.
        """
        self._driver, self._faults, self._gradients = driver, faults, gradients
        self._record = record or trace.Recorder(None, replica=driver.replica, rank=driver.rank)
        regions = gradients.regions
        local = [bucket for region in regions for bucket in region.buckets]
        holdings = gather((stage, tuple(bucket.size for bucket in local)))
        bucket_ranks = number(regions, stage, holdings)
        num_stages = 1 + max(stage for stage, _ in holdings)
        self.shape = Shape(len(holdings), bucket_ranks, Pipeline(num_stages, max(1, gradients.num_chunks)))
        self.ledger_bucket: BucketId = len(bucket_ranks) - 1
        exactly = config.determinism == "exact"
        self._accumulators = {
            region: region.local.new_zeros(region.local.numel(), dtype=torch.float64) for region in regions if exactly
        }
        self._gradient_slots = [GradientSlot(bucket, self._accumulators.get(bucket.region)) for bucket in local]
        self._exponent = exact.grid_exponent(1.0)
        self._ledger_slot: LedgerSlot | None = None
        """Of the current step; None on other stages than the last."""
        self.is_last_stage = is_last_stage
        # Of the ledger too, and a transport between GPUs takes nothing else.
        self.device = regions[0].local.device if regions else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._step = self._num_microbatches = 0
        self._newest_into: tuple[Sequence[BucketId], frozenset[BucketId]] = ((), frozenset())
        self._counted: set[BucketId] = set()
        """Buckets that have been passed by the backward that is being watched."""
        self._first_generation = self._parameters_checksum = 0

    def buckets(self, forward_only: bool) -> tuple[BucketId, ...]:
        """What a step reduces: every bucket of the replica, or for an evaluation only the ledger."""
        return (self.ledger_bucket,) if forward_only else tuple(range(self.ledger_bucket + 1))

    # --- a step -----------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger | None:
        """The step's rows on the last stage; None on other stages."""
        return self._ledger_slot.ledger if self._ledger_slot is not None else None

    def begin(self, step: int, num_microbatches: int, scale: float = 1.0, *, parameters_checksum: int = 0) -> None:
        """Start a step: nothing is counted. Megatron has zeroed the local gradient.

        `scale` is the ratio of the gradient that is summed over replicas and lanes to that of the step's mean loss (for the
        grid of `exact`). `parameters_checksum` is of the parameters that the step starts from. It goes into every checksum that
        is voted on, so a replica whose parameters have drifted is outvoted at its next step instead of training on.
        """
        self._step, self._num_microbatches, self._exponent = step, num_microbatches, exact.grid_exponent(scale)
        self._parameters_checksum, self._first_generation = parameters_checksum, 0
        if self.is_last_stage:
            self._ledger_slot = LedgerSlot(self.ledger_bucket, num_microbatches, self.device)
        for slot in self._slots:
            slot.begin(num_microbatches)
        for accumulator in self._accumulators.values():
            accumulator.zero_()

    def takes(self, order: Plan | Apply) -> None:
        """Take note of the next order. What is planned in a later generation than the step's first order is planned again."""
        self._first_generation = self._first_generation or order.generation

    def is_again(self, generation: Generation) -> bool:
        """Whether what a plan of this generation orders is done a second time in the step."""
        return generation != self._first_generation

    def void(self) -> None:
        """Begin the step anew: nothing is counted, and the local gradient and the ledger are empty. Between two passes only."""
        for slot in self._slots:
            slot.clear(self._num_microbatches)
        for region in self._gradients.regions:
            region.local.zero_()
        for accumulator in self._accumulators.values():
            accumulator.zero_()

    @property
    def _slots(self) -> list[Slot]:
        """All buckets of this rank in the current step; on the last stage the last one is the ledger."""
        return [*self._gradient_slots, *([] if self._ledger_slot is None else [self._ledger_slot])]

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """From now on gradient goes into the local gradient of the buckets `into`, and no other (None: the pass is over)."""
        if not self._accumulators:  # which take what counts at the end of each backward
            self._gradients.collect_into(into)

    def can_watch(self, into: Sequence[BucketId]) -> bool:
        """Whether `watch` knows when a backward that goes into these buckets has passed one of them."""
        # What goes into some buckets only, parts of parameters included, arrives at the end of the backward.
        return self._gradients.can_watch and (bool(self._accumulators) or all(slot.id in into for slot in self._gradient_slots))

    def watch(self, task: Task, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """The chunk's last backward of a pass begins: until it ends, a bucket counts the id as soon as it has been passed.

        `passed(bucket)` is told then; not of buckets that the backward leaves out a parameter of.
        """
        slots = {slot.id: slot for slot in self._gradient_slots}

        def count_and_pass(bucket: BucketId) -> None:
            if bucket in task.into:
                self._count(slots[bucket], task.microbatch)
                slots[bucket].passed_by = task
            self._counted.add(bucket)
            passed(bucket)

        self._gradients.watch(chunk, count_and_pass)

    def end_backward(self, microbatch: int, chunk: int, into: Sequence[BucketId]) -> tuple[BucketId, ...]:
        """A backward has finished: count the id in the buckets `into` of this chunk; those are returned."""
        buckets = self._into(into)
        taken = [slot for slot in self._gradient_slots if slot.chunk == chunk and slot.id in buckets]
        for slot in taken:
            if slot.id not in self._counted:
                self._count(slot, microbatch)
        if self._gradients.can_watch:
            self._gradients.end_watch()
            self._counted.clear()
        for region in self._accumulators:
            if region.chunk == chunk:
                region.local.zero_()
        return tuple(slot.id for slot in taken)

    def _into(self, into: Sequence[BucketId]) -> frozenset[BucketId]:
        """Return buckets as a set; that of the newest sequence is kept, since all microbatches of a plan share one."""
        if self._newest_into[0] is not into:
            self._newest_into = into, frozenset(into)
        return self._newest_into[1]

    def _count(self, slot: GradientSlot, microbatch: int) -> None:
        slot.count(microbatch, self._exponent)

    def count_ledger(self, microbatch: int) -> None:
        """The id's row of the ledger is complete."""
        assert self._ledger_slot is not None
        self._ledger_slot.counts.add(microbatch)

    # --- reducing ---------------------------------------------------------------------------------

    def reduce(self, plan: Plan, *, wait_for: Callable[[BucketId], None] = lambda bucket: None) -> None:
        """Carry out a plan's transfers, then its sums, bucket by bucket: over lanes in full, over replicas until one fails.

        `wait_for(bucket)` returns when the last backward has passed it. Raises RuntimeError for a gradient that is not finite,
        if Megatron was told to check, before anyone gets a part of it.
        """
        if self._faults is not None:
            self._faults.at(FaultPoint.BEFORE_REDUCE, step=self._step)
        slots = {slot.id: slot for slot in sorted(self._slots, key=lambda slot: slot.order)}
        due = operations(plan, self._driver.replica, slots)
        copies = [each for each in due if each.source is not None]
        transport = self._cross(plan.generation, None, lambda: self._begin_crossing(plan.generation, slots, copies))
        for slot in (slots[each.bucket] for each in due if each.source is None):
            wait_for(slot.id)
            if self._gradients.checks_finite:
                slot.check_finite()
            self._note_passed(slot)
            source, provenance = slot.source(), slot.summed_counts()
            if transport is not None:
                transport = self._cross(
                    plan.generation, slot.id, functools.partial(self._sum, transport, slot, source, provenance, plan.generation)
                )  # fmt: skip

    def _cross(self, generation: int, bucket: BucketId | None, operation: Callable[[], Transport]) -> Transport | None:
        """The transport for what comes next, or None where the operation has failed: the rest of the plan is left undone."""
        try:
            return operation()
        except TransportError as error:
            self._fail(generation, bucket, error)
            return None

    def _begin_crossing(self, generation: int, slots: Mapping[BucketId, Slot], copies: Sequence[Operation]) -> Transport:
        transport = self._driver.transport(generation)
        for copy in copies:
            self._copy(transport, slots[copy.bucket], copy)
        return transport

    def _sum(self, transport: Transport, slot: Slot, source: Tensor, provenance: Tensor, generation: int) -> Transport:
        since = time.perf_counter()
        transport.sum_into(
            [source, provenance], [slot.result, slot.provenance], tag=self._tag(slot.id, 0),
            probe=self._probe(slot.id, generation),
        )  # fmt: skip
        self._complete(slot, generation, time.perf_counter() - since)
        return transport

    def _note_passed(self, slot: Slot) -> None:
        task, slot.passed_by = slot.passed_by, None
        if task is not None and slot.chunk is not None:
            self._record(
                trace.BucketPassed, generation=task.generation, step=self._step, microbatch=task.microbatch,
                chunk=slot.chunk, bucket=slot.id,
            )  # fmt: skip

    def _copy(self, transport: Transport, slot: Slot, copy: Operation) -> None:
        assert copy.source is not None
        if self._faults is not None:
            self._faults.at(FaultPoint.TRANSFER, step=self._step, bucket=slot.id)
        transport.copy_into(
            [slot.result, slot.provenance], source=copy.source, targets=copy.members[1:], tag=self._tag(slot.id, 1)
        )
        if self._driver.replica != copy.source:
            value = self._checksum(slot)
            if not slot.is_once:
                # The source would not hold it: it is the copy that is wrong, and the next generation makes another.
                error = TransportError(
                    f"the copy of bucket {slot.id} from replica {copy.source} is damaged: {slot.describe_counts()}"
                )
                error.peers = (copy.source,)
                raise error
            self._record(
                trace.Transferred, generation=copy.generation, step=self._step, bucket=slot.id, version=copy.version,
                source=copy.source, checksum=value,
            )  # fmt: skip
            self._hold(Held(slot.id, copy.version, value))

    def _complete(self, slot: Slot, generation: int, seconds: float) -> None:
        value = self._checksum(slot)
        once = slot.is_once
        self._record(
            trace.Reduced, generation=generation, step=self._step, bucket=slot.id, version=generation, checksum=value,
            provenance="ones" if once else tuple(int(count) for count in slot.provenance[:-1].tolist()),
            seconds=round(seconds, 6),
        )  # fmt: skip
        if not once:
            own = tuple(int(count) for count in slot.counts.tensor(torch.device("cpu"))[:-1].tolist())
            self._record(
                trace.Miscounted, generation=generation, step=self._step, bucket=slot.id,
                microbatches=tuple(slot.wrong_ids()), own_counts=own,
            )  # fmt: skip
            raise Miscounted(f"step {self._step}, bucket {slot.id}: {slot.describe_counts()}")
        self._hold(Held(slot.id, generation, value))

    def _checksum(self, slot: Slot) -> int:
        return combined((checksum(slot.result), self._parameters_checksum))

    def _hold(self, held: Held) -> None:
        if not self._driver.hold(held):
            raise Revoked("a newer generation was promised while the result was on its way")

    def _fail(self, generation: int, bucket: BucketId | None, error: TransportError) -> None:
        reason = trace.reason_of(error)
        self._record(trace.ReductionFailed, generation=generation, step=self._step, reason=reason, bucket=bucket)
        if not isinstance(error, Revoked) or error.stalled:
            self._driver.blocked(generation, error)

    def _tag(self, bucket: BucketId, kind: int) -> int:
        """Unique in a transport's life: a generation may last many steps, and has one sum and one transfer a bucket in each."""
        return (self._step * 2 + kind) * (self.ledger_bucket + 1) + bucket

    def _probe(self, bucket: BucketId, generation: int) -> Probe | None:
        faults = self._faults
        if faults is None:
            return None
        point = FaultPoint.SECOND_REDUCE if self.is_again(generation) else FaultPoint.REDUCE

        def probe(instant: str) -> None:
            if instant == "middle":
                faults.at(point, step=self._step, bucket=bucket)

        return probe

    # --- the committed step -----------------------------------------------------------------------

    def apply(self, buckets: Sequence[BucketId]) -> None:
        """The step is committed: the results of these buckets become the gradient (gathered over lanes that need all of it)."""
        for slot in self._gradient_slots:
            if slot.id not in buckets:
                continue
            slot.apply()
            if not slot.is_exact(self._exponent):
                logger.warning(
                    "step %d is not exact: the gradient of bucket %d outgrew the grid of 2**%d; replicas are bit-identical "
                    "all the same, but the run may differ from one without failures", self._step, slot.id, self._exponent,
                )  # fmt: skip

    def committed_rows(self) -> Tensor:
        """The ledger of all the step's ids; last stage only."""
        assert self._ledger_slot is not None
        return self._ledger_slot.committed_rows()
