"""Frames between a source and an exporter: what arrives is what was sent by who holds the keys, or the connection breaks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recover.data_plane.ranges.frames import (
    _HEADER,
    MAX_BODY_BYTES,
    Begin,
    Begun,
    Broken,
    Differs,
    Found,
    Frames,
    Get,
    LookFor,
    Message,
    Piece,
    Still,
    Withdrawn,
)
from tests.control_plane.partners import KEYS

pytestmark = pytest.mark.timeout(150)
PAYLOAD = bytes(range(256)) * 3
MESSAGES: list[Message] = [
    LookFor(None), LookFor("train 1"), Found("train 2", 2**62, 2**40), Begin("train 2", 1, 2),
    Begun("train 2", 1, 2, b"\x00\xff"), Differs(["a", "b"]), Get("train 2", 1, 0, 4), Piece("train 2", 1, 0, 4),
    Withdrawn("train 2"), Still(),
]  # fmt: skip


@contextlib.contextmanager
def pair() -> Iterator[tuple[Frames, Frames]]:
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.settimeout(5.0)
    with ours, theirs:
        yield Frames(ours, KEYS), Frames(theirs, KEYS.of_other_end)


def sent(*messages: Message, payload: bytes = b"") -> list[bytes]:
    """The bytes of each frame."""
    found = []
    with pair() as (ours, theirs):
        for message in messages:
            ours.send(message, memoryview(payload))
            found.append(theirs.sock.recv(1 << 16))
    return found


def received(text: bytes, *, room: int = len(PAYLOAD)) -> list[tuple[Message, bytes, bool]]:
    """What comes of these bytes and the end of the stream. Raises Broken for all but whole frames, if none was received."""
    found: list[tuple[Message, bytes, bool]] = []
    with pair() as (ours, theirs):
        ours.sock.sendall(text)
        ours.sock.shutdown(socket.SHUT_WR)
        while True:
            buffer = bytearray(room)
            try:
                message, num_bytes, is_intact = theirs.receive(memoryview(buffer))
            except Broken:
                if not found:
                    raise
                return found
            found.append((message, bytes(buffer[:num_bytes]), is_intact))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_with_its_payload(message: Message) -> None:
    assert received(sent(message, payload=PAYLOAD)[0]) == [(message, PAYLOAD, True)]
    assert received(sent(message)[0]) == [(message, b"", True)]


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_garbage_is_no_frame(text: bytes) -> None:
    with pytest.raises(Broken):
        received(text)


@given(st.data())
@settings(max_examples=200)
def test_a_flipped_bit_breaks_the_connection_or_is_a_wrong_checksum(data: st.DataObject) -> None:
    (whole,) = sent(Piece("train 2", 1, 0, len(PAYLOAD)), payload=PAYLOAD)
    place = data.draw(st.integers(0, 8 * len(whole) - 1))
    changed = bytearray(whole)
    changed[place // 8] ^= 1 << place % 8
    is_in_payload = place // 8 >= len(whole) - len(PAYLOAD)
    try:
        ((message, payload, is_intact),) = received(bytes(changed))
    except Broken:
        assert not is_in_payload, "damage of a payload costs that payload only"
    else:
        assert is_in_payload and not is_intact and payload != PAYLOAD
        assert message == Piece("train 2", 1, 0, len(PAYLOAD)), "its place is known"


def test_a_frame_that_is_repeated_left_out_moved_or_sent_back_breaks_the_connection() -> None:
    first, second = sent(Get("train 2", 1, 0, 4), Get("train 2", 1, 4, 8))
    assert len(received(first + second)) == 2
    assert len(received(first + first)) == 1
    with pytest.raises(Broken, match="forged, damaged or repeated"):
        received(second + first)
    with pair() as (ours, theirs):
        theirs.sock.sendall(first)
        with pytest.raises(Broken, match="forged"):
            ours.receive()


def test_a_payload_without_room_a_long_body_another_version_and_what_is_no_message_break_it() -> None:
    whole = sent(Still(), payload=PAYLOAD)[0]
    with pytest.raises(Broken, match="768 bytes for which there is no room"):
        received(whole, room=len(PAYLOAD) - 1)
    with pytest.raises(Broken, match="no frame"):
        received(_HEADER.pack(b"ms", 1, MAX_BODY_BYTES + 1, 0, 0) + bytes(100))
    with pytest.raises(Broken, match="no frame"):
        received(_HEADER.pack(b"ms", 2, 4, 0, 0) + bytes(100))
    with pair() as (ours, theirs):
        header = _HEADER.pack(b"ms", 1, 3, 0, 0)
        ours.sock.sendall(header + ours._sending.mac(header, b"\xc1\xc1\xc1") + b"\xc1\xc1\xc1")
        with pytest.raises(Broken, match="no message"):
            theirs.receive()
    with pair() as (ours, theirs), pytest.raises(Broken, match="exceeds"):
        ours.send(Begun("train 2", 1, 2, bytes(MAX_BODY_BYTES)))


def test_an_end_that_moves_no_byte_breaks_it() -> None:
    with pair() as (ours, theirs):
        theirs.sock.settimeout(0.05)
        with pytest.raises(Broken, match="no byte for too long"):
            theirs.receive()
        ours.sock.settimeout(0.05)
        with pytest.raises(Broken, match="no byte for too long"):
            ours.send(Still(), memoryview(bytes(1 << 24)))
