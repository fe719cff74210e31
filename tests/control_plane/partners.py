"""Ends of the control plane that a test plays, and a data plane that only notes what is asked of it."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from megatron_recover.authentication.frame_macs import FrameMacs
from megatron_recover.authentication.handshake import KEY_BYTES, Party, Role, SessionKeys
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.coordinator_driver import CoordinatorDriver
from megatron_recover.control_plane.gate import Gate
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import FORMAT_VERSION, Link, Message, listen
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import address_of
from megatron_recover.trace.node_clock import NodeClock

KEY = b"k" * KEY_BYTES
"""The job's key in tests that start no launcher."""
PATIENCE_S = 60.0
KEYS = SessionKeys(b"a" * KEY_BYTES, b"b" * KEY_BYTES)
"""Session keys of connections that begin without a handshake, as the end under test uses them."""


def connected() -> tuple[Link, Link]:
    """Both ends of a connection that began without a handshake."""
    ours, theirs = socket.socketpair()
    return Link(ours, KEYS, NodeClock(None)), Link(theirs, KEYS.of_other_end, NodeClock(None))


def framed(*bodies: bytes) -> bytes:
    """The first frames that the other end sends, with these bodies, whatever they are."""
    sending, frames = FrameMacs(KEYS.receiving), b""
    for body in bodies:
        header = struct.pack("!2sHIQ", b"mr", FORMAT_VERSION, len(body), 0)
        frames += header + sending.mac(header, body) + body
    return frames


def call(address: str, me: Party, peer: Party, key: bytes = KEY, patience_s: float = 10.0) -> OutgoingLink:
    """A link that proves itself as `me` to `peer`."""
    return OutgoingLink(address, key, me, peer, clock=NodeClock(None), patience_s=patience_s)


def gate_of(driver: CoordinatorDriver, loop: Loop) -> tuple[Gate, str]:
    """The port at which leaders reach a coordinator without nodes, and its address."""
    listener = listen("127.0.0.1:0")
    gate = Gate(
        loop, listener, KEY, Role.COORDINATOR,
        lambda peer, wanted: driver.admits(peer) and wanted == Party(Role.COORDINATOR), driver.accept,
        clock=NodeClock(None), expects=lambda: not driver.generation, report=lambda name, number: None,
    )  # fmt: skip
    return gate, address_of(listener)


class FakeTransport:
    def __init__(self, generation: int, seen: list[str]) -> None:
        self.generation, self.seen = generation, seen

    def revoke(self) -> None:
        self.seen.append(f"revoke {self.generation}")

    def close(self) -> None:
        self.seen.append(f"close {self.generation}")


def within(seconds: float) -> Deadlines:
    """Deadlines of which each part of a sum may last so long."""
    parts = dict.fromkeys(("connect_s", "slowest_s", "sum_s"), seconds)
    return replace(Deadlines.of(), probe_s=min(2.0, seconds / 4), **parts)


class FakeEndpoint:
    address = "fake:1"
    deadlines: Deadlines | None = None

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def open(self, generation: int, me: int, addresses: Mapping[int, str]) -> FakeTransport:
        self.seen.append(f"open {generation} {me} {dict(addresses)}")
        return FakeTransport(generation, self.seen)

    def close(self) -> None:
        self.seen.append("endpoint closed")


class Partner:
    """A listening end of the wire that the test plays, in the test's own thread, under every name that a caller wants."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.loop = Loop()
        listener = listen(address)
        self.address = address_of(listener)
        self.received: list[Message] = []
        self.closed = False
        self.link: Link | None = None
        self.greeted: list[Party] = []
        """Who has proven itself."""
        self.gate = Gate(
            self.loop,
            listener,
            KEY,
            Role.LEADER,
            lambda peer, wanted: True,
            self._accepted,
            clock=NodeClock(None),
            expects=lambda: True,
            report=lambda name, number: None,
        )

    def _accepted(self, link: Link, peer: Party) -> None:
        self.link = link
        self.greeted.append(peer)
        self.loop.watch(link, lambda link, message: self.received.append(message), self._lost)

    def _lost(self, link: Link, why: str) -> None:
        self.closed = True

    def send(self, *messages: Message) -> None:
        assert self.link is not None
        for message in messages:
            self.loop.send(self.link, message)

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"waited in vain; received so far: {self.received}"
            self.loop.run_once(0.01)

    def expect(self, *messages: Message) -> None:
        """Wait for exactly these messages, in this order."""
        self.wait(lambda: len(self.received) >= len(messages))
        assert tuple(self.received) == messages
        self.received.clear()

    def close(self) -> None:
        self.gate.close()
        self.loop.close()
