"""The reduction of one rank: from local gradients to results, over lanes and over replicas.

`reduce` never writes a local gradient (INV-3) and never decides whether a step is committed. What
crosses replicas is in `crossing.Crossing`. A step with a result that does not count every
microbatch once is void, and is computed anew once (`Reduction.void`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.plan import operations
from megatron_recover.core.rank_messages import Apply, Plan
from megatron_recover.core.values import BucketId, Generation, MicrobatchId, Pipeline, Shape
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.trainer import exact
from megatron_recover.trainer.bucket_sums import BucketSum, GradientSum, LedgerSum
from megatron_recover.trainer.crossing import Crossing, NotFinite
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.ledger import Ledger
from megatron_recover.trainer.reducing_thread import ReducingThread
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


class Reduction:
    """The buckets of one rank and their reductions, for the life of the rank.

    The calls of a step, in order:

    1. `begin`;
    2. `takes` for the first order;
    3. any number of passes, with `collect_into` before every forward and backward, `end_forward`
       after every forward, and `end_backward` after every backward; on the last stage also
       `count_ledger` for each microbatch. `reduce` follows each pass, and each plan without a pass.
       Where a plan voids, `void` comes first;
    4. in a training step that has a result, `apply`. Then the trainer's buffer holds the gradient
       of the step.

    `start`, in place of `reduce`, carries out a plan beside the last backwards of a pass, in the
    thread `recover-reduce` (`overlap.Overlap`). It sums a bucket only after the last backward has
    *passed* it (every parameter in the bucket has its gradient), or after the pass.
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
            region: region.local.new_zeros(region.local.numel(), dtype=torch.float64)
            for region in regions
            if exactly and not region.sums_exactly
        }
        self._gradient_sums = [GradientSum(bucket, self._accumulators.get(bucket.region)) for bucket in local]
        self._exponent = exact.grid_exponent(1.0)
        self._ledger_sum: LedgerSum | None = None
        """Sum of the current step's ledger; None before the first step and on other stages than
        the last."""
        self.is_last_stage = is_last_stage
        # The device of the ledger as well: a transport between GPUs accepts no other tensors.
        self.device = regions[0].local.device if regions else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._step = self._num_microbatches = 0
        self._newest_into: tuple[Sequence[BucketId], frozenset[BucketId]] = ((), frozenset())
        self._counted: set[BucketId] = set()
        """Buckets that the watched backward has passed."""
        self._first_generation = self._parameters_checksum = 0
        self._thread = ReducingThread(self.device)
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
        """Return the ledger of the step on the last stage, None on other stages."""
        return self._ledger_sum.ledger if self._ledger_sum is not None else None

    def begin(self, step: int, num_microbatches: int, scale: float = 1.0, *, parameters_checksum: int = 0) -> None:
        """Begin a step with nothing counted. In training the trainer has zeroed its buffer before.

        - `scale`: ratio of the gradient summed over replicas and lanes to the mean-loss gradient,
          for the grid of `exact`.
        - `parameters_checksum`: the newest checksum of the parameters. It is computed when the rank
          joins, and after each training step whose iteration is a multiple of
          `--recover-digest-interval`. It is combined into every checksum that is voted on. So
          replicas whose parameters have drifted disagree in the step after that, and a minority is
          outvoted instead of training on.
        """
        self._step, self._num_microbatches, self._exponent = step, num_microbatches, exact.grid_exponent(scale)
        self._parameters_checksum, self._first_generation = parameters_checksum, 0
        if self.is_last_stage:
            self._ledger_sum = LedgerSum(self.ledger_bucket, num_microbatches, self.device)
        for region in self._gradients.regions:
            region.begin()
        for bucket_sum in self._sums:
            bucket_sum.begin(num_microbatches)
        for accumulator in self._accumulators.values():
            accumulator.zero_()

    def takes(self, order: Plan | Apply) -> None:
        """Store the generation of the step's first order, for `is_again`."""
        self._first_generation = self._first_generation or order.generation

    def is_again(self, generation: Generation) -> bool:
        """Return whether this generation is another than that of the step's first order."""
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
        """Return the sums of this rank's buckets; on the last stage that of the ledger is last."""
        return [*self._gradient_sums, *([] if self._ledger_sum is None else [self._ledger_sum])]

    def collect_into(self, into: tuple[BucketId, ...] | None) -> None:
        """Direct gradient into the local gradient of the buckets `into` only.

        None: the pass is over. With `exact` nothing is redirected.
        """
        if not self._accumulators:  # with `exact`, `end_backward` selects the buckets instead
            self._gradients.collect_into(into)

    def can_watch(self, into: Sequence[BucketId]) -> bool:
        """Return whether `watch` can report the buckets passed by a backward into `into`."""
        # A backward into some buckets only, which may cut parameters in two, adds parts of its
        # gradient after its end.
        return self._gradients.can_watch and (
            bool(self._accumulators) or all(bucket_sum.id in into for bucket_sum in self._gradient_sums)
        )

    def may_overlap(self, plan: Plan) -> bool:
        """Return whether the plan's sums may run beside a backward; log each reason once."""
        sums = [each for each in self._sums if each.id in plan.reduces]
        operands = {each.operand for each in sums} | {(each.provenance.dtype, each.provenance.numel()) for each in sums}
        refusal = self._driver.overlap_refusal(plan.generation, operands)
        if refusal and refusal not in self._refusals:
            self._refusals.add(refusal)
            logger.warning("the reduction does not overlap with the backward: %s", refusal)
        return not refusal

    def _allocate(self, plan: Plan) -> None:
        """Allocate the results that a plan makes on this rank.

        The training thread calls it before a reduction begins: to allocate beside a backward may
        wait for the device. Raises DeviceError if the device has no memory left.
        """
        made = {*plan.reduces, *(each.bucket for each in plan.transfers if each.source != self._driver.replica)}
        for bucket_sum in self._sums:
            if bucket_sum.id in made:
                bucket_sum.allocate()

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """Return the stream of all reductions for the life of the rank; None without a GPU.

        It is one stream, also where nothing overlaps: torch keeps free memory by stream, so a first
        reduction beside a backward finds what it needs.
        """
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def watch(self, task: Task, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """Watch the last backward of `chunk` in a pass; call before it begins.

        Until `end_backward` each bucket of `task.into` counts the microbatch as soon as the
        backward has passed the bucket. `passed(bucket)` is called then, in the thread that runs the
        backward. It is called for buckets outside of `task.into` too, and never for a bucket with a
        parameter that gets no gradient.
        """
        sums = {bucket_sum.id: bucket_sum for bucket_sum in self._gradient_sums}

        def count_and_pass(bucket: BucketId) -> None:
            if bucket in task.into:
                self._count(sums[bucket], task.microbatch)
                sums[bucket].passed_by = task
            self._counted.add(bucket)
            passed(bucket)

        self._gradients.watch(chunk, count_and_pass)

    def end_forward(self, microbatch: int, chunk: int) -> None:
        """Call `Region.forward_ended` of the regions of `chunk`, after each forward."""
        for region in self._gradients.regions:
            if region.chunk == chunk:
                region.forward_ended(microbatch)

    def end_backward(self, microbatch: int, chunk: int, into: Sequence[BucketId]) -> tuple[BucketId, ...]:
        """Count the microbatch in the chunk's buckets among `into`; return those buckets.

        Call it when a backward of `chunk` has finished. A bucket that the watched backward has
        passed already counts the microbatch. This call also ends `watch`. With `exact` it clears
        the trainer's buffer of the chunk, and with it the gradient of the buckets that are not in
        `into`.
        """
        buckets = self._into(into)
        for region in self._gradients.regions:
            if region.chunk == chunk:
                region.backward_ended(microbatch, buckets)
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

        The set is cached for the newest sequence, which all microbatches of a `Compute` share.
        """
        if self._newest_into[0] is not into:
            self._newest_into = into, frozenset(into)
        return self._newest_into[1]

    def _count(self, bucket_sum: GradientSum, microbatch: int) -> None:
        bucket_sum.count(microbatch, self._exponent)

    def count_ledger(self, microbatch: int) -> None:
        """Count a microbatch whose row of the ledger has its losses; on the last stage only."""
        assert self._ledger_sum is not None
        self._ledger_sum.counts.add(microbatch)

    # --- reducing ---------------------------------------------------------------------------------

    def reduce(self, plan: Plan, *, note_finished: Callable[[], object] = lambda: None) -> None:
        """Carry out a plan, and return when that is done. Called by the training thread.

        The failure of a transfer or a sum over replicas is not raised (`Crossing`).
        `note_finished()` is called in the training thread after each sum and at the end. With
        `--overlap-grad-reduce` it is called once, when the thread `recover-reduce` is done
        (`reducing_thread`, Note [One thread]). Raises NotFinite for a gradient or a loss of this
        rank that is not finite, with `Regions.checks_finite`. No rank holds a result with one.
        Raises DeviceError if the device has no memory left.
        """
        if self._gradients.can_watch:
            self.finish(self.start(plan), note_finished)
            return
        self._prepare(plan)
        try:
            self._carry_out(plan, lambda bucket: None, note_finished)
        finally:
            self._let_training_wait()

    def start(self, plan: Plan, wait_for: Callable[[BucketId], None] = lambda bucket: None) -> Future[None]:
        """Start to carry out a plan in the thread `recover-reduce`.

        `finish` must follow, unless the pass raises. `wait_for(bucket)` is called in that thread
        before the bucket is summed. It returns when no backward of the pass will touch the bucket.
        Raises DeviceError at once if the device has no memory left for the results.
        """
        self._prepare(plan)
        return self._thread.begin(lambda: self._carry_out(plan, wait_for, lambda: None))

    def finish(self, started: Future[None], note_finished: Callable[[], object]) -> None:
        """Return when a plan is carried out that has started; raise what `reduce` raises.

        `note_finished()` is called then, also before an exception is raised.
        """
        try:
            started.result()
        finally:
            note_finished()
            self._let_training_wait()

    def _prepare(self, plan: Plan) -> None:
        self._allocate(plan)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def _let_training_wait(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _carry_out(self, plan: Plan, wait_for: Callable[[BucketId], None], note_finished: Callable[[], object]) -> None:
        """Carry out a plan's transfers, then its sums, bucket by bucket, on `stream`.

        After a failure no further transfer or sum over replicas begins. Sums over lanes are still
        carried out in full, unless an exception is raised. A NotFinite names the microbatches if
        their losses are the cause.
        """
        with torch.cuda.stream(self.stream):  # does nothing without a GPU
            try:
                self._sum_all(plan, wait_for, note_finished)
            except NotFinite as error:
                # A loss that is not finite makes the gradient so, which is found first.
                found = self._ledger_sum.ledger.not_finite() if self._ledger_sum is not None else ()
                if not found:
                    raise
                raise NotFinite(f"the loss of microbatches {list(found)} is not finite", found) from error

    def _sum_all(self, plan: Plan, wait_for: Callable[[BucketId], None], note_finished: Callable[[], object]) -> None:
        """Carry out a plan, as `_carry_out` does."""
        if self._faults is not None:
            self._faults.at(FaultPoint.BEFORE_REDUCE, step=self._step)
        sums = {bucket_sum.id: bucket_sum for bucket_sum in sorted(self._sums, key=lambda bucket_sum: bucket_sum.order)}
        crossing = Crossing(
            plan, self._driver, num_buckets=self.ledger_bucket + 1, parameters_checksum=self._parameters_checksum,
            record=self._record, faults=self._faults,
            sum_fault=FaultPoint.SECOND_REDUCE if self.is_again(plan.generation) else FaultPoint.REDUCE,
        )  # fmt: skip
        due = operations(plan, self._driver.replica, sums)
        for each in due:
            if each.source is not None:
                crossing.copy(sums[each.bucket], each)
        for bucket_sum in (sums[each.bucket] for each in due if each.source is None):
            wait_for(bucket_sum.id)
            is_finite = bucket_sum.is_finite() if self._gradients.checks_finite else None
            self._note_passed(bucket_sum)
            crossing.sum(bucket_sum, bucket_sum.source(), bucket_sum.source_provenance(is_finite), is_finite)
            note_finished()
        crossing.finish()
        note_finished()

    def _note_passed(self, bucket_sum: BucketSum) -> None:
        task, bucket_sum.passed_by = bucket_sum.passed_by, None
        if task is not None and bucket_sum.chunk is not None:
            self._record(
                trace.BucketPassed, generation=task.generation, step=self._step, microbatch=task.microbatch,
                chunk=bucket_sum.chunk, bucket=bucket_sum.id,
            )  # fmt: skip

    # --- the committed step -----------------------------------------------------------------------

    def mean_norms(self) -> Iterator[tuple[BucketId, list[MicrobatchId], float]]:
        """Yield gradient buckets with microbatches here, their ids, and `GradientSum.mean_norm`.

        Call it before `apply`. Waits for the device.
        """
        for bucket_sum in self._gradient_sums:
            if bucket_sum.is_passed and (norm := bucket_sum.mean_norm()) is not None:
                yield bucket_sum.id, bucket_sum.counts.counted(), float(norm)

    def apply(self, buckets: Sequence[BucketId]) -> None:
        """Make the results of these buckets the gradient, once the step is committed.

        Results are gathered over the lanes if each lane needs all of them. The ledger and the
        buckets of other ranks are ignored. On a GPU the results lose their memory. Log a gradient
        that outgrew the grid of `exact`.
        """
        for bucket_sum in self._gradient_sums:
            if bucket_sum.id not in buckets:
                continue
            bucket_sum.apply()
            bucket_sum.release()
            if not bucket_sum.fits_grid(self._exponent):
                logger.warning(
                    "step %d is not exact: the gradient of bucket %d outgrew the grid of 2**%d; replicas are bit-identical "
                    "all the same, but the run may differ from one without failures", self._step, bucket_sum.id, self._exponent,
                )  # fmt: skip
        for region in self._gradients.regions:
            region.applied()

    def committed_rows(self) -> tuple[Tensor, Tensor]:
        """Return the committed ledger of the step, on the device and in host memory.

        Call it on the last stage only.
        """
        assert self._ledger_sum is not None
        return self._ledger_sum.committed_rows()
