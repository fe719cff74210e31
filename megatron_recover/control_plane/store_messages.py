"""The requests to the store of a replica that spans nodes, and its answers.

A rank sends one request at a time on a link, and the store answers each with one message.
"""

from __future__ import annotations

from megatron_recover.core.values import Value


class StoreSet(Value, frozen=True):
    """Store each value under the key at the same position."""

    keys: tuple[str, ...]
    values: tuple[bytes, ...]


class StoreAppend(Value, frozen=True):
    """Append `value` to the value of `key`, which is empty if the key does not exist."""

    key: str
    value: bytes


class StoreAdd(Value, frozen=True):
    """Add `amount` to the decimal number under `key`, which is 0 if the key does not exist.

    The answer has the sum.
    """

    key: str
    amount: int


class StoreCompareSet(Value, frozen=True):
    """Replace the value of `key` by `desired` if it is `expected`.

    If the key does not exist, store `desired` if `expected` is empty. The answer has the value
    after that, or `expected` if there is none.
    """

    key: str
    expected: bytes
    desired: bytes


class StoreDelete(Value, frozen=True):
    """Delete `key`; the answer has 1 if the key existed, otherwise 0."""

    key: str


class StoreCount(Value, frozen=True):
    """Count the keys."""


class StoreCheck(Value, frozen=True):
    """Answer 1 if all keys exist now, otherwise 0."""

    keys: tuple[str, ...]


class StoreWait(Value, frozen=True):
    """Answer once all keys exist."""

    keys: tuple[str, ...]


class StoreGet(Value, frozen=True):
    """Answer once all keys exist, with the values of the first keys: as many as a message holds."""

    keys: tuple[str, ...]


class StoreAnswer(Value, frozen=True):
    """The store has carried a request out."""

    number: int = 0
    values: tuple[bytes, ...] = ()


class StoreRefusal(Value, frozen=True):
    """The store has not carried a request out, and has changed nothing."""

    reason: str


StoreRequest = (
    StoreSet | StoreAppend | StoreAdd | StoreCompareSet | StoreDelete | StoreCount | StoreCheck | StoreWait | StoreGet
)  # fmt: skip
