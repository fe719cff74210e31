"""Words of transcripts: the text of messages, facts and states of the protocol.

Names of classes and fields are those of the values, so a transcript follows when they change. What
is empty or at its default is left out.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any

import msgspec

from megatron_recover.core.values import ReplicaId, Work

HIDDEN = {"checksum", "checksums", "counts", "detail", "fingerprint", "journal", "outline", "paces", "parts", "state_digest"}
"""Fields that are not printed: they stand for data, or repeat another field."""


class Printer:
    """Text of values of the protocol. It follows the names of classes and fields by itself."""

    def __init__(self) -> None:
        self._digests: dict[bytes, int] = {}
        """Numbers of the digests in the order in which they were printed."""

    def tell(self, value: Any, *, of: ReplicaId | None = None) -> str:
        """Return the text of a value. Leave out `replica` where it is `of`, who says or does it."""
        if isinstance(value, msgspec.Struct):
            leave_out = {"replica"} if getattr(value, "replica", None) == of is not None else set()
            return f"{type(value).__name__} {self.list_fields(value, leave_out=leave_out)}".rstrip()
        if isinstance(value, enum.Enum):
            return self.tell(value.value)
        if isinstance(value, bytes):
            return f"#{self._digests.setdefault(value, len(self._digests) + 1)}"
        if isinstance(value, tuple):
            return ",".join(self._tell_item(item) for item in value)
        return repr(value) if isinstance(value, str) and " " in value else str(value)

    def list_fields(self, value: msgspec.Struct, *, only: Collection[str] = (), leave_out: Collection[str] = ()) -> str:
        """Return `name=text` of each field that is neither empty nor at its default."""
        texts = []
        for field in msgspec.structs.fields(value):
            item = getattr(value, field.name)
            is_shown = field.name in only if only else field.name not in {*HIDDEN, *leave_out}
            if is_shown and not _is_empty(item) and (item != field.default or field.name in ("generation", "step")):
                texts.append(field.name if item is True else f"{field.name}={self._tell_field(item)}")
        return " ".join(texts)

    def _tell_field(self, item: Any) -> str:
        return self._tell_item(item) if isinstance(item, msgspec.Struct) else self.tell(item)

    def _tell_item(self, item: Any) -> str:
        if isinstance(item, Work):
            return self.tell(item.label)
        if isinstance(item, msgspec.Struct):
            return f"({self.list_fields(item)})"
        return f"({self.tell(item)})" if isinstance(item, tuple) else self.tell(item)


def _is_empty(item: Any) -> bool:
    return item is None or item is False or item == "" or (isinstance(item, tuple) and all(_is_empty(one) for one in item))
