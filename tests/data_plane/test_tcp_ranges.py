"""Ranges over TCP: only the memory that was begun, only to and from who holds the key, and every call ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover.authentication.handshake import _CHALLENGE as CHALLENGE
from megatron_recover.authentication.handshake import MAGIC, Party, Reply, Role
from megatron_recover.data_plane.ranges import tcp_exporter
from megatron_recover.data_plane.ranges.contract import CHUNK_BYTES, Description, Range, SourceLost, Void
from megatron_recover.data_plane.ranges.frames import Begun, Found, Frames, Get, LookFor, Piece, Still
from megatron_recover.data_plane.ranges.tcp_source import LayoutDiffers, TcpSource
from tests.data_plane.range_memory import DEADLINES, LAYOUT, NEWCOMER, Bytes, eventually, exporting, read_all, rogue, source_of

pytestmark = pytest.mark.timeout(150)
DATA = os.urandom(3 * CHUNK_BYTES + 17)
RANGES = [Range(0, CHUNK_BYTES), Range(CHUNK_BYTES, 2 * CHUNK_BYTES), Range(3 * CHUNK_BYTES, len(DATA))]
WINDOW = Description("train 1", LAYOUT, len(DATA))
SHORT = replace(DEADLINES, connect_s=1.0, sum_s=1.0)


def test_what_is_registered_is_read() -> None:
    memory = Bytes("train 1", DATA)
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(memory)
        assert source.next_memory(None) == WINDOW
        assert source.begin(WINDOW) == b"about train 1"
        assert read_all(source, RANGES) == {each: (DATA[slice(*each)], True) for each in RANGES}
        assert memory.num_begun == 1


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except (SourceLost, Void) as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_a_reader_waits_for_the_next_memory_for_longer_than_for_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take minutes. The exporter says that it waits."""
    patient, beats = replace(DEADLINES, beat_s=0.05, sum_s=0.3), list[float]()
    with exporting(deadlines=patient) as exporter, source_of(exporter.address, deadlines=patient) as source:
        exporter.register(Bytes("train 1", b"1"))
        thread, outcome = in_background(lambda: source.next_memory("train 1", lambda: beats.append(time.monotonic())))
        time.sleep(0.7)
        assert not outcome and len(beats) > 1, "who waits is told so"
        exporter.withdraw()
        exporter.register(Bytes("train 2", b"22"))
        thread.join(30)
        assert outcome == [Description("train 2", LAYOUT, 2)]


def test_a_reader_that_is_early_waits_for_its_label_and_a_late_one_learns_that_it_is_late() -> None:
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(Bytes("train 0", b"0"))
        thread, outcome = in_background(lambda: source.begin(WINDOW))
        time.sleep(0.2)
        assert not outcome, "the window of train 0 is not that of train 1"
        exporter.register(Bytes("train 1", DATA))
        thread.join(30)
        assert outcome == [b"about train 1"]
        with pytest.raises(Void, match="the window of train 0 has closed"):
            source.begin(Description("train 0", LAYOUT, 1))


def test_nothing_of_a_memory_is_read_once_it_is_withdrawn_void_or_replaced_and_the_connection_serves_on() -> None:
    memory = Bytes("train 1", DATA)
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(memory)
        source.begin(WINDOW)
        memory.is_void = True
        exporter.register(Bytes("train 2", bytes(len(DATA))))
        with pytest.raises(Void):
            read_all(source, RANGES)
        with pytest.raises(Void):
            source.begin(WINDOW)
        assert source.next_memory("train 1").label == "train 2"
        source.begin(Description("train 2", LAYOUT, len(DATA)))
        assert read_all(source, RANGES[:1])[RANGES[0]] == (bytes(CHUNK_BYTES), True)


def test_a_label_is_served_once() -> None:
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(Bytes("train 1", DATA))
        exporter.withdraw()
        exporter.register(Bytes("train 1", bytes(len(DATA))))
        with pytest.raises(Void):
            source.begin(WINDOW)


def test_another_layout_is_refused_with_its_parts_before_any_range() -> None:
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(Bytes("train 1", DATA))
        for other in (WINDOW._replace(layout=6), WINDOW._replace(num_bytes=6)):
            with pytest.raises(LayoutDiffers) as differs:
                source.begin(other)
            assert differs.value.parts == ["one part"]


@pytest.mark.parametrize(
    "get",
    [Get("train 1", LAYOUT + 1, 0, 4), Get("train 2", LAYOUT, 0, 4), Get("train 1", LAYOUT, 4, 4),
     Get("train 1", LAYOUT, -4, 4), Get("train 1", LAYOUT, len(DATA), len(DATA) + 1),
     Get("train 1", LAYOUT, 0, CHUNK_BYTES + 1), Still()],
    ids=repr,
)  # fmt: skip
def test_a_request_for_what_was_not_begun_ends_the_connection(get: Any) -> None:
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(Bytes("train 1", DATA))
        source.begin(WINDOW)
        source._send(get)
        with pytest.raises(SourceLost, match="closed the connection"):
            source._receive(source._connected())
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(Bytes("train 1", DATA))
        with pytest.raises(SourceLost, match="closed the connection"):
            source._ask(Get("train 1", LAYOUT, 0, 4))


def test_who_has_not_the_key_or_another_position_reads_nothing_and_is_not_read() -> None:
    with exporting() as exporter:
        exporter.register(Bytes("train 1", DATA))
        for key, me in (
            (b"another key".ljust(32), NEWCOMER), (b"k" * 32, Party(Role.NEWCOMER, 9, 1)), (b"k" * 32, Party(Role.DATA, 9, 0)),
        ):  # fmt: skip
            with source_of(exporter.address, key, me, SHORT) as source, pytest.raises(SourceLost, match="no connection"):
                source.next_memory(None)
    impostor = rogue(lambda frames: frames.send(Found("train 1", 1, 1)), key=b"another key".ljust(32))
    refused = pytest.raises(SourceLost, match="does not hold this job's key")
    with impostor as address, source_of(address, deadlines=SHORT) as source, refused:
        source.next_memory(None)


def test_where_nobody_listens_or_answers_a_call_ends() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with source_of(address, deadlines=SHORT) as source, pytest.raises(SourceLost, match="no connection"):
        source.next_memory(None)
    listener.close()
    since = time.monotonic()
    with source_of(address) as source, pytest.raises(SourceLost, match="nobody listens"):
        source.next_memory(None)
    assert time.monotonic() - since < 10
    with source_of("no address", deadlines=SHORT) as source, pytest.raises(SourceLost, match="no address"):
        source.next_memory(None)


def stalled(frames: Frames) -> None:
    frames.receive()
    time.sleep(20)


def begun_then(answer: Callable[[Frames], None]) -> Callable[[Frames], None]:
    def behave(frames: Frames) -> None:
        frames.receive()
        frames.send(Begun(*WINDOW, b""))
        frames.receive()
        answer(frames)
        time.sleep(20)

    return behave


PIECE = Piece("train 1", LAYOUT, *RANGES[0])
FIRST = memoryview(DATA)[:CHUNK_BYTES]
UNASKED = "sent a Piece that was not asked for"
ANSWERS: dict[str, tuple[Callable[[Frames], Any], str]] = {
    "nothing": (lambda frames: None, "no byte for too long"),
    "garbage": (lambda frames: frames.sock.sendall(os.urandom(1000)), "what is no frame"),
    "another range": (lambda frames: frames.send(replace(PIECE, start=1), FIRST), UNASKED),
    "another label": (lambda frames: frames.send(replace(PIECE, label="train 2"), FIRST), UNASKED),
    "another layout": (lambda frames: frames.send(replace(PIECE, layout=6), FIRST), UNASKED),
    "too few bytes": (lambda frames: frames.send(PIECE, FIRST[:-1]), UNASKED),
    "too many bytes": (lambda frames: frames.send(PIECE, memoryview(DATA)[: CHUNK_BYTES + 1]), "no room"),
    "another message": (lambda frames: frames.send(LookFor(None)), "sent a LookFor that was not asked for"),
    "the end": (lambda frames: frames.sock.close(), "closed the connection|reset"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_source_that_does_not_answer_as_it_should_is_lost(name: str) -> None:
    answer, why = ANSWERS[name]
    with rogue(begun_then(answer)) as address, source_of(address, deadlines=SHORT) as source:
        source.begin(WINDOW)
        with pytest.raises(SourceLost, match=why):
            read_all(source, RANGES[:2])
        with pytest.raises(SourceLost):
            source.next_memory(None)


def test_a_source_that_stalls_or_describes_another_memory_than_the_one_that_was_asked_for_is_lost() -> None:
    lost = pytest.raises(SourceLost, match="no byte for too long")
    with rogue(stalled) as address, source_of(address, deadlines=SHORT) as source, lost:
        source.next_memory(None)

    def lie(frames: Frames) -> None:
        frames.receive()
        frames.send(Begun("train 1", LAYOUT, len(DATA) + 1, b""))

    with rogue(lie) as address, source_of(address) as source, pytest.raises(SourceLost, match="another layout than it says"):
        source.begin(WINDOW)


def test_a_wrong_checksum_costs_that_range_only() -> None:
    def damage(frames: Frames) -> None:
        frames.receive()
        frames.send(Begun(*WINDOW, b""))
        for number, wanted in enumerate(RANGES):
            frames.receive()
            whole, sock = bytearray(), frames.sock

            class Wire:
                def sendall(self, text: Any, whole: bytearray = whole) -> None:
                    whole += text

            frames.sock = Wire()  # type: ignore[assignment]
            frames.send(Piece("train 1", LAYOUT, *wanted), memoryview(DATA)[slice(*wanted)])
            whole[-1] ^= number == 1
            frames.sock = sock
            sock.sendall(whole)
        time.sleep(20)

    with rogue(damage) as address, source_of(address) as source:
        source.begin(WINDOW)
        found = read_all(source, RANGES)
        assert [is_intact for _, is_intact in found.values()] == [True, False, True]
        assert found[RANGES[2]][0] == DATA[slice(*RANGES[2])]


def test_readers_beyond_the_limit_are_refused_and_let_in_when_another_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_exporter, "MAX_READERS", 1)
    with exporting() as exporter, source_of(exporter.address) as first, source_of(exporter.address) as second:
        exporter.register(Bytes("train 1", DATA))
        first.next_memory(None)
        with pytest.raises(SourceLost, match="too many readers"):
            second.next_memory(None)
        first.close()
        eventually(lambda: not exporter._readers)
        with source_of(exporter.address) as third:
            assert third.next_memory(None) == WINDOW


def test_a_refusal_by_the_other_end_is_told() -> None:
    full, refused = rogue(lambda frames: None, verdict=Reply.NO_ROOM), pytest.raises(SourceLost, match="too many readers")
    with full as address, source_of(address) as source, refused:
        source.next_memory(None)


def test_who_registers_and_withdraws_waits_for_no_reader() -> None:
    """A reader that takes nothing holds a thread of the exporter, and nobody else."""
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(Bytes("train 1", DATA))
        source.begin(WINDOW)
        for wanted in RANGES[:2] * 20:
            source._send(Get("train 1", LAYOUT, *wanted))
        time.sleep(0.2)
        since = time.monotonic()
        for number in range(100):
            exporter.withdraw()
            exporter.register(Bytes(f"train {number + 2}", DATA))
        assert time.monotonic() - since < 5


def test_close_ends_every_call_and_thread() -> None:
    with exporting() as exporter, source_of(exporter.address) as one, source_of(exporter.address) as other:
        exporter.register(Bytes("train 1", DATA))
        one.begin(WINDOW)
        thread, outcome = in_background(lambda: other.next_memory("train 1"))
        eventually(lambda: len(exporter._readers) == 2)
        readers = list(exporter._readers.values())
        exporter.close()
        thread.join(30)
        assert isinstance(outcome[0], SourceLost)
        assert not any(each.is_alive() for each in (*readers, exporter._thread))
        with pytest.raises(SourceLost):
            read_all(one, RANGES)
        with source_of(exporter.address) as late, pytest.raises(SourceLost, match="nobody listens"):
            late.next_memory(None)
        exporter.close()


def test_a_source_that_is_shut_down_ends_its_call_and_serves_no_other() -> None:
    with exporting() as exporter, source_of(exporter.address) as source:
        thread, outcome = in_background(lambda: source.next_memory(None))
        eventually(lambda: exporter._readers)
        source.shut_down()
        thread.join(30)
        assert isinstance(outcome[0], SourceLost)
        with pytest.raises(SourceLost):
            source.next_memory(None)
    with source_of(exporter.address) as source:
        source.shut_down()
        with pytest.raises(SourceLost):
            source.next_memory(None)


def test_a_source_that_is_shut_down_while_it_connects_ends_its_call_at_once() -> None:
    """A rank of a newcomer that was admitted ends its sources before its first step, and the members wait for that step."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as crowd:
        with pytest.raises(TimeoutError):  # the kernel answers nobody any more, as for a host that is gone
            while True:
                crowd.enter_context(socket.create_connection(full.getsockname(), 0.5))
        with source_of(f"127.0.0.1:{full.getsockname()[1]}") as source:
            thread, outcome = in_background(lambda: source.next_memory(None))
            time.sleep(0.3)
            source.shut_down()
            thread.join(5)
            assert isinstance(outcome[0], SourceLost)


def test_a_failure_of_the_memory_is_told_and_ends_that_reader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(tcp_exporter.Speaker, "say", lambda self, text: said.append(text))

    class Broken(Bytes):
        def about(self) -> bytes:
            raise MemoryError("no pinned memory")

    with exporting() as exporter, source_of(exporter.address) as one, source_of(exporter.address) as other:
        exporter.register(Broken("train 1", DATA))
        with pytest.raises(SourceLost):
            one.begin(WINDOW)
        assert said == ["megatron-recover: cannot serve the state to a newcomer: MemoryError: no pinned memory"]
        exporter.register(Bytes("train 2", DATA))
        assert other.next_memory(None).label == "train 2"


def test_strangers_do_not_keep_a_reader_out() -> None:
    with exporting() as exporter, source_of(exporter.address) as source:
        host, port = exporter.address.split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(100)]
        idle[0].send(b"GET / HTTP/1.0\r\n")
        exporter.register(Bytes("train 1", DATA))
        assert source.next_memory(None) == WINDOW
        for sock in idle:
            sock.close()


def test_a_forked_child_closes_its_copies() -> None:
    """Otherwise the connections of a dead rank would stay open."""
    with exporting() as exporter, source_of(exporter.address) as source:
        exporter.register(Bytes("train 1", DATA))
        source.next_memory(None)
        (sock,) = exporter._readers
        child = os.fork()
        if not child:
            os._exit(0 if sock.fileno() == -1 and exporter._is_closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert source.begin(WINDOW) == b"about train 1", "the parent serves on"


def test_a_source_dials_again_when_it_was_crowded_out() -> None:
    calls: list[int] = []

    def crowd(listener: socket.socket) -> None:
        for _ in range(3):
            listener.accept()[0].close()
            calls.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=crowd, args=(listener,), daemon=True)
        thread.start()
        source = TcpSource(f"127.0.0.1:{listener.getsockname()[1]}", b"k" * 32, NEWCOMER, SHORT)
        with pytest.raises(SourceLost):
            source.next_memory(None)
        thread.join(30)
        assert len(calls) == 3


def test_a_source_that_proves_itself_byte_by_byte_is_given_up_when_its_time_is_over() -> None:
    num_sent: list[int] = []

    def dribble(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        with contextlib.suppress(OSError):
            for each in CHALLENGE.pack(MAGIC, bytes(32), bytes(32))[:-1]:
                time.sleep(0.1)
                connection.sendall(bytes([each]))
                num_sent.append(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=dribble, args=(listener,), daemon=True)
        thread.start()
        source = TcpSource(f"127.0.0.1:{listener.getsockname()[1]}", b"k" * 32, NEWCOMER, SHORT)
        with pytest.raises(SourceLost, match="no connection"):
            source.next_memory(None)
        thread.join(30)
        assert len(num_sent) < CHALLENGE.size - 1  # it was cut off, and did not end by itself
