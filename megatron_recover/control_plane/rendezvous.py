"""The store through which the ranks of one replica find each other: a file in memory that they inherit, and no port.

torch's own rendezvous (`env://`) and its TCPStore have no authentication. Whoever reaches their port can set a key first, be
taken for a rank of a process group, and answer `all_gather_object` with a pickle, which runs code in the ranks that read it.
Each idle connection costs the rank that serves it a descriptor. So the launcher makes an anonymous file for each replica
(`host/memory_file.py`), which the kernel opens for the same user and root only, and torch's FileStore keeps its keys in that.
Megatron is given the store (`pretrain(store=...)`). The environment says nothing of it: processes that a rank starts can have
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
"""Name under which all ranks of a replica inherit the descriptor of its store's file."""


def create_store() -> int:
    """Return a descriptor of an empty file for the store of one replica. The caller closes it. Raises OSError."""
    descriptor = memory_file.create("megatron-recover-store")
    os.fchmod(descriptor, 0o600)
    return descriptor


def join_store(timeout: timedelta) -> FileStore:
    """Return the store of this rank's replica. The descriptor that it inherited stays open, since torch opens the file anew for
    every call.

    `timeout` limits each wait for a key. Raises RuntimeError where the launcher handed down no store.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    descriptor = inherited_descriptor(DESCRIPTOR)
    if descriptor is None:
        raise RuntimeError("this process inherited no store of its replica; start it by `megatron-recover run`")
    store = FileStore(f"/proc/self/fd/{descriptor}", -1)  # -1: the last one that closes it removes no file
    store.set_timeout(timeout)
    return store
