"""The host seldom waits for the device, however large the model and the step are."""

from __future__ import annotations

import pytest
import torch

from megatron_recover.trainer.host_copy import HostCopy, to_device
from tests.megatron.synchronisation import LARGE, SMALL, waits_of_a_step
from tests.pretend_gpu import DEVICE, pretended

MOST = 4
"""Waits a step, beside those of upstream."""


@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_waits_do_not_grow_with_buckets_microbatches_or_parameters(determinism: str) -> None:
    small, large = (waits_of_a_step(size, determinism=determinism) for size in (SMALL, LARGE))
    assert small == large and 0 < large.total() <= MOST, large


def test_a_digest_of_all_state_is_one_wait_more() -> None:
    without, due = (waits_of_a_step(SMALL, digests_state=digests) for digests in (False, True))
    assert due.total() == without.total() + 1 <= MOST


def test_a_copy_to_the_host_is_asked_for_and_waited_for_once() -> None:
    """The pretended GPU sees each wait: without one the copy has not arrived, and every read that is not a copy is one."""
    with pretended() as gpu:
        flag, first = gpu.tensor(torch.tensor(True)), gpu.tensor(torch.arange(6.0).view(2, 3))
        copy = HostCopy([flag, first, torch.tensor([7])])
        assert not copy.has_arrived() and not gpu.waits
        tensors = copy.tensors()
        assert [each.tolist() for each in tensors] == [True, [[0, 1, 2], [3, 4, 5]], [7]] and gpu.num_waits == 1
        assert copy.has_arrived() and copy.tensors() == tensors and gpu.num_waits == 1
        sent = to_device(torch.arange(3.0), DEVICE)
        assert sent.is_cuda and gpu.num_waits == 1
        for number, reads in enumerate((lambda: float(sent[0]), lambda: sent.cpu(), lambda: bool((sent == 1).all())), start=2):
            reads()
            assert gpu.num_waits == number
        torch.arange(3.0).to(DEVICE)
        assert gpu.num_waits == 5
