"""What only the gloo transport has to show: that it leaves gloo behind, and that nothing of it stays for ever."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megatron_recover.data_plane import gloo
from megatron_recover.data_plane.direct import DirectTransport
from megatron_recover.data_plane.endpoints import open_endpoint
from megatron_recover.data_plane.gloo import GlooTransport
from megatron_recover.data_plane.transport import CallPart, DeadlineExceeded, Endpoint, Revoked, TransportError
from tests.control_plane.partners import KEY, within
from tests.data_plane.ranks import ranks
from tests.data_plane.threads import at_once

pytestmark = pytest.mark.timeout(200)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def pair(generation: int, made: list[Endpoint]) -> list[Any]:
    """Transports of replicas 0 and 3: 1 and 2 are gone, so that a member's id is not its place."""
    members = dict(zip((0, 3), made, strict=True))
    addresses = {replica: endpoint.address for replica, endpoint in members.items()}
    return [endpoint.open(generation, replica, addresses) for replica, endpoint in members.items()]


def test_sums_and_copies_of_all_types_over_generations() -> None:
    made = [open_endpoint("gloo", key=KEY, rank=0) for _ in range(2)]
    older: list[Any] = []
    for generation in (1, 2, 5):
        transports = pair(generation, made)
        for retired in older:
            with pytest.raises(Revoked):
                retired.sum_into([torch.ones(1)], [torch.empty(1)], tag=1)
        older += transports
        sources = [[torch.full((n,), 2**r).to(dtype) for n, dtype in zip((5, 0, 9, 3), DTYPES, strict=True)] for r in range(2)]
        results = [[torch.empty_like(source) for source in sources[r]] for r in range(2)]
        calls = [
            lambda t=transport, s=source, r=result: t.sum_into(s, r, tag=1)
            for transport, source, result in zip(transports, sources, results, strict=True)
        ]
        assert at_once(*calls) == [None, None]
        assert all(bool((result == 3).all()) for r in range(2) for result in results[r])
        assert all(bool((source == 2**r).all()) for r in range(2) for source in sources[r]), "a source was written"
        kept = [torch.full((4,), 7.0 + r) for r in range(2)]
        copies = [
            lambda t=transport, k=tensor: t.copy_into([k], source=3, targets=[0], tag=2)
            for transport, tensor in zip(transports, kept, strict=True)
        ]
        assert at_once(*copies) == [None, None] and kept[0].tolist() == [8.0] * 4
    with pytest.raises(Revoked, match="generation 5"):
        made[0].open(5, 0, {0: made[0].address})
    for endpoint in made:
        endpoint.close()


def test_members_connect_while_the_group_is_built_also_where_the_user_has_asked_torch_for_lazy_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lazy group looks addresses up at its first sum. By then the store that it was built with is gone."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    made = [open_endpoint("gloo", key=KEY, rank=0) for _ in range(2)]
    results = [torch.empty(3) for _ in made]
    calls = [
        lambda t=transport, r=result: t.sum_into([torch.ones(3)], [r], tag=1)
        for transport, result in zip(pair(1, made), results, strict=True)
    ]
    assert at_once(*calls) == [None, None]
    assert [result.tolist() for result in results] == [[2.0] * 3] * 2
    for endpoint in made:
        endpoint.close()


def abandon_and_wait_for_the_threads(endpoint: Endpoint, me: int, addresses: dict[int, str]) -> int:
    """Wait for a member that is stopped, leave by revoke: the threads left behind end long before gloo's timeout."""
    transport: Any = endpoint.open(1, me, addresses)
    warm = torch.empty(1)
    transport.sum_into([torch.ones(1)], [warm], tag=1)
    timer = threading.Timer(0.5, transport.revoke)
    timer.start()
    result = torch.full((1 << 20,), -1.0)
    with pytest.raises(Revoked):
        transport.sum_into([torch.ones(1 << 20)], [result], tag=2)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("gloo")]
    assert left, "the operation was not left behind: this test shows nothing"
    for thread in left:
        thread.join(50)
    assert bool((result == -1.0).all())
    return sum(thread.is_alive() for thread in left)


def stand_still(endpoint: Endpoint, me: int, addresses: dict[int, str]) -> None:
    transport: Any = endpoint.open(1, me, addresses)
    transport.sum_into([torch.ones(1)], [torch.empty(1)], tag=1)


def test_threads_left_behind_end() -> None:
    with ranks("gloo", 2) as run:
        run.tell([0], "call", abandon_and_wait_for_the_threads, (run.addresses,))
        run.tell([1], "call", stand_still, (run.addresses,))
        run.receive(1)
        run.signal(1, signal.SIGSTOP)
        assert run.receive(0) == 0


def check_an_operation_left_behind_writes_nothing(patch: pytest.MonkeyPatch) -> None:
    """Member 0 leaves a running sum; then member 1 goes on, and gloo completes the sum in member 0's process after all."""
    made = [open_endpoint("gloo", key=KEY, rank=0) for _ in range(2)]
    transports = pair(1, made)
    assert at_once(*[
        lambda t=t: t.sum_into([torch.ones(1)], [torch.empty(1)], tag=0) for t in transports
    ]) == [None, None]  # fmt: skip
    running, left = threading.Event(), threading.Event()
    original = GlooTransport._do

    def do(self: GlooTransport, job: Callable[[Any], None], part: CallPart, *arguments: Any) -> None:
        if part is CallPart.SUM and self is transports[1]:
            assert left.wait(60)
        if part is not CallPart.SUM or self is transports[1]:
            original(self, job, part, *arguments)
            return

        def announced(group: Any) -> None:
            running.set()
            job(group)

        original(self, announced, part, *arguments)

    patch.setattr(GlooTransport, "_do", do)
    patch.setattr(gloo, "_poison", lambda group: None)  # it would make gloo fail instead, mostly
    result, late = torch.full((100,), -1.0), torch.empty(100)

    def revoke() -> None:
        running.wait(60)
        transports[0].revoke()

    outcomes: list[Any] = []
    other = threading.Thread(
        target=lambda: outcomes.extend(at_once(lambda: transports[1].sum_into([torch.ones(100)], [late], tag=1)))
    )
    other.start()
    outcome, _ = at_once(lambda: transports[0].sum_into([torch.ones(100)], [result], tag=1), revoke)
    assert isinstance(outcome, Revoked)
    result.fill_(-2.0)
    left.set()
    other.join(60)
    assert outcomes == [None]
    transports[0].thread.join(60)
    values = result.unique().tolist()
    for endpoint in made:
        endpoint.close()
    if values != [-2.0]:
        raise WrittenLate(values)
    assert late.tolist() == [2.0] * 100, "gloo did not complete what was left behind: this test shows nothing"


class WrittenLate(Exception):
    """An operation that was left behind wrote to its result."""


def test_an_operation_left_behind_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_an_operation_left_behind_writes_nothing(monkeypatch)


def check_a_revoke_waits_for_the_copy_to_results(patch: pytest.MonkeyPatch) -> None:
    """A16: what gloo may still write is its own, but the caller's copy to the results is not."""
    inside, leave, returned = threading.Event(), threading.Event(), threading.Event()
    copy = gloo.copy

    def slow(piece: torch.Tensor, into: torch.Tensor) -> None:
        inside.set()
        assert leave.wait(60)
        copy(piece, into)

    patch.setattr(gloo, "copy", slow)
    patch.setattr(gloo, "COPIED_ELEMENTS", 10)
    endpoint = open_endpoint("gloo", key=KEY, rank=0)
    transport: Any = endpoint.open(1, 0, {0: endpoint.address})
    result = torch.zeros(100)

    def revoke() -> int:
        assert inside.wait(60)
        waiting = threading.Thread(target=lambda: (transport.revoke(), returned.set()))
        waiting.start()
        early = returned.wait(0.2)
        leave.set()
        waiting.join(60)
        written = int(result.sum())
        assert returned.is_set() and not early, "it returned while the call was writing"
        return written

    outcome, written = at_once(lambda: transport.sum_into([torch.ones(100)], [result], tag=1), revoke)
    endpoint.close()
    if isinstance(written, BaseException):
        raise written
    assert isinstance(outcome, Revoked) and result.sum() == written == 10


def test_a_revoke_waits_for_the_copy_to_results(monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_revoke_waits_for_the_copy_to_results(monkeypatch)


def test_a_revoke_that_does_not_wait_for_the_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo.WriteGate, "shut", lambda self: setattr(self, "_is_shut", True))
    with pytest.raises(AssertionError, match="while the call was writing"):
        check_a_revoke_waits_for_the_copy_to_results(monkeypatch)


def test_a_planted_reduction_right_in_the_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_into(self: GlooTransport, sources: Any, results: Any, *, tag: int) -> None:
        def reduce(group: Any) -> None:
            for source, result in zip(sources, results, strict=True):
                result.copy_(source)
                group.allreduce([result]).wait()

        self._do(reduce, CallPart.SUM)

    monkeypatch.setattr(GlooTransport, "sum_into", sum_into)
    with pytest.raises(WrittenLate):
        check_an_operation_left_behind_writes_nothing(monkeypatch)


class SlowLink:
    """A group whose operations take their time by the byte, `stops_after` of them: the others never end by themselves."""

    def __init__(self, group: Any, seconds_a_byte: float, stops_after: int) -> None:
        self._group, self._seconds_a_byte, self._left = group, seconds_a_byte, stops_after
        self.num_given = 0
        self.over = threading.Event()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.num_given += 1
        work, seconds = self._group.allreduce(tensors, options), self._seconds_a_byte * tensors[0].nbytes
        stops = self.num_given > self._left

        class Slow:
            def wait(inner) -> None:
                self.over.wait(60 if stops else seconds)  # the slow link that is the subject
                work.wait()

        return Slow()


NUM_PIECES = 60


def test_a_sum_left_in_its_middle_is_freed_by_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of that thread held its frames, and so the group and the scratch, until the cyclic collector came by."""
    monkeypatch.setattr(gloo, "PIECE_BYTES", 4)
    made = [open_endpoint("gloo", key=KEY, rank=0) for _ in range(2)]
    transports, begun, held = pair(1, made), threading.Barrier(3), list[weakref.ref[torch.Tensor]]()
    original = gloo._pieces

    def slowly(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        held.extend(weakref.ref(tensor) for tensor in tensors)
        begun.wait(60)
        for piece in original(tensors):
            time.sleep(0.002)  # the slow link that is the subject
            yield piece

    def revoke() -> None:
        begun.wait(60)
        for transport in transports:
            transport.revoke()

    monkeypatch.setattr(gloo, "_pieces", slowly)
    monkeypatch.setattr(gloo, "_poison", lambda group: None)  # it would make gloo fail instead, mostly
    calls = [lambda t=t: t.sum_into([torch.ones(200)], [torch.empty(200)], tag=1) for t in transports]
    gc.disable()
    try:
        outcomes = at_once(*calls, revoke)
        assert [type(outcome) for outcome in outcomes] == [Revoked, Revoked, type(None)]
        outcomes.clear()  # the callers' errors hold their frames for as long as a caller looks at them
        for transport in transports:
            transport.thread.join(60)
        assert len(held) == 2 and not any(scratch() is not None for scratch in held), "it waits for the cyclic collector"
    finally:
        gc.enable()
    for endpoint in made:
        endpoint.close()


def over_a_slow_link(patch: pytest.MonkeyPatch, whole_s: float, sum_s: float, stops_after: int = NUM_PIECES) -> Any:
    """Sum `NUM_PIECES` pieces in about `whole_s` among two members; what comes of both, their results, and their links."""
    patch.setattr(gloo, "PIECE_BYTES", 4000, raising=False)
    made = [open_endpoint("gloo", key=KEY, rank=0, deadlines=replace(within(20.0), sum_s=sum_s, probe_s=0.1)) for _ in range(2)]
    transports, links = pair(1, made), []
    original = GlooTransport._do

    def do(self: GlooTransport, job: Callable[[Any], None], part: CallPart, *arguments: Any) -> None:
        def slowly(group: Any) -> None:
            links.append(SlowLink(group, whole_s / (4000 * NUM_PIECES), stops_after))
            job(links[-1])

        original(self, slowly if part is CallPart.SUM else job, part, *arguments)

    patch.setattr(GlooTransport, "_do", do)
    sources = [torch.arange(1000 * (NUM_PIECES - 1) + 1) * 2**r for r in range(2)]
    sources = [source.to(torch.float32) for source in sources]
    results = [torch.full_like(source, -1.0) for source in sources]
    outcomes = at_once(*[lambda r=r: transports[r].sum_into([sources[r]], [results[r]], tag=1) for r in range(2)])
    for transport, link in zip(transports, links, strict=True):
        transport.revoke()
        link.over.set()
    for transport in transports:
        transport.thread.join(60)
        assert not transport.thread.is_alive()
    for endpoint in made:
        endpoint.close()
    return outcomes, results, links


def test_a_large_sum_over_a_slow_link_is_bounded_by_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation for all of it took longer than `sum_s`, and would have in each generation again."""
    outcomes, results, links = over_a_slow_link(monkeypatch, whole_s=4.5, sum_s=3.0)
    assert outcomes == [None, None]
    assert all(torch.equal(result, torch.arange(len(result)) * 3.0) for result in results)
    assert [link.num_given for link in links] == [NUM_PIECES] * 2


def check_a_sum_that_stops_half_way(patch: pytest.MonkeyPatch) -> None:
    outcomes, results, links = over_a_slow_link(patch, whole_s=1.2, sum_s=3.0, stops_after=20)
    for outcome in outcomes:
        assert isinstance(outcome, DeadlineExceeded) and outcome.part is CallPart.SUM, outcome
        assert "no progress for 3 s" in str(outcome) and outcome.stalled and outcome.peers == ()
    assert all(bool((result == -1.0).all()) for result in results)
    assert [link.num_given for link in links] == [20 + gloo.PIECES_AT_ONCE] * 2, "the rest of it was left behind, too"


def test_a_sum_that_stops_half_way_ends_and_leaves_no_more_than_a_few_pieces_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_sum_that_stops_half_way(monkeypatch)


def test_a_sum_that_goes_on_when_it_was_left_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gloo._Shared, "progress", lambda self: setattr(self, "progressed_at", max(self.progressed_at, time.monotonic()))
    )
    with pytest.raises(AssertionError, match="left behind, too"):
        check_a_sum_that_stops_half_way(monkeypatch)


def test_a_revoke_ends_a_copy_that_nobody_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [open_endpoint("gloo", key=KEY, rank=0) for _ in range(2)]
    transports = pair(1, made)
    calls = [lambda t=t: t.sum_into([torch.ones(1)], [torch.empty(1)], tag=0) for t in transports]
    assert at_once(*calls) == [None, None]
    begun = threading.Event()
    copy_into = DirectTransport.copy_into

    def announced(self: DirectTransport, tensors: Any, **options: Any) -> None:
        begun.set()
        copy_into(self, tensors, **options)

    monkeypatch.setattr(DirectTransport, "copy_into", announced)
    outcome, _ = at_once(
        lambda: transports[0].copy_into([torch.ones(1)], source=3, targets=[0], tag=1),
        lambda: begun.wait(60) and transports[0].revoke(),
    )
    assert isinstance(outcome, Revoked)
    for endpoint in made:
        endpoint.close()


def no_thread_for(patch: pytest.MonkeyPatch, prefix: str) -> None:
    """Let no thread start whose name begins with `prefix`."""
    start = threading.Thread.start

    def guarded(self: threading.Thread) -> None:
        if self.name.startswith(prefix):
            raise RuntimeError("can't start new thread")
        start(self)

    patch.setattr(threading.Thread, "start", guarded)


def test_a_revoke_without_a_free_thread_leaves_gloo_to_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called in the control thread, whose exception would end the rank."""
    made = [open_endpoint("gloo", key=KEY, rank=0) for _ in range(2)]
    transports, running, over = pair(1, made), threading.Barrier(3), threading.Event()
    original = gloo._pieces

    def held(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        running.wait(60)
        over.wait(60)
        yield from original(tensors)

    def revoke() -> None:
        running.wait(60)
        for transport in transports:
            transport.revoke()

    monkeypatch.setattr(gloo, "_pieces", held)
    no_thread_for(monkeypatch, "gloo-poison")
    outcomes = at_once(*[lambda t=t: t.sum_into([torch.ones(9)], [torch.empty(9)], tag=1) for t in transports], revoke)
    assert [type(outcome) for outcome in outcomes] == [Revoked, Revoked, type(None)], outcomes
    over.set()
    for endpoint in made:
        endpoint.close()


def test_without_a_thread_for_its_group_each_call_of_a_transport_is_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [open_endpoint("gloo", key=KEY, rank=0) for _ in range(2)]
    with monkeypatch.context() as patch:
        no_thread_for(patch, "gloo-generation-1")
        transport, _ = pair(1, made)
    calls = [
        lambda: transport.sum_into([torch.ones(1)], [torch.empty(1)], tag=1),
        lambda: transport.copy_into([torch.ones(1)], source=3, targets=[0], tag=2),
    ]
    for outcome in at_once(*calls):
        assert type(outcome) is TransportError and "can't start new thread" in str(outcome), repr(outcome)
    transports, results = pair(2, made), [torch.empty(1) for _ in made]
    again = [lambda t=t, r=r: t.sum_into([torch.ones(1)], [r], tag=1) for t, r in zip(transports, results, strict=True)]
    assert at_once(*again) == [None, None] and results[0].tolist() == [2.0]
    for endpoint in made:
        endpoint.close()


def test_an_abandoned_builder_does_not_block_the_next_generation() -> None:
    """A member waits for one that never comes; its next generation must not wait for that."""
    made = [open_endpoint("gloo", key=KEY, rank=0, deadlines=within(seconds)) for seconds in (0.5, 20.0)]
    never = open_endpoint("gloo", key=KEY, rank=0)
    alone = made[0].open(1, 0, {0: made[0].address, 9: never.address})
    with pytest.raises(TransportError):
        alone.sum_into([torch.ones(1)], [torch.empty(1)], tag=1)
    with pytest.raises(TransportError, match=r"for 0\.5 s"):  # it stays broken: what was left behind may still come back
        alone.sum_into([torch.ones(1)], [torch.empty(1)], tag=2)
    made[0]._direct.deadlines = within(20.0)  # type: ignore[attr-defined]
    transports = pair(2, made)
    results = [torch.empty(3) for _ in range(2)]
    calls = [lambda r=r: transports[r].sum_into([torch.ones(3)], [results[r]], tag=1) for r in range(2)]
    assert at_once(*calls) == [None, None] and results[0].tolist() == [2.0] * 3
    for endpoint in (*made, never):
        endpoint.close()


def test_gloo_patience_is_finite() -> None:
    """Without a bound of gloo's own, what is left behind could stay for ever."""
    assert 1 <= gloo.PATIENCE < 10
