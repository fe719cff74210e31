"""Sources that are processes: one is killed while it sends, and the rest is read from the other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.data_plane.ranges.contract import CHUNK_BYTES, Range
from megatron_recover.data_plane.ranges.tcp_source import TcpSource
from megatron_recover.deadlines import Deadlines
from megatron_recover.trainer.state_bytes import StateBytes
from megatron_recover.trainer.state_reader import StateReader, StateVoid
from megatron_recover.trainer.state_server import StateServer
from tests.control_plane.partners import KEY
from tests.forks import CONTEXT
from tests.trainer.states import of_size

pytestmark = pytest.mark.timeout(150)
SIZE = 32 * CHUNK_BYTES
DEADLINES = replace(Deadlines.of(60.0), connect_s=20.0, sum_s=20.0)


def serve(pipe: Connection, stuck_at: int | None) -> None:
    """Serve a state until the pipe ends. Tell when copy number `stuck_at` begins, which then takes for ever."""
    torch.set_num_threads(1)
    copy_out, num = StateBytes.copy_out, [0]

    def copy(self: StateBytes, start: int, stop: int, buffer: torch.Tensor) -> None:
        num[0] += 1
        if num[0] == stuck_at:
            pipe.send("stuck")
            time.sleep(600)
        time.sleep(0.001)  # so that both are at it
        copy_out(self, start, stop, buffer)

    StateBytes.copy_out = copy  # type: ignore[method-assign]
    server = StateServer(
        key=KEY, replica=0, rank=0, deadlines=DEADLINES, digested=lambda label, digest: pipe.send((label, digest))
    )
    server.open("train 1", of_size(SIZE, 1.0))
    pipe.send(server.address)
    with contextlib.suppress(EOFError):
        pipe.recv()


@contextlib.contextmanager
def processes(*stuck_at: int | None) -> Iterator[list[tuple[Any, Connection]]]:
    found = []
    try:
        for each in stuck_at:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(theirs, each), daemon=True)
            process.start()
            theirs.close()
            found.append((process, ours))
        yield found
    finally:
        for process, pipe in found:
            pipe.close()
            process.kill()
            process.join(20)


def received(pipe: Connection) -> Any:
    assert pipe.poll(60), "the process says nothing"
    return pipe.recv()


def struck(victim: Any, told: Connection, number: signal.Signals) -> threading.Thread:
    """A thread that sends a process this signal once it is stuck."""

    def strike() -> None:
        while received(told) != "stuck":
            pass
        os.kill(victim.pid, number)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    return thread


class Patient(TcpSource):
    """A source that, after its first ranges, is asked for the others when those beside it are lost."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._of_earlier_reads = reading()

    def read(
        self, next_range: Callable[[bool], Range | None], buffer: torch.Tensor, arrived: Callable[[Range, bool], None]
    ) -> None:
        num = [0]

        def next_one(is_idle: bool) -> Range | None:
            num[0] += 1
            while num[0] > 10 and len(reading() - self._of_earlier_reads) > 1:
                time.sleep(0.01)
            return next_range(is_idle)

        super().read(next_one, buffer, arrived)


def reading() -> set[threading.Thread]:
    """The threads that read from sources."""
    return {each for each in threading.enumerate() if each.name == "recover-state-source"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_is_killed_or_stopped_while_it_sends(number: signal.Signals) -> None:
    with processes(None, 6) as ((_, healthy), (victim, told)):
        addresses = [received(healthy), received(told)]
        mine = of_size(SIZE, 0.0)

        def connected(address: str) -> TcpSource:
            waits = number == signal.SIGKILL and address == addresses[0]
            return (Patient if waits else TcpSource)(address, KEY, Party(Role.NEWCOMER, 2, 0), DEADLINES)

        thread = struck(victim, told, number)
        reader = StateReader(key=KEY, replica=2, rank=0, deadlines=DEADLINES, connect=connected)
        since = time.monotonic()
        got = reader.read("train 1", addresses, mine)
        assert time.monotonic() - since < DEADLINES.sum_s, "nobody waits for the deadline of the victim"
        thread.join(60)
        assert all(each.eq(1).all() for each in mine.named.values())
        assert got.bytes_by_source[addresses[1]] == 5 * CHUNK_BYTES, "what had arrived stays"
        assert set(got.lost) == ({addresses[1]} if number == signal.SIGKILL else set())
        mine.numbers = dict(got.scalars)
        assert received(healthy) == ("train 1", mine.digest())
        reader.end()


def test_all_sources_are_killed() -> None:
    with processes(4) as ((victim, told),):
        address = received(told)
        reader = StateReader(key=KEY, replica=2, rank=0, deadlines=DEADLINES)
        thread = struck(victim, told, signal.SIGKILL)
        with pytest.raises(StateVoid, match="closed the connection|reset"):
            reader.read("train 1", [address], of_size(SIZE, 0.0))
        thread.join(60)
        with pytest.raises(StateVoid, match="nobody listens"):
            reader.next_window(address, None)
