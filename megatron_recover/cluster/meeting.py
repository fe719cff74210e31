"""The meeting of the nodes of a job: what a node knows of it at its start, and what follows.

A `Meeting` is what the launch line says. This module opens no connection and resolves no name.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from megatron_recover.deadlines import NODE_S
from megatron_recover.host import reachable
from megatron_recover.host.addresses import HOST, Ports
from megatron_recover.host.reachable import is_loopback

JOIN_S = 600
LAST_CALL_S = 30
"""Defaults of torchrun, in seconds, for `--rdzv-conf`."""
MISSING_JOBS = (
    "run the same command on every node, with a file that all of them see; in an array of Slurm `squeue --array --me` shows "
    "the jobs of the others: one may be held, have reached a limit of its QOS, have failed on its node, or wait for nodes that "
    "another array holds, which waits, too; correct that, then submit again with a longer --rdzv-conf join_timeout=SECONDS in "
    "the launch line, or with --shape allocation, which starts all nodes at once"
)
"""The next command where nodes that meet through a file are too few, mostly jobs of an array."""
MISSING_NODES = "run the same command on every node, or give --nnodes MIN:MAX"
"""The next command where other nodes are too few."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a job, and where and for how long they wait for each other."""

    least_nodes: int = 1
    """Number of nodes with which the job may start."""
    most_nodes: int = 1
    """Number of nodes with which the job starts at most. Nodes that come later are spares."""
    node_rank: int | None = None
    """Number that the user gives this node; None: the node gets one when it joins."""
    host: str = HOST
    """Name or address of the endpoint, at which the coordinator listens; IPv6 without brackets."""
    port: int = 0
    """Port of the endpoint."""
    flag: str = ""
    """The flag that gives `host`, for messages."""
    endpoint_file: Path | None = None
    """File, visible to all nodes, into which the first node writes the endpoint; None: `host` and
    `port` are known."""
    is_static: bool = True
    """True with `--rdzv-backend static`, where `node_rank` decides who owns the endpoint."""
    is_host: bool | None = None
    """True if `--rdzv-conf` gives this node the endpoint, False if another; None: neither."""
    join_s: int = JOIN_S
    """Seconds that a node waits until `least_nodes` have joined."""
    last_call_s: int = LAST_CALL_S
    """Seconds from then on that the job waits for more nodes, up to `most_nodes`."""
    node_s: float = NODE_S
    """Seconds of silence after which a node is removed."""
    local_addr: str | None = None
    """Name or address of this node that the other nodes use, where the user gives one."""
    interface: str | None = None
    """Network interface whose address the other nodes use, where the user gives one."""
    ports: Ports | None = None
    """First and last port of all listeners, except an endpoint whose port is given; None: any."""
    key_file: Path | None = None
    """File with the key of the job (`authentication/key.py`)."""

    @property
    def is_of_several(self) -> bool:
        """Return whether the job may have more than one node."""
        return self.most_nodes > 1


def only_here(meeting: Meeting) -> tuple[str, str]:
    """Return the mistake of an endpoint at a loopback address, and its remedy."""
    return (
        f"the nodes meet at {meeting.host}, which only this machine reaches",
        f"give {meeting.flag}, the name or address of node 0",
    )


def owns_endpoint(
    meeting: Meeting, *, endpoint_addresses: Collection[str], my_addresses: Collection[str], my_host_name: str
) -> bool:
    """Return whether this node owns the endpoint of a meeting, where the coordinator listens.

    `endpoint_addresses` are those to which the endpoint's host resolves (`reachable.resolve`).
    `my_addresses` are those of this node. As for torchrun, the node with number 0 owns the endpoint
    of `static`, and otherwise the node that has its address or name. A number decides also if the
    address is one of loopback, which every node has. Without a number all nodes then answer True:
    they are on one machine, and the first that listens at the endpoint owns it.
    """
    if meeting.is_host is not None:
        return meeting.is_host
    is_ambiguous = all(map(is_loopback, endpoint_addresses))
    if meeting.node_rank is not None and (meeting.is_static or is_ambiguous):
        return meeting.node_rank == 0
    return is_ambiguous or meeting.host == my_host_name or not set(endpoint_addresses).isdisjoint(my_addresses)


def addresses_of(meeting: Meeting) -> tuple[tuple[str, ...], str]:
    """Return the addresses of the endpoint that this node may try, and its own address.

    Raises ValueError with the remedy, as `reachable.endpoint_addresses` and `node_address` do.
    """
    flag, chosen = meeting.flag, {"interface": meeting.interface, "local_addr": meeting.local_addr}
    found = reachable.endpoint_addresses(meeting.host, flag, **chosen)
    endpoint = reachable.with_route(found, meeting.port)
    return endpoint, reachable.node_address(endpoint, meeting.port, flag=flag, **chosen)


def listened_at(meeting: Meeting, here: Collection[str], address: str) -> tuple[str, ...]:
    """Return the addresses at which the owner of the endpoint listens, `address` first.

    `here`: the addresses of the endpoint that are this node's. `address`: the one that this node
    publishes.

    Other nodes may resolve the endpoint's name to another address than this node, since some
    systems resolve their own name to all addresses of the node. So the owner listens:

    - at `address` alone if the name resolves to none of this node, or if `--local-addr` or
      `--interface` chooses one of those to which it resolves;
    - else at each address of this node to which the name resolves, and at the one that a flag
      chooses;
    - at the endpoint itself if that is an address of this node and no name: all dial that.
    """
    is_chosen = meeting.local_addr is not None or meeting.interface is not None
    if not here or (is_chosen and address in here):
        return (address,)
    first = [address] if address in here or (is_chosen and meeting.host not in here) else []
    return (*first, *(each for each in here if each != address))
