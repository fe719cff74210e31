"""What is copied from an open window is the state of that moment, whatever comes next; a closed one lets nobody copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from megatron_recover.trainer.state_bytes import StateBytes
from megatron_recover.trainer.state_window import StateWindow
from tests.pretend_gpu import pretended


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


def test_reads_by_other_threads_end_with_the_window_for_good() -> None:
    window = StateWindow()
    reads = window.expose()
    assert reads.is_open
    window.close()
    assert not reads.is_open
    with pytest.raises(RuntimeError, match="while a step changes it"):
        window.expose()
    window.open()
    assert not reads.is_open and window.expose().is_open, "a later window is another one"


def test_the_list_of_reads_does_not_grow_while_a_window_stays_open() -> None:
    window = StateWindow()
    for _ in range(5):
        window.expose().hold_back()
    assert len(window._reading) <= 1


def test_on_a_gpu_reads_come_behind_the_opening_and_the_next_step_behind_the_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    on_devices: list[torch.device] = []

    @contextlib.contextmanager
    def device(of: torch.device) -> Iterator[None]:
        on_devices.append(of)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)  # a thread of its own begins on GPU 0
    with pretended() as gpu:
        window, state = StateWindow(), StateBytes([gpu.tensor(torch.arange(6.0))])
        unread = window.expose()
        unread.hold_back()
        reads = window.expose()
        buffer = torch.empty(20, dtype=torch.uint8, pin_memory=True)
        with reads.enqueuing():
            state.copy_out(8, 24, buffer)
        assert reads.is_open and buffer[:16].view(torch.float32).tolist() == [2, 3, 4, 5]
        assert on_devices == [torch.device("cuda", 0)]
        window.close()
        assert gpu.num_waits == 0, "the training thread waits for nothing"
        assert gpu.order == [
            "event 1 on training", "event 2 on training", "reduction waits for event 2 on training",
            "copy on reduction", "training waits for reduction",
        ]  # fmt: skip
        reads.wait()
        assert gpu.num_waits == 1
        window.close()
        assert gpu.order.count("training waits for reduction") == 1
