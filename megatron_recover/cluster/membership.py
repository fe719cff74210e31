"""An agent's side of the coordinator: its process, if this node starts it, and the link to it.

The coordinator decides, and the agent carries out. If the coordinator is lost, the ranks go on to
the next save point and end there by themselves.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from megatron_recover.authentication import key as keys
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.cluster.meeting import JOIN_S
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.config import inherited_environment, module_command
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.job_start import NodesSettings
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import Idle, Met, NodeBeat, NodeHello, OtherJob
from megatron_recover.control_plane.node_watch import PREPARING_SILENCES
from megatron_recover.control_plane.wire import Link, LinkClosed, Message, listen
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import ANY_PORT, Ports, address_of, host_name
from megatron_recover.trace import Level, ring
from megatron_recover.trace.node_clock import NodeClock

LOOK_THERE = "look at its node: unless the job goes on there without this node, start all nodes again"
"""Advice after the end of a start for the silence of the coordinator."""
_TURN_S = 0.05
_PAUSE_S = 0.2
_TRY_S = 2.0
"""Seconds for the first try at each of several addresses. Each further round takes twice as long as
the one before, in case the coordinator is slow to answer."""
_LONGEST_TRY_S = 16.0
"""Seconds for the longest of these tries. A longer one would find a coordinator late that begins to
listen meanwhile at another address."""


def new_identity() -> int:
    """Return a new random number by which a coordinator knows an agent."""
    return secrets.randbits(63)


class CoordinatorProcess:
    """The process of the coordinator, which this node has started."""

    def __init__(
        self,
        settings: NodesSettings,
        key: bytes,
        *,
        events: int,
        clock: int,
        addresses: Sequence[str] = (ANY_PORT,),
        ports: Ports | None = None,
    ) -> None:
        """Listen at `addresses`, all with one port, and start the process.

        A single address may have port 0, which stands for one of `ports`.

        `events`: the descriptor of its ring. `clock`: that of this node's clock.

        Raises OSError if an address cannot be used, or no process can be started.
        """
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(listen(each, ports)) for each in addresses]
            self.address = address_of(listeners[0])
            """Address (host:port) of the coordinator."""
            sealed = keys.sealed(key)
            listening = [each.fileno() for each in listeners]
            descriptors = (sealed, *listening, events, clock)
            command = [
                *module_command("megatron_recover.cluster.coordinator"), str(sealed), ",".join(map(str, listening)),
                str(events), str(clock), msgspec.json.encode(settings).decode(),
            ]  # fmt: skip
            try:
                self.process = subprocess.Popen(
                    command, env=inherited_environment(), stdin=subprocess.DEVNULL, start_new_session=True,
                    pass_fds=descriptors,
                )  # fmt: skip
            finally:
                os.close(sealed)

    def close(self, wait_s: float) -> None:
        """Wait for the end of the process for at most `wait_s`, and leave it to itself then."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.returncode = 0  # other nodes may still need it: no warning, and no child is waited for


class Membership:
    """The link of an agent to the coordinator of the job. One thread uses it."""

    def __init__(
        self,
        address: str,
        hello: NodeHello,
        *,
        key: bytes,
        clock: NodeClock,
        loop: Loop,
        deadlines: Deadlines,
        patience_s: float,
        others: Sequence[str] = (),
    ) -> None:
        """Begin to connect to the coordinator at `address`, for at most `patience_s`, and greet it.

        Until then a connection that fails is made anew: the coordinator may not listen yet. If
        `others` has further addresses that may be the coordinator's, all are tried in turn.
        """
        self.address = address
        """Address (host:port) at which leaders reach the coordinator, too, once it is known."""
        self._addresses, self._num_tries = (address, *others), 0
        self.is_lost = False
        """True once the link has ended."""
        self._loop, self._deadlines = loop, deadlines
        self._on_message: Callable[[Message], None] = lambda message: None
        self._on_lost: Callable[[str], None] = lambda why: None
        self._waiting: list[Message] = []
        self._is_handled = False
        self._why = ""
        self._heard_at = loop.time()
        self._hello, self._key, self._clock = hello, key, clock
        self._patience_s, self._give_up_at = patience_s, loop.time() + patience_s
        self.is_known = False
        """True once the coordinator has been heard: it has proven itself."""
        self.has_given_up = False
        """True once this node ended before its ranks started, and the coordinator was silent. A
        coordinator of this node is then killed. Another node does not know how the job ends."""
        self._link: OutgoingLink | None = None
        self._connect()
        loop.after(deadlines.beat_s, self._beat)

    def handle(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        """Deliver the coordinator's messages, those that have come already first.

        `on_lost(why)` is called once if the link ends.
        """
        self._on_message, self._on_lost, self._is_handled = on_message, on_lost, True
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            on_message(message)
        if self.is_lost:
            on_lost(self._why)

    def send(self, message: Message) -> None:
        """Send a message to the coordinator; nothing happens if it is lost."""
        if self._link is not None:
            self._loop.send(self._link, message)

    @property
    def is_calling(self) -> bool:
        """Return whether there is a link, or one that may still be made: nobody has refused it."""
        return self._link is not None

    @property
    def refusal(self) -> str:
        """Return why the process at the address is not this job's coordinator, if it is not.

        Empty until each of several addresses was tried: one of them may be that of another job.
        """
        return self._link.refusal if self._link is not None and self._num_tries >= len(self._addresses) - 1 else ""

    def silent_s(self) -> float:
        """Return the seconds since the coordinator was heard last."""
        return self._loop.time() - self._heard_at

    @property
    def silence(self) -> str:
        """Return why the coordinator is awaited no longer before ranks start; empty while it is.

        It is stopped, or its node is lost. With ranks, `CoordinatorLoss` decides that.
        """
        silent_s = self.silent_s()
        if silent_s < PREPARING_SILENCES * self._deadlines.node_s:
            return ""
        return (
            f"nothing was heard of the coordinator at {self.address} for {silent_s:.0f} s before training began; {LOOK_THERE}"
        )

    def note_silence(self) -> None:
        """Note, before this node ends without ranks, whether the coordinator is silent."""
        self.has_given_up = self.silent_s() >= self._deadlines.node_s

    def greet_anew(self) -> None:
        """Introduce this node under a new identity, over a new link.

        The coordinator had given the former one a number, and has lost that node since.
        """
        self._hello = msgspec.structs.replace(self._hello, identity=new_identity())
        if self._link is not None:
            self._loop.drop(self._link)
        self._connect()

    def listen_anew(self) -> None:
        """Count the silence from now: the thread waited elsewhere, and has read nothing."""
        self._heard_at = self._loop.time()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Serve the link in a thread of its own, while this one does other things for long.

        Nothing else may use the loop meanwhile. Messages wait for the next `handle`.
        """
        self._is_handled = False
        is_over = threading.Event()

        def serve() -> None:
            self._loop.waited_elsewhere()
            while not is_over.is_set():
                self._loop.run_once(_TURN_S)

        with ThreadPoolExecutor(1, thread_name_prefix="membership") as pool:
            serving = pool.submit(serve)
            try:
                yield
            finally:
                is_over.set()
        serving.result()
        self._loop.waited_elsewhere()

    def beat(self) -> None:
        """Send a sign of life, if the coordinator reads."""
        link = self._link
        if link is not None and link.proven and not link.wants_write:
            self.send(NodeBeat())

    def close(self) -> None:
        """Send what is queued, within `words_s`, and hang up."""
        until = self._loop.time() + self._deadlines.words_s
        while self._link is not None and self._link.wants_write and not self.is_lost and self._loop.time() < until:
            self._loop.run_once(_TURN_S)
        if self._link is not None:
            self._loop.drop(self._link)
        self.is_lost = True

    def _connect(self) -> None:
        if self.is_lost:
            return
        num_rounds, number = divmod(self._num_tries, len(self._addresses))
        self.address = self._addresses[number]
        patience_s = self._give_up_at - self._loop.time()
        if len(self._addresses) > 1:
            patience_s = min(patience_s, _LONGEST_TRY_S, _TRY_S * 2 ** min(num_rounds, 10))
        try:
            link = self._link = OutgoingLink(
                self.address, self._key, Party(Role.AGENT), Party(Role.COORDINATOR),
                clock=self._clock, patience_s=patience_s,
            )  # fmt: skip
        except LinkClosed as closed:
            if self.is_known:  # refused at once
                self._lose(self._why)
            else:
                self._connect_later(str(closed))
            return
        self._loop.watch(link, self._received, self._ended)
        self.send(self._hello)
        if len(self._addresses) > 1:
            self._loop.after(patience_s, lambda: self._leave(link))

    def _leave(self, link: OutgoingLink) -> None:
        """Turn to the next address if nothing has answered at that of `link`."""
        if self._link is link and not link.proven and not self.is_lost:
            self._loop.drop(link)
            self._connect_later(f"nothing answered at {self.address}")

    def _connect_later(self, why: str) -> None:
        """Try again after a pause, at the next address; give up after the coordinator's time."""
        self._link = None
        self._num_tries += 1
        if self._loop.time() < self._give_up_at:
            self._loop.after(_PAUSE_S, self._connect)
        else:
            self._lose(why)

    def _received(self, link: Link, message: Message) -> None:
        self._heard_at, self.is_known = self._loop.time(), True
        match message:
            case NodeBeat():
                return
            case OtherJob():
                self._loop.drop(link)
                self._link = None
                self._lose("another job has begun at its address")
                return
            case Met() | Idle():
                self._hello = msgspec.structs.replace(self._hello, job=message.job)
        if self._is_handled:
            self._on_message(message)
        else:
            self._waiting.append(message)

    def _ended(self, link: Link, why: str) -> None:
        """Connect again after the end of a link; give up if nobody listens there any more.

        A connection may break although both ends live. The coordinator has then removed this node,
        and fences its ranks once the node is back.
        """
        assert self._link is not None
        if self._link.proven:
            self._addresses = (self.address,)
            patience_s = min(self._patience_s, JOIN_S)  # a longer one is for jobs in a queue, not for this
            self._why, self._give_up_at, self.is_known = why, self._loop.time() + patience_s, True
            self._connect()
        elif self.is_known and self._link.is_refused:
            self._lose(self._why)
        else:
            self._connect_later(why)

    def _lose(self, why: str) -> None:
        self.is_lost, self._why = True, why
        if self._is_handled:
            self._on_lost(why)

    def _beat(self) -> None:
        if not self.is_lost:
            self._loop.after(self._deadlines.beat_s, self._beat)
            self.beat()


class Joined(NamedTuple):
    """A node's place in a job: everything that it needs to run its part."""

    membership: Membership
    loop: Loop
    key: bytes
    clock: NodeClock
    clock_memory: int
    """Descriptor of the memory of that clock, which the processes of this node share."""
    coordinator: CoordinatorProcess | None = None
    """The coordinator's process, if this node has started it."""
    events: int | None = None
    """Descriptor of the ring in which that process records."""
    met: Met | None = None
    request: EndRequest | None = None
    """The request to end the job, with the signals that came while the nodes met."""

    def close(self, deadlines: Deadlines, *, tells_s: float = 0.0) -> None:
        """Hang up. Wait for a coordinator of this node that no other node needs.

        It ends with its last agent, or `tells_s` later if it has refused the job. A coordinator
        that was given up for its silence may be stopped, and would never end by itself.
        """
        self.membership.close()
        if self.coordinator is not None:
            has_given_up = self.membership.has_given_up
            if has_given_up:
                self.coordinator.process.kill()
            is_needed = self.met is not None and len(self.met.nodes) > 1 and not has_given_up
            self.coordinator.close(0.0 if is_needed else tells_s + deadlines.words_s)


def alone(
    key: bytes,
    *,
    clock: NodeClock,
    clock_memory: int,
    loop: Loop,
    deadlines: Deadlines,
    level: Level,
    slots: int,
    run_id: str,
    ignored: tuple[int, ...],
) -> Joined:
    """Start a coordinator for a job of this node alone, and connect to it.

    Raises OSError.
    """
    events = ring.create(level=level)
    identity = new_identity()
    settings = NodesSettings(
        owner=identity, least=1, most=1, join_s=deadlines.deadline_s, last_call_s=0.0, node_silence_s=deadlines.deadline_s,
        deadlines=deadlines, ignored=ignored,
    )  # fmt: skip
    coordinator = CoordinatorProcess(settings, key, events=events, clock=clock_memory)
    hello = NodeHello(identity, host_name(), slots, run_id=run_id)
    membership = Membership(
        coordinator.address, hello, key=key, clock=clock, loop=loop, deadlines=deadlines, patience_s=deadlines.leader_s
    )  # fmt: skip
    return Joined(membership, loop, key, clock, clock_memory, coordinator, events)
