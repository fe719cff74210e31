"""Which node owns the endpoint."""

from __future__ import annotations

import pytest

from megatron_recover.cluster.meeting import Meeting, listened_at, owns_endpoint

MINE = ("10.0.0.3", "fd00::3", "127.0.0.1")


@pytest.mark.parametrize(
    ("is_static", "node_rank", "is_host", "endpoint", "expected"),
    [
        (True, 0, None, "10.0.0.9", True),  # as for torchrun, the number decides
        (True, 1, None, "10.0.0.3", False),
        (True, None, None, "10.0.0.3", True),  # a number that is given on joining cannot decide who is joined
        (True, None, None, "10.0.0.9", False),
        (False, None, None, "10.0.0.3", True),
        (False, None, None, "fd00::3", True),
        (False, None, None, "10.0.0.9", False),
        (False, 0, None, "10.0.0.9", False),  # as for torchrun, the number decides nothing
        (False, 1, None, "10.0.0.3", True),
        (False, 0, None, "127.0.0.1", True),  # but every node has this address
        (False, 1, None, "127.0.0.1", False),
        (False, None, None, "127.0.0.1", True),
        (True, 1, None, "127.0.0.1", False),
        (False, None, False, "10.0.0.3", False),
        (False, 1, True, "10.0.0.9", True),
    ],
)
def test_the_owner_of_the_endpoint(
    is_static: bool, node_rank: int | None, is_host: bool | None, endpoint: str, expected: bool
) -> None:
    meeting = Meeting(most_nodes=2, host="head", node_rank=node_rank, is_static=is_static, is_host=is_host)
    assert owns_endpoint(meeting, endpoint_addresses=(endpoint,), my_addresses=MINE, my_host_name="n03") is expected


def test_a_node_owns_an_endpoint_of_its_own_name_and_one_of_which_it_has_an_address() -> None:
    """A name server may give the name another address than those of interfaces, as in some clouds."""
    meeting = Meeting(most_nodes=2, host="n03", is_static=False)
    assert owns_endpoint(meeting, endpoint_addresses=("203.0.113.7",), my_addresses=MINE, my_host_name="n03")
    assert not owns_endpoint(meeting, endpoint_addresses=("203.0.113.7",), my_addresses=MINE, my_host_name="n04")
    assert owns_endpoint(meeting, endpoint_addresses=("203.0.113.7", "fd00::3"), my_addresses=MINE, my_host_name="n04")


DOCKER = "172.17.0.1"


@pytest.mark.parametrize(
    ("host", "here", "given", "address", "expected"),
    [
        ("head", (DOCKER, "10.0.0.3"), {}, "10.0.0.3", ("10.0.0.3", DOCKER)),  # others may know either, and dial that
        ("head", (DOCKER, "10.0.0.3"), {"interface": "eth0"}, "10.0.0.3", ("10.0.0.3",)),
        ("head", (DOCKER, "10.0.0.3"), {"local_addr": "10.0.0.3"}, "10.0.0.3", ("10.0.0.3",)),
        ("head", (DOCKER,), {"interface": "eth0"}, "10.0.0.3", ("10.0.0.3", DOCKER)),
        ("head", ("10.0.0.3",), {"interface": "ib0"}, "10.1.0.3", ("10.1.0.3", "10.0.0.3")),  # others find the name's
        ("10.0.0.3", ("10.0.0.3",), {"interface": "ib0"}, "10.1.0.3", ("10.0.0.3",)),  # others dial what the line has
        ("127.0.0.1", ("127.0.0.1",), {"local_addr": "127.0.0.2"}, "127.0.0.2", ("127.0.0.1",)),
        ("127.0.0.1", ("127.0.0.1",), {}, "127.0.0.1", ("127.0.0.1",)),
        ("10.0.0.9", (), {}, "10.0.0.3", ("10.0.0.3",)),  # an address that a router translates to this node's
    ],
)
def test_the_owner_listens_at_its_addresses_that_others_may_dial_and_at_no_other(
    host: str, here: tuple[str, ...], given: dict[str, str], address: str, expected: tuple[str, ...]
) -> None:
    meeting = Meeting(most_nodes=2, host=host, **given)  # type: ignore[arg-type]
    assert listened_at(meeting, here, address) == expected
