"""A sum that does not count every microbatch once: no replica ends, and the step is computed anew, from nothing.

As in tests/megatron/test_commit.py a whole job runs in one process and gradients are codes: what is checked is the data that
the optimizer gets. What is planted is a backward that goes wrong: it counts a microbatch twice, and adds to the local gradient.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megatron_recover import trace
from megatron_recover.core.digest import combined
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import Void
from megatron_recover.core.policy import exit_code
from megatron_recover.core.request import MISCOUNTED
from megatron_recover.faults import FaultPoint
from megatron_recover.megatron.commit import CommitLoop
from megatron_recover.trainer.reduction import Reduction
from tests.megatron.loopback import Strike
from tests.megatron.test_commit import Run
from tests.megatron.toy import Threads

EVALUATION = 2
"""The step of a `Run` that is one."""


class Flaw:
    """Replica 1 counts the first microbatch of a step that it computes once too often, in so many attempts at the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int = 1, rank: int = 0, step: int = 1) -> None:
        self.left, self.is_due, self.lock = times, True, threading.Lock()
        count, count_ledger, void, flaw = Reduction._count, Reduction.count_ledger, Reduction.void, self

        def strikes(self: Reduction) -> bool:
            with flaw.lock:
                here = (self._driver.replica, self._driver.rank, self._step) == (1, rank, step)
                strikes = here and flaw.is_due and flaw.left > 0
                flaw.left -= strikes
                flaw.is_due &= not strikes
            return strikes

        def miscount(self: Reduction, bucket_sum: Any, microbatch: int) -> None:
            count(self, bucket_sum, microbatch)
            if strikes(self):
                count(self, bucket_sum, microbatch)
                bucket_sum._bucket.region.local.add_(1000.0)

        def miscount_ledger(self: Reduction, microbatch: int) -> None:
            count_ledger(self, microbatch)
            if step == EVALUATION and strikes(self):
                count_ledger(self, microbatch)

        def once_more(self: Reduction) -> None:
            void(self)
            with flaw.lock:
                flaw.is_due |= self._driver.replica == 1

        monkeypatch.setattr(Reduction, "_count", miscount)
        monkeypatch.setattr(Reduction, "count_ledger", miscount_ledger)
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
    assert {event.step for event in told} == {1}
    (event,) = {(event.bucket, event.microbatches) for event in told}
    # Who learns of the next generation before its own sum is complete has nothing to report.
    assert told and all(each.own_counts.count(2) == (each.replica == 1) for each in told)
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


@pytest.mark.parametrize("options", [{}, {"determinism": "exact"}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_second_miscount_in_the_step_gives_it_up_and_all_agree_on_the_state_before_it(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, num_ranks: int, options: dict[str, Any]
) -> None:
    states: dict[tuple[int, int], int] = {}
    stepped = CommitLoop.stepped

    def remember(self: CommitLoop, trained: bool = True) -> None:
        if trained and self._applied is not None:
            assert self._state is not None
            states[self._driver.replica, self._driver.rank] = self._state.digest()
        stepped(self, trained)

    monkeypatch.setattr(CommitLoop, "stepped", remember)
    flaw = Flaw(monkeypatch, times=2, rank=num_ranks - 1)
    run = Run(threads, 3, num_ranks, [], **options)
    assert flaw.left == 0 and run.job.roster == (0, 1, 2) and run.job.void == Void(1, 3, gives_up=True)
    assert all(len(trainer.gradients) == 1 for trainer in run.trainers.values()), "something was applied"
    for replica in (0, 1, 2):
        trained, given_up, saved = run.job.records[replica]
        assert (given_up.label, given_up.versions, given_up.requests) == ("give up train 2", (), (MISCOUNTED,))
        before = combined([states[replica, rank] for rank in range(num_ranks)])
        assert (saved.label, saved.state_digest) == ("save 1", before), "the state is not that of the step before"
        assert (trained.label, exit_code(saved.requests)) == ("train 1", ExitCode.INVARIANT_VIOLATED)


@pytest.mark.parametrize("point", [FaultPoint.SECOND_REDUCE, FaultPoint.BEFORE_REDUCE])
def test_a_death_while_the_step_is_given_up_leaves_the_others_with_one_state(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, point: FaultPoint
) -> None:
    Flaw(monkeypatch, times=2)
    # In the second attempt; or before the sum that the save has, which is the third time that it goes by there.
    strike = Strike(2, 0, point, step=1, occurrence=1 if point is FaultPoint.SECOND_REDUCE else 3)
    run = Run(threads, 3, 1, [strike])
    labels = [[record.label for record in run.job.records[replica]] for replica in (0, 1)]
    assert labels[0] == labels[1] and labels[0][0] == "train 1", labels
    if strike.struck and labels[0][1].startswith("give up"):
        assert labels[0] == ["train 1", "give up train 2", "save 1"]
    assert len({record.state_digest for replica in (0, 1) for record in run.job.records[replica][2:3]}) == 1


def test_an_evaluation_that_is_miscounted_twice_ends_without_losses_and_computes_no_more(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaw = Flaw(monkeypatch, times=2, step=EVALUATION)
    run = Run(threads, 2, 1, [], then=lambda trainer: trainer.step(forward_only=True))
    assert flaw.left == 0
    for replica in (0, 1):
        labels = [record.label for record in run.job.records[replica]]
        assert labels == ["train 1", "train 2", "give up evaluate 2/1", "save 2"]
        assert [len(losses) for losses in run.trainers[replica, 0].losses] == [4, 4, 0, 0]


def test_a_void_step_that_keeps_the_local_gradient_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    void = Reduction.void

    def keeps(self: Reduction) -> None:
        kept = [region.local.clone() for region in self._gradients.regions]
        void(self)
        for region, gradient in zip(self._gradients.regions, kept, strict=True):
            region.local.copy_(gradient)

    monkeypatch.setattr(Reduction, "void", keeps)
    Flaw(monkeypatch)
    with pytest.raises(AssertionError):
        Run(threads, 3, 1, []).check(may_void=True)


def test_a_void_step_that_keeps_its_counts_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    void = Reduction.void

    def keeps(self: Reduction) -> None:
        kept = [bucket_sum.counts for bucket_sum in self._sums]
        void(self)
        for bucket_sum, counts in zip(self._sums, kept, strict=True):
            bucket_sum.counts = counts

    monkeypatch.setattr(Reduction, "void", keeps)
    Flaw(monkeypatch)
    run = Run(threads, 3, 1, [])
    assert run.job.void == Void(1, 3, gives_up=True), "the second attempt counted right"
