"""The interface of a transport that reads ranges of memory which other ranks have registered.

The shape is that of one-sided transports (RDMA, NIXL): an `Exporter` registers a memory and knows
nothing of who reads it; a `Source` reads ranges of it. So such a transport can take the place of
the default one, which moves bytes over TCP (`tcp_exporter.py`, `tcp_source.py`). A transport knows
nothing of steps, tensors or membership.

Every implementation promises:

* A memory has a label and a layout, and every read names both. A read of another memory is refused
  (`Void`), never served.
* Bytes that a memory's `copy` has called void are never delivered.
* What is delivered has passed a checksum (`Damaged` otherwise), and comes from a rank that has
  proven the job's key.
* Every call ends: it returns, or it raises. It raises when the other end has sent nothing for as
  long as the `Deadlines` allow. While a source waits for its next memory it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 2**22
"""Largest range of one read, in bytes. Each end of a connection holds a few buffers of this
size."""


class Range(NamedTuple):
    """A range of bytes of a registered memory."""

    start: int
    stop: int


class Description(NamedTuple):
    """A registered memory, as its exporter describes it."""

    label: str
    layout: int
    """Digest of what the bytes mean. Equal layouts have the same bytes at the same places."""
    num_bytes: int


class Void(Exception):
    """The memory of this label is not readable any more. What was read of it does not count."""


class SourceLost(Exception):
    """A source is gone, too slow, of another layout, or sends what is no answer."""


class Memory(Protocol):
    """A memory that is registered. Threads of the exporter call all methods."""

    label: str

    def about(self) -> bytes:
        """Return bytes that every reader gets first, as they are. Raises `Void`."""

    def described(self) -> Description:
        """Return the description. Raises `Void` if the memory has changed before it was known."""

    def parts(self) -> list[str]:
        """Return a description of each part of the layout, for a reader whose layout differs.

        Raises `Void`.
        """

    def begun(self) -> None:
        """Take notice of a reader that begins to read. Called once for each. Raises `Void`."""

    def buffer(self) -> Tensor:
        """Return a new buffer in host memory for `copy`: `CHUNK_BYTES` elements of uint8.

        Raises `Void`.
        """

    def copy(self, wanted: Range, buffer: Tensor) -> bool:
        """Copy a range to the begin of `buffer`.

        Return False if the memory may have changed before the end of the copy: the copy is void.
        """


class Exporter(Protocol):
    """The side that registers memory, one at a time."""

    address: str
    """The address at which a `Source` of the same kind reaches this exporter."""

    def register(self, memory: Memory) -> None:
        """Let readers read `memory`, in place of the one before."""

    def withdraw(self) -> None:
        """Let nobody begin to read the memory any more, if there is one. Never wait for readers.

        Its label is not served again.
        """

    def close(self) -> None:
        """Withdraw the memory, and end all connections, in bounded time."""


class Source(Protocol):
    """The reading side: one exporter, as one thread sees it. Any thread may call `shut_down`.

    Each call raises `SourceLost`.
    """

    address: str

    def next_memory(self, after: str | None, still: Callable[[], None] = lambda: None) -> Description:
        """Return the description of the first memory whose label is not `after`; wait for it.

        `still()` is called whenever the exporter says that it waits.
        """

    def begin(self, expected: Description) -> bytes:
        """Begin to read the memory that is `expected`, and return its `about`; wait for it.

        Raises `Void` if that memory was withdrawn. Raises `SourceLost` if its layout differs.
        """

    def read(self, next_range: Callable[[bool], Range | None], buffer: Tensor, arrived: Callable[[Range, bool], None]) -> None:
        """Read ranges of the memory that was begun, until there is no next one.

        - `next_range(is_idle)` returns a range to ask for, or None. `is_idle` is True if this
          source has nothing left to do.
        - `buffer`: `CHUNK_BYTES` elements of uint8 in host memory.
        - `arrived(range, is_intact)` is called once for each range, in the order in which they were
          asked for. The range is at the begin of `buffer`. If `is_intact` is False, the checksum
          was wrong.

        Raises `Void` once the memory was withdrawn.
        """

    def shut_down(self) -> None:
        """Have a call in another thread, and every later one, raise `SourceLost`."""
