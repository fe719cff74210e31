"""Waits for one descriptor, whatever its number.

`select.select` refuses descriptors from 1024 on, and the launcher of a large run has many of these.
"""

from __future__ import annotations

import select
import socket


def is_readable(sock: socket.socket, seconds: float) -> bool:
    """Return whether `sock` can be read, or its other end has hung up, within `seconds`."""
    return _is_ready(sock, select.POLLIN, seconds)


def is_writable(sock: socket.socket, seconds: float) -> bool:
    """Return whether `sock` can send, or its other end has hung up, within `seconds`."""
    return _is_ready(sock, select.POLLOUT, seconds)


def _is_ready(sock: socket.socket, what: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(sock, what)
    return bool(poll.poll(1000 * seconds))
