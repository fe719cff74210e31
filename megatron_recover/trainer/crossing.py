"""The part of a plan's reduction that crosses replicas: its transfers and its sums.

Decides when a result is complete on this rank, and reports it as held. It never reports a result
whose provenance is not one for every microbatch of the step (INV-1). If gradients are checked, it
never reports a result with a gradient or a loss that is not finite.

Note [Judging behind]
    The next bucket's sum begins before the host has judged the last one: each time the host waits
    for a device, the device has nothing to do until the host has enqueued more. So a result is
    judged when its summary has arrived (`ResultSummary.has_arrived`), at the latest when all sums
    are done or one has failed. Then the host waits for the newest summary, and the older ones have
    arrived as well. So it waits once for the sums of a plan, whatever the number of buckets. This
    does not count the wait inside each sum: `NcclTransport.sum_into` returns when its own sum is
    complete. After a fault the host waits once more for each transfer, and for each bucket that is
    left out whose gradient is checked (`Crossing.sum`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from megatron_recover import trace
from megatron_recover.core.digest import combined
from megatron_recover.core.plan import Operation
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import BucketId, Held
from megatron_recover.data_plane.transport import Probe, Revoked, Transport, TransportError
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.trainer.bucket_sums import BucketSum
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.result_summary import ResultSummary


class Miscounted(TransportError):
    """A bucket's sum does not count every microbatch of the step once.

    The step is void (`core.membership_messages.Void`).
    """

    miscounted = True


class NotFinite(RuntimeError):
    """A gradient or a loss of this rank is not finite."""

    def __init__(self, message: str, microbatches: tuple[int, ...] = ()) -> None:
        """Create the error. `microbatches`: those at fault; empty: they are not known."""
        super().__init__(message)
        self.microbatches = microbatches


class Crossing:
    """The transfers and sums of one plan on one rank.

    After the first failure no transfer or sum begins, and only that failure is reported. A revoke
    without a stall is recorded in the trace, but not reported. Sums that the device already has are
    still judged, and held where nothing is wrong with them.
    """

    def __init__(
        self,
        plan: Plan,
        driver: Driver,
        *,
        num_buckets: int,
        parameters_checksum: int,
        record: trace.RankTrace,
        faults: FaultInjector | None,
        sum_fault: FaultPoint,
    ) -> None:
        """Get the transport of the plan's generation. Report the failure if there is none.

        - `num_buckets`: buckets of the replica.
        - `parameters_checksum`: combined into every checksum that is reported.
        - `sum_fault`: the fault point inside a sum.
        """
        self._generation, self._step, self._driver = plan.generation, plan.step, driver
        self._num_buckets, self._parameters_checksum = num_buckets, parameters_checksum
        self._record, self._faults, self._sum_fault = record, faults, sum_fault
        self._unjudged = deque[ResultSummary]()
        """Sums that the host has not judged yet, in their order."""
        self._transport: Transport | None = None
        """None after a failure."""
        try:
            self._transport = driver.transport(plan.generation)
        except TransportError as error:
            self._report(None, error)

    def copy(self, bucket_sum: BucketSum, operation: Operation) -> None:
        """Carry out this rank's part in the transfer of a result.

        Return when the transfer is done or has failed.
        """
        self._try(None, lambda transport: self._copy(transport, bucket_sum, operation))

    def sum(self, bucket_sum: BucketSum, source: Tensor, counts: Tensor, is_finite: Tensor | None) -> None:
        """Sum `source` and its provenance `counts` over the replicas, and judge what has arrived.

        `is_finite`: whether this rank's gradient or loss is finite, as a scalar on its device;
        None: it is not checked. Raises NotFinite if it is not finite, as soon as that is known:
        perhaps in a later call, or in `finish`.
        """
        is_summed = self._try(bucket_sum.id, lambda transport: self._sum(transport, bucket_sum, source, counts, is_finite))
        if not is_summed and is_finite is not None and not is_finite:  # no sum is begun any more, so the host may wait
            raise _not_finite(bucket_sum)
        self._judge(wait=False)

    def finish(self) -> None:
        """Judge the sums that are left. Raises as `sum` does."""
        self._judge(wait=True)

    # --- operations -------------------------------------------------------------------------------

    def _try(self, bucket: BucketId | None, operation: Callable[[Transport], None]) -> bool:
        """Run an operation unless an earlier one has failed; return whether it is done.

        A TransportError is reported and not raised.
        """
        if self._transport is None:
            return False
        try:
            operation(self._transport)
        except TransportError as error:
            self._judge(wait=True, after_stall=error.stalled)  # sums that were complete before the failure
            self._fail(bucket, error)
            return False
        return True

    def _sum(
        self, transport: Transport, bucket_sum: BucketSum, source: Tensor, counts: Tensor, is_finite: Tensor | None
    ) -> None:
        since = time.perf_counter()
        transport.sum_into(
            [source, counts], [bucket_sum.result, bucket_sum.provenance], tag=self._tag(bucket_sum.id, 0),
            probe=self._probe(bucket_sum.id),
        )  # fmt: skip
        self._unjudged.append(ResultSummary(bucket_sum, is_finite, seconds=time.perf_counter() - since))

    def _copy(self, transport: Transport, bucket_sum: BucketSum, operation: Operation) -> None:
        assert operation.source is not None
        if self._faults is not None:
            self._faults.at(FaultPoint.TRANSFER, step=self._step, bucket=bucket_sum.id)
        transport.copy_into(
            [bucket_sum.result, bucket_sum.provenance], source=operation.source, targets=operation.members[1:],
            tag=self._tag(bucket_sum.id, 1),
        )  # fmt: skip
        if self._driver.replica == operation.source:
            return
        copied = ResultSummary(bucket_sum)
        copied.read()
        if not (copied.is_once and copied.all_finite):
            # A source holds only results with right counts, so the copy is wrong. The next
            # generation makes another one.
            why = "it has values that are not finite" if copied.is_once else _describe_counts(bucket_sum)
            error = TransportError(f"the copy of bucket {bucket_sum.id} from replica {operation.source} is damaged: {why}")
            error.peers = (operation.source,)
            raise error
        checksum = self._with_parameters(copied.checksum)
        self._record(
            trace.Transferred, generation=operation.generation, step=self._step, bucket=bucket_sum.id,
            version=operation.version, source=operation.source, checksum=checksum,
        )  # fmt: skip
        self._hold(Held(bucket_sum.id, operation.version, checksum))

    # --- results ----------------------------------------------------------------------------------

    def _judge(self, *, wait: bool, after_stall: bool = False) -> None:
        """Judge the sums whose summaries have arrived, in their order; with `wait` all of them.

        `after_stall`: a later operation has stalled and is reported next, with the peers that it
        waited for. Only the first failure is reported, so a result that a newer generation has
        overtaken does not count as one here.
        """
        if wait and self._unjudged:
            self._unjudged[-1].wait()
        while self._unjudged and (wait or self._unjudged[0].has_arrived()):
            judged = self._unjudged.popleft()
            judged.read()
            if not judged.own_is_finite:
                raise _not_finite(judged.bucket_sum)
            try:
                self._complete(judged)
            except TransportError as error:
                if not (after_stall and isinstance(error, Revoked)):
                    self._fail(judged.bucket_sum.id, error)

    def _complete(self, judged: ResultSummary) -> None:
        bucket_sum, generation = judged.bucket_sum, self._generation
        if not judged.all_finite:
            raise TransportError(f"bucket {bucket_sum.id}: another rank's gradient or loss is not finite")
        checksum = self._with_parameters(judged.checksum)
        counts: Literal["ones"] | tuple[int, ...] = "ones"
        if not judged.is_once:
            counts = tuple(int(count) if math.isfinite(count) else -1 for count in bucket_sum.summed_counts())
        self._record(
            trace.Reduced, generation=generation, step=self._step, bucket=bucket_sum.id, version=generation,
            checksum=checksum, provenance=counts, seconds=round(judged.seconds, 6),
        )  # fmt: skip
        if not judged.is_once:
            self._record(
                trace.Miscounted, generation=generation, step=self._step, bucket=bucket_sum.id,
                microbatches=tuple(bucket_sum.wrong_counts()), own_counts=bucket_sum.counts.each(),
            )  # fmt: skip
            raise Miscounted(f"step {self._step}, bucket {bucket_sum.id}: {_describe_counts(bucket_sum)}")
        self._hold(Held(bucket_sum.id, generation, checksum))

    def _with_parameters(self, checksum: int) -> int:
        return combined((checksum, self._parameters_checksum))

    def _hold(self, held: Held) -> None:
        if not self._driver.hold(held):
            raise Revoked("a newer generation was promised while the result was on its way")

    def _fail(self, bucket: BucketId | None, error: TransportError) -> None:
        """Begin no more of the plan; report the failure, if it is the first."""
        if self._transport is not None:
            self._transport = None
            self._report(bucket, error)

    def _report(self, bucket: BucketId | None, error: TransportError) -> None:
        self._record(
            trace.ReductionFailed, generation=self._generation, step=self._step, reason=trace.reason_of(error), bucket=bucket
        )
        if not isinstance(error, Revoked) or error.stalled:
            self._driver.blocked(self._generation, error)

    # --- names of operations ----------------------------------------------------------------------

    def _tag(self, bucket: BucketId, kind: int) -> int:
        """Return the tag of a bucket's sum (kind 0) or transfer (kind 1) in this step.

        The tag is unique in a transport's life: a generation may last many steps, with at most one
        sum and one transfer per bucket in each.
        """
        return (self._step * 2 + kind) * self._num_buckets + bucket

    def _probe(self, bucket: BucketId) -> Probe | None:
        """Return the probe of a bucket's sum, which injects a fault in the middle of the sum.

        Return None if no faults are injected.
        """
        faults = self._faults
        if faults is None:
            return None

        def probe(instant: str) -> None:
            if instant == "middle":
                faults.at(self._sum_fault, step=self._step, bucket=bucket)

        return probe


def _not_finite(bucket_sum: BucketSum) -> NotFinite:
    return NotFinite(f"the gradient of microbatches {bucket_sum.counts.counted()} has values that are not finite")


def _describe_counts(bucket_sum: BucketSum) -> str:
    return f"counts that are not 1, by microbatch: {bucket_sum.wrong_counts()}"
