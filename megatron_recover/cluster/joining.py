"""Joining a job of several nodes: a node finds its address, and waits until all nodes are there.

The node that owns the endpoint starts the coordinator. `cluster/meeting.py` has the decisions.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from megatron_recover.authentication.handshake import OTHER_PROTOCOL
from megatron_recover.cluster import endpoint_file
from megatron_recover.cluster.meeting import (
    JOIN_S,
    MISSING_JOBS,
    MISSING_NODES,
    Meeting,
    addresses_of,
    listened_at,
    only_here,
    owns_endpoint,
)
from megatron_recover.cluster.membership import LOOK_THERE, CoordinatorProcess, Joined, Membership, new_identity
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.control_plane.job_start import NodesSettings
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    EndAsked,
    GivesUp,
    Idle,
    JobEnds,
    Met,
    NodeFailed,
    NodeHello,
    StartAnew,
)
from megatron_recover.control_plane.node_watch import PREPARING_SILENCES
from megatron_recover.control_plane.nodes_driver import TELL_S
from megatron_recover.control_plane.wire import Message
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.host import reachable
from megatron_recover.host.addresses import format_address, host_name
from megatron_recover.host.in_use import InUse
from megatron_recover.trace import Level, node_clock, ring
from megatron_recover.trace.node_clock import NodeClock

_TURN_S = 0.1
_ANSWER_S = 5.0
"""Longest wait for the coordinator's answer to a signal, in seconds."""


class NotMet(Exception):
    """This node has no part in the job, which may go on or begin without it."""

    def __init__(self, exit_code: int, reason: str, *, stops: bool = False) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.stops = stops or exit_code == ExitCode.BAD_INPUT
        """True if the next start of a chain would end alike, so that a person has to look first."""
        self.is_of_owner = False
        """True on the node with the coordinator, which alone knows whether the reason may pass by
        itself. A coordinator that refuses this node is another job's, or it has another key."""


class Place:
    """The part of this node in a job of several nodes, from its launch line to `Met`."""

    def __init__(self, meeting: Meeting, deadlines: Deadlines, request: EndRequest, *, may_claim: bool = True) -> None:
        """Find this node's address, and whether it owns the endpoint.

        `request` keeps the signals to this process. `may_claim`: this node may become the owner of
        a file in which nodes find the endpoint. Raises ValueError with the remedy, and `NotMet` if
        a signal comes first, or the owner of that file writes no address.
        """
        self._meeting, self._deadlines, self._request = meeting, deadlines.with_node(meeting.node_s), request
        self._file = meeting.endpoint_file
        self._dial_s = meeting.join_s
        """Seconds for which this node tries to reach a coordinator."""
        if may_claim and (mine := self._claim()):
            self.address = mine
            self._endpoint: tuple[str, ...] = (self.address,)
            self._listened: tuple[str, ...] = self._endpoint
            self._is_here = True
            self.may_own = True
            return
        if self._file is not None:
            _say(f"node {host_name()} waits for the address of the endpoint in {self._file}")
            self._dial_s = min(meeting.join_s, JOIN_S)  # a longer one is for jobs in a queue; the owner is there already
            try:
                found = endpoint_file.await_address(self._file, self._dial_s, lambda: request.kept)
            except endpoint_file.NoAddress as error:
                raise NotMet(ExitCode.TOO_FEW_REPLICAS, str(error)) from None
            except endpoint_file.OwnerRefused as error:
                raise NotMet(ExitCode.BAD_INPUT, str(error)) from None
            if found is None:
                raise NotMet(ExitCode.INTERRUPTED, self._interrupted())
            host, port = found
            meeting = self._meeting = msgspec.structs.replace(meeting, host=host, port=port, is_host=False)
        self._endpoint, self.address = self._awaited(lambda: addresses_of(meeting))
        """Address at which the processes of this node listen."""
        ours = {self.address, *(each for addresses in reachable.interfaces().values() for each in addresses)}
        self.may_own = owns_endpoint(meeting, endpoint_addresses=self._endpoint, my_addresses=ours, my_host_name=host_name())
        """True if this node owns the endpoint, unless another one listens there already."""
        here = [each for each in self._endpoint if each in ours or reachable.is_loopback(each)]
        self._is_here = bool(here)
        """True if the endpoint is an address of this node."""
        self._listened = listened_at(meeting, here, self.address)

    def _awaited[T](self, look: Callable[[], T]) -> T:
        """Return what `look` finds by names, once these resolve (`reachable.in_time`).

        Raises `NotMet` if a signal comes first.
        """
        found = reachable.in_time(look, self._dial_s, lambda: self._request.kept, _say)
        if found is None:
            raise NotMet(ExitCode.INTERRUPTED, self._interrupted())
        return found

    def _interrupted(self) -> str:
        return f"{self._request.kept} before training began; no other node knows of this one"

    def _claim(self) -> str:
        """Return the address of this node if it owns the endpoint of a file from now on; else "".

        The address comes first. Without one this node could never write it, and others would wait.
        """
        if self._file is None or self._meeting.is_host is False or os.path.lexists(endpoint_file.owner_file(self._file)):
            return ""
        meeting = self._meeting
        address = self._awaited(
            lambda: reachable.own_address(interface=meeting.interface, local_addr=meeting.local_addr)
        )  # fmt: skip
        return address if endpoint_file.claim(self._file) else ""

    def join(
        self,
        *,
        key: bytes,
        level: Level,
        slots: int,
        run_dir: Callable[[], Path],
        run_id: str,
        alike: Sequence[tuple[str, str]],
    ) -> Joined:
        """Wait for the other nodes; return the job's place of this one.

        `run_dir()` makes the run directory; it is called only where this node owns the endpoint.
        Raises `NotMet` if the job ends before, OSError and ValueError with the remedy. Those that
        this node finds here are told to the other nodes.
        """
        hello = NodeHello(
            new_identity(), host_name(), slots, node_rank=self._meeting.node_rank, run_id=run_id,
            alike=tuple(alike), address=self.address,
        )  # fmt: skip
        return self._meet(hello, key, level, run_dir)

    def report(self, mistake: str, key: bytes) -> None:
        """Tell the other nodes, for at most `TELL_S`, why this one can take no part.

        Raises `NotMet` in any case, OSError and ValueError.
        """
        hello = NodeHello(new_identity(), host_name(), 1, mistake=mistake)
        self._meet(hello, key, "faults", Path)

    def _meet(self, hello: NodeHello, key: bytes, level: Level, run_dir: Callable[[], Path]) -> Joined:
        """Introduce this node to the coordinator, and wait for the others; raise as `join` does."""
        loop = Loop()
        clock_memory = node_clock.create(hello.slots)
        clock = NodeClock(clock_memory)
        coordinator, events, failure, is_published = None, None, None, False
        try:
            coordinator, events = self._own(hello.identity, key, level, clock_memory) or (None, None)
            if coordinator is not None:
                if self._file is not None:  # first: what fails from here on is told to the others there
                    endpoint_file.publish(self._file, coordinator.address)
                    is_published = True
                hello = msgspec.structs.replace(hello, run_dir=str(run_dir()))
        except (ValueError, OSError) as error:  # raised below, once the other nodes are told
            if self._file is not None and self.may_own and not is_published:
                with contextlib.suppress(OSError):
                    endpoint_file.refuse(self._file, str(error))
            failure, hello = error, msgspec.structs.replace(hello, mistake=hello.mistake or str(error))
        wheres = [format_address(each, self._meeting.port) for each in self._endpoint]
        if coordinator is not None and self._is_here:  # else another node may own the endpoint, and refuses this one
            wheres = [coordinator.address]
        where = " or ".join(wheres)
        membership = Membership(
            wheres[0], hello, key=key, clock=clock, loop=loop, deadlines=self._deadlines,
            patience_s=self._dial_s, others=wheres[1:],
        )  # fmt: skip
        joined = Joined(membership, loop, key, clock, clock_memory, coordinator, events, request=self._request)
        try:
            return joined._replace(met=self._wait(joined, where, hello.mistake))
        except NotMet as end:
            if failure is not None:
                raise failure from None
            end.is_of_owner = coordinator is not None and not membership.refusal
            raise

    def _own(self, identity: int, key: bytes, level: Level, clock: int) -> tuple[CoordinatorProcess, int] | None:
        """Start the coordinator, if this node owns the endpoint; return also its ring of events."""
        if not self.may_own:
            return None
        meeting = self._meeting
        settings = NodesSettings(
            owner=identity, least=meeting.least_nodes, most=meeting.most_nodes, join_s=meeting.join_s,
            last_call_s=meeting.last_call_s, node_silence_s=meeting.node_s,
            deadlines=self._deadlines, ignored=self._request.numbers,
        )  # fmt: skip
        events = ring.create(level=level)
        addresses = [format_address(each, meeting.port) for each in self._listened]
        try:
            process = CoordinatorProcess(settings, key, events=events, clock=clock, addresses=addresses, ports=meeting.ports)
            return process, events
        except OSError as error:
            is_alone = all(map(reachable.is_loopback, self._listened))
            may_be_other = self._file is None and meeting.node_rank is None and is_alone
            if error.errno == errno.EADDRINUSE and may_be_other:
                return None  # all nodes are on this machine, and another one was first
            refused = InUse if error.errno == errno.EADDRINUSE else ValueError
            raise refused(
                f"{meeting.flag}: nothing can listen at {' and '.join(addresses)} on node {host_name()} ({error.strerror}); "
                "give another port, the same on all nodes, and each node its own --node-rank"
            ) from error

    def _wait(self, joined: Joined, where: str, mistake: str) -> Met:
        """Return the coordinator's `Met`. Raises `NotMet`.

        A signal requests the end of the job on all nodes, and its answer is awaited. A node that
        the job does not use leaves instead. With a `mistake` this node only waits for the end.
        """
        membership, kept = joined.membership, ""
        _say(f"node {host_name()} ({self.address}) {self._purpose(where, mistake)}")
        place = "here, at" if self._is_here else "at"
        heard = _Heard(f"this job already runs {place} {where}" if mistake else "", membership.greet_anew)
        membership.handle(heard.take, heard.lose)
        until = joined.loop.time() + TELL_S if mistake else math.inf
        while heard.met is None or kept:
            joined.loop.run_once(_TURN_S)
            if not kept and (kept := self._request.kept):
                until = min(until, joined.loop.time() + _ANSWER_S)
                if not heard.is_idle:
                    membership.send(EndAsked(kept))
            end = heard.end or self._failure(membership, heard, where)
            if kept and end is None and (heard.is_idle or not membership.is_calling or joined.loop.time() > until):
                membership.has_given_up = not heard.is_idle and membership.silent_s() >= _ANSWER_S
                rest = "the job does not use this node, and goes on" if heard.is_idle else "the coordinator does not answer"
                end = NotMet(ExitCode.INTERRUPTED, f"{kept} before training began on {host_name()}; {rest}")
            end = end or self._silence(membership, where)
            if mistake and (heard.is_idle or joined.loop.time() > until):
                end = end or NotMet(ExitCode.BAD_INPUT, mistake)
            if end is not None:
                self._hang_up(joined)
                raise self._advised(end, too_few=heard.too_few)
        return heard.met

    def _purpose(self, where: str, mistake: str) -> str:
        """Return what this node does at the address of the coordinator."""
        least, most = self._meeting.least_nodes, self._meeting.most_nodes
        if mistake:
            return f"can take no part, and tells the others at {where}, for at most {TELL_S} s"
        only = " (only this machine reaches that address)" if all(map(reachable.is_loopback, self._endpoint)) else ""
        return f"meets the others at {where}{only}: {least if least == most else f'{least} to {most}'} nodes"

    def _failure(self, membership: Membership, heard: _Heard, where: str) -> NotMet | None:
        """Return why this node can meet no others; None while it can."""
        if membership.refusal == OTHER_PROTOCOL:
            remedy = self._remedy("give the address of node 0 and a free port")
            return NotMet(ExitCode.BAD_INPUT, f"something else listens at {where}: {membership.refusal}; {remedy}")
        if membership.refusal:
            remedy = "give the same --key-file (or MEGATRON_RECOVER_KEY) on all nodes"
            remedy += f"; {self._remedy('')}" if self._file is not None else ""
            return NotMet(ExitCode.BAD_INPUT, f"at {where}: {membership.refusal}; {remedy}")
        if heard.gives_up or (heard.is_idle and heard.lost):
            return NotMet(
                ExitCode.FAILED,
                f"the coordinator is gone ({heard.gives_up or heard.lost}); the job did not use this node, and ends at its "
                "next save point; start all nodes again then",
            )
        if heard.lost:
            remedy = self._remedy("give the same endpoint on all nodes, and start the one that owns it")
            return NotMet(
                ExitCode.TOO_FEW_REPLICAS, f"no coordinator was at {where} for {self._dial_s} s ({heard.lost}); {remedy}"
            )
        return None

    def _advised(self, end: NotMet, *, too_few: bool) -> NotMet:
        """Return an end because nodes are missing with what to do about it.

        `too_few`: the coordinator has ended the job because too few nodes came. Where these are
        jobs of an array, the next array would hold its nodes idle as long.
        """
        is_of_array = self._file is not None
        advice = [MISSING_JOBS if is_of_array else MISSING_NODES] if too_few else []
        is_only_here = not is_of_array and all(map(reachable.is_loopback, self._endpoint))
        if end.exit_code == ExitCode.TOO_FEW_REPLICAS and is_only_here:
            advice += only_here(self._meeting)
        return NotMet(end.exit_code, "; ".join((str(end), *advice)), stops=end.stops or (too_few and is_of_array))

    def _remedy(self, otherwise: str) -> str:
        """Return what to change if no coordinator of this job is at the endpoint."""
        meeting, file = self._meeting, self._file
        if file is not None:
            return (
                f"that address is in {file}, which an earlier start may have left: remove {file} and "
                f"{endpoint_file.owner_file(file)}, or give each start a file of its own"
            )
        if meeting.node_rank == 0 and self.may_own and not self._is_here:
            return (
                f"{meeting.host} is no address of this node, which is --node-rank 0; give an address of this node by "
                f"{meeting.flag}"
            )
        return otherwise

    def _silence(self, membership: Membership, where: str) -> NotMet | None:
        """Return why a coordinator that does not answer is awaited no longer; None while it is.

        One that was heard is stopped, or its node is lost. At another address something else
        listens.
        """
        silent_s, limit_s = membership.silent_s(), PREPARING_SILENCES * self._meeting.node_s
        if membership.is_known and silent_s >= limit_s:
            membership.has_given_up = True
            return NotMet(
                ExitCode.FAILED, f"nothing was heard of the coordinator at {where} for {silent_s:.0f} s; {LOOK_THERE}"
            )
        if not membership.is_known and silent_s >= self._dial_s + limit_s:
            membership.has_given_up = True
            return NotMet(
                ExitCode.TOO_FEW_REPLICAS,
                f"what listens at {where} did not answer for {silent_s:.0f} s; "
                f"{self._remedy('give the endpoint of the job on all nodes')}",
            )
        return None

    def _hang_up(self, joined: Joined) -> None:
        if joined.coordinator is not None and not self._is_here:
            joined.coordinator.process.kill()  # no node calls it: the endpoint is elsewhere
        joined.close(self._deadlines, tells_s=TELL_S)
        joined.loop.close()


class _Heard:
    """The messages of the coordinator to a node that waits for others."""

    def __init__(self, if_idle: str = "", greet_anew: Callable[[], None] = lambda: None) -> None:
        """Note what is heard from now on.

        - `if_idle`: what to say of a job that does not use this node; empty: the node waits.
        - `greet_anew()` introduces this node as another one.
        """
        self._if_idle, self._greet_anew = if_idle, greet_anew
        self.met: Met | None = None
        self.end: NotMet | None = None
        self.lost = ""
        """The loss of the coordinator in words."""
        self.gives_up = ""
        """The reason for which the coordinator has left the job to itself; empty if it has not."""
        self.is_idle = False
        self.too_few = False
        """True once the job has ended because too few nodes came."""

    def take(self, message: Message) -> None:
        match message:
            case Met():
                self.met = message
            case JobEnds(exit_code, reason):
                self.end, self.too_few = NotMet(exit_code, reason), message.too_few
            case Idle(reason=reason):
                self.is_idle = True
                _say(self._if_idle or f"{reason}: this node waits for the end of the job, or until it can be a spare")
            case GivesUp(reason):
                self.gives_up = reason
            case StartAnew() if self.met is None:  # `Met` was lost with the link, and its number, too
                self._greet_anew()

    def lose(self, why: str) -> None:
        self.lost = why


def refuse(joined: Joined, reason: str, deadlines: Deadlines, exit_code: int = ExitCode.BAD_INPUT) -> None:
    """Tell the coordinator that this node cannot take part, which ends the job on all nodes.

    `exit_code` is that of all nodes. Bad input would end a chain of jobs, so it is for mistakes.
    """
    joined.membership.send(NodeFailed(exit_code, reason))
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
