"""The socket on which rank 0 of a replica listens as its leader: made by the launcher, handed down by descriptor.

The launcher has to know the addresses before there is a rank. A port that is only bound would not do: as long as no socket
listens there, Linux lets any user bind the port too (both sockets set SO_REUSEADDR), and whoever listens first has it. So the
launcher's socket listens from the start. Connections wait in the kernel until rank 0 accepts them.
"""

from __future__ import annotations

import socket

from megatron_recover.config import inherited_descriptor
from megatron_recover.control_plane.wire import address_of

LEADER = "leader"
"""Name under which rank 0 inherits the listening socket of its replica's leader."""


def inherited_listener(name: str, address: str) -> socket.socket | None:
    """Return the non-blocking socket that rank 0 inherited under `name`, or None where the launcher handed down none.

    Called once for each name, since the returned socket owns the descriptor. Raises RuntimeError where the socket does not
    listen at `address` (host:port).
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
