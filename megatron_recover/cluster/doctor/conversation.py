"""The words of the conversation by which one node tries the connection to another.

The handshake of every connection (`authentication/handshake.py`) comes first. Then the node that
has dialled sends requests, and the other one answers each. Nothing that is said here decides more
than a line of `doctor`, so messages have no proofs of their own.
"""

from __future__ import annotations

import enum
import socket
import struct

from megatron_recover.authentication.handshake import Party, Role

REQUEST = struct.Struct("<BI")
"""Kind of a request, and the number of bytes that follow it."""
TIMES = struct.Struct("<QQ")
"""Answer to `TIME`: nanoseconds since 1970 when the request was read, and when this was sent."""
TOKEN_BYTES = 16
DATAGRAMS = struct.Struct(f"<H{TOKEN_BYTES}s")
"""Answer to `DATAGRAMS`: a UDP port, and the token with which each packet has to begin."""
MAX_ECHO_BYTES = 2**22


class Kind(enum.IntEnum):
    """The kind of a request: what its sender wants back."""

    TIME = 1
    ECHO = 2
    """The bytes that follow the request, back."""
    DATAGRAMS = 3


def party(node: int) -> Party:
    """Return the identity of a node in the handshake."""
    return Party(Role.DOCTOR, 0, node)


def forbid_fragments(sock: socket.socket) -> None:
    """Have every packet of a UDP socket go as it is, or not at all, whatever the kernel believes.

    The options are IP_MTU_DISCOVER and IPV6_MTU_DISCOVER with the value `PROBE` (ip(7)).
    """
    level, option = (socket.IPPROTO_IPV6, 23) if sock.family == socket.AF_INET6 else (socket.IPPROTO_IP, 10)
    sock.setsockopt(level, option, 3)


def headers_of(sock: socket.socket) -> int:
    """Return the bytes of the headers of a UDP packet: IP and UDP."""
    return 48 if sock.family == socket.AF_INET6 else 28


def path_bytes(sock: socket.socket) -> int:
    """Return the size in bytes of the largest packet that the kernel sends to a connected peer.

    That is the MTU of the interface, or less where a router has said so. Raises OSError.
    """
    level, option = (socket.IPPROTO_IPV6, 24) if sock.family == socket.AF_INET6 else (socket.IPPROTO_IP, 14)
    return sock.getsockopt(level, option)
