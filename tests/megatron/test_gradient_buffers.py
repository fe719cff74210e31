"""Where a pass puts its gradient, on a region made by hand."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_recover.megatron.gradient_buffers import Collector, Redirection
from megatron_recover.trainer.regions import Region


class Parameter(SimpleNamespace):
    __hash__ = object.__hash__


LONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def region() -> Region:
    """Three parameters of 4 elements in two buckets of 6, so that the second parameter is cut in two."""
    grad_data = torch.zeros(12)
    params = {}
    for start in (0, 4, 8):
        params[Parameter(main_grad=grad_data[start : start + 4])] = (start, start + 4)
    made = Region(grad_data, chunk=0, group=LONE, scale=1.0, sharded=False, bucket_elements=6)
    made.params = params  # type: ignore[attr-defined]
    for number, bucket in enumerate(made.buckets):
        bucket.id = number
    return made


def begin(cut: Region, *into: int) -> Redirection:
    redirection = Redirection(cut, cut.params, into, torch.empty(4))
    redirection.begin()
    return redirection


def forward(cut: Region) -> list[tuple[Any, Tensor]]:
    """What a fused weight gradient keeps of it: where the gradient goes."""
    return [(param, param.main_grad) for param in cut.params]


def backward(bound: list[tuple[Any, Tensor]], gradient: float = 1) -> None:
    for param, main_grad in bound:
        param.main_grad = main_grad
        param.main_grad += gradient


def test_gradient_goes_only_into_the_buckets_that_miss_it() -> None:
    cut = region()
    redirection = begin(cut, 1)
    backward(forward(cut))
    redirection.end()
    assert cut.local.tolist() == [0] * 6 + [1] * 6
    backward(forward(cut))
    assert cut.local.tolist() == [1] * 6 + [2] * 6


def test_all_regions_of_a_type_share_one_dump_for_as_long_as_the_pass_lasts() -> None:
    """With `--overlap-grad-reduce` each of upstream's buckets is a region: a dump for each would be most of a gradient."""
    regions = [region() for _ in range(5)]
    for number, bucket in enumerate(bucket for each in regions for bucket in each.buckets):
        bucket.id = number
    collector = Collector({each: each.params for each in regions})
    for into in ((1,), (4, 5)):
        collector.collect_into(into)
        everywhere = {param.main_grad.untyped_storage().data_ptr() for each in regions for param in each.params}
        kept = {each.local.untyped_storage().data_ptr() for each in regions}
        whole = [param for each in regions for param in each.params if param.main_grad.untyped_storage().data_ptr() not in kept]
        assert len(everywhere - kept) <= 2 < len(whole), "the dump, and the parameter that a border cuts"
    collector.collect_into(None)
    assert not collector._dumps


@pytest.mark.parametrize("fused", [False, True])
def test_microbatches_in_flight_go_into_different_buckets(fused: bool) -> None:
    """The first stage of two (PP 2): two that miss bucket 1 only, and then one that misses both.

    Each forward and backward stands in the redirection of its own microbatch; a fused one adds where its forward bound it.
    """
    cut = region()
    collector = Collector({cut: cut.params})

    def forwards(*into: int) -> list[tuple[Any, Tensor]]:
        collector.collect_into(into)
        return forward(cut)

    def backwards(bound: list[tuple[Any, Tensor]], gradient: float, *into: int) -> None:
        collector.collect_into(into)
        backward(bound if fused else forward(cut), gradient)

    first, second = forwards(1), forwards(1)
    backwards(first, 1, 1)
    third = forwards(0, 1)
    backwards(second, 10, 1)
    backwards(third, 100, 0, 1)
    collector.collect_into(None)
    assert cut.local.tolist() == [100] * 6 + [111] * 6
    assert [param.main_grad.data_ptr() for param in cut.params] == [cut.local[start:].data_ptr() for start in (0, 4, 8)]


def test_a_pass_that_is_over_keeps_no_memory() -> None:
    cut = region()
    collector = Collector({cut: cut.params})
    collector.collect_into((1,))
    targets = [weakref.ref(param.main_grad) for param in list(cut.params)[:2]]  # the third lies in bucket 1, whole
    assert all(target() is not None for target in targets)
    collector.collect_into(None)
    assert all(target() is None for target in targets)
