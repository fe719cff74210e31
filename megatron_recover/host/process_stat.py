"""Says in what state a process of this machine is, by /proc/PID/stat (proc(5)), and in words how one has ended."""

from __future__ import annotations

import signal
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


def signal_name(number: int) -> str:
    """Return a signal's name, such as `SIGKILL`, or `signal 40` for a real-time signal: Python names two of these alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_of(status: int) -> str:
    """Return in words what ended a process, for its exit code or minus the signal: `exit code 1`, `SIGKILL`."""
    return signal_name(-status) if status < 0 else f"exit code {status}"
