"""Transformer Engine writes over the main gradient in the first microbatch of a step, and adds to it in the others.

`tests/megatron/toy.Fused` does the same on a CPU, where the second passes of a step are tested.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.finding("G8")]
SIZE = 64


def test_only_the_first_microbatch_overwrites_the_gradient() -> None:
    engine = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    layer = engine.Linear(
        SIZE, SIZE, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16, device=torch.device("cuda")
    )
    layer.weight.main_grad = torch.full((SIZE, SIZE), 7.0, device="cuda")
    expected = torch.zeros_like(layer.weight.main_grad)
    for number, is_first in enumerate((True, False, False)):
        given = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        gradient = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
        layer(given, is_first_microbatch=is_first).backward(gradient)
        expected += gradient.float().t() @ given.detach().float()
        torch.testing.assert_close(layer.weight.main_grad, expected, rtol=2e-2, atol=2e-1, msg=f"microbatch {number}")
