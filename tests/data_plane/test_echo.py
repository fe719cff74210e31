"""The pairwise probe, and what the transports say of their peers: who is out of reach is named, who is only late is not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megatron_recover.authentication import admission
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.data_plane import direct, echo
from megatron_recover.data_plane.connection import CannotDial
from megatron_recover.data_plane.direct import DirectEndpoint
from megatron_recover.data_plane.echo import EchoServer
from megatron_recover.data_plane.endpoints import open_endpoint
from megatron_recover.data_plane.transport import CallPart, Endpoint, PeerLost, Revoked, TransportError
from megatron_recover.deadlines import Deadlines
from tests.control_plane.partners import KEY, within
from tests.data_plane.threads import at_once

pytestmark = pytest.mark.timeout(150)


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """The address of a listener whose connections lead nowhere: the kernel accepts, and nothing ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def servers(num: int) -> Iterator[dict[int, EchoServer]]:
    made = {number: EchoServer("127.0.0.1", KEY, 0) for number in range(num)}
    try:
        yield made
    finally:
        for one in made.values():
            one.close()


def asked(addresses: dict[int, str], timeout_s: float, rank: int = 0) -> tuple[int, ...]:
    """Who does not answer replica 9."""
    return echo.unreachable(addresses, KEY, Party(Role.ECHO, 9, rank), timeout_s)


def test_who_answers_is_within_reach_and_the_others_are_named() -> None:
    with servers(3) as made, black_hole() as hole, socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        addresses = {number: one.address for number, one in made.items()} | {3: hole, 4: address}
        assert asked(addresses, 3.0) == (3, 4)
        since = time.monotonic()
        assert asked({number: one.address for number, one in made.items()}, 100.0) == ()
        assert time.monotonic() - since < 50, "all have answered: there is nothing to wait for"


def test_an_answer_of_who_has_not_the_key_is_none() -> None:
    stranger = EchoServer("127.0.0.1", b"another key".ljust(32), 0)
    assert asked({0: stranger.address}, 0.5) == (0,)
    stranger.close()


def test_an_answer_that_is_only_as_long_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as sock:
                sock.recv(1000)
                sock.send(b"mgrecov2" + b"x" * 64)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert asked({0: f"127.0.0.1:{listener.getsockname()[1]}"}, 0.5) == (0,)
        thread.join(60)


def test_strangers_do_not_keep_an_echo_server_from_answering() -> None:
    with servers(1) as made:
        host, port = made[0].address.split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(300)]  # it waited for the first 128 to leave
        idle[0].send(b"much more than an opening" * 1000)
        idle[1].close()
        assert asked({0: made[0].address}, 5.0) == ()
        for sock in idle:
            sock.close()


def test_an_echo_server_counts_strangers_as_every_listener_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(admission.Speaker, "say", lambda self, text: said.append(text))
    told: list[tuple[str, int]] = []
    server = EchoServer("127.0.0.1", KEY, 0, lambda name, number: told.append((name, number)))
    host, port = server.address.split(":")
    for _ in range(admission.MANY + 4):
        with socket.create_connection((host, int(port))) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(b"GET / HTTP/1.0\r\n")
            stranger.recv(1)
    assert asked({0: server.address}, 5.0) == ()
    server.close()
    assert told and {name for name, _ in told} == {"echo"} and len(said) == 1
    assert f"connections to port {port} (echo) came from strangers" in said[0]


def test_silent_strangers_at_an_echo_server_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 5)
    monkeypatch.setattr(admission, "INTRODUCTION_S", 0.3)
    with servers(1) as made:
        host, port = made[0].address.split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(20)]
        for sock in idle:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
            sock.close()
        assert asked({0: made[0].address}, 5.0) == ()


def test_a_peer_whose_echo_server_strangers_crowd_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe was let go unproven, and the healthy peer was accused at once."""
    accept, let_go = admission.Admission._accept, []

    def crowded(self: admission.Admission, *arguments: Any) -> None:
        accept(self, *arguments)
        if len(let_go) < 5:
            for unproven in list(self.unproven.values()):
                let_go.append(unproven)
                self.let_go(unproven)

    monkeypatch.setattr(admission.Admission, "_accept", crowded)
    with servers(2) as made:
        assert asked({number: one.address for number, one in made.items()}, 5.0) == ()
        assert len(let_go) >= 5


def test_a_peer_that_ends_while_it_is_asked_again_is_named_at_once() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def end() -> None:
        accepted = listener.accept()[0]
        listener.close()
        accepted.close()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    since = time.monotonic()
    assert asked({0: f"127.0.0.1:{listener.getsockname()[1]}"}, 100.0) == (0,)
    assert time.monotonic() - since < 50
    thread.join(60)


def test_a_rank_of_another_position_gets_no_answer() -> None:
    with servers(1) as made:
        assert asked({0: made[0].address}, 0.5, rank=1) == (0,)


def test_a_peer_that_cannot_be_asked_for_want_of_a_descriptor_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised out of the probe of a failed sum, and cost this replica."""

    def cannot(address: str, peer: int) -> socket.socket:
        raise CannotDial("no descriptor")

    with servers(1) as made, monkeypatch.context() as patch:
        patch.setattr("megatron_recover.data_plane.connection.dial", cannot)
        assert asked({0: made[0].address}, 5.0) == ()


def test_a_closed_server_ends_its_thread_and_does_not_answer() -> None:
    with servers(1) as made:
        made[0].close()
        assert not made[0]._thread.is_alive()
        assert asked({0: made[0].address}, 0.3) == (0,)


def test_a_fork_after_the_end_of_an_echo_server_closes_nobody_elses_descriptor() -> None:
    with servers(1) as made:
        number = made[0]._wake
        made[0].close()
        read, write = os.pipe()
        os.dup2(read, number)
        child = os.fork()
        if not child:
            with contextlib.suppress(OSError):
                os.fstat(number)
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for each in {read, write, number}:
            os.close(each)


def test_a_forked_child_keeps_no_socket_of_an_echo_server() -> None:
    with servers(1) as made:
        child = os.fork()
        if not child:
            os._exit(0 if made[0].admission._listeners[0].fileno() == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert asked({0: made[0].address}, 5.0) == ()


# --- What the transports say ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def endpoints(kind: str, num: int, deadlines: Deadlines | None = None) -> Iterator[list[Endpoint]]:
    made = [open_endpoint(kind, key=KEY, rank=0, deadlines=deadlines) for _ in range(num)]  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for endpoint in made:
            endpoint.close()


def peers_of(error: object) -> tuple[int, ...]:
    assert isinstance(error, TransportError), error
    return error.peers


def summed(transport: object, tag: int) -> None:
    result = torch.empty(4)
    transport.sum_into([torch.ones(4)], [result], tag=tag)  # type: ignore[attr-defined]
    assert result.tolist() == [float(len(transport.members))] * 4  # type: ignore[attr-defined]


def test_a_ring_that_stalls_names_who_does_not_answer_and_nobody_else() -> None:
    """The third enters the call and then does not take part in gloo's ring, which stalls on all members alike."""
    with endpoints("gloo", 3, replace(within(20.0), sum_s=0.5, probe_s=3.0)) as made, black_hole() as hole:
        real = {number: endpoint.address for number, endpoint in enumerate(made)}
        cut = real | {2: f"{real[2].partition(' ')[0]} {hole}"}
        for generation, addresses, named in ((1, real, ()), (2, cut, (2,))):
            transports: list[Any] = [one.open(generation, number, addresses) for number, one in enumerate(made)]
            warm = at_once(*[lambda t=t: summed(t, 1) for t in transports])
            assert warm == [None] * 3
            begin, over = transports[2]._do, threading.Event()

            def stall(job: Any, part: CallPart, *rest: Any, begin: Any = begin, over: threading.Event = over) -> None:
                if part is CallPart.SUM:
                    over.wait(60)
                begin(job, part, *rest)

            transports[2]._do = stall
            third = threading.Thread(target=at_once, args=(lambda t=transports[2]: summed(t, 2),))
            third.start()
            outcomes = at_once(*[lambda t=t: summed(t, 2) for t in transports[:2]])
            transports[2].revoke()
            over.set()
            third.join(60)
            assert [getattr(outcome, "part", outcome) for outcome in outcomes] == [CallPart.SUM] * 2
            assert [peers_of(outcome) for outcome in outcomes] == [named, named]


def test_a_ring_that_breaks_names_whose_process_is_gone() -> None:
    with endpoints("gloo", 3) as made:
        addresses = {number: endpoint.address for number, endpoint in enumerate(made)}
        transports = [one.open(1, number, addresses) for number, one in enumerate(made)]
        assert at_once(*[lambda t=t: summed(t, 1) for t in transports]) == [None] * 3
        made[2].close()
        outcomes = at_once(*[lambda t=t: summed(t, 2) for t in transports[:2]])
        assert [peers_of(outcome) for outcome in outcomes] == [(2,), (2,)]


class Later:
    """The clock, `seconds` on."""

    seconds = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds


def test_what_was_waited_for_when_a_stalled_call_is_revoked_is_said_and_after_a_short_wait_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wait_s, stalled in ((25.0, True), (0.0, False)):
        with endpoints("direct", 2, within(40.0)) as made:
            addresses = {number: endpoint.address for number, endpoint in enumerate(made)}
            transport = made[0].open(1, 0, addresses)
            begun = threading.Event()
            monkeypatch.setattr(direct, "time", clock := Later())

            def call(transport: object = transport, begun: threading.Event = begun) -> None:
                sources = [torch.ones(4)], [torch.empty(4)]
                transport.sum_into(*sources, tag=1, probe=lambda _: begun.set())  # type: ignore[attr-defined]

            def revoke(
                transport: Any = transport, begun: threading.Event = begun, clock: Later = clock, wait_s: float = wait_s
            ) -> None:
                begun.wait(60)
                while 1 not in transport._reached:  # from then on it waits
                    time.sleep(0.01)
                clock.seconds = wait_s
                transport.revoke()

            outcome, _ = at_once(call, revoke)
            assert isinstance(outcome, Revoked)
            assert (outcome.stalled, outcome.peers) == (stalled, (1,) if stalled else ())


def test_a_bad_link_is_named_by_its_ends_and_not_by_who_waits_for_both() -> None:
    """Of three, 1 and 2 do not reach each other: 0 has all that they can send, and waits for the sums of both."""
    with black_hole() as hole:
        made = [DirectEndpoint(key=KEY, rank=0, deadlines=within(4.0)) for _ in range(3)]
        addresses = {number: endpoint.address for number, endpoint in enumerate(made)}
        seen_by_2 = addresses | {1: hole}
        transports = [one.open(1, number, seen_by_2 if number == 2 else addresses) for number, one in enumerate(made)]

        def call(number: int) -> None:
            source = torch.ones(300_000)  # large enough that each member owns a shard
            transports[number].sum_into([source], [torch.empty_like(source)], tag=1)

        outcomes = at_once(*[lambda number=number: call(number) for number in range(3)])
        for endpoint in made:
            endpoint.close()
        assert [peers_of(outcome) for outcome in outcomes] == [(), (2,), (1,)]


def test_a_member_that_is_ahead_is_not_accused() -> None:
    made = [DirectEndpoint(key=KEY, rank=0, deadlines=within(40.0)) for _ in range(2)]
    addresses = {number: endpoint.address for number, endpoint in enumerate(made)}
    ahead = made[0].open(2, 0, addresses)
    behind = made[1].open(1, 1, addresses)

    def left_behind() -> None:
        try:
            summed(behind, 1)
        finally:
            ahead.revoke()  # it has nobody to sum with, and would wait to its deadline

    outcome, _ = at_once(left_behind, lambda: summed(ahead, 1))
    for endpoint in made:
        endpoint.close()
    assert isinstance(outcome, PeerLost) and outcome.peer == 0 and outcome.peers == ()
