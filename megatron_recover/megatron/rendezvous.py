"""The store through which the ranks of one replica find each other, bound to the loopback interface.

torch's own rendezvous (`env://`) has rank 0 listen on all interfaces, where every host could read and set keys. So rank 0 makes
the store itself, on a socket that the launcher made (`collectives/listening.py`), and Megatron is given the store
(`pretrain(store=...)`). The environment says nothing of it: processes that a rank starts can have groups of their own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_recover.collectives.listening import STORE, inherited_listener
from megatron_recover.config import rendezvous_address

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def join_store(rank: int, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Return the store of this replica. Rank 0 serves it as long as the returned object lives.

    `timeout` limits each wait for a key, and in other ranks the wait for rank 0. Called once in a process.
    Raises RuntimeError on rank 0 where the launcher handed down no listening socket.
    """
    from torch.distributed import TCPStore

    host, port = rendezvous_address()
    if rank != 0:
        return TCPStore(host, port, num_ranks, is_master=False, timeout=timeout, wait_for_workers=False)
    listener = inherited_listener(STORE, f"{host}:{port}")
    if listener is None:
        raise RuntimeError("rank 0 inherited no socket for its replica's store; start it by `megatron-recover run`")
    return TCPStore(
        host, port, num_ranks, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )  # fmt: skip
