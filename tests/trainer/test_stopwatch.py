"""The stopwatch: known at once on a CPU; on a GPU when its events have passed, and never waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_recover.trainer import stopwatch
from megatron_recover.trainer.stopwatch import Stopwatch


def test_a_pass_on_a_cpu_is_known_at_its_end_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking = iter((100, 350))
    monkeypatch.setattr(stopwatch.time, "perf_counter_ns", lambda: next(ticking))
    watch = Stopwatch(torch.device("cpu"))
    assert watch.take() is None
    watch.begin()
    assert watch.take() is None
    watch.end(4)
    assert watch.take() == (4, 250)
    assert watch.take() is None


class Event:
    """A CUDA event that passes when the test says so."""

    made: list[Event] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.passed, self.ms = False, 0.0
        Event.made.append(self)

    def record(self) -> None:
        self.ms = 2.5 * len(Event.made)

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: Event) -> float:
        return end.ms - self.ms


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.made.clear()
    return Event.made


def test_a_pass_on_a_gpu_is_known_when_its_kernels_are_done(events: list[Event]) -> None:
    watch = Stopwatch(torch.device("cuda"))
    watch.begin()
    watch.end(3)
    assert watch.take() is None, "it must not wait"
    events[1].passed = True
    assert watch.take() == (3, 2_500_000)
