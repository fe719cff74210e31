"""Packets from a process that may die at any instant (SOCK_SEQPACKET).

Note [A peer that dies]. A process may die before it has read everything that was sent to it. The
kernel then reports ECONNRESET once to the other end. It does so before the packets that the dead
process had still sent, and before the end of the stream. So that error ends nothing, and `receive`
reads again after it.
"""

from __future__ import annotations

import os
import socket


def receive(sock: socket.socket, max_bytes: int, max_descriptors: int = 0) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors; an empty packet at the end of the stream.

    The stream ends when the peer is gone and every packet that it sent was read. Programs that this
    process starts do not inherit the descriptors. Raises BlockingIOError if `sock` does not block
    and there is no packet.
    """
    try:
        packet, descriptors, _, _ = socket.recv_fds(sock, max_bytes, max_descriptors)
    except ConnectionResetError:
        packet, descriptors, _, _ = socket.recv_fds(sock, max_bytes, max_descriptors)
    for descriptor in descriptors:  # Python 3.12 does not pass MSG_CMSG_CLOEXEC on
        os.set_inheritable(descriptor, False)
    return packet, descriptors
