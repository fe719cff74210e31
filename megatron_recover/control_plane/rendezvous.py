"""The store through which the ranks of one replica find each other.

torch's own rendezvous (`env://`) and its TCPStore have no authentication. A stranger who reaches
their port can set a key first and be taken for a rank of a process group. The stranger can then
answer `all_gather_object` with a pickle, which runs code in the ranks that read it. Each idle
connection also costs the serving rank a descriptor. So neither is used.

- *On one node* the store has no port. The launcher makes an anonymous file for each replica
  (`host/memory_file.py`), and torch's FileStore keeps its keys in that file. The kernel opens the
  file only for the same user and for root.
- *On several nodes* rank 0 serves the store (`control_plane/store_server.py`), to ranks of its
  replica that have proven the job's key. It knows keys and bytes, and unpickles nothing.

Megatron receives the store by `pretrain(store=...)`. No environment variable that torch reads names
the store, so processes that a rank starts can have groups of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_recover import trace
from megatron_recover.authentication.admission import recording_strangers
from megatron_recover.config import RankContext, inherited_descriptor
from megatron_recover.control_plane.listening import STORE, inherited_listener
from megatron_recover.host import memory_file
from megatron_recover.trace.node_clock import NodeClock

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

DESCRIPTOR = "store"
"""Name under which all ranks of a replica inherit the descriptor of the store's file."""


def create_store() -> int:
    """Return a descriptor of an empty file for the store of one replica. Raises OSError.

    The caller closes the descriptor.
    """
    descriptor = memory_file.create("megatron-recover-store")
    os.fchmod(descriptor, 0o600)
    return descriptor


def join_store(
    context: RankContext, key: bytes, timeout: timedelta, record: Callable[[trace.Event], None], clock: NodeClock
) -> Store:
    """Return the store of this rank's replica.

    If the replica spans nodes, rank 0 serves the store from now on. Called once. `key` is the
    job's, and `clock` that of this node. `timeout` limits each wait for a key. `record` is called
    in the server's thread. Keep the store as long as this process has process groups. Raises
    RuntimeError if this process inherited no store, or as rank 0 no socket to serve it.
    """
    return _served_store(context, key, timeout, record, clock) if context.store else _inherited_store(timeout)


def _inherited_store(timeout: timedelta) -> Store:
    """Return the store in the inherited file.

    The inherited descriptor stays open, since torch opens the file anew for every call.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    descriptor = inherited_descriptor(DESCRIPTOR)
    if descriptor is None:
        raise RuntimeError("this process inherited no store of its replica; start it by `megatron-recover run`")
    store = FileStore(f"/proc/self/fd/{descriptor}", -1)  # -1: closing the last store removes no file
    store.set_timeout(timeout)
    return store


def _served_store(
    context: RankContext, key: bytes, timeout: timedelta, record: Callable[[trace.Event], None], clock: NodeClock
) -> Store:
    """Return the store that rank 0 serves until its process ends."""
    from megatron_recover.control_plane.served_store import ServedStore
    from megatron_recover.control_plane.store_server import StoreServer

    replica, rank = context.replica, context.rank
    if rank == 0:
        listener = inherited_listener(STORE, context.store)
        if listener is None:
            raise RuntimeError(
                f"this process inherited no socket to serve the store of replica {replica} at {context.store}; "
                "start it by `megatron-recover run`"
            )
        StoreServer(
            listener, key, replica=replica, num_ranks=context.num_ranks, clock=clock,
            report=recording_strangers(record, replica=replica, rank=rank),
        )  # fmt: skip
    return ServedStore(context.store, key, replica=replica, rank=rank, clock=clock, timeout=timeout)
