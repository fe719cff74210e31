"""Addresses as text, and free ports: also of IPv6, also of a range."""

from __future__ import annotations

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.config import RankContext
from megatron_recover.host import addresses
from megatron_recover.host.addresses import HOST, address_of, bind_free, family_of, format_address, parse_address

hosts = st.sampled_from(["127.0.0.1", "10.0.0.5", "node-7.example", "", "::1", "fd00::5", "fe80::1%eth0"])
both = pytest.mark.parametrize("host", ["127.0.0.1", "::1"])


@given(hosts, st.integers(0, addresses.LARGEST_PORT))
def test_what_was_formatted_is_parsed(host: str, port: int) -> None:
    assert parse_address(format_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "x", "x:", ":x", "::1:80", "[::1]", "[::1]:", "[::1:80", "x:65536", "x:-1", "[]:1", "x]:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        parse_address(text)


def free_range(host: str, num: int) -> tuple[int, int]:
    """A range of ports that were all free a moment ago."""
    for first in range(20000, 60000, num):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + num):
                    bound = stack.enter_context(socket.socket(family_of(host)))
                    bound.bind((host, port))
            except OSError:
                continue
            return first, first + num - 1
    raise AssertionError("no range is free")


@both
def test_a_listener_is_reached_at_its_address(host: str) -> None:
    with bind_free(host) as listener:
        place, port = parse_address(address_of(listener))
        assert place == host and port
        with socket.create_connection((host, port), timeout=10):
            pass


@both
def test_listeners_have_the_ports_of_the_range_and_no_two_the_same(host: str) -> None:
    first, last = ports = free_range(host, 4)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(bind_free(host, ports)) for _ in range(4)]
        assert sorted(listener.getsockname()[1] for listener in made) == [*range(first, last + 1)]
        with pytest.raises(OSError, match=rf"all ports of --port-range {first}-{last} are taken on {host}; give a wider range"):
            bind_free(host, ports)
        made[2].close()
        assert stack.enter_context(bind_free(host, ports)).getsockname()[1] == first + 2


@both
@pytest.mark.parametrize("is_ranged", [False, True])
def test_nobody_else_can_listen_on_the_port(host: str, is_ranged: bool) -> None:
    with bind_free(host, free_range(host, 2) if is_ranged else None) as listener, socket.socket(family_of(host)) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            stranger.bind(listener.getsockname())
        assert is_ranged or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR), "the kernel's choice is taken once"


@both
def test_a_port_that_another_has_bound_and_not_yet_used_is_taken_by_the_first_that_listens(host: str) -> None:
    first, last = ports = free_range(host, 2)
    with socket.socket(family_of(host)) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((host, first))
        with bind_free(host, ports) as ours:
            assert ours.getsockname()[1] == first
            with pytest.raises(OSError, match="in use"):
                stranger.listen()
    with socket.socket(family_of(host)) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((host, first))
        stranger.listen()
        with bind_free(host, ports) as ours:
            assert ours.getsockname()[1] == last


@both
def test_a_port_of_a_job_that_has_just_ended_is_free(host: str) -> None:
    """The end that closes first leaves its port to the kernel for a minute: a narrow range would be used up by a few starts."""
    first, _ = free_range(host, 1)
    with bind_free(host, (first, first)) as listener, socket.create_connection((host, first), timeout=10) as other:
        listener.accept()[0].close()
        assert other.recv(1) == b""
    with bind_free(host, (first, first)) as again:
        assert again.getsockname()[1] == first


def test_another_error_than_a_taken_port_is_raised_as_it_is() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        bind_free("192.0.2.1", (20000, 20003))


def test_a_rank_listens_on_loopback_unless_it_is_told_otherwise() -> None:
    context = RankContext(
        replica=0, rank=0, num_ranks=1, num_replicas=1, coordinator="", leader="", run_dir="", started_at=0.0
    )  # fmt: skip
    assert (context.address, context.ports) == (HOST, None)
