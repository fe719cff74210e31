"""Both ends of the control plane with real sockets: who gets in, what strangers cost, what a caller does that was let go."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from megatron_recover.authentication import admission
from megatron_recover.authentication.admission import ACCEPTED_AT_ONCE, UNEXPECTED_AT_ONCE
from megatron_recover.authentication.handshake import KEY_BYTES, Connector, Party, Role
from megatron_recover.control_plane import wire
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.gate import Gate
from megatron_recover.control_plane.leader_messages import PeerHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import FORMAT_VERSION, Link, LinkClosed, listen
from megatron_recover.host.addresses import address_of, format_address, parse_address
from megatron_recover.trace.node_clock import NodeClock
from tests.cluster.strangers import raise_descriptor_limit
from tests.control_plane.partners import KEY, KEYS, PATIENCE_S, call

pytestmark = pytest.mark.timeout(150)

ME, PEER = Party(Role.LEADER, 0), Party(Role.LEADER, 1)


class House:
    """One leader with its gate; callers and strangers are served by the same loop."""

    def __init__(self, *others: str) -> None:
        self.now: float | None = None
        """Seconds of the loop's clock, where a test sets it."""
        self.expects = True
        self.loop = Loop(clock=lambda: time.monotonic() if self.now is None else self.now)
        self.listener = listen("127.0.0.1:0")
        self.address = address_of(self.listener)
        _, port = parse_address(self.address)
        also = [listen(format_address(each, port)) for each in others]
        self.links: list[tuple[Link, Party]] = []
        self.seen: list[object] = []
        self.told: list[int] = []
        """What was reported of strangers."""
        self.gate = Gate(
            self.loop, self.listener, KEY, Role.LEADER, lambda peer, wanted: wanted == ME, self._proven,
            clock=NodeClock(None), expects=lambda: self.expects, report=lambda name, number: self.told.append(number),
            also=also,
        )  # fmt: skip
        self.strangers: list[socket.socket] = []

    def _proven(self, link: Link, peer: Party) -> None:
        self.links.append((link, peer))
        self.loop.watch(link, lambda link, message: self.seen.append(message), lambda link, why: self.seen.append("closed"))

    def stranger(self, text: bytes = b"") -> socket.socket:
        host, port = self.address.split(":")
        self.strangers.append(socket.create_connection((host, int(port))))
        self.strangers[-1].sendall(text)
        return self.strangers[-1]

    def watch(self, link: OutgoingLink, why: list[str] | None = None) -> OutgoingLink:
        ends = [] if why is None else why
        self.loop.watch(link, lambda link, message: None, lambda link, reason: ends.append(reason))
        return link

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"in vain: {what} {self.seen}"
            self.loop.run_once(0.05)

    def close(self) -> None:
        self.gate.close()
        self.loop.close()
        for each in self.strangers:
            each.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def test_messages_then_the_end_and_the_link_is_forgotten(house: House) -> None:
    client = house.watch(call(house.address, PEER, ME))
    house.loop.send(client, PeerHello(3))
    house.until(lambda: house.seen)
    house.loop.drop(client)
    house.loop.send(client, PeerHello(4))
    house.until(lambda: len(house.seen) == 2)
    assert house.seen == [PeerHello(3), "closed"] and [peer for _, peer in house.links] == [PEER]


def test_crowds_at_several_addresses_do_not_push_out_a_peer_that_came_before_them() -> None:
    house = House(*(f"127.0.0.{number}" for number in range(2, 7)))
    _, port = parse_address(house.address)
    with contextlib.ExitStack() as crowd:
        for number in range(1, 7):
            for _ in range(2 * ACCEPTED_AT_ONCE):
                crowd.enter_context(socket.create_connection((f"127.0.0.{number}", port)))
        turned = house.gate.admission
        for turn in range(1, 4):
            assert not turned.turn(lambda peer, wanted: True, expects=1)
            assert len(turned.unproven) <= turn * (ACCEPTED_AT_ONCE + 6)
    house.close()


def test_a_gate_at_several_addresses_admits_who_comes_to_any_and_closes_all() -> None:
    house = House("127.0.0.2", "127.0.0.3")
    _, port = parse_address(house.address)
    for number, host in enumerate(("127.0.0.3", "127.0.0.1", "127.0.0.2"), start=1):
        house.watch(call(format_address(host, port), PEER, ME))
        house.until(lambda: len(house.links) == number, host)  # noqa: B023
    house.expects = False
    house.stranger(b"GET ")
    house.until(lambda: house.gate.admission.rests)
    house.watch(call(format_address("127.0.0.2", port), PEER, ME))
    house.until(lambda: len(house.links) == 4, "after the rest")
    house.close()
    for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))


def test_a_refused_connection_is_a_closed_link(free: str) -> None:
    loop, seen = Loop(), []
    try:
        loop.watch(call(free, PEER, ME), lambda link, message: None, lambda link, why: seen.append(why))
        while not seen:
            loop.run_once(1.0)
    except LinkClosed as closed:
        seen.append(str(closed))
    assert "refused" in seen[0].lower()
    loop.close()


@pytest.mark.parametrize(
    ("key", "me", "wanted"),
    [(bytes(KEY_BYTES), PEER, ME), (KEY, PEER, Party(Role.LEADER, 5)), (KEY, ME, ME)],
    ids=["another key", "meant for another", "itself"],
)
def test_who_proves_nothing_is_let_go_and_never_heard(house: House, key: bytes, me: Party, wanted: Party) -> None:
    why: list[str] = []
    link = house.watch(call(house.address, me, wanted, key, patience_s=0.1), why)
    house.loop.send(link, PeerHello(1))
    house.until(lambda: why)
    assert house.links == [] and house.seen == []


def test_no_message_is_decoded_before_the_peer_is_proven(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"\x81" * 60
    stranger = house.stranger(struct.pack("!2sHI", b"mr", FORMAT_VERSION, len(body)) + body)
    monkeypatch.setattr(wire.Link, "_complete", lambda self: pytest.fail("it was decoded"))
    monkeypatch.setattr(admission, "INTRODUCTION_S", 0.0)
    stranger.settimeout(0.05)
    closed: list[bool] = []

    def is_closed() -> bool:
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            closed.append(stranger.recv(1) == b"")
            return True
        return False

    house.until(is_closed)
    assert house.links == []


def test_a_stranger_costs_no_more_than_a_few_hundred_bytes_however_much_it_sends(house: House) -> None:
    """A11: one call took 445 MB from a stranger. The stranger here sends as fast as the kernel takes it."""
    stranger = house.stranger()
    stranger.setblocking(False)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        sent = 0
        for _ in range(200):
            with contextlib.suppress(BlockingIOError, ConnectionError):
                sent += stranger.send(bytes(2**16))
            house.loop.run_once(0.0)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert sent and peak < 2**18, f"{sent} bytes were sent, {peak} were held (the stranger's own 64 KB included)"
    assert house.links == []


def test_one_call_reads_a_bounded_part_of_a_link() -> None:
    """A11, of a proven peer: the others are served in between, and a header is looked at before its body is read."""
    ours, theirs = socket.socketpair()
    link = Link(ours, KEYS, NodeClock(None), 2**20)
    flooding = threading.Thread(target=_flood, args=(theirs,), daemon=True)
    flooding.start()
    with pytest.raises(LinkClosed, match="not a frame"):
        for _ in range(100):
            select.select([link], [], [], 5)
            list(link.receive())
            assert len(link._incoming) <= 2**20 + 2 * wire._READ_BYTES
    assert len(link._incoming) <= wire._READ_BYTES
    link.close()
    theirs.close()
    flooding.join(60)


def _flood(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(struct.pack("!2sHI", b"mr", FORMAT_VERSION, 2**20 + 1) + bytes(24))
        for _ in range(2000):
            sock.sendall(bytes(2**16))


def test_a_body_is_bounded_by_the_senders_role(house: House) -> None:
    assert wire.largest_body(Role.LEADER, Role.COORDINATOR) < wire.largest_body(Role.LEADER, Role.LEADER)
    ours, theirs = socket.socketpair()
    largest = wire.largest_body(Role.LEADER, Role.COORDINATOR)
    link = Link(ours, KEYS, NodeClock(None), largest)
    theirs.sendall(struct.pack("!2sHI", b"mr", FORMAT_VERSION, largest + 1) + bytes(24))
    with pytest.raises(LinkClosed, match="not a frame"):
        list(link.receive())
    link.close()
    theirs.close()


def test_a_peer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_QUEUED_BYTES", 2**22)
    ours, theirs = socket.socketpair()
    link = Link(ours, KEYS, NodeClock(None))
    with pytest.raises(LinkClosed, match="does not read"):
        for _ in range(100):
            link.put(bytes(2**20))
    assert link._queued <= 2**22 + 2**20
    link.close()
    theirs.close()


def test_the_oldest_strangers_go_first_and_a_leader_gets_in(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 5)
    strangers = [house.stranger() for _ in range(30)]
    client = house.watch(call(house.address, PEER, ME))
    house.loop.send(client, PeerHello(1))
    house.until(lambda: house.seen)
    assert house.seen == [PeerHello(1)] and len(house.gate.admission.unproven) <= 5
    assert strangers[0].recv(1) == b""


def test_as_many_peers_as_are_expected_may_introduce_themselves_at_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1024 leaders that connected at once, the coordinator closed hundreds as strangers."""
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 5)
    house.expects = 30
    for _ in range(40):
        house.stranger()
    for _ in range(100):
        house.loop.run_once(0.0)
    assert len(house.gate.admission.unproven) == 30


def test_a_listener_that_expects_nobody_takes_a_few_strangers_and_rests(house: House) -> None:
    """10,000 strangers made a step take 1.5 times as long while they came, since all were accepted at once."""
    house.expects, house.now = False, 0.0
    for _ in range(50):
        house.stranger()
    for rests in range(3):
        house.now = rests * 1.1 * admission.REST_S
        for _ in range(100):
            house.loop.run_once(0.0)
        assert len(house.gate.admission.unproven) == (rests + 1) * UNEXPECTED_AT_ONCE


def test_whoever_is_expected_waits_for_no_rest(house: House) -> None:
    """Strangers fill the queue of the kernel while nobody is expected; then a leader is, behind all of them."""
    house.expects, house.now = False, 0.0
    num_strangers = min(2000, raise_descriptor_limit() // 2 - 500)
    for _ in range(num_strangers):
        house.stranger()
    for _ in range(10):
        house.loop.run_once(0.0)
    assert len(house.gate.admission.unproven) == UNEXPECTED_AT_ONCE
    client = house.watch(call(house.address, PEER, ME))
    house.loop.send(client, PeerHello(1))
    for _ in range(100):
        house.loop.run_once(0.0)
    assert house.seen == []
    house.expects, house.now = True, 1.1 * admission.REST_S  # the rest that was begun is all that it waits
    house.until(lambda: house.seen, "while the clock stands still")
    assert house.seen == [PeerHello(1)]


def test_strangers_are_let_go_at_their_deadline(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "INTRODUCTION_S", 1.0)
    silent, slow = house.stranger(), house.stranger(b"m")
    house.until(lambda: len(house.gate.admission.unproven) == 2)
    house.until(lambda: not house.gate.admission.unproven)
    assert silent.recv(1) == b""
    with contextlib.suppress(ConnectionResetError):
        assert slow.recv(1) == b""


def test_a_caller_that_was_let_go_dials_again_and_loses_no_message(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    advance, turned_away = admission.Unproven.advance, []

    def crowded(self: admission.Unproven) -> bool:
        if advance(self) and len(turned_away) < 3:
            turned_away.append(self)
            raise OSError("no room")
        return self.acceptor.peer is not None

    monkeypatch.setattr(admission.Unproven, "advance", crowded)
    why: list[str] = []
    client = house.watch(call(house.address, PEER, ME), why)
    for number in range(3):
        house.loop.send(client, PeerHello(number))
    house.until(lambda: len(house.seen) == 3)
    assert len(turned_away) == 3 and house.seen == [PeerHello(0), PeerHello(1), PeerHello(2)] and why == []


def test_a_caller_that_is_never_believed_gives_up_in_time(house: House) -> None:
    why: list[str] = []
    started = time.monotonic()
    house.watch(call(house.address, PEER, ME, bytes(KEY_BYTES), patience_s=0.3), why)
    house.until(lambda: why)
    assert time.monotonic() - started < PATIENCE_S / 2
    house.until(lambda: not house.gate.admission.unproven)


def test_a_link_that_waits_to_dial_again_can_be_dropped(house: House) -> None:
    why: list[str] = []
    link = house.watch(call(house.address, PEER, ME, bytes(KEY_BYTES)), why)
    house.until(lambda: house.loop._redialling)
    house.loop.send(link, PeerHello(1))
    house.loop.drop(link)
    house.loop.drop(link)
    made: list[int] = []
    house.loop.after(0.2, lambda: made.append(1))
    house.until(lambda: made)
    assert why == [] and not house.loop._redialling


@contextlib.contextmanager
def few_descriptors(num_free: int) -> Iterator[None]:
    """Leave this process so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + num_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_running_out_of_descriptors_ends_nothing(house: House, capfd: pytest.CaptureFixture[str]) -> None:
    """A10: EMFILE escaped `accept`. It is said once, and a leader gets in as soon as there is room."""
    for _ in range(20):
        house.stranger()
    client = house.watch(call(house.address, PEER, ME))
    house.loop.send(client, PeerHello(1))
    fillers = []
    try:
        with few_descriptors(0):
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.open("/dev/null", os.O_RDONLY))  # noqa: PERF401
            for _ in range(30):
                house.loop.run_once(0.01)
            assert house.seen == []
    finally:
        for each in fillers:
            os.close(each)
    house.until(lambda: house.seen)
    assert house.seen == [PeerHello(1)]
    assert capfd.readouterr().err.count("cannot accept a connection") == 1


def test_a_forked_child_closes_the_strangers_too(house: House) -> None:
    house.stranger()
    house.until(lambda: house.gate.admission.unproven)
    [descriptor] = house.gate.admission.unproven
    child = os.fork()
    if child == 0:
        house.loop.close_in_child()
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_replayed_recording_gets_nobody_in(house: House) -> None:
    """Everything that a proven leader has ever sent, sent again."""
    tape: list[bytes] = []
    send = socket.socket.send

    class Recording(OutgoingLink):
        def _take_socket(self, connection: socket.socket) -> None:
            super()._take_socket(connection)
            outer = self

            class Tapped(socket.socket):
                def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
                    sent = send(self, data, flags)
                    tape.append(bytes(data)[:sent])
                    return sent

            outer._socket = Tapped(fileno=connection.detach())

    client = house.watch(Recording(house.address, KEY, PEER, ME, clock=NodeClock(None), patience_s=5))
    house.loop.send(client, PeerHello(1))
    house.until(lambda: house.seen)
    assert len(tape) >= 3 and house.seen == [PeerHello(1)]
    house.stranger(b"".join(tape))
    house.stranger(b"".join(tape[1:]))
    house.stranger(tape[-1])
    for _ in range(20):
        house.loop.run_once(0.01)
    assert len(house.links) == 1 and house.seen == [PeerHello(1)]


def test_a_response_relayed_from_another_gate_is_refused() -> None:
    """A stranger stands between an honest leader and another process of the job."""
    first, second = House(), House()
    try:
        honest = Connector(KEY, PEER, ME, port=int(first.address.split(":")[1]), nonce=os.urandom(32))
        with second.stranger(honest.opening) as relayed:
            relayed.settimeout(PATIENCE_S)
            second.until(lambda: not second.gate.admission.unproven and not second.links, "it is refused")
            for _ in range(5):
                second.loop.run_once(0.01)
            with contextlib.suppress(ConnectionResetError):
                assert relayed.recv(100) == b"", "no challenge is made for an opening that is meant for another port"
    finally:
        first.close()
        second.close()


def test_many_strangers_are_told_now_and_then_and_counted_and_a_few_are_not(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who looks for the cause of a slow recovery finds them in the trace and in the log."""
    said: list[str] = []
    monkeypatch.setattr(admission.Speaker, "say", lambda self, text: said.append(text))
    house.now = 100.0

    def strangers(number: int) -> None:
        for _ in range(number):
            house.stranger(b"GET / HTTP/1.0").close()
        for _ in range(number):
            house.loop.run_once(0.01)
            house.now += 0.01

    strangers(admission.MANY - 1)
    assert house.told == []
    strangers(30)
    assert house.told and not said[1:], "once"
    first = house.told[0]
    strangers(50)
    assert house.told == [first], "not again so soon"
    for _ in range(int(10 * admission.TELL_S)):  # not at once, which the loop takes for a time in which it stood still
        house.loop.run_once(0.0)
        house.now += 0.1
    assert sum(house.told) == admission.MANY - 1 + 80 and len(said) == 2
    assert f"{first} connections to port {house.address.split(':')[1]} (leader) came from strangers" in said[0]
