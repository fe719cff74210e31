"""Grid-rounded sums: the same bits in any order and any partition, and a bound that says when that holds."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.trainer import exact


def gradients(seed: int, num: int, size: int) -> list[torch.Tensor]:
    """fp32 gradients whose magnitudes span so many powers of two that float64 has to round their sums."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(torch.randint(-40, 1, (num, size), generator=generator).float())
    return list(torch.randn(num, size, generator=generator) * scales)


def folded(parts: list[list[torch.Tensor]], exponent: int) -> torch.Tensor:
    """Every part summed by itself, then the parts."""
    sums = []
    for part in parts:
        total = torch.zeros(part[0].numel() if part else 0, dtype=torch.float64)
        for gradient in part:
            exact.fold(total, gradient, exponent)
        sums.append(total)
    result = torch.zeros_like(max(sums, key=torch.Tensor.numel))
    for total in sums:
        if total.numel():
            result += total
    return result


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_any_partition_in_any_order_gives_the_same_bits(seed: int, num_parts: int) -> None:
    each = gradients(seed, 16, 64)
    exponent = exact.grid_exponent(1.0)
    assert exact.fits(sum(exact.magnitude(gradient) for gradient in each), exponent)
    expected = folded([each], exponent)
    chance = random.Random(seed)
    shuffled = chance.sample(each, len(each))
    parts: list[list[torch.Tensor]] = [[] for _ in range(num_parts)]
    for gradient in shuffled:
        chance.choice(parts).append(gradient)
    chance.shuffle(parts)
    assert torch.equal(folded(parts, exponent), expected)
    torch.testing.assert_close(expected, torch.stack(each).double().sum(0), rtol=0, atol=16 * math.ldexp(1, exponent))


def test_plain_float64_sums_depend_on_the_order() -> None:
    """What the test above would say if nothing was rounded: it is able to fail."""
    each = [gradient.double() for gradient in gradients(1, 16, 4096)]
    forward, backward = torch.zeros(4096).double(), torch.zeros(4096).double()
    for gradient in each:
        forward += gradient
    for gradient in reversed(each):
        backward += gradient
    assert not torch.equal(forward, backward)


def test_a_gradient_beyond_the_grid_is_told() -> None:
    exponent = exact.grid_exponent(1.0)
    assert exact.fits(100.0, exponent) and not exact.fits(200.0, exponent)
    assert exact.fits(100.0 * 2**20, exact.grid_exponent(2.0**20)) and exact.grid_exponent(2.0**20) == exponent + 20
    assert not exact.fits(math.inf, exponent) and not exact.fits(math.nan, exponent)


def test_what_fits_is_exact_to_the_edge() -> None:
    """The largest bound that `fits` accepts really leaves every partial sum on the grid."""
    exponent = -10
    limit = math.ldexp(1.0, exponent + exact.SIGNIFICAND_BITS - 1)
    large = torch.tensor([limit / 2 - 2**20], dtype=torch.float32)
    small = torch.tensor([3.0 * 2.0**-10], dtype=torch.float32)
    parts = [large, -large, small, large, small]
    sums = {float(folded([random.Random(seed).sample(parts, 5)], exponent)) for seed in range(30)}
    assert sums == {float(large) + 2 * float(small)}


def test_magnitude() -> None:
    assert exact.magnitude(torch.tensor([0.5, -3.0, 2.0])) == 3.0
    assert math.isnan(exact.magnitude(torch.tensor([1.0, math.nan])))
    assert exact.magnitude(torch.tensor([1.0, -math.inf])) == math.inf
    assert exact.magnitude(torch.tensor([])) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fold_leaves_the_gradient_alone(dtype: torch.dtype) -> None:
    gradient = torch.randn(1 << 19).to(dtype)
    kept, total = gradient.clone(), torch.zeros(1 << 19, dtype=torch.float64)
    exact.fold(total, gradient, -40)
    assert torch.equal(gradient, kept)
    assert float((total - kept.double()).abs().max()) <= 2.0**-41
