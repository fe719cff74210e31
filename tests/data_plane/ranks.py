"""Real rank processes for tests of transports, driven over pipes by a test that plays launcher and coordinator.

A rank has two threads, as in production: the main thread is inside the transport, a control thread obeys `promise` at once.
Replica r contributes pattern * 2^r, so that a sum says who is in it, and how often.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from megatron_recover.data_plane.endpoints import open_endpoint
from megatron_recover.data_plane.transport import Transport, TransportError
from megatron_recover.deadlines import Deadlines
from tests.control_plane.partners import KEY, within
from tests.forks import CONTEXT

DEADLINE_S = 30.0
"""How long each part of a call may last."""
PATIENCE_S = 120.0
"""Until a rank that does not answer counts as hanging. Far above every deadline used, since the machine may be busy."""
CANARY = -1234.5


class Outcome(NamedTuple):
    """What became of one sum on one rank."""

    status: str
    """`done`, or the name of the exception."""
    detail: str
    peers: tuple[int, ...]
    """Whom the exception blames."""
    seconds: float
    source_intact: bool
    right: bool
    """The result is the sum of all members of the transport."""
    checksum: int
    canaries_intact: bool
    """Nobody wrote to the results of earlier failed calls after they failed."""


class Fault(NamedTuple):
    """What a rank does to itself at a probe of the transport."""

    instant: str
    signal: int
    delay_s: float = 0.0
    """Slept before it strikes: gloo is opaque, so no event tells that it is in the middle of a sum."""


def pattern(num_bytes: int, device: str) -> torch.Tensor:
    return (torch.arange(num_bytes // 4, device=device) % 251 + 1).float()


def rank_main(pipe: Connection, kind: str, me: int, device: str, environment: Mapping[str, str], deadlines: Deadlines) -> None:
    """Body of a rank process."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    endpoint = open_endpoint(kind, key=KEY, rank=0, device=device, deadlines=deadlines)
    pipe.send(endpoint.address)
    commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    transports: list[Transport] = []
    promised = [0]

    def control() -> None:
        while True:
            try:
                command = pipe.recv()
            except EOFError:
                os._exit(1)
            if command[0] == "promise":
                promised[0] = command[1]
                for transport in list(transports):
                    if transport.generation < command[1]:
                        transport.revoke()
            else:
                commands.put(command)

    threading.Thread(target=control, daemon=True).start()
    failed: list[torch.Tensor] = []
    while True:
        match commands.get():
            case ("open", generation, addresses):
                transports.append(endpoint.open(generation, me, addresses))
                if generation < promised[0]:  # the promise came first; looked at after the append, so that one of both sees it
                    transports[-1].revoke()
            case ("sum", num_bytes, tag, fault):
                pipe.send(_sum(pipe, transports[-1], pattern(num_bytes, device), tag, fault, failed))
            case ("call", function, arguments):
                pipe.send(function(endpoint, me, *arguments))
            case ("end",):
                endpoint.close()
                pipe.close()
                return


def _sum(
    pipe: Connection,
    transport: Transport,
    base: torch.Tensor,
    tag: int,
    fault: Fault | None,
    failed: list[torch.Tensor],
) -> Outcome:
    source, result = base * 2.0**transport.me, torch.full_like(base, CANARY)

    def probe(instant: str) -> None:
        if fault is not None and instant == fault.instant:
            time.sleep(fault.delay_s)
            pipe.send(f"{signal.Signals(fault.signal).name} at {instant}")
            os.kill(os.getpid(), fault.signal)

    started = time.monotonic()
    status, detail, peers = "done", "", ()
    try:
        transport.sum_into([source], [result], tag=tag, probe=probe)
    except TransportError as error:
        status, detail = type(error).__name__, str(error)
        peers = getattr(error, "peers", ()) or ((error.peer,) if hasattr(error, "peer") else ())
    seconds = time.monotonic() - started
    total = float(sum(2**member for member in transport.members))
    outcome = Outcome(
        status, detail, peers, seconds, torch.equal(source, base * 2.0**transport.me), torch.equal(result, base * total),
        zlib.crc32(result.cpu().numpy().tobytes()), all(bool((kept == CANARY).all()) for kept in failed),
    )  # fmt: skip
    if status != "done":
        failed.append(result.fill_(CANARY))
    return outcome


class Ranks:
    """Some rank processes, one a replica; their test is launcher, agent and coordinator."""

    def __init__(
        self, kind: str, num_ranks: int, device: str, environment: Callable[[int], Mapping[str, str]], deadlines: Deadlines
    ) -> None:
        self.processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        for rank in range(num_ranks):
            self._pipes[rank], theirs = CONTEXT.Pipe()
            arguments = (theirs, kind, rank, device, environment(rank), deadlines)
            self.processes[rank] = CONTEXT.Process(target=rank_main, args=arguments, daemon=True)
            self.processes[rank].start()
            theirs.close()
        self.addresses: dict[int, str] = {rank: self.receive(rank) for rank in range(num_ranks)}

    def receive(self, rank: int) -> Any:
        """The next message of a rank; a rank that is silent for PATIENCE_S hangs, and that is a failure."""
        assert self._pipes[rank].poll(PATIENCE_S), f"replica {rank} hangs"
        return self._pipes[rank].recv()

    def tell(self, ranks: Iterable[int], *command: Any) -> None:
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):  # it was killed; the test knows
                self._pipes[rank].send(command)

    def open(self, generation: int, members: Iterable[int]) -> None:
        members = tuple(members)
        self.tell(members, "open", generation, {member: self.addresses[member] for member in members})

    def sums(
        self,
        ranks: Iterable[int],
        num_bytes: int,
        tag: int,
        faults: Mapping[int, Fault] = {},  # noqa: B006
    ) -> None:
        for rank in ranks:
            self.tell([rank], "sum", num_bytes, tag, faults.get(rank))

    def outcomes(self, ranks: Iterable[int]) -> dict[int, Outcome]:
        return {rank: self.receive(rank) for rank in ranks}

    def call(self, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
        """Run `function(endpoint, me, *arguments)` in all ranks at once; what they return."""
        self.tell(self.processes, "call", function, arguments)
        return {rank: self.receive(rank) for rank in self.processes}

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def await_end(self, rank: int) -> None:
        assert wait([self.processes[rank].sentinel], PATIENCE_S), f"replica {rank} does not end"

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join(PATIENCE_S)


@contextlib.contextmanager
def ranks(
    kind: str,
    num_ranks: int,
    device: str = "cpu",
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    *,
    deadlines: Deadlines | None = None,
) -> Iterator[Ranks]:
    """Start ranks, each with its `environment(rank)`, with the waits of `deadlines`; none of them is left behind."""
    started = Ranks(kind, num_ranks, device, environment, deadlines or within(DEADLINE_S))
    try:
        yield started
    finally:
        started.close()
