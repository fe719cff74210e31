"""What is copied from an open window is the state of that moment, also where a device changes it before the copy has come."""

from __future__ import annotations

import pytest
import torch

from megatron_recover.trainer.state_window import StateWindow

pytestmark = pytest.mark.gpu
NUM = 1 << 26


def test_what_changes_the_state_waits_on_the_device_for_the_copies() -> None:
    """The host waits for nothing: all is enqueued while the copy is on its way, some hundred MB of it."""
    window, state = StateWindow(), torch.ones(NUM, device="cuda")
    torch.cuda.synchronize()
    for value in (1, 2, 3):
        copy = window.copy([state, state[1:3] * 1])
        window.close()
        state.add_(1)
        whole, part = copy.tensors()
        assert whole.is_pinned() and whole.eq(value).all() and part.eq(value).all()
        window.open()


def test_memory_of_a_tensor_that_exists_for_the_copy_alone_is_not_used_before_the_copy_has_come() -> None:
    window = StateWindow()
    copy = window.copy([torch.full((NUM,), 5.0, device="cuda")])
    overwritten = [torch.zeros(NUM, device="cuda") for _ in range(4)]
    assert copy.tensors()[0].eq(5).all() and len(overwritten) == 4
