"""A replica through the commit loop against upstream alone: the same model, data and optimizer, in real processes.

One pass over all ids must give upstream's bits. Several passes, with a reduction that is lost in between or that leaves some
buckets decided, add the same gradients in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.processes import LEARNING_RATE, Layout, Round, recovered, run, upstream_alone

pytestmark = pytest.mark.timeout(180)

AT_ONCE = (Round(passes=((0, 1, 2, 3),)),)
AFTER_A_LOSS = (Round(passes=((0, 2),), revoked=True), Round(passes=((3,), (1,))))
"""Other replicas' microbatches come to this one after its first reduction was lost."""
INTO_SOME = (
    Round(passes=((1, 0),), revoked=True),
    Round(passes=((2, 3),), parity=1),
    Round(passes=((2,), (3,)), parity=0),
)
"""Passes whose gradient goes into a part of the buckets only; these cut parameters in two."""

LAYOUTS = {
    "plain": Layout(),
    "pp2": Layout(pp=2, overlap=True),
    "pp2-per-token": Layout(pp=2, per_token=True),
    "tp2-per-token": Layout(tp=2, per_token=True, overlap=True),
    "tp2-bf16": Layout(tp=2, bf16=True, overlap=True),
    "pp2-vpp2": Layout(pp=2, vpp=2, overlap=True),
    "pp4-vpp2": Layout(pp=4, vpp=2),  # passes of fewer microbatches than stages
    "lanes2": Layout(lanes=2),
    "lanes2-per-token": Layout(lanes=2, per_token=True, overlap=True),
    "zero1": Layout(lanes=2, distributed_optimizer=True),
    "zero1-bf16": Layout(lanes=2, distributed_optimizer=True, bf16=True, overlap=True),
    "zero1-pp2": Layout(lanes=2, pp=2, distributed_optimizer=True, overlap=True),
    "cp2-pp2": Layout(cp=2, pp=2, overlap=True),
    "cp2-zero1-per-token": Layout(cp=2, distributed_optimizer=True, per_token=True),
    "experts": Layout(num_experts=2, overlap=True),
    "experts-over-lanes": Layout(lanes=2, ep=2, num_experts=2, overlap=True),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_equals_upstream(layout: Layout) -> None:
    reference, at_once, after_a_loss, into_some = run(
        layout, (upstream_alone, ()), (recovered, (AT_ONCE,)), (recovered, (AFTER_A_LOSS,)), (recovered, (INTO_SOME,))
    )
    for rank in range(layout.num_ranks):
        for step in range(2):
            expected = reference[rank][step]
            assert expected["success"] and expected["norm"] > 0
            _assert_same(at_once[rank][step], expected)
            _assert_close(after_a_loss[rank][step], expected)
            _assert_close(into_some[rank][step], expected)
    shapes = [at_once[rank][0]["shape"] for rank in range(layout.num_ranks)]
    assert all(shape == shapes[0] for shape in shapes) and len(shapes[0].bucket_ranks) > 2 * layout.pp
    for replicas in (after_a_loss, into_some):
        _assert_lanes_agree(layout, replicas)


@pytest.mark.parametrize("name", ["plain", "pp2", "lanes2", "zero1-pp2"])
def test_exact_gives_the_same_bits_in_any_order(name: str) -> None:
    layout = LAYOUTS[name].__class__(
        **{field: getattr(LAYOUTS[name], field) for field in Layout.__struct_fields__} | {"determinism": "exact"}
    )
    reference, *others = run(
        layout, (upstream_alone, ()), (recovered, (AT_ONCE,)), (recovered, (AFTER_A_LOSS,)), (recovered, (INTO_SOME,))
    )
    for rank in range(layout.num_ranks):
        for step in range(2):
            for other in others:
                _assert_same(other[rank][step], others[0][rank][step])
                _assert_close(other[rank][step], reference[rank][step])


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["norm"] == expected["norm"]
    for key in ("parameters", "losses"):
        assert len(found[key]) == len(expected[key])
        for one, other in zip(found[key], expected[key], strict=True):
            assert torch.equal(one, other), key


def _assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    if any(gradient.dtype == torch.bfloat16 for gradient in found.get("gradients", ())):
        _assert_close_in_bf16(found, expected)
        return
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert len(found["losses"]) == len(expected["losses"])
    for one, other in zip(found["losses"], expected["losses"], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=2e-5)
    for one, other in zip(found["parameters"], expected["parameters"], strict=True):
        _assert_parameters_close(one, other)


def _assert_parameters_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare parameters; one element, or one in 1,000, may differ more, but by less than the two steps of Adam it has made.

    Adam makes a whole step of a gradient that is nearly nothing, and of its rounding: which elements have one depends on
    how the processor adds. A microbatch that is lost changes all elements.
    """
    one, other = found.float(), expected.float()
    far = (one - other).abs() > 2e-5 + (1e-2 if found.dtype == torch.bfloat16 else 1e-4) * other.abs()
    assert int(far.sum()) <= max(1, one.numel() // 1000), f"{int(far.sum())} of {one.numel()} elements differ"
    torch.testing.assert_close(one, other, rtol=1e-2, atol=2 * LEARNING_RATE)


def _assert_close_in_bf16(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the gradients of a first step, added up in bf16.

    Adam makes a whole step of a tiny gradient, whose sign depends on the order; so parameters, and later steps, may differ.
    """
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-3)
    for one, other in zip(found["losses"], expected["losses"], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=2e-5)
    for one, other in zip(found["gradients"], expected["gradients"], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2 * float(other.float().abs().max()))


def _assert_lanes_agree(layout: Layout, ranks: list[list[dict[str, Any]]]) -> None:
    """Ranks are ordered by tp, cp, lanes, pp (upstream's order); without experts, cp and lanes hold equal parameters."""
    if layout.ep > 1:
        return
    for stage in range(layout.pp):
        alike = layout.cp * layout.lanes
        first, *rest = [ranks[(stage * alike + place) * layout.tp][1]["parameters"] for place in range(alike)]
        for other in rest:
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("passes", [((0, 1, 3),), ((0, 1, 2, 3), (1,))], ids=["one is missing", "one is there twice"])
def test_a_result_that_is_not_of_every_microbatch_once_is_never_held(passes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(AssertionError, match="Miscounted: step 0, bucket 0: counts that are not 1"):
        run(Layout(lanes=2), (recovered, ((Round(passes=passes),),)))
