"""A source of ranges over TCP: one connection to a `TcpExporter`."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_recover.authentication.handshake import NONCE_BYTES, Connector, Party, Refused, Reply, Role
from megatron_recover.data_plane.connection import REDIAL_S
from megatron_recover.data_plane.ranges.contract import Description, Range, SourceLost, Void
from megatron_recover.data_plane.ranges.frames import (
    Begin,
    Begun,
    Broken,
    Differs,
    Found,
    Frames,
    Get,
    LookFor,
    Message,
    Piece,
    Still,
    Withdrawn,
)
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import family_of, outlast_cuts, parse_address, prepare

if TYPE_CHECKING:
    from torch import Tensor

_DEPTH = 2
"""Ranges asked for at once: the exporter copies one while another is on its way."""


class TcpSource:
    """One exporter, as a rank of a newcomer sees it (`Source`). It connects with the first call."""

    def __init__(self, address: str, key: bytes, me: Party, deadlines: Deadlines) -> None:
        """`key` is the job's. `me` is this rank, with the role NEWCOMER."""
        self.address = address
        self._key, self._me, self._deadlines = key, me, deadlines
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._is_shut_down = False
        self._frames: Frames | None = None
        self._label, self._layout = "", 0

    def next_memory(self, after: str | None, still: Callable[[], None] = lambda: None) -> Description:
        """Return as `Source.next_memory` does."""
        match self._ask(LookFor(after), still):
            case Found(label, layout, num_bytes):
                return Description(label, layout, num_bytes)
            case other:
                raise self._no_answer(other)

    def begin(self, expected: Description) -> bytes:
        """Begin as `Source.begin` does."""
        match self._ask(Begin(*expected)):
            case Begun(label, layout, num_bytes, about) if Description(label, layout, num_bytes) == expected:
                self._label, self._layout = label, layout
                return about
            case Begun() | Differs([]):
                raise SourceLost("another layout than it says")
            case Differs(parts):
                raise LayoutDiffers(parts)
            case Withdrawn(label):
                raise Void(f"the window of {label} has closed")
            case other:
                raise self._no_answer(other)

    def read(self, next_range: Callable[[bool], Range | None], buffer: Tensor, arrived: Callable[[Range, bool], None]) -> None:
        """Read as `Source.read` does."""
        frames, memory = self._connected(), memoryview(buffer.numpy())
        asked = deque[Range]()
        while True:
            while len(asked) < _DEPTH and (wanted := next_range(not asked)) is not None:
                self._send(Get(self._label, self._layout, *wanted))
                asked.append(wanted)
            if not asked:
                return
            wanted = asked.popleft()
            message, num_bytes, is_intact = self._receive(frames, memory)
            expected = Piece(self._label, self._layout, *wanted)
            match message:
                case Piece() if message == expected and num_bytes == wanted.stop - wanted.start:
                    arrived(wanted, is_intact)
                case Withdrawn(label):
                    for _ in asked:  # so that the connection can be used again
                        self._receive(frames, memory)
                    raise Void(f"the window of {label} has closed")
                case other:
                    raise self._no_answer(other)

    def shut_down(self) -> None:
        """Shut down as `Source.shut_down` does."""
        with self._lock:
            self._is_shut_down = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # not connected yet, or the other end has shut it down
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; later calls raise `SourceLost`. No other thread is in a call."""
        self.shut_down()
        if self._sock is not None:
            self._sock.close()

    def _ask(self, request: Message, still: Callable[[], None] = lambda: None) -> Message:
        """Send a request and return the answer, however long the exporter says that it waits."""
        self._send(request)
        while True:
            answer, _, _ = self._receive(self._connected())
            if not isinstance(answer, Still):
                return answer
            still()

    def _send(self, request: Message) -> None:
        try:
            self._connected().send(request)
        except Broken as broken:
            self.close()
            raise SourceLost(str(broken)) from broken

    def _receive(self, frames: Frames, payload: memoryview | None = None) -> tuple[Message, int, bool]:
        try:
            return frames.receive(payload)
        except Broken as broken:
            self.close()
            raise SourceLost(str(broken)) from broken

    def _connected(self) -> Frames:
        """Return the connection; dial until `connect_s` is over if there is none.

        A connection that ends before the verdict is dialled again: strangers may have crowded it
        out. Raises `SourceLost` at once if nobody listens.
        """
        until, reason = time.monotonic() + self._deadlines.connect_s, ""
        while self._frames is None:
            try:
                self._frames = self._dial(until)
            except ConnectionRefusedError as error:
                raise SourceLost("nobody listens there") from error
            except (OSError, Refused, ValueError) as error:
                reason = str(error) if isinstance(error, Refused) or not reason else reason
                if time.monotonic() + REDIAL_S >= until or self._is_shut_down:
                    raise SourceLost(f"no connection: {reason}") from error
                time.sleep(REDIAL_S)
        return self._frames

    def _dial(self, until: float) -> Frames:
        """Return a connection that is proven. Raises OSError, Refused or `SourceLost`."""
        host, port = parse_address(self.address)
        sock = socket.socket(family_of(host), socket.SOCK_STREAM)
        with self._lock:
            self._sock = sock  # before it connects: `shut_down` ends that, too
            if self._is_shut_down:
                sock.close()
                raise SourceLost("this rank reads no more")

        def bound() -> None:  # a timeout of a socket is that of one call, and whoever answers byte by byte makes many
            sock.settimeout(max(until - time.monotonic(), REDIAL_S))

        try:
            bound()
            sock.connect((host, port))
            prepare(sock)
            nonce = secrets.token_bytes(NONCE_BYTES)
            connector = Connector(self._key, self._me, Party(Role.STATE, 0, self._me.rank), port=port, nonce=nonce)
            answer = connector.opening
            while connector.wanted:
                if time.monotonic() >= until:
                    raise TimeoutError("it did not prove itself in time")
                bound()
                sock.sendall(answer)
                if not (got := sock.recv(connector.wanted)):
                    raise Refused("the other end hung up")
                answer = connector.feed(got)
            if connector.verdict is not Reply.WELCOME:
                raise SourceLost("it serves too many readers")
            outlast_cuts(sock)
            sock.settimeout(self._deadlines.sum_s)
        except BaseException:
            sock.close()
            raise
        return Frames(sock, connector.session_keys)

    def _no_answer(self, message: Message) -> SourceLost:
        return SourceLost(f"it sent a {type(message).__name__} that was not asked for")


class LayoutDiffers(SourceLost):
    """The source has another layout, with these `parts`."""

    def __init__(self, parts: list[str]) -> None:
        super().__init__("its layout differs")
        self.parts = parts
