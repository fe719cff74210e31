"""The start of a node's ranks: listening sockets, stores, environments, and the processes.

The dry run is started here too. It is one process that belongs to no replica.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Container, Mapping

import msgspec

from megatron_recover.cluster.agent import descriptors_needed
from megatron_recover.cluster.job import Job, link_logs_of_newcomer, sharing_a_gpu
from megatron_recover.cluster.node import Node
from megatron_recover.cluster.output import Output
from megatron_recover.cluster.recording import Recording
from megatron_recover.cluster.seats import Seats
from megatron_recover.config import CONTEXT_VARIABLE, RankContext
from megatron_recover.control_plane import listening, rendezvous
from megatron_recover.control_plane.node_messages import Launch, NodeReady, StartReplica
from megatron_recover.control_plane.wire import listen
from megatron_recover.core import slots
from megatron_recover.core.coordinator import MembershipSettings
from megatron_recover.host.addresses import ANY_PORT, address_of, format_address, parse_address
from megatron_recover.observe.files import LOGS
from megatron_recover.trace import node_clock

_DRY_RUN = -1
"""Replica number that the agent gets for the dry run, which belongs to no replica."""


class Starting:
    """Starts the processes of one node of a job. Everything runs in the launcher's thread."""

    def __init__(
        self,
        job: Job,
        seats: Seats,
        node: Node,
        recording: Recording,
        *,
        coordinator: Callable[[], str],
        handed_down: Mapping[str, int],
        started: Callable[[int, int], None],
        started_at: float,
        patience_s: float,
    ) -> None:
        """Prepare the start of `job` on `node`.

        `coordinator`: returns its address. `handed_down`: the descriptors that the dry run and
        every rank inherit, by name. `started(replica, rank)` is called for each rank. `started_at`:
        begin of the run by this host's monotonic clock. `patience_s`: as in `slots.Settings`.
        """
        self._job, self._seats, self._node, self._recording = job, seats, node, recording
        self._coordinator, self._started = coordinator, started
        self._handed_down, self._started_at, self._patience_s = handed_down, started_at, patience_s
        self.is_allowed = False
        """True once the ranks may be started."""
        self._leaders: dict[int, str] = {}
        """Replica with ranks here -> address of its leader, once the ranks may be started."""
        self._stores: dict[int, str] = {}
        """Replica with ranks here -> address of its store, if the replica spans nodes."""
        self._listeners: dict[int, dict[str, socket.socket]] = {}
        """Replica -> listening sockets that its rank 0 inherits, by name, until it is started."""
        self.outputs: dict[tuple[int, int], Output] = {}
        """(replica, rank) -> output of each rank that is started."""

    def dry_run(self) -> Output:
        """Start the dry run; return its output."""
        with descriptors_needed():
            output = self._recording.output(self._job.run_dir / LOGS / "dry-run.log")
        environment = self._environment(0, 0, leader=ANY_PORT, dry_run=True)
        self._node.spawn(
            _DRY_RUN, 0, argv=self._job.command, environment=environment, output=output, descriptors=dict(self._handed_down)
        )
        return output

    def listen(self) -> NodeReady:
        """Open the listening sockets of leaders and stores here; return what the node reports."""
        job = self._job
        with descriptors_needed():
            for replica in job.replicas_here:
                if 0 in job.slots(replica):
                    self._listen(replica, spans_nodes=job.spans_nodes(replica))
        membership = MembershipSettings(
            num_replicas=job.num_replicas, min_replicas=job.config.min_replicas, samples=_samples(job),
            least_microbatches=job.least_microbatches, waits_for_newcomers=job.config.below_min == "wait",
            not_healed_by=job.not_healed_by,
        )  # fmt: skip
        leaders, stores = (
            tuple((replica, address_of(sockets[name])) for replica, sockets in self._listeners.items() if name in sockets)
            for name in (listening.LEADER, listening.STORE)
        )
        if job.config.heal == "off":
            return NodeReady(membership, job.replicas_here, leaders, stores)
        healing = slots.Settings(
            backoff_s=job.config.heal_backoff_s, budget=job.config.heal_budget, patience_s=self._patience_s,
            num_ranks=job.num_ranks, tp=job.layout.tp,
        )  # fmt: skip
        seats = tuple((replica, tuple(self._seats.slots(replica).items())) for replica in job.replicas_here)
        return NodeReady(membership, job.replicas_here, leaders, stores, seats, job.spares, healing)

    def _listen(self, replica: int, *, spans_nodes: bool) -> None:
        names = [listening.LEADER, *([listening.STORE] if spans_nodes else [])]
        where = format_address(self._job.address, 0)
        sockets = self._listeners[replica] = {}
        for name in names:
            sockets[name] = listen(where, self._job.ports)

    def listen_for(self, replica: int, *, spans_nodes: bool) -> tuple[str, str]:
        """Open the listening sockets of a newcomer; return the addresses of leader and store.

        Both are empty if its rank 0 is on another node. Raises OSError and `NodeLost`.
        """
        if 0 not in self._seats.slots(replica):
            return "", ""
        with descriptors_needed():
            self._listen(replica, spans_nodes=spans_nodes)
        sockets = self._listeners[replica]
        return address_of(sockets[listening.LEADER]), address_of(sockets[listening.STORE]) if spans_nodes else ""

    def forget(self, replica: int) -> None:
        """Close the listening sockets of a newcomer that is not started."""
        for each in self._listeners.pop(replica, {}).values():
            each.close()

    def may_start(self, launch: Launch) -> None:
        """Note the addresses of leaders and stores: the ranks may be started."""
        self._leaders, self._stores, self.is_allowed = dict(launch.leaders), dict(launch.stores), True

    def ranks(self, but: Container[int] = ()) -> None:
        """Start all ranks of this node, except those of the replicas `but`, which are fenced."""
        for replica in self._job.replicas_here:
            self._start(replica, is_wanted=replica not in but)

    def newcomer(self, told: StartReplica) -> None:
        """Start all ranks of a newcomer on this node.

        Raises OSError and `NodeLost`, perhaps after some ranks were started.
        """
        self._leaders[told.replica] = told.leader
        if told.store:
            self._stores[told.replica] = told.store
        self._start(told.replica)

    def _start(self, replica: int, *, is_wanted: bool = True) -> None:
        # The launcher closes its copies as soon as the ranks are started: a copy would keep the
        # port of a dead leader answering.
        with contextlib.ExitStack() as stack:
            sockets = self._listeners.pop(replica, {})
            for each in sockets.values():
                stack.enter_context(each)
            if is_wanted:
                self._spawn_replica(replica, sockets)

    def close(self) -> None:
        """Close the listening sockets that no rank has inherited."""
        for sockets in self._listeners.values():
            for listener in sockets.values():
                listener.close()

    def _spawn_replica(self, replica: int, sockets: Mapping[str, socket.socket]) -> None:
        """Start this node's ranks of a replica, each with a descriptor of the replica's one store.

        The ranks of a replica that spans nodes get an address of the store instead. Rank 0 also
        gets descriptors of the listening `sockets`.
        """
        if replica in self._stores:
            self._spawn_ranks(replica, sockets, {})
            return
        with descriptors_needed():
            store = rendezvous.create_store()
        try:
            self._spawn_ranks(replica, sockets, {rendezvous.DESCRIPTOR: store})
        finally:
            os.close(store)

    def _spawn_ranks(self, replica: int, sockets: Mapping[str, socket.socket], store: dict[str, int]) -> None:
        job = self._job
        for rank in self._seats.slots(replica):
            environment = self._environment(replica, rank, leader=self._leaders[replica])
            with descriptors_needed():
                handed_down = {**self._handed_down, **store} | self._recording.descriptors(replica, rank)
                output = self.outputs[replica, rank] = self._recording.output_of_rank(
                    replica, rank, self._seats.stands_for(replica, rank)
                )
            if replica >= job.num_replicas:
                link_logs_of_newcomer(job, replica, rank, (output.stdout or output).log)
            if rank == 0:
                handed_down |= {name: each.fileno() for name, each in sockets.items()}
            self._node.spawn(
                replica, rank, argv=job.command, environment=environment, output=output, descriptors=handed_down
            )  # fmt: skip
            self._started(replica, rank)

    def _environment(self, replica: int, rank: int, *, leader: str, dry_run: bool = False) -> dict[str, str]:
        """Return the variables that a rank's process gets beside the inherited environment.

        `dry_run`: the process is the dry run, which gets no faults.
        """
        job = self._job
        mine = tuple(
            msgspec.json.encode(fault).decode() for fault in job.faults if (fault.replica, fault.rank) == (replica, rank)
        )
        place, shared = job.place_of(replica, rank), job.config.ranks_per_gpu
        slot = 0 if dry_run else self._seats.slots(replica)[rank]
        context = RankContext(
            replica=replica, rank=rank, num_ranks=job.num_ranks, num_replicas=job.num_replicas,
            coordinator=self._coordinator(), leader=leader, store=self._stores.get(replica, ""),
            run_dir=str(job.run_dir),
            started_at=self._started_at, faults=() if dry_run else mine, gpu=slot // shared,
            numa_binding=job.numa_binding, clock_place=node_clock.FIRST_RANK + slot, node_s=job.node_s, dry_run=dry_run,
            newcomer=replica >= job.num_replicas,
            address=job.address, ports=job.ports,
        )  # fmt: skip
        # RANK and WORLD_SIZE are those of the replica's own world. LOCAL_RANK picks a device of
        # this node, which the replicas share. MASTER_* are for scripts that read these variables:
        # torch's rendezvous is not used, and the port is occupied.
        host, port = parse_address(leader)
        return (sharing_a_gpu(place) if shared > 1 else {}) | {
            CONTEXT_VARIABLE: msgspec.json.encode(context).decode(),
            "RANK": str(rank),
            "WORLD_SIZE": str(job.num_ranks),
            "LOCAL_RANK": str(context.gpu),
            "LOCAL_WORLD_SIZE": str(job.num_ranks_here or job.num_slots_here),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            # What torchrun tells of its nodes and restarts: nobody is ever restarted.
            "GROUP_RANK": str(job.node),
            "GROUP_WORLD_SIZE": str(max(1, len(job.nodes))),
            "ROLE_NAME": job.streams.role,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(job.num_ranks),
            "TORCHELASTIC_RUN_ID": job.run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # For scripts that want to know their place in the job.
            "MEGATRON_RECOVER_REPLICA": str(replica),
            "MEGATRON_RECOVER_REPLICAS": str(job.num_replicas),
            "MEGATRON_RECOVER_GLOBAL_RANK": str(place),
        }


def _samples(job: Job) -> tuple[int, int] | None:
    """Return the samples of a training step and of a microbatch; None unless both are known."""
    if job.num_microbatches is None or job.microbatch_samples is None:
        return None
    return job.num_microbatches * job.microbatch_samples, job.microbatch_samples
