"""The phases of a recovery: every one once, in order, with its own seconds, and none of a recovery that was overtaken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest

from megatron_recover import trace
from megatron_recover.control_plane import timing
from megatron_recover.control_plane.timing import RecoveryClock


class Watch:
    """A clock of replica 1 and the time that it reads."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.events: list[trace.Event] = []
        self.clock = RecoveryClock(1, self.events.append)

    def after(self, seconds: float) -> RecoveryClock:
        self.now_s += seconds
        return self.clock

    def phases(self) -> list[tuple[str, float]]:
        events = [event for event in self.events if isinstance(event, trace.Recovery)]
        assert len(events) == len(self.events)
        return [(event.phase, event.seconds) for event in events]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


def test_every_phase_is_told_once_in_order_with_its_own_seconds(watch: Watch) -> None:
    watch.clock.announced(2, 0.5)
    watch.after(1).agreed(7, begun=True)
    watch.after(2).taken(2)
    watch.after(4).computed(2)
    watch.after(8).voted(2)
    watch.after(16).committed(2, 7)
    assert watch.phases() == [("detect", 0.5), ("agree", 1), ("redeal", 2), ("recompute", 4), ("reduce", 8), ("commit", 16)]
    assert [phase for phase, _ in watch.phases()] == list(get_args(trace.Phase))
    assert {(event.replica, event.generation, event.step) for event in watch.events} == {(1, 2, 7)}
    for later in (watch.clock.taken, watch.clock.computed, watch.clock.voted):
        later(2)
    watch.clock.committed(2, 8)
    assert len(watch.events) == 6, "the steps after it are no recovery"


def test_a_phase_with_nothing_to_do_ends_with_the_next(watch: Watch) -> None:
    """Everything was held already: the vote follows the plan at once."""
    watch.clock.announced(2, 0.0)
    watch.clock.agreed(7, begun=True)
    watch.after(3).voted(2)
    assert watch.phases()[2:] == [("redeal", 3), ("recompute", 0), ("reduce", 0)]


def test_a_newer_generation_ends_the_measurement(watch: Watch) -> None:
    watch.clock.announced(2, 0.0)
    watch.clock.agreed(7, begun=True)
    watch.after(1).announced(3, 0.25)
    assert watch.after(2).since_announced_s() == 2
    watch.clock.taken(2)
    watch.clock.computed(2)
    assert watch.phases() == [("detect", 0), ("agree", 0)], "they are of the plan that was overtaken"
    watch.clock.agreed(7, begun=True)
    watch.clock.taken(3)
    assert watch.phases()[2:] == [("detect", 0.25), ("agree", 2), ("redeal", 0)]


def test_a_step_that_is_adopted_is_not_the_one_that_is_recovered(watch: Watch) -> None:
    watch.clock.announced(2, 0.0)
    watch.clock.agreed(7, begun=True)
    watch.clock.committed(2, 6)
    assert [phase for phase, _ in watch.phases()] == ["detect", "agree"]


def test_the_start_and_what_nobody_had_begun_have_nothing_to_recover(watch: Watch) -> None:
    watch.clock.announced(1, 0.0)
    watch.clock.agreed(0, begun=True)
    watch.clock.taken(1)
    assert watch.events == [], "generation 1 is the start"
    watch.clock.announced(2, 0.5)
    watch.clock.agreed(3, begun=False)
    watch.clock.taken(2)
    assert watch.phases() == [("detect", 0.5), ("agree", 0)]
