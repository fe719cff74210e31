"""What is copied from an open window is the state of that moment, whatever comes next; a closed one lets nobody copy."""

from __future__ import annotations

import pytest
import torch

from megatron_recover.trainer.state_window import StateWindow


def test_a_copy_holds_the_state_of_its_moment() -> None:
    window, state = StateWindow(), torch.arange(6.0)
    copy = window.copy([state[:2], state.view(2, 3), torch.tensor(7)])
    window.close()
    state.zero_()
    assert [each.tolist() for each in copy.tensors()] == [[0, 1], [[0, 1, 2], [3, 4, 5]], 7]


def test_nobody_copies_while_a_step_changes_the_state() -> None:
    window = StateWindow()
    window.close()
    with pytest.raises(RuntimeError, match="while a step changes it"):
        window.copy([torch.zeros(1)])
    window.open()
    assert window.copy([torch.ones(1)]).tensors()[0].item() == 1
