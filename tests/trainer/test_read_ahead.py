"""Reading ahead: what is taken is what was due, failures come when they are due, and few batches wait."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from megatron_recover.progress_page import PageReader, ProgressPage
from megatron_recover.trainer.read_ahead import Batch, ReadAhead

DEADLINE_S = 20.0
"""A wait longer than this is a hang: the test fails."""
THREAD = "recover-read"


def until(ready: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < end_s, what
        time.sleep(0.001)


class Found:
    """A batch that says of which samples it is, and can be watched."""

    def __init__(self, source: Source, indices: range) -> None:
        self.source, self.indices = source, indices
        self.num_prepared = 0


class Source:
    """A source that notes who reads what, and lets the test stop a reading."""

    def __init__(self, failing: frozenset[int] = frozenset(), elsewhere_only: bool = False) -> None:
        """`failing`: samples that cannot be read; `elsewhere_only`: none can in another thread than the test's."""
        self.may_read_ahead: bool | None = True
        self.failing, self.elsewhere_only, self.home = failing, elsewhere_only, threading.current_thread().name
        self.reads: list[tuple[str, range]] = []
        self.alive: weakref.WeakSet[Found] = weakref.WeakSet()
        self.most_at_once = self._at_once = 0
        self.stalled: set[int] = set()
        self.may_go_on = threading.Event()

    def read(self, indices: range) -> Found:
        thread = threading.current_thread().name
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.reads.append((thread, indices))
            if self.stalled & set(indices):
                assert self.may_go_on.wait(DEADLINE_S)
            time.sleep(0)
            if self.failing & set(indices) or (self.elsewhere_only and thread != self.home):
                raise OSError(f"{indices} cannot be read in {thread}")
            found = Found(self, indices)
            self.alive.add(found)
            return found
        finally:
            self._at_once -= 1

    def prepared(self, batch: Found) -> Found:
        batch.num_prepared += 1
        return batch

    def read_when_due(self, indices: range) -> Found:
        return self.read(indices)

    def batch(self, microbatch: int, step: int = 0) -> Batch:
        return Batch(self, microbatch, range(10 * step + microbatch, 10 * step + microbatch + 1))

    def batches(self, *microbatches: int, step: int = 0) -> list[Batch]:
        return [self.batch(each, step) for each in microbatches]


Make = Callable[..., ReadAhead]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ReadAhead] = []

    def begin(num_ahead: int = 2, page: ProgressPage | None = None) -> ReadAhead:
        made.append(ReadAhead(page or ProgressPage(), num_ahead))
        return made[-1]

    yield begin
    for each in made:
        each.close(DEADLINE_S)
        assert each._thread is None or not each._thread.is_alive()


@pytest.mark.parametrize("seed", range(40))
def test_what_is_taken_is_what_was_due_in_any_order(make: Make, seed: int) -> None:
    """Steps, sources, orders, batches that are expected and never due, due and not expected, dropped: all by chance."""
    chance = random.Random(seed)
    sources = [Source(frozenset(chance.sample(range(60), chance.choice((0, 0, 3))))) for _ in range(chance.choice((1, 2)))]
    ahead = make(chance.choice((0, 1, 2, 5)))
    for step in range(6):
        expected = [source.batch(each, step) for each in chance.sample(range(10), 8) for source in sources]
        due = chance.sample(expected, chance.randint(0, len(expected))) if chance.random() < 0.5 else expected
        due = due + [source.batch(each, step) for each in (8, 9) for source in sources if source.batch(each, step) not in due]
        ahead.expect(expected if chance.random() < 0.8 else ())
        for batch in due:
            if chance.random() < 0.1:
                ahead.expect(())
            if chance.random() < 0.2:
                time.sleep(0.0005)
            if batch.source.failing & set(batch.indices):
                with pytest.raises(OSError, match="in MainThread"):
                    ahead.take(batch)
            else:
                found = ahead.take(batch)
                assert (found.source, found.indices, found.num_prepared) == (batch.source, batch.indices, 1)
    assert all(source.most_at_once == 1 for source in sources), "two threads have read one source at the same time"


def test_as_many_are_read_ahead_as_were_asked_for_and_the_next_when_one_is_taken(make: Make) -> None:
    ahead, sources = make(2), [Source(), Source()]
    ahead.expect([source.batch(each) for each in range(8) for source in sources])
    for number in range(6):
        until(lambda: all(len(source.reads) == number + 2 for source in sources), "read ahead")  # noqa: B023
        time.sleep(0.01)
        assert [len(source.alive) for source in sources] == [2, 2], "more batches wait than were asked for"
        for source in sources:
            assert ahead.take(source.batch(number)).indices == range(number, number + 1)
    assert {thread for source in sources for thread, _ in source.reads} == {THREAD}
    assert all([index for _, [index] in source.reads] == list(range(len(source.reads))) for source in sources)


def test_of_several_sources_the_batch_that_is_due_first_is_read_first(make: Make) -> None:
    """The chunks of a model take a batch each in turn."""
    ahead, first, second = make(2), Source(), Source()
    second.reads = first.reads
    ahead.expect([first.batch(0), second.batch(0, step=1), first.batch(1), second.batch(1, step=1)])
    until(lambda: len(ahead._ready) == 4, "reading ahead")
    assert [indices.start for _, indices in first.reads] == [0, 10, 1, 11]


def test_what_is_dropped_is_freed_also_if_it_is_being_read(make: Make) -> None:
    ahead, source = make(2), Source()
    source.stalled = {1}
    ahead.expect(source.batches(0, 1, 2))
    until(lambda: len(source.reads) == 2, "the second reading")
    ahead.expect(())
    gc.collect()
    assert not source.alive
    source.may_go_on.set()
    until(lambda: ahead._reading is None, "the end of the reading")
    gc.collect()
    assert not source.alive and len(source.reads) == 2


def test_a_step_does_not_get_what_was_read_for_the_step_before(make: Make) -> None:
    ahead, source = make(3), Source()
    ahead.expect(source.batches(0, 1, 2))
    until(lambda: len(source.alive) == 3, "reading ahead")
    assert ahead.take(source.batch(0, step=1)).indices == range(10, 11)
    ahead.expect(source.batches(0, 1, 2, step=2))
    assert [ahead.take(source.batch(each, step=2)).indices.start for each in range(3)] == [20, 21, 22]


def test_a_batch_that_is_being_read_is_waited_for_and_not_read_again(make: Make) -> None:
    ahead, source = make(2), Source()
    source.stalled = {0}
    ahead.expect(source.batches(0, 1))
    until(lambda: source.reads, "the reading")
    threading.Timer(0.05, source.may_go_on.set).start()
    assert ahead.take(source.batch(0)).indices == range(1)
    assert [thread for thread, indices in source.reads if indices == range(1)] == [THREAD]


def test_what_is_due_and_was_not_expected_goes_before_what_is_read_ahead(make: Make) -> None:
    """As in a recovery: two sources, of which one is in the middle of a reading."""
    ahead, source, other = make(5), Source(), Source()
    source.stalled = {0}
    ahead.expect(source.batches(0, 1, 2, 3))
    until(lambda: source.reads, "the reading")
    threading.Timer(0.05, source.may_go_on.set).start()
    assert ahead.take(other.batch(7)).indices == range(7, 8)
    assert [thread for thread, _ in other.reads] == [threading.current_thread().name]
    assert len(source.reads) <= 2, "it waited for more than one reading"
    assert source.most_at_once == other.most_at_once == 1


def test_a_failure_is_raised_when_its_microbatch_is_due_and_not_before(make: Make) -> None:
    ahead, source = make(4), Source(frozenset({1, 3}))
    ahead.expect(source.batches(0, 1, 2, 3))
    until(lambda: len(source.reads) >= 2 and ahead._reading is None, "reading ahead")
    assert ahead.take(source.batch(0)).indices == range(1)
    assert ahead.take(source.batch(2)).indices == range(2, 3)
    with pytest.raises(OSError, match=r"range\(1, 2\) cannot be read in MainThread") as raised:
        ahead.take(source.batch(1))
    assert raised.value.__cause__ is None and raised.value.__context__ is None
    ahead.expect(())  # the other one is never due


def test_after_some_failures_the_source_is_read_when_due(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """It may be one that belongs to a thread, as a data base's connection does."""
    ahead, source = make(2), Source(elsewhere_only=True)
    ahead.expect(source.batches(0, 1, 2, 3))
    until(lambda: source.may_read_ahead is False, "the failures")
    assert [ahead.take(source.batch(each)).indices.start for each in range(4)] == [0, 1, 2, 3]
    ahead.expect(source.batches(4, 5))
    assert ahead.take(source.batch(4)).indices.start == 4
    assert [thread for thread, _ in source.reads] == [*[THREAD] * 3, *["MainThread"] * 5]
    assert "no sample is read before it is due" in caplog.messages[-1] and len(caplog.messages) == 3


def test_one_failure_is_logged_and_the_others_are_read_ahead(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A store that fails once would otherwise slow the rank down for the rest of the run, and no log would say why."""
    ahead, source = make(3), Source(frozenset({1}))
    ahead.expect(source.batches(0, 1, 2, 3))
    until(lambda: len(source.alive) == 3, "reading ahead")
    source.failing = frozenset()
    assert [ahead.take(source.batch(each)).indices.start for each in range(4)] == [0, 1, 2, 3]
    main = threading.current_thread().name
    assert [indices.start for thread, indices in source.reads if thread == main] == [1]
    [said] = caplog.messages
    assert "reading microbatch 1 ahead failed (OSError" in said


def test_a_batch_that_cannot_be_prepared_keeps_nobody_waiting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """To prepare a batch is no reading: a device that hangs in it is not excused as a slow disk."""
    reader = PageReader("test")
    ahead, source = make(1, ProgressPage(os.dup(reader.descriptor))), Source()
    original, shown = source.prepared, list[int | None]()

    def prepared(batch: Found) -> Found:
        if threading.current_thread().name == THREAD:
            progress = reader.read()
            assert progress is not None
            shown.append(progress.ahead)
            raise MemoryError("no memory can be pinned")
        return original(batch)

    monkeypatch.setattr(source, "prepared", prepared)
    ahead.expect(source.batches(0, 1))
    until(lambda: source.reads, "the reading")
    assert [ahead.take(source.batch(each)).indices.start for each in range(2)] == [0, 1]
    assert shown and set(shown) == {None}
    reader.close()


def test_failures_that_are_not_in_a_row_do_not_end_reading_ahead(make: Make) -> None:
    """In weeks, a store fails more than a few times."""
    ahead, source = make(2), Source()
    for step in range(5):
        source.failing = frozenset({10 * step})
        ahead.expect(source.batches(0, 1, step=step))
        until(lambda: source.batch(1, step) in ahead._ready, "the reading after the one that fails")  # noqa: B023
        source.failing = frozenset()
        assert [ahead.take(source.batch(each, step)).indices.start for each in range(2)] == [10 * step, 10 * step + 1]
    assert [thread for thread, _ in source.reads].count(threading.current_thread().name) == 5
    assert source.may_read_ahead


def test_what_was_read_ahead_of_a_source_that_may_no_longer_be_is_read_again_when_due(make: Make) -> None:
    """A reading in the training thread has found that the source draws: its batches belong to their random states."""
    ahead, source = make(2), Source()
    ahead.expect(source.batches(0, 1))
    until(lambda: len(ahead._ready) == 2, "reading ahead")
    source.may_read_ahead = False
    ahead.take(source.batch(7))
    ahead.take(source.batch(0))
    assert [thread for thread, indices in source.reads if indices.start == 0] == [THREAD, threading.current_thread().name]


@pytest.mark.parametrize("known", [None, False])
def test_a_source_that_may_not_be_read_ahead_is_not(make: Make, known: bool | None) -> None:
    ahead, source = make(2), Source()
    source.may_read_ahead = known
    ahead.expect(source.batches(0, 1))
    assert ahead._thread is None
    assert ahead.take(source.batch(0)).indices == range(1) and len(source.reads) == 1


def test_without_reading_ahead_there_is_no_thread(make: Make) -> None:
    ahead, source = make(0), Source()
    ahead.expect(source.batches(0, 1))
    assert ahead.take(source.batch(1)).indices == range(1, 2) and ahead._thread is None


def test_the_page_names_what_is_read_ahead_while_it_is_read(make: Make) -> None:
    reader = PageReader("test")
    page = ProgressPage(os.dup(reader.descriptor))
    ahead, source = make(2, page), Source()

    def shown() -> int | None:
        progress = reader.read()
        assert progress is not None
        return progress.ahead

    source.stalled = {0}
    assert shown() is None
    ahead.expect(source.batches(0))
    until(lambda: shown() == 0, "the microbatch on the page")
    source.may_go_on.set()
    until(lambda: shown() is None, "the end of the reading on the page")
    reader.close()


def test_closing_waits_no_longer_than_it_is_told_to() -> None:
    ahead, source = ReadAhead(ProgressPage(), 2), Source()
    source.stalled = {0}
    ahead.expect(source.batches(0, 1))
    until(lambda: source.reads, "the reading")
    ahead.close(0.05)
    assert ahead._thread is not None and ahead._thread.is_alive()
    source.may_go_on.set()
    ahead.close(DEADLINE_S)
    assert not ahead._thread.is_alive() and len(source.reads) == 1
