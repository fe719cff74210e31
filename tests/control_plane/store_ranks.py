"""Processes that are the ranks of one replica as far as its store goes: rank 0 serves it, and all make process groups."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_recover.config import RankContext, add_to_environment, describe_descriptors
from megatron_recover.control_plane import listening, rendezvous
from megatron_recover.control_plane.wire import listen
from megatron_recover.host.addresses import address_of
from megatron_recover.trace.node_clock import NodeClock
from tests.control_plane.partners import KEY
from tests.forks import CONTEXT, results_of

DEADLINE_S = 120.0
ANSWER_S = 60.0
"""What a rank waits for a key, where no test says otherwise."""

Work = Callable[..., Any]
"""`work(store, rank)` in each rank; what it returns is written to a file as text."""


def context_of(rank: int, num_ranks: int, store: str, replica: int = 0) -> RankContext:
    """The context of a rank whose replica's store is served at `store`, or inherited if that is empty."""
    return RankContext(
        replica=replica, rank=rank, num_ranks=num_ranks, num_replicas=1, coordinator="", leader="", store=store, run_dir="",
        started_at=0.0,
    )  # fmt: skip


def join(rank: int, num_ranks: int, store: str, descriptors: dict[str, int], seconds: float = ANSWER_S) -> dist.Store:
    """Join the store as a rank does that the launcher has started."""
    add_to_environment(describe_descriptors(descriptors))
    return rendezvous.join_store(
        context_of(rank, num_ranks, store), KEY, timedelta(seconds=seconds), lambda event: None, NodeClock(None)
    )


def run(num_ranks: int, work: Work, *, is_served: bool = True, enter: Sequence[str] = ()) -> list[str]:
    """Run `work` in each rank of a replica; return what each returned.

    `is_served`: rank 0 serves the store; otherwise all inherit its file. `enter`: the network namespace of each rank, by the
    path of its file. Raises AssertionError with a rank's traceback, or if a rank does not end in time.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ours:
        listener = ours.enter_context(listen("127.0.0.1:0")) if is_served and not enter else None
        inherited = rendezvous.create_store() if not is_served else None
        if inherited is not None:
            ours.callback(os.close, inherited)
        ranks = [
            CONTEXT.Process(
                target=_rank, daemon=True,
                args=(rank, num_ranks, listener, _Copy(inherited), work, folder, enter[rank] if enter else ""),
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        for process in ranks:
            process.start()
        if listener is not None:
            listener.close()  # as the launcher does: a copy would keep a dead leader's port answering
        return [path.read_text() for path in results_of(ranks, Path(folder), DEADLINE_S)]


class _Copy:
    """A descriptor on its way to another process; None stays None."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], _Copy], tuple[Any]]:
        from multiprocessing.reduction import DupFd

        return _arrived, (None if self.number is None else DupFd(self.number),)


def _arrived(handed: Any) -> _Copy:
    return _Copy(None if handed is None else handed.detach())


def _rank(
    rank: int, num_ranks: int, listener: socket.socket | None, inherited: _Copy, work: Work, folder: str, namespace: str
) -> None:
    try:
        address = Path(folder) / "address"
        if namespace:
            with open(namespace) as file:
                os.setns(file.fileno(), os.CLONE_NEWNET)
            if rank == 0:
                listener = listen(f"{namespace_host(rank)}:0")
        if listener is not None and rank == 0:
            address.with_suffix(".part").write_text(address_of(listener))
            address.with_suffix(".part").rename(address)
        while inherited.number is None and not address.exists():
            time.sleep(0.005)
        descriptors = {}
        if rank == 0 and listener is not None:
            descriptors[listening.STORE] = listener.detach()
        if inherited.number is not None:
            descriptors[rendezvous.DESCRIPTOR] = inherited.number
        if rank != 0 and listener is not None:
            listener.close()
        store = join(rank, num_ranks, address.read_text() if inherited.number is None else "", descriptors)
        result = str(work(store, rank))
        # The ranks of a job end together: the leader is the last to know that all have.
        store.set(f"rank {rank} is done", "")
        if rank == 0:
            store.wait([f"rank {each} is done" for each in range(num_ranks)])
        (Path(folder) / f"result.{rank}").write_text(result)
    except BaseException:
        (Path(folder) / f"error.{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # as a rank does (`cluster/rank_process.py`)


def namespace_host(rank: int) -> str:
    """The address of a rank in its network namespace, where each has one."""
    return f"10.83.0.{rank + 1}"
