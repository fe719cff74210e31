"""Waits for one descriptor. `select.select` refuses descriptors from 1024 on, of which the launcher of a large run has many."""

from __future__ import annotations

import select
import socket


def is_readable(sock: socket.socket, seconds: float) -> bool:
    """Return whether something can be read, or the other end has hung up, within so many seconds."""
    return _is_ready(sock, select.POLLIN, seconds)


def is_writable(sock: socket.socket, seconds: float) -> bool:
    """Return whether something can be sent, or the other end has hung up, within so many seconds."""
    return _is_ready(sock, select.POLLOUT, seconds)


def _is_ready(sock: socket.socket, what: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(sock, what)
    return bool(poll.poll(1000 * seconds))
