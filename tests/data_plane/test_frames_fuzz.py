"""Whatever a peer sends in a call of the direct transport: the exact sum, a refusal of that peer, or waiting for more."""

from __future__ import annotations

import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recover.data_plane.connection import Connection
from megatron_recover.data_plane.exchange import CONTRIBUTION, COPY, FRAME, SUM, CopyExchange, Exchange, SumExchange
from megatron_recover.data_plane.transport import TransportError

pytestmark = pytest.mark.timeout(150)
ELEMENTS, GENERATION, TAG = 5, 3, 7


def exchange(me: int, *, copies: bool) -> tuple[Exchange, torch.Tensor]:
    """The exchange of one of two members, and its result; replica 0 sends where it is a copy."""
    mine, result = torch.full((ELEMENTS,), me + 1.0), torch.zeros(ELEMENTS)
    if copies:
        tensor = mine if me == 0 else result
        return CopyExchange(GENERATION, TAG, [1 - me], [tensor], sending=me == 0), result
    return SumExchange(GENERATION, TAG, (0, 1), me, [mine], [result], {}, lambda instant: None), result


def sent_by_the_peer(*, copies: bool) -> bytes:
    return b"".join(exchange(0, copies=copies)[0].outgoing[1])


def after(text: bytes, *, copies: bool, hangs_up: bool) -> tuple[torch.Tensor, bool, str]:
    """The result of replica 1 when replica 0 has sent `text`, whether it is complete, and why replica 0 was refused."""
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    into, result = exchange(1, copies=copies)
    connection = Connection.__new__(Connection)  # one end of a pair has no TCP options
    connection.peer, connection.sock, connection.ready = 0, ours, True
    theirs.sendall(text)
    if hangs_up:
        theirs.close()
    try:
        while into.wants(0) and into.receive(0, connection):
            pass
    except TransportError as error:
        return result, False, str(error)
    finally:
        theirs.close()
        ours.close()
    return result, not into.wants(0), ""


def expected(*, copies: bool) -> torch.Tensor:
    return torch.full((ELEMENTS,), 1.0 if copies else 3.0)


@pytest.mark.parametrize("copies", [False, True], ids=["sum", "copy"])
def test_the_frames_of_a_peer_make_the_result(copies: bool) -> None:
    result, complete, why = after(sent_by_the_peer(copies=copies), copies=copies, hangs_up=False)
    assert complete and not why and torch.equal(result, expected(copies=copies))


@given(copies=st.booleans(), text=st.binary(max_size=3 * FRAME.size), hangs_up=st.booleans())
@settings(max_examples=300)
def test_arbitrary_bytes_are_refused_or_awaited(copies: bool, text: bytes, hangs_up: bool) -> None:
    result, complete, why = after(text, copies=copies, hangs_up=hangs_up)
    assert not complete, "no bytes by chance are a frame of this call"
    assert why or len(text) < FRAME.size
    if not copies:
        assert not result.any()


@given(copies=st.booleans(), position=st.integers(0, FRAME.size - 1), flip=st.integers(1, 255), cut=st.integers(0, 200))
@settings(max_examples=300)
def test_a_header_that_was_changed_is_never_summed(copies: bool, position: int, flip: int, cut: int) -> None:
    text = bytearray(sent_by_the_peer(copies=copies))
    text[position] ^= flip
    result, complete, why = after(bytes(text[: len(text) - cut % len(text)]), copies=copies, hangs_up=False)
    assert not complete and (why or cut % len(text) > len(text) - FRAME.size)
    if not copies:
        assert not result.any()


numbers = st.sampled_from([0, 1, 2**31, 2**32 - 1])
wide = st.one_of(st.integers(0, 9), st.just(2**64 - 1))


@given(
    copies=st.booleans(), generation=wide, tag=st.integers(-9, 9), kind=st.sampled_from([0, CONTRIBUTION, SUM, COPY, 9]),
    tensor=numbers, shard=numbers, size=st.sampled_from([0, 4 * ELEMENTS, 2**32 + 4 * ELEMENTS, 2**64 - 1]), start=wide,
)  # fmt: skip
def test_a_header_of_another_frame_is_never_summed(
    copies: bool, generation: int, tag: int, kind: int, tensor: int, shard: int, size: int, start: int
) -> None:
    """Replayed frames: of another generation, call, tensor, shard, size or place."""
    header = FRAME.pack(generation, tag, kind, tensor, shard, size, start)
    right = sent_by_the_peer(copies=copies)
    if header == right[: FRAME.size]:
        return
    result, complete, why = after(header + right[FRAME.size :], copies=copies, hangs_up=False)
    assert not complete and "sent frame" in why
    if not copies:
        assert not result.any()


@given(copies=st.booleans(), end=st.integers(0, 10**6), hangs_up=st.booleans())
def test_frames_that_are_cut_are_awaited_or_refused(copies: bool, end: int, hangs_up: bool) -> None:
    text = sent_by_the_peer(copies=copies)
    _, complete, why = after(text[: end % len(text)], copies=copies, hangs_up=hangs_up)
    assert not complete and bool(why) == hangs_up
