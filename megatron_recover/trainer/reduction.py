"""From local gradients to results: buckets, their provenance, sums over lanes and over replicas.

Decides when a result is complete on this rank. It never writes a local gradient (INV-3), never decides whether a step is
committed, and never reports a result whose provenance is not one for every microbatch of the step (INV-1): such a step is
void, and begins anew (`Reduction.void`). With `exact` the
local gradient is an fp64 accumulator: upstream's buffer then holds one microbatch, and is emptied after each.

Note [Provenance]
    Beside its elements a bucket carries one float64 tensor: how often each id is in its gradient, counted when a backward has
    really finished, and at the end the bound of `exact`. It goes through the same sums as the gradient, over lanes and
    replicas.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.plan import Operation, operations
from megatron_recover.core.values import BucketId, Held, Pipeline, Plan, Shape
from megatron_recover.data_plane.transport import Probe, Revoked, Transport, TransportError
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.trainer import exact
from megatron_recover.trainer.buckets import BackwardWatch, Bucket, Collector, find_regions, number
from megatron_recover.trainer.checksum import checksum, combined
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.ledger import NUM_COLUMNS, Ledger
from megatron_recover.trainer.provenance import Counts, is_once, wrong_ids
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


class _Slot:
    """A bucket of this rank: where its sum is taken from and where its result goes. `bucket` is None for the ledger."""

    def __init__(self, number: BucketId, bucket: Bucket | None, result: Tensor) -> None:
        self.id = number
        self.bucket = bucket
        self.order = (0, -bucket.region.chunk, number) if bucket is not None else (1, 0, number)
        """In which backward passes the buckets, the last stage's ledger at the end; equal on all replicas."""
        self.result = result
        self.counts = Counts(0)
        """How often each id is in the local gradient; see Note [Provenance]."""
        self.provenance = result.new_empty(0)
        """The provenance of the result."""
        self.passed_by: Task | None = None
        """The microbatch in whose backward the bucket was passed, since the last reduction."""
        self.lanes = bucket.region.group if bucket is not None and bucket.region.num_lanes > 1 else None

    @property
    def num_lanes(self) -> int:
        return self.bucket.region.num_lanes if self.lanes is not None and self.bucket is not None else 1


class Reduction:
    """The buckets of one rank, for the life of the rank.

    Order of calls in a step: `begin`; any number of passes, with `collect_into` before and `end_backward` after every
    backward, and of `reduce`; then `apply`, after which the local gradient is the step's. `reduce` may run beside the last
    backwards of a pass, in another thread (`overlap.Overlap`): it touches a bucket only when it has been passed.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        *,
        stage: int,
        is_last_stage: bool,
        config: RecoverConfig,
        driver: Driver,
        gather: Gather = gather_over_replica,
        record: trace.Recorder | None = None,
        faults: FaultInjector | None = None,
    ) -> None:
        """`chunks`: upstream's DDP modules of this rank. Collective over the replica (`gather`)."""
        self._driver, self._faults = driver, faults
        self._record = record or trace.Recorder(None, replica=driver.replica, rank=driver.rank)
        self.regions = find_regions(chunks, config.bucket_elements)
        local = [bucket for region in self.regions for bucket in region.buckets]
        holdings = gather((stage, tuple(bucket.size for bucket in local)))
        bucket_ranks = number(self.regions, stage, holdings)
        num_stages = 1 + max(stage for stage, _ in holdings)
        self.shape = Shape(len(holdings), bucket_ranks, Pipeline(num_stages, max(1, len(chunks))))
        self.ledger_bucket: BucketId = len(bucket_ranks) - 1
        self._checks_finite = any(chunk.ddp_config.check_for_nan_in_grad for chunk in chunks)
        exactly = config.determinism == "exact"
        self._accumulators = {
            region: region.local.new_zeros(region.local.numel(), dtype=torch.float64) for region in self.regions if exactly
        }
        self._gradient_slots = [
            _Slot(bucket.id, bucket, bucket.region.local.new_empty(bucket.size, dtype=torch.float64 if exactly else None))
            for bucket in local
        ]
        self._exponent = exact.grid_exponent(1.0)
        self._slots: list[_Slot] = []
        """All buckets of this rank in the current step; on the last stage the last one is the ledger."""
        self.ledger: Ledger | None = None
        """The step's rows on the last stage; None on other stages."""
        self.is_last_stage = is_last_stage
        # Of the ledger too, and a transport between GPUs takes nothing else.
        self.device = (
            self.regions[0].local.device if self.regions else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
        self._step = 0
        self._watch = BackwardWatch(self.regions) if any(chunk.ddp_config.overlap_grad_reduce for chunk in chunks) else None
        self._newest_into: tuple[Sequence[BucketId], frozenset[BucketId]] = ((), frozenset())
        self._counted: set[BucketId] = set()
        """Buckets that have been passed by the backward that is being watched."""
        self._collector = Collector(self.regions)
        self.first_generation = 0
        """Of the step's first order here, set when it has come: what is planned in a later one is planned again."""
        self.parameters_checksum = 0
        """Of the parameters that the step starts from. It goes into every checksum that is voted on, so a replica
        whose parameters have drifted is outvoted at its next step instead of training on."""

    def buckets(self, forward_only: bool) -> tuple[BucketId, ...]:
        """What a step reduces: every bucket of the replica, or for an evaluation only the ledger."""
        return (self.ledger_bucket,) if forward_only else tuple(range(self.ledger_bucket + 1))

    # --- a step ----------------------------------------------------------------------------------------------------------

    def begin(self, step: int, num_microbatches: int, scale: float = 1.0) -> None:
        """Start a step: nothing is counted. Megatron has zeroed the local gradient.

        `scale`: how many times the mean loss's gradient the sum over replicas and lanes is (for the grid of `exact`).
        """
        self._step, self._exponent = step, exact.grid_exponent(scale)
        self._slots = list(self._gradient_slots)
        if self.is_last_stage:
            self.ledger = Ledger(num_microbatches, self.device)
            self._slots.append(_Slot(self.ledger_bucket, None, self.ledger.rows().new_empty(num_microbatches * NUM_COLUMNS)))
        for slot in self._slots:
            slot.counts, slot.passed_by = Counts(num_microbatches), None
            slot.provenance = torch.empty(num_microbatches + 1, dtype=torch.float64, device=self.device)
        for accumulator in self._accumulators.values():
            accumulator.zero_()

    def void(self) -> None:
        """Begin the step anew: nothing is counted, and the local gradient and the ledger are empty. Between two passes only."""
        num_microbatches = len(self._slots[0].provenance) - 1 if self._slots else 0
        for slot in self._slots:
            slot.counts, slot.passed_by = Counts(num_microbatches), None
        for region in self.regions:
            region.local.zero_()
        for accumulator in self._accumulators.values():
            accumulator.zero_()
        if self.ledger is not None:
            self.ledger = Ledger(num_microbatches, self.device)

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """From now on gradient goes into the local gradient of the buckets `into`, and no other (None: the pass is over)."""
        if not self._accumulators:  # which take what counts at the end of each backward
            self._collector.collect_into(into)

    def can_watch(self, into: Sequence[BucketId]) -> bool:
        """Whether `watch` knows when a backward that goes into these buckets has passed one of them."""
        # What is redirected, parts of parameters included, arrives at the end (`buckets.Redirection`).
        return self._watch is not None and (bool(self._accumulators) or all(slot.id in into for slot in self._gradient_slots))

    def watch(self, task: Task, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """The chunk's last backward of a pass begins: until it ends, a bucket counts the id as soon as it has been passed.

        `passed(bucket)` is told then; not of buckets that the backward leaves out a parameter of.
        """
        assert self._watch is not None
        slots = {slot.id: slot for slot in self._gradient_slots}

        def count_and_pass(bucket: BucketId) -> None:
            if bucket in task.into:
                self._count(slots[bucket], task.microbatch)
                slots[bucket].passed_by = task
            self._counted.add(bucket)
            passed(bucket)

        self._watch.begin(chunk, count_and_pass)

    def end_backward(self, microbatch: int, chunk: int, into: Sequence[BucketId]) -> tuple[BucketId, ...]:
        """A backward has finished: count the id in the buckets `into` of this chunk; those are returned."""
        of_chunk = [slot for slot in self._gradient_slots if slot.bucket is not None and slot.bucket.region.chunk == chunk]
        buckets = self._into(into)
        taken = [slot for slot in of_chunk if slot.id in buckets]
        for slot in taken:
            if slot.id not in self._counted:
                self._count(slot, microbatch)
        if self._watch is not None:
            self._watch.end()
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

    def _count(self, slot: _Slot, microbatch: int) -> None:
        slot.counts.add(microbatch)
        if self._accumulators and slot.bucket is not None:
            self._fold(slot, slot.bucket)

    def count_ledger(self, microbatch: int) -> None:
        """The id's row of the ledger is complete."""
        self._slots[-1].counts.add(microbatch)

    def _fold(self, slot: _Slot, bucket: Bucket) -> None:
        for part in bucket.slices():
            gradient = bucket.region.local[part]
            slot.counts.raise_bound(exact.magnitude(gradient))
            exact.fold(self._accumulators[bucket.region][part], gradient, self._exponent)

    # --- reducing --------------------------------------------------------------------------------------------------------

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
            self._check_finite(slot)
            self._note_passed(slot)
            source, provenance = self._over_lanes(slot), self._provenance_over_lanes(slot)
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

    def _begin_crossing(self, generation: int, slots: Mapping[BucketId, _Slot], copies: Sequence[Operation]) -> Transport:
        transport = self._driver.transport(generation)
        for copy in copies:
            self._copy(transport, slots[copy.bucket], copy)
        return transport

    def _sum(self, transport: Transport, slot: _Slot, source: Tensor, provenance: Tensor, generation: int) -> Transport:
        since = time.perf_counter()
        transport.sum_into(
            [source, provenance], [slot.result, slot.provenance], tag=self._tag(slot.id, 0),
            probe=self._probe(slot.id, generation),
        )  # fmt: skip
        self._complete(slot, generation, time.perf_counter() - since)
        return transport

    def _note_passed(self, slot: _Slot) -> None:
        task, slot.passed_by = slot.passed_by, None
        if task is not None and slot.bucket is not None:
            self._record(
                trace.BucketPassed, generation=task.generation, step=self._step, microbatch=task.microbatch,
                chunk=slot.bucket.region.chunk, bucket=slot.id,
            )  # fmt: skip

    def _check_finite(self, slot: _Slot) -> None:
        if not self._checks_finite or slot.bucket is None:
            return
        region = slot.bucket.region
        for part in slot.bucket.slices():
            local = self._accumulators.get(region, region.local)[part]
            # One value that is not finite makes the sum not finite. The largest magnitude settles whether it was only the sum
            # that overflowed; on a CPU it takes 50 times as long.
            if not torch.isfinite(local.sum()) and not torch.isfinite(torch.linalg.vector_norm(local, ord=math.inf)):
                raise RuntimeError(f"the gradient of microbatches {slot.counts.counted()} has values that are not finite")

    def _over_lanes(self, slot: _Slot) -> Tensor:
        if slot.bucket is None:
            assert self.ledger is not None
            return self.ledger.rows().view(-1)
        region = slot.bucket.region
        return slot.bucket.sum_over_lanes(self._accumulators.get(region, region.local))

    def _provenance_over_lanes(self, slot: _Slot) -> Tensor:
        provenance = slot.counts.tensor(self.device)
        if slot.lanes is not None:
            dist.all_reduce(provenance, group=slot.lanes)
        return provenance

    def _copy(self, transport: Transport, slot: _Slot, copy: Operation) -> None:
        assert copy.source is not None
        if self._faults is not None:
            self._faults.at(FaultPoint.TRANSFER, step=self._step, bucket=slot.id)
        transport.copy_into(
            [slot.result, slot.provenance], source=copy.source, targets=copy.members[1:], tag=self._tag(slot.id, 1)
        )
        if self._driver.replica != copy.source:
            value = self._checksum(slot)
            if not is_once(slot.provenance, slot.num_lanes):
                # The source would not hold it: it is the copy that is wrong, and the next generation makes another.
                error = TransportError(
                    f"the copy of bucket {slot.id} from replica {copy.source} is damaged: {self._counts(slot)}"
                )
                error.peers = (copy.source,)
                raise error
            self._record(
                trace.Transferred, generation=copy.generation, step=self._step, bucket=slot.id, version=copy.version,
                source=copy.source, checksum=value,
            )  # fmt: skip
            self._hold(Held(slot.id, copy.version, value))

    def _complete(self, slot: _Slot, generation: int, seconds: float) -> None:
        value = self._checksum(slot)
        once = is_once(slot.provenance, slot.num_lanes)
        self._record(
            trace.Reduced, generation=generation, step=self._step, bucket=slot.id, version=generation, checksum=value,
            provenance="ones" if once else tuple(int(count) for count in slot.provenance[:-1].tolist()),
            seconds=round(seconds, 6),
        )  # fmt: skip
        if not once:
            own = tuple(int(count) for count in slot.counts.tensor(torch.device("cpu"))[:-1].tolist())
            wrong = tuple(wrong_ids(slot.provenance, slot.num_lanes))
            self._record(
                trace.Miscounted, generation=generation, step=self._step, bucket=slot.id, microbatches=wrong, own_counts=own
            )  # fmt: skip
            raise Miscounted(f"step {self._step}, bucket {slot.id}: {self._counts(slot)}")
        self._hold(Held(slot.id, generation, value))

    def _checksum(self, slot: _Slot) -> int:
        return combined((checksum(slot.result), self.parameters_checksum))

    def _counts(self, slot: _Slot) -> str:
        """Describe what is wrong with the counts of a result."""
        wrong = wrong_ids(slot.provenance, slot.num_lanes)
        counts = {index: slot.provenance[index].item() / slot.num_lanes for index in wrong}
        return f"counts that are not 1, by microbatch: {counts}"

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
        point = FaultPoint.REDUCE if generation == self.first_generation else FaultPoint.SECOND_REDUCE

        def probe(instant: str) -> None:
            if instant == "middle":
                faults.at(point, step=self._step, bucket=bucket)

        return probe

    # --- the committed step ----------------------------------------------------------------------------------------------

    def apply(self, buckets: Sequence[BucketId]) -> None:
        """The step is committed: the results of these buckets become the gradient (gathered over lanes that need all of it)."""
        for slot in self._gradient_slots:
            if slot.bucket is not None and slot.id in buckets:
                slot.bucket.apply(slot.result)
                if self._accumulators and not exact.fits(float(slot.provenance[-1]), self._exponent):
                    logger.warning(
                        "step %d is not exact: the gradient of bucket %d outgrew the grid of 2**%d; replicas are bit-identical "
                        "all the same, but the run may differ from one without failures", self._step, slot.id, self._exponent,
                    )  # fmt: skip

    def committed_rows(self) -> Tensor:
        """The ledger of all the step's ids; last stage only."""
        return self._slots[-1].result.view(-1, NUM_COLUMNS)
