"""The keys and values of a replica's store, and the requests that wait for keys.

This module knows no socket, thread or clock. The server (`control_plane/store_server.py`) gives it
requests and sends its answers. A rank that waits counts the time itself
(`control_plane/served_store.py`).
"""

from __future__ import annotations

from collections.abc import Hashable

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

MAX_VALUE_BYTES = 8 * 2**20
"""Longest value of a key. A gloo group of 1000 ranks has values of 200 KB."""
MAX_TABLE_BYTES = 512 * 2**20
"""All keys and values together, with `_ENTRY_BYTES` for each key. The groups of a replica of 64
ranks take less than 10 MiB."""
MAX_ANSWER_BYTES = 32 * 2**20
"""Values in one answer, at most; a first value is always there."""
_ENTRY_BYTES = 128
_INT64 = range(-(2**63), 2**63)


class _Refused(Exception):
    """The request cannot be carried out; its text is the reason."""


class StoreTable[Asker: Hashable]:
    """A table that answers requests of askers, each of which has one request at a time."""

    def __init__(self, max_bytes: int = MAX_TABLE_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._values: dict[str, bytes] = {}
        self._waiting: dict[Asker, tuple[StoreWait | StoreGet, str]] = {}
        """The request of each asker that waits, and the first of its keys that does not exist."""
        self._waiting_for: dict[str, dict[Asker, None]] = {}
        """The same askers by that key, in the order in which they came to it."""

    def ask(self, asker: Asker, request: StoreRequest) -> list[tuple[Asker, StoreAnswer | StoreRefusal]]:
        """Carry a request out; return all answers that are due now, with whom each is for.

        A request that waits is answered by the call that brings its last key. Raises ValueError if
        the asker has such a request already.
        """
        if asker in self._waiting:
            raise ValueError(f"a {type(request).__name__} came before the request ahead of it was answered")
        if isinstance(request, StoreWait | StoreGet):
            return self._answer_or_wait(asker, request)
        try:
            answer, written = self._carry_out(request)
        except _Refused as refused:
            return [(asker, StoreRefusal(str(refused)))]
        answers: list[tuple[Asker, StoreAnswer | StoreRefusal]] = [(asker, answer)]
        for key in written:
            for waiting in self._waiting_for.pop(key, ()):
                answers += self._answer_or_wait(waiting, self._waiting.pop(waiting)[0])
        return answers

    def forget(self, asker: Asker) -> None:
        """Forget the request of an asker that is gone, if it waits."""
        if asker not in self._waiting:
            return
        _, key = self._waiting.pop(asker)
        del self._waiting_for[key][asker]
        if not self._waiting_for[key]:
            del self._waiting_for[key]

    def _answer_or_wait(self, asker: Asker, request: StoreWait | StoreGet) -> list[tuple[Asker, StoreAnswer | StoreRefusal]]:
        """Answer if all keys exist; otherwise wait for the first that does not."""
        missing = next((key for key in request.keys if key not in self._values), None)
        if missing is None:
            return [(asker, StoreAnswer(values=self._first_values(request.keys) if isinstance(request, StoreGet) else ()))]
        self._waiting[asker] = request, missing
        self._waiting_for.setdefault(missing, {})[asker] = None
        return []

    def _first_values(self, keys: tuple[str, ...]) -> tuple[bytes, ...]:
        values: list[bytes] = []
        left = MAX_ANSWER_BYTES
        for key in keys:
            left -= len(self._values[key])
            if values and left < 0:
                break
            values.append(self._values[key])
        return tuple(values)

    def _carry_out(self, request: StoreRequest) -> tuple[StoreAnswer, tuple[str, ...]]:
        """Carry out a request that does not wait; return its answer and the keys that it wrote."""
        match request:
            case StoreSet(keys, values):
                self._write(dict(zip(keys, values, strict=True)))
                return StoreAnswer(), keys
            case StoreAppend(key, value):
                self._write({key: self._values.get(key, b"") + value})
                return StoreAnswer(), (key,)
            case StoreAdd(key, amount):
                total = self._number(key) + amount
                if total not in _INT64:
                    raise _Refused(f"the number under {key!r} would have more than 64 bits")
                self._write({key: str(total).encode()})
                return StoreAnswer(total), (key,)
            case StoreCompareSet(key, expected, desired):
                if self._values.get(key, b"") != expected:
                    return StoreAnswer(values=(self._values.get(key, expected),)), ()
                self._write({key: desired})
                return StoreAnswer(values=(desired,)), (key,)
            case StoreDelete(key):
                if key not in self._values:
                    return StoreAnswer(0), ()
                self._num_bytes -= _size(key, self._values.pop(key))
                return StoreAnswer(1), ()
            case StoreCheck(keys):
                return StoreAnswer(int(all(key in self._values for key in keys))), ()
            case StoreCount():
                return StoreAnswer(len(self._values)), ()
        raise AssertionError(f"a {type(request).__name__} waits")

    def _number(self, key: str) -> int:
        try:
            return int(self._values.get(key, b"0"))
        except ValueError:
            raise _Refused(f"the value under {key!r} is no number") from None

    def _write(self, fresh: dict[str, bytes]) -> None:
        """Store values, or refuse all of them."""
        for key, value in fresh.items():
            if len(value) > MAX_VALUE_BYTES:
                raise _Refused(f"the value under {key!r} would have {len(value)} bytes; at most {MAX_VALUE_BYTES} are stored")
        before = sum(_size(key, self._values[key]) for key in fresh if key in self._values)
        num_bytes = self._num_bytes - before + sum(_size(key, value) for key, value in fresh.items())
        if num_bytes > self._max_bytes:
            raise _Refused(f"the store is full: {len(self._values)} keys of {self._num_bytes} bytes are in it")
        self._values |= fresh
        self._num_bytes = num_bytes


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES
