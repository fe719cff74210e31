"""Sums of gradients that do not depend on who computed what (`--recover-determinism exact`).

Decides how a microbatch's gradient is rounded before it is added. Every gradient is rounded to a grid of multiples of 2**e in
float64 (one bin of Demmel and Nguyen, "Fast reproducible floating-point summation", 2013); sums of grid points are exact while
they stay below 2**53 grid units, so any partition and any order of additions gives the same bits. The sum is rounded to the
gradient's type once, when the step is applied.

Note [Grid]
    The grid is a function of the run's settings alone, not of earlier gradients: a run that is resumed from a checkpoint has
    the grid of the run that was not interrupted. A loss that is a mean has gradients of order one or less (their norm, over
    all parameters, is a few units at the worst moments), and Adam adds 1e-8 to what it divides by: a grid of 2**-44 = 6e-14
    that holds sums below 128 leaves room on both sides. Where losses are sums (per-token loss) or scaled, the grid is scaled
    alike.

    `bound` says whether it held: the sum over all microbatches and lanes of their largest magnitude. A step that outgrows
    the grid is still summed alike on all replicas, but may differ from the failure-free run: it is reported as not exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIGNIFICAND_BITS = 52
_EXPONENT = -44
"""Of the grid for gradients of a mean loss."""
_CHUNK = 1 << 18
"""Elements rounded at once; bounds the temporary to 2 MiB."""


def grid_exponent(scale: float) -> int:
    """e of the grid for gradients that are `scale` >= 1 times those of the mean loss of a step."""
    return _EXPONENT + math.frexp(scale)[1] - 1


def fits(bound: float, exponent: int) -> bool:
    """Whether every sum of gradients with this bound is exact on the grid, in any partition."""
    return bound < math.ldexp(1.0, exponent + SIGNIFICAND_BITS - 1)


def magnitude(gradient: Tensor) -> float:
    """Largest magnitude of the gradient."""
    return float(torch.linalg.vector_norm(gradient, ord=math.inf)) if gradient.numel() else 0.0


def fold(total: Tensor, gradient: Tensor, exponent: int) -> None:
    """Add a microbatch's gradient (1-D, any float type), rounded to multiples of 2**exponent, to the float64 `total`."""
    # Adding 1.5 * 2**(e+52) leaves no bits below 2**e in the sum; the subtraction is exact.
    grid = math.ldexp(1.5, exponent + SIGNIFICAND_BITS)
    for into, source in zip(total.split(_CHUNK), gradient.split(_CHUNK), strict=True):
        into += source.double().add_(grid).sub_(grid)
