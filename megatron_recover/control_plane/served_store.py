"""torch's store of a replica that spans nodes, as a rank sees it: rank 0 serves it.

torch's C++ code calls the methods of this class through its `PythonStore`, from threads of its own
as well. The names of the methods are those that `PythonStore` looks up (torch/csrc/distributed/
c10d/init.cpp). It does not look up queues, `list_keys` and `barrier`: torch refuses the first two
for such a store, and makes the third from `add`, `set` and `wait`.

Note [Threads of a store]. Every call has a connection for itself until it returns: one that an
earlier call has left, or a new one. So threads share no lock, and a thread that waits for a key
delays no other. A call that fails or runs out of time closes its connection, and no later call can
take its answer for its own. While a call waits for the network the interpreter's lock is free.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]

from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.store_messages import (
    StoreAdd,
    StoreAnswer,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreRefusal,
    StoreRequest,
    StoreSet,
    StoreWait,
)
from megatron_recover.control_plane.store_table import MAX_VALUE_BYTES
from megatron_recover.control_plane.wire import LinkClosed, Message, encode, largest_body
from megatron_recover.trace.node_clock import NodeClock

_MAX_BYTES = largest_body(Role.RANK, Role.STORE)
_KEYS_SHOWN = 4
"""Keys that an error names, at most."""


class ServedStore(Store):
    """The store of a replica, at the address of rank 0. Any thread may use it.

    Keep the object as long as a process group uses it: torch's C++ code does not. No call takes
    longer than `timeout`, or than the argument of that name. Every method raises `DistNetworkError`
    if rank 0 is gone, and `DistStoreError` if the time is over or the store refuses the request.
    """

    def __init__(self, address: str, key: bytes, *, replica: int, rank: int, clock: NodeClock, timeout: timedelta) -> None:
        """Use the store at `address` (host:port) as `rank` of `replica`.

        The first call connects. `key` is the job's; `clock` is that of this node.
        """
        super().__init__()
        self.set_timeout(timeout)
        self._address, self._key, self._replica, self._clock = address, key, replica, clock
        self._me = Party(Role.RANK, replica, rank)
        self._links: set[OutgoingLink] = set()
        """All open links."""
        self._free: list[OutgoingLink] = []
        """Links that no call uses (Note [Threads of a store])."""
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: store._close_in_child() if (store := itself()) is not None else None)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._ask(StoreSet((key,), (_bytes(value),)))

    def get(self, key: str) -> bytes:
        """Return a value; wait for the key."""
        return self._ask(StoreGet((key,))).values[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum. A key that does not exist is 0."""
        return self._ask(StoreAdd(key, amount)).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value that is as expected (`StoreCompareSet`); return the value after that."""
        return self._ask(StoreCompareSet(key, _bytes(expected), _bytes(desired))).values[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._ask(StoreAppend(key, _bytes(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._ask(StoreCheck(tuple(keys))).number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys."""
        self._ask(StoreWait(tuple(keys)), timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys; wait for all of them."""
        values: list[bytes] = []
        while len(values) < len(keys):
            values += self._ask(StoreGet(tuple(keys[len(values) :]))).values
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values, in parts that a message holds."""
        fresh = list(zip(keys, map(_bytes, values), strict=True))
        begin = 0
        while begin < len(fresh):
            end, num_bytes = begin, 0
            while end < len(fresh) and (end == begin or num_bytes + len(fresh[end][1]) <= MAX_VALUE_BYTES):
                num_bytes += len(fresh[end][1])
                end += 1
            part_keys, part_values = zip(*fresh[begin:end], strict=True)
            self._ask(StoreSet(part_keys, part_values))
            begin = end

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._ask(StoreDelete(key)).number)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._ask(StoreCount()).number

    deleteKey, getNumKeys = delete_key, num_keys
    """The names by which `PythonStore` looks these two up."""

    def has_extended_api(self) -> bool:
        """Return True: gloo then gets and sets the keys of a group in few calls."""
        return True

    def clone(self) -> ServedStore:
        """Return this store, which any thread may use."""
        return self

    # --- Inside ----------------------------------------------------------------------------------

    def _ask(self, request: StoreRequest, timeout: timedelta | None = None) -> StoreAnswer:
        """Send a request and return its answer, within `timeout`; None: within the store's."""
        body = encode(request)
        if len(body) > _MAX_BYTES:
            raise DistStoreError(f"a {_named(request)} has {len(body)} bytes; the store takes at most {_MAX_BYTES}")
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        seconds = limit.total_seconds()
        until = time.monotonic() + seconds
        link: OutgoingLink | None = None
        try:
            link = self._free_link() or self._dial(seconds)
            answer = self._exchange(link, body, until)
        except BaseException as error:
            if link is not None:
                self._links.discard(link)
                link.close()
            if isinstance(error, LinkClosed):
                raise DistNetworkError(
                    f"rank 0 of replica {self._replica} is gone, and with it the replica's store at {self._address} ({error})"
                ) from error
            if isinstance(error, TimeoutError):
                raise DistStoreError(
                    f"timeout after {seconds:g} s at the store of replica {self._replica} ({self._address}), "
                    f"in a {_named(request)}"
                ) from error
            raise
        self._free.append(link)
        if isinstance(answer, StoreRefusal):
            raise DistStoreError(f"the store of replica {self._replica} refused a {_named(request)}: {answer.reason}")
        assert isinstance(answer, StoreAnswer), f"rank 0 of replica {self._replica} answered with a {type(answer).__name__}"
        return answer

    def _free_link(self) -> OutgoingLink | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def _dial(self, patience_s: float) -> OutgoingLink:
        link = OutgoingLink(
            self._address, self._key, self._me, Party(Role.STORE, self._replica), clock=self._clock, patience_s=patience_s
        )  # fmt: skip
        self._links.add(link)
        return link

    @staticmethod
    def _exchange(link: OutgoingLink, body: bytes, until: float) -> Message:
        """Send an encoded request and return the answer.

        Raises `LinkClosed`, and TimeoutError after `until`. A link that is closed before rank 0 has
        proven itself dials again.
        """
        is_sent = False
        while True:
            try:
                if link.fileno() < 0:
                    link.redial()
                if is_sent:
                    link.flush()
                else:
                    is_sent = True  # queued, also if the connection ends meanwhile
                    link.put(body)
                for message in link.receive():
                    return message
            except LinkClosed:
                pause_s = link.retry_s()
                if pause_s is None:
                    raise
                link.close()
                time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if link.fileno() >= 0:
                poll = select.poll()
                poll.register(link, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
                poll.poll(left_s * 1000)

    def _close_in_child(self) -> None:
        """Close a forked child's copies of the links, whose bytes are the parent's."""
        for link in self._links:
            link.close()
        self._links.clear()
        self._free.clear()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _named(request: StoreRequest) -> str:
    """Return a request as a short text: what it is, and of which keys."""
    keys = (request.key,) if hasattr(request, "key") else getattr(request, "keys", ())
    shown = ", ".join(repr(key) for key in keys[:_KEYS_SHOWN]) + (", ..." if len(keys) > _KEYS_SHOWN else "")
    return f"{type(request).__name__} of {shown}" if keys else type(request).__name__
