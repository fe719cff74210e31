"""The addresses at which the processes of a job listen for each other. No other module names one.

All ranks of a job are on one machine. They connect through its loopback interface, which no other
machine reaches.
"""

from __future__ import annotations

import socket

HOST = "127.0.0.1"
"""The address of every listener of a job, unless `--metrics-address` names another."""
ANY_PORT = f"{HOST}:0"
"""The address of a listener whose port the kernel chooses."""
INTERFACE = "lo"
"""The network interface of `HOST`, for gloo and NCCL. Otherwise these would listen where the
machine's name resolves."""


def host_name() -> str:
    """Return the name of this machine, which identifies the host of a run in its files."""
    return socket.gethostname()
