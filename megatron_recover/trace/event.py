"""What every event is, and every object inside one."""

from __future__ import annotations

import re
from typing import Literal

import msgspec


def snake_case(class_name: str) -> str:
    """Return what the events of a class are called in a log."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=snake_case, forbid_unknown_fields=True):
    """What every event carries."""

    v: Literal[2] = 2
    """Version of the format. Any other is refused: a field of the same name may mean something else there."""
    t: float = 0.0
    """Seconds since the start of the run (CLOCK_MONOTONIC of the launcher's host); set by `EventLog.record`."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objects inside events."""
