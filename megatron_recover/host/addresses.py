"""The addresses at which the processes of a job listen: their text form, and free ports.

No other module names an address, reads one or writes one. An address is `host:port`, with brackets
around an IPv6 host: `[::1]:29400`. The ranks of a job on one machine connect through its loopback
interface, which no other machine reaches. `host/reachable.py` finds the address of a node among
several.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket

HOST = "127.0.0.1"
"""The address of every listener of a job on one machine, but for `--metrics-address`."""
ANY_PORT = f"{HOST}:0"
"""The address of a listener whose port the kernel chooses."""
INTERFACE = "lo"
"""The network interface of `HOST`, for gloo and NCCL. Otherwise these would listen where the
machine's name resolves."""
LARGEST_PORT = 2**16 - 1

PORTS_OF_A_RANK = 5
"""Listeners that a rank may have: its leader's, a store's, the data plane's, an echo server and a
state server."""

Ports = tuple[int, int]
"""The first and the last port that listeners may have."""


KEPT_ALIVE_S = 60
"""Seconds without a packet after which the kernel sends one. Firewalls and clouds forget a quiet
connection, some after 350 s, and then drop its packets without a word. A step, a save or the next
use of a store may take longer."""


def prepare(connection: socket.socket) -> None:
    """Have a TCP connection send small messages at once, and be remembered while it is quiet."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEPT_ALIVE_S)


RETRIED_S = 1
"""Seconds between two tries of the kernel, at most, to send what another host has not acknowledged.

Linux waits twice as long after each try. Without this limit a cut of 7 s would last for 12.6 s, and
cost a node that is removed after 10 s of silence.
"""
GIVEN_UP_S = 3600
"""Seconds without an acknowledgement after which the kernel ends such a connection.

By default the kernel gives up after 15 tries. That takes 15 minutes, and 14 s with `RETRIED_S`.
"""
TCP_RTO_MAX_MS = 44
"""The option of Linux 6.15 and later for the first of these, in milliseconds."""


def outlast_cuts(connection: socket.socket) -> bool:
    """Have an established TCP connection to another host go on soon after a cut in the network.

    Return False where nothing is changed: both ends are on this host, or the kernel is older.
    """
    try:
        if connection.family == socket.AF_UNIX or connection.getpeername()[0] == connection.getsockname()[0]:
            return False
        # This comes first, since the other option alone would have the kernel give up early.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * GIVEN_UP_S)
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000 * RETRIED_S)
    except OSError:  # the other end is gone, or the option is unknown
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        return False
    return True


def host_name() -> str:
    """Return the name of this machine, which identifies the host of a run in its files."""
    return socket.gethostname()


def format_address(host: str, port: int) -> str:
    """Return the address of a port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port of an address.

    Raises ValueError if the text has another form.
    """
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]*)):([0-9]{1,5})", address)
    if found is None or int(found[3]) > LARGEST_PORT:
        raise ValueError(f"{address} is no address; one is HOST:PORT, or [HOST]:PORT for IPv6")
    return found[1] or found[2], int(found[3])


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of the sockets that reach `host`: IPv6 only for an IPv6 address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address_of(bound: socket.socket) -> str:
    """Return the address of a bound socket."""
    return format_address(*bound.getsockname()[:2])


def bind_free(host: str, ports: Ports | None = None) -> socket.socket:
    """Return a socket that listens on `host`, at the first free port of `ports`.

    Without `ports` the kernel chooses the port. Raises OSError, for instance if all are taken.
    """
    for port in (0,) if ports is None else range(ports[0], ports[1] + 1):
        listener = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            if port:
                # The option allows a port of which the kernel still remembers connections. Another
                # socket with the option may then bind the same port before this one listens. One of
                # the two cannot listen: if it is this one, the next port is tried.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    assert ports is not None
    raise OSError(
        errno.EADDRINUSE,
        f"all ports of --port-range {ports[0]}-{ports[1]} are taken on {host}; give a wider range: a rank needs up to "
        f"{PORTS_OF_A_RANK} ports",
    )
