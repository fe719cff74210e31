"""Strangers that besiege a running job: another local user who has no key, played by one thread.

They connect to every port at which a process of the job listens, and hold as many connections as they are told to: silent ones,
ones that send a byte a second, garbage, huge headers, openings without a key, and replies of what another connection was sent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

import psutil

from megatron_recover.authentication.handshake import KEY_BYTES, NONCE_BYTES, Connector, Party, Role
from megatron_recover.control_plane.wire import FORMAT_VERSION

_LISTENING = "0A"


def raise_descriptor_limit() -> int:
    """Let this process open as many descriptors as it may; how many that are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def ports_of(processes: Sequence[psutil.Process]) -> list[int]:
    """The ports on loopback at which processes listen."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{process.pid}/fd/{name}"))
    lines = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted(
        {int(each[1].partition(":")[2], 16) for each in lines if each[3] == _LISTENING and f"socket:[{each[9]}]" in inodes}
    )


class Siege:
    """Strangers at all `ports`, until `lift`."""

    def __init__(self, ports: Sequence[int], num_connections: int) -> None:
        self._ports, self._num = itertools.cycle(ports), num_connections
        self._chance = random.Random(0)
        self._open: dict[int, socket.socket] = {}
        self._slow: list[socket.socket] = []
        self._poll = select.epoll()
        self._over = threading.Event()
        self.full = threading.Event()
        """As many connections as wanted were made."""
        self.num_made = self.num_let_go = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def lift(self) -> None:
        """End it, and close all connections."""
        self._over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        for each in self._open.values():
            each.close()
        self._poll.close()

    def _run(self) -> None:
        next_byte = time.monotonic()
        while not self._over.is_set():
            if self.num_made < self._num:
                for _ in range(20):
                    self._visit()
            else:
                self.full.set()
            for descriptor, events in self._poll.poll(0.001 if self.num_made < self._num else 0.05):
                self._heard(descriptor, events)
            if time.monotonic() >= next_byte:
                next_byte += 1.0
                for each in self._slow:
                    with contextlib.suppress(OSError):
                        each.send(b"m")

    def _visit(self) -> None:
        port = next(self._ports)
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
        self.num_made += 1
        self._open[sock.fileno()] = sock
        self._poll.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT | select.EPOLLONESHOT)

    def _heard(self, descriptor: int, events: int) -> None:
        sock = self._open[descriptor]
        try:
            if events & select.EPOLLOUT:
                self._speak(sock)
                self._poll.modify(descriptor, select.EPOLLIN)
                return
            answer = sock.recv(1000)
            if answer:
                sock.send(answer)  # reflected
                return
        except OSError:
            pass
        self.num_let_go += 1
        del self._open[descriptor]
        with contextlib.suppress(ValueError):
            self._slow.remove(sock)
        sock.close()

    def _speak(self, sock: socket.socket) -> None:
        port = sock.getpeername()[1]
        forged = Connector(
            bytes(KEY_BYTES), Party(self._chance.choice(tuple(Role)), self._chance.randrange(4), self._chance.randrange(2)),
            Party(self._chance.choice(tuple(Role)), self._chance.randrange(4), self._chance.randrange(2)),
            port=port, nonce=self._chance.randbytes(NONCE_BYTES), generation=self._chance.randrange(3),
        ).opening  # fmt: skip
        match self._chance.randrange(6):
            case 0:
                self._slow.append(sock)
            case 1:
                sock.send(self._chance.randbytes(self._chance.randrange(1, 5000)))
            case 2:
                sock.send(struct.pack("!2sHI", b"mr", FORMAT_VERSION, 2**32 - 1) + bytes(1000))
            case 3:
                sock.send(forged)
            case 4:
                sock.send(forged + self._chance.randbytes(200))
            case 5:
                pass
