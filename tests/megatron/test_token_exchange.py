"""The substitute of DeepEP against upstream's all-to-all: the same model and data, in real processes, bit for bit.

Each token has two experts, so every sum has two terms, and no order can change it.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.megatron.processes import Layout, run, upstream_alone
from tests.megatron.token_exchange import BACKENDS

pytestmark = pytest.mark.timeout(180)

LAYOUTS = {
    "one expert per rank": Layout(lanes=2, ep=2, num_experts=2, dispatcher="alltoall"),
    "experts of a token on one rank, or on two": Layout(lanes=2, ep=2, num_experts=6, dispatcher="alltoall"),
    "two groups, bf16": Layout(lanes=4, ep=2, num_experts=8, bf16=True, distributed_optimizer=True, dispatcher="alltoall"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_and_gradients_are_those_of_upstreams_all_to_all(backend: str, layout: Layout) -> None:
    (expected,) = run(layout, (upstream_alone, ()))
    (found,) = run(msgspec.structs.replace(layout, dispatcher=backend), (upstream_alone, ()))
    for one, other in zip(found, expected, strict=True):
        for step, reference in zip(one, other, strict=True):
            assert reference["success"] and reference["norm"] > 0 and step["norm"] == reference["norm"]
            for key in ("losses", "gradients", "parameters"):
                assert len(step[key]) == len(reference[key]) > 0
                assert all(map(torch.equal, step[key], reference[key])), key
            assert sum(bool(gradient.any()) for gradient in step["gradients"]) == len(step["gradients"])
