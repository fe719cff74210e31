"""Frames survive any cutting of the byte stream; what is no frame, no message or too long ends the link and nothing else."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.control_plane.encoding import PackedStatuses, packed_status
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import (
    FORMAT_VERSION,
    MAX_BODY_BYTES,
    Enter,
    Link,
    LinkClosed,
    Message,
    RankHello,
    frame,
)
from megatron_recover.core.digest import commitment
from megatron_recover.core.values import (
    Ballot,
    Contribution,
    Held,
    HeldVersion,
    Holds,
    Promise,
    Record,
    Shape,
    Status,
    Statuses,
    Vote,
    Votes,
    Work,
)

pytestmark = pytest.mark.timeout(150)

RECORDS = tuple(commitment(Record(6, "train 7", (), paces=((0, pace),))) for pace in (1, 2))
MESSAGES: tuple[Message, ...] = (
    RankHello(1, Shape(2, ((0,), (0, 1))), "fingerprint", "127.0.0.1:1/token"),
    Enter(Promise(3, (0, 2)), ((0, "a:1"), (2, "b:2"))),
    Holds(1, 7, (Held(0, 3, 2**32 - 1),)),
    Vote(2, 3, 7, b"digest", b"outline", ("exit: SIGTERM",), ((2, 10**9),)),
    Status(0, 3, 7, Work("train 8", 4, (0, 1)), (Contribution((0,), (0, 1)),), (HeldVersion(2, (1,)),), None),
    Votes(1, 3, 7, (Ballot(b"digest", b"outline", (1, 3, 4)),)),
    Statuses(1, 3, (Status(1, 3, 7, None, (), (), None), Status(3, 3, 7, None, (), (), None))),
    Statuses(
        1, 3, tuple(Status(replica, 3, 7, None, (), (), record) for replica, record in enumerate((*RECORDS, None, *RECORDS)))
    ),
)


def pair() -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair()
    return Link(ours), theirs


def frames(*messages: Message) -> bytes:
    link, theirs = pair()
    for message in messages:
        link.send(message)
    link.close()
    text = b""
    while chunk := theirs.recv(2**16):
        text += chunk
    theirs.close()
    return text


@given(cuts=st.lists(st.integers(0, 600), max_size=12))
def test_messages_arrive_equal_and_in_order_however_the_stream_is_cut(cuts: list[int]) -> None:
    text, received = frames(*MESSAGES), []
    link, theirs = pair()
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in zip(borders, borders[1:], strict=False):
        theirs.sendall(text[start:end])
        received += link.receive()
    theirs.close()
    link.close()
    assert tuple(received) == MESSAGES


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!2sHI", b"mr", FORMAT_VERSION + 1, 1) + b"\x80",
        struct.pack("!2sHI", b"mr", FORMAT_VERSION, MAX_BODY_BYTES + 1),
        struct.pack("!2sHI", b"mr", FORMAT_VERSION, 3) + b"\xc1\xc1\xc1",
        struct.pack("!2sHI", b"mr", FORMAT_VERSION, 6) + b"\x81\xa4type",
    ],
    ids=["stranger", "other version", "too long", "no msgpack", "no message"],
)
def test_what_is_no_message_closes_the_link(text: bytes) -> None:
    link, theirs = pair()
    theirs.sendall(text)
    with pytest.raises(LinkClosed):
        list(link.receive())
    theirs.close()
    link.close()


@pytest.mark.parametrize("rest", [b"mr", b"GET / HTTP/1.1\r\n\r\n"], ids=["end of the stream", "malformed frame"])
def test_complete_messages_come_before_what_closes_the_link(rest: bytes) -> None:
    link, theirs = pair()
    theirs.sendall(frames(*MESSAGES) + rest)
    theirs.close()
    arrived = []
    with pytest.raises(LinkClosed):
        for message in link.receive():
            arrived.append(message)  # noqa: PERF402
    assert tuple(arrived) == MESSAGES
    link.close()


def test_sending_never_blocks_on_a_peer_that_does_not_read() -> None:
    link, theirs = pair()
    large = Enter(Promise(1, (0,)), tuple((number, "x" * 100) for number in range(20_000)))
    for _ in range(3):
        link.send(large)
    assert link.wants_write
    received = Link(theirs)
    arrived: list[Message] = []
    while len(arrived) < 3:
        arrived += received.receive()
        link.flush()
    assert arrived == [large] * 3 and not link.wants_write
    link.close()
    received.close()


def test_timers_and_posted_calls_are_made_in_order() -> None:
    loop, made = Loop(), []
    loop.after(0.02, lambda: made.append("late"))
    loop.after(0.0, lambda: made.append("early"))
    loop.post(lambda: made.append("posted"))
    while len(made) < 3:
        loop.run_once(1.0)
    assert made == ["posted", "early", "late"]
    loop.close()


def test_a_record_that_many_members_have_committed_travels_once() -> None:
    record = commitment(Record(6, "train 7", (), paces=tuple((replica, 10**8 + replica) for replica in range(3000))))
    statuses = [Status(replica, 3, 7, None, (), (), record) for replica in range(51)]
    one, many = (frame(Statuses(0, 3, tuple(statuses[:num]))) for num in (1, 51))
    assert len(many) - len(one) < 50 * 200 < len(one)
    # Equal ones as well, and what comes in two frames shares one in memory.
    copies = tuple(replace(each, committed=replace(record)) for each in statuses)
    assert len(frame(Statuses(0, 3, copies))) == len(many)
    link, theirs = pair()
    theirs.setblocking(False)
    found: list[Message] = []
    for text in (one, many):
        left = memoryview(text)
        while left:
            with contextlib.suppress(BlockingIOError):
                left = left[theirs.send(left) :]
            found += link.receive()
    assert [len(each.statuses) for each in found if isinstance(each, Statuses)] == [1, 51]
    assert len({id(status.committed) for each in found if isinstance(each, Statuses) for status in each.statuses}) == 1
    link.close()
    theirs.close()


@pytest.mark.parametrize("position", [0, -1])
def test_a_status_whose_record_is_missing_ends_the_link(position: int) -> None:
    body = msgspec.msgpack.encode(PackedStatuses(1, 3, (), ((packed_status(Status(1, 3, 7, None, (), (), None)), position),)))
    link, theirs = pair()
    theirs.sendall(struct.pack("!2sHI", b"mr", FORMAT_VERSION, len(body)) + body)
    with pytest.raises(LinkClosed, match=f"record {position} of 0"):
        list(link.receive())
    link.close()
    theirs.close()


# --- Fuzzing: whatever comes, a message or `LinkClosed`, and no more memory than was sent ------------------------------------


def received(text: bytes) -> list[Message]:
    """What a link makes of `text`, up to where it is closed."""
    link, theirs = pair()
    theirs.sendall(text)
    theirs.close()
    found: list[Message] = []
    try:
        with pytest.raises(LinkClosed):
            for _ in range(10):
                for message in link.receive():
                    found.append(message)  # noqa: PERF402
    finally:
        link.close()
    return found


@given(text=st.binary(max_size=400))
def test_arbitrary_bytes_close_the_link_and_do_nothing_else(text: bytes) -> None:
    received(text)


@given(body=st.binary(max_size=400))
def test_arbitrary_bodies_are_messages_or_close_the_link(body: bytes) -> None:
    received(struct.pack("!2sHI", b"mr", FORMAT_VERSION, len(body)) + body)


@given(message=st.sampled_from(MESSAGES), end=st.integers(0, 2**16))
def test_a_message_that_is_cut_is_no_message(message: Message, end: int) -> None:
    text = frames(message)
    assert received(text[: end % len(text)]) == []


@given(message=st.sampled_from(MESSAGES), changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1))
def test_a_message_that_was_changed_is_a_message_or_closes_the_link(message: Message, changes: list[tuple[int, int]]) -> None:
    text = bytearray(frames(message))
    for position, value in changes:
        text[position % len(text)] = value
    for each in received(bytes(text)):
        assert isinstance(each, Message)


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1x"], ids=["arrays", "maps"])
def test_deep_nesting_closes_the_link(nested: bytes) -> None:
    """A RecursionError came out of the decoder, and ended the control thread."""
    body = b"\x82\xa1x" + nested * 200_000 + b"\xc0\xa4type\xa9PeerHello"
    link, theirs = pair()
    writing = threading.Thread(target=theirs.sendall, args=(struct.pack("!2sHI", b"mr", FORMAT_VERSION, len(body)) + body,))
    writing.start()
    with pytest.raises(LinkClosed, match="not a message"):
        for _ in range(10_000):
            select.select([link], [], [], 5)
            list(link.receive())
    writing.join(60)
    theirs.close()
    link.close()
