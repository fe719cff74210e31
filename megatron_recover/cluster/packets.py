"""Receives packets from a process that may die at any instant (SOCK_SEQPACKET).

Note [A peer that dies]. Where a process dies before it has read all that was sent to it, the kernel tells the other end so
first, once, by ECONNRESET: before what the dead one had still sent, and before the end of the stream. So that error ends
nothing; what comes after it does.
"""

from __future__ import annotations

import socket


def receive(sock: socket.socket, max_bytes: int, max_descriptors: int = 0) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors; an empty one when the peer is gone and all that it had sent was read."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(sock, max_bytes, max_descriptors)
    except ConnectionResetError:
        packet, descriptors, _, _ = socket.recv_fds(sock, max_bytes, max_descriptors)
    return packet, descriptors
