"""The state of a live rank, read by a newcomer from several members at once.

All members hold the same state in the window of one label, so each sends a part of it. A part that
does not come is read from another member. What has arrived stays. Nothing counts once a member says
that the window of the label is closed. The tensors are filled in place and are worth nothing before
`StateReader.read` has returned.

The caller computes the digest of what was read and compares it: this module finds damage on the
way, and no member that has another state.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.data_plane.ranges.contract import CHUNK_BYTES, Description, Range, Source, SourceLost, Void
from megatron_recover.data_plane.ranges.division import Division
from megatron_recover.data_plane.ranges.tcp_source import LayoutDiffers, TcpSource
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.trainer.state import Scalar, State, StateTensor, layout_digest_of
from megatron_recover.trainer.state_bytes import StateBytes, decoded

MAX_SOURCES = 8
"""Most members that are read at once."""
_MAX_DAMAGED = 3
"""Ranges with a wrong checksum from one source, after which it is not asked any more."""


class StateVoid(Exception):
    """The state of a label could not be read whole. Nothing that was read counts."""

    def __init__(self, reason: str, *, num_bytes: int = 0, of_bytes: int = 0, seconds: float = 0.0) -> None:
        """`num_bytes` of `of_bytes` bytes had been read after `seconds`."""
        super().__init__(reason)
        self.num_bytes, self.of_bytes, self.seconds = num_bytes, of_bytes, seconds


class Offer(NamedTuple):
    """The window that is open at a source."""

    label: str
    layout: int
    """`State.layout_digest` of the source."""
    num_bytes: int


class Read(NamedTuple):
    """A state that was read whole."""

    scalars: Mapping[str, Scalar]
    num_bytes: int
    seconds: float
    bytes_by_source: Mapping[str, int]
    """Bytes that counted, by the address of the source."""
    lost: Mapping[str, str]
    """Sources that did not last, with the reason."""


class StateReader:
    """Reads the state from same-position ranks of members. Used by one thread, except `end`."""

    def __init__(
        self,
        *,
        key: bytes,
        replica: int,
        rank: int,
        deadlines: Deadlines | None = None,
        connect: Callable[[str], Source] | None = None,
        faults: FaultInjector | None = None,
    ) -> None:
        """Make no connection yet.

        `key` is the job's. `rank` is this rank's position in `replica`, the newcomer. `connect`
        returns a source at an address. None: TCP.
        """
        self._deadlines = deadlines = deadlines or Deadlines.of()
        me = Party(Role.NEWCOMER, replica, rank)
        self._connect = connect or (lambda address: TcpSource(address, key, me, deadlines))
        self._faults = faults
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}
        """Connections that can be used again, by address."""
        self._has_ended = False
        self._threads: list[threading.Thread] = []
        """Threads of sources that a read has left to end by themselves, and some that have."""

    def next_window(self, address: str, after: str | None, still: Callable[[], None] = lambda: None) -> Offer:
        """Return the first window at a source whose label is not `after`; wait until it opens.

        `still()` is called now and then meanwhile. Raises StateVoid if the source is gone.
        """
        source = self._source(address)
        try:
            return Offer(*source.next_memory(after, still))
        except SourceLost as error:
            self._forget(source)
            raise StateVoid(f"{address}: {error}") from error

    def read(self, label: str, sources: Sequence[str], state: State) -> Read:
        """Fill the tensors of `state` with the state of `label`, read from these addresses.

        A source where the window of `label` is not open yet is waited for. Raises StateVoid if the
        window closed before all was read, if layouts differ, and if all sources are gone or too
        slow. Raises ValueError for no source, or more than `MAX_SOURCES`.
        """
        if not 1 <= len(set(sources)) == len(sources) <= MAX_SOURCES:
            raise ValueError(f"{len(sources)} sources, {len(set(sources))} of them different; 1 to {MAX_SOURCES} can be read")
        tensors = state.tensors()
        reading = _Reading(
            label, [self._source(address) for address in sources], tensors, state.compared(), self._deadlines, self._faults
        )  # fmt: skip
        try:
            found = reading.run()
        finally:
            for source in reading.unusable():
                self._forget(source)
            self._threads = [thread for thread in (*self._threads, *reading.threads) if thread.is_alive()]
        for tensor in tensors:
            tensor.put_back()
        return found

    def end(self) -> None:
        """End all connections and threads, within `close_s`.

        Any thread may call. A call in another thread raises StateVoid.
        """
        with self._lock:
            self._has_ended = True
            for source in self._sources.values():
                source.shut_down()
        for thread in self._threads:
            thread.join(self._deadlines.close_s)

    def _source(self, address: str) -> Source:
        with self._lock:
            source = self._sources.get(address) or self._sources.setdefault(address, self._connect(address))
            if self._has_ended:
                source.shut_down()
            return source

    def _forget(self, source: Source) -> None:
        source.shut_down()
        with self._lock:
            self._sources.pop(source.address, None)


class _Reading:
    """One try to read a state: the division of its bytes, and a thread for each source."""

    def __init__(
        self,
        label: str,
        sources: Sequence[Source],
        tensors: Sequence[StateTensor],
        scalars: Mapping[str, Scalar],
        deadlines: Deadlines,
        faults: FaultInjector | None,
    ) -> None:
        self._sources, self._deadlines, self._faults = sources, deadlines, faults
        self._parts = [*(tensor.layout for tensor in tensors), *sorted(scalars)]
        self._bytes = StateBytes([tensor.data for tensor in tensors])
        self._expected = Description(label, layout_digest_of(tensors, scalars), self._bytes.num_bytes)
        self._devices = [device for device in self._bytes.devices if device.type != "cpu"]
        self._changed = threading.Condition()
        """Guards the fields below, which the threads of the sources change."""
        self._division = Division(self._expected.num_bytes, len(sources), CHUNK_BYTES)
        self._num_writing = 0
        """Threads that copy a range into the tensors now."""
        self._about: bytes | None = None
        self._void = ""
        self._lost: dict[str, str] = {}
        self._num_damaged = [0] * len(sources)
        self._num_bytes = [0] * len(sources)
        self._progressed_at = time.monotonic()
        self._running = set(range(len(sources)))
        self.threads = [
            threading.Thread(target=self._run, args=(index,), name="recover-state-source", daemon=True)
            for index in range(len(sources))
        ]
        """The threads of the sources, in their order."""
        self._clean: set[int] = set()
        """Sources whose connection has no answer under way."""

    def run(self) -> Read:
        """Read, and return the figures. Raises StateVoid."""
        started = time.monotonic()
        for device in self._devices:  # the tensors may still be in use by what was enqueued before
            torch.cuda.current_stream(device).synchronize()
        for thread in self.threads:
            thread.start()
        with self._changed:
            limit_s = (
                self._deadlines.connect_s + self._deadlines.sum_s
            )  # a source that connects at last may wait for its window
            while not self._is_over():
                self._changed.wait(max(0.0, self._progressed_at + limit_s - time.monotonic()))
                if time.monotonic() - self._progressed_at >= limit_s:
                    self._void = self._void or f"no source has sent any of it for {figure(limit_s)} s (connect_s and sum_s)"
            is_complete = self._is_complete()
            void = self._void or "; ".join(f"{address}: {reason}" for address, reason in self._lost.items())
            if not is_complete:  # those at fault are known; the others need an instant, and are used again
                self._changed.wait_for(lambda: not self._running, self._deadlines.beat_s)
            # Copies in this process's memory: what comes next may write the same tensors.
            self._changed.wait_for(lambda: not self._num_writing)
            self._void = self._void or "over"
            about, num_bytes = self._about, list(self._num_bytes)
        if not is_complete or about is None:
            raise StateVoid(
                f"the state of {self._expected.label} was not read: {void}",
                num_bytes=sum(num_bytes), of_bytes=self._bytes.num_bytes, seconds=time.monotonic() - started,
            )  # fmt: skip
        try:
            scalars = decoded(about)
        except ValueError as error:
            raise StateVoid(
                f"the scalars of {self._expected.label} cannot be read: {error}",
                num_bytes=self._bytes.num_bytes, of_bytes=self._bytes.num_bytes, seconds=time.monotonic() - started,
            ) from error  # fmt: skip
        return Read(
            scalars, self._bytes.num_bytes, time.monotonic() - started,
            {source.address: count for source, count in zip(self._sources, num_bytes, strict=True)}, dict(self._lost),
        )  # fmt: skip

    def unusable(self) -> list[Source]:
        """Return the sources whose connection cannot be used again."""
        with self._changed:
            return [source for index, source in enumerate(self._sources) if index in self._running or index not in self._clean]

    def _is_complete(self) -> bool:
        return self._division.is_complete and not self._num_writing and self._about is not None

    def _is_over(self) -> bool:
        return bool(self._void) or self._is_complete() or not self._running

    # --- the thread of a source -------------------------------------------------------------------

    def _run(self, index: int) -> None:
        source, reason, is_clean = self._sources[index], "", False
        try:
            self._begun(source.begin(self._expected))
            buffer = self._buffer()
            source.read(
                lambda is_idle: self._next_range(index, is_idle), buffer,
                lambda got, is_intact: self._arrived(index, got, buffer, is_intact),
            )  # fmt: skip
            is_clean = True
        except Void as void:
            is_clean = True
            with self._changed:
                self._void = self._void or f"{source.address}: {void}"
        except LayoutDiffers as differs:
            reason, is_clean = self._difference(differs.parts), True
        except SourceLost as lost:
            reason = str(lost)
        except Exception as error:  # noqa: BLE001 - whoever waits has to know it
            reason = f"{type(error).__name__}: {error}"
        with self._changed:
            self._running.discard(index)
            if is_clean:
                self._clean.add(index)
            if reason:
                self._lost[source.address] = reason
                self._division.gone(index)
            self._changed.notify_all()

    def _begun(self, about: bytes) -> None:
        with self._changed:
            if self._about is not None and self._about != about:
                self._void = self._void or "sources have different scalars"
            self._about = about
            self._progressed_at = time.monotonic()
            self._changed.notify_all()

    def _buffer(self) -> Tensor:
        with self._on_device():
            return torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=bool(self._devices))

    def _next_range(self, index: int, is_idle: bool) -> Range | None:
        """Return the next range to ask a source for.

        An idle source waits until there is one, or nothing is left to read.
        """
        with self._changed:
            while not self._void and not self._division.is_complete and self._num_damaged[index] < _MAX_DAMAGED:
                now = time.monotonic()
                wanted = self._division.take(index, now, is_idle=is_idle)
                if wanted is not None or not is_idle:
                    return wanted
                at = self._division.steals_at(index)
                self._changed.wait(None if at is None else max(0.0, at - now))
            return None

    def _arrived(self, index: int, got: Range, buffer: Tensor, is_intact: bool) -> None:
        """Copy a range into the tensors if it is intact and the first of its kind."""
        with self._changed:
            self._progressed_at = time.monotonic()
            if not is_intact:
                self._num_damaged[index] += 1
                self._division.failed(index, got)
                self._changed.notify_all()
                if self._num_damaged[index] >= _MAX_DAMAGED:
                    raise SourceLost(f"{_MAX_DAMAGED} ranges had a wrong checksum")
                return
            if self._void or not self._division.arrived(index, got, self._progressed_at):
                return
            self._num_writing += 1
        try:
            with self._on_device():
                self._bytes.copy_in(*got, buffer)
                for device in self._devices:
                    torch.cuda.current_stream(device).synchronize()
            if self._faults is not None:
                self._faults.at(FaultPoint.STATE_READ)
        except BaseException as error:
            with self._changed:
                self._void = self._void or f"this rank cannot store it: {error}"
                self._num_writing -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._num_writing -= 1
            self._num_bytes[index] += got.stop - got.start
            self._changed.notify_all()

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self._devices[0]) if self._devices else contextlib.nullcontext()

    def _difference(self, theirs: list[str]) -> str:
        """Describe the first difference between the layout of a source and that of this rank."""
        for mine, other in itertools.zip_longest(self._parts, theirs):
            if mine != other:
                return f"its layout differs: it has {other or 'nothing'} where this rank has {mine or 'nothing'}"
        return "its layout differs"
