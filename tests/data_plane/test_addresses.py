"""Ranks that listen elsewhere than on 127.0.0.1: on an address of another family or number, at ports of a range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.config import RankContext, RecoverConfig
from megatron_recover.data_plane.echo import unreachable
from megatron_recover.data_plane.transport import Endpoint
from megatron_recover.host.addresses import parse_address
from megatron_recover.megatron import training
from tests.control_plane.partners import KEY
from tests.data_plane.threads import at_once
from tests.host.test_addresses import free_range
from tests.system.test_loopback import listeners, sockets_of

pytestmark = pytest.mark.timeout(150)


def endpoint(kind: str, host: str, ports: tuple[int, int] | None) -> Endpoint:
    """The endpoint that a rank opens which its launcher gives nothing but an address and ports."""
    context = RankContext(
        replica=0, rank=0, num_ranks=1, num_replicas=2, coordinator="", leader="", run_dir="", started_at=0.0,
        address=host, ports=ports,
    )  # fmt: skip
    return training._endpoint(RecoverConfig(transport=kind), context, KEY, lambda event: None)  # type: ignore[arg-type]


@pytest.fixture(params=[("direct", "::1"), ("gloo", "::1"), ("direct", "127.0.0.2"), ("gloo", "127.0.0.2")], ids="-".join)
def made(request: pytest.FixtureRequest) -> Iterator[tuple[str, tuple[int, int], list[Endpoint]]]:
    """The endpoints of two replicas, and where all their listeners have to be."""
    kind, host = request.param
    ports = free_range(host, 4)
    endpoints = [endpoint(kind, host, ports) for _ in range(2)]
    yield host, ports, endpoints
    for each in endpoints:
        each.close()


def test_the_address_and_the_ports_of_a_rank_are_those_of_all_its_listeners(
    made: tuple[str, tuple[int, int], list[Endpoint]],
) -> None:
    host, ports, endpoints = made
    published = [parse_address(address) for each in endpoints for address in each.address.split(" ")]
    assert {place for place, _ in published} == {host}
    assert len(published) in (2, 4) and {port for _, port in published} <= {*range(ports[0], ports[1] + 1)}
    addresses = {replica: each.address for replica, each in enumerate(endpoints)}
    before = sockets_of([psutil.Process()])
    for generation in (1, 2):
        transports: list[Any] = [each.open(generation, replica, addresses) for replica, each in enumerate(endpoints)]
        results = [torch.empty(3) for _ in transports]
        sums = [
            lambda t=transport, r=result, n=place: t.sum_into([torch.full((3,), 2.0**n)], [r], tag=1)
            for place, (transport, result) in enumerate(zip(transports, results, strict=True))
        ]
        assert at_once(*sums) == [None, None]
        assert [result.tolist() for result in results] == [[3.0] * 3] * 2
    if len(published) == 4:
        assert {place for place, _ in listeners(sockets_of([psutil.Process()]) - before)} == {host}, "gloo's own"
        echoes = {replica: each.address.split(" ")[1] for replica, each in enumerate(endpoints)}
        assert unreachable(echoes, KEY, Party(Role.ECHO, 5, 0), 5.0) == ()
