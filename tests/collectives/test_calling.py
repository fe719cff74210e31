"""A link that dials: a connection that ends before the other end has proven itself costs no message, whoever sees it first."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from megatron_recover.collectives import wire
from megatron_recover.collectives.wire import PeerHello
from tests.collectives.partners import call
from tests.collectives.test_admission import ME, PEER, House

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def reset_next(house: House) -> None:
    """Accept the next connection and reset it, as an acceptor does that is crowded."""
    house.gate._listener.setblocking(True)
    accepted = house.gate._listener.accept()[0]
    house.gate._listener.setblocking(False)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()


def test_a_send_that_finds_the_connection_reset_dials_again(house: House) -> None:
    """The loop heard of it twice, from the send and from the socket: the second time it gave the link up."""
    why: list[str] = []
    link = house.watch(call(house.address, PEER, ME), why)
    reset_next(house)
    house.loop.send(link, PeerHello(1))
    house.until(lambda: house.seen or why)
    assert (why, house.seen) == ([], [PeerHello(1)])


def test_late_word_of_a_broken_connection_does_not_close_the_one_after_it(house: House) -> None:
    why: list[str] = []
    link = house.watch(call(house.address, PEER, ME), why)
    reset_next(house)
    house.loop.send(link, PeerHello(1))
    late = house.loop._posted.pop()
    house.until(lambda: house.seen)
    late()
    house.loop.send(link, PeerHello(2))
    house.until(lambda: len(house.seen) == 2 or why)
    assert (why, house.seen) == ([], [PeerHello(1), PeerHello(2)])


@pytest.mark.parametrize("dialling", [False, True], ids=["while it is dialled again", "while it proves itself"])
def test_a_link_whose_queue_is_full_is_over_and_leaves_no_gap(
    house: House, monkeypatch: pytest.MonkeyPatch, dialling: bool
) -> None:
    """The message that found no room is lost: whatever is sent after it must not arrive."""
    why: list[str] = []
    link = house.watch(call(house.address, PEER, ME), why)
    if not dialling:
        reset_next(house)
        house.until(lambda: link in house.loop._redialling)
    house.loop.send(link, PeerHello(1))
    monkeypatch.setattr(wire, "MAX_QUEUED_BYTES", 0)
    house.loop.send(link, PeerHello(2))
    monkeypatch.undo()
    house.loop.send(link, PeerHello(3))
    house.until(lambda: why)
    assert "does not read" in why[0] and PeerHello(3) not in house.seen
