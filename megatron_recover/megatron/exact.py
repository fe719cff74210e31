"""Sums of gradients that do not depend on who computed what (`--recover-determinism exact`).

Decides how a microbatch's gradient is rounded before it is added. Every gradient is rounded to a grid of multiples of 2**e in
float64 (one bin of Demmel and Nguyen, "Fast reproducible floating-point summation", 2013); sums of grid points are exact while
they stay below 2**53 grid units, so any partition and any order of additions gives the same bits. The sum is rounded to the
gradient's type once, when the step is applied.

Note [Grid]
    e is chosen per bucket from the previous committed step's `bound`: the sum over all its microbatches and lanes of their
    largest magnitude, each rounded up to a power of two. Powers of two add up exactly too, so the bound, and with it the grid,
    is the same whoever computed what. A step whose own bound outgrows the grid is still summed alike on all replicas, but may
    differ from the failure-free run: it is reported as not exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIGNIFICAND_BITS = 52
MARGIN_BITS = 6
"""The gradient may grow this many powers of two from one step to the next and still be summed exactly."""
FIRST_EXPONENT = -40
"""Grid of the first step for gradients of order one: resolves 1e-12 and holds sums below 2048."""
_CHUNK = 1 << 18
"""Elements rounded at once; bounds the temporary to 2 MiB."""


def grid_exponent(bound: float) -> int:
    """e of the grid for a step whose bound is expected near `bound` > 0."""
    return math.frexp(bound)[1] + MARGIN_BITS - SIGNIFICAND_BITS


def fits(bound: float, exponent: int) -> bool:
    """Whether every sum of gradients with this bound is exact on the grid, in any partition."""
    return bound < math.ldexp(1.0, exponent + SIGNIFICAND_BITS - 1)


def magnitude(gradient: Tensor) -> float:
    """Largest magnitude of the gradient, rounded up to a power of two (0 for zeros; NaN and infinity stay what they are)."""
    largest = float(torch.linalg.vector_norm(gradient, ord=math.inf)) if gradient.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    fraction, exponent = math.frexp(largest)
    return math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent)


def fold(total: Tensor, gradient: Tensor, exponent: int) -> None:
    """Add a microbatch's gradient (1-D, any float type), rounded to multiples of 2**exponent, to the float64 `total`."""
    # Adding 1.5 * 2**(e+52) leaves no bits below 2**e in the sum; the subtraction is exact.
    grid = math.ldexp(1.5, exponent + SIGNIFICAND_BITS)
    for into, source in zip(total.split(_CHUNK), gradient.split(_CHUNK), strict=True):
        into += source.double().add_(grid).sub_(grid)
