"""Nodes meet although the first one's name does not stand for one address that all of them reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nodes.jobs import NodesJob
from tests.nodes.nodes import Network, configure

pytestmark = pytest.mark.timeout(120)
BRIDGE = "172.17.0.1"
"""The address of a bridge of containers, which each node has."""


@pytest.mark.parametrize(
    ("here", "there"),
    [(["127.0.1.1"], ["ADDRESS"]), ([BRIDGE, "ADDRESS"], ["ADDRESS"]), (["ADDRESS"], [BRIDGE, "ADDRESS"])],
    ids=["as Debian installs it", "a bridge on its node", "a bridge on the other node"],
)  # fmt: skip
def test_nodes_meet_whatever_the_first_ones_name_stands_for(
    make_network: Callable[..., Network], here: list[str], there: list[str]
) -> None:
    network = make_network(2)
    first, other = network
    for node, addresses in ((first, here), (other, there)):
        assert node.pid is not None
        configure(
            node.pid, "link add docker0 type bridge", f"addr add {BRIDGE}/16 dev docker0", "link set docker0 up",
            "route add default dev eth0",
        )  # fmt: skip
        found = [each.replace("ADDRESS", first.address) for each in addresses]
        node.write_hosts([*(f"{each} {first.name}" for each in found), f"{other.address} {other.name}"])
    job = NodesJob(network, num_nodes=2, replicas=2, ranks=1, steps=8)
    assert set(job.end().values()) == {0}, job.output()
    assert job.mistakes() == []
    network.assert_nothing_left()
