"""The listening sockets that rank 0 inherits: it serves what has connected before, and takes no other socket for them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from megatron_recover.control_plane.listening import LEADER, inherited_listener
from megatron_recover.control_plane.wire import dial, listen
from megatron_recover.host.addresses import address_of, parse_address
from tests.host.test_addresses import free_range

pytestmark = pytest.mark.timeout(150)

HandDown = Callable[..., None]


@pytest.mark.parametrize("address", ["127.0.0.2:0", "[::1]:0"])
def test_a_link_reaches_a_listener_of_either_family_at_a_port_of_the_range(address: str) -> None:
    first, last = ports = free_range(parse_address(address)[0], 2)
    with listen(address, ports) as listener, dial(address_of(listener)) as dialled:
        assert not listener.getblocking() and first <= parse_address(address_of(listener))[1] <= last
        listener.setblocking(True)
        with listener.accept()[0] as accepted:
            assert accepted.getsockname() == dialled.getpeername()


def test_what_connected_before_rank_0_was_there_is_served(hand_down: HandDown) -> None:
    with listen("127.0.0.1:0") as launchers:
        address = address_of(launchers)
        hand_down(**{LEADER: os.dup(launchers.fileno())})
        early = socket.create_connection(launchers.getsockname(), timeout=5)
    with early, inherited_listener(LEADER, address) as listener:
        with listener.accept()[0] as accepted:
            accepted.sendall(b"hello")
            assert early.recv(5) == b"hello"
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_without_a_launcher_there_is_none() -> None:
    assert inherited_listener(LEADER, "127.0.0.1:1") is None


@pytest.mark.parametrize("listens", [True, False])
def test_a_socket_that_is_not_the_one_that_was_announced_is_refused(hand_down: HandDown, listens: bool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = address_of(other) if not listens else "127.0.0.1:1"
        if listens:
            other.listen()
        hand_down(**{LEADER: other.fileno()})
        with pytest.raises(RuntimeError, match="does not listen at"):
            inherited_listener(LEADER, address)
        assert os.fstat(other.fileno())
