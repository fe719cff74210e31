"""Provenance: how often each microbatch is in a bucket's gradient.

Counts are made here, summed with the bucket, and compared once. Decides whether a result counts
each microbatch of the step exactly once (INV-1). Counting costs 0.1 us. The comparison takes the
same few operations on the device of the sum, for any number of microbatches.

Note [Provenance]
    Each bucket has one float64 tensor beside its elements. It goes through the same sums as the
    gradient, over lanes and replicas:
    - M counts: how often the gradient of each microbatch is in the bucket. A microbatch is counted
      when its backward has returned. With overlap, a last backward counts its microbatch as soon as
      it has passed the bucket. On a GPU the sum comes behind the kernels that write the gradient,
      in the order of the device. So a sum that has completed has the whole gradient of what it
      counts;
    - the bound of `exact` (`trainer/exact.py`), else 0;
    - the number of ranks whose gradient is not finite, where a gradient is checked. So the host
      need not know that before the sum begins, and no rank holds a result with such a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_recover.trainer.host_copy import to_device

_NUM_OTHERS = 2
"""Elements of a provenance beside its counts: the bound, and the ranks with a gradient that is not
finite."""


def empty(num_microbatches: int, device: torch.device) -> Tensor:
    """Return a provenance of `num_microbatches` with undefined content."""
    return torch.empty(num_microbatches + _NUM_OTHERS, dtype=torch.float64, device=device)


class Counts:
    """Counts of the microbatches in one bucket's local gradient on this rank."""

    def __init__(self, num_microbatches: int) -> None:
        self._tensor = torch.zeros(num_microbatches + _NUM_OTHERS, dtype=torch.float64)
        self._values = self._tensor.numpy()[:num_microbatches]  # the same memory; to index the tensor takes 1 us

    def add(self, microbatch: int) -> None:
        """Count a microbatch whose gradient is in the local gradient.

        Raises IndexError for an id outside 0..M-1.
        """
        if not 0 <= microbatch < len(self._values):
            raise IndexError(f"microbatch {microbatch} of {len(self._values)}")
        self._values[microbatch] += 1

    def each(self) -> tuple[int, ...]:
        """Return the count of each microbatch."""
        return tuple(int(count) for count in self._values)

    def counted(self) -> list[int]:
        """Return the ids of the microbatches in the local gradient."""
        return self._values.nonzero()[0].tolist()

    def provenance(self, device: torch.device, *, bound: Tensor | None = None, is_finite: Tensor | None = None) -> Tensor:
        """Return the provenance of the local gradient on `device`; counting may continue.

        `bound` and `is_finite` are scalars on `device`. None: the bound is 0, the gradient is
        finite or is not checked. Waits for no device.
        """
        found = to_device(self._tensor, device)
        if bound is not None:
            found[-2] = bound
        if is_finite is not None:
            found[-1] = ~is_finite
        return found


def summary(summed: Tensor, num_lanes: int) -> Tensor:
    """Return what decides about a result with the provenance `summed`, on its device.

    The three elements (float64) are: 1 if every microbatch is counted exactly `num_lanes` times
    (NaN counts as wrong), else 0; the bound; the number of ranks whose gradient is not finite.
    """
    is_once = (summed[:-_NUM_OTHERS] == num_lanes).all()
    return torch.cat([is_once.to(summed.dtype).view(1), summed[-_NUM_OTHERS:]])


def counts_of(summed: Tensor) -> tuple[float, ...]:
    """Return the counts of a provenance. Waits for its device."""
    return tuple(summed[:-_NUM_OTHERS].cpu().tolist())
