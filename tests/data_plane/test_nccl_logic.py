"""What the NCCL transport decides, against an NCCL of a few lines of Python. NCCL itself is the subject of tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megatron_recover.data_plane import nccl
from megatron_recover.data_plane.direct import DirectEndpoint
from megatron_recover.data_plane.endpoints import open_endpoint
from megatron_recover.data_plane.transport import DeadlineExceeded, Revoked, TransportError
from megatron_recover.deadlines import Deadlines
from tests.control_plane.partners import KEY, within
from tests.data_plane.threads import at_once

LONG = within(10.0)
SHORT = replace(within(10.0), slowest_s=0.3)
"""Connecting may take its time."""
pytestmark = pytest.mark.timeout(150)


class Communicator:
    """Reduces with the help of a dictionary that all ranks see; `result` and `finished` are what NCCL would report."""

    shared: dict[int, Any]

    def __init__(self, size: int, rank: int, unique_id: bytes, shared: SimpleNamespace) -> None:
        assert unique_id == b"\x07" * 128
        self.size, self.rank, self.shared_state, self.result, self.aborted = size, rank, shared, 0, False
        shared.made.append(self)

    def allreduce(self, source: torch.Tensor, target: torch.Tensor, op: str, *, stream: int) -> None:
        self.shared_state.barrier.wait(60)
        self.shared_state.contributions[self.rank] = source
        self.shared_state.barrier.wait(60)
        target.copy_(sum(self.shared_state.contributions[rank] for rank in range(self.size)))

    def get_async_error(self) -> int:
        return self.result

    def get_last_error(self) -> str:
        return "remote process exited"

    def abort(self) -> None:
        self.aborted = True
        self.shared_state.aborts.release()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    shared = SimpleNamespace(
        made=[], endpoints=[], contributions={}, barrier=threading.Barrier(2), aborts=threading.Semaphore(0), finished=True
    )
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)
    event = SimpleNamespace(record=lambda stream: None, query=lambda: shared.finished)
    cuda = SimpleNamespace(Stream=lambda: stream, current_stream=lambda: stream, Event=lambda: event)
    monkeypatch.setattr(nccl, "check_operands", lambda *operands, device: None)
    monkeypatch.setattr(torch, "cuda", cuda)
    shared.module = SimpleNamespace(
        SUM="sum",
        get_unique_id=lambda: b"\x07" * 128,
        UniqueId=SimpleNamespace(from_bytes=bytes),
        NCCLConfig=lambda blocking: None,
        Communicator=SimpleNamespace(init=lambda size, rank, uid, config: Communicator(size, rank, uid, shared)),
    )
    yield shared
    for endpoint in shared.endpoints:
        endpoint.close()


def pair(fake: SimpleNamespace, deadlines: Deadlines = LONG) -> list[nccl.NcclTransport]:
    endpoints = [DirectEndpoint(key=KEY, rank=0, deadlines=deadlines) for _ in range(2)]
    fake.endpoints.extend(endpoints)
    addresses = {replica: endpoint.address for replica, endpoint in enumerate(endpoints)}
    return [
        nccl.NcclTransport(fake.module, endpoint.open(1, replica, addresses), deadlines)
        for replica, endpoint in enumerate(endpoints)
    ]


def call(transport: nccl.NcclTransport, result: torch.Tensor) -> Any:
    source = torch.full((3,), 2.0**transport.me)
    return lambda: transport.sum_into([source], [result], tag=1)


def test_sums_out_of_place_and_copies(fake: SimpleNamespace) -> None:
    transports, results = pair(fake), [torch.zeros(3) for _ in range(2)]
    assert at_once(*[call(transport, result) for transport, result in zip(transports, results, strict=True)]) == [None, None]
    assert all(torch.equal(result, torch.full((3,), 3.0)) for result in results)
    kept = [torch.full((4,), 5.0), torch.zeros(4)]
    copies = [
        lambda t=transport, k=tensor: t.copy_into([k], source=0, targets=[1], tag=2)
        for transport, tensor in zip(transports, kept, strict=True)
    ]
    assert at_once(*copies) == [None, None]
    assert torch.equal(kept[1], kept[0])
    for transport in transports:
        transport.close()
    assert fake.aborts.acquire(timeout=60) and fake.aborts.acquire(timeout=60)
    assert isinstance(at_once(call(transports[0], results[0]))[0], Revoked)


def test_a_kernel_that_does_not_end_is_left_behind_and_writes_no_result(fake: SimpleNamespace) -> None:
    fake.finished = False
    transports, results = pair(fake, SHORT), [torch.full((3,), -1.0) for _ in range(2)]
    outcomes = at_once(call(transports[0], results[0]), call(transports[1], results[1]))
    assert all(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)
    assert all(torch.equal(result, torch.full((3,), -1.0)) for result in results)
    assert fake.aborts.acquire(timeout=60) and fake.aborts.acquire(timeout=60)
    (again,) = at_once(call(transports[0], results[0]))
    assert isinstance(again, TransportError) and "broken" in str(again)


def test_a_kernel_that_does_not_end_names_only_who_does_not_answer_a_probe(fake: SimpleNamespace) -> None:
    fake.finished = False
    transports, results = pair(fake, SHORT), [torch.full((3,), -1.0) for _ in range(2)]
    transports[0]._unreachable = lambda: (1,)
    outcomes = at_once(call(transports[0], results[0]), call(transports[1], results[1]))
    assert [getattr(outcome, "peers", None) for outcome in outcomes] == [(1,), ()]


def test_revoke_ends_a_wait_at_once(fake: SimpleNamespace) -> None:
    fake.finished = False
    transports, results = pair(fake), [torch.full((3,), -1.0) for _ in range(2)]
    in_flight = threading.Barrier(3)

    def sum_into(transport: nccl.NcclTransport, result: torch.Tensor) -> None:
        def probe(instant: str) -> None:
            if instant == "sent":
                in_flight.wait(60)

        transport.sum_into([torch.ones(3)], [result], tag=1, probe=probe)

    def revoke() -> None:
        in_flight.wait(60)
        for transport in transports:
            transport.revoke()

    *outcomes, _ = at_once(*[lambda t=t, r=r: sum_into(t, r) for t, r in zip(transports, results, strict=True)], revoke)
    assert all(isinstance(outcome, Revoked) for outcome in outcomes)
    assert all(torch.equal(result, torch.full((3,), -1.0)) for result in results)
    assert fake.aborts.acquire(timeout=60) and fake.aborts.acquire(timeout=60)


def test_an_asynchronous_error_is_reported(fake: SimpleNamespace) -> None:
    transports, results = pair(fake), [torch.zeros(3) for _ in range(2)]
    at_once(*[call(transport, result) for transport, result in zip(transports, results, strict=True)])
    fake.made[0].result = 6
    (outcome,) = at_once(lambda: transports[fake.made[0].rank]._wait(transports[fake.made[0].rank]._accepted))
    assert isinstance(outcome, TransportError) and "remote process exited" in str(outcome)


@pytest.mark.parametrize(("kind", "device", "remedy"), [("nccl", "cpu", "use direct"), ("direct", "cuda:0", "use nccl")])
def test_a_transport_that_cannot_serve_the_device_is_refused_with_the_remedy(kind: Any, device: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        open_endpoint(kind, key=KEY, rank=0, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_nccl_without_cuda_says_so() -> None:
    with pytest.raises(ValueError, match="torch sees none"):
        open_endpoint("auto", key=KEY, rank=0, device="cuda")
