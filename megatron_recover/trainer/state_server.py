"""The state of a rank, served to newcomers while the rank trains.

The training thread opens a window at the begin of a training step and closes it before the state
changes. It never waits for a reader. Other threads serve what is asked for in between, and digest
the state once somebody reads it. What overlaps the close is void (`trainer/state_window.py`, Note
[Reads by other threads]), and the reader learns so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from megatron_recover.authentication.admission import ReportStrangers
from megatron_recover.data_plane.ranges.contract import CHUNK_BYTES, Description, Exporter, Range, Void
from megatron_recover.data_plane.ranges.tcp_exporter import TcpExporter
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import HOST, Ports
from megatron_recover.trainer.checksum import checksums
from megatron_recover.trainer.state import Scalar, State, StateTensor, digest_of, layout_digest_of
from megatron_recover.trainer.state_bytes import StateBytes, encoded
from megatron_recover.trainer.state_window import OutsideReads, StateWindow

if TYPE_CHECKING:
    from torch import Tensor

_GROUP_BYTES = 2**28
"""Bytes of tensors that are digested at once. Many small tensors together share the work."""

Digested = Callable[[str, int], None]
"""`digested(label, digest)` is called, in a thread of the server, with the digest of the state
(`State.digest`) of the window `label`: at most once for each, if somebody has begun to read, and
only if the window was open when the digest was complete."""


class StateServer:
    """Serves the state of one rank. The training thread calls `open` and `close`."""

    def __init__(
        self,
        *,
        key: bytes,
        replica: int,
        rank: int,
        host: str = HOST,
        ports: Ports | None = None,
        deadlines: Deadlines | None = None,
        digested: Digested = lambda label, digest: None,
        window: StateWindow | None = None,
        report: ReportStrangers = lambda name, number: None,
        exporter: Exporter | None = None,
    ) -> None:
        """Listen on a free port of `host`, and start the threads of the server.

        - `key` is the job's. `rank` is this rank's position in `replica`.
        - `window`: its `close` also ends what was opened here. None: only `close` of the server.
        - `report`: see `Admission`. A thread of the server calls it.
        - `exporter`: the transport. None: TCP.
        """
        self._replica, self._digested, self._window = replica, digested, window or StateWindow()
        self._deadlines = deadlines or Deadlines.of()
        self._exporter = exporter or TcpExporter(
            host, key=key, rank=rank, deadlines=self._deadlines, report=report, ports=ports
        )
        self._digesting: list[threading.Thread] = []
        """Threads that compute a digest, and some that have ended."""
        self.address = self._exporter.address
        """The address that is published to newcomers."""
        self._opened: _Opened | None = None

    def open(self, label: str, state: State) -> None:
        """Serve `state` as that of `label` from now on. Its scalars must not change before `close`.

        Do nothing if the window of this label is open. A label that was closed is not served again.
        Raises RuntimeError if the rank's `StateWindow` is closed.
        """
        if self._opened is not None and self._opened.label == label and self._opened.reads.is_open:
            return
        self.close()
        self._opened = _Opened(label, state, self._window.expose(), self._digested, self._digesting)
        self._exporter.register(self._opened)

    def close(self) -> None:
        """Have nothing count that is read from now on, and go on at once.

        On a GPU what comes next on the current stream waits for copies that are enqueued.
        """
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
            self._exporter.withdraw()

    def end(self) -> None:
        """Close, and end all threads and connections, within `close_s`."""
        self.close()
        self._exporter.close()
        for thread in self._digesting:  # torch ends a process that ends while a thread is inside it
            thread.join(self._deadlines.close_s)


class _Opened:
    """The state in one open window, as a `Memory` that readers may read."""

    def __init__(
        self, label: str, state: State, reads: OutsideReads, digested: Digested, digesting: list[threading.Thread]
    ) -> None:
        self.label, self.reads = label, reads
        self._digested, self._digesting = digested, digesting
        self._state: State | None = state
        self._lock = threading.Lock()
        """Guards the fields below. The training thread never takes it."""
        self._found: _Found | None = None
        self._is_digested = False

    def close(self) -> None:
        """Have all later reads be void. Called by the training thread."""
        self.reads.hold_back()
        self._state = self._found = None

    def about(self) -> bytes:
        return encoded(self._find().scalars)

    def described(self) -> Description:
        found = self._find()
        return Description(self.label, found.layout, found.bytes.num_bytes)

    def parts(self) -> list[str]:
        found = self._find()
        return [*(tensor.layout for tensor in found.tensors), *sorted(found.compared)]

    def begun(self) -> None:
        found = self._find()
        with self._lock:
            is_first, self._is_digested = not self._is_digested, True
        if is_first:
            thread = threading.Thread(target=self._digest, args=(found,), name="recover-state-digest", daemon=True)
            thread.start()
            self._digesting[:] = [each for each in (*self._digesting, thread) if each.is_alive()]

    def buffer(self) -> Tensor:
        with self.reads.enqueuing():  # pinned memory belongs to the current device
            return torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._find().is_on_gpu)

    def copy(self, wanted: Range, buffer: Tensor) -> bool:
        found = self._found
        if found is None or not self.reads.is_open:
            return False
        with self.reads.enqueuing():
            found.bytes.copy_out(*wanted, buffer)
        if not self.reads.is_open:
            return False
        if found.is_on_gpu:
            self.reads.wait()
        return True

    def _find(self) -> _Found:
        """Return the tensors and scalars of the state; find them first, inside the window.

        A thread of the server does this, and only for a reader: the walk over all state would cost
        the training thread some milliseconds in each step.

        Raises `Void` if the window closed before they were found.
        """
        with self._lock:
            found, state = self._found, self._state
            if found is None and state is not None:
                try:
                    with self.reads.enqueuing():
                        found = _Found(state.tensors(), state.scalars(), state.compared())
                except RuntimeError:  # a dictionary or a tensor that changed meanwhile
                    if self.reads.is_open:
                        raise
                self._found = found if self.reads.is_open else None
            if found is None or not self.reads.is_open:
                raise Void(f"the window of {self.label} has closed")
            return found

    def _digest(self, found: _Found) -> None:
        """Digest the state, group by group.

        Stop once the window is closed: on a GPU the next step waits for what is enqueued, and on a
        CPU the work would take time from it.
        """
        sums = list[int]()
        for group in found.groups():
            if not self.reads.is_open:
                return
            with self.reads.enqueuing():
                sums += checksums([tensor.data for tensor in group])
        digest = digest_of(found.tensors, found.compared, sums)
        if self.reads.is_open:
            self._digested(self.label, digest)


class _Found:
    """The tensors and scalars of a state, as they were found in one window."""

    def __init__(self, tensors: list[StateTensor], scalars: dict[str, Scalar], compared: dict[str, Scalar]) -> None:
        self.tensors, self.scalars, self.compared = tensors, scalars, compared
        self.bytes = StateBytes([tensor.data for tensor in tensors])
        self.layout = layout_digest_of(tensors, compared)
        self.is_on_gpu = any(device.type != "cpu" for device in self.bytes.devices)

    def groups(self) -> Iterator[list[StateTensor]]:
        """Yield all tensors in order, in groups of at most `_GROUP_BYTES` or one tensor."""
        group, num_bytes = list[StateTensor](), 0
        for tensor in self.tensors:
            if group and num_bytes + tensor.data.nbytes > _GROUP_BYTES:
                yield group
                group, num_bytes = [], 0
            group.append(tensor)
            num_bytes += tensor.data.nbytes
        yield group
