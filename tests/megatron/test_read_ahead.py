"""Samples that are read ahead are those of the microbatch that is due, in whatever a job does; what is dealt again is not."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch

from megatron_recover.core.quota import balanced, share
from megatron_recover.faults import FaultPoint
from megatron_recover.megatron.data.loaders import MicrobatchCursor, MicrobatchIterator
from megatron_recover.megatron.data.randomness import state_of_generators
from megatron_recover.trainer.read_ahead import Batch, ReadAhead
from tests.megatron import toy
from tests.megatron.loopback import Strike
from tests.megatron.test_commit import Run, first_strikes
from tests.megatron.toy import Threads, Trainer
from tests.trainer.test_read_ahead import THREAD, until

pytestmark = pytest.mark.usefixtures("threads")


class Numbers:
    """A dataset whose sample i is i; notes in which thread it is read."""

    def __init__(self, size: int = 10_000, draws: bool = False) -> None:
        self._size, self._draws = size, draws
        self.reads: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append((threading.current_thread().name, index))
        noise = numpy.random.random() if self._draws else 0.0  # noqa: NPY002
        return {"tokens": numpy.array([index]), "noise": noise}


def samples(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


def iterator(dataset: Any, cursor: MicrobatchCursor, lane: int = 0, num_lanes: int = 1, micro: int = 2) -> MicrobatchIterator:
    return MicrobatchIterator(
        dataset, cursor, consumed_samples=32, micro_batch_size=micro, lane=lane, num_lanes=num_lanes
    )  # fmt: skip


@pytest.fixture
def cursor() -> Iterator[MicrobatchCursor]:
    cursor = MicrobatchCursor(num_ahead=2)
    yield cursor
    cursor.read_ahead.close(20.0)


@pytest.mark.parametrize("seed", range(10))
def test_steps_lanes_and_orders_have_the_samples_that_they_have_without_reading_ahead(
    seed: int, cursor: MicrobatchCursor
) -> None:
    chance, plain = random.Random(seed), MicrobatchCursor()
    lanes, micro, chunks = chance.choice((1, 2)), chance.choice((1, 3)), chance.choice((1, 2))
    for lane in range(lanes):
        ours, theirs = ([iterator(Numbers(), each, lane, lanes, micro) for _ in range(chunks)] for each in (cursor, plain))
        for step in range(5):
            num = chance.choice((4, 6))
            for each, iterators in ((cursor, ours), (plain, theirs)):
                each.begin(iterators, num)
            dealt = chance.sample(range(num), chance.randint(1, num))
            with cursor.reading_ahead(dealt):
                for microbatch in chance.sample(dealt, len(dealt)) if chance.random() < 0.3 else dealt:
                    cursor.microbatch = plain.microbatch = microbatch
                    for one, other in zip(ours, theirs, strict=True):
                        found = samples(next(one))
                        assert found == samples(next(other)) == list(one.indices(microbatch)), (step, microbatch)


def test_a_data_set_that_draws_is_read_when_due_and_draws_what_it_draws_without_reading_ahead(
    cursor: MicrobatchCursor, caplog: pytest.LogCaptureFixture
) -> None:
    def noise(each: MicrobatchCursor) -> tuple[list[float], Numbers]:
        dataset, found = Numbers(draws=True), []
        reader = iterator(dataset, each)
        for _ in range(3):
            each.begin(reader, 4)
            with each.reading_ahead(range(4)):
                for microbatch in range(4):
                    each.microbatch = microbatch
                    numpy.random.seed(microbatch)  # as every forward begins
                    found += next(reader)["noise"].tolist()
        return found, dataset

    caplog.set_level(logging.WARNING)
    (ours, dataset), (plain, _) = noise(cursor), noise(MicrobatchCursor())
    assert ours == plain and THREAD not in {thread for thread, _ in dataset.reads}
    assert [record.message for record in caplog.records] == [
        "reading samples changes the random state of the process: no sample is read before it is due"
    ]


def test_the_first_batch_is_read_when_due_and_the_thread_changes_no_random_state(cursor: MicrobatchCursor) -> None:
    dataset = Numbers()
    reader = iterator(dataset, cursor)
    before = state_of_generators()
    for _ in range(2):
        cursor.begin(reader, 4)
        with cursor.reading_ahead(range(4)):
            until(lambda: not reader.may_read_ahead or len(cursor.read_ahead._ready) == 2, "reading ahead")
            for cursor.microbatch in range(4):
                next(reader)
    assert state_of_generators() == before
    assert [thread for thread, _ in dataset.reads][:10] == ["MainThread"] * 8 + [THREAD] * 2


def test_all_chunks_of_a_model_are_read_ahead(cursor: MicrobatchCursor) -> None:
    datasets = [Numbers(), Numbers()]
    readers = [iterator(each, cursor) for each in datasets]
    for reader in readers:
        reader.may_read_ahead = True
    cursor.begin(readers, 4)
    with cursor.reading_ahead(range(3)):
        until(lambda: len(cursor.read_ahead._ready) == 4, "reading ahead")
    assert not cursor.read_ahead._ready and not cursor.read_ahead._expected, "it reads on behind the pass"
    assert [thread for each in datasets for thread, _ in each.reads] == [THREAD] * 8


def test_a_batch_is_pinned_for_a_gpu_whichever_thread_reads_it(
    cursor: MicrobatchCursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[str, torch.Tensor]] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        pinned.append((threading.current_thread().name, self.clone()))
        return pinned[-1][1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    reader = iterator(Numbers(), cursor)
    for _ in range(2):
        cursor.begin(reader, 2)
        with cursor.reading_ahead(range(2)):
            until(lambda: not reader.may_read_ahead or len(cursor.read_ahead._ready) == 2, "reading ahead")
            for cursor.microbatch in range(2):
                batch = next(reader)
                assert all(any(value is each for _, each in pinned) for value in batch.values())
    assert {thread for thread, _ in pinned} == {"MainThread", THREAD}
    assert devices == [3], "the thread pins for the rank's own device"


def test_every_generator_of_the_process_counts() -> None:
    for draw in (random.random, numpy.random.random, numpy.random.standard_normal, lambda: torch.rand(1)):  # noqa: NPY002
        before = state_of_generators()
        assert state_of_generators() == before
        draw()
        assert state_of_generators() != before, draw


def test_the_end_of_the_data_comes_when_it_is_due(cursor: MicrobatchCursor) -> None:
    reader = MicrobatchIterator(Numbers(7), cursor, consumed_samples=0, micro_batch_size=2, lane=0, num_lanes=1)
    for num in (2, 2):
        cursor.begin(reader, num)
        with cursor.reading_ahead(range(num)):
            cursor.microbatch = 0
            next(reader)
            cursor.microbatch = 1
            if reader.indices(1).stop <= 7:
                next(reader)
                continue
            with pytest.raises(StopIteration, match="has 7 samples"):
                next(reader)


# --- whole jobs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(thread, sample) of every reading in a job of toys."""
    found: list[tuple[str, int]] = []
    get = toy.Samples.__getitem__

    def noted(self: Any, index: int) -> Any:
        found.append((threading.current_thread().name, index))
        return get(self, index)

    monkeypatch.setattr(toy.Samples, "__getitem__", noted)
    return found


def end(trainer: Trainer) -> None:
    trainer.loop.close()
    thread = trainer.loop._cursor.read_ahead._thread
    assert thread is None or not thread.is_alive()


MANY = 16
"""Microbatches of a step: a power of two, by which the toy's numbers are exact."""


def test_a_job_that_reads_ahead_has_the_gradients_of_one_that_does_not(threads: Threads, reads: list[tuple[str, int]]) -> None:
    Run(threads, 2, 2, [], num_ahead=2, num_microbatches=MANY, then=end).check()
    steps = {index // MANY for thread, index in reads if thread == THREAD}
    assert steps == {1, 2}, "the first step is read when it is due, and of validation the first batch"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_death_at_any_instant_changes_no_sample(threads: Threads, num_ranks: int, reads: list[tuple[str, int]]) -> None:
    for strike in first_strikes(1, 3, num_ranks):
        Run(threads, 3, num_ranks, [strike], num_ahead=2, then=end).check()
    assert THREAD in {thread for thread, _ in reads}


@pytest.mark.parametrize("point", [FaultPoint.FORWARD, FaultPoint.REDUCE], ids=["in the pass", "after the pass"])
def test_what_a_dead_replica_had_is_read_when_it_is_due(
    threads: Threads, point: FaultPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a second death names one microbatch alone (INV-9)."""
    expected: list[tuple[str, int]] = []
    expect = ReadAhead.expect

    def noted(self: ReadAhead, batches: Iterable[Batch]) -> None:
        batches = list(batches)
        expected.extend((threading.current_thread().name, batch.indices.start) for batch in batches)
        expect(self, batches)

    monkeypatch.setattr(ReadAhead, "expect", noted)
    victims = share(balanced(MANY, (1,) * 3), range(3), 1)
    where = {"microbatch": victims[0]} if point is FaultPoint.FORWARD else {"bucket": 0}
    strike = Strike(1, 0, point, step=1, **where)
    Run(threads, 3, 1, [strike], num_ahead=2, num_microbatches=MANY, then=end).check()
    of_victims = {thread for thread, index in expected if index - MANY in victims}
    assert of_victims == {"replica 1 rank 0"}, "a survivor reads ahead what was dealt again"
    assert {thread for thread, index in expected if index >= 2 * MANY} == {"replica 0 rank 0", "replica 2 rank 0"}


def test_virtual_stages_read_the_same_microbatches_ahead(threads: Threads, reads: list[tuple[str, int]]) -> None:
    Run(threads, 2, 2, [], num_chunks=2, num_ahead=3, num_microbatches=MANY, then=end).check()
    assert THREAD in {thread for thread, index in reads if index >= 2 * MANY}
