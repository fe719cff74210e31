"""Sums: for each bucket what this rank adds, its counts, and the result.

A sum never communicates across replicas and never decides whether its result is valid
(`reduction.Reduction`).

Note [Provenance]
    Each bucket has one float64 tensor beside its elements: a count per microbatch of how often its
    gradient is in the bucket, and last the bound of `exact`. A microbatch is counted when its
    backward has really finished. The tensor goes through the same sums as the gradient, over lanes
    and replicas.
"""

from __future__ import annotations

import abc
import math

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_recover.core.values import BucketId, MicrobatchId
from megatron_recover.trainer import exact
from megatron_recover.trainer.ledger import NUM_COLUMNS, Ledger
from megatron_recover.trainer.provenance import Counts, is_once, wrong_ids
from megatron_recover.trainer.regions import Bucket
from megatron_recover.trainer.work_queue import Task


class BucketSum(abc.ABC):
    """One bucket of this rank: what the rank adds to the sum, and the result."""

    num_lanes = 1
    """Lanes over which the bucket is summed inside the replica."""

    def __init__(self, number: BucketId, chunk: int | None, result: Tensor) -> None:
        """Create the sum of bucket `number` with its tensor for the result.

        `chunk` is the model chunk whose backward passes the bucket; None: no backward does.
        """
        self.id, self.chunk, self.result = number, chunk, result
        self.order = (0, -chunk, number) if chunk is not None else (1, 0, number)
        """Sort key in which backward passes the buckets, the ledger last. Equal on all replicas."""
        self.counts = Counts(0)
        """Counts of the microbatches in the local gradient; see Note [Provenance]."""
        self.provenance = result.new_empty(0)
        """Provenance of the result: M counts and the bound (float64)."""
        self.passed_by: Task | None = None
        """Task whose backward has passed the bucket since the last reduction."""

    def begin(self, num_microbatches: int) -> None:
        """Begin a step with nothing counted."""
        self.clear(num_microbatches)
        self.provenance = torch.empty(num_microbatches + 1, dtype=torch.float64, device=self.result.device)

    def clear(self, num_microbatches: int) -> None:
        """Clear the counts. The result and its provenance stay as they are."""
        self.counts, self.passed_by = Counts(num_microbatches), None

    @abc.abstractmethod
    def source(self) -> Tensor:
        """Return the tensor that this rank adds to the sum over replicas.

        Collective over the lanes.
        """

    def summed_counts(self) -> Tensor:
        """Return the provenance of `source`. Collective over the lanes."""
        return self.counts.tensor(self.result.device)

    @abc.abstractmethod
    def check_finite(self) -> None:
        """Raise RuntimeError if the gradient is not finite.

        Called before another rank gets a part of the gradient.
        """

    @property
    def is_once(self) -> bool:
        """Return whether the result counts every microbatch once."""
        return is_once(self.provenance, self.num_lanes)

    def wrong_ids(self) -> list[MicrobatchId]:
        """Return the microbatches that the result does not count once."""
        return wrong_ids(self.provenance, self.num_lanes)

    def describe_counts(self) -> str:
        """Describe what is wrong with the counts of the result."""
        counts = {index: self.provenance[index].item() / self.num_lanes for index in self.wrong_ids()}
        return f"counts that are not 1, by microbatch: {counts}"


class GradientSum(BucketSum):
    """The sum of a gradient bucket."""

    def __init__(self, bucket: Bucket, accumulator: Tensor | None) -> None:
        """Use `accumulator` as the local gradient, or the trainer's buffer if None.

        `accumulator` is the float64 accumulator of the bucket's region (`exact`).
        """
        region = bucket.region
        result = region.local.new_empty(bucket.size, dtype=None if accumulator is None else torch.float64)
        super().__init__(bucket.id, region.chunk, result)
        self._bucket, self._accumulator = bucket, accumulator
        self.num_lanes = region.num_lanes

    def count(self, microbatch: MicrobatchId, exponent: int) -> None:
        """Count a microbatch whose gradient is in the trainer's buffer.

        With `exact` also add the gradient to the accumulator on the grid of 2**`exponent`.
        """
        self.counts.add(microbatch)
        if self._accumulator is None:
            return
        for part in self._bucket.slices():
            gradient = self._bucket.region.local[part]
            self.counts.raise_bound(exact.magnitude(gradient))
            exact.fold(self._accumulator[part], gradient, exponent)

    def source(self) -> Tensor:
        """Return the tensor that this rank adds to the sum over replicas.

        Collective over the lanes.
        """
        return self._bucket.sum_over_lanes(self._local)

    def summed_counts(self) -> Tensor:
        """Return the provenance of `source`. Collective over the lanes."""
        counts = super().summed_counts()
        if self.num_lanes > 1:
            dist.all_reduce(counts, group=self._bucket.region.group)
        return counts

    def check_finite(self) -> None:
        """Raise RuntimeError if the gradient is not finite.

        Called before another rank gets a part of the gradient.
        """
        for part in self._bucket.slices():
            local = self._local[part]
            # Any value that is not finite makes the sum not finite. Finite values may also overflow
            # the sum, so the largest magnitude decides then. On a CPU it takes 50 times as long.
            if not torch.isfinite(local.sum()) and not torch.isfinite(torch.linalg.vector_norm(local, ord=math.inf)):
                raise RuntimeError(f"the gradient of microbatches {self.counts.counted()} has values that are not finite")

    def apply(self) -> None:
        """Make the result the gradient, gathered over the lanes if each lane needs all of it."""
        self._bucket.apply(self.result)

    def is_exact(self, exponent: int) -> bool:
        """Return whether the result is independent of which replica computed what."""
        return self._accumulator is None or exact.fits(float(self.provenance[-1]), exponent)

    @property
    def _local(self) -> Tensor:
        return self._bucket.region.local if self._accumulator is None else self._accumulator


class LedgerSum(BucketSum):
    """The sum of the ledger, the last bucket of a step."""

    ledger: Ledger
    """Ledger of the current step."""

    def __init__(self, number: BucketId, num_microbatches: int, device: torch.device) -> None:
        super().__init__(number, None, torch.empty(num_microbatches * NUM_COLUMNS, dtype=torch.float64, device=device))

    def clear(self, num_microbatches: int) -> None:
        """Clear the counts and the ledger."""
        super().clear(num_microbatches)
        self.ledger = Ledger(num_microbatches, self.result.device)

    def check_finite(self) -> None:
        """Accept every value: a loss report is no gradient."""

    def source(self) -> Tensor:
        """Return this rank's rows, flattened."""
        return self.ledger.rows().view(-1)

    def committed_rows(self) -> Tensor:
        """Return the rows of all the step's microbatches, shape (M, `NUM_COLUMNS`).

        Call it once the step is committed.
        """
        return self.result.view(-1, NUM_COLUMNS)
