"""An error of a sum says which part of the wait ran out, and each part has its own time: connecting, the slowest, the sum."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megatron_recover.data_plane import exchange
from megatron_recover.data_plane.direct import DirectTransport
from megatron_recover.data_plane.endpoints import open_endpoint
from megatron_recover.data_plane.transport import CallPart, DeadlineExceeded, Endpoint
from megatron_recover.deadlines import Deadlines
from tests.control_plane.partners import KEY, within
from tests.data_plane.threads import at_once

pytestmark = pytest.mark.timeout(150)
LONG = within(20.0)
LARGE = 300_000
"""Elements of a tensor of which each of a few members owns a shard."""


@contextlib.contextmanager
def endpoints(kind: str, num: int, deadlines: Deadlines) -> Iterator[tuple[list[Endpoint], dict[int, str]]]:
    made = [open_endpoint(kind, key=KEY, rank=0, deadlines=deadlines) for _ in range(num)]  # type: ignore[arg-type]
    try:
        yield made, {number: endpoint.address for number, endpoint in enumerate(made)}
    finally:
        for endpoint in made:
            endpoint.close()


def connects(address: tuple[str, int]) -> bool:
    """Return whether a listener takes one more connection, which is closed then, within a moment."""
    try:
        socket.create_connection(address, timeout=0.2).close()
    except TimeoutError:
        return False
    return True


@contextlib.contextmanager
def nowhere() -> Iterator[str]:
    """The address of a listener whose queue is full: the kernel drops every further attempt to connect."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        while connects(listener.getsockname()):  # what the kernel puts into the queue it does in its own time
            pass
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def summed(transport: Any, num_elements: int = LARGE, **more: Any) -> torch.Tensor:
    result = torch.empty(num_elements)
    transport.sum_into([torch.ones(num_elements)], [result], tag=1, **more)
    return result


def check_part(outcome: object, part: CallPart, peers: tuple[int, ...], words: str) -> None:
    assert isinstance(outcome, DeadlineExceeded), outcome
    assert (outcome.part, outcome.peers) == (part, peers)
    assert words in str(outcome) and f"({part.value})" in str(outcome)


@pytest.mark.parametrize(("me", "other"), [(0, 1), (1, 0)])
def test_who_cannot_be_reached_is_named_when_connecting_runs_out(me: int, other: int) -> None:
    with endpoints("direct", 2, replace(LONG, connect_s=1.0)) as (made, addresses), nowhere() as address:
        transport = made[me].open(1, me, addresses | {other: address})
        (outcome,) = at_once(lambda: summed(transport))
    check_part(outcome, CallPart.CONNECT, (other,), f"no connection for 1 s to replicas [{other}]")


def test_who_cannot_be_reached_is_named_and_who_is_only_late_is_not() -> None:
    with endpoints("direct", 3, replace(LONG, connect_s=1.0)) as (made, addresses), nowhere() as address:
        transport = made[0].open(1, 0, addresses | {2: address})
        (outcome,) = at_once(lambda: summed(transport))
    check_part(outcome, CallPart.CONNECT, (2,), "no connection for 1 s to replicas [2]")


def check_a_member_that_does_not_come() -> None:
    for me, other in ((0, 1), (1, 0)):
        with endpoints("direct", 2, replace(LONG, connect_s=1.0, sum_s=1.0, slowest_s=2.0)) as (made, addresses):
            transport = made[me].open(1, me, addresses)
            (outcome,) = at_once(lambda transport=transport: summed(transport))
        check_part(outcome, CallPart.SLOWEST, (other,), f"the call was not entered for 2 s by replicas [{other}]")


def test_a_member_that_does_not_come_is_slow_and_no_failed_sum() -> None:
    check_a_member_that_does_not_come()


def check_a_member_that_comes_late(kind: str) -> None:
    """It comes when connecting and the sum would have run out. It has a connection, since its process lives."""
    with endpoints(kind, 2, replace(LONG, connect_s=2.0, sum_s=2.0)) as (made, addresses):
        transports: list[Any] = [one.open(1, number, addresses) for number, one in enumerate(made)]

        def late() -> None:
            time.sleep(3.0)  # the lateness that is the subject
            summed(transports[1])

        first, _ = outcomes = at_once(lambda: summed(transports[0]), late)
        assert not [each for each in outcomes if isinstance(each, BaseException)], outcomes
        assert bool((first == 2.0).all())


@pytest.mark.parametrize("kind", ["direct", "gloo"])
def test_a_member_that_comes_late_makes_no_failed_sum(kind: str) -> None:
    check_a_member_that_comes_late(kind)


def check_a_sum_that_stops(deadlines: Deadlines) -> None:
    """Member 1 enters the call, sends its part, and stops."""
    with endpoints("direct", 2, deadlines) as (made, addresses):
        transports: list[Any] = [one.open(1, number, addresses) for number, one in enumerate(made)]
        over = threading.Event()

        def stop(instant: str) -> None:
            if instant == "sent":
                over.wait(60)

        def first() -> None:
            try:
                summed(transports[0])
            finally:
                over.set()

        outcome, _ = at_once(first, lambda: summed(transports[1], probe=stop))
    check_part(outcome, CallPart.SUM, (1,), "the sum made no progress for 0.3 s, waiting for replicas [1]")


def test_a_sum_that_stops_is_told_from_a_member_that_is_slow() -> None:
    check_a_sum_that_stops(replace(LONG, sum_s=0.3))


def test_a_sum_that_lacks_the_parts_of_several_names_nobody_and_claims_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three have sent their own data, and no sum: they may wait for a third. `direct` probes nobody."""
    with endpoints("direct", 3, replace(LONG, sum_s=0.3)) as (made, addresses):
        transports: list[Any] = [one.open(1, number, addresses) for number, one in enumerate(made)]
        over, add, waiting = threading.Event(), exchange.add_in_order, set[threading.Thread]()

        def stop(parts: Any, out: torch.Tensor) -> None:
            if threading.current_thread() not in waiting:
                over.wait(60)
            add(parts, out)

        def first() -> None:
            waiting.add(threading.current_thread())
            try:
                summed(transports[0], num_elements=10_000)  # a shard goes in one piece
            finally:
                over.set()

        monkeypatch.setattr(exchange, "add_in_order", stop)
        outcome, *_ = at_once(first, *[lambda t=t: summed(t, num_elements=10_000) for t in transports[1:]])
    check_part(outcome, CallPart.SUM, (), "waiting for replicas that cannot be named: none is known to be out of reach")


def test_of_gloo_a_member_that_does_not_come_is_named_as_slow() -> None:
    with endpoints("gloo", 3, replace(LONG, slowest_s=2.0, sum_s=1.0)) as (made, addresses):
        transports: list[Any] = [one.open(1, number, addresses) for number, one in enumerate(made)]
        assert at_once(*[lambda t=t: t.sum_into([torch.ones(3)], [torch.empty(3)], tag=0) for t in transports]) == [None] * 3
        outcomes = at_once(*[lambda t=t: summed(t) for t in transports[:2]])
    for outcome in outcomes:
        check_part(outcome, CallPart.SLOWEST, (2,), "the call was not entered for 2 s by replicas [2]")


@pytest.mark.parametrize("kind", ["direct", "gloo"])
def test_new_deadlines_of_an_endpoint_count_from_the_next_call_on(kind: str) -> None:
    with endpoints(kind, 2, LONG) as (made, addresses):
        transports: list[Any] = [one.open(1, number, addresses) for number, one in enumerate(made)]
        assert at_once(*[lambda t=t: t.sum_into([torch.ones(3)], [torch.empty(3)], tag=0) for t in transports]) == [None] * 2
        made[0].deadlines = replace(LONG, slowest_s=0.5)
        (outcome,) = at_once(lambda: summed(transports[0]))
    check_part(outcome, CallPart.SLOWEST, (1,), "the call was not entered for 0.5 s by replicas [1]")


# --- Planted bugs: one wait for all parts, as it was ------------------------------------------------------------------------


def test_a_sum_that_takes_every_wait_for_its_own_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectTransport, "_part", lambda self, exchange, peers: CallPart.SUM)
    with pytest.raises(AssertionError):
        check_a_member_that_does_not_come()
    with pytest.raises(AssertionError):
        check_a_member_that_comes_late("direct")


def test_a_sum_that_is_never_told_from_a_slow_member_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectTransport, "_part", lambda self, exchange, peers: CallPart.SLOWEST)
    with pytest.raises(AssertionError):
        check_a_sum_that_stops(replace(LONG, sum_s=0.3, slowest_s=0.6))
