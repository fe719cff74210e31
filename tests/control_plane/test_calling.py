"""A link that dials: a connection that ends before the other end has proven itself costs no message, whoever sees it first."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from megatron_recover.authentication.handshake import OTHER_PROTOCOL
from megatron_recover.control_plane import wire
from megatron_recover.control_plane.leader_messages import PeerHello
from megatron_recover.control_plane.wire import LinkClosed
from megatron_recover.host.addresses import HOST, address_of, bind_free
from tests.authentication.test_admission import ME, PEER, House, few_descriptors
from tests.control_plane.partners import call

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def reset_next(house: House) -> None:
    """Accept the next connection and reset it, as an acceptor does that is crowded."""
    house.listener.setblocking(True)
    accepted = house.listener.accept()[0]
    house.listener.setblocking(False)
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


def test_a_refused_connection_is_told_as_one_whatever_the_socket_says_later() -> None:
    """The first call on such a socket fails with ECONNREFUSED, and those after it with EPIPE."""
    with bind_free(HOST) as free:
        address = address_of(free)
    link = call(address, PEER, ME)
    try:
        for _ in range(3):
            with pytest.raises(LinkClosed, match="^Connection refused: nothing listens there$"):
                link.flush()
            assert link.is_refused
    finally:
        link.close()


def test_a_stranger_that_says_much_is_refused_as_often_as_it_is_heard() -> None:
    """The rest of its words was taken for the next message of the handshake, and ended the process."""
    with bind_free(HOST) as listener:
        listener.listen()
        link = call(address_of(listener), PEER, ME)
        accepted = listener.accept()[0]
        try:
            accepted.sendall(b"SSH-2.0-OpenSSH\r\n" * 100)
            for call_again in (link.flush, lambda: list(link.receive()), link.flush):
                with pytest.raises(LinkClosed, match=f"^{OTHER_PROTOCOL}$"):
                    call_again()
            assert link.refusal == OTHER_PROTOCOL
        finally:
            link.close()
            accepted.close()


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


@pytest.mark.parametrize("state", ["proves itself", "is dialled again", "is proven"])
def test_a_link_whose_queue_is_full_is_over_and_leaves_no_gap(
    house: House, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The message that found no room is lost: whatever is sent after it must not arrive."""
    why: list[str] = []
    link = house.watch(call(house.address, PEER, ME), why)
    if state == "is dialled again":
        reset_next(house)
        house.until(lambda: link in house.loop._redialling)
    elif state == "is proven":
        house.until(lambda: link.proven)
    house.loop.send(link, PeerHello(1))
    monkeypatch.setattr(wire, "MAX_QUEUED_BYTES", 0)
    house.loop.send(link, PeerHello(2))
    monkeypatch.undo()
    house.loop.send(link, PeerHello(3))
    house.until(lambda: why and (state != "is proven" or "closed" in house.seen))
    assert "does not read" in why[0] and PeerHello(3) not in house.seen


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process no descriptor to open."""
    fillers = []
    with few_descriptors(0):
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.open(os.devnull, os.O_RDONLY))  # noqa: PERF401
            yield
        finally:
            for each in fillers:
                os.close(each)


def test_a_link_that_finds_no_descriptor_free_is_dialled_later(house: House, capfd: pytest.CaptureFixture[str]) -> None:
    """EMFILE escaped to the control thread, which ended, and the replica with it."""
    why: list[str] = []
    with no_descriptors():
        link = house.watch(call(house.address, PEER, ME), why)
        house.loop.send(link, PeerHello(1))
        again = house.loop.time() + 0.2
        while house.loop.time() < again:
            house.loop.run_once(0.05)
        assert link.fileno() < 0
    house.until(lambda: house.seen or why)
    assert (why, house.seen) == ([], [PeerHello(1)])
    assert capfd.readouterr().err.count("ulimit -n") == 1


def test_a_link_that_is_dialled_again_waits_for_a_descriptor_too(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    why: list[str] = []
    link = house.watch(call(house.address, PEER, ME), why)
    reset_next(house)
    house.loop.send(link, PeerHello(1))
    due: list[Callable[[], None]] = []
    with monkeypatch.context() as patch:  # on a busy machine its pause may be over before anybody looks
        patch.setattr(house.loop, "after", lambda seconds, call: due.append(call))
        house.until(lambda: link in house.loop._redialling)
    with no_descriptors():
        for call_it in due:
            call_it()
        again = house.loop.time() + 0.2
        while house.loop.time() < again:
            house.loop.run_once(0.05)
        assert (why, house.seen) == ([], [])
    house.until(lambda: house.seen or why)
    assert (why, house.seen) == ([], [PeerHello(1)])


def test_a_link_that_never_gets_a_descriptor_is_over_in_time_and_says_why(house: House) -> None:
    why: list[str] = []
    with no_descriptors():
        link = house.watch(call(house.address, PEER, ME, patience_s=0.1), why)
        house.until(lambda: why)
    assert "ulimit -n" in why[0] and link not in house.loop._links
