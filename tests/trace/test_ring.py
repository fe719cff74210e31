"""The ring: what a process recorded survives it, nothing is lost unseen, and the merged order is one that can have happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recover import trace
from megatron_recover.config import RankContext, describe_descriptors
from megatron_recover.trace import ring
from megatron_recover.trace.node_clock import NodeClock

DONE = trace.MicrobatchFinished(replica=1, rank=0, generation=1, step=3, microbatch=5, seconds=0.25, into=(0, 2))


def numbered(number: int, padding: int = 0) -> trace.ReductionFailed:
    return trace.ReductionFailed(replica=0, rank=0, generation=1, step=number, reason="x" * padding)


def number_of(line: bytes) -> int:
    return msgspec.json.decode(line)["step"]


def merged(*readers: ring.RingReader, **settings: object) -> ring.Merge:
    merge = ring.Merge(settle=lambda: None, **settings)
    for source, reader in enumerate(readers):
        merge.add(source, reader)
    return merge


@contextlib.contextmanager
def pair(capacity: int = 4096, level: trace.Level = "microbatches", **how: object) -> Iterator[tuple]:
    descriptor = ring.create(capacity=capacity, level=level)
    try:
        yield ring.RingLog(descriptor, NodeClock(None), **how), ring.RingReader(descriptor)
    finally:
        os.close(descriptor)


def test_a_rank_maps_its_ring_and_keeps_no_descriptor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping has a copy of it; the number is free again for a rank that has many connections."""
    context = RankContext(
        replica=0, rank=0, num_ranks=1, num_replicas=1, coordinator="", leader="", run_dir="", started_at=0.0
    )  # fmt: skip
    descriptor = ring.create(capacity=4096)
    reader = ring.RingReader(descriptor)
    for name, value in describe_descriptors({ring.DESCRIPTOR: descriptor}).items():
        monkeypatch.setenv(name, value)
    log = ring.log_of_rank(context, NodeClock(None))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    log.record(numbered(7))
    assert [number_of(item.what) for item in merged(reader).drain(time.monotonic_ns() + 1)] == [7]


def test_what_is_recorded_is_read_once_in_its_order_through_many_turns_of_the_ring() -> None:
    with pair() as (log, reader):
        merge, found, stamps = merged(reader), [], []
        for number in range(2000):
            log.record(numbered(number, padding=number % 700))
            if number % 3 == 0:
                items = merge.drain(time.monotonic_ns() + 1)
                found += [number_of(item.what) for item in items]
                stamps += [item.stamp for item in items]
                reader.release(items[-1].position, items[-1].told)
        assert found == list(range(1999)) and stamps == sorted(stamps)


def test_what_does_not_fit_is_counted_with_its_time_and_its_place() -> None:
    now = [0]

    def clock() -> int:
        now[0] += 1
        return now[0]

    with pair(clock=clock) as (log, reader):
        for number in range(10):
            log.record(numbered(number, padding=1000))  # three of them fill the ring
        merge = merged(reader)
        items = merge.drain(50)
        assert [number_of(item.what) for item in items[:-1]] == [0, 1, 2]
        assert items[-1].what == ring.Dropped(7, 4) and items[-1].stamp == 10
        reader.release(items[-1].position, items[-1].told)
        now[0] = 50
        log.record(numbered(10))
        assert [number_of(item.what) for item in merge.drain(60)] == [10], "a loss is told once"
        now[0] = 60
        log.record(numbered(11, padding=10**5))
        log.record(numbered(12))
        lost, item = merge.drain(70)
        assert lost.what == ring.Dropped(1, 61) and number_of(item.what) == 12


def test_nothing_is_freed_before_it_is_released_and_another_reader_goes_on_there() -> None:
    descriptor = ring.create(capacity=4096)
    log, reader = ring.RingLog(descriptor, NodeClock(None)), ring.RingReader(descriptor)
    for number in range(6):
        log.record(numbered(number, padding=1000))
    items = merged(reader).drain(time.monotonic_ns() + 1)
    assert len(items) == 4, "three events, and word of three that found no room"
    kept = items[1]
    again = ring.RingReader(descriptor, position=kept.position, told=kept.told)  # as after the death of the first reader
    log.record(numbered(6, padding=1000))
    items = merged(again, after=kept.stamp).drain(time.monotonic_ns() + 1)
    assert [number_of(item.what) for item in items if isinstance(item.what, bytes)] == [2, 6]
    assert [item.what.num_events for item in items if isinstance(item.what, ring.Dropped)] == [3]
    os.close(descriptor)


def test_recording_never_raises() -> None:
    with pair() as (log, reader):
        log.record(trace.Checkpoint(replica=0, rank=0, iteration=1, phase="failed", detail="\udcff"))  # no Unicode: a file name
        [item] = merged(reader).drain(time.monotonic_ns() + 1)
        assert item.what == ring.Dropped(1, item.stamp)


@pytest.mark.parametrize("level", trace.LEVELS)
def test_a_level_leaves_out_what_it_names_and_nothing_else(level: trace.Level) -> None:
    from tests.observe import traces

    with pair(capacity=2**20, level=level) as (log, reader):
        events = traces.faulty_run().events
        for event in events:
            log.record(event)
        kept = [msgspec.json.decode(item.what)["event"] for item in merged(reader).drain(time.monotonic_ns() + 1)]
        assert kept == [trace.name_of(event) for event in events if type(event) not in trace.LEFT_OUT[level]]
        assert ("microbatch_finished" in kept) == (level == "microbatches")
        assert ("committed" in kept) == (level != "faults")
        assert {"run_started", "generation", "failure", "status", "run_finished"} <= set(kept)


def test_threads_of_one_process_never_mix() -> None:
    with pair(capacity=2**20) as (log, reader):
        threads = [threading.Thread(target=lambda: [log.record(DONE) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        items = merged(reader).drain(time.monotonic_ns() + 1)
        assert [msgspec.json.decode(item.what, type=trace.AnyEvent) for item in items] == [DONE] * 2000


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a process of its own, which then kills itself."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            work()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_an_event_survives_sigkill() -> None:
    descriptor = ring.create()
    in_child(lambda: ring.RingLog(descriptor, NodeClock(None)).record(DONE))
    [item] = merged(ring.RingReader(descriptor)).drain(time.monotonic_ns() + 1)
    assert msgspec.json.decode(item.what, type=trace.AnyEvent) == DONE
    os.close(descriptor)


class Torn(ring.RingLog):
    """Its process dies in the middle of an event: the memory takes half of it."""

    def _publish(self, stamp: int, hybrid: int, line: bytes | None) -> None:
        class Half:
            def __init__(self, memory: object) -> None:
                self.memory = memory

            def __setitem__(self, where: slice, what: bytes) -> None:
                self.memory[where.start : where.start + len(what) // 2] = what[: len(what) // 2]
                os.kill(os.getpid(), signal.SIGKILL)

            def __buffer__(self, flags: int) -> memoryview:
                return memoryview(self.memory)

        self._memory = Half(self._memory)
        super()._publish(stamp, hybrid, line)


def test_an_event_torn_by_sigkill_is_not_served_and_holds_nobody_up() -> None:
    descriptor, other = ring.create(), ring.create()

    def work() -> None:
        ring.RingLog(descriptor, NodeClock(None)).record(numbered(0))
        Torn(descriptor, NodeClock(None)).record(numbered(1))

    in_child(work)
    merge = merged(ring.RingReader(descriptor), ring.RingReader(other))
    now = time.monotonic_ns()
    merge.drain(now)
    ring.RingLog(other, NodeClock(None)).record(numbered(2))
    merge.ended(0)
    # The ring was first seen with the torn event already begun: what others record waits until its writer is known dead.
    assert [number_of(item.what) for item in merge.drain(time.monotonic_ns() + 1)] == [0, 2]
    assert merge.exhausted() == [0]
    os.close(descriptor)
    os.close(other)


def test_a_damaged_ring_is_told_and_holds_nobody_up() -> None:
    with pair() as (log, reader):
        for number in range(3):
            log.record(numbered(number))
        second = reader._memory.find(b'"step":1') // 8 * 8
        begin = reader._memory.rfind(b'{"event"', 0, second)
        reader._memory[begin - 8 : begin] = (10**6).to_bytes(8, sys.byteorder)  # its length
        items = merged(reader).drain(time.monotonic_ns() + 1)
        assert number_of(items[0].what) == 0 and items[1].what == ring.Dropped(1, items[0].stamp) and len(items) == 2
        log.record(numbered(3))


def test_a_stopped_writer_holds_the_others_up_for_a_bounded_time_and_its_event_is_told_as_late() -> None:
    second = 10**9
    times = iter([10 * second, 1 * second])
    with pair(clock=lambda: next(times)) as (slow, its), pair(clock=lambda: 2 * second) as (quick, others):
        merge = merged(its, others)
        merge.drain(0)
        seen: list[list[int]] = []

        def meanwhile() -> int:
            """The writer stands still after it has begun to record, and before it is published."""
            quick.record(numbered(2))
            for now in (3, 5, 7):
                seen.append([number_of(item.what) for item in merge.drain(now * second)])
            return 1 * second

        slow._clock = meanwhile
        slow.record(numbered(1))
        assert seen == [[], [], [2]], "held up for three seconds, then no longer"
        [late] = merge.drain(8 * second)
        assert late.what == ring.Dropped(1, 1 * second) and late.source == 0 and late.stamp >= 2 * second


# --- The order -----------------------------------------------------------------------------------------------------------

WRITERS = 3


class Act(msgspec.Struct, frozen=True):
    """A writer records, or the reader drains (`writer` None)."""

    writer: int | None
    before: tuple[Act, ...] = ()
    """What happens meanwhile: before the stamp is taken; of a drain, between its looks at the sequence numbers."""
    after: tuple[Act, ...] = ()
    """After the stamp, before the event is published; of a drain, between its looks at the positions."""


acts = st.recursive(
    st.builds(Act, st.one_of(st.none(), st.integers(0, WRITERS - 1))),
    lambda inner: st.builds(
        Act,
        st.one_of(st.none(), st.integers(0, WRITERS - 1)),
        *(st.lists(inner, max_size=3).map(tuple) for _ in range(2)),
    ),
    max_leaves=12,
)


class Watched(ring.RingReader):
    """Lets others act between two looks of one drain."""

    meanwhile: Callable[[str], None]

    @property
    def sequence(self) -> int:
        self.meanwhile("before")
        return super().sequence

    def look(self) -> None:
        self.meanwhile("after")
        super().look()


class World:
    """Real rings under a clock that runs one tick each time anybody looks; while a writer records, others act."""

    def __init__(self, merge: type[ring.Merge]) -> None:
        self.now = 0
        self.descriptors = [ring.create(capacity=65536) for _ in range(WRITERS)]
        self.logs = [ring.RingLog(each, NodeClock(None), clock=self.tick) for each in self.descriptors]
        self.merge = merge(settle=lambda: None)
        for source, each in enumerate(self.descriptors):
            reader = Watched(each)
            reader.meanwhile = self.meanwhile
            self.merge.add(source, reader)
        self.draining: dict[str, list[Act]] | None = None
        self.begun: list[int] = []
        self.returned: list[int] = []
        self.busy: set[int] = set()
        self.order: list[int] = []

    def tick(self) -> int:
        self.now += 1
        return self.now

    def act(self, act: Act) -> None:
        if act.writer is None:
            if self.draining is None:
                self.drain(act)
        elif act.writer not in self.busy:
            number, writer = len(self.begun), act.writer
            self.begun.append(self.tick())
            self.returned.append(10**9)
            self.busy.add(writer)

            def clock() -> int:
                for each in act.before:
                    self.act(each)
                stamp = self.tick()
                for each in act.after:
                    self.act(each)
                return stamp

            log = self.logs[writer]
            log._clock = clock
            log.record(numbered(number))
            self.busy.discard(writer)
            self.returned[number] = self.tick()

    def meanwhile(self, when: str) -> None:
        if self.draining is not None and self.draining[when]:
            self.act(self.draining[when].pop(0))

    def drain(self, act: Act = Act(None)) -> None:  # noqa: B008
        self.draining = {"before": list(act.before), "after": list(act.after)}
        items = self.merge.drain(self.tick())
        self.draining = None
        assert not [item for item in items if isinstance(item.what, ring.Dropped)], "nothing is full, and nobody is stopped"
        self.order += [number_of(item.what) for item in items]

    def close(self) -> None:
        for each in self.descriptors:
            os.close(each)


def violations(script: list[Act], merge: type[ring.Merge] = ring.Merge) -> list[tuple[int, int]]:
    """Pairs of events of which the second was begun when the first was recorded, and which came out the other way round."""
    world = World(merge)
    try:
        for act in script:
            world.act(act)
        world.drain()
        world.drain()
        assert sorted(world.order) == list(range(len(world.begun))), "each event comes out once"
        return [
            (first, second)
            for place, second in enumerate(world.order)
            for first in world.order[place + 1 :]
            if world.returned[first] < world.begun[second]
        ]
    finally:
        world.close()


@settings(max_examples=300, deadline=None)
@given(st.lists(acts, max_size=6))
def test_cause_comes_before_effect_however_writers_and_drains_interleave(script: list[Act]) -> None:
    assert violations(script) == []


class Hasty(ring.Merge):
    """The planted bug: everything that is published is given out at once."""

    def _raise_watermark(self, now: int) -> None:
        self._watermark = 2**63 - 1

    def drain(self, now: int, limit_bytes: int = 2**62) -> list[ring.Item]:
        self._watermark = 0
        return super().drain(now, limit_bytes)


def test_without_the_watermark_an_effect_comes_first() -> None:
    """Writer 0 records when its ring was looked at; then writer 2 records what follows from that, and its ring is looked at."""
    script = [Act(None, after=(Act(1), Act(0), Act(2)))]
    assert violations(script) == [] and violations(script, Hasty) == [(1, 2)]


def test_the_ring_needs_no_torch() -> None:
    code = "import sys, megatron_recover.trace.ring; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
