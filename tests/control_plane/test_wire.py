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

from megatron_recover.authentication.handshake import KEY_BYTES, SessionKeys
from megatron_recover.control_plane.encoding import PackedStatuses, packed_status
from megatron_recover.control_plane.leader_messages import Enter, RankHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import FORMAT_VERSION, FRAME_BYTES, MAX_BODY_BYTES, Link, LinkClosed, Message, encode
from megatron_recover.core.digest import commitment
from megatron_recover.core.rank_messages import Holds, Promise
from megatron_recover.core.values import (
    Ballot,
    Contribution,
    Held,
    HeldVersion,
    Record,
    Shape,
    Status,
    Statuses,
    Vote,
    Votes,
    Work,
)
from megatron_recover.data_plane.connection import Connection
from megatron_recover.host.addresses import GIVEN_UP_S, TCP_RTO_MAX_MS
from megatron_recover.trace.node_clock import NodeClock
from tests.control_plane.partners import KEYS, framed

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
    return Link(ours, KEYS, NodeClock(None)), theirs


def frames(*messages: Message) -> bytes:
    """What the other end of a connection sends first."""
    return framed(*(encode(message) for message in messages))


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
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        struct.pack("!2sHI", b"mr", FORMAT_VERSION + 1, 1) + bytes(25),
        struct.pack("!2sHI", b"mr", FORMAT_VERSION, MAX_BODY_BYTES + 1) + bytes(24),
        framed(b"\xc1\xc1\xc1"),
        framed(b"\x81\xa4type"),
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


@pytest.mark.parametrize(
    "rest", [b"mr", b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"], ids=["end of the stream", "malformed frame"]
)
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
    received = Link(theirs, KEYS.of_other_end, NodeClock(None))
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
    one, many = (encode(Statuses(0, 3, tuple(statuses[:num]))) for num in (1, 51))
    assert len(many) - len(one) < 50 * 200 < len(one)
    # Equal ones as well, and what comes in two frames shares one in memory.
    copies = tuple(replace(each, committed=replace(record)) for each in statuses)
    assert len(encode(Statuses(0, 3, copies))) == len(many)
    link, theirs = pair()
    theirs.setblocking(False)
    found: list[Message] = []
    left = memoryview(framed(one, many))
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
    theirs.sendall(framed(body))
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
    received(framed(body))


@given(message=st.sampled_from(MESSAGES), end=st.integers(0, 2**16))
def test_a_message_that_is_cut_is_no_message(message: Message, end: int) -> None:
    text = frames(message)
    assert received(text[: end % len(text)]) == []


@given(message=st.sampled_from(MESSAGES), position=st.integers(0, 2**16), change=st.integers(1, 255))
def test_no_byte_of_a_frame_can_be_changed_unnoticed(message: Message, position: int, change: int) -> None:
    text = bytearray(frames(message))
    text[position % len(text)] ^= change
    assert received(bytes(text)) == []


BODIES = [encode(message) for message in MESSAGES]
CUT = [frames(*MESSAGES[:end])[len(frames(*MESSAGES[: end - 1])) :] for end in range(1, len(MESSAGES) + 1)]
"""The frames of `MESSAGES` one by one, each with its MAC."""


@given(picks=st.lists(st.integers(0, len(MESSAGES) - 1), max_size=8))
def test_a_frame_that_is_repeated_moved_or_left_out_closes_the_link(picks: list[int]) -> None:
    """Only the frames that stand where they were sent arrive."""
    kept = next((at for at, pick in enumerate(picks) if at != pick), len(picks))
    assert received(b"".join(CUT[pick] for pick in picks)) == list(MESSAGES[:kept])


@pytest.mark.parametrize("keys", [KEYS, SessionKeys(KEYS.sending, b"c" * KEY_BYTES)], ids=["reflected", "another connection"])
def test_a_frame_of_another_connection_or_direction_closes_the_link_with_a_reason(keys: SessionKeys) -> None:
    theirs, ours = socket.socketpair()
    elsewhere, link = Link(theirs, keys, NodeClock(None)), Link(ours, KEYS, NodeClock(None))
    elsewhere.send(MESSAGES[0])
    with pytest.raises(LinkClosed, match="another connection"):
        list(link.receive())
    link.close()
    elsewhere.close()


def test_a_body_is_not_decoded_before_its_mac_is_found_valid() -> None:
    link, theirs = pair()
    link._decode = lambda body: pytest.fail("it was decoded")  # type: ignore[assignment]
    theirs.sendall(frames(MESSAGES[0])[:-1] + b"x")
    with pytest.raises(LinkClosed, match="MAC"):
        list(link.receive())
    link.close()
    theirs.close()


def test_a_body_is_encoded_once_and_authenticated_for_each_receiver() -> None:
    sent = []
    for keys in (KEYS, SessionKeys(b"c" * KEY_BYTES, KEYS.receiving)):
        ours, theirs = socket.socketpair()
        link = Link(ours, keys, NodeClock(None))
        for _ in range(2):
            link.put(BODIES[0])
        sent.append(theirs.recv(2**16))
        link.close()
        theirs.close()
    halves = [text[part:][: len(text) // 2] for text in sent for part in (0, len(text) // 2)]
    assert len(set(halves)) == 4 and len({half[FRAME_BYTES:] for half in halves}) == 1


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1x"], ids=["arrays", "maps"])
def test_deep_nesting_closes_the_link(nested: bytes) -> None:
    """A RecursionError came out of the decoder, and ended the control thread."""
    body = b"\x82\xa1x" + nested * 200_000 + b"\xc0\xa4type\xa9PeerHello"
    link, theirs = pair()
    writing = threading.Thread(target=theirs.sendall, args=(framed(body),))
    writing.start()
    with pytest.raises(LinkClosed, match="not a message"):
        for _ in range(10_000):
            select.select([link], [], [], 5)
            list(link.receive())
    writing.join(60)
    theirs.close()
    link.close()


def test_a_quiet_connection_is_not_forgotten_on_its_way() -> None:
    """A cloud drops the packets of a connection that was quiet for 350 s. No kernel probes one before 2 hours by itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted = server.accept()[0]
    Link(dialled, KEYS, NodeClock(None))
    Connection(0, accepted)
    with dialled, accepted:
        for each in (dialled, accepted):
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 350


def test_a_connection_to_another_host_goes_on_soon_after_a_cut() -> None:
    """A kernel that knows no longest pause between its tries waits twice as long after each. On one host nothing is cut."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for source, is_other in (("127.0.0.2", True), ("127.0.0.1", False)):
            dialled = socket.create_connection(server.getsockname(), source_address=(source, 0))
            with dialled, server.accept()[0] as accepted:
                try:
                    accepted.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
                except OSError:
                    is_other = False
                Link(dialled, KEYS, NodeClock(None))
                Connection(0, accepted)
                for each in (dialled, accepted):
                    gives_up_s = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
                    assert gives_up_s == (GIVEN_UP_S if is_other else 0)
                    if is_other:
                        assert each.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) == 1000
