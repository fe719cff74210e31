"""The store through which the ranks of one replica find each other: an inherited file in memory.

torch's own rendezvous (`env://`) and its TCPStore have no authentication. A stranger who reaches
their port can set a key first and be taken for a rank of a process group. The stranger can then
answer `all_gather_object` with a pickle, which runs code in the ranks that read it. Each idle
connection also costs the serving rank a descriptor.

So the store has no port. The launcher makes an anonymous file for each replica
(`host/memory_file.py`), and torch's FileStore keeps its keys in that file. The kernel opens the
file only for the same user and for root. Megatron receives the store by `pretrain(store=...)`. No
environment variable that torch reads names the store, so processes that a rank starts can have
groups of their own.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_recover.config import inherited_descriptor
from megatron_recover.host import memory_file

if TYPE_CHECKING:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

DESCRIPTOR = "store"
"""Name under which all ranks of a replica inherit the descriptor of the store's file."""


def create_store() -> int:
    """Return a descriptor of an empty file for the store of one replica. Raises OSError.

    The caller closes the descriptor.
    """
    descriptor = memory_file.create("megatron-recover-store")
    os.fchmod(descriptor, 0o600)
    return descriptor


def join_store(timeout: timedelta) -> FileStore:
    """Return the store of this rank's replica.

    The inherited descriptor stays open, since torch opens the file anew for every call. `timeout`
    limits each wait for a key. Raises RuntimeError if this process inherited no store.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    descriptor = inherited_descriptor(DESCRIPTOR)
    if descriptor is None:
        raise RuntimeError("this process inherited no store of its replica; start it by `megatron-recover run`")
    store = FileStore(f"/proc/self/fd/{descriptor}", -1)  # -1: closing the last store removes no file
    store.set_timeout(timeout)
    return store
