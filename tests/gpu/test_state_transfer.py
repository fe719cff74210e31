"""A newcomer on a GPU reads the state of another GPU's window: what changes the state waits, on the device, for the copies."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from megatron_recover.deadlines import Deadlines
from megatron_recover.trainer.state_reader import StateReader, StateVoid
from megatron_recover.trainer.state_server import StateServer
from megatron_recover.trainer.state_window import StateWindow
from tests.control_plane.partners import KEY
from tests.data_plane.range_memory import eventually
from tests.trainer.states import Tensors, of_every_kind

pytestmark = [pytest.mark.gpu, pytest.mark.finding("JOIN")]
DEADLINES = Deadlines.of(60.0)


def on_gpu(state: Tensors) -> Tensors:
    return Tensors({name: tensor.detach().cuda() for name, tensor in state.named.items()}, state.numbers)


def filled(num: int, value: float) -> Tensors:
    return Tensors({str(number): torch.full((num,), value, device="cuda") for number in range(4)}, {"value": value})


def test_tensors_of_every_kind_arrive_with_an_equal_digest() -> None:
    found: list[tuple[str, int]] = []
    server = StateServer(key=KEY, replica=0, rank=0, deadlines=DEADLINES, digested=lambda *each: found.append(each))
    one, mine = on_gpu(of_every_kind(1)), on_gpu(of_every_kind(2))
    gaps = torch.randn(6, 6, device="cuda")
    one.named["gaps of a GPU"], mine.named["gaps of a GPU"] = gaps[:, ::2], torch.zeros(6, 6, device="cuda")[:, ::2]
    server.open("train 1", one)
    reader = StateReader(key=KEY, replica=9, rank=0, deadlines=DEADLINES)
    got = reader.read("train 1", [server.address], mine)
    assert one.bits() == mine.bits()
    mine.numbers = dict(got.scalars)
    eventually(lambda: found)
    assert found == [("train 1", mine.digest())] and one.digest() == mine.digest()
    reader.end()
    server.end()


def test_no_torn_state_is_accepted_while_steps_change_it_on_the_device_and_the_host_waits_for_nothing(
    record_property: Any,
) -> None:
    num, window = 1 << 24, StateWindow()
    servers = [StateServer(key=KEY, replica=replica, rank=0, deadlines=DEADLINES, window=window) for replica in range(2)]
    state, is_over, closes = filled(num, 0.0), threading.Event(), []

    def train() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step = 0
            while not is_over.is_set():
                window.open()
                for server in servers:
                    server.open(f"train {step}", state)
                time.sleep(0.004 * (step % 50))
                since = time.perf_counter()
                for server in servers:
                    server.close()
                window.close()
                closes.append(time.perf_counter() - since)
                for tensor in state.named.values():
                    for part in tensor.split(1 << 20):
                        part.add_(1)
                step += 1
                state.numbers["value"] = float(step)

    torch.cuda.synchronize()
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    reader = StateReader(key=KEY, replica=9, rank=0, deadlines=DEADLINES)
    num_accepted, num_void, after, mine, rates = 0, 0, None, filled(num, -1.0), []
    until = time.monotonic() + 30
    while time.monotonic() < until and num_accepted < 20:
        after = reader.next_window(servers[0].address, after).label
        try:
            got = reader.read(after, [each.address for each in servers], mine)
        except StateVoid:
            num_void += 1
            continue
        num_accepted += 1
        rates.append(got.num_bytes / got.seconds)
        assert all(tensor.eq(float(after.split()[1])).all().item() for tensor in mine.named.values())
        assert got.scalars == {"value": float(after.split()[1])}
    is_over.set()
    thread.join(30)
    record_property(
        "state read from a GPU to a GPU over TCP", f"{max(rates) / 1e9:.2f} GB/s at best; {num_void} windows closed"
    )
    record_property("close of a window under reads", f"{1e3 * max(closes):.2f} ms at most, of {len(closes)}")
    assert num_accepted and num_void
    assert sorted(closes)[len(closes) // 2] < 0.01, "what trains enqueues its waits and goes on"
    reader.end()
    for server in servers:
        server.end()
