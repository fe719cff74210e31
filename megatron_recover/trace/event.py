"""The base classes of all events, and of the objects inside events."""

from __future__ import annotations

import re
from typing import Literal

import msgspec


def snake_case(class_name: str) -> str:
    """Return the name of a class's events in a log."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=snake_case, forbid_unknown_fields=True):
    """Base of all events, with the fields that every event has."""

    v: Literal[2] = 2
    """Version of the format. Readers refuse any other version, where a field of the same name may
    have another meaning."""
    t: float = 0.0
    """Seconds since the start of the run (CLOCK_MONOTONIC of the launcher's host). Set by
    `EventLog.record`, or by the recorder from the stamp in the ring."""
    h: int | msgspec.UnsetType = msgspec.UNSET
    """Stamp of the node's clock (`core/hybrid_clock.py`), less `NodeStarted.clock` of the file. Set
    by the recorder in a run of several nodes, for the merge of their traces."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objects inside events."""
