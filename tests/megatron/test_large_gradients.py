"""A local gradient ten times the largest before is reported with its microbatches, and more work is no larger gradient."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from megatron.core import rerun_state_machine

from megatron_recover.megatron.large_gradients import warn_of_large
from megatron_recover.trainer.bucket_sums import GradientSum
from megatron_recover.trainer.reduction import Reduction
from megatron_recover.trainer.regions import Region


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)


def test_ten_times_the_first_hundred_is_reported_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    for iteration in range(100):
        warn_of_large([(0, [0], 1.0 if iteration else 2.0)], iteration=iteration)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_large([(0, [1, 2], 19.9), (1, [1, 2], 20.0), (2, [], float("inf"))], iteration=100)
    [line] = caplog.messages
    assert line.startswith("iteration 100: the local gradient of bucket 1 has the norm 20, over microbatches [1, 2]")


@pytest.mark.parametrize("exactly", [False, True])
def test_the_norm_is_that_of_a_step_of_such_microbatches(exactly: bool) -> None:
    lane = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    region = Region(torch.zeros(10), chunk=0, group=lane, scale=1.0, sharded=False, bucket_elements=10)
    [bucket] = region.buckets
    bucket.id = 0
    accumulator = torch.zeros(10, dtype=torch.float64) if exactly else None
    gradient_sum = GradientSum(bucket, accumulator)
    gradient_sum.begin(6)
    assert gradient_sum.mean_norm() is None
    for count, microbatch in enumerate((3, 5), 1):
        region.local += torch.ones(10) / 6
        gradient_sum.count(microbatch, -44)
        if exactly:
            region.local.zero_()
        assert float(gradient_sum.mean_norm()) == pytest.approx(10**0.5), count


def test_counts_of_routers_are_no_gradient() -> None:
    """They are orders of magnitude larger, so that no gradient would be large beside them."""
    lane = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    sums = []
    for number, is_passed in enumerate((True, False)):
        region = Region(torch.ones(10), chunk=0, group=lane, scale=1.0, sharded=False, bucket_elements=10)
        region.is_passed = is_passed
        [bucket] = region.buckets
        bucket.id = number
        sums.append(GradientSum(bucket, None))
        sums[-1].begin(6)
        sums[-1].count(3, -44)
    assert [bucket for bucket, _, _ in Reduction.mean_norms(SimpleNamespace(_gradient_sums=sums))] == [0]  # type: ignore[arg-type]
