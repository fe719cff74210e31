"""A job on one machine listens on loopback only: launcher, leaders, data plane, torch's stores and gloo."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import threading
from collections.abc import Iterator

import psutil

from tests.system.jobs import Job, run_job

_LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


def listeners(inodes: set[str]) -> Iterator[tuple[str, int]]:
    """The hosts and ports at which the sockets among `inodes` listen."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                words = bytes.fromhex(host)  # 32-bit words in the order of this machine's bytes
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                yield socket.inet_ntop(family, address), int(port, 16)


def sockets_of(processes: list[psutil.Process]) -> set[str]:
    """The inodes of all sockets that processes have open."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError, psutil.Error):  # it ended meanwhile
            for name in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{process.pid}/fd/{name}")
                    if target.startswith("socket:["):
                        found.add(target[len("socket:[") : -1])
    return found


def test_no_process_of_a_job_listens_on_anything_but_loopback(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """A12: each replica's store listened on all interfaces, and gloo where the host name resolves."""
    seen: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            seen.extend(host for host, _ in listeners(sockets_of(psutil.Process().children(recursive=True))))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        run_job(Job(replicas=2, pp=2, steps=3), tmp_path / "run", data).expect(0)
    finally:
        over.set()
        looking.join(20)
    assert len(seen) > 5, "the look came too late: this test shows nothing"
    assert {address for address in seen if not (address.startswith("127.") or address == "::1")} == set()
