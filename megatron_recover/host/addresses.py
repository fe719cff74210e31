"""Where the processes of a job listen: every address and host name of a job comes from here.

All ranks of a job are on one machine, so they meet on its loopback interface, which no other machine reaches.
"""

from __future__ import annotations

import socket

HOST = "127.0.0.1"
"""The address on which every listener of a job listens."""
ANY_PORT = f"{HOST}:0"
"""The address of a listener whose port the kernel chooses."""
INTERFACE = "lo"
"""The network interface of `HOST`, for gloo and NCCL, which would listen where the machine's name resolves."""


def host_name() -> str:
    """Return the name of this machine, by which a reader of a run's files knows whether the run is here."""
    return socket.gethostname()
