"""The flags of `run` for whoever watches it: metrics for Prometheus, and a command for events.

All of them are judged here, and the port is taken here, before anything of the run exists.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import shutil
import socket
import tempfile
from pathlib import Path

from megatron_recover import packages
from megatron_recover.cluster.monitoring import BACKLOG, Wanted
from megatron_recover.host.addresses import HOST
from megatron_recover.host.in_use import InUse

_SUFFIX = ".prom"
_LARGEST_PORT = 65535


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of `run`."""
    group = parser.add_argument_group("monitoring (docs/how_to/monitor.md)")
    group.add_argument(
        "--metrics-port", type=int, metavar="PORT",
        help="serve metrics for Prometheus on this port; 0: a free one, which is printed",
    )  # fmt: skip
    group.add_argument(
        "--metrics-address", metavar="ADDRESS",
        help=f"address on which they are served. Whoever reaches it can read them: only this machine reaches {HOST}, and every "
        f"machine of the network 0.0.0.0 (default: {HOST})",
    )  # fmt: skip
    group.add_argument(
        "--metrics-textfile", type=Path, metavar="FILE.prom",
        help="keep metrics in this file, for the textfile collector of node_exporter",
    )  # fmt: skip
    group.add_argument(
        "--on-event", metavar="COMMAND",
        help="run this command, without a shell, when replicas are lost, when the run goes on with fewer, when a replica has "
        "joined, when a save fails, and when the run ends; it gets JSON on stdin",
    )  # fmt: skip


def read(arguments: argparse.Namespace) -> Wanted | None:
    """Return what is wanted, with the port taken; None if nothing is. Raises ValueError."""
    port, textfile, command = arguments.metrics_port, arguments.metrics_textfile, arguments.on_event
    if arguments.metrics_address is not None and port is None:
        raise ValueError("--metrics-address does nothing without --metrics-port; give both, or none")
    if port is None and textfile is None and command is None:
        return None
    on_event = _words(command) if command is not None else ()
    if port is not None or textfile is not None:
        flag = "--metrics-port" if port is not None else "--metrics-textfile"
        if arguments.trace_level == "faults":
            raise ValueError(
                f"{flag} needs the steps of the trace, which --trace-level faults leaves out; give --trace-level steps"
            )
        if lacking := packages.mistakes(packages.METRICS):
            raise ValueError(f"{flag}: {lacking[0]}, or leave the flag out")
    if textfile is not None:
        textfile = _textfile(textfile)
    listener = _listener(arguments.metrics_address or HOST, port) if port is not None else None
    return Wanted(listener=listener, textfile=textfile, on_event=on_event)


def _words(command: str) -> tuple[str, ...]:
    """Return the words of a command. Raises ValueError if it cannot be started."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ValueError(f"--on-event {command}: {error}; quote it as for a shell") from error
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f"--on-event: there is no program {words[0] if words else command!r}, or it is not executable; give the path of "
            "one (chmod +x), and `sh -c '...'` for what needs a shell"
        )
    return words


def _textfile(path: Path) -> Path:
    """Return the whole path of the text file.

    Raises ValueError if its name does not end with `.prom`, or if it cannot be written.
    """
    if path.suffix != _SUFFIX:
        raise ValueError(f"--metrics-textfile {path} does not end with {_SUFFIX}; node_exporter reads no other file")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):  # the file is written beside its name, and renamed
            pass
    except OSError as error:
        raise ValueError(
            f"--metrics-textfile {path} cannot be written ({error.strerror}); give a file in a folder that exists and that you "
            "may write to"
        ) from error
    return path.absolute()


def _listener(address: str, port: int) -> socket.socket:
    """Return a socket that listens for requests. Raises ValueError with the remedy."""
    if not 0 <= port <= _LARGEST_PORT:
        raise ValueError(f"--metrics-port is {port}; it must be 0 to {_LARGEST_PORT}")
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:  # socket.gaierror included
        if error.errno == errno.EADDRINUSE:
            remedy = f"give another port, or 0 for a free one; `ss -ltnp sport = :{port}` names who has it"
            raise InUse(f"--metrics-port {port} is in use on {address}; {remedy}") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ValueError(f"--metrics-port {port} is not allowed ({error.strerror}); give one above 1023") from error
        raise ValueError(
            f"--metrics-address {address} cannot be used ({error.strerror}); give an address of this machine"
        ) from error
