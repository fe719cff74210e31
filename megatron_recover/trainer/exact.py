"""Gradient sums that do not depend on who computed what (`--recover-determinism exact`).

Decides how a microbatch's gradient is rounded before it is added. Every gradient is rounded to a
grid of multiples of 2**e in float64 (one bin of Demmel and Nguyen, "Fast reproducible
floating-point summation", 2013). Sums of grid points are exact while they stay below 2**53 grid
units. So any partition and any order of additions gives the same bits. The sum is rounded to the
gradient's type once, when the step is applied.

Note [Grid]
    The grid depends on the run's settings only, not on earlier gradients. So a run that resumes
    from a checkpoint has the grid of the uninterrupted run. A mean loss has gradients of order one
    or less: their norm, over all parameters, is a few units at worst. Adam adds 1e-8 to its
    divisor. A grid of 2**-44 = 6e-14 that holds sums below 128 leaves room on both sides. Where
    losses are sums (per-token loss) or scaled, the grid is scaled by the same ratio.

    The bound of a bucket shows whether the grid was large enough. It adds up, over all microbatches
    and lanes, the largest magnitude in each lane's part of the bucket. A step that outgrows the
    grid still has the same sums on all replicas, but may differ from the failure-free run. Such a
    step is reported as not exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIGNIFICAND_BITS = 52
_EXPONENT = -44
"""Exponent of the grid for gradients of a mean loss."""
_CHUNK = 1 << 18
"""Elements that a CPU rounds at once; bounds the temporary to 2 MiB, which stays in its cache."""
_DEVICE_CHUNK = 1 << 24
"""Elements that another device rounds at once, with four kernels; bounds the temporary to 128
MiB."""


def grid_exponent(scale: float) -> int:
    """Return the grid's exponent e for gradients `scale` >= 1 times the mean-loss gradient."""
    return _EXPONENT + math.frexp(scale)[1] - 1


def fits(bound: float, exponent: int) -> bool:
    """Return whether every sum of gradients with this bound is exact, in any partition."""
    return bound < math.ldexp(1.0, exponent + SIGNIFICAND_BITS - 1)


def magnitude(gradient: Tensor) -> Tensor:
    """Return the largest magnitude in the gradient, as a scalar on its device; 0 if it is empty."""
    return torch.linalg.vector_norm(gradient, ord=math.inf) if gradient.numel() else gradient.new_zeros(())


def fold(total: Tensor, gradient: Tensor, exponent: int) -> None:
    """Add a microbatch's gradient, rounded to multiples of 2**exponent, to `total`.

    `gradient` is one-dimensional, of any float type; `total` is float64.
    """
    # Adding 1.5 * 2**(e+52) leaves no bits below 2**e in the sum; the subtraction is exact.
    grid = math.ldexp(1.5, exponent + SIGNIFICAND_BITS)
    chunk = _CHUNK if total.device.type == "cpu" else _DEVICE_CHUNK
    for into, source in zip(total.split(chunk), gradient.split(chunk), strict=True):
        into += source.to(torch.float64, copy=True).add_(grid).sub_(grid)
