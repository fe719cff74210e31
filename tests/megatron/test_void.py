"""A sum that does not count every microbatch once: no replica ends, and the step is computed anew, from nothing.

As in tests/megatron/test_commit.py a whole job runs in one process and gradients are codes: what is checked is the data that
the optimizer gets. What is planted is a backward that goes wrong: it counts a microbatch twice, and adds to the local gradient.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megatron_recover import trace
from megatron_recover.faults import FaultPoint
from megatron_recover.megatron.reduction import Reduction
from tests.megatron.loopback import Strike
from tests.megatron.test_commit import Run, threads
from tests.megatron.toy import Threads

__all__ = ["threads"]  # the fixture: a world of one process, and its threads as stages


class Flaw:
    """Replica 1 counts the first microbatch of step 1 that it computes once too often, in so many attempts at the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int = 1, rank: int = 0) -> None:
        self.left, self.is_due, self.lock = times, True, threading.Lock()
        count, void, flaw = Reduction._count, Reduction.void, self

        def miscount(self: Reduction, slot: Any, microbatch: int) -> None:
            count(self, slot, microbatch)
            with flaw.lock:
                here = (self._member.replica, self._member.rank, self._step) == (1, rank, 1)
                strikes = here and flaw.is_due and flaw.left > 0
                flaw.left -= strikes
                flaw.is_due &= not strikes
            if strikes:
                count(self, slot, microbatch)
                slot.bucket.region.local.add_(1000.0)

        def once_more(self: Reduction) -> None:
            void(self)
            with flaw.lock:
                flaw.is_due |= self._member.replica == 1

        monkeypatch.setattr(Reduction, "_count", miscount)
        monkeypatch.setattr(Reduction, "void", once_more)


@pytest.mark.parametrize(
    "options", [{}, {"determinism": "exact"}, {"overlap": True}, {"fused": True, "overlap": True}], ids=str
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_miscount_costs_the_step_once_and_ends_nobody(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, num_ranks: int, options: dict[str, Any]
) -> None:
    flaw = Flaw(monkeypatch, rank=num_ranks - 1)
    run = Run(threads, 3, num_ranks, [], **options).check(may_void=True)
    assert flaw.left == 0 and run.job.roster == (0, 1, 2) and run.job.dead == set()
    told = run.log.of(trace.Miscounted)
    assert {event.replica for event in told} == {0, 1, 2} and {event.step for event in told} == {1}
    (event,) = {(event.bucket, event.microbatches) for event in told}
    assert [event.own_counts.count(2) for event in sorted(told, key=lambda each: each.replica)] == [0, 1, 0]
    assert all(run.job.records[0][1] == run.job.records[replica][1] for replica in (1, 2)) and len(event[1]) == 1


def test_it_is_the_same_as_a_run_without_it_bit_for_bit(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Run(threads, 2, 2, [], noisy=True, determinism="exact")
    Flaw(monkeypatch)
    found = Run(threads, 2, 2, [], noisy=True, determinism="exact")
    assert found.log.of(trace.Miscounted)
    for key, trainer in expected.trainers.items():
        for step, gradient in enumerate(trainer.gradients):
            for one, other in zip(gradient, found.trainers[key].gradients[step], strict=True):
                assert one.equal(other), (key, step)


def test_a_death_while_the_step_is_computed_anew_is_survived(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, point in ((0, FaultPoint.RECOMPUTE), (1, FaultPoint.BEFORE_REDUCE), (1, FaultPoint.SECOND_REDUCE)):
        with monkeypatch.context() as planted:
            Flaw(planted)
            # The first pass of the step goes by BEFORE_REDUCE once; the death is at the second.
            occurrence = 2 if point is FaultPoint.BEFORE_REDUCE else 1
            strike = Strike(2, rank, point, step=1, occurrence=occurrence)
            run = Run(threads, 3, 2, [strike]).check(may_void=True)
            assert strike.struck and run.log.of(trace.Miscounted)


def test_a_second_miscount_in_the_step_is_not_computed_a_third_time(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    Flaw(monkeypatch, times=2)
    with pytest.raises(AssertionError, match="void twice: step 1, bucket"):
        Run(threads, 2, 1, [])


def test_a_void_step_that_keeps_the_local_gradient_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    void = Reduction.void

    def keeps(self: Reduction) -> None:
        kept = [region.local.clone() for region in self.regions]
        void(self)
        for region, gradient in zip(self.regions, kept, strict=True):
            region.local.copy_(gradient)

    monkeypatch.setattr(Reduction, "void", keeps)
    Flaw(monkeypatch)
    with pytest.raises(AssertionError):
        Run(threads, 3, 1, []).check(may_void=True)


def test_a_void_step_that_keeps_its_counts_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    void = Reduction.void

    def keeps(self: Reduction) -> None:
        kept = [slot.counts for slot in self._slots]
        void(self)
        for slot, counts in zip(self._slots, kept, strict=True):
            slot.counts = counts

    monkeypatch.setattr(Reduction, "void", keeps)
    Flaw(monkeypatch)
    with pytest.raises(AssertionError, match="void twice"):
        Run(threads, 3, 1, [])
