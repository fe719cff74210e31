"""The listening sockets of a replica, which rank 0 inherits from the launcher.

The launcher has to know an address before there is a rank. A socket that is bound and does not
listen would not reserve the port: Linux lets any user bind the same port if both sockets set
SO_REUSEADDR. Whichever socket listens first then has the port. So the launcher's socket listens
from the start, and connections wait in the kernel until rank 0 accepts them.

A replica that spans nodes has a second socket, for its store. The leader's socket is served only
when rank 0 knows its buckets, and the store is needed before that.
"""

from __future__ import annotations

import socket

from megatron_recover.config import inherited_descriptor
from megatron_recover.host.addresses import address_of

LEADER = "leader"
"""Name under which rank 0 inherits the listening socket of its replica's leader."""
STORE = "served store"
"""Name under which rank 0 inherits the listening socket of its replica's store, if it serves one
(`RankContext.store`)."""


def inherited_listener(name: str, address: str) -> socket.socket | None:
    """Return the non-blocking socket that rank 0 inherited under `name`, or None if there is none.

    Called once for each name, since the returned socket owns the descriptor. Raises RuntimeError if
    the socket does not listen at `address` (host:port).
    """
    descriptor = inherited_descriptor(name)
    if descriptor is None:
        return None
    listener = socket.socket(fileno=descriptor)
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or address_of(listener) != address:
        listener.detach()  # not ours to close
        raise RuntimeError(f"descriptor {descriptor} does not listen at {address}; start the job by `megatron-recover run`")
    listener.setblocking(False)
    return listener
