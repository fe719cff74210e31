"""The reduction of one rank: from local gradients to results, over lanes and over replicas.

Decides when a result is complete on this rank. `reduce` never writes a local gradient (INV-3) and
never decides whether a step is committed. It never reports a result whose provenance is not one for
every microbatch of the step (INV-1). A step with such a result is void and begins again
(`Reduction.void`).
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
from megatron_recover.trainer.bucket_sums import BucketSum, GradientSum, LedgerSum
from megatron_recover.trainer.checksum import checksum, combined
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.ledger import Ledger
from megatron_recover.trainer.regions import Regions, number
from megatron_recover.trainer.work_queue import Task

logger = logging.getLogger(__name__)


Gather = Callable[[Any], Sequence[Any]]
"""A function that gathers one value per rank of the replica, in the order of ranks."""


def gather_over_replica(value: Any) -> list[Any]:
    """Gather over the replica's own world; a `Gather`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Miscounted(TransportError):
    """A bucket's sum does not count every microbatch of the step once.

    The step is void (`core.values.Void`).
    """

    miscounted = True


class Reduction:
    """The buckets of one rank and their reductions, for the life of the rank.

    The calls of a step, in order:

    1. `begin`;
    2. `takes` for the first order;
    3. any number of passes, with `collect_into` before and `end_backward` after every backward.
       `reduce` follows each pass, and each plan without a pass. Where a plan voids, `void` comes
       first;
    4. `apply`, after which the trainer's buffer holds the gradient of the step.

    `reduce` may run beside the last backwards of a pass, in the thread `recover-reduce`
    (`overlap.Overlap`). It then touches a bucket only after the last backward has *passed* it:
    every parameter in the bucket has its gradient.
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
        record: trace.RankTrace | None = None,
        faults: FaultInjector | None = None,
    ) -> None:
        """Assign ids to the buckets of `gradients`, together with all ranks of the replica.

        `gather` is collective over the replica. `stage` is this rank's pipeline stage. Raises
        ValueError if ranks of one stage differ in their buckets.
        """
        self._driver, self._faults, self._gradients = driver, faults, gradients
        self._record = record or trace.RankTrace(None, replica=driver.replica, rank=driver.rank)
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
        self._gradient_sums = [GradientSum(bucket, self._accumulators.get(bucket.region)) for bucket in local]
        self._exponent = exact.grid_exponent(1.0)
        self._ledger_sum: LedgerSum | None = None
        """Slot of the current step's ledger; None on other stages than the last."""
        self.is_last_stage = is_last_stage
        # The device of the ledger as well: a transport between GPUs accepts no other tensors.
        self.device = regions[0].local.device if regions else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._step = self._num_microbatches = 0
        self._newest_into: tuple[Sequence[BucketId], frozenset[BucketId]] = ((), frozenset())
        self._counted: set[BucketId] = set()
        """Buckets that the watched backward has passed."""
        self._first_generation = self._parameters_checksum = 0
        self._refusals: set[str] = set()
        """Reasons against overlap that were logged."""

    def buckets(self, forward_only: bool) -> tuple[BucketId, ...]:
        """Return the buckets that a step reduces.

        Training reduces every bucket of the replica, evaluation only the ledger.
        """
        return (self.ledger_bucket,) if forward_only else tuple(range(self.ledger_bucket + 1))

    # --- a step -----------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger | None:
        """The step's rows on the last stage; None on other stages."""
        return self._ledger_sum.ledger if self._ledger_sum is not None else None

    def begin(self, step: int, num_microbatches: int, scale: float = 1.0, *, parameters_checksum: int = 0) -> None:
        """Begin a step with nothing counted. Megatron has zeroed the local gradient.

        - `scale`: ratio of the gradient summed over replicas and lanes to the mean-loss gradient,
          for the grid of `exact`.
        - `parameters_checksum`: checksum of the parameters that the step starts from. It is
          combined into every checksum that is voted on. So a replica whose parameters have drifted
          is outvoted at its next step instead of training on.
        """
        self._step, self._num_microbatches, self._exponent = step, num_microbatches, exact.grid_exponent(scale)
        self._parameters_checksum, self._first_generation = parameters_checksum, 0
        if self.is_last_stage:
            self._ledger_sum = LedgerSum(self.ledger_bucket, num_microbatches, self.device)
        for bucket_sum in self._sums:
            bucket_sum.begin(num_microbatches)
        for accumulator in self._accumulators.values():
            accumulator.zero_()

    def takes(self, order: Plan | Apply) -> None:
        """Note the step's first order.

        A plan of a later generation repeats work of the step (`is_again`).
        """
        self._first_generation = self._first_generation or order.generation

    def is_again(self, generation: Generation) -> bool:
        """Return whether a plan of this generation repeats work of the step."""
        return generation != self._first_generation

    def void(self) -> None:
        """Begin the step again: clear all counts, the local gradient and the ledger.

        Call it between two passes only.
        """
        for bucket_sum in self._sums:
            bucket_sum.clear(self._num_microbatches)
        for region in self._gradients.regions:
            region.local.zero_()
        for accumulator in self._accumulators.values():
            accumulator.zero_()

    @property
    def _sums(self) -> list[BucketSum]:
        """Slots of this rank's buckets in the current step; on the last stage, the ledger last."""
        return [*self._gradient_sums, *([] if self._ledger_sum is None else [self._ledger_sum])]

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """Direct gradient into the local gradient of the buckets `into` only.

        None: the pass is over. With `exact` nothing is redirected.
        """
        if not self._accumulators:  # with `exact`, `end_backward` selects the buckets instead
            self._gradients.collect_into(into)

    def can_watch(self, into: Sequence[BucketId]) -> bool:
        """Return whether `watch` can report the buckets passed by a backward into `into`."""
        # A backward into some buckets only, which may cut parameters in two, adds its gradient at
        # its end.
        return self._gradients.can_watch and (
            bool(self._accumulators) or all(bucket_sum.id in into for bucket_sum in self._gradient_sums)
        )

    def may_overlap(self, plan: Plan) -> bool:
        """Return whether the plan's sums may run beside a backward; log why not, once."""
        sums = [each for each in self._sums if each.id in plan.reduces]
        operands = {(tensor.dtype, tensor.numel()) for each in sums for tensor in (each.result, each.provenance)}
        refusal = self._driver.overlap_refusal(plan.generation, operands)
        if refusal and refusal not in self._refusals:
            self._refusals.add(refusal)
            logger.warning("the reduction does not overlap with the backward: %s", refusal)
        return not refusal

    @functools.cached_property
    def overlap_stream(self) -> torch.cuda.Stream | None:
        """Return the stream of `recover-reduce` for the life of the rank; None without a GPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def watch(self, task: Task, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """Watch the last backward of `chunk` in a pass; call before it begins.

        Until `end_backward` each bucket of `task.into` counts the microbatch as soon as the
        backward has passed the bucket. `passed(bucket)` is called then, and never for a bucket with
        a parameter that gets no gradient.
        """
        sums = {bucket_sum.id: bucket_sum for bucket_sum in self._gradient_sums}

        def count_and_pass(bucket: BucketId) -> None:
            if bucket in task.into:
                self._count(sums[bucket], task.microbatch)
                sums[bucket].passed_by = task
            self._counted.add(bucket)
            passed(bucket)

        self._gradients.watch(chunk, count_and_pass)

    def end_backward(self, microbatch: int, chunk: int, into: Sequence[BucketId]) -> tuple[BucketId, ...]:
        """Count the microbatch in the chunk's buckets among `into`; return those buckets.

        Call it when a backward of `chunk` has finished. A bucket that the watched backward has
        passed already counts the microbatch. With `exact` this call also clears the trainer's
        buffer of the chunk, and with it the gradient of the buckets that are not in `into`.
        """
        buckets = self._into(into)
        taken = [bucket_sum for bucket_sum in self._gradient_sums if bucket_sum.chunk == chunk and bucket_sum.id in buckets]
        for bucket_sum in taken:
            if bucket_sum.id not in self._counted:
                self._count(bucket_sum, microbatch)
        if self._gradients.can_watch:
            self._gradients.end_watch()
            self._counted.clear()
        for region in self._accumulators:
            if region.chunk == chunk:
                region.local.zero_()
        return tuple(bucket_sum.id for bucket_sum in taken)

    def _into(self, into: Sequence[BucketId]) -> frozenset[BucketId]:
        """Return the buckets as a set.

        Cached for the newest sequence, which all microbatches of a plan share.
        """
        if self._newest_into[0] is not into:
            self._newest_into = into, frozenset(into)
        return self._newest_into[1]

    def _count(self, bucket_sum: GradientSum, microbatch: int) -> None:
        bucket_sum.count(microbatch, self._exponent)

    def count_ledger(self, microbatch: int) -> None:
        """Count a microbatch whose row of the ledger is complete."""
        assert self._ledger_sum is not None
        self._ledger_sum.counts.add(microbatch)

    # --- reducing ---------------------------------------------------------------------------------

    def reduce(self, plan: Plan, *, wait_for: Callable[[BucketId], None] = lambda bucket: None) -> None:
        """Carry out a plan's transfers, then its sums, bucket by bucket.

        Sums over lanes are always carried out in full, sums over replicas until one fails.
        `wait_for(bucket)` returns when the last backward is done with the bucket. Raises
        RuntimeError for a gradient that is not finite, if Megatron was set to check, before another
        rank gets a part of it.
        """
        if self._faults is not None:
            self._faults.at(FaultPoint.BEFORE_REDUCE, step=self._step)
        sums = {bucket_sum.id: bucket_sum for bucket_sum in sorted(self._sums, key=lambda bucket_sum: bucket_sum.order)}
        due = operations(plan, self._driver.replica, sums)
        copies = [each for each in due if each.source is not None]
        transport = self._cross(plan.generation, None, lambda: self._begin_crossing(plan.generation, sums, copies))
        for bucket_sum in (sums[each.bucket] for each in due if each.source is None):
            wait_for(bucket_sum.id)
            if self._gradients.checks_finite:
                bucket_sum.check_finite()
            self._note_passed(bucket_sum)
            source, provenance = bucket_sum.source(), bucket_sum.summed_counts()
            if transport is not None:
                run = functools.partial(self._sum, transport, bucket_sum, source, provenance, plan.generation)
                transport = self._cross(plan.generation, bucket_sum.id, run)

    def _cross(self, generation: int, bucket: BucketId | None, operation: Callable[[], Transport]) -> Transport | None:
        """Run an operation across replicas; return the transport for the next one.

        None: the operation failed, and the rest of the plan is skipped across replicas.
        """
        try:
            return operation()
        except TransportError as error:
            self._fail(generation, bucket, error)
            return None

    def _begin_crossing(self, generation: int, sums: Mapping[BucketId, BucketSum], copies: Sequence[Operation]) -> Transport:
        transport = self._driver.transport(generation)
        for copy in copies:
            self._copy(transport, sums[copy.bucket], copy)
        return transport

    def _sum(
        self, transport: Transport, bucket_sum: BucketSum, source: Tensor, provenance: Tensor, generation: int
    ) -> Transport:
        since = time.perf_counter()
        transport.sum_into(
            [source, provenance], [bucket_sum.result, bucket_sum.provenance], tag=self._tag(bucket_sum.id, 0),
            probe=self._probe(bucket_sum.id, generation),
        )  # fmt: skip
        self._complete(bucket_sum, generation, time.perf_counter() - since)
        return transport

    def _note_passed(self, bucket_sum: BucketSum) -> None:
        task, bucket_sum.passed_by = bucket_sum.passed_by, None
        if task is not None and bucket_sum.chunk is not None:
            self._record(
                trace.BucketPassed, generation=task.generation, step=self._step, microbatch=task.microbatch,
                chunk=bucket_sum.chunk, bucket=bucket_sum.id,
            )  # fmt: skip

    def _copy(self, transport: Transport, bucket_sum: BucketSum, copy: Operation) -> None:
        assert copy.source is not None
        if self._faults is not None:
            self._faults.at(FaultPoint.TRANSFER, step=self._step, bucket=bucket_sum.id)
        transport.copy_into(
            [bucket_sum.result, bucket_sum.provenance],
            source=copy.source,
            targets=copy.members[1:],
            tag=self._tag(bucket_sum.id, 1),
        )
        if self._driver.replica != copy.source:
            value = self._checksum(bucket_sum)
            if not bucket_sum.is_once:
                # A source holds only results with right counts, so the copy is wrong. The next
                # generation makes another one.
                error = TransportError(
                    f"the copy of bucket {bucket_sum.id} from replica {copy.source} is damaged: {bucket_sum.describe_counts()}"
                )
                error.peers = (copy.source,)
                raise error
            self._record(
                trace.Transferred, generation=copy.generation, step=self._step, bucket=bucket_sum.id, version=copy.version,
                source=copy.source, checksum=value,
            )  # fmt: skip
            self._hold(Held(bucket_sum.id, copy.version, value))

    def _complete(self, bucket_sum: BucketSum, generation: int, seconds: float) -> None:
        value = self._checksum(bucket_sum)
        once = bucket_sum.is_once
        self._record(
            trace.Reduced, generation=generation, step=self._step, bucket=bucket_sum.id, version=generation, checksum=value,
            provenance="ones" if once else tuple(int(count) for count in bucket_sum.provenance[:-1].tolist()),
            seconds=round(seconds, 6),
        )  # fmt: skip
        if not once:
            own = tuple(int(count) for count in bucket_sum.counts.tensor(torch.device("cpu"))[:-1].tolist())
            self._record(
                trace.Miscounted, generation=generation, step=self._step, bucket=bucket_sum.id,
                microbatches=tuple(bucket_sum.wrong_ids()), own_counts=own,
            )  # fmt: skip
            raise Miscounted(f"step {self._step}, bucket {bucket_sum.id}: {bucket_sum.describe_counts()}")
        self._hold(Held(bucket_sum.id, generation, value))

    def _checksum(self, bucket_sum: BucketSum) -> int:
        return combined((checksum(bucket_sum.result), self._parameters_checksum))

    def _hold(self, held: Held) -> None:
        if not self._driver.hold(held):
            raise Revoked("a newer generation was promised while the result was on its way")

    def _fail(self, generation: int, bucket: BucketId | None, error: TransportError) -> None:
        reason = trace.reason_of(error)
        self._record(trace.ReductionFailed, generation=generation, step=self._step, reason=reason, bucket=bucket)
        if not isinstance(error, Revoked) or error.stalled:
            self._driver.blocked(generation, error)

    def _tag(self, bucket: BucketId, kind: int) -> int:
        """Return the tag of a bucket's sum (kind 0) or transfer (kind 1) in this step.

        The tag is unique in a transport's life: a generation may last many steps, with one sum and
        one transfer per bucket in each.
        """
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
        """Make the results of these buckets the gradient, once the step is committed.

        Results are gathered over the lanes if each lane needs all of them.
        """
        for bucket_sum in self._gradient_sums:
            if bucket_sum.id not in buckets:
                continue
            bucket_sum.apply()
            if not bucket_sum.is_exact(self._exponent):
                logger.warning(
                    "step %d is not exact: the gradient of bucket %d outgrew the grid of 2**%d; replicas are bit-identical "
                    "all the same, but the run may differ from one without failures", self._step, bucket_sum.id, self._exponent,
                )  # fmt: skip

    def committed_rows(self) -> Tensor:
        """Return the committed ledger of the step; last stage only."""
        assert self._ledger_sum is not None
        return self._ledger_sum.committed_rows()
