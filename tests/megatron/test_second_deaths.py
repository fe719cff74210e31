"""A second death in the recovery from the first, with buckets reduced beside the backward; and defects that must be seen.

As in tests/megatron/test_commit.py a whole job runs in one process and gradients are codes: what is checked is the data that
the optimizer gets. A defect is planted by replacing one method; what runs then is what runs without it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from megatron_recover import trace
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.quota import balanced, share
from megatron_recover.faults import FaultPoint
from megatron_recover.megatron.gradient_buffers import BackwardWatch
from megatron_recover.trainer import work_queue
from megatron_recover.trainer.microbatches import Microbatches
from megatron_recover.trainer.reduction import Reduction
from tests.megatron.loopback import Strike
from tests.megatron.test_commit import NUM_BUCKETS, Run, first_strikes, second_strikes
from tests.megatron.toy import Threads
from tests.parts import in_parts

M, VICTIM = 8, 1
QUOTAS = balanced(M, (1, 1, 1))
IDS = share(QUOTAS, range(3), VICTIM)
"""Of three replicas the first to die, and what it takes along."""


def run(threads: Threads, *strikes: Strike, num_ranks: int = 2, **options: Any) -> Run:
    return Run(threads, 3, num_ranks, list(strikes), num_microbatches=M, overlap=True, **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_death_while_the_work_just_taken_over_is_in_flight(threads: Threads, num_ranks: int) -> None:
    """Forward and backward of a microbatch that a running pass has taken in, on every stage, of either survivor."""
    for replica, rank in itertools.product((0, 2), range(num_ranks)):
        own = len(share(QUOTAS, range(3), replica))
        for point, occurrence in ((FaultPoint.RECOMPUTE, 1), (FaultPoint.BACKWARD, own + 1)):
            first = Strike(VICTIM, num_ranks - 1, FaultPoint.BACKWARD, step=1, microbatch=IDS[0], when="open")
            second = Strike(replica, rank, point, step=1, occurrence=occurrence)
            print(first, second)
            found = run(threads, first, second, num_ranks=num_ranks).check()
            assert first.struck and second.struck
            assert {event.replica for event in found.log.of(trace.Extended)} >= {replica}


def deaths_in_the_overlapped_reduction() -> Iterator[tuple[Strike, Strike]]:
    """One inside the sum of every bucket, and another at every instant of the recovery from it."""
    for first, replica in itertools.product(range(2 * NUM_BUCKETS + 1), (0, 2)):
        for second in second_strikes(replica, 2):
            reductions = (strike for strike in first_strikes(VICTIM, 3, 2) if strike.point is FaultPoint.REDUCE)
            yield list(reductions)[first], second


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", in_parts([()], 9))
def test_a_second_death_when_buckets_are_decided_in_part(threads: Threads, part: slice) -> None:
    num_second = num_partly = 0
    for number, (first, second) in list(enumerate(deaths_in_the_overlapped_reduction()))[part]:
        print(first, second)
        found = run(threads, first, second, fused=bool(number % 2)).check()
        assert first.struck
        num_second += second.struck
        redone = [
            set(event.into) for event in found.log.of(trace.MicrobatchFinished) if event.generation > 1 and event.step == 1
        ]
        num_partly += any(0 < len(into) < NUM_BUCKETS for into in redone)
    assert num_second > 4 and num_partly > 4


# --- Defects -------------------------------------------------------------------------------------------------------------


def is_seen(runs: Iterable[Callable[[], Run]]) -> bool:
    """Whether one of these runs fails."""
    for attempt in runs:
        try:
            attempt().check()
        except (AssertionError, InvariantViolation, ValueError) as error:  # the last: what a machine says of a defect
            print(f"{type(error).__name__}: {error}")
            return True
    return False


def one_death(threads: Threads) -> Iterator[Callable[[], Run]]:
    """A death in the backward of each microbatch of `VICTIM`, while the others can still be dealt what it had."""
    for microbatch in IDS:
        yield lambda microbatch=microbatch: run(
            threads, Strike(VICTIM, 1, FaultPoint.BACKWARD, step=1, microbatch=microbatch, when="open")
        )


def test_a_bucket_that_is_reduced_before_the_pass_is_closed_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_seen(one_death(threads))
    begins = Microbatches.backward_begins
    # Whether or not `Close` has come, any backward may be the last one.
    monkeypatch.setattr(Microbatches, "backward_begins", lambda self, task, chunk, last: begins(self, task, chunk, True))
    assert is_seen(one_death(threads))


def test_a_bucket_that_is_read_before_backward_has_passed_it_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    exactly = [lambda: Run(threads, 2, 2, [], overlap=True, determinism="exact")]
    assert not is_seen(exactly)
    begin = BackwardWatch.begin

    def early(self: BackwardWatch, chunk: int, passed: Callable[[int], None]) -> None:
        for bucket in {bucket.id for buckets in self._buckets[chunk].values() for bucket in buckets}:
            passed(bucket)
        begin(self, chunk, lambda bucket: None)

    monkeypatch.setattr(BackwardWatch, "begin", early)
    assert is_seen(exactly)


def test_an_id_that_is_counted_twice_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    end_backward = Reduction.end_backward

    def twice(self: Reduction, microbatch: int, chunk: int, into: Any) -> Any:
        self._counted.clear()  # what the watch has counted beside the backward
        return end_backward(self, microbatch, chunk, into)

    monkeypatch.setattr(Reduction, "end_backward", twice)
    assert is_seen(one_death(threads))


def test_gradient_that_goes_into_a_decided_bucket_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    def into_all(plan: Any) -> tuple[work_queue.Task, ...]:
        return tuple(task._replace(into=plan.work.buckets) for task in tasks(plan))

    tasks = work_queue._tasks
    monkeypatch.setattr(work_queue, "_tasks", into_all)
    assert is_seen(
        lambda first=first, second=second: run(threads, first, second) for first, second in deaths_in_the_overlapped_reduction()
    )


def test_a_fused_backward_that_adds_where_the_wrong_plan_collects_is_seen(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds where the forward has found the main gradient: a target that is set before the backward comes too late."""
    collect_into, begins, here = Reduction.collect_into, Microbatches.forward_begins, threading.local()

    def collect(self: Reduction, into: tuple[int, ...] | None) -> None:
        if not getattr(here, "is_forward", False):
            collect_into(self, into)

    def forward_begins(self: Microbatches, task: Any, chunk: int) -> None:
        here.is_forward = True
        begins(self, task, chunk)
        here.is_forward = False

    monkeypatch.setattr(Reduction, "collect_into", collect)
    monkeypatch.setattr(Microbatches, "forward_begins", forward_begins)
    assert is_seen(
        lambda first=first, second=second: run(threads, first, second, fused=True)
        for first, second in deaths_in_the_overlapped_reduction()
    )
