"""The variables that ranks get beside the user's, and what is said of the user's own."""

from __future__ import annotations

import pytest

from megatron_recover.cluster.environment import HEARTBEAT, environment_of_workers, environment_warnings
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
