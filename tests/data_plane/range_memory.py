"""A registered memory for tests of ranges, and what proves itself to an exporter or pretends to be one."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import torch
from msgspec.structs import replace
from torch import Tensor

from megatron_recover.authentication.handshake import NONCE_BYTES, Acceptor, Party, Refused, Reply, Role
from megatron_recover.data_plane.ranges.contract import CHUNK_BYTES, Description, Range, Void
from megatron_recover.data_plane.ranges.frames import Frames
from megatron_recover.data_plane.ranges.tcp_exporter import TcpExporter
from megatron_recover.data_plane.ranges.tcp_source import TcpSource
from megatron_recover.deadlines import Deadlines
from tests.control_plane.partners import KEY

DEADLINES = replace(Deadlines.of(300.0), beat_s=0.2)
"""Waits that a busy machine does not exceed."""
NEWCOMER = Party(Role.NEWCOMER, 9, 0)
LAYOUT = 5


def eventually(is_true: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something is true that another thread brings about."""
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.005)


class Bytes:
    """A memory with these bytes."""

    def __init__(self, label: str, data: bytes, layout: int = LAYOUT) -> None:
        self.label, self.data, self.layout = label, torch.frombuffer(bytearray(data), dtype=torch.uint8), layout
        self.is_void = False
        self.num_begun = 0

    def about(self) -> bytes:
        return b"about " + self.label.encode()

    def described(self) -> Description:
        if self.is_void:
            raise Void("void")
        return Description(self.label, self.layout, self.data.numel())

    def parts(self) -> list[str]:
        return ["one part"]

    def begun(self) -> None:
        self.num_begun += 1

    def buffer(self) -> Tensor:
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def copy(self, wanted: Range, buffer: Tensor) -> bool:
        buffer[: wanted.stop - wanted.start].copy_(self.data[wanted.start : wanted.stop])
        return not self.is_void


@contextlib.contextmanager
def exporting(key: bytes = KEY, deadlines: Deadlines = DEADLINES, rank: int = 0) -> Iterator[TcpExporter]:
    exporter = TcpExporter("127.0.0.1", key=key, rank=rank, deadlines=deadlines, report=lambda name, number: None)
    try:
        yield exporter
    finally:
        exporter.close()


@contextlib.contextmanager
def source_of(address: str, key: bytes = KEY, me: Party = NEWCOMER, deadlines: Deadlines = DEADLINES) -> Iterator[TcpSource]:
    source = TcpSource(address, key, me, deadlines)
    try:
        yield source
    finally:
        source.close()


def read_all(source: TcpSource, ranges: list[Range]) -> dict[Range, tuple[bytes, bool]]:
    """What arrives of these ranges, in the order of the requests."""
    buffer, left, found = torch.zeros(CHUNK_BYTES, dtype=torch.uint8), list(ranges), {}

    def arrived(got: Range, is_intact: bool) -> None:
        found[got] = (buffer[: got.stop - got.start].numpy().tobytes(), is_intact)

    source.read(lambda is_idle: left.pop(0) if left else None, buffer, arrived)
    return found


@contextlib.contextmanager
def rogue(behave: Callable[[Frames], None], key: bytes = KEY, verdict: Reply = Reply.WELCOME) -> Iterator[str]:
    """The address of an exporter that proves itself and then does whatever it wants with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, Refused, Exception):
            acceptor = Acceptor(key, lambda peer, wanted: True, port=port, nonce=secrets.token_bytes(NONCE_BYTES))
            while acceptor.wanted:
                data = sock.recv(acceptor.wanted)
                if not data:
                    return  # or this thread would keep a core busy to the end of the tests
                sock.sendall(acceptor.feed(data))
            sock.sendall(acceptor.decide(verdict))
            sock.settimeout(30.0)
            behave(Frames(sock, acceptor.session_keys))

    def listen() -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10.0)
