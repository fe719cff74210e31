"""Where a pass puts its gradient, on a region made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_recover.megatron.buckets import Region


class Parameter(SimpleNamespace):
    __hash__ = object.__hash__


LONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def region() -> Region:
    """Three parameters of 4 elements in two buckets of 6, so that the second parameter is cut in two."""
    grad_data = torch.zeros(12)
    params = {}
    for start in (0, 4, 8):
        params[Parameter(main_grad=grad_data[start : start + 4])] = (start, start + 4)
    upstream = SimpleNamespace(grad_data=grad_data, param_to_index=params, gradient_scaling_factor=1.0)
    made = Region(0, SimpleNamespace(data_parallel_group=LONE), upstream, bucket_elements=6, sharded=False)
    for number, bucket in enumerate(made.buckets):
        bucket.id = number
    return made


def backward(of: Region) -> None:
    for param in of.params:
        param.main_grad += 1


def test_gradient_goes_only_into_the_buckets_that_miss_it() -> None:
    cut = region()
    with cut.only_into((1,)):
        backward(cut)
    assert cut.local.tolist() == [0] * 6 + [1] * 6
    backward(cut)
    assert cut.local.tolist() == [1] * 6 + [2] * 6


def test_a_pass_that_raises_leaves_megatrons_gradients_where_they_were() -> None:
    cut = region()
    before = [param.main_grad for param in cut.params]
    with pytest.raises(RuntimeError, match="NaN"), cut.only_into((1,)):
        backward(cut)
        raise RuntimeError("NaN")
    assert all(param.main_grad is each for param, each in zip(cut.params, before, strict=True))
