"""The variables that ranks get beside the user's, and what is said of the user's own."""

from __future__ import annotations

import pytest

from megatron_recover.cluster.environment import HEARTBEAT, environment_of_workers, environment_warnings, nccl_line
from megatron_recover.cluster.job import sharing_a_gpu
from megatron_recover.config import NCCL_ORDER
from megatron_recover.deadlines import Deadlines

DEADLINES = Deadlines.of(1800.5)


def test_the_heartbeat_monitor_of_torch_ends_no_rank_before_the_deadline() -> None:
    """Its default is 480 s: it would end a rank whose collective may still take half an hour."""
    environment = environment_of_workers({}, DEADLINES, on_gpus=True)
    assert int(environment[HEARTBEAT]) == 1801
    assert environment_warnings(environment, DEADLINES, on_gpus=True) == []
    assert HEARTBEAT not in environment_of_workers({}, DEADLINES, on_gpus=False)


@pytest.mark.parametrize(("value", "is_named"), [("480", True), ("1801", False), ("7200", False), ("", False), ("ten", False)])
def test_a_heartbeat_of_the_user_stays_and_is_named_if_it_is_shorter_than_the_deadline(value: str, is_named: bool) -> None:
    environment = environment_of_workers({HEARTBEAT: value}, DEADLINES, on_gpus=True)
    assert environment[HEARTBEAT] == value
    found = environment_warnings(environment, DEADLINES, on_gpus=True)
    assert len(found) == is_named and all("480" in line and "leave the variable out" in line for line in found)


def test_another_order_of_nccl_is_named() -> None:
    environment = environment_of_workers({"NCCL_ALGO": "Tree"}, DEADLINES, on_gpus=True)
    assert environment == environment_of_workers({}, DEADLINES, on_gpus=True) | {"NCCL_ALGO": "Tree"}
    [line] = environment_warnings(environment, DEADLINES, on_gpus=True)
    assert "NCCL_ALGO is Tree" in line and NCCL_ORDER["NCCL_ALGO"] in line


@pytest.mark.parametrize("user", [{"NCCL_ALGO": "Tree"}, {HEARTBEAT: "1"}])
def test_on_a_cpu_no_variable_of_nccl_is_named(user: dict[str, str]) -> None:
    assert len(environment_warnings(user, DEADLINES, on_gpus=True)) == 1
    assert environment_warnings(user, DEADLINES, on_gpus=False) == []


@pytest.mark.parametrize(("user", "expected"), [({}, ""), ({"NCCL_COMM_BLOCKING": "1"}, "1")])
def test_no_file_of_nccls_makes_calls_block(user: dict[str, str], expected: str) -> None:
    """A variable that is set to nothing comes before the files; what the user sets is refused by `data_plane.nccl.load`."""
    assert environment_of_workers(user, DEADLINES, on_gpus=True)["NCCL_COMM_BLOCKING"] == expected
    assert "NCCL_COMM_BLOCKING" not in environment_of_workers({}, DEADLINES, on_gpus=False)


def test_ranks_that_share_a_gpu_have_hosts_of_their_own_and_only_sockets() -> None:
    """NCCL takes a plugin for the network or InfiniBand before sockets, unless it is told which (src/plugin/net.cc)."""
    one, other = sharing_a_gpu(0), sharing_a_gpu(1)
    assert one["NCCL_HOSTID"] != other["NCCL_HOSTID"]
    assert one["NCCL_NET"] == "Socket" and one["NCCL_SHM_DISABLE"] == one["NCCL_P2P_DISABLE"] == "1"


def test_gloo_listens_where_this_node_is_reached_unless_the_user_says_where() -> None:
    assert environment_of_workers({}, DEADLINES, on_gpus=False)["GLOO_SOCKET_IFNAME"] == "lo"
    several = environment_of_workers({}, DEADLINES, on_gpus=True, interface="eth7")
    assert several["GLOO_SOCKET_IFNAME"] == "eth7" and "NCCL_SOCKET_IFNAME" not in several
    users = environment_of_workers({"GLOO_SOCKET_IFNAME": "ib0"}, DEADLINES, on_gpus=False, interface="eth7")
    assert users["GLOO_SOCKET_IFNAME"] == "ib0"


KNOWN = {"docker0": ("172.17.0.1",), "eth0": ("10.0.0.5", "fd00::5"), "ib0": ("10.1.0.5",), "lo": ("127.0.0.1", "::1")}


@pytest.mark.parametrize(
    ("variable", "left_out", "address", "expected"),
    [
        (None, (), "10.1.0.5", "NCCL takes ib0 by its own rule (NCCL_SOCKET_IFNAME is not set)"),
        (None, (), "fd00::5", "NCCL takes ib0 by its own rule (NCCL_SOCKET_IFNAME is not set); this node's address fd00::5 is "
         "on eth0: if NCCL connects nowhere, set NCCL_SOCKET_IFNAME=eth0"),
        (None, ("ib0",), "10.0.0.5", "NCCL takes eth0 by its own rule (NCCL_SOCKET_IFNAME is not set)"),
        (None, ("ib0", "eth0"), "127.0.0.1", "NCCL takes docker0 by its own rule (NCCL_SOCKET_IFNAME is not set); this node's "
         "address 127.0.0.1 is on lo: if NCCL connects nowhere, set NCCL_SOCKET_IFNAME=lo"),
        (None, ("ib0", "eth0", "docker0"), "127.0.0.1", "NCCL takes lo by its own rule (NCCL_SOCKET_IFNAME is not set)"),
        ("eth", (), "10.0.0.5", "NCCL takes eth0 by its own rule (NCCL_SOCKET_IFNAME is eth)"),
        ("=eth0,ib0", (), "10.0.0.5", "NCCL takes eth0, ib0 by its own rule (NCCL_SOCKET_IFNAME is =eth0,ib0)"),
        ("^lo,docker", (), "10.0.0.5", "NCCL takes eth0, ib0 by its own rule (NCCL_SOCKET_IFNAME is ^lo,docker)"),
        ("=eth", (), "10.0.0.5", "NCCL finds no interface on this node (NCCL_SOCKET_IFNAME is =eth); give NCCL_SOCKET_IFNAME "
         "one of docker0, eth0, ib0, lo"),
    ],
)  # fmt: skip
def test_the_interface_that_nccl_takes_is_told(
    variable: str | None, left_out: tuple[str, ...], address: str, expected: str
) -> None:
    known = {name: addresses for name, addresses in KNOWN.items() if name not in left_out}
    assert nccl_line({} if variable is None else {"NCCL_SOCKET_IFNAME": variable}, known, address) == expected
