"""Holds for each bucket what this rank adds to the sum, its counts, and the result.

Nothing here communicates across replicas or decides whether a result is valid
(`crossing.Crossing` does).

Note [Results]
    A result is out of place: the local gradient stays as it is until the step is committed (INV-3).
    Once a replica has applied a committed step, nobody needs the replica's results of that step:
    all members held all results before any of them committed, and plans copy only results of a step
    that nobody has committed (`core/recovery.py`). So on a GPU the result of a gradient bucket has
    memory from the reduction to `apply`. Between `apply` and the next reduction activations use
    that memory. On a CPU the result keeps its memory, which the system would otherwise have to
    clear in each step.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_recover.core.values import BucketId, MicrobatchId
from megatron_recover.data_plane.transport import DeviceError, Operand
from megatron_recover.trainer import exact, provenance
from megatron_recover.trainer.ledger import NUM_COLUMNS, Ledger
from megatron_recover.trainer.provenance import Counts
from megatron_recover.trainer.regions import Bucket
from megatron_recover.trainer.work_queue import Task


class BucketSum(abc.ABC):
    """One bucket of this rank: what the rank adds to the sum, and the result."""

    num_lanes = 1
    """Lanes over which the bucket is summed inside the replica."""

    def __init__(self, number: BucketId, chunk: int | None, operand: Operand, device: torch.device) -> None:
        """Create the sum of bucket `number`, whose result has type and size `operand`, on `device`.

        `chunk` is the model chunk whose backwards the bucket counts; None: the ledger.
        """
        self.id, self.chunk, self.operand, self.device = number, chunk, operand, device
        self.order = (0, -chunk, number) if chunk is not None else (1, 0, number)
        """Sort key. First come the buckets that a backward passes, in the order in which backwards
        usually pass them, then the others, and last the ledger. The order is equal on all
        replicas."""
        self.counts = Counts(0)
        """Counts of the microbatches in the local gradient."""
        self.provenance = provenance.empty(0, device)
        """Provenance of the result."""
        self.bound = 0.0
        """Bound of the result, from `arrived` on; see `exact`."""
        self.passed_by: Task | None = None
        """Task whose watched backward has passed the bucket since the last reduction; None: no
        watched backward has."""
        self._result: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """Return the tensor of the result, which must be allocated; see Note [Results]."""
        assert self._result is not None, f"bucket {self.id} has no result"
        return self._result

    def allocate(self) -> None:
        """Allocate the result, unless it has memory.

        Raises DeviceError if the device has no memory left.
        """
        if self._result is not None:
            return
        dtype, size = self.operand
        try:
            self._result = torch.empty(size, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"no memory is left on the device for the result of bucket {self.id}: {error}") from error

    def release(self) -> None:
        """Give back the memory of the result, which nobody needs any more. On a CPU keep it."""
        if self.device.type != "cpu":
            self._result = None

    def begin(self, num_microbatches: int) -> None:
        """Begin a step with nothing counted."""
        self.clear(num_microbatches)
        self.provenance = provenance.empty(num_microbatches, self.device)

    def clear(self, num_microbatches: int) -> None:
        """Clear the counts and `passed_by`. The result and its provenance stay as they are."""
        self.counts, self.passed_by = Counts(num_microbatches), None

    def needed_on_host(self) -> list[Tensor]:
        """Return the tensors of the result that the host needs beside its summary."""
        return []

    def arrived(self, bound: float, on_host: Sequence[Tensor]) -> None:
        """Store the bound of the result, and `on_host`: `needed_on_host` in host memory."""
        self.bound = bound

    @abc.abstractmethod
    def source(self) -> Tensor:
        """Return the tensor that this rank adds to the sum over replicas.

        Collective over the lanes.
        """

    def source_provenance(self, is_finite: Tensor | None) -> Tensor:
        """Return the provenance of `source`. Collective over the lanes.

        `is_finite`: whether what this rank adds is finite, as a scalar on its device; None: it is
        not checked.
        """
        return self.counts.provenance(self.device, is_finite=is_finite)

    @abc.abstractmethod
    def is_finite(self) -> Tensor:
        """Return whether what this rank adds is finite, as a scalar on its device."""

    def summed_counts(self) -> tuple[float, ...]:
        """Return the counts of the result, one per microbatch. Waits for the device."""
        return provenance.counts_of(self.provenance)

    def wrong_counts(self) -> dict[MicrobatchId, float]:
        """Return the counts of the result, divided by the lanes, that are not one, by microbatch.

        Waits for the device.
        """
        counts = enumerate(self.summed_counts())
        return {index: count / self.num_lanes for index, count in counts if count != self.num_lanes}


class GradientSum(BucketSum):
    """The sum of a gradient bucket."""

    def __init__(self, bucket: Bucket, accumulator: Tensor | None) -> None:
        """Use `accumulator` as the local gradient, or the trainer's buffer if None.

        `accumulator` is the float64 accumulator of the bucket's region (`exact`).
        """
        region = bucket.region
        dtype = region.local.dtype if accumulator is None else torch.float64
        super().__init__(bucket.id, region.chunk, (dtype, bucket.size), region.local.device)
        if not region.is_passed:
            self.order = (1, 0, bucket.id)
        self._bucket, self._accumulator = bucket, accumulator
        self._bound = None if accumulator is None else accumulator.new_zeros(())
        self.num_lanes = region.num_lanes
        self.is_passed = region.is_passed
        """False if the bucket has no gradient, such as counts of a router."""

    def clear(self, num_microbatches: int) -> None:
        """Clear the counts, `passed_by` and the bound of the local gradient."""
        super().clear(num_microbatches)
        if self._bound is not None:
            self._bound.zero_()

    def count(self, microbatch: MicrobatchId, exponent: int) -> None:
        """Count a microbatch whose gradient is in the trainer's buffer.

        With `exact` also add the gradient to the accumulator on the grid of 2**`exponent`, and its
        largest magnitudes to the bound.
        """
        self.counts.add(microbatch)
        if self._accumulator is None or self._bound is None:
            return
        for part in self._bucket.slices():
            gradient = self._bucket.region.local[part]
            self._bound += exact.magnitude(gradient)
            exact.fold(self._accumulator[part], gradient, exponent)

    def source(self) -> Tensor:
        """Return the tensor that this rank adds to the sum over replicas.

        Collective over the lanes.
        """
        return self._bucket.sum_over_lanes(self._local)

    def source_provenance(self, is_finite: Tensor | None) -> Tensor:
        """Return the provenance of `source`. Collective over the lanes."""
        counts = self.counts.provenance(self.device, bound=self._bound, is_finite=is_finite)
        if self.num_lanes > 1:
            dist.all_reduce(counts, group=self._bucket.region.group)
        return counts

    def is_finite(self) -> Tensor:
        """Return whether the bucket's local gradient is finite, as a scalar on its device."""
        found = [_is_finite(self._local[part]) for part in self._bucket.slices() if part.stop > part.start]
        return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=self.device)

    def apply(self) -> None:
        """Make the result, times the region's scale, the gradient.

        Collective over the lanes if each lane needs all of the gradient.
        """
        self._bucket.apply(self.result)

    def fits_grid(self, exponent: int) -> bool:
        """Return False if the result outgrew the grid of `exact`, 2**`exponent`.

        It may then depend on which replica computed what. Without `exact` always return True, and
        also for a result that is not finite: no order of additions makes it finite, so a loss
        scaler skips the step in every run.
        """
        return self._accumulator is None or not math.isfinite(self.bound) or exact.fits(self.bound, exponent)

    def mean_norm(self) -> Tensor | None:
        """Return the norm of the local gradient, as if its microbatches were the whole step.

        So a replica that computes more microbatches has no larger norm. The result is a scalar on
        the device; None for a local gradient without microbatches.
        """
        counted = len(self.counts.counted())
        if not counted:
            return None
        norms = [torch.linalg.vector_norm(self._local[part]) for part in self._bucket.slices()]
        whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return whole * (len(self.counts.each()) / counted)

    @property
    def _local(self) -> Tensor:
        return self._bucket.region.local if self._accumulator is None else self._accumulator


class LedgerSum(BucketSum):
    """The sum of the ledger, the last bucket of a step."""

    ledger: Ledger
    """Ledger of the current step."""

    def __init__(self, number: BucketId, num_microbatches: int, device: torch.device) -> None:
        super().__init__(number, None, (torch.float64, num_microbatches * NUM_COLUMNS), device)
        self.on_host: Tensor | None = None
        """The result in host memory, once it has arrived."""

    def clear(self, num_microbatches: int) -> None:
        """Clear the counts and `passed_by`, and begin an empty ledger."""
        super().clear(num_microbatches)
        self.ledger = Ledger(num_microbatches, self.device)

    def needed_on_host(self) -> list[Tensor]:
        """Return the result: the losses are read from it."""
        return [self.result]

    def arrived(self, bound: float, on_host: Sequence[Tensor]) -> None:
        """Store the bound, and the result's rows, which are in host memory."""
        super().arrived(bound, on_host)
        [self.on_host] = on_host

    def is_finite(self) -> Tensor:
        """Return whether the first loss of every row of this rank is finite, as a scalar tensor."""
        return self.ledger.is_finite()

    def source(self) -> Tensor:
        """Return this rank's rows, flattened, after writing their seconds."""
        return self.ledger.rows().view(-1)

    def committed_rows(self) -> tuple[Tensor, Tensor]:
        """Return the rows of all the step's microbatches, on the device and in host memory.

        Shape (M, `NUM_COLUMNS`). Call it once the step is committed.
        """
        assert self.on_host is not None
        return self.result.view(-1, NUM_COLUMNS), self.on_host.view(-1, NUM_COLUMNS)


def _is_finite(gradient: Tensor) -> Tensor:
    """Return whether all values are finite, as a scalar on the device."""
    if gradient.device.type != "cpu":
        return torch.isfinite(torch.linalg.vector_norm(gradient, ord=math.inf))
    # Any value that is not finite makes the sum not finite. Finite values may also overflow the
    # sum, so the largest magnitude decides then. On a CPU the magnitude takes 50 times as long.
    found = torch.isfinite(gradient.sum())
    return found if found else torch.isfinite(torch.linalg.vector_norm(gradient, ord=math.inf))
