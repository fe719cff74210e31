"""The flags of `run` about several nodes: torchrun's, and those of this project.

torchrun decides where nodes meet in torch/distributed/run.py (`run`, `config_from_args`), and reads
`--rdzv-conf` in torch/distributed/elastic/rendezvous; the same is done here. With one node nothing
of it is used.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_recover.cluster.meeting import Meeting, only_here
from megatron_recover.deadlines import LEAST_NODE_S, NODE_S
from megatron_recover.host.addresses import HOST, LARGEST_PORT, Ports

OURS = ("--key-file", "--interface", "--port-range", "--node-timeout")
"""The flags that torchrun does not have."""
_FILE = "file:"
_C10D_PORT = 29400
_STATIC_PORT = 29500
_NO_STORE = "nodes meet at a process of megatron-recover, and not in a store of torch"
_NODE_TIMEOUT = "--node-timeout says when a silent node is removed"
_UNUSED = {
    "timeout": "join_timeout says for how long nodes wait for others",
    "is_host": "with static the node of number 0 has the endpoint",
    "store_type": _NO_STORE,
    "read_timeout": _NO_STORE,
    "close_timeout": _NO_STORE,
    "heartbeat_timeout": _NODE_TIMEOUT,
    "keep_alive_interval": _NODE_TIMEOUT,
    "keep_alive_max_attempt": _NODE_TIMEOUT,
}
"""Keys of `--rdzv-conf` that torch reads and that change nothing here, with the reason. The first
two change something with the other backend (`_used`)."""
_UNREAD = "no rendezvous of static or c10d reads it"
_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags `OURS` to the parser of `run`."""
    group = parser.add_argument_group("several nodes (with torchrun's --nnodes, --node-rank, --rdzv-* and --master-*)")
    group.add_argument(
        "--key-file", type=Path, metavar="FILE",
        help="file with the key of the job, equal on all nodes, which only its owner may read; MEGATRON_RECOVER_KEY of the "
        "environment stands for its contents",
    )  # fmt: skip
    group.add_argument(
        "--interface", metavar="NAME",
        help="network interface of this node whose address the other nodes use (default: the one with the route to where "
        "nodes meet)",
    )  # fmt: skip
    group.add_argument(
        "--port-range", metavar="A-B",
        help="all listeners of megatron-recover have ports from A to B, for firewalls; gloo and NCCL choose theirs (default: "
        "any)",
    )  # fmt: skip
    group.add_argument(
        "--node-timeout", metavar="S",
        help="seconds of silence after which a node is removed, at least "
        f"{LEAST_NODE_S:g} (default: {NODE_S:g})",
    )  # fmt: skip


def given_of_ours(arguments: Namespace) -> list[str]:
    """Return the flags of `OURS` that are given."""
    return [flag for flag in OURS if getattr(arguments, flag[2:].replace("-", "_")) is not None]


def read(given: Mapping[str, str], arguments: Namespace, found: list[str]) -> Meeting:
    """Return how nodes meet; the default with one node. Append one line to `found` for a mistake.

    `given` has torchrun's flags by name.
    """
    if (nodes := _nodes(given.get("nnodes", "1"))) is None:
        found.append(f"--nnodes is {given['nnodes']}; {_remedy_of_nodes(given['nnodes'])}")
        return Meeting()
    least, most = nodes
    fields = _of_ours(arguments, found)
    node_rank = given.get("node_rank")
    if node_rank is not None and not (node_rank.isdecimal() and int(node_rank) < most):
        numbers = "0" if most == 1 else f"a number from 0 to {most - 1}"
        found.append(f"--node-rank is {node_rank}, and --nnodes is {most}; give {numbers}, or leave it out")
        node_rank = None
    backend = given.get("rdzv_backend", "static")
    if backend not in ("static", "c10d"):
        found.append(f"--rdzv-backend {backend} is not supported; give c10d or static, or leave it out on one node")
    if most == 1:
        return Meeting()
    fields |= _endpoint(given, found) | _conf(given.get("rdzv_conf", ""), found, is_static=backend == "static")
    if "standalone" in given:
        found.append(f"--standalone is for one node, and --nnodes is {given['nnodes']}; leave one of the two out")
    return Meeting(
        least_nodes=least, most_nodes=most, node_rank=None if node_rank is None else int(node_rank),
        is_static=backend == "static", local_addr=given.get("local_addr"), **fields,
    )  # fmt: skip


def notes(meeting: Meeting, given: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each of torchrun's flags that changes nothing where several nodes meet.

    Also yield a line if only this machine reaches the endpoint because nothing names another.
    """
    if meeting.flag == "--rdzv-endpoint":
        for flag in ("--master-addr", "--master-port"):
            if flag[2:].replace("-", "_") in given:
                yield f"{flag} changes nothing here: the nodes meet at --rdzv-endpoint"
    elif "master_addr" not in given:
        yield "; ".join(only_here(meeting))
    for key in _pairs(given.get("rdzv_conf", "")):
        if key not in _used(is_static=meeting.is_static):
            yield f"--rdzv-conf {key} changes nothing here: {_UNUSED.get(key, _UNREAD)}"


def _nodes(text: str) -> tuple[int, int] | None:
    """Return the least and the most nodes that `--nnodes` names; None if it names none."""
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    if match is None or not 0 < int(match[1]) <= int(match[2] or match[1]):
        return None
    return int(match[1]), int(match[2] or match[1])


def _remedy_of_nodes(text: str) -> str:
    """Return what to give instead of an `--nnodes` that names no nodes."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if match is not None and int(match[1]) > int(match[2]) > 0:
        return "MIN is above MAX; give MIN:MAX, such as 2:4"
    return "give a number of nodes, N or MIN:MAX, such as 4 or 2:4"


def _of_ours(arguments: Namespace, found: list[str]) -> dict[str, Any]:
    """Return the fields of `Meeting` that the flags `OURS` give."""
    fields: dict[str, Any] = {"key_file": arguments.key_file, "interface": arguments.interface}
    if (text := arguments.port_range) is not None:
        if (ports := _ports(text)) is None:
            found.append(f"--port-range is {text}; give A-B, two ports from 1 to {LARGEST_PORT}, the lower one first")
        fields["ports"] = ports
    if (text := arguments.node_timeout) is not None:
        seconds = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text) else math.nan
        if not seconds >= LEAST_NODE_S:
            found.append(f"--node-timeout is {text}; give a number of seconds of at least {LEAST_NODE_S:g}")
        fields["node_s"] = seconds
    return fields


def _ports(text: str) -> Ports | None:
    """Return the ports that `--port-range` names; None if it names none."""
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]) <= LARGEST_PORT:
        return None
    return int(match[1]), int(match[2])


def _endpoint(given: Mapping[str, str], found: list[str]) -> dict[str, Any]:
    """Return the fields of `Meeting` about the endpoint. Append each mistake to `found`."""
    endpoint, is_static = given.get("rdzv_endpoint", "").strip(), given.get("rdzv_backend", "static") == "static"
    if is_static and not endpoint:
        host, port = given.get("master_addr", HOST), given.get("master_port", str(_STATIC_PORT))
        if not re.fullmatch(r"[\w.:%-]+|\[[\w.:%]+\]", host):
            found.append(f"--master-addr is {host}; give the name or address of node 0")
        if not (port.isdecimal() and 0 < int(port) <= LARGEST_PORT):
            found.append(f"--master-port is {port}; give a port from 1 to {LARGEST_PORT}, equal on all nodes")
            return {}
        return {"host": host.strip("[]"), "port": int(port), "flag": "--master-addr"}
    if not endpoint:
        found.append("--rdzv-endpoint is missing; give HOST or HOST:PORT of one of the nodes, the same on all")
        return {}
    if endpoint.startswith(_FILE):
        if "is_host" in _pairs(given.get("rdzv_conf", "")):
            found.append("--rdzv-conf has is_host, and --rdzv-endpoint is a file: the first node owns it; leave is_host out")
        return {"endpoint_file": Path(endpoint.removeprefix(_FILE)).absolute(), "flag": "--rdzv-endpoint"}
    match = re.fullmatch(r"(?:\[([\w.:%]+)\]|([\w.-]+))(?::([0-9]{1,5}))?", endpoint)
    port = "" if match is None else match[3] or ("" if is_static else str(_C10D_PORT))
    if match is None or not (port and 0 < int(port) <= LARGEST_PORT):
        found.append(
            f"--rdzv-endpoint is {endpoint}; give HOST:PORT (IPv6: [HOST]:PORT), with a port from 1 to {LARGEST_PORT}, the "
            "same on all nodes"
        )
        return {}
    return {"host": match[1] or match[2], "port": int(port), "flag": "--rdzv-endpoint"}


def _pairs(text: str) -> dict[str, str]:
    """Return the keys and values of `--rdzv-conf`; a word without a value has the value ""."""
    pairs = (each.partition("=") for each in text.split(",") if text.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _used(*, is_static: bool) -> tuple[str, ...]:
    """Return the keys of `--rdzv-conf` that change something here."""
    return ("join_timeout", "last_call_timeout", "timeout" if is_static else "is_host")


def _conf(text: str, found: list[str], *, is_static: bool) -> dict[str, Any]:
    """Return the fields of `Meeting` that `--rdzv-conf` gives. Append each mistake to `found`."""
    fields: dict[str, Any] = {}
    seconds = {"join_timeout": "join_s", "last_call_timeout": "last_call_s", "timeout": "join_s"}
    used = _used(is_static=is_static)
    for key, value in _pairs(text).items():
        if not key or not value:
            found.append(f"--rdzv-conf is {text}; give KEY=VALUE, separated by commas")
        elif key in used and key in seconds:
            if not (value.isdecimal() and int(value) > 0):
                found.append(f"--rdzv-conf has {key}={value}; give a whole number of seconds of at least 1")
            else:
                fields[seconds[key]] = int(value)
        elif key in used:
            if value.lower() not in (*_YES, *_NO):
                found.append(f"--rdzv-conf has is_host={value}; give true or false")
            fields["is_host"] = value.lower() in _YES
        elif key == "store_type" and value.lower() != "tcp":
            found.append(f"--rdzv-conf has store_type={value}, which cannot be had; leave it out: {_NO_STORE}")
    return fields
