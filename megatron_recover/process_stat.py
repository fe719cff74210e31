"""Reads /proc/PID/stat, which says of any process of this machine whether it runs, is stopped or is dead (proc(5))."""

from __future__ import annotations

from pathlib import Path

STATE, START_TIME = 3, 22
"""Numbers of fields, as proc(5) counts them: a letter, and clock ticks since the machine was started."""


def fields_of(text: bytes) -> list[bytes]:
    """Return the fields of such a file at their numbers, the command left empty; none for an empty text."""
    # The second field, the command in parentheses, may contain anything.
    return [b"", b"", b"", *text[text.rindex(b")") + 2 :].split()] if text else []


def state_of(pid: int) -> str:
    """Return the state letter of a process, or an empty string where there is none, or where it cannot be read."""
    fields = stat_of(pid)
    return fields[STATE].decode() if fields else ""


def stat_of(pid: int) -> list[bytes]:
    """Return the fields of a process at their numbers; none where there is no such process, or where it cannot be read."""
    try:
        return fields_of(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return []
