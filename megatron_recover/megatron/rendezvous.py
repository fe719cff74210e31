"""The store through which the ranks of one replica find each other, bound to the loopback interface.

torch's own rendezvous (`env://`) has rank 0 listen on all interfaces, where every host could read and set keys. So rank 0 makes
the store itself, on a socket of ours, before Megatron calls `init_process_group`. An environment variable of torch's own then
makes all ranks, rank 0 included, clients of the store that is there (torch/distributed/rendezvous.py, `_create_c10d_store`).
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_recover.config import add_to_environment, rendezvous_address

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_CLIENT_ONLY = "TORCHELASTIC_USE_AGENT_STORE"
_TIMEOUT = timedelta(minutes=30)


def host_store(rank: int, num_ranks: int) -> TCPStore | None:
    """Make all ranks of this replica use a store on loopback, and return it on rank 0, which keeps it for the process's life.

    Called once, before `init_process_group`. Raises OSError where the port is taken.
    """
    add_to_environment({_CLIENT_ONLY: "True"})
    if rank != 0:
        return None
    from torch.distributed import TCPStore

    host, port = rendezvous_address()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The launcher keeps the port bound (not listening) until we take it, so that nobody else gets it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(socket.SOMAXCONN)
    return TCPStore(
        host, port, num_ranks, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )  # fmt: skip
