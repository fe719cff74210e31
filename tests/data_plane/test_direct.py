"""The direct transport in one process: order, fencing, revocation, and what it does to bad input and strangers.

Each property that safety rests on is a function; the last tests plant the bug that it is there for, and see it fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_recover.authentication import admission
from megatron_recover.authentication.handshake import Role
from megatron_recover.data_plane import arrivals, connection, direct, exchange
from megatron_recover.data_plane.connection import Connection
from megatron_recover.data_plane.direct import DirectEndpoint, DirectTransport
from megatron_recover.data_plane.transport import DeadlineExceeded, PeerLost, Revoked, TransportError
from megatron_recover.deadlines import Deadlines
from tests.cluster.strangers import raise_descriptor_limit
from tests.control_plane.partners import KEY, within
from tests.data_plane.threads import at_once

pytestmark = pytest.mark.timeout(150)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
LONG = within(20.0)


@contextlib.contextmanager
def endpoints(*replicas: int, deadlines: Deadlines = LONG) -> Iterator[tuple[dict[int, DirectEndpoint], dict[int, str]]]:
    made = {replica: DirectEndpoint(key=KEY, rank=0, deadlines=deadlines) for replica in replicas}
    try:
        yield made, {replica: endpoint.address for replica, endpoint in made.items()}
    finally:
        for endpoint in made.values():
            endpoint.close()


def opened(made: dict[int, DirectEndpoint], addresses: dict[int, str], generation: int = 1) -> dict[int, DirectTransport]:
    return {replica: made[replica].open(generation, replica, addresses) for replica in addresses}


def sums(
    transports: dict[int, DirectTransport], sources: dict[int, torch.Tensor], tag: int = 1
) -> tuple[dict[int, torch.Tensor], list[Any]]:
    results = {replica: torch.empty_like(source) for replica, source in sources.items()}
    outcomes = at_once(*[
        lambda r=replica: transports[r].sum_into([sources[r]], [results[r]], tag=tag)
        for replica in sources
    ])  # fmt: skip
    return results, outcomes


def noise(replica: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(replica)
    return (torch.randn(num_elements, generator=generator, dtype=torch.float64) * 10 ** (replica % 4)).to(dtype)


def check_canonical_order(num_elements: int = 100_001) -> None:
    """Floating point sums differ with their order in many of these elements: only ascending replica ids give these bits."""
    replicas = (7, 1, 3)
    with endpoints(*replicas) as (made, addresses):
        sources = {replica: noise(replica, num_elements, torch.float32) for replica in replicas}
        results, outcomes = sums(opened(made, addresses), sources)
        assert outcomes == [None] * 3
        expected = (sources[1] + sources[3]) + sources[7]
        for first, second, third in ((7, 3, 1), (7, 1, 3)):
            wrong = (sources[first] + sources[second]) + sources[third]
            assert not torch.equal(expected, wrong), "the data would not show a wrong order"
        for result in results.values():
            assert torch.equal(result, expected)


def check_inputs_stay() -> None:
    with endpoints(0, 1) as (made, addresses):
        sources = {replica: noise(replica, 100_001, torch.float32) for replica in (0, 1)}
        kept = {replica: source.clone() for replica, source in sources.items()}
        sums(opened(made, addresses), sources)
        assert all(torch.equal(sources[replica], kept[replica]) for replica in kept)


def check_nothing_written_after_a_revoke() -> None:
    """One member is inside a sum and has received some of the other's data when it is revoked; then more data comes."""
    threads = set(threading.enumerate())
    with endpoints(0, 1) as (made, addresses):
        transports = opened(made, addresses)
        source, result = torch.ones(4_000_000), torch.zeros(4_000_000)
        held, released = threading.Event(), threading.Event()

        def probe(instant: str) -> None:
            if instant == "middle":
                held.set()
                released.wait(60)

        def first() -> None:
            try:
                transports[0].sum_into([source], [result], tag=1, probe=probe)
            finally:
                result.fill_(-1)

        def revoke() -> None:
            held.wait(60)
            transports[0].revoke()
            released.set()

        other = torch.empty(4_000_000)
        outcomes = at_once(first, lambda: transports[1].sum_into([source], [other], tag=1), revoke)
        assert isinstance(outcomes[0], Revoked) and isinstance(outcomes[1], TransportError)
        untouched = bool((result == -1).all())  # apart from the assertion: pytest would print 4 million elements
        assert untouched, "something wrote to the result after the call had raised"
        assert set(threading.enumerate()) <= threads, "a thread is left that could write to it later"


def check_a_revoke_waits_for_what_is_written(patch: pytest.MonkeyPatch) -> None:
    """A16: `revoke` set a flag and returned, while the call added up received data and wrote its result."""
    inside, leave, returned = threading.Event(), threading.Event(), threading.Event()
    add = exchange.add_in_order

    revoked: set[int] = set()

    def slow(parts: Any, out: torch.Tensor) -> None:
        if threading.get_ident() in revoked:  # the other member may be adding before this one is
            inside.set()
            assert leave.wait(60)
        add(parts, out)

    patch.setattr(exchange, "add_in_order", slow)
    with endpoints(0, 1) as (made, addresses):
        transports = opened(made, addresses)
        source, result, other = torch.ones(1_000_000), torch.zeros(1_000_000), torch.zeros(1_000_000)
        seen: list[torch.Tensor] = []

        def revoke() -> None:
            assert inside.wait(60)
            waiting = threading.Thread(target=lambda: (transports[0].revoke(), returned.set()))
            waiting.start()
            early = returned.wait(0.2)
            leave.set()
            waiting.join(60)
            seen.extend((result.clone(), torch.cat([*transports[0]._scratch.values()]).clone()))
            assert returned.is_set() and not early, "it returned while the call was writing"

        def sum_that_is_revoked() -> None:
            revoked.add(threading.get_ident())
            transports[0].sum_into([source], [result], tag=1)

        outcomes = at_once(
            sum_that_is_revoked,
            lambda: transports[1].sum_into([source], [other], tag=1),
            revoke,
        )
        assert isinstance(outcomes[0], Revoked), outcomes[0]
        if isinstance(outcomes[2], BaseException):
            raise outcomes[2]
        assert torch.equal(seen[0], result)


def check_older_generation_is_refused() -> None:
    """One of two was left behind in generation 1 and calls, the other in generation 2: whichever connects to the other."""
    for behind, ahead in ((1, 0), (0, 1)):
        with endpoints(0, 1) as (made, addresses):
            stale = made[behind].open(1, behind, addresses)
            current = made[ahead].open(2, ahead, addresses)

            def left_behind(stale: DirectTransport = stale, current: DirectTransport = current) -> None:
                try:
                    stale.sum_into([torch.ones(10)], [torch.empty(10)], tag=1)
                finally:
                    current.revoke()  # it has nobody to sum with, and would wait to its deadline

            outcomes = at_once(
                left_behind,
                lambda current=current: current.sum_into([torch.ones(10)], [torch.empty(10)], tag=1),
            )
            assert isinstance(outcomes[0], PeerLost) and "already in generation 2" in str(outcomes[0]), outcomes[0]
            assert isinstance(outcomes[1], Revoked), outcomes[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_sums_have_the_same_bits_everywhere(num_replicas: int, dtype: torch.dtype) -> None:
    with endpoints(*range(num_replicas)) as (made, addresses):
        transports = opened(made, addresses)
        for tag, num_elements in enumerate((0, 1, 3, 8192, 8193, 300_007)):
            sources = {replica: noise(replica, num_elements, dtype) for replica in range(num_replicas)}
            results, outcomes = sums(transports, sources, tag)
            assert outcomes == [None] * num_replicas
            expected = sources[0].float() if dtype is torch.bfloat16 else sources[0]
            for replica in range(1, num_replicas):
                expected = expected + sources[replica]
            assert all(torch.equal(result, expected.to(dtype)) for result in results.values())


def test_order_is_canonical() -> None:
    check_canonical_order()
    check_canonical_order(100)  # small enough to be added by everyone


def test_inputs_stay() -> None:
    check_inputs_stay()


def test_nothing_is_written_after_a_revoke() -> None:
    check_nothing_written_after_a_revoke()


def test_a_revoke_waits_for_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_revoke_waits_for_what_is_written(monkeypatch)


def test_a_revoke_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct.WriteGate, "shut", lambda self: setattr(self, "_is_shut", True))
    with pytest.raises(AssertionError, match="while the call was writing"):
        check_a_revoke_waits_for_what_is_written(monkeypatch)


def test_a_sum_over_one_member_is_revoked_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoints(0) as (made, addresses):
        transport = made[0].open(1, 0, addresses)
        revoking = threading.Thread(target=transport.revoke)
        add, pieces = exchange.add_in_order, []

        def first(parts: Any, out: torch.Tensor) -> None:
            pieces.append(1)
            revoking.start()
            while not transport._writing._is_shut:
                time.sleep(0.001)
            add(parts, out)

        monkeypatch.setattr(exchange, "add_in_order", first)
        with pytest.raises(Revoked):
            transport.sum_into([torch.ones(1_000_000)], [torch.zeros(1_000_000)], tag=1)
        revoking.join(60)
        assert len(pieces) == 1


def test_an_older_generation_is_refused() -> None:
    check_older_generation_is_refused()


def test_who_does_not_come_before_the_deadline_is_suspected() -> None:
    with endpoints(0, 1, deadlines=within(0.05)) as (made, addresses):
        waiting = made[0].open(1, 0, addresses)
        with pytest.raises(DeadlineExceeded) as exceeded:
            waiting.sum_into([torch.ones(10)], [torch.empty(10)], tag=1)
        assert exceeded.value.peers == (1,)


def test_several_tensors_of_unlike_types_in_one_call() -> None:
    with endpoints(0, 1, 2) as (made, addresses):
        transports = opened(made, addresses)
        layout = list(zip((5, 0, 70_000, 9), DTYPES, strict=True))
        sources = {r: [torch.full((n,), 2**r).to(dtype) for n, dtype in layout] for r in range(3)}
        results = {r: [torch.empty_like(source) for source in sources[r]] for r in range(3)}
        calls = [lambda r=r: transports[r].sum_into(sources[r], results[r], tag=1) for r in range(3)]
        assert at_once(*calls) == [None] * 3
        assert all(bool((result == 7).all()) for r in range(3) for result in results[r])


def test_copies_go_to_the_targets_only_and_twice_is_fine() -> None:
    with endpoints(0, 1, 2, 3) as (made, addresses):
        transports = opened(made, addresses)
        tensors = {replica: [torch.full((300_000,), replica), torch.full((2,), replica)] for replica in range(4)}
        for tag, (source, targets) in enumerate([(2, (0, 3)), (0, (1,))]):
            calls = [
                lambda r=r, tag=tag, source=source, targets=targets: transports[r].copy_into(
                    tensors[r], source=source, targets=targets, tag=tag
                )
                for r in range(4)
            ]
            assert at_once(*calls) == [None] * 4
        assert [int(tensors[replica][0].float().mean()) for replica in range(4)] == [2, 2, 2, 2]
        sources = {replica: torch.ones(3) for replica in range(4)}
        results, outcomes = sums(transports, sources, 5)
        assert outcomes == [None] * 4 and all(bool((result == 4).all()) for result in results.values())


def test_a_revoke_from_another_thread_ends_every_wait() -> None:
    with endpoints(0, 1) as (made, addresses):
        for generation, target in enumerate(("sum_into", "copy_into"), start=1):
            transport = made[0].open(generation, 0, addresses)
            begun = threading.Event()

            def call(transport: DirectTransport = transport, target: str = target, begun: threading.Event = begun) -> None:
                if target == "sum_into":
                    transport.sum_into([torch.ones(9)], [torch.empty(9)], tag=1, probe=lambda _: begun.set())
                else:
                    begun.set()
                    transport.copy_into([torch.ones(9)], source=1, targets=[0], tag=1)

            def revoke(transport: DirectTransport = transport, begun: threading.Event = begun) -> float:
                begun.wait(60)
                transport.revoke()
                return time.monotonic()

            started = time.monotonic()
            outcome, _ = at_once(call, revoke)
            assert isinstance(outcome, Revoked)
            assert time.monotonic() - started < 10
            transport.revoke()
            with pytest.raises(Revoked):
                call()


def test_the_peers_of_a_revoked_member_notice_while_it_computes() -> None:
    with endpoints(0, 1) as (made, addresses):
        transports = opened(made, addresses)
        assert sums(transports, {0: torch.ones(1), 1: torch.ones(1)})[1] == [None, None]
        transports[0].revoke()
        (outcome,) = at_once(lambda: transports[1].sum_into([torch.ones(9)], [torch.empty(9)], tag=2))
        assert isinstance(outcome, PeerLost) and outcome.peer == 0


def test_a_newer_generation_retires_the_older_and_its_connections_wait_for_it() -> None:
    with endpoints(0, 1) as (made, addresses):
        older = opened(made, addresses)
        assert sums(older, {0: torch.ones(1), 1: torch.ones(1)})[1] == [None, None]
        ahead = made[1].open(5, 1, addresses)  # replica 1 learns of generation 5 first, and calls
        result, late = torch.empty(3), torch.empty(3)

        def follow() -> None:
            with pytest.raises(TransportError):  # it is in the old generation and finds its peer gone
                older[0].sum_into([torch.ones(3)], [late], tag=2)
            made[0].open(5, 0, addresses).sum_into([torch.ones(3)], [late], tag=1)

        outcomes = at_once(lambda: ahead.sum_into([torch.ones(3)], [result], tag=1), follow)
        assert outcomes == [None, None] and result.tolist() == late.tolist() == [2.0] * 3
        with pytest.raises(Revoked, match="generation 5"):
            made[0].open(5, 0, addresses)
        with pytest.raises(Revoked):
            older[0].sum_into([torch.ones(3)], [late], tag=3)


def _hang_up(listener: socket.socket) -> None:
    listener.accept()[0].close()
    listener.close()


def test_a_member_that_hangs_up_without_a_word_is_lost_at_once() -> None:
    with endpoints(1) as (made, addresses), socket.create_server(("127.0.0.1", 0)) as rude:
        addresses[0] = f"127.0.0.1:{rude.getsockname()[1]}"
        transport = made[1].open(1, 1, addresses)
        started = time.monotonic()
        outcome, _ = at_once(
            lambda: transport.sum_into([torch.ones(3)], [torch.empty(3)], tag=1),
            lambda: _hang_up(rude),
        )
        assert isinstance(outcome, PeerLost) and outcome.peer == 0
        assert time.monotonic() - started < 10


def test_a_member_that_is_ahead_is_not_taken_into_an_older_generation() -> None:
    with endpoints(0, 1) as (made, addresses):
        behind = made[0].open(1, 0, addresses)
        ahead = made[1].open(2, 1, addresses)
        result, late = torch.empty(3), torch.empty(3)

        def follow() -> TransportError:
            with pytest.raises(PeerLost, match="already in generation 2") as lost:
                behind.sum_into([torch.ones(3)], [late], tag=1)
            made[0].open(2, 0, addresses).sum_into([torch.ones(3)], [late], tag=1)
            return lost.value

        outcomes = at_once(lambda: ahead.sum_into([torch.ones(3)], [result], tag=1), follow)
        assert outcomes[0] is None and isinstance(outcomes[1], PeerLost) and outcomes[1].peer == 1
        assert result.tolist() == late.tolist() == [2.0] * 3


def test_the_deadline_is_for_the_time_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks that tick whenever they are looked at: a call that takes longer than its deadline, but never stands still."""

    class Clock(threading.local):
        now = 0.0

        def monotonic(self) -> float:
            self.now += 1
            latest[threading.get_ident()] = self.now
            return self.now

    latest: dict[int, float] = {}
    send = Connection.send

    def send_a_little(self: Connection, views: deque[memoryview]) -> bool:
        """How much a kernel takes at once is its own business: here it is never so much that the call is soon over."""
        whole = views.popleft()
        piece = deque([whole[: 2**18]])
        has_sent = send(self, piece)
        num_sent = min(len(whole), 2**18) - sum(map(len, piece))
        if num_sent < len(whole):
            views.appendleft(whole[num_sent:])
        return has_sent

    monkeypatch.setattr(Connection, "send", send_a_little)
    monkeypatch.setattr(direct, "time", Clock())
    with endpoints(0, 1) as (made, addresses):
        sources = {replica: torch.ones(20_000_000) for replica in (0, 1)}
        assert sums(opened(made, addresses), sources)[1] == [None, None]
        assert min(latest.values()) > 60, "it was too fast: this test shows nothing"


def test_a_member_that_is_gone_is_refused_at_once() -> None:
    with endpoints(0, 1, 2) as (made, addresses):
        made[1].close()
        for me in (0, 2):
            transport = made[me].open(1, me, addresses)
            started = time.monotonic()
            (outcome,) = at_once(lambda transport=transport: transport.sum_into([torch.ones(3)], [torch.empty(3)], tag=1))
            assert isinstance(outcome, PeerLost) and outcome.peer == 1
            assert time.monotonic() - started < 10


def test_members_that_call_differently_are_told_so_and_write_nothing_astray() -> None:
    for other in (lambda t: t.sum_into([torch.ones(9)], [torch.empty(9)], tag=2),
                  lambda t: t.sum_into([torch.ones(8)], [torch.empty(8)], tag=1)):  # fmt: skip
        with endpoints(0, 1) as (made, addresses):
            transports = opened(made, addresses)
            outcomes = at_once(
                lambda transports=transports: transports[0].sum_into([torch.ones(9)], [torch.empty(9)], tag=1),
                lambda transports=transports, other=other: other(transports[1]),
            )
            assert any("expected" in str(outcome) for outcome in outcomes), outcomes
            with pytest.raises(TransportError, match="is broken"):
                transports[0].sum_into([torch.ones(9)], [torch.empty(9)], tag=3)


def test_an_exception_out_of_a_probe_breaks_the_transport() -> None:
    def probe(instant: str) -> None:
        raise KeyError(instant)

    with endpoints(0, 1) as (made, addresses):
        transport = made[0].open(1, 0, addresses)
        with pytest.raises(KeyError):
            transport.sum_into([torch.ones(1)], [torch.empty(1)], tag=1, probe=probe)
        with pytest.raises(TransportError, match="KeyError"):
            transport.sum_into([torch.ones(1)], [torch.empty(1)], tag=2)


@pytest.mark.parametrize("num_elements", [1, 300_000])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_each_probe_is_passed_once(num_replicas: int, num_elements: int) -> None:
    with endpoints(*range(num_replicas)) as (made, addresses):
        passed: dict[int, list[str]] = {replica: [] for replica in addresses}
        calls = [
            lambda r=r, transport=transport: transport.sum_into(
                [torch.ones(num_elements)], [torch.empty(num_elements)], tag=1, probe=passed[r].append
            )
            for r, transport in opened(made, addresses).items()
        ]
        assert at_once(*calls) == [None] * num_replicas
        for instants in passed.values():
            assert sorted(instants) == ["begin", "end", "middle", "sent"]
            assert (instants[0], instants[-1]) == ("begin", "end")


@pytest.mark.parametrize(
    "operands",
    [
        ([torch.ones(4)], []),
        ([torch.ones(4)], [torch.ones(5)]),
        ([torch.ones(4)], [torch.ones(4, dtype=torch.float64)]),
        ([torch.ones(4, 4).t()], [torch.ones(4, 4)]),
        ([torch.ones(4, device="meta")], [torch.ones(4, device="meta")]),
    ],
    ids=["count", "size", "dtype", "stride", "device"],
)
def test_operands_that_do_not_fit_are_refused(operands: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    with endpoints(0) as (made, addresses):
        transport = made[0].open(1, 0, addresses)
        with pytest.raises(ValueError, match="contiguous|but"):
            transport.sum_into(*operands, tag=1)


def test_a_transport_is_not_used_twice_at_once() -> None:
    with endpoints(0) as (made, addresses):
        transport = made[0].open(1, 0, addresses)

        def probe(instant: str) -> None:
            transport.copy_into([torch.ones(1)], source=0, targets=[0], tag=2)

        with pytest.raises(RuntimeError, match="one thread at a time"):
            transport.sum_into([torch.ones(1)], [torch.empty(1)], tag=1, probe=probe)


def test_a_copy_among_others_than_members_is_refused() -> None:
    with endpoints(0, 1) as (made, addresses):
        transport = made[0].open(1, 0, addresses)
        for source, targets in ((2, [0]), (0, [1, 2])):
            with pytest.raises(ValueError, match="the members are .0, 1."):
                transport.copy_into([torch.ones(1)], source=source, targets=targets, tag=1)


def test_a_reduction_in_place_is_refused() -> None:
    with endpoints(0) as (made, addresses):
        transport = made[0].open(1, 0, addresses)
        buffer = torch.ones(10)
        with pytest.raises(ValueError, match="out of place"):
            transport.sum_into([buffer[:6]], [buffer[4:]], tag=1)


def caller(address: str, generation: int, me: int, peer: int = 0, rank: int = 0, key: bytes = KEY) -> Connection:
    """What a member's rank dials with; `proven_to` goes on with its handshake."""
    return connection.connect(address, key, Role.DATA, generation=generation, me=me, peer=peer, rank=rank)


def proven_to(endpoint: DirectEndpoint, *callers: Connection) -> list[str]:
    """What becomes of callers: `welcome`, `proven` (no verdict yet), or why they are turned away."""
    found = [""] * len(callers)
    for _ in range(50):
        for index, each in enumerate(callers):
            try:
                if not found[index] and each.handshake():
                    found[index] = "welcome"
            except (PeerLost, connection.EndedUnproven) as error:
                found[index] = str(error)
        endpoint.greet(0)
        time.sleep(0.001)  # for the kernel, which may deliver a little later
    return [each or "proven" for each in found]


def test_strangers_and_doubles_do_not_disturb() -> None:
    """Silence, garbage, another key, a future generation that never comes, a member that connects twice."""
    with endpoints(0, 1) as (made, addresses):
        transports = opened(made, addresses)
        host, _, port = addresses[0].rpartition(":")
        visitors = [socket.create_connection((host, int(port))) for _ in range(2)]
        visitors[1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        early, twice = caller(addresses[0], 9, 7), caller(addresses[0], 9, 7)
        others = [
            caller(addresses[0], 1, 1, key=bytes(len(KEY))), caller(addresses[0], 1, 1, peer=3),
            caller(addresses[0], 1, 1, rank=1), caller(addresses[0], 1, 0),
        ]  # fmt: skip
        assert sums(transports, {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]
        assert proven_to(made[0], early) == ["proven"]
        assert proven_to(made[0], twice) == ["replica 0: has no room for another connection of this generation"]
        for outcome in proven_to(made[0], *others):
            assert "key" in outcome or "refused" in outcome
        assert proven_to(made[0], caller(addresses[0], 0, 1)) == ["replica 0: is already in generation 1"]
        with contextlib.suppress(ConnectionResetError):
            assert visitors[1].recv(1) == b""
        results, outcomes = sums(transports, {0: torch.ones(5), 1: torch.ones(5)}, 2)
        assert outcomes == [None, None] and results[0].tolist() == [2.0] * 5
        later = opened(made, addresses, 10)
        assert sums(later, {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]
        assert proven_to(made[0], early) == ["replica 0: is already in generation 10"], "its generation never came and is over"
        for visitor in visitors:
            visitor.close()
        for each in (early, twice, *others):
            each.sock.close()


def test_a_refusal_for_lack_of_room_is_not_taken_for_a_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A19: both were a WELCOME of the same generation, and the refused member began to send its contribution."""
    monkeypatch.setattr(arrivals, "MAX_PARKED", 0)
    with endpoints(0, 1) as (made, addresses):
        made[0].open(1, 0, addresses)
        refused = caller(addresses[0], 1, 1)
        assert proven_to(made[0], refused) == ["replica 0: has no room for another connection of this generation"]
        assert not refused.ready
        refused.sock.close()


def test_members_that_strangers_crowd_out_dial_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection, watches too, is let go some times before it has proven itself; nobody is suspected for that."""
    accept, let_go = admission.Admission._accept, []

    def crowded(self: admission.Admission, *arguments: Any) -> None:
        accept(self, *arguments)
        if len(let_go) < 8:
            for unproven in list(self.unproven.values()):
                let_go.append(unproven)
                self.let_go(unproven)

    monkeypatch.setattr(admission.Admission, "_accept", crowded)
    with endpoints(0, 1, 2) as (made, addresses):
        results, outcomes = sums(opened(made, addresses), {replica: torch.ones(5) for replica in range(3)})
        assert outcomes == [None] * 3 and results[2].tolist() == [3.0] * 5
        assert len(let_go) >= 8


def test_idle_strangers_are_let_go_by_the_calls_of_a_running_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would fill the kernel's queue, and the members of the next generation would find no place in it."""
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 10)
    monkeypatch.setattr(admission, "REST_S", 0.0)
    with endpoints(0, 1) as (made, addresses):
        transports = opened(made, addresses)
        assert sums(transports, {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]
        host, _, port = addresses[0].rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(40)]
        for tag in range(2, 4):
            assert sums(transports, {0: torch.ones(5), 1: torch.ones(5)}, tag)[1] == [None, None]
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""
        assert len(made[0]._arrivals.admission.unproven) == 10
        for each in strangers:
            each.close()


def test_calls_that_await_nobody_take_a_few_strangers_and_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call accepted 64 and read from all that were held, however many calls a step makes."""
    monkeypatch.setattr(admission, "REST_S", 1000.0)
    with endpoints(0, 1) as (made, addresses):
        transports = opened(made, addresses)
        assert sums(transports, {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]
        monkeypatch.setattr(made[0]._arrivals.admission, "_rests_until", 0.0)
        host, _, port = addresses[0].rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(40)]
        for tag in range(2, 6):
            assert sums(transports, {0: torch.ones(5), 1: torch.ones(5)}, tag)[1] == [None, None]
        assert len(made[0]._arrivals.admission.unproven) == admission.UNEXPECTED_AT_ONCE
        for each in strangers:
            each.close()


def test_a_data_endpoint_counts_strangers_as_every_listener_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(admission.Speaker, "say", lambda self, text: said.append(text))
    monkeypatch.setattr(admission, "REST_S", 0.0)
    monkeypatch.setattr(admission, "PAUSE_S", 0.0)
    told: list[tuple[str, int]] = []
    made = {
        replica: DirectEndpoint(key=KEY, rank=0, report=lambda name, number, each=replica: told.append((name, each, number)))
        for replica in range(2)
    }
    addresses = {replica: endpoint.address for replica, endpoint in made.items()}
    transports = opened(made, addresses)
    assert sums(transports, {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]
    host, _, port = addresses[1].rpartition(":")
    for _ in range(admission.MANY + 4):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.0")
    for tag in range(2, 6):
        assert sums(transports, {0: torch.ones(5), 1: torch.ones(5)}, tag)[1] == [None, None]
    for endpoint in made.values():
        endpoint.close()
    assert sum(number for _, _, number in told) >= admission.MANY and {each[:2] for each in told} == {("data", 1)}
    assert f"connections to port {port} (data) came from strangers" in said[0]


def test_a_member_behind_a_full_queue_of_strangers_is_there_before_the_deadline() -> None:
    """They came while nobody was awaited. The kernel takes no more, and tries the members of a new generation again later."""
    with endpoints(0, 1, 2, deadlines=Deadlines.of(60.0)) as (made, addresses):
        strangers: list[socket.socket] = []
        num_strangers = min(socket.SOMAXCONN + 100, raise_descriptor_limit() // 2 - 300)
        for address in (addresses[0], addresses[1]):
            host, _, port = address.rpartition(":")
            for _ in range(num_strangers):
                strangers.append(socket.socket())
                strangers[-1].setblocking(False)
                strangers[-1].connect_ex((host, int(port)))
        ones = {replica: torch.ones(5) for replica in range(3)}
        results, outcomes = sums(opened(made, addresses), ones)
        assert outcomes == [None] * 3 and results[2].tolist() == [3.0] * 5
        for each in strangers:
            each.close()


def descriptors() -> set[str]:
    """What this process has open, e.g. ``7=socket:[1234]``."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{name}={os.readlink(f'/proc/self/fd/{name}')}")
    return found


def num_descriptors(made: dict[int, DirectEndpoint]) -> int:
    """How many this process has open, when the endpoints have looked at the watches that have ended."""
    for _ in range(50):
        for replica, endpoint in made.items():
            endpoint.greet(replica)
        time.sleep(0.001)  # for the kernel, which may deliver a little later
    return len(descriptors())


def test_generations_leave_no_descriptors_behind() -> None:
    with endpoints(0, 1) as (made, addresses):
        assert sums(opened(made, addresses, 1), {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]
        before = num_descriptors(made)
        for generation in range(2, 12):
            assert sums(opened(made, addresses, generation), {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]
        assert num_descriptors(made) == before


def test_a_forked_child_holds_no_socket_of_its_parent() -> None:
    before = descriptors()
    with endpoints(0, 1) as (made, addresses):
        transports = opened(made, addresses)
        assert sums(transports, {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]
        num_descriptors(made)
        ours = {name for name in descriptors() - before if "socket:" in name}
        assert len(ours) == 4, "two listeners and both ends of a connection"
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # as a data loader's worker: it lives on, and must not keep the connections open
            held = len(ours & descriptors())
            refused = 0
            try:
                transports[0].sum_into([torch.ones(1)], [torch.empty(1)], tag=9)
            except Revoked:
                refused = 1
            os.write(write, bytes([held, refused]))
            os._exit(0)
        os.waitpid(child, 0)
        assert tuple(os.read(read, 2)) == (0, 1)
        os.close(read)
        os.close(write)
        results, outcomes = sums(transports, {0: torch.ones(5), 1: torch.ones(5)}, 2)
        assert outcomes == [None, None] and results[1].tolist() == [2.0] * 5


def out_of_descriptors(*args: object, **others: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("without", [0, 1], ids=["who watches", "who connects"])
def test_a_member_that_finds_no_descriptor_free_connects_later(without: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call raised OSError, which is no transport's error: the replica was lost as one whose training raised."""
    tried: list[int] = []
    made_socket = socket.socket

    def scarce(*args: Any, **others: Any) -> socket.socket:
        if threading.current_thread().name == "scarce" and len(tried) < 3:
            tried.append(1)
            out_of_descriptors()
        return made_socket(*args, **others)

    with endpoints(0, 1) as (made, addresses):
        transports = opened(made, addresses)
        monkeypatch.setattr(connection.socket, "socket", scarce)
        results, sources = {}, {replica: torch.ones(5) for replica in (0, 1)}

        def call(replica: int) -> None:
            if replica == without:
                threading.current_thread().name = "scarce"
            results[replica] = torch.empty(5)
            transports[replica].sum_into([sources[replica]], [results[replica]], tag=1)

        # The other one comes when there was no descriptor three times.
        def other() -> None:
            end = time.monotonic() + 20
            while len(tried) < 3:
                assert time.monotonic() < end
                time.sleep(0.005)
            call(1 - without)

        assert at_once(lambda: call(without), other) == [None, None]
        assert len(tried) == 3 and all(each.tolist() == [2.0] * 5 for each in results.values())


def test_a_member_that_never_gets_a_descriptor_blames_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoints(0, 1, deadlines=within(0.3)) as (made, addresses):
        transports = opened(made, addresses)
        monkeypatch.setattr(connection.socket, "socket", out_of_descriptors)
        (outcome,) = at_once(lambda: transports[1].sum_into([torch.ones(5)], [torch.empty(5)], tag=1))
        assert type(outcome) is TransportError and "ulimit -n" in str(outcome)


def test_a_transport_without_a_descriptor_is_a_transports_error_and_the_older_one_is_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with endpoints(0, 1) as (made, addresses):
        older = made[0].open(1, 0, addresses)
        with monkeypatch.context() as patch:
            patch.setattr(direct.os, "eventfd", out_of_descriptors)
            with pytest.raises(TransportError, match="ulimit -n"):
                made[0].open(2, 0, addresses)
        with pytest.raises(Revoked):
            older.sum_into([torch.ones(5)], [torch.empty(5)], tag=1)
        newer = {0: made[0].open(3, 0, addresses), 1: made[1].open(3, 1, addresses)}
        assert sums(newer, {0: torch.ones(5), 1: torch.ones(5)})[1] == [None, None]


# --- Planted bugs: each check above must see the one that it is there for --------------------------------------------------


def plant_in_place(patch: pytest.MonkeyPatch) -> None:
    original = exchange.SumExchange._add_up

    def add_up(self: exchange.SumExchange, segment: Any) -> None:
        original(self, segment)
        at = slice(segment.start, segment.stop)
        self._sources[segment.tensor][at] = self._results[segment.tensor][at]

    patch.setattr(exchange.SumExchange, "_add_up", add_up)


def plant_late_writer(patch: pytest.MonkeyPatch) -> None:
    original = DirectTransport.sum_into

    def sum_into(self: DirectTransport, sources: Any, results: Any, **options: Any) -> None:
        try:
            original(self, sources, results, **options)
        except TransportError:
            threading.Timer(0.05, results[0].zero_).start()
            raise

    patch.setattr(DirectTransport, "sum_into", sum_into)


def plant_arrival_order(patch: pytest.MonkeyPatch) -> None:
    original = exchange.add_in_order
    patch.setattr(exchange, "add_in_order", lambda parts, out: original(list(reversed(parts)), out))


def plant_stale_connection_accepted(patch: pytest.MonkeyPatch) -> None:
    admit = arrivals.Arrivals._admit

    def careless(self: arrivals.Arrivals, unproven: Any, generation: int) -> None:
        unproven.acceptor.generation = max(unproven.acceptor.generation, generation)
        admit(self, unproven, generation)

    patch.setattr(arrivals.Arrivals, "_admit", careless)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (plant_in_place, check_inputs_stay),
        (plant_late_writer, check_nothing_written_after_a_revoke),
        (plant_arrival_order, check_canonical_order),
        (plant_stale_connection_accepted, check_older_generation_is_refused),
    ],
    ids=lambda value: value.__name__,
)
def test_a_planted_bug_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
