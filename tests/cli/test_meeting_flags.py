"""The flags about several nodes: what torchrun makes of the same line, and what is refused or noted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from megatron_recover.cli import launch_line, run_flags, several_nodes
from megatron_recover.cluster.meeting import Meeting
from megatron_recover.config import RecoverConfig

NO_STORE = "changes nothing here: nodes meet at a process of megatron-recover, and not in a store of torch"
ONE_NODE = "changes nothing here: all processes are on this node, and they meet without an address"


def read(line: str, **environment: str) -> launch_line.Choice:
    return launch_line.read(run_flags.parser().parse_args(line.split()), environment)


def torchs(line: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> LaunchConfig:
    """What torchrun makes of a line."""
    configs: list[LaunchConfig] = []

    def launch(config: LaunchConfig, entrypoint: object) -> object:
        configs.append(config)
        return lambda *words: None

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "elastic_launch", launch)
    torchrun.run(torchrun.get_args_parser().parse_args([*line.split(), "train.py"]))
    return configs[0]


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("--nnodes 4 --node-rank 3 --master-addr head --master-port 6000", {}),
        ("--nnodes 4 --node_rank 0 --master_addr 10.0.0.3", {}),
        ("--nnodes 2 --node-rank 1", {}),
        ("--nnodes 2 --node-rank 1 --master-addr fd00::3 --master-port 1", {}),
        ("--nnodes 2 --node-rank 1 --master-addr [fd00::3]", {}),
        ("--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint head", {}),
        ("--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint head.cluster-1:29999 --rdzv-id j7", {}),
        ("--nnodes 2:2 --rdzv-backend=c10d --rdzv-endpoint=[fd00::3]:65535 --local-addr n04", {}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint [fd00::3]", {}),
        ("--nnodes 2 --rdzv-endpoint head:6000 --node-rank 1", {}),
        ("--nnodes 2 --rdzv-endpoint head:6000 --node-rank 1 --master-addr other --master-port 7", {}),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1 --rdzv-conf join_timeout=60,last_call_timeout=5", {}),
        ("", {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "6000"}),
        ("--nnodes 3", {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "head:7", "PET_RDZV_ID": "x"}),
    ],
)
def test_nodes_meet_where_torchrun_has_them_meet(
    line: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, choice = torchs(line, monkeypatch, environment), read(line, **environment)
    ours = choice.nodes
    is_static = theirs.rdzv_backend == "static"
    assert (ours.host, ours.port) == parse_rendezvous_endpoint(theirs.rdzv_endpoint, -1 if is_static else 29400)
    assert (ours.least_nodes, ours.most_nodes, ours.is_static) == (theirs.min_nodes, theirs.max_nodes, is_static)
    assert (choice.run_id, ours.local_addr) == (theirs.run_id, theirs.local_addr)
    if is_static:
        assert (ours.node_rank or 0) == theirs.rdzv_configs["rank"]
    assert str(ours.join_s) == theirs.rdzv_configs.get("join_timeout", "600")
    assert str(ours.last_call_s) == theirs.rdzv_configs.get("last_call_timeout", "30")


def test_the_timeouts_that_are_not_given_are_those_of_torch() -> None:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    theirs, ours = RendezvousTimeout(), Meeting()
    assert (theirs.join.total_seconds(), theirs.last_call.total_seconds()) == (ours.join_s, ours.last_call_s)


def test_our_own_flags_are_read() -> None:
    nodes = read(
        "--nnodes 2 --master-addr head --key-file k --interface ib0 --port-range 20000-20999 --node-timeout 2.5"
    ).nodes  # fmt: skip
    assert (nodes.key_file, nodes.interface, nodes.ports, nodes.node_s) == (Path("k"), "ib0", (20000, 20999), 2.5)
    assert nodes.node_rank is None and nodes.is_of_several and nodes.flag == "--master-addr"
    of_timeout = read("--nnodes 2 --master-addr h --rdzv-conf timeout=9").nodes
    assert (of_timeout.join_s, of_timeout.node_s) == (9, 10.0)
    line = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h --rdzv-conf is_host="
    assert [read(line + text).nodes.is_host for text in ("True", "n")] == [True, False]


def test_with_one_node_nothing_changes_and_every_flag_that_does_nothing_is_noted() -> None:
    assert read("").nodes == read("--nnodes 1:1 --node-rank 0 --rdzv-backend static").nodes == Meeting()
    choice = read(
        "--key-file k --interface ib0 --port-range 1-2 --node-timeout 3 --rdzv-endpoint h --rdzv-conf x --local-addr n "
        "--master-addr h --master-port p --standalone"
    )  # fmt: skip
    assert choice.notes == tuple(
        f"{flag} {ONE_NODE}" for flag in (
            "--rdzv-endpoint", "--rdzv-conf", "--master-addr", "--master-port", "--local-addr", "--key-file", "--interface",
            "--port-range", "--node-timeout",
        )
    )  # fmt: skip


def test_with_several_nodes_only_what_does_nothing_is_noted() -> None:
    assert read("--nnodes 2 --master-addr h --master-port 7 --local-addr n --node-rank 1 --key-file k").notes == ()
    assert read("--nnodes 2 --rdzv-endpoint h:1 --master-addr h").notes == (
        "--master-addr changes nothing here: the nodes meet at --rdzv-endpoint",
    )
    assert read("--nnodes 2 --rdzv-endpoint h:1 --rdzv-conf read_timeout=3,keep_alive_interval=1,store_type=tcp").notes == (
        f"--rdzv-conf read_timeout {NO_STORE}",
        "--rdzv-conf keep_alive_interval changes nothing here: --node-timeout says when a silent node is removed",
        f"--rdzv-conf store_type {NO_STORE}",
    )
    assert read("--nnodes 2 --rdzv-endpoint h:1 --rdzv-conf timeout=900,is_host=true,rank=0").notes == (
        "--rdzv-conf is_host changes nothing here: with static the node of number 0 has the endpoint",
        "--rdzv-conf rank changes nothing here: no rendezvous of static or c10d reads it",
    )


def test_a_key_of_rdzv_conf_that_torch_ignores_is_noted_and_ends_nothing() -> None:
    choice = read(f"{C10D} --rdzv-endpoint h --rdzv-conf timeout=900,join_timout=60,is_host=0")
    assert choice.nodes.join_s == 600 and choice.notes == (
        "--rdzv-conf timeout changes nothing here: join_timeout says for how long nodes wait for others",
        "--rdzv-conf join_timout changes nothing here: no rendezvous of static or c10d reads it",
    )
    assert read("--nnodes 2").notes == (
        "the nodes meet at 127.0.0.1, which only this machine reaches; give --master-addr, the name or address of node 0",
    )


C10D = "--nnodes 2 --rdzv-backend c10d"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *[(f"--nnodes {text} --node-rank 7", f"--nnodes is {text}; give a number of nodes, N or MIN:MAX, such as 4 or 2:4")
          for text in ("0", "x", "3:0", "0:2", "1:2:3", "-1", "1:")],
        ("--nnodes 4:2 --node-rank 7", "--nnodes is 4:2; MIN is above MAX; give MIN:MAX, such as 2:4"),
        ("--nnodes 2 --node-rank 2", "--node-rank is 2, and --nnodes is 2; give a number from 0 to 1, or leave it out"),
        ("--nnodes 1:2 --node-rank x", "--node-rank is x, and --nnodes is 2; give a number from 0 to 1, or leave it out"),
        ("--nnodes 2 --standalone", "--standalone is for one node, and --nnodes is 2; leave one of the two out"),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h:1", "--rdzv-backend etcd is not supported; give c10d or static, or "
         "leave it out on one node"),
        (C10D, "--rdzv-endpoint is missing; give HOST or HOST:PORT of one of the nodes, the same on all"),
        *[(f"{C10D} --rdzv-endpoint {text}", f"--rdzv-endpoint is {text}; give HOST:PORT (IPv6: [HOST]:PORT), with a port from "
           "1 to 65535, the same on all nodes") for text in ("h:", "h:0", "h:65536", "h:x", "fd00::3", ":5", "[a]:x", "a/b")],
        ("--nnodes 2 --rdzv-endpoint h", "--rdzv-endpoint is h; give HOST:PORT (IPv6: [HOST]:PORT), with a port from 1 to "
         "65535, the same on all nodes"),
        ("--nnodes 2 --master-addr a/b", "--master-addr is a/b; give the name or address of node 0"),
        ("--nnodes 2 --master-addr h --master-port 0", "--master-port is 0; give a port from 1 to 65535, equal on all nodes"),
        (f"{C10D} --rdzv-endpoint h --rdzv-conf join_timeout=0", "--rdzv-conf has join_timeout=0; give a whole number of "
         "seconds of at least 1"),
        (f"{C10D} --rdzv-endpoint h --rdzv-conf join_timeout", "--rdzv-conf is join_timeout; give KEY=VALUE, separated by "
         "commas"),
        (f"{C10D} --rdzv-endpoint h --rdzv-conf store_type=file", "--rdzv-conf has store_type=file, which cannot be had; leave "
         "it out: nodes meet at a process of megatron-recover, and not in a store of torch"),
        (f"{C10D} --rdzv-endpoint h --rdzv-conf is_host=2", "--rdzv-conf has is_host=2; give true or false"),
        *[(f"--port-range {text}", f"--port-range is {text}; give A-B, two ports from 1 to 65535, the lower one first")
          for text in ("5", "0-5", "6-5", "1-65536", "a-b")],
        *[(f"--node-timeout {text}", f"--node-timeout is {text}; give a number of seconds of at least 2")
          for text in ("1.9", "nan", "inf", "x")],
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line_with_the_remedy(line: str, expected: str) -> None:
    with pytest.raises(ValueError) as refusal:
        read(line)
    assert str(refusal.value) == expected


def test_a_mistake_in_a_variable_names_the_variable() -> None:
    with pytest.raises(ValueError) as refusal:
        read("--nnodes 2", PET_MASTER_PORT="x", PET_RDZV_CONF="y")
    assert [line.split(" ")[:2] for line in str(refusal.value).splitlines()] == [
        ["--master-port", "(PET_MASTER_PORT"], ["--rdzv-conf", "(PET_RDZV_CONF"],
    ]  # fmt: skip


def test_a_range_that_all_listeners_of_a_node_may_use_up_is_refused() -> None:
    line = "--nnodes 2 --master-addr h --nproc-per-node 8 --port-range"
    launch_line.judge(read(f"{line} 20000-20039"), num_processes=16, config=RecoverConfig())
    with pytest.raises(ValueError) as refusal:
        launch_line.judge(read(f"{line} 20000-20038"), num_processes=16, config=RecoverConfig())
    assert str(refusal.value) == (
        "--port-range 20000-20038 has 39 ports, and this node has 8 ranks, each of which listens on up to 5; "
        "give at least 40 ports"
    )


def test_several_ranks_of_a_gpu_are_for_one_node() -> None:
    line = read("--nnodes 2 --master-addr h")
    launch_line.judge(line, num_processes=4, config=RecoverConfig())
    with pytest.raises(ValueError, match="--recover-ranks-per-gpu is 2, for trials on few GPUs of one node, .*; leave it out"):
        launch_line.judge(line, num_processes=4, config=RecoverConfig(ranks_per_gpu=2))
    launch_line.judge(read(""), num_processes=4, config=RecoverConfig(ranks_per_gpu=2))


@pytest.mark.parametrize("conf", ["", " --rdzv-conf is_host=true"])
def test_a_node_that_meets_the_others_anew_never_owns_the_endpoint(conf: str) -> None:
    """Where its job has ended meanwhile, it would begin another one."""
    line = read(f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:1{conf}")
    assert several_nodes.again(line).nodes.is_host is False
    assert several_nodes.again(line).nodes.join_s <= 60
