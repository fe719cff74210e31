"""What a step sums over replicas, one slot a bucket: where the sum is taken from, what is counted in it, where its result goes.

A slot never communicates across replicas and never decides whether its result counts (`reduction.Reduction`).

Note [Provenance]
    Beside its elements a bucket carries one float64 tensor: how often each id is in its gradient, counted when a backward has
    really finished, and at the end the bound of `exact`. It goes through the same sums as the gradient, over lanes and
    replicas.
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


class Slot(abc.ABC):
    """A bucket of this rank."""

    num_lanes = 1
    """Lanes over which it is summed inside the replica."""

    def __init__(self, number: BucketId, chunk: int | None, result: Tensor) -> None:
        """`chunk` is the model chunk whose backward passes the bucket; None: no backward does."""
        self.id, self.chunk, self.result = number, chunk, result
        self.order = (0, -chunk, number) if chunk is not None else (1, 0, number)
        """In which backward passes the buckets, the last stage's ledger at the end; equal on all replicas."""
        self.counts = Counts(0)
        """How often each id is in what is summed; see Note [Provenance]."""
        self.provenance = result.new_empty(0)
        """The provenance of the result."""
        self.passed_by: Task | None = None
        """The microbatch in whose backward the bucket was passed, since the last reduction."""

    def begin(self, num_microbatches: int) -> None:
        """Start a step: nothing is counted."""
        self.clear(num_microbatches)
        self.provenance = torch.empty(num_microbatches + 1, dtype=torch.float64, device=self.result.device)

    def clear(self, num_microbatches: int) -> None:
        """Count nothing. The result and its provenance stay as they are."""
        self.counts, self.passed_by = Counts(num_microbatches), None

    @abc.abstractmethod
    def source(self) -> Tensor:
        """Return this rank's part of the sum over replicas. Collective over the lanes."""

    def summed_counts(self) -> Tensor:
        """Return the provenance of `source`. Collective over the lanes."""
        return self.counts.tensor(self.result.device)

    @abc.abstractmethod
    def check_finite(self) -> None:
        """Raise RuntimeError for a gradient that is not finite, before another rank gets a part of it."""

    @property
    def is_once(self) -> bool:
        """Whether the result counts every microbatch once."""
        return is_once(self.provenance, self.num_lanes)

    def wrong_ids(self) -> list[MicrobatchId]:
        """Return the microbatches that the result does not count once."""
        return wrong_ids(self.provenance, self.num_lanes)

    def describe_counts(self) -> str:
        """Describe what is wrong with the counts of the result."""
        counts = {index: self.provenance[index].item() / self.num_lanes for index in self.wrong_ids()}
        return f"counts that are not 1, by microbatch: {counts}"


class GradientSlot(Slot):
    """A bucket of gradients."""

    def __init__(self, bucket: Bucket, accumulator: Tensor | None) -> None:
        """`accumulator` is the float64 local gradient of the bucket's region (`exact`); None: the trainer's buffer itself."""
        region = bucket.region
        result = region.local.new_empty(bucket.size, dtype=None if accumulator is None else torch.float64)
        super().__init__(bucket.id, region.chunk, result)
        self._bucket, self._accumulator = bucket, accumulator
        self.num_lanes = region.num_lanes

    def count(self, microbatch: MicrobatchId, exponent: int) -> None:
        """Count a microbatch whose gradient is in the trainer's buffer; with `exact` add it on the grid of 2**`exponent`."""
        self.counts.add(microbatch)
        if self._accumulator is None:
            return
        for part in self._bucket.slices():
            gradient = self._bucket.region.local[part]
            self.counts.raise_bound(exact.magnitude(gradient))
            exact.fold(self._accumulator[part], gradient, exponent)

    def source(self) -> Tensor:
        """Return this rank's part of the sum over replicas. Collective over the lanes."""
        return self._bucket.sum_over_lanes(self._local)

    def summed_counts(self) -> Tensor:
        """Return the provenance of `source`. Collective over the lanes."""
        counts = super().summed_counts()
        if self.num_lanes > 1:
            dist.all_reduce(counts, group=self._bucket.region.group)
        return counts

    def check_finite(self) -> None:
        """Raise RuntimeError for a gradient that is not finite, before another rank gets a part of it."""
        for part in self._bucket.slices():
            local = self._local[part]
            # One value that is not finite makes the sum not finite. The largest magnitude settles whether it was only the sum
            # that overflowed; on a CPU it takes 50 times as long.
            if not torch.isfinite(local.sum()) and not torch.isfinite(torch.linalg.vector_norm(local, ord=math.inf)):
                raise RuntimeError(f"the gradient of microbatches {self.counts.counted()} has values that are not finite")

    def apply(self) -> None:
        """Make the result the gradient (gathered over lanes that need all of it)."""
        self._bucket.apply(self.result)

    def is_exact(self, exponent: int) -> bool:
        """Return whether the result is the same whoever computed what."""
        return self._accumulator is None or exact.fits(float(self.provenance[-1]), exponent)

    @property
    def _local(self) -> Tensor:
        return self._bucket.region.local if self._accumulator is None else self._accumulator


class LedgerSlot(Slot):
    """The last bucket of a step: what the last stage knows of each microbatch."""

    ledger: Ledger
    """Of the step that has begun."""

    def __init__(self, number: BucketId, num_microbatches: int, device: torch.device) -> None:
        super().__init__(number, None, torch.empty(num_microbatches * NUM_COLUMNS, dtype=torch.float64, device=device))

    def clear(self, num_microbatches: int) -> None:
        """Count nothing, and empty the ledger."""
        super().clear(num_microbatches)
        self.ledger = Ledger(num_microbatches, self.result.device)

    def check_finite(self) -> None:
        """Accept every value: what a loss function reports is no gradient."""

    def source(self) -> Tensor:
        """Return this rank's rows."""
        return self.ledger.rows().view(-1)

    def committed_rows(self) -> Tensor:
        """Return the rows of all the step's microbatches, once the step is committed. Shape: (M, `NUM_COLUMNS`)."""
        return self.result.view(-1, NUM_COLUMNS)
