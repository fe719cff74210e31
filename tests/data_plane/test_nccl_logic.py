"""What the NCCL transport decides, against an NCCL of a few lines of Python. NCCL itself is the subject of tests/gpu."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import nccl.core as nccl4py
import pytest
import torch
from msgspec.structs import replace
from nccl.bindings import nccl as nccl4py_bindings

from megatron_recover.config import NCCL_NOT_BY_FILES
from megatron_recover.data_plane import nccl, nccl_communicator
from megatron_recover.data_plane.direct import DirectEndpoint
from megatron_recover.data_plane.endpoints import open_endpoint
from megatron_recover.data_plane.nccl import NcclTransport
from megatron_recover.data_plane.transport import CallPart, DeadlineExceeded, DeviceError, Revoked, TransportError
from megatron_recover.deadlines import Deadlines
from megatron_recover.trainer.communication import is_device_error
from tests.control_plane.partners import KEY, within
from tests.data_plane.fake_nccl import REMOTE_ERROR, Communicator, World, record_stream, sums_of
from tests.data_plane.threads import at_once

LONG = within(10.0)
SHORT = replace(within(10.0), slowest_s=0.3, sum_s=0.6, close_s=0.3)
"""Connecting may take its time."""
UNTOUCHED = -1.0
OPERANDS = {(torch.float32, 3), (torch.float64, 2)}
pytestmark = pytest.mark.timeout(150)


class Pair:
    """Two members of one world, over generations."""

    def __init__(self, deadlines: Deadlines = LONG, **queues: bool) -> None:
        self.world = World()
        self.sums = [sums_of(self.world, deadlines, **queues) for _ in range(2)]
        self.endpoints = [DirectEndpoint(key=KEY, rank=0, deadlines=deadlines) for _ in range(2)]
        self.addresses = {replica: endpoint.address for replica, endpoint in enumerate(self.endpoints)}
        self.unreachable: list[tuple[int, ...]] = [(), ()]
        self.transports: list[NcclTransport] = []
        self.generation = 0

    def open(self) -> list[NcclTransport]:
        """Enter the next generation, which both have promised: both have revoked what they had."""
        self.generation += 1
        self.world.generation = self.generation
        for transport in self.transports:
            transport.close()
        self.transports = [
            sums.transport(endpoint.open(self.generation, replica, self.addresses), lambda r=replica: self.unreachable[r])
            for replica, (sums, endpoint) in enumerate(zip(self.sums, self.endpoints, strict=True))
        ]
        return self.transports

    def sum(self, size: int = 3, *, probe: Callable[[str], None] | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        """Outcomes and results of a sum that both enter: a gradient, and counts."""
        results = [torch.full((size,), UNTOUCHED) for _ in range(2)]
        calls = [
            lambda t=transport, r=result: enter(t, r, probe=probe)
            for transport, result in zip(self.transports, results, strict=True)
        ]
        return at_once(*calls), results

    def communicators(self, position: int) -> list[Communicator]:
        return [made for made in self.world.made if made.position == position]

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        assert self.world.violations == []


def enter(transport: NcclTransport, result: torch.Tensor, *, probe: Callable[[str], None] | None = None) -> None:
    source, counts = torch.empty_like(result), torch.ones(2, dtype=torch.float64)
    stream = transport._cuda.current_stream()
    stream.enqueue(lambda: source.fill_(2.0**transport.me))
    transport.sum_into([source, counts], [result, torch.empty_like(counts)], tag=1, probe=probe)
    assert not stream.unrecorded, "scratch could be freed below the copy to a result"


@pytest.fixture
def pair() -> Iterator[Pair]:
    with a_pair() as made:
        yield made


@contextlib.contextmanager
def a_pair(deadlines: Deadlines = LONG, **queues: bool) -> Iterator[Pair]:
    made = Pair(deadlines, **queues)
    yield made
    made.close()


def is_untouched(result: torch.Tensor) -> bool:
    return bool((result == UNTOUCHED).all())


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def test_sums_out_of_place_and_copies(pair: Pair) -> None:
    pair.open()
    outcomes, results = pair.sum()
    assert outcomes == [None, None]
    assert all(torch.equal(result, torch.full((3,), 3.0)) for result in results)
    kept = [torch.full((4,), 5.0), torch.zeros(4)]
    copies = [
        lambda t=transport, k=tensor: t.copy_into([k], source=0, targets=[1], tag=2)
        for transport, tensor in zip(pair.transports, kept, strict=True)
    ]
    assert at_once(*copies) == [None, None]
    assert torch.equal(kept[1], kept[0])
    for transport in pair.transports:
        transport.close()
    (outcome,) = at_once(lambda: enter(pair.transports[0], results[0]))
    assert isinstance(outcome, Revoked)


def test_many_sums_share_one_stream_and_one_scratch(pair: Pair) -> None:
    """A stream for each pass made torch's allocator keep a set of scratch for each (FINDINGS G7)."""
    pair.open()
    for size in (1000, 7, 1000, 500):
        outcomes, results = pair.sum(size)
        assert outcomes == [None, None] and all(torch.equal(result, torch.full((size,), 3.0)) for result in results)
    assert pair.world.num_streams == 2
    assert [sum(each.numel() for each in sums._scratch._memory) for sums in pair.sums] == [4000 + 16] * 2


@pytest.mark.parametrize(
    ("call", "number"),
    [
        *(("init", 1), ("get_unique_id", 1), ("get_last_error", 1), ("allreduce", 1), ("allreduce", 2)),
        *(("get_async_error", number) for number in range(1, 6)),
    ],
)
def test_an_error_of_any_call_is_a_transport_error_and_the_next_generation_works(call: str, number: int) -> None:
    """`NCCLError` is no TransportError: one death took survivors along (FINDINGS G4)."""
    with a_pair(SHORT) as pair:
        pair.open()
        pair.world.failing[0, call] = number
        if call == "get_last_error":
            pair.world.after_asking = lambda communicator: setattr(
                communicator, "error", REMOTE_ERROR * (not communicator.position)
            )
        outcomes, results = pair.sum()
        assert isinstance(outcomes[0], TransportError), repr(outcomes[0])
        assert call == "get_unique_id" or "NCCL" in str(outcomes[0])
        assert is_untouched(results[0])
        pair.world.after_asking = lambda communicator: None
        pair.open()
        outcomes, results = pair.sum()
        assert outcomes == [None, None] and torch.equal(results[0], torch.full((3,), 3.0))


@pytest.mark.parametrize("call", ["destroy", "get_async_error"])
def test_a_communicator_in_doubt_is_kept_with_its_memory(call: str) -> None:
    with a_pair(SHORT) as pair:
        pair.open()
        assert pair.sum()[0] == [None, None]
        pair.world.failing[0, call] = pair.world.calls[0, call] + 1
        pair.open()
        outcomes, results = pair.sum()
        assert outcomes == [None, None] and torch.equal(results[1], torch.full((3,), 3.0))
        pair.open()
        assert pair.sum()[0] == [None, None]
        until(lambda: pair.sums[0]._retirement.num_in_doubt, "it is kept")
        assert not pair.communicators(0)[0].destroyed.is_set()


def test_a_communicator_with_a_lost_connection_frees_its_scratch_and_is_aborted(pair: Pair) -> None:
    """NCCL reports such an error for ever, also when all is at rest, and cannot destroy it any more."""
    pair.open()
    assert pair.sum()[0] == [None, None]
    pair.world.hangs_on_error = True

    def lose(source: torch.Tensor) -> None:
        if source.numel() == 3:  # the gradient, whose kernel the host waits for by then
            time.sleep(0.2)
            for each in pair.world.made:
                each.error = REMOTE_ERROR

    pair.world.pause = lose
    outcomes, results = pair.sum()
    assert all(isinstance(outcome, TransportError) and "remote process exited" in str(outcome) for outcome in outcomes)
    assert all(is_untouched(result) for result in results)
    pair.world.pause, pair.world.hangs_on_error = lambda source: None, False
    old = [pair.communicators(position)[0] for position in range(2)]
    until(lambda: all(each.is_at_rest for sums in pair.sums for each in sums._retirement._all), "at rest")
    assert all(sums._scratch._spare and not each.sources for sums in pair.sums for each in sums._retirement._all)
    pair.open()
    assert pair.sum()[0] == [None, None]
    assert all(each.destroyed.wait(60) for each in old) and not any(sums._retirement.num_in_doubt for sums in pair.sums)


@pytest.mark.parametrize("said", ["remote process exited", "out of memory"])
def test_an_error_before_nccl_was_asked_again_ends_the_kernel_and_keeps_the_communicator(said: str, pair: Pair) -> None:
    """A kernel that nobody stops holds up whatever waits for the device: a module that is loaded, memory that is freed.

    Seen on an H200: of 12 peers that were killed before a sum, the connections of 2 were lost so early, and the survivor
    hung in its next sum (the job of NCCL's thread stays linked to the communicator while an error is shown).
    """
    pair.open()
    assert pair.sum()[0] == [None, None]
    pair.world.hangs_on_error, pair.world.launch_s, pair.world.last_error = True, 0.3, said
    old = [pair.communicators(position)[0] for position in range(2)]

    def lose() -> None:
        until(lambda: all(each.launching for each in old), "both enqueue")
        for each in old:
            each.error = REMOTE_ERROR

    losing = threading.Thread(target=lose)
    losing.start()
    outcomes, results = pair.sum()
    losing.join()
    kind = DeviceError if "memory" in said else TransportError
    assert all(isinstance(outcome, kind) and said in str(outcome) for outcome in outcomes)
    assert all(is_untouched(result) for result in results)
    pair.world.hangs_on_error, pair.world.launch_s = False, 0.005
    until(lambda: not any(each.running for each in old), "the kernels end")
    until(lambda: all(sums._scratch._spare for sums in pair.sums), "the scratch is given back")
    for _ in range(2):
        pair.open()
        assert pair.sum()[0] == [None, None]
    assert [pair.world.calls[position, "revoke"] for position in range(2)] >= [1, 1]
    assert not any(each.destroyed.is_set() for each in old)
    assert [len(sums._retirement.kept) for sums in pair.sums] == [1, 1]
    assert not any(sums._retirement.num_in_doubt for sums in pair.sums)


@pytest.mark.parametrize("has_thread", [True, False])
def test_nccls_thread_that_does_not_end_is_ended_by_the_revoke(has_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a peer that is gone, and kernels before it on the stream run until then."""
    with a_pair(SHORT) as pair:
        pair.open()
        assert pair.sum()[0] == [None, None]
        pair.world.launch_s = 1.5  # longer than anybody waits for it
        old = [pair.communicators(position)[0] for position in range(2)]
        start = threading.Thread.start

        def starts(thread: threading.Thread) -> None:
            if not has_thread and thread.name == "nccl-retire":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starts)

        def revoke() -> None:
            until(lambda: all(each.launching for each in old), "both enqueue")
            for transport in pair.transports:
                transport.revoke()

        revoking = threading.Thread(target=revoke)
        revoking.start()
        outcomes, results = pair.sum()
        revoking.join()
        assert all(isinstance(outcome, Revoked) for outcome in outcomes)
        assert all(is_untouched(result) for result in results)
        monkeypatch.setattr(threading.Thread, "start", start)
        until(lambda: not any(each.running for each in old), "the kernels end")
        pair.world.launch_s = 0.005
        pair.open()
        assert pair.sum()[0] == [None, None]
        retirements = [sums._retirement for sums in pair.sums]
        if has_thread:
            until(lambda: all(len(each.kept) == 1 and not each.num_in_doubt for each in retirements), "kept, and at rest")
            assert all(sums._scratch._spare for sums in pair.sums), "the scratch is given back"
        else:
            assert [each.num_in_doubt for each in retirements] == [1, 1]


def test_overlap_waits_while_a_communicator_that_is_kept_may_free_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    retirement = pair.sums[0]._retirement
    kept = nccl_communicator.Retired(1, nccl4py, None, (), lambda: None, 0.0)  # type: ignore[arg-type]
    retirement._all.append(kept)
    retirement._keep(kept)
    assert retirement.is_busy(2)
    monkeypatch.setattr(retirement, "_frees_until", time.monotonic())
    assert not retirement.is_busy(2)


def test_a_call_that_begins_while_a_revoke_retires_the_communicator_is_revoked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200: the call raised that two threads used the transport, and its rank ended."""
    pair.open()
    assert pair.sum()[0] == [None, None]
    transport, is_inside, may_go_on = pair.transports[0], threading.Event(), threading.Event()

    def retire() -> None:
        is_inside.set()
        may_go_on.wait(60)

    monkeypatch.setattr(transport, "_retire", retire)
    revoking = threading.Thread(target=transport.revoke)
    revoking.start()
    assert is_inside.wait(60)
    (outcome,) = at_once(lambda: enter(transport, torch.zeros(3)))
    may_go_on.set()
    revoking.join(60)
    assert isinstance(outcome, Revoked), repr(outcome)


def test_a_communicator_that_was_never_connected_is_aborted_and_not_revoked(pair: Pair) -> None:
    pair.open()
    alone = threading.Thread(target=lambda: at_once(lambda: enter(pair.transports[0], torch.zeros(3))))
    original = pair.transports[1]._connect
    pair.transports[1]._connect = lambda: original() if pair.generation > 1 else wait_for_the_revoke(pair.transports[1])
    other = threading.Thread(target=lambda: at_once(lambda: enter(pair.transports[1], torch.zeros(3))))
    alone.start()
    other.start()
    until(lambda: pair.communicators(0), "one has begun to connect")
    pair.open()
    alone.join(60)
    other.join(60)
    assert pair.sum()[0] == [None, None]
    assert pair.communicators(0)[0].destroyed.wait(60) and not pair.world.calls[0, "revoke"]


def wait_for_the_revoke(transport: NcclTransport) -> Any:
    """Meet the others, and then begin nothing."""
    mine = [torch.zeros(128, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)]
    transport._rendezvous.sum_into(mine, [torch.empty_like(each) for each in mine], tag=-1)
    transport._wait(lambda: False)


def test_a_kernel_that_does_not_end_is_left_behind_and_writes_no_result() -> None:
    """Nothing of it is used again while it writes, however many generations pass: `World.violations` would tell."""
    with a_pair(SHORT) as pair:
        pair.world.deaf = (0, 1)
        held = threading.Event()
        pair.world.pause = lambda source: held.wait(60) if source.numel() == 3 else None
        for _ in range(2):  # the second gives up what would have been given back of the first
            pair.open()
            outcomes, results = pair.sum()
            assert all(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)
            assert all(is_untouched(result) for result in results)
        (again,) = at_once(lambda: enter(pair.transports[0], results[0]))
        assert isinstance(again, TransportError) and "broken" in str(again)
        pair.world.pause = lambda source: None
        for _ in range(2):
            pair.open()
            outcomes, results = pair.sum()
            assert outcomes == [None, None] and all(torch.equal(result, torch.full((3,), 3.0)) for result in results)
        until(lambda: all(sums._retirement.num_in_doubt for sums in pair.sums), "those in doubt are kept")
        held.set()


def test_a_retired_communicator_is_freed_only_when_a_newer_generation_is_promised_by_all(pair: Pair) -> None:
    """Until then a kernel of another member may read this process's memory over NVLink (FINDINGS G16)."""
    pair.open()
    assert pair.sum()[0] == [None, None]
    old = [pair.communicators(position)[0] for position in range(2)]
    for transport in pair.transports:
        transport.revoke()
    pair.open()
    assert not any(each.aborted.wait(0.1) for each in old), "nor before the first call, beside other work: a revoke frees, too"
    pair.world.free_s = 0.5
    assert pair.sum()[0] == [None, None]
    assert all(each.aborted.is_set() and each.destroyed.is_set() for each in old)


def test_nothing_is_freed_while_a_kernel_of_another_member_runs() -> None:
    with a_pair(replace(within(30.0), slowest_s=4.0, sum_s=0.5)) as pair:
        pair.open()
        assert pair.sum()[0] == [None, None]
        pair.world.deaf = (1,)
        held = threading.Event()
        pair.world.pause = lambda source: held.wait(60) if source.numel() == 3 else None
        assert all(isinstance(outcome, DeadlineExceeded) for outcome in pair.sum()[0])
        pair.world.pause = lambda source: None
        pair.open()
        assert pair.sum()[0] == [None, None]
        assert not any(made.destroyed.is_set() for made in pair.world.made)
        held.set()
        pair.world.deaf = ()
        until(lambda: not pair.world.writing, "the kernel quits")
        until(lambda: all(sums._retirement.is_resting(9) for sums in pair.sums), "all are at rest")
        pair.open()
        assert pair.sum()[0] == [None, None]
        assert all(pair.communicators(position)[0].destroyed.wait(60) for position in range(2))


def test_a_communicator_that_cannot_be_freed_delays_one_generation_and_forbids_overlap() -> None:
    with a_pair(SHORT, has_own_collectives=False) as pair:
        pair.open()
        assert pair.sum()[0] == [None, None]
        pair.world.may_free.clear()
        pair.open()
        assert pair.sum()[0] == [None, None]
        assert not pair.sums[0]._retirement.is_settling(9), "nobody waits for it again"
        assert "not destroyed yet" in pair.sums[0].overlap_refusal(2, OPERANDS)
        pair.world.may_free.set()
        assert pair.communicators(0)[0].destroyed.wait(60)
        until(lambda: pair.sums[0].overlap_refusal(2, OPERANDS) == "", "overlap is allowed again")


def test_a_call_of_nccl_that_hangs_while_a_communicator_retires_delays_no_later_generation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread that retires it cannot see its own end of waiting while it is inside the call."""
    with a_pair(replace(LONG, close_s=0.2), has_own_collectives=False) as pair:
        pair.open()
        assert pair.sum()[0] == [None, None]
        pair.world.may_revoke.clear()
        pair.world.pause = lambda source: [each.revoke() for each in pair.transports] and None
        outcomes, _ = pair.sum()
        assert all(isinstance(outcome, Revoked) for outcome in outcomes)
        pair.world.pause = lambda source: None
        assert pair.world.revoking.wait(60)
        pair.open()
        until(lambda: all(sums._retirement.is_resting(2) for sums in pair.sums), "nobody waits for it")
        assert pair.sum()[0] == [None, None]
        assert [sums._retirement.num_in_doubt for sums in pair.sums] == [1, 1]
        kept = [record.message for record in caplog.records if "is kept" in record.message]
        assert kept == ["the communicator of generation 1 is kept, with its memory: it did not come to rest within 0.2 s"] * 2
        assert "not destroyed yet" in pair.sums[0].overlap_refusal(2, OPERANDS), "the call may still free memory"
        pair.world.may_revoke.set()
        until(lambda: "not destroyed yet" not in pair.sums[0].overlap_refusal(2, OPERANDS), "nothing is freed any more")
        pair.open()
        assert pair.sum()[0] == [None, None]


def test_a_communicator_that_came_to_rest_in_time_may_wait_for_long_to_be_destroyed(caplog: pytest.LogCaptureFixture) -> None:
    with a_pair(replace(LONG, close_s=0.1)) as pair:
        pair.open()
        assert pair.sum()[0] == [None, None]
        for transport in pair.transports:
            transport.revoke()
        time.sleep(0.2)
        pair.open()
        assert pair.sum()[0] == [None, None]
        assert all(pair.communicators(position)[0].destroyed.is_set() for position in range(2))
        assert "is kept" not in caplog.text


@pytest.mark.parametrize("forgets", [False, True])
def test_scratch_is_freed_only_when_the_communicator_is_at_rest(forgets: bool) -> None:
    """A revoke returns at once; the device looks at the flag every 10,000 spins, and writes until then (FINDINGS G3)."""
    with a_pair() as pair:
        pair.world.blind_s, pair.world.forgets = 0.5, forgets
        pair.open()
        in_flight = threading.Barrier(3)
        pair.world.pause = lambda source: time.sleep(0.3)

        def probe(instant: str) -> None:
            if instant == "sent":
                in_flight.wait(60)

        def revoke() -> None:
            in_flight.wait(60)
            for transport in pair.transports:
                transport.revoke()

        results = [torch.full((3,), UNTOUCHED) for _ in range(2)]
        begun = time.monotonic()
        *outcomes, _ = at_once(
            *[lambda t=t, r=r: enter(t, r, probe=probe) for t, r in zip(pair.transports, results, strict=True)], revoke
        )
        assert all(isinstance(outcome, Revoked) for outcome in outcomes) and time.monotonic() - begun < 30
        for outcome in outcomes:
            traceback.clear_frames(outcome.__traceback__)  # they would keep the memory
        assert all(is_untouched(result) for result in results)
        pair.open()
        outcomes, results = pair.sum()
        assert outcomes == [None, None] and torch.equal(results[0], torch.full((3,), 3.0))
        until(lambda: not pair.world.writing, "all kernels have seen the flag")


def test_a_revoke_between_a_sum_and_its_result_leaves_the_result_alone(pair: Pair) -> None:
    pair.open()
    outcomes, results = pair.sum(probe=lambda instant: [each.revoke() for each in pair.transports if instant == "middle"])
    assert all(isinstance(outcome, Revoked) for outcome in outcomes) and all(is_untouched(result) for result in results)


@pytest.mark.parametrize(("size", "part"), [(3, CallPart.SLOWEST), (1, CallPart.SUM)])
def test_each_part_of_a_sum_has_its_deadline(size: int, part: CallPart) -> None:
    """The smallest operand first: when its sum is complete, all have entered."""
    with a_pair(LONG) as pair:
        pair.open()
        assert pair.sum()[0] == [None, None]
        for endpoint in pair.endpoints:  # new ones count from the next call on
            endpoint.deadlines = SHORT
        held = threading.Event()
        stuck = 2 if part is CallPart.SLOWEST else 5  # the counts have 2 elements
        pair.world.pause = lambda source: held.wait(60) if source.numel() == stuck else None
        pair.world.deaf = (0, 1)
        outcomes, _ = pair.sum(5)
        assert [getattr(outcome, "part", outcome) for outcome in outcomes] == [part] * 2
        held.set()


def test_a_kernel_that_does_not_end_names_only_who_does_not_answer_a_probe() -> None:
    with a_pair(SHORT) as pair:
        pair.open()
        pair.unreachable[0] = (1,)
        held = threading.Event()
        pair.world.pause = lambda source: held.wait(60)
        outcomes, _ = pair.sum()
        assert [getattr(outcome, "peers", None) for outcome in outcomes] == [(1,), ()]
        held.set()


def test_peers_that_the_rendezvous_named_are_not_replaced(pair: Pair) -> None:
    pair.open()
    pair.unreachable[0] = (7,)
    error = TransportError("x")
    error.peers = (1,)
    with pytest.raises(TransportError) as raised, pair.transports[0]._call():
        raise error
    assert raised.value.peers == (1,)


def test_a_revoke_that_comes_while_peers_are_probed_leaves_what_the_probe_finds() -> None:
    """All members of a ring stall together: the first report makes a generation, which meets the others as they probe."""
    with a_pair(SHORT) as pair:
        transports, held = pair.open(), threading.Event()
        pair.unreachable = [(1,), (0,)]
        for transport in transports:
            transport._unreachable = lambda t=transport, probe=transport._unreachable: (t.revoke(), probe())[1]
        pair.world.pause = lambda source: held.wait(60)
        outcomes, _ = pair.sum()
        assert [(type(outcome), outcome.peers, outcome.stalled) for outcome in outcomes] == [
            (Revoked, (1,), True), (Revoked, (0,), True),
        ]  # fmt: skip
        held.set()


@pytest.mark.parametrize("stalled", [True, False])
def test_a_revoke_while_a_failed_call_probes_leaves_its_peers_and_whether_it_had_stalled(pair: Pair, stalled: bool) -> None:
    transport = pair.open()[0]

    def probe() -> tuple[int, ...]:
        transport.revoke()
        return (1,)

    transport._unreachable = probe
    with pytest.raises(Revoked) as raised, transport._call():
        transport._since -= LONG.slowest_s if stalled else 0.0
        raise TransportError("x")
    assert (raised.value.peers, raised.value.stalled) == ((1,), stalled)


def test_an_asynchronous_error_is_seen_although_it_completes_the_event(pair: Pair) -> None:
    """Garbage would be taken for a sum, if NCCL were asked first and then the event."""
    pair.open()
    assert pair.sum()[0] == [None, None]
    pair.world.ends_on_error = True
    dies = threading.Event()
    asked: Counter[Communicator] = Counter()

    def pause(source: torch.Tensor) -> None:
        if source.numel() == 3:  # the gradient, behind the counts
            dies.wait(0.5)
            for each in pair.world.made:
                each.error = REMOTE_ERROR

    def behind_the_answer(communicator: Communicator) -> None:
        """Asked between two looks at the event, the communicator says that it is well; then the kernel ends."""
        asked[communicator] += communicator.num_sums == 4 and communicator.running == 1 and not communicator.launching
        if asked[communicator] > 20 and communicator.running:  # the counts are done for long
            dies.set()
            until(lambda: not communicator.running, "the kernel ends")
            time.sleep(0.1)  # the event completes behind it

    pair.world.pause, pair.world.after_asking = pause, behind_the_answer
    outcomes, results = pair.sum()
    assert all(isinstance(outcome, TransportError) and "remote process exited" in str(outcome) for outcome in outcomes)
    assert all(is_untouched(result) for result in results)


def test_a_device_without_memory_ends_the_process_and_charges_nobody() -> None:
    with a_pair(SHORT) as pair:
        pair.open()

        def stream(stream: object) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        pair.world.stream = stream  # type: ignore[method-assign]
        outcomes, results = pair.sum()
        assert all(isinstance(outcome, DeviceError) and is_device_error(outcome) for outcome in outcomes)
        assert all(is_untouched(result) for result in results)


@pytest.mark.parametrize("call", ["allreduce", "Event", "a stream that is asked after NCCL's error"])
def test_an_error_of_the_device_is_no_transport_error(call: str) -> None:
    """The device cannot be used any more: the process ends, and its replica with it."""
    with a_pair(SHORT) as pair:
        pair.open()
        broken = torch.AcceleratorError("CUDA error: unspecified launch failure")

        def fail() -> None:
            raise broken

        if call == "Event":
            pair.world.Event = fail  # type: ignore[assignment]
        elif call != "allreduce":
            pair.world.failing[0, "allreduce"] = 1
            pair.world.lost_device = broken
        else:
            pair.world.failing[0, call], pair.world.error = 1, broken
        outcomes, results = pair.sum()
        assert outcomes[0] is broken and all(is_untouched(result) for result in results)


def test_overlap_waits_for_a_communicator_of_the_generation(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    pair.open()
    pair.sums[0]._has_own_collectives = False
    assert "has not summed" in pair.sums[0].overlap_refusal(1, OPERANDS)
    pair.sum()
    assert pair.sums[0].overlap_refusal(1, OPERANDS) == ""
    assert "has not summed" in pair.sums[0].overlap_refusal(2, OPERANDS)
    assert "has not summed" in pair.sums[0].overlap_refusal(1, {(torch.float32, 4)}), "it may need more scratch"


@pytest.mark.parametrize(
    ("queues", "ordered", "expected"),
    [
        ("1", "0", "CUDA_DEVICE_MAX_CONNECTIONS is 1"),
        ("", "0", "CUDA_DEVICE_MAX_CONNECTIONS is not set"),
        ("32", "1", "NCCL_LAUNCH"),
    ],
)
def test_overlap_is_refused_where_two_communicators_can_wait_for_each_other(
    queues: str, ordered: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", ordered)
    for has_own in (True, False):
        with a_pair(has_own_collectives=has_own) as pair:
            pair.open()
            pair.sum()
            refusal = pair.sums[0].overlap_refusal(1, OPERANDS)
            assert refusal.startswith(expected) if has_own else refusal == ""


@pytest.mark.parametrize(("kind", "device", "remedy"), [("nccl", "cpu", "use direct"), ("direct", "cuda:0", "use nccl")])
def test_a_transport_that_cannot_serve_the_device_is_refused_with_the_remedy(kind: Any, device: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        open_endpoint(kind, key=KEY, rank=0, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_nccl_without_cuda_says_so() -> None:
    with pytest.raises(ValueError, match="torch sees none"):
        open_endpoint("auto", key=KEY, rank=0, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it would begin to connect")
def test_the_real_binding_has_what_is_used_and_its_errors_are_transport_errors() -> None:
    """nccl4py and NCCL load without a device; the first call that needs one fails."""
    assert nccl4py_bindings.get_version() >= nccl.LEAST_NCCL
    assert len(bytes(nccl4py.get_unique_id())) == nccl.UNIQUE_ID_BYTES
    for name in ("allreduce", "get_async_error", "get_last_error", "revoke", "destroy", "abort"):
        inspect.signature(getattr(nccl4py.Communicator, name))
    inspect.signature(nccl4py.Communicator.allreduce).bind(None, torch.zeros(1), torch.zeros(1), nccl4py.SUM, stream=0)
    with pytest.raises(TransportError, match="ncclCommInitRank failed: UnhandledCudaError"):
        nccl_communicator.Communicator(nccl4py, bytes(128), 2, 0, World())


@pytest.mark.parametrize(("environment", "expected"), [({}, "1"), (NCCL_NOT_BY_FILES, "")])
def test_an_empty_variable_comes_before_nccls_files(environment: dict[str, str], expected: str, tmp_path: pathlib.Path) -> None:
    """NCCL reads its files into the environment at its first call; one of them could make every call block."""
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_COMM_BLOCKING=1\n")
    code = (
        "import ctypes, nccl.core as nccl; nccl.get_unique_id(); c = ctypes.CDLL(None); c.getenv.restype = ctypes.c_char_p; "
        "print('value:', c.getenv(b'NCCL_COMM_BLOCKING').decode())"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "NCCL_COMM_BLOCKING"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | {"NCCL_CONF_FILE": str(file)} | environment,
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == f"value: {expected}\n"


@pytest.fixture(autouse=True)
def on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport takes tensors of a GPU only."""
    monkeypatch.setattr(nccl, "check_operands", lambda *operands, device: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
