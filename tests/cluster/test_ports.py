"""The ports that the launcher takes for a replica: nobody else can take them before the replica's rank 0 serves them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

from megatron_recover.authentication import key as keys
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.seats import Seats
from megatron_recover.cluster.starting import Starting
from megatron_recover.config import CONTEXT_VARIABLE, RankContext, RecoverConfig
from megatron_recover.control_plane import rendezvous
from megatron_recover.control_plane.node_messages import Launch
from megatron_recover.trace import Layout

pytestmark = pytest.mark.timeout(240)


def can_be_taken(port: int) -> bool:
    """Return whether a stranger gets to listen on `port` of loopback. For SO_REUSEADDR Linux does not ask who owns a socket."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            stranger.bind(("127.0.0.1", port))
            stranger.listen()
        except OSError:
            return False
    return True


def listeners(descriptors: dict[str, int]) -> dict[str, str]:
    """Return the addresses of the listening sockets among descriptors, by name."""
    found = {}
    for name, descriptor in descriptors.items():
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                found[name] = "{}:{}".format(*copy.getsockname())
    return found


class Spawned:
    """Stands in for the agent and its watch: notes what ranks are started with, and acts as a stranger meanwhile."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        """Addresses of ranks that a stranger could take."""
        self.stores: dict[int, set[int]] = {}
        """By replica: the files that its ranks inherited as its store."""
        self.handed_down: dict[tuple[int, int], dict[str, str]] = {}
        self.expected: dict[int, dict[str, str]] = {}

    def spawn(self, replica: int, rank: int, *, environment: dict[str, str], descriptors: dict[str, int], **_: object) -> None:
        context = msgspec.json.decode(environment[CONTEXT_VARIABLE], type=RankContext)
        addresses = self.expected[replica] = {"leader": context.leader}
        self.taken += [each for each in addresses.values() if can_be_taken(int(each.rpartition(":")[2]))]
        self.handed_down[replica, rank] = listeners(descriptors)
        self.stores.setdefault(replica, set()).add(os.fstat(descriptors[rendezvous.DESCRIPTOR]).st_ino)


@pytest.fixture
def spawned(tmp_path: Path) -> Iterator[Spawned]:
    """What a launcher of two replicas of two ranks has started."""
    layout = Layout(tp=1, pp=2)
    job = Job(argv=("train.py",), num_replicas=2, layout=layout, config=RecoverConfig(), run_dir=tmp_path)
    made, sealed = Spawned(), keys.sealed(keys.make_key())
    recording: Any = SimpleNamespace(descriptors=lambda *_: {}, output_of_rank=lambda *_: None)
    starting = Starting(
        job, Seats(job), made, recording, coordinator=lambda: "127.0.0.1:1", handed_down={keys.DESCRIPTOR: sealed},
        started=lambda replica, rank: None, started_at=0.0, patience_s=1.0,
    )  # fmt: skip
    starting.may_start(Launch(starting.listen().leaders))
    starting.ranks()
    yield made
    os.close(sealed)


def test_a_node_without_ranks_may_go_on_too() -> None:
    nothing: Any = None
    starting = Starting(
        nothing, nothing, nothing, nothing, coordinator=str, handed_down={}, started=lambda *_: None, started_at=0.0,
        patience_s=1.0,
    )  # fmt: skip
    assert not starting.is_allowed
    starting.may_start(Launch(()))
    assert starting.is_allowed, "it leads no replica, so it gets no address"


@pytest.mark.parametrize(("below_min", "waits"), [("end", False), ("wait", True)])
def test_the_coordinator_is_told_whether_a_job_with_too_few_replicas_waits(
    below_min: Literal["end", "wait"], waits: bool, tmp_path: Path
) -> None:
    config = RecoverConfig(min_replicas=2, below_min=below_min)
    job = Job(argv=("train.py",), num_replicas=2, layout=Layout(tp=1, pp=2), config=config, run_dir=tmp_path)
    nothing: Any = None
    starting = Starting(
        job, Seats(job), nothing, nothing, coordinator=str, handed_down={}, started=lambda *_: None, started_at=0.0,
        patience_s=1.0,
    )  # fmt: skip
    settings = starting.listen().settings
    starting.close()
    assert (settings.min_replicas, settings.waits_for_newcomers) == (2, waits)
    assert RecoverConfig().below_min != "wait", "it ends by default"


def test_a_stranger_cannot_take_the_ports_of_a_replica_that_starts(spawned: Spawned) -> None:
    """Two sockets with SO_REUSEADDR may be bound to one port until one listens: the rank found its port taken, and ended."""
    assert spawned.taken == []


def test_rank_0_inherits_the_sockets_that_listen_and_nobody_else_keeps_them(spawned: Spawned) -> None:
    """A copy that is left open would keep a dead leader's port answering: its ranks and the others would wait for it."""
    assert spawned.handed_down == {
        (replica, rank): spawned.expected[replica] if rank == 0 else {} for replica in range(2) for rank in range(2)
    }
    ports = [int(each.rpartition(":")[2]) for replica in spawned.expected.values() for each in replica.values()]
    assert len(set(ports)) == 2 and all(can_be_taken(port) for port in ports)


def test_the_ranks_of_a_replica_inherit_one_store_and_other_replicas_another(spawned: Spawned) -> None:
    assert [len(files) for files in spawned.stores.values()] == [1, 1] and spawned.stores[0].isdisjoint(spawned.stores[1])
