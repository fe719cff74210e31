"""The transfer of a state to a newcomer against a bare socket that moves the same bytes.

    python -m benchmarks.run --only state

Members are processes that serve 256 MiB of tensors over loopback; this process reads them, from 1
member and from 4 at once. The bare socket sends the same memory from one process in pieces of
4 MiB, and this process receives it straight into its tensors: without a key, MAC, checksum, window
or division. Both take turns, so a ratio compares neighbours in time.

Also: how long `open` and `close` of a window take in the training thread while a newcomer reads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import Row, row

SIZE_BYTES = 1 << 28
NUM_TENSORS = 300
RUNS = 15
NUM_MEMBERS = 4
PIECE_BYTES = 1 << 22
PATIENCE_S = 60.0


def made(value: float) -> Any:
    """Return a state of `SIZE_BYTES` in `NUM_TENSORS` tensors of various sizes."""
    import torch

    from megatron_recover.trainer.state import State

    class Tensors(State):
        def __init__(self) -> None:
            shares = [1 + number % 7 for number in range(NUM_TENSORS)]
            sizes = [SIZE_BYTES // 4 * share // sum(shares) for share in shares]
            sizes[-1] += SIZE_BYTES // 4 - sum(sizes)
            self.named = {f"tensor {number}": torch.full((size,), value) for number, size in enumerate(sizes)}

        def values(self) -> Iterator[Any]:
            yield from self.named.items()
            yield "iteration", 7

    return Tensors()


def member_main(pipe: Connection, number: int) -> None:
    """Serve a state; on a request send it over a bare socket, or open and close windows."""
    import torch

    from megatron_recover.authentication.handshake import KEY_BYTES
    from megatron_recover.trainer.state_server import StateServer

    torch.set_num_threads(1)
    state, server = made(1.0), StateServer(key=bytes(KEY_BYTES), replica=number, rank=0)
    server.open("train 1", state)
    memory = [memoryview(tensor.view(torch.uint8).numpy()) for tensor in state.named.values()]
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.address, listener.getsockname()))
    count = 1
    while True:
        match pipe.recv():
            case "send":
                with listener.accept()[0] as sock:
                    for each in memory:
                        for start in range(0, len(each), PIECE_BYTES):
                            sock.sendall(each[start : start + PIECE_BYTES])
            case "step":
                count += 1
                started = time.perf_counter()
                server.close()
                server.open(f"train {count}", state)
                pipe.send(time.perf_counter() - started)
            case "end":
                return


@contextlib.contextmanager
def members() -> Iterator[list[tuple[Connection, str, Any]]]:
    """Yield for each member its pipe, the address of its server and that of its bare socket."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megatron_recover.trainer.state_server"])
    processes, found = list[Any](), list[tuple[Connection, str, Any]]()
    try:
        for number in range(NUM_MEMBERS):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=member_main, args=(theirs, number), daemon=True))
            processes[-1].start()
            theirs.close()
            found.append((ours, *ours.recv()))
        yield found
    finally:
        for pipe, _, _ in found:
            with contextlib.suppress(OSError):
                pipe.send("end")
        for process in processes:
            process.join(5)
            process.kill()


def bare_s(member: tuple[Connection, str, Any], state: Any) -> float:
    """Return the seconds in which a bare socket fills the tensors of `state`."""
    import torch

    pipe, _, address = member
    memory = [memoryview(tensor.view(torch.uint8).numpy()) for tensor in state.named.values()]
    pipe.send("send")
    started = time.perf_counter()
    with socket.create_connection(address, PATIENCE_S) as sock:
        for each in memory:
            rest = each
            while rest:
                rest = rest[sock.recv_into(rest) :]
    return time.perf_counter() - started


def rows() -> list[Row]:
    """Return the rows of this benchmark."""
    import torch

    from megatron_recover.authentication.handshake import KEY_BYTES
    from megatron_recover.trainer.state_reader import StateReader, StateVoid

    torch.set_num_threads(1)
    bare, ours, ratios = list[float](), dict[int, list[float]](), dict[int, list[float]]()
    with members() as found:
        reader, state = StateReader(key=bytes(KEY_BYTES), replica=9, rank=0), made(0.0)
        for run in range(RUNS + 1):
            seconds = bare_s(found[0], state)
            for count in (1, NUM_MEMBERS):
                read = reader.read("train 1", [address for _, address, _ in found[:count]], state)
                if run:  # the first connects, digests, and touches fresh memory
                    ours.setdefault(count, []).append(read.num_bytes / read.seconds / 1e9)
                    ratios.setdefault(count, []).append(seconds / read.seconds)
                else:
                    time.sleep(1)
            if run:
                bare.append(SIZE_BYTES / seconds / 1e9)
        pipe, address, _ = found[0]
        is_over = threading.Event()

        def read_on() -> None:
            after = "train 1"
            while not is_over.is_set():
                with contextlib.suppress(StateVoid):
                    after = reader.next_window(address, None).label
                    reader.read(after, [address], state)

        thread = threading.Thread(target=read_on, daemon=True)
        thread.start()
        steps = list[float]()
        for _ in range(RUNS):
            time.sleep(0.1)
            pipe.send("step")
            steps.append(1e3 * pipe.recv())
        is_over.set()
        reader.end()
        thread.join(PATIENCE_S)
    named = {1: "1 member", NUM_MEMBERS: f"{NUM_MEMBERS} members"}
    return [
        row("bare socket, 256 MiB", bare, "GB/s"),
        *(row(f"state from {named[count]}, 256 MiB", values, "GB/s") for count, values in ours.items()),
        *(
            row(f"state from {named[count]} / bare socket", values, "x", baseline="a bare socket that moves the same bytes")
            for count, values in ratios.items()
        ),
        row("close and open of a window while a newcomer reads", steps, "ms"),
    ]
