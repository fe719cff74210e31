"""The transports against plain gloo: wall time of one sum, 2 to 4 processes, 0.25, 4 and 64 MB.

    python -m benchmarks.transports [--json PATH]

Plain gloo reduces in place and cannot lose a member; our transports reduce out of place and can.
All take turns in the same processes, so a ratio compares neighbours in time. The time of a sum is
that of its slowest rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import timeit
import zlib
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.common import Row, row

SIZES_BYTES = (1 << 18, 1 << 22, 1 << 26)
NUM_RANKS = (2, 3, 4)
DEADLINE_S = 120.0
OURS = ("direct", "gloo")
BASELINE = "plain gloo all_reduce, in place"


def repetitions(size_bytes: int) -> int:
    return 7 if size_bytes >= 1 << 26 else 21


def rank_main(pipe: Connection, rank: int, num_ranks: int) -> None:
    """Run one rank: sum on each request, answer with the seconds."""
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    from megatron_recover.authentication.handshake import KEY_BYTES
    from megatron_recover.data_plane.endpoints import open_endpoint

    torch.set_num_threads(1)
    endpoints = {kind: open_endpoint(kind, key=bytes(KEY_BYTES), rank=0) for kind in OURS}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    pipe.send(({kind: endpoint.address for kind, endpoint in endpoints.items()}, store.port if store is not None else 0))
    everyone, port = pipe.recv()
    if store is None:
        store = TCPStore("127.0.0.1", port, is_master=False)
    plain = ProcessGroupGloo(PrefixStore("plain", store), rank, num_ranks, timeout=timedelta(seconds=DEADLINE_S))
    transports = {
        kind: endpoint.open(1, rank, {peer: everyone[peer][kind] for peer in range(num_ranks)})
        for kind, endpoint in endpoints.items()
    }
    source, result = torch.empty(0), torch.empty(0)
    for tag in range(sys.maxsize):
        match pipe.recv():
            case ("size", size_bytes):
                source = torch.full((size_bytes // 4,), 1e-3)
                result = torch.empty_like(source)
            case ("sum", kind):
                plain.barrier().wait()
                started = time.perf_counter()
                if kind == "plain":
                    plain.allreduce([source]).wait()
                else:
                    transports[kind].sum_into([source], [result], tag=tag)
                pipe.send(time.perf_counter() - started)
            case ("end",):
                return


def measure(num_ranks: int) -> Iterator[tuple[int, dict[str, list[float]]]]:
    """Yield each size in bytes, with the seconds per repetition of each kind.

    The seconds are those of the slowest rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "megatron_recover.data_plane.gloo"])
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=rank_main, args=(theirs, rank, num_ranks), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        answers = [pipe.recv() for pipe in pipes]
        tell(pipes, ([addresses for addresses, _ in answers], answers[0][1]))
        for size_bytes in SIZES_BYTES:
            tell(pipes, ("size", size_bytes))
            seconds: dict[str, list[float]] = {kind: [] for kind in ("plain", *OURS)}
            for repetition in range(repetitions(size_bytes) + 1):
                for kind, values in seconds.items():
                    tell(pipes, ("sum", kind))
                    slowest = max(pipe.recv() for pipe in pipes)
                    if repetition:  # the first sum connects and touches fresh memory
                        values.append(slowest)
            yield size_bytes, seconds
        tell(pipes, ("end",))
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def tell(pipes: Iterable[Connection], message: Any) -> None:
    for pipe in pipes:
        pipe.send(message)


def checksum_s(num_bytes: int) -> dict[str, float]:
    """Return the seconds that a checksum of `num_bytes` bytes takes, the least of several.

    It is computed in segments of a MiB, the unit in which contributions are sent.
    """
    import torch

    from megatron_recover.data_plane.exchange import SEGMENT_BYTES
    from megatron_recover.trainer.checksum import checksum

    torch.set_num_threads(1)
    size = min(num_bytes, SEGMENT_BYTES)
    segment = torch.full((size // 4,), 1e-3)
    memory = memoryview(segment.view(torch.uint8).numpy())
    kinds = {"CRC-32": lambda: zlib.crc32(memory), "checksum of results": lambda: checksum(segment)}
    return {name: min(timeit.repeat(each, number=1, repeat=50)) * num_bytes / size for name, each in kinds.items()}


def checksum_rows(num_ranks: int, size_bytes: int, direct_s: list[float]) -> Iterator[Row]:
    """Yield the time that checksums of contributions would add to a sum of `direct`.

    The sender would compute each checksum, and the receiver would compute it again.
    """
    sent = size_bytes * (num_ranks - 1) / num_ranks
    for name, seconds in checksum_s(size_bytes).items():
        added = 2 * seconds * sent / size_bytes
        cell = f"{size_bytes / (1 << 20):g} MB, {num_ranks} ranks"
        ratios = [100 * added / each for each in direct_s]
        yield row(f"{name} of contributions / direct, {cell}", ratios, "%", baseline="direct without checksums", goal="<= 1")


def rows() -> list[Row]:
    """Return plain gloo's milliseconds, the ratio of each of our transports to it, and checksums.

    There are rows for each size and number of ranks.
    """
    found: list[Row] = []
    for num_ranks in NUM_RANKS:
        for size_bytes, seconds in measure(num_ranks):
            cell = f"{size_bytes / (1 << 20):g} MB, {num_ranks} ranks"
            found.append(row(f"plain gloo, {cell}", [1e3 * value for value in seconds["plain"]], "ms"))
            for kind in OURS:
                ratios = [ours / plain for ours, plain in zip(seconds[kind], seconds["plain"], strict=True)]
                found.append(row(f"{kind} transport / plain gloo, {cell}", ratios, "x", baseline=BASELINE))
            found.extend(checksum_rows(num_ranks, size_bytes, seconds["direct"]))
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, and write the rows if requested."""
    from benchmarks.run import table

    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows as JSON")
    arguments = parser.parse_args(argv)
    measured = rows()
    Console().print(table(measured))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=2) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
