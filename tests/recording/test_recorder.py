"""The recorder: every event is in the files once, whoever dies, and neither a disk nor its death costs more than events."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import json
import os
import re
import resource
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.cluster import recorder
from megatron_recover.cluster import recorder_messages as messages
from megatron_recover.cluster.event_store import Batch, Bookmark, EventStore, Keeper, create_bookmark
from megatron_recover.cluster.output import OutputBookmark, create_output_bookmark
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.cluster.recording import Recording
from megatron_recover.cluster.renewed import Pauses
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.hybrid_clock import COUNTER_BITS
from megatron_recover.deadlines import Deadlines
from megatron_recover.observe.ending import Account
from megatron_recover.observe.follow.tail import Tail
from megatron_recover.trace import event_files, ring
from megatron_recover.trace.node_clock import NodeClock
from tests.recording.runs import DEADLINE_S, Run, num_waits

pytestmark = pytest.mark.timeout(150)


def event(number: int, padding: int = 0) -> trace.Extended:
    return trace.Extended(replica=0, rank=0, generation=1, step=number, microbatches=(7,) * padding)


def line(number: int, padding: int = 0) -> bytes:
    return msgspec.json.encode(event(number, padding)) + b"\n"


def steps(run_dir: Path) -> list[int]:
    """Of the events of `event`, in the order of the trace."""
    return [each.step for _, each in trace.read(run_dir) if isinstance(each, trace.Extended)]


def num_deaths(run_dir: Path) -> int:
    """How many recorders of a run have died."""
    return (run_dir / "launcher.log").read_text().count("the recorder ended by ")


# --- The files -----------------------------------------------------------------------------------------------------------


class Files:
    """A store with a ledger that outlives it, as if each store were a recorder's."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder, self.settings, self.descriptor, self.number = folder, settings, create_bookmark(), 0
        self.open()

    def open(self, **more: object) -> None:
        self.ledger = Bookmark(self.descriptor)
        self.store = EventStore(self.folder, self.ledger, close_s=DEADLINE_S, **(self.settings | more))

    def batch(self, *numbers: int, padding: int = 0) -> Batch:
        lines = b"".join(line(number, padding) for number in numbers)
        self.number += 1
        return Batch(lines, len(numbers), {3: (100 * self.number, self.number)}, self.number)


def test_what_a_dead_recorder_wrote_and_did_not_enter_is_written_once(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.store.keep(files.batch(0, 1))
    with open(tmp_path / event_files.EVENTS_FILE, "ab") as file:  # the next batch, and half of the one behind it
        file.write(line(2) + line(3)[:20])
    files.open()
    assert files.ledger.position(3) == (100, 1) and files.ledger.position(4) == (0, 0)
    files.store.keep(files.batch(2, 3))
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert os.stat(tmp_path / event_files.EVENTS_FILE).st_mode & 0o777 == 0o600


def test_a_batch_that_is_refused_in_the_middle_leaves_whole_lines_and_is_written_once_later(tmp_path: Path) -> None:
    room = [10**6]

    def write(file: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = os.write(file, data[: min(len(data), 50, room[0])])
        room[0] -= taken
        return taken

    files = Files(tmp_path, write=write)
    files.store.keep(files.batch(0))
    room[0] = 130
    batch = files.batch(1, 2)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            files.store.keep(batch)
        assert steps(tmp_path) == [0] and files.ledger.position(3) == (100, 1)
        room[0] = 70
    room[0] = 10**6
    files.store.keep(batch)
    assert steps(tmp_path) == [0, 1, 2] and files.ledger.position(3) == (200, 2)


def test_files_are_put_aside_and_compressed_and_read_as_one(tmp_path: Path) -> None:
    files, tail = Files(tmp_path, part_bytes=1000), Tail(tmp_path / event_files.EVENTS_FILE)
    followed: list[bytes] = []
    for number in range(60):
        files.store.keep(files.batch(number))
        if number % 7 == 0:
            followed += tail.lines()
    if files.store._compression is not None:
        files.store._compression.join(10)
    followed += tail.lines()
    assert steps(tmp_path) == [json.loads(each)["step"] for each in followed] == list(range(60))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "events.0001.jsonl.gz" and names[-1] == "events.jsonl" and len(names) > 4
    assert {os.stat(path).st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert gzip.decompress((tmp_path / names[0]).read_bytes()).startswith(line(0))
    assert [number for number, _ in trace.read(tmp_path / event_files.EVENTS_FILE)] == list(range(1, 61)), "numbers go on"
    late = Tail(tmp_path / event_files.EVENTS_FILE)
    assert list(late.lines()) == followed
    (tmp_path / names[1]).unlink()
    with pytest.raises(trace.TraceError, match="part 2 is missing"):
        steps(tmp_path)


def test_a_compressed_part_that_is_damaged_is_named(tmp_path: Path) -> None:
    files = Files(tmp_path, part_bytes=100)
    files.store.keep(files.batch(*range(200)))
    assert files.store._compression is not None
    files.store._compression.join(10)
    part = tmp_path / "events.0001.jsonl.gz"
    part.write_bytes(part.read_bytes()[:-40])
    with pytest.raises(trace.TraceError, match="events.0001.jsonl.gz.*damaged"):
        steps(tmp_path)


@pytest.mark.parametrize("instant", ["before the link", "between link and replacement", "before it is entered"])
def test_a_recorder_that_dies_while_it_puts_a_file_aside_loses_nothing(instant: str, tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.store.keep(files.batch(0))
    newest, aside = tmp_path / event_files.EVENTS_FILE, event_files.part(tmp_path, 1)
    if instant != "before the link":
        os.link(newest, aside)
        assert steps(tmp_path) == [0], "a reader takes both names for one file"
        tail = Tail(newest)
        assert len(list(tail.lines())) == 1 and list(tail.lines()) == []
    if instant == "before it is entered":
        (tmp_path / "new").touch()
        os.replace(tmp_path / "new", newest)
    files.open()
    files.store.keep(files.batch(1))
    assert steps(tmp_path) == [0, 1]


def test_a_trace_is_read_whole_while_it_grows_and_is_put_aside(tmp_path: Path) -> None:
    files = Files(tmp_path, part_bytes=2000)
    count, problems = 400, []

    def read() -> None:
        seen = 0
        while seen < count:
            found = steps(tmp_path)
            if found != list(range(len(found))) or len(found) < seen:
                problems.append(found)
                return
            seen = len(found)

    files.store.keep(files.batch(0))
    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, count):
        files.store.keep(files.batch(number))
    reader.join(DEADLINE_S)
    assert not reader.is_alive() and problems == []
    files.store.close()


def test_what_is_added_to_a_file_just_before_it_is_put_aside_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has come to the end of the file, and then the file grows and is put aside, before the reader looks whether."""
    files, looks = Files(tmp_path), []
    files.store.keep(files.batch(0))
    real = event_files.is_put_aside

    def is_put_aside(folder: Path, number: int) -> bool:
        looks.append(number)
        if len(looks) == 3:  # on opening, before reading, and now
            files.store.keep(files.batch(1))
            files.store._put_aside()
            files.store.keep(files.batch(2))
        return real(folder, number)

    monkeypatch.setattr(event_files, "is_put_aside", is_put_aside)
    assert steps(tmp_path) == [0, 1, 2] and len(looks) > 3
    files.store.close()


@pytest.mark.parametrize("look", range(1, 6))
def test_a_file_that_is_put_aside_around_a_look_of_a_reader_hides_nothing(
    look: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look has missed it: it saw neither name, as the file came under the one and went to the other in between."""
    files, looks = Files(tmp_path), []
    files.store.keep(files.batch(0))
    real = event_files.is_put_aside

    def is_put_aside(folder: Path, number: int) -> bool:
        looks.append(number)
        seen = real(folder, number)
        if len(looks) == look:
            for step in range(1, 5, 2):
                files.store.keep(files.batch(step))
                files.store._put_aside()
                files.store.keep(files.batch(step + 1))
        return seen

    monkeypatch.setattr(event_files, "is_put_aside", is_put_aside)
    found = steps(tmp_path)
    assert found == list(range(len(found))) and steps(tmp_path) == list(range(5 if len(looks) >= look else 1))
    files.store.close()


def test_the_thread_that_writes_tries_again_until_the_disk_takes_it_and_says_why_not(tmp_path: Path) -> None:
    refused = [errno.EIO, errno.ESTALE]

    def write(file: int, data: memoryview) -> int:
        if refused:
            number = refused.pop(0)
            raise OSError(number, os.strerror(number))
        return os.write(file, data)

    files = Files(tmp_path, write=write)
    keeper = Keeper(files.store)
    batch = files.batch(0)
    keeper.give(batch)
    assert keeper.busy_since is not None and keeper.done() is None
    assert keeper.done(wait_s=DEADLINE_S) == batch
    assert keeper.busy_since is None and keeper.error is None and steps(tmp_path) == [0]
    assert keeper.close(DEADLINE_S)


# --- The process -----------------------------------------------------------------------------------------------------------


def test_events_of_all_are_written_in_order_and_nothing_is_left(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    run = record()
    logs = [run.rank(replica) for replica in range(2)]
    for number in range(500):
        logs[number % 2].record(event(number))  # one after the other: each is a cause of the next
    run.recording.record(trace.Generation(generation=1, roster=(0, 1), reason="start"))
    run.recording.ended(0, 0)
    run.recording.ended(1, 0)
    run.until(lambda: len(run.recording._rings) == 1, "rings whose processes have ended to be given back")
    events = run.finish()
    assert [each.step for each in events[:500]] == list(range(500))
    assert isinstance(events[-1], trace.RunFinished) and len(events) == 502
    assert [each.t for each in events] == sorted(each.t for each in events) and events[0].t > 0
    out, err = capfd.readouterr()
    assert "generation 1: replicas 0 1" in out and "exit code 0 (ok): training finished" in out and err == ""


def test_what_a_coordinator_recorded_before_the_recording_began_is_first(record: Callable[..., Run]) -> None:
    events = ring.create()
    met = trace.NodesMet(nodes=(trace.NodePlace(number=0, name="n0", slots=2),))
    ring.RingLog(events, NodeClock(None)).record(met)
    run = record(coordinator=events)
    run.until_it_records()
    found = run.finish()
    assert isinstance(found[0], trace.NodesMet) and found[0].nodes == met.nodes
    assert not [event for event in found if isinstance(event, trace.Gap)]


@pytest.mark.parametrize("has_stamps", [True, False])
def test_the_trace_of_one_of_several_nodes_has_the_stamps_of_its_clock(has_stamps: bool, record: Callable[..., Run]) -> None:
    run = record(has_stamps=has_stamps)
    log = run.rank(0)
    for number in range(3):
        run.recording.record(trace.Thawed(replica=0, rank=number))
        log.record(event(number))
    late = run.clock.tick()
    run.clock.see(late + 5000 * 2**COUNTER_BITS)  # another node's clock is five seconds ahead
    log.record(event(3))
    stamps = [each.h for each in run.finish()]
    if not has_stamps:
        assert set(stamps) == {msgspec.UNSET}
        return
    assert stamps == sorted(set(stamps)) and len(stamps) == 8
    assert stamps[-3] < late - run.recording.clock_base < late - run.recording.clock_base + 5000 * 2**COUNTER_BITS < stamps[-2]


def test_an_event_that_is_none_of_this_version_is_written_and_ends_no_recorder(record: Callable[..., Run]) -> None:
    run = record()
    run.recording.record(trace.Generation(generation="one", roster=(0,), reason="start"))  # type: ignore[arg-type]
    with pytest.raises(trace.TraceError, match=r"events.jsonl:1: .*\$\.generation"):
        run.finish()
    assert num_deaths(run.run_dir) == 0


def test_a_recorder_that_is_killed_again_and_again_loses_nothing_and_writes_nothing_twice(record: Callable[..., Run]) -> None:
    run = record()
    log, number = run.rank(0), 0
    for _ in range(3):
        seen = len(steps(run.run_dir))
        while len(steps(run.run_dir)) < seen + 200:
            log.record(event(number))
            number += 1
            run.recording.poll()
        former = run.pid
        os.kill(former, signal.SIGKILL)
        run.until(lambda former=former: run.recording._process is not None and run.pid != former, "another recorder")
    run.recording.ended(0, 0)
    events = run.finish()
    assert [each.step for each in events[:-1]] == list(range(number))


def test_with_more_descriptors_than_select_takes_a_recorder_is_started_again(record: Callable[..., Run]) -> None:
    """`select.select` refuses descriptors from 1024 on. The launcher of a large run has that many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fillers = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(1100)]
    try:
        run = record()
        run.until_it_records()
        former = run.pid
        os.kill(former, signal.SIGKILL)
        run.until(lambda: run.recording._process is not None and run.pid != former, "another recorder")
        assert isinstance(run.finish()[-1], trace.RunFinished)
    finally:
        for each in fillers:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert num_deaths(run.run_dir) == 1


def test_a_recorder_that_dies_after_it_was_told_to_finish_is_followed_by_one_that_finishes(
    record: Callable[..., Run],
    capfd,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = record(deadlines=replace(Deadlines.of(), trace_s=2 * DEADLINE_S))
    run.until_it_records()
    run.stop()
    send, killed = Recording._send, list[int]()

    def kill_after_finish(recording: Recording) -> None:
        had = any(isinstance(each, messages.FinishRecording) for each in recording._outbox)
        send(recording)
        if had and not recording._outbox and not killed:
            killed.append(run.pid)
            os.kill(run.pid, signal.SIGKILL)

    monkeypatch.setattr(Recording, "_send", kill_after_finish)
    begin = time.monotonic()
    assert isinstance(run.finish()[-1], trace.RunFinished)
    assert time.monotonic() - begin < DEADLINE_S and num_deaths(run.run_dir) == 1
    out, err = capfd.readouterr()
    assert "exit code 0 (ok): training finished" in out and err == ""


def has_unread_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return when a recorder that is stopped then has told something that the launcher has not read."""
    log = run.rank(1)
    run.until_it_records()
    receive = run.recording._receive
    monkeypatch.setattr(run.recording, "_receive", lambda: None)
    log.record(event(1))
    run.recording.ended(1, 0)
    run.recording.poll()
    assert run.recording._control is not None and is_readable(run.recording._control, DEADLINE_S)
    run.stop()
    run.recording.says("the last word")
    assert not run.recording._outbox
    monkeypatch.setattr(run.recording, "_receive", receive)


def test_what_a_launcher_said_before_it_was_killed_is_kept_though_it_has_not_read_all(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record()
    has_unread_word(run, monkeypatch)
    run.recording._hang_up()
    os.kill(run.pid, signal.SIGCONT)
    assert run.recording._process is not None
    run.recording._process.wait(DEADLINE_S)
    assert "the last word" in (run.run_dir / "launcher.log").read_text()


def test_what_a_recorder_said_before_it_was_killed_is_heard_though_it_has_not_read_all(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record()
    has_unread_word(run, monkeypatch)
    assert (number := run.recording._numbers[1, 0]) in run.recording._rings
    os.kill(run.pid, signal.SIGKILL)
    assert run.recording._process is not None
    run.recording._process.wait(DEADLINE_S)
    run.recording._receive()
    assert number not in run.recording._rings, "it had written all of this ring"


def test_word_of_a_drained_ring_that_the_launcher_has_no_room_for_is_sent_later() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = messages.Settings(
        run_dir="", started_at=0.0, account=Account(replicas=1, run_dir=""), quiet=True, part_bytes=0, output_bytes=0,
        num_rings=0, deadlines=Deadlines.of(),
    )  # fmt: skip
    made = recorder.Recorder.__new__(recorder.Recorder)
    ours.setblocking(False)
    theirs.setblocking(False)
    made._control, made._settings, made._unsent = theirs, settings, deque()
    for number in range(5000):
        made._send(messages.Drained(number))
    assert made._unsent, "the socket took everything"
    heard: list[int] = []
    while len(heard) < 5000:
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.append(msgspec.json.decode(ours.recv(1000), type=messages.Reply).number)
        made._send_unsent()
    assert heard == list(range(5000))
    ours.close()
    theirs.close()


def test_what_waits_is_written_in_pieces_and_rings_have_room_again_in_the_turn_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_SOON_S", DEADLINE_S)  # as long as a write takes
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = messages.Settings(
        run_dir=str(tmp_path), started_at=0.0, account=Account(replicas=1, run_dir=""), quiet=True, part_bytes=2**30,
        output_bytes=2**20, num_rings=1, deadlines=Deadlines.of(),
    )  # fmt: skip
    sizes: list[int] = []

    def write(file: int, data: memoryview) -> int:
        sizes.append(len(data))
        return os.write(file, data)

    ledger = Bookmark(create_bookmark())
    store = EventStore(tmp_path, ledger, part_bytes=2**30, close_s=DEADLINE_S, write=write)
    made = recorder.Recorder(theirs, ledger, OutputBookmark(create_output_bookmark()), settings, store)
    descriptor = ring.create(capacity=2**23)
    socket.send_fds(ours, [msgspec.json.encode(messages.Ring(3, 0, 0))], [descriptor])
    log = ring.RingLog(descriptor, NodeClock(None))
    for number in range(300):
        log.record(event(number, padding=5000))
    made._turn()
    assert steps(tmp_path) == list(range(300))
    assert made._events._ahead == 0, "the ring has room for as much again"
    assert len(sizes) > 2 and max(sizes) < 2**20 + 2**15, "a slow disk answers once a piece"
    made._events.keeper.close(DEADLINE_S)
    made._outputs.writer.close(DEADLINE_S)
    for each in (ours, theirs):
        each.close()


def test_a_recorder_that_stands_still_loses_only_what_is_counted(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    run = record(ring_bytes=4096)
    log = run.rank(1)
    run.until_it_records()
    run.stop()
    waits = num_waits()
    for number in range(100):
        log.record(event(number, padding=50))
        run.recording.poll()
    assert num_waits() - waits < 50, "nobody waits for it"
    os.kill(run.pid, signal.SIGCONT)
    run.until(lambda: any(isinstance(each, trace.Gap) for _, each in trace.read(run.run_dir)), "the gap")
    words = log._words  # the gap is in the file before the ring has room again
    run.until(lambda: words[ring._TOLD] == words[ring._DROPPED] and words[ring._READ] == words[ring._WRITTEN], "the room")
    log.record(event(100))
    run.recording.ended(1, 0)
    events = run.finish()
    [gap] = [each for each in events if isinstance(each, trace.Gap)]
    found = [each.step for each in events if isinstance(each, trace.Extended)]
    kept = len(found) - 1
    assert found == [*range(kept), 100] and 0 < kept < 100
    assert (gap.replica, gap.rank, gap.num_events) == (1, 0, 100 - kept)
    place = events.index(gap)
    assert events[place - 1].step == kept - 1 and events[place + 1].step == 100
    assert events[place - 1].t <= gap.since <= gap.t <= events[place + 1].t
    assert f"{100 - kept} events of this run are lost so far" in capfd.readouterr().out


def test_a_disk_that_stalls_costs_nothing_but_events_and_is_told_once(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    """`events.jsonl` is a FIFO: opening and writing it block in the kernel while nobody reads."""
    run = record(fifos=(trace.EVENTS_FILE,), ring_bytes=2**18)
    log = run.rank(0)
    waits = num_waits()
    for number in range(3000):
        log.record(event(number, padding=50))
    assert num_waits() - waits < 100, "a rank does not wait"
    run.recording.record(trace.Generation(generation=1, roster=(0, 1), reason="start"))
    told: list[str] = []

    def output() -> str:
        told.append(capfd.readouterr().out)
        return "".join(told)

    run.until(lambda: "generation 1: replicas 0 1" in output(), "the console to go on")
    run.until(lambda: "WARNING: the trace cannot be written" in output(), "a warning")
    pipe = os.open(run.run_dir / trace.EVENTS_FILE, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETFL, 0)
    collected: list[bytes] = []
    reader = threading.Thread(target=lambda: collected.extend(iter(lambda: os.read(pipe, 2**16), b"")))
    reader.start()
    run.until(lambda: "the trace is written again" in output(), "word that it is over")
    run.recording.ended(0, 0)
    run.recording.record(trace.RunFinished(exit_code=0))
    run.recording.finish(ExitCode.OK, "training finished")
    run.recording.close()
    reader.join(DEADLINE_S)
    os.close(pipe)
    events = [trace.parse(each)[0] for each in b"".join(collected).splitlines(keepends=True)]
    found = [each.step for each in events if isinstance(each, trace.Extended)]
    [gap] = [each for each in events if isinstance(each, trace.Gap)]
    assert found == list(range(len(found))) and gap.num_events == 3000 - len(found) > 0
    assert isinstance(events[-1], trace.RunFinished)
    assert output().count("WARNING: the trace cannot be written") == 1


def test_a_disk_that_stalls_to_the_end_costs_the_end_of_the_trace(
    record: Callable[..., Run],
    capfd,  # noqa: ANN001
) -> None:
    run = record(fifos=(trace.EVENTS_FILE,), deadlines=replace(Deadlines.of(), trace_s=1.0))
    run.recording.record(trace.RunFinished(exit_code=0))
    run.recording.finish(ExitCode.OK, "training finished")
    run.recording.close()
    out, err = capfd.readouterr()
    assert "exit code 0 (ok): training finished" in out
    assert "the end of the trace is missing" in err and "the disk does not answer" in err


def test_a_disk_that_is_full_keeps_whole_lines_and_takes_all_when_there_is_room(
    record: Callable[..., Run],
    capfd,  # noqa: ANN001
) -> None:
    run = record()
    log = run.rank(0)
    run.until_it_records()
    soft = resource.prlimit(run.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (20_000, soft[1]))
    for number in range(300):
        log.record(event(number, padding=20))
    run.until(lambda: "WARNING: the trace cannot be written" in capfd.readouterr().out, "a warning")
    assert len(steps(run.run_dir)) < 300, "what is there is whole"
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, soft)
    run.until(lambda: len(steps(run.run_dir)) == 300, "all of it")
    run.recording.ended(0, 0)
    assert [each.step for each in run.finish()[1:-1]] == list(range(300))


@pytest.mark.parametrize("what", ["trace", "logs"])
def test_a_launcher_that_raises_waits_for_its_recorder_and_says_where_it_gave_it_up(
    what: str,
    record: Callable[..., Run],
    capfd,  # noqa: ANN001
) -> None:
    """The disk takes nothing."""
    fifo = {"trace": trace.EVENTS_FILE, "logs": "logs/replica-0-rank-0.log"}[what]
    run = record(fifos=(fifo,), deadlines=replace(Deadlines.of(), abandoned_s=1.5))
    os.write(run.output(0).descriptor, b"last words\n")
    run.recording.record(trace.Thawed(replica=0, rank=0))
    run.recording.poll()
    run.recording.close()
    assert f"trace and logs may miss their end in {run.run_dir}" in capfd.readouterr().err


def test_a_recorder_that_ends_in_time_is_not_said_to_be_given_up(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    run = record()
    run.until_it_records()
    run.recording.record(trace.Thawed(replica=0, rank=0))
    run.recording.close()
    assert len(list(trace.read(run.run_dir))) == 2 and capfd.readouterr().err == ""


def test_a_recorder_whose_launcher_is_gone_writes_what_there_is_and_ends(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        run = Run(tmp_path / "run")
        log, output = run.rank(0), run.output()
        run.until(output.log.exists, "the log")
        run.until_it_records()
        theirs.send(str(run.pid).encode())
        theirs.recv(1)
        for number in range(100):
            log.record(event(number))
            os.write(output.descriptor, b"line %d\n" % number)
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    recorder = os.pidfd_open(int(ours.recv(100)))
    ours.send(b"x")
    os.waitpid(pid, 0)
    assert select.select([recorder], [], [], DEADLINE_S)[0], "it is still there"
    os.close(recorder)
    assert steps(tmp_path / "run") == list(range(100))
    assert (tmp_path / "run" / "logs" / "replica-0-rank-0.log").read_text().splitlines() == [f"line {n}" for n in range(100)]


# --- What people are told ------------------------------------------------------------------------------------------------

OURS = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] megatron-recover: (.*)$", re.M)


def begun_and_saved(run: Run) -> None:
    layout, argv = trace.Layout(tp=1, pp=1), ("script.py", "--save", "X")
    run.recording.record(trace.RunStarted(replicas=2, layout=layout, determinism="fast", seed=0, argv=argv))
    run.recording.record(trace.Generation(generation=1, roster=(0, 1), reason="start"))
    run.rank(0).record(trace.Checkpoint(replica=0, rank=0, iteration=40, phase="finished"))


def test_lines_of_ours_are_on_the_console_and_in_a_log_that_only_its_owner_reads(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    run = record()
    run.recording.says("first")
    begun_and_saved(run)
    run.recording.record(trace.Failure(replica=1, rank=0, cause="SIGKILL"))
    run.recording.record(trace.RunFinished(exit_code=10))
    run.recording.finish(ExitCode.TOO_FEW_REPLICAS, "too few")
    out = capfd.readouterr().out
    told = OURS.findall(out)
    assert told[:3] == ["first", "generation 1: replicas 0 1", "exit code 10 (too few replicas): too few"]
    assert told[3].startswith("1 of 2 replicas left, 1 loss; newest checkpoint: iteration 40 in X; ")
    assert told[4].startswith("next: resume") and len(told) == 5
    log = run.run_dir / "launcher.log"
    assert log.read_text() == out and log.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_takes_nothing_holds_up_no_line(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    """Trace and logs are FIFOs that nobody reads."""
    fifos = (trace.EVENTS_FILE, "launcher.log", "train.log", "logs/replica-0-rank-0.log")
    run = record(fifos=fifos, deadlines=replace(Deadlines.of(), trace_s=1.0))
    output = run.output(0)
    begun_and_saved(run)
    for number in range(100):
        os.write(output.descriptor, b" iteration %d/ 100 | lm loss: 1.0\n" % number)
    run.recording.says("something")
    run.until(lambda: run.recording._copied.shown(2) == run.recording._copied.end(2, output), "the console to have all lines")
    run.recording.finish(ExitCode.OK, "training finished")
    out, err = capfd.readouterr()
    assert [*map(int, re.findall(r"^iteration (\d+)/", out, re.M))] == list(range(100))
    told = OURS.findall(out)
    assert told[0] == "generation 1: replicas 0 1" and "something" in told
    assert "exit code 0 (ok): training finished" in told and "bytes that ranks have printed are missing" in err


def test_what_was_saved_is_known_to_the_recorder_that_follows_a_dead_one(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    run = record()
    begun_and_saved(run)
    run.until(lambda: run.recording._account.saved == 40, "the launcher to hear of the checkpoint")
    former = run.pid
    os.kill(former, signal.SIGKILL)
    run.until(lambda: run.recording._process is not None and run.pid != former, "another recorder")
    run.finish()
    assert "2 of 2 replicas left, no losses; newest checkpoint: iteration 40 in X" in capfd.readouterr().out


def test_the_launcher_hears_what_was_saved_before_the_trace_has_it(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    """The next recorder goes on behind what is in the trace, and never sees it."""
    run = record()
    begun_and_saved(run)
    run.until(lambda: any(isinstance(each, trace.Checkpoint) for _, each in trace.read(run.run_dir)), "it in the trace")
    former = run.pid
    run.stop()  # as if it had died right now: what it has sent is all that there will be
    run.recording.poll()
    assert run.recording._account.saved == 40
    os.kill(former, signal.SIGKILL)
    run.until(lambda: run.recording._process is not None and run.pid != former, "another recorder")
    run.recording.finish(ExitCode.TOO_FEW_REPLICAS, "too few")
    assert "newest checkpoint: iteration 40 in X" in capfd.readouterr().out


def test_after_the_death_of_a_recorder_nobody_claims_that_nothing_was_saved(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    run = record()
    run.recording.record(
        trace.RunStarted(
            replicas=2, layout=trace.Layout(tp=1, pp=1), determinism="fast", seed=0, argv=("script.py", "--save", "X")
        )
    )
    run.recording.record(trace.Generation(generation=1, roster=(0, 1), reason="start"))
    run.until(lambda: list(trace.read(run.run_dir)), "the first event")
    former = run.pid
    os.kill(former, signal.SIGKILL)
    run.until(lambda: run.recording._process is not None and run.pid != former, "another recorder")
    run.recording.finish(ExitCode.TOO_FEW_REPLICAS, "too few")
    out = capfd.readouterr().out
    assert "X/latest_checkpointed_iteration.txt names the newest checkpoint" in out and "begins anew" not in out


@pytest.mark.parametrize("instant", ["before it is heard", "while it is held back", "when it was told"])
def test_a_line_of_the_launcher_is_told_once_though_the_recorder_dies(instant: str, record: Callable[..., Run]) -> None:
    run = record()
    run.until_it_records()
    former = run.pid
    if instant == "before it is heard":
        run.stop()
    run.recording.says("why")
    if instant == "while it is held back":
        run.recording.record(trace.Thawed(replica=1, rank=0))  # behind the line: who has written it has heard that
        run.until(lambda: len(list(trace.read(run.run_dir))) == 2, "the second event")
    elif instant == "when it was told":
        run.until(lambda: not run.recording._untold, "the launcher to hear that it was told")
    os.kill(former, signal.SIGKILL)
    run.until(lambda: run.recording._process is not None and run.pid != former, "another recorder")
    run.finish()
    told = OURS.findall((run.run_dir / "launcher.log").read_text())
    assert told[:2] == ["why", "the recorder ended by SIGKILL: a new one continues the trace"] and told.count("why") == 1


@pytest.mark.parametrize("is_saved", [True, False])
def test_without_any_recorder_the_launcher_says_by_itself_how_the_run_ended(
    is_saved: bool, record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = record(deadlines=replace(Deadlines.of(), trace_s=0.2, terminal_s=0.2))
    if is_saved:
        begun_and_saved(run)
        run.until(lambda: run.recording._account.saved == 40, "the launcher to hear of the checkpoint")
    else:
        run.recording.record(trace.Generation(generation=1, roster=(0, 1), reason="start"))
        argv = ("script.py", "--save", "X")
        layout = trace.Layout(tp=1, pp=1)
        run.recording.record(trace.RunStarted(replicas=2, layout=layout, determinism="fast", seed=0, argv=argv))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    os.kill(run.pid, signal.SIGKILL)
    run.until(lambda: run.recording._process is None, "its end to be seen")
    assert not run.recording.finish(ExitCode.NO_REPLICA_LEFT, "no replica is left")
    err = capfd.readouterr().err
    assert "exit code 13 (no replica left): no replica is left" in err and "next: correct what ended the last replicas" in err
    assert ("newest checkpoint: iteration 40 in X;" in err) == is_saved
    assert ("X/latest_checkpointed_iteration.txt names the newest checkpoint, if there is any" in err) == (not is_saved)
    assert "no recorder can be started (Resource temporarily unavailable)" in err
    assert "and of the logs, as the recorder does not answer" in err


# --- One after the other -------------------------------------------------------------------------------------------------


def test_the_pause_before_another_recorder_grows_from_death_to_death_and_begins_anew_after_a_quiet_time() -> None:
    pauses = Pauses(32.0)
    assert [pauses.after(0.0) for _ in range(8)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0]
    assert [pauses.after(31.9), pauses.after(32.0), pauses.after(0.0)] == [32.0, 0.0, 1.0]


def test_a_recorder_follows_however_many_have_died(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    after = Pauses.after
    monkeypatch.setattr(Pauses, "after", lambda self, lived_s: after(self, 0.0))  # a slow machine's live longer than a pause
    run = record(deadlines=replace(Deadlines.of(), renew_s=0.4))
    for number in range(7):
        run.rank(number % 2).record(event(number))
        former = run.pid
        os.kill(former, signal.SIGKILL)
        run.until(lambda former=former: run.recording._process is not None and run.pid != former, "another recorder")
    run.finish()
    assert sorted(steps(run.run_dir)) == list(range(7))
    err = capfd.readouterr().err
    assert err.count("as did those before; in ") == err.count("the recorder ended by SIGKILL") >= 5, err
    assert "in 0.4 s a new one continues the trace" in err


def test_a_launcher_without_descriptors_goes_on_and_starts_a_recorder_when_it_has_some_again(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = record(deadlines=replace(Deadlines.of(), renew_s=0.1))
    run.until_it_records()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("socket.socketpair", refuse)
        os.kill(run.pid, signal.SIGKILL)
        err: list[str] = []
        run.until(lambda: err.append(capfd.readouterr().err) or "(Too many open files)" in "".join(err), "a pause")
        run.rank(0).record(event(7))
    run.until(lambda: run.recording._process is not None, "another recorder")
    run.finish()
    assert steps(run.run_dir) == [7]


def test_a_run_that_ends_in_a_pause_waits_no_longer_for_its_recorder(record: Callable[..., Run]) -> None:
    run = record()
    run.until_it_records()
    run.recording._pauses._next_s = 1000.0
    os.kill(run.pid, signal.SIGKILL)
    run.until(lambda: run.recording._process is None, "its end to be seen")
    assert isinstance(run.finish()[-1], trace.RunFinished)


def test_recorders_that_die_beside_a_stopped_terminal_hold_the_launcher_up_no_moment(record: Callable[..., Run]) -> None:
    """Somebody has pressed Ctrl-S: stderr takes nothing. The launcher's loop is the coordinator's, too."""
    run = record(deadlines=replace(Deadlines.of(), renew_s=0.1, notice_s=DEADLINE_S))
    run.until_it_records()
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.write(theirs, b"x" * 4096)
    before, longest_s = os.dup(2), 0.0
    os.dup2(theirs, 2)
    try:
        for _ in range(3):
            former = run.pid
            os.kill(former, signal.SIGKILL)
            end = time.monotonic() + DEADLINE_S
            while run.recording._process is None or run.pid == former:
                assert time.monotonic() < end
                begin = time.monotonic()
                run.recording.poll()
                longest_s = max(longest_s, time.monotonic() - begin)
                time.sleep(0.01)
    finally:
        os.dup2(before, 2)
        for each in (ours, theirs, before):
            os.close(each)
        run.recording._speaker.wait(DEADLINE_S)
    assert longest_s < run.recording._deadlines.notice_s / 2


@pytest.mark.parametrize("how", ["is dead", "was seen to die", "has just been started"])
def test_a_launcher_that_raises_while_there_is_no_recorder_has_another_one_write_what_there_is(
    how: str, record: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = record()
    log, output = run.rank(0), run.output()
    run.until_it_records()
    run.recording._pauses._next_s = 0.0 if how == "has just been started" else 1000.0
    former = run.pid
    os.kill(former, signal.SIGKILL)
    os.waitid(os.P_PID, former, os.WEXITED | os.WNOWAIT)
    if how == "was seen to die":
        run.until(lambda: run.recording._process is None, "its end to be seen")
    elif how == "has just been started":
        run.until(lambda: run.recording._process is not None and run.pid != former, "another recorder")
    log.record(event(7))
    os.write(output.descriptor, b"last words\n")
    run.recording.close()
    assert steps(run.run_dir) == [7] and output.log.read_bytes() == b"last words\n"
    assert "may miss their end" not in capfd.readouterr().err


def test_a_launcher_that_raises_and_gets_no_recorder_says_that_the_end_is_missing(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = record()
    run.until_it_records()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("subprocess.Popen", refuse)
    os.kill(run.pid, signal.SIGKILL)
    run.until(lambda: run.recording._process is None, "its end to be seen")
    run.recording.close()
    assert f"trace and logs may miss their end in {run.run_dir}" in capfd.readouterr().err
