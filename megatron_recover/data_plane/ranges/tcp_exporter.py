"""An exporter of ranges over TCP: a listener, and a thread for each reader.

The listener's thread admits readers (`authentication/admission.py`). It expects nobody, so that
strangers take little time from the training thread: no training waits for a reader. The thread of a
reader copies one range at a time into a buffer of its own, and sends the copy. So what is in a
buffer, or on its way, stays what was read, also if the memory is withdrawn meanwhile. Whoever
registers and withdraws never waits for a reader.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from megatron_recover.authentication.admission import PAUSE_S, Admission, ReportStrangers, Unproven
from megatron_recover.authentication.handshake import Party, Reply, Role
from megatron_recover.data_plane.ranges.contract import CHUNK_BYTES, Description, Memory, Range, Void
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
from megatron_recover.host.addresses import Ports, address_of, bind_free, outlast_cuts, prepare
from megatron_recover.host.speaker import Speaker

if TYPE_CHECKING:
    from torch import Tensor

MAX_READERS = 16
"""Connections of readers at most, each with a thread and a buffer of `CHUNK_BYTES`."""
_PAST_LABELS = 64
"""Labels that are known to be withdrawn. A reader that asks for another one waits for it."""


class TcpExporter:
    """Serves one registered memory after the other (`Exporter`).

    A forked child closes the sockets at once.
    """

    def __init__(
        self, host: str, *, key: bytes, rank: int, deadlines: Deadlines, report: ReportStrangers, ports: Ports | None = None
    ) -> None:
        """Listen on a free port of `host`, as the rank at position `rank` of its replica.

        `key` is the job's. `report`: see `Admission`; a thread of the exporter calls it. `ports`:
        see `bind_free`.
        """
        self._rank, self._deadlines = rank, deadlines
        listener = bind_free(host, ports)
        self.address = address_of(listener)
        self._admission = Admission(listener, key, "state", report)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        """Guards the fields below. Held for an instant only."""
        self._memory: Memory | None = None
        self._past = deque[str](maxlen=_PAST_LABELS)
        """Labels of memory that was withdrawn."""
        self._readers: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._speaker = Speaker()
        self._thread = threading.Thread(target=self._listen, name="recover-state", daemon=True)
        exporter = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: alive._abandon() if (alive := exporter()) is not None else None)
        self._thread.start()

    def register(self, memory: Memory) -> None:
        """Register as `Exporter.register` does. A label that was withdrawn is not served again."""
        with self._changed:
            self._withdraw()
            if memory.label not in self._past:
                self._memory = memory
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Withdraw as `Exporter.withdraw` does."""
        with self._changed:
            self._withdraw()
            self._changed.notify_all()

    def close(self) -> None:
        """Close as `Exporter.close` does, within `close_s`."""
        with self._changed:
            self._withdraw()
            self._is_closed = True
            self._changed.notify_all()
            readers = dict(self._readers)
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
        for sock in readers:
            with contextlib.suppress(OSError):  # the reader has shut it down already
                sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *readers.values()):
            thread.join(self._deadlines.close_s)

    def _withdraw(self) -> None:
        if self._memory is not None:
            self._past.append(self._memory.label)
            self._memory = None

    # --- the listener's thread --------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while not self._is_woken():
                for proven in self._admission.turn(self._admits, expects=0):
                    self._admit(proven)
            self._admission.tell()
        finally:
            self._close_listener()

    def _admits(self, peer: Party, wanted: Party) -> bool:
        """Return whether a rank of a newcomer asks for this rank's position.

        A rank asks for replica 0, whichever replica listens: the port is this process's alone.
        """
        return peer.role is Role.NEWCOMER and peer.rank == self._rank and wanted == Party(Role.STATE, 0, self._rank)

    def _admit(self, proven: Unproven) -> None:
        """Start the thread of a reader; refuse one that is too many."""
        sock = proven.sock
        with self._changed:
            has_room = len(self._readers) < MAX_READERS and not self._is_closed
            thread = threading.Thread(target=self._serve, args=(proven,), name="recover-state-reader", daemon=True)
            if has_room:
                self._readers[sock] = thread
        try:
            proven.decide(Reply.WELCOME if has_room else Reply.NO_ROOM)
            if has_room:
                thread.start()
                return
        except (OSError, RuntimeError):  # the reader is gone, or there is no thread for it
            pass
        with self._changed:
            self._readers.pop(sock, None)
        sock.close()

    def _is_woken(self) -> bool:
        """Wait for an event, or until the listener has work; return whether to end."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        wait_s = self._admission.due_s()
        if self._admission.is_stuck:
            wait_s = PAUSE_S
        else:
            poll.register(self._admission, select.POLLIN)
        ready = poll.poll(None if wait_s is None else wait_s * 1000)
        return any(descriptor == self._wake for descriptor, _ in ready)

    def _close_listener(self) -> None:
        self._admission.close()
        wake, self._wake = self._wake, -1
        if wake >= 0:  # close it once: the number may soon belong to another descriptor
            os.close(wake)

    def _abandon(self) -> None:
        """Close the sockets in a forked child. The lock is new: another thread may have held it."""
        self._changed = threading.Condition()
        self._memory, self._is_closed = None, True
        self._close_listener()
        for sock in self._readers:
            sock.close()

    # --- the thread of a reader -------------------------------------------------------------------

    def _serve(self, proven: Unproven) -> None:
        sock = proven.sock
        try:
            prepare(sock)
            outlast_cuts(sock)
            sock.settimeout(self._deadlines.sum_s)
            _Reader(self, Frames(sock, proven.acceptor.session_keys), self._deadlines).serve()
        except (Broken, OSError):  # the reader is gone, or reads nothing; it may dial again
            pass
        except Exception as error:  # noqa: BLE001 - a reader's trouble must not reach who trains
            self._speaker.say(f"megatron-recover: cannot serve the state to a newcomer: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._readers.pop(sock, None)
            sock.close()

    def find(self, label: str | None, after: str | None, timeout_s: float) -> tuple[Memory | None, bool]:
        """Return a memory, and whether to look again; wait for at most `timeout_s`.

        With a `label`: the memory of that label, or None if it was withdrawn. Without: the first
        memory whose label is not `after`. Raises `Broken` if the exporter is closed.
        """
        with self._changed:
            for is_last in (False, True):
                if self._is_closed:
                    raise Broken("the exporter is closed")
                if label in self._past:
                    return None, False
                if (memory := self._memory) is not None and (memory.label == label if label else memory.label != after):
                    return memory, False
                if not is_last:
                    self._changed.wait(timeout_s)
        return None, True


class _Reader:
    """One reader, in its own thread."""

    def __init__(self, exporter: TcpExporter, frames: Frames, deadlines: Deadlines) -> None:
        self._exporter, self._frames, self._deadlines = exporter, frames, deadlines
        self._begun: tuple[Memory, Description] | None = None
        self._buffer: Tensor | None = None

    def serve(self) -> None:
        """Answer until the connection ends. Raises `Broken` then."""
        while True:
            self._frames.sock.settimeout(self._deadlines.deadline_s)  # a reader may be idle for long
            request, _, _ = self._frames.receive()
            self._frames.sock.settimeout(self._deadlines.sum_s)
            match request:
                case LookFor(after):
                    self._frames.send(Found(*self._next(after)))
                case Begin(label, layout, num_bytes):
                    self._frames.send(self._begin(Description(label, layout, num_bytes)))
                case Get():
                    self._get(request)
                case _:
                    raise Broken(f"a {type(request).__name__} is no request")

    def _next(self, after: str | None) -> Description:
        while True:
            memory = self._wait(None, after)
            assert memory is not None
            try:
                return memory.described()
            except Void:
                after = memory.label

    def _begin(self, expected: Description) -> Message:
        memory = self._wait(expected.label, None)
        try:
            if memory is None:
                return Withdrawn(expected.label)
            described = memory.described()
            if described != expected:
                return Differs(memory.parts())
            about = memory.about()
            self._begun = memory, described
            memory.begun()
        except Void:
            return Withdrawn(expected.label)
        return Begun(*described, about)

    def _get(self, request: Get) -> None:
        if self._begun is None or self._begun[1][:2] != (request.label, request.layout):
            raise Broken("a range of another memory than the one that was begun")
        memory, described = self._begun
        wanted = Range(request.start, request.stop)
        if not (0 <= wanted.start < wanted.stop <= described.num_bytes and wanted.stop - wanted.start <= CHUNK_BYTES):
            raise Broken(f"{wanted} is no range of a memory of {described.num_bytes} bytes")
        if self._copy(memory, wanted):
            assert self._buffer is not None
            payload = memoryview(self._buffer.numpy())[: wanted.stop - wanted.start]
            self._frames.send(Piece(described.label, described.layout, *wanted), payload)
        else:
            self._frames.send(Withdrawn(described.label))

    def _copy(self, memory: Memory, wanted: Range) -> bool:
        try:
            self._buffer = memory.buffer() if self._buffer is None else self._buffer
        except Void:
            return False
        return memory.copy(wanted, self._buffer)

    def _wait(self, label: str | None, after: str | None) -> Memory | None:
        """Wait as `TcpExporter.find` does, and tell the reader meanwhile that this end waits."""
        while True:
            memory, again = self._exporter.find(label, after, self._deadlines.beat_s)
            if not again:
                return memory
            self._frames.send(Still())
