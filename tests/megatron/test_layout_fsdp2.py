"""The memory of layouts with FSDP2: arithmetic alone, without torch."""

from __future__ import annotations

import msgspec
import pytest

from megatron_recover.megatron.layout import choice, memory, sizes
from tests.megatron.test_layout import BF16, GB, eight_billion

FSDP2 = msgspec.structs.replace(BF16, fsdp2=sizes.Fsdp2())
IN_BF16 = msgspec.structs.replace(FSDP2, gradient=2, step_copy=4)
"""With `--grad-reduce-in-bf16`."""


def needed(lanes: int, numerics: sizes.Numerics = FSDP2, **layout: int) -> memory.Memory:
    """The memory of Llama-3-8B."""
    model = msgspec.structs.replace(eight_billion(), numerics=numerics)
    return memory.memory(model, sizes.Layout(**{"replicas": 2, "lanes": lanes, **layout}))


def test_a_model_of_8_billion_needs_the_known_bytes() -> None:
    """8.03 billion parameters: 2 bytes of weight, 4 of gradient and of result, and 12 of the optimizer, over 4 lanes."""
    found = needed(4)
    parts = (found.weights, found.gradient, found.result, found.redirected, found.optimizer, found.step_copy)
    assert parts == pytest.approx([each * 8.03 / 4 * GB for each in (2, 4, 4, 0, 12, 0)], rel=1e-3)
    layer, table = 218_112_000, 4096 * 128256
    assert found.gathered == 2 * (3 * (table + 4096) + layer), "the output layer's gradient, its sum in fp32, the layer before"
    assert found.start == pytest.approx(16.06 * GB, rel=1e-3)
    assert found.sums == 4 * table // 4 + (2 * 4 + 2) * (table + 4096) // 4, "a bucket has whole parameters; sums of two groups"
    assert found.recovery == found.always + found.result + found.activations + found.gathered + found.redirected


def test_gradients_that_are_summed_in_bf16_are_set_aside() -> None:
    found = needed(4, IN_BF16)
    parts = (found.weights, found.gradient, found.result, found.redirected, found.optimizer, found.step_copy)
    assert parts == pytest.approx([each * 8.03 / 4 * GB for each in (2, 2, 2, 2, 12, 4)], rel=1e-3)
    layer, table = 218_112_000, 4096 * 128256
    assert found.gathered == 2 * (2 * table + 4096 * 2 + layer), "the output layer, its gradient, and the layer before"
    assert found.sums == 2 * table // 4


def test_with_exact_there_are_accumulators_and_nothing_is_set_aside() -> None:
    found = needed(4, msgspec.structs.replace(FSDP2, is_exact=True))
    parts = (found.gradient, found.result, found.redirected)
    assert parts == pytest.approx([each * 8.03 / 4 * GB for each in (4 + 8, 8, 0)], rel=1e-3)


def test_more_lanes_need_less_of_everything_but_activations_and_whole_groups() -> None:
    two, four = needed(2, IN_BF16), needed(4, IN_BF16)
    for name in ("weights", "gradient", "result", "optimizer", "redirected", "step_copy"):
        assert getattr(two, name) == pytest.approx(2 * getattr(four, name))
    assert (two.activations, two.gathered) == (four.activations, four.gathered)
    assert needed(1, IN_BF16).weights == pytest.approx(2 * two.weights)


def test_nothing_is_gathered_beforehand_by_one_lane_and_tensor_parallel_ranks_gather_their_part() -> None:
    layer, table = 218_112_000, 4096 * 128256
    assert needed(1, IN_BF16).gathered == 2 * (2 * table + layer), "embedding: its gradient, and that of the first layer"
    assert needed(1).gathered == pytest.approx(2 * 3 * table, rel=1e-4)
    assert needed(4, tp=2).gathered == pytest.approx(needed(4).gathered / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("groups", "fsdp2", "lanes", "expected"),
    [
        ((5, 7, 7, 9), sizes.Fsdp2(), 2, 7 + 7 + 7 + 9),
        ((5, 7, 7, 20), sizes.Fsdp2(), 2, 20 + 20 + 7),
        ((5, 7, 7, 3), sizes.Fsdp2(), 2, 7 + 7 + 5 + 7),
        ((5, 7, 7, 9), sizes.Fsdp2(), 1, 7 + 7 + 9),
        ((5, 7, 7, 9), sizes.Fsdp2(keeps_output=True), 2, 7 + 7 + 5 + 7 + 2 * 9),
        ((5, 7, 7, 9), sizes.Fsdp2(reshards=False), 2, 5 + 7 + 7 + 9 + 9),
        ((5, 7, 7, 1), sizes.Fsdp2(reshards=False), 2, 5 + 7 + 7 + 7 + 1),
        ((), sizes.Fsdp2(), 2, 0),
    ],
)
def test_what_is_gathered_is_the_largest_neighbourhood(
    groups: tuple[int, ...], fsdp2: sizes.Fsdp2, lanes: int, expected: int
) -> None:
    assert memory._gathered(groups, fsdp2, lanes) == expected


@pytest.mark.parametrize(
    ("groups", "fsdp2", "lanes", "expected"),
    [
        ((5, 7, 7, 9), sizes.Fsdp2(), 2, 7 + 7 + 7 + 2 * 9),
        ((5, 7, 7, 20), sizes.Fsdp2(), 2, 20 + 2 * 20 + 7),
        ((5, 7, 7, 9), sizes.Fsdp2(keeps_output=True), 2, 7 + 7 + 5 + 2 * 7 + 2 * 9),
        ((1, 2, 2, 20), sizes.Fsdp2(keeps_output=True), 2, 20 + 2 * 20),
        ((5, 7, 7, 9), sizes.Fsdp2(reshards=False), 2, 5 + 7 + 7 + 9 + 2 * 9),
    ],
)
def test_sums_in_fp32_take_twice_as_much(groups: tuple[int, ...], fsdp2: sizes.Fsdp2, lanes: int, expected: int) -> None:
    assert memory._gathered(groups, fsdp2, lanes, is_wide=True) == expected


def test_the_whole_model_counts_where_it_is_built_on_the_gpu() -> None:
    """With so many lanes that nothing else is as large."""
    numerics = msgspec.structs.replace(FSDP2, fsdp2=sizes.Fsdp2(built_on_host=True))
    small = msgspec.structs.replace(eight_billion(), numerics=FSDP2, activations=(sizes.Activations(tp=1, pp=1, bytes=0),))
    layout = sizes.Layout(replicas=2, lanes=256)
    found = memory.memory(small, layout)
    assert found.peak == found.recovery == found.start == pytest.approx(16.06 * GB, rel=1e-3)
    found = memory.memory(msgspec.structs.replace(small, numerics=numerics), layout)
    assert found.start == 0 < found.peak < found.recovery < 8 * GB


def test_lanes_are_chosen_where_a_rank_of_fsdp2_fits() -> None:
    """Without FSDP2, and with the optimizer shared, no number of lanes fits into 80 GB."""
    gpus = choice.Gpus(per_node=16, bytes=80 * GB)
    found = {}
    for numerics in (BF16, FSDP2):
        model = msgspec.structs.replace(eight_billion(), numerics=numerics)
        judged = choice.judge(model, gpus, lambda layout: layout.tp == layout.pp == 1)
        found[numerics.fsdp2 is not None] = [each.layout.lanes for each in judged if each.fits]
    assert found[True] and not found[False]
    assert found[True][0] == min(found[True])
