"""Joining a job of several nodes: a node finds its address, and waits until all nodes are there.

The node that owns the endpoint starts the coordinator. `cluster/meeting.py` has the decisions.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from megatron_recover.cluster import endpoint_file
from megatron_recover.cluster.meeting import Meeting, owns_endpoint
from megatron_recover.cluster.membership import CoordinatorProcess, Joined, Membership, new_identity
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import Idle, JobEnds, Met, NodeFailed, NodeHello
from megatron_recover.control_plane.nodes_driver import NodesSettings
from megatron_recover.control_plane.wire import Message
from megatron_recover.core.values import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.host import reachable
from megatron_recover.host.addresses import format_address, host_name
from megatron_recover.trace import Level, node_clock, ring
from megatron_recover.trace.node_clock import NodeClock

_TURN_S = 0.1


class NotMet(Exception):
    """The job ends before it has begun, on all nodes."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class Place:
    """The part of this node in a job of several nodes, from its launch line to `Met`."""

    def __init__(self, meeting: Meeting, deadlines: Deadlines) -> None:
        """Find this node's address, and whether it owns the endpoint.

        Raises ValueError with the remedy.
        """
        self._meeting, self._deadlines = meeting, deadlines.with_node(meeting.node_s)
        self._file = meeting.endpoint_file
        if self._file is not None and endpoint_file.claim(self._file):
            self.address = self._bound = reachable.own_address(interface=meeting.interface, local_addr=meeting.local_addr)
            self._endpoint: tuple[str, ...] = (self.address,)
            self.may_own = True
            return
        if self._file is not None:
            host, port = endpoint_file.await_address(self._file, meeting.join_s)
            meeting = self._meeting = msgspec.structs.replace(meeting, host=host, port=port, is_host=False)
        self._endpoint = reachable.resolve(meeting.host, meeting.flag)
        self.address = reachable.node_address(
            (meeting.host, meeting.port), flag=meeting.flag, interface=meeting.interface, local_addr=meeting.local_addr
        )
        """Address at which the processes of this node listen."""
        mine = {self.address, *(each for addresses in reachable.interfaces().values() for each in addresses)}
        self.may_own = owns_endpoint(meeting, endpoint_addresses=self._endpoint, my_addresses=mine, my_host_name=host_name())
        """True if this node owns the endpoint, unless another one listens there already."""
        self._bound = next((each for each in self._endpoint if each in mine or reachable.is_loopback(each)), self.address)

    def join(
        self,
        *,
        key: bytes,
        level: Level,
        slots: int,
        run_dir: Callable[[], Path],
        run_id: str,
        alike: Sequence[tuple[str, str]],
        ignored: tuple[int, ...],
    ) -> Joined:
        """Wait for the other nodes; return the job's place of this one.

        `run_dir()` makes the run directory; it is called only where this node owns the endpoint.
        `ignored`: the signals that agents handle. Raises `NotMet` if the job ends before, OSError
        and ValueError with the remedy.
        """
        identity, loop = new_identity(), Loop()
        clock_memory = node_clock.create(slots)
        clock = NodeClock(clock_memory)
        coordinator, events = self._own(identity, key, level, ignored, clock_memory) or (None, None)
        folder = "" if coordinator is None else str(run_dir())
        hello = NodeHello(
            identity, host_name(), slots, node_rank=self._meeting.node_rank, run_dir=folder, run_id=run_id,
            alike=tuple(alike), address=self.address,
        )  # fmt: skip
        if coordinator is not None and self._file is not None:
            endpoint_file.publish(self._file, coordinator.address)
        where = format_address(self._endpoint[0], self._meeting.port) if coordinator is None else coordinator.address
        membership = Membership(
            where, hello, key=key, clock=clock, loop=loop, deadlines=self._deadlines,
            patience_s=self._meeting.join_s,
        )  # fmt: skip
        joined = Joined(membership, loop, key, clock, clock_memory, coordinator, events)
        met = self._wait(joined, where)
        return joined._replace(met=met)

    def _own(
        self, identity: int, key: bytes, level: Level, ignored: tuple[int, ...], clock: int
    ) -> tuple[CoordinatorProcess, int] | None:
        """Start the coordinator, if this node owns the endpoint; return also its ring of events."""
        if not self.may_own:
            return None
        meeting = self._meeting
        settings = NodesSettings(
            owner=identity, least=meeting.least_nodes, most=meeting.most_nodes, join_s=meeting.join_s,
            last_call_s=meeting.last_call_s, node_silence_s=meeting.node_s,
            deadlines=self._deadlines, ignored=ignored,
        )  # fmt: skip
        events = ring.create(level=level)
        address = format_address(self._bound, meeting.port)
        try:
            process = CoordinatorProcess(settings, key, events=events, clock=clock, address=address, ports=meeting.ports)
            return process, events
        except OSError as error:
            if error.errno == errno.EADDRINUSE and meeting.node_rank is None and reachable.is_loopback(self._bound):
                return None  # all nodes are on this machine, and another one was first
            raise ValueError(
                f"{meeting.flag}: nothing can listen at {address} on node {host_name()} ({error.strerror}); give another port, "
                "the same on all nodes, and each node its own --node-rank"
            ) from error

    def _wait(self, joined: Joined, where: str) -> Met:
        """Return the coordinator's `Met`. Raises `NotMet`."""
        met: list[Met] = []
        ends: list[JobEnds] = []
        lost: list[str] = []

        def take(message: Message) -> None:
            match message:
                case Met():
                    met.append(message)
                case JobEnds():
                    ends.append(message)
                case Idle(reason):
                    _say(f"{reason}: this node waits for the end of the job")

        meeting = self._meeting
        count = (
            f"{meeting.least_nodes}"
            if meeting.least_nodes == meeting.most_nodes
            else (f"{meeting.least_nodes} to {meeting.most_nodes}")
        )
        _say(f"node {host_name()} ({self.address}) meets the others at {where}: {count} nodes")
        joined.membership.handle(take, lost.append)
        while not met:
            joined.loop.run_once(_TURN_S)
            if ends:
                self._hang_up(joined)
                raise NotMet(ends[0].exit_code, ends[0].reason)
            if joined.membership.refusal:
                self._hang_up(joined)
                raise NotMet(
                    ExitCode.BAD_INPUT,
                    f"at {where}: {joined.membership.refusal}; give the same --key-file (or MEGATRON_RECOVER_KEY) on all nodes",
                )
            if lost:
                self._hang_up(joined)
                raise NotMet(
                    ExitCode.TOO_FEW_REPLICAS,
                    f"no coordinator was at {where} for {meeting.join_s} s ({lost[0]}); give the same endpoint on all "
                    "nodes, and start the one that owns it",
                )
        return met[0]

    def _hang_up(self, joined: Joined) -> None:
        joined.close(self._deadlines)
        joined.loop.close()


def refuse(joined: Joined, reason: str, deadlines: Deadlines) -> None:
    """Tell the coordinator that this node cannot take part, which ends the job on all nodes."""
    joined.membership.send(NodeFailed(ExitCode.BAD_INPUT, reason))
    joined.close(deadlines)
    joined.loop.close()


def flags_alike(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a script as pairs of name and value, to be compared between nodes."""
    name, words = "", list[str]()
    for word in [*flags, "--"]:
        if word.startswith("--"):
            if name or words:
                yield name or "the words before the first flag", " ".join(words) or "given"
            name, words = word, []
        else:
            words.append(word)


def _say(text: str) -> None:
    print(f"megatron-recover run: {text}", file=sys.stderr, flush=True)
