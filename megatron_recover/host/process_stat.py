"""The state of a process by /proc/PID/stat (proc(5)), and words for how a process ended."""

from __future__ import annotations

import signal
from pathlib import Path

STATE, START_TIME = 3, 22
"""Numbers of the fields as proc(5) counts them: a state letter, and clock ticks from boot to the
start of the process."""
STATES = {
    "R": "running", "S": "asleep", "D": "in an uninterruptible wait", "T": "stopped", "t": "stopped by a debugger",
    "Z": "dead", "X": "dead",
}  # fmt: skip
"""Words for state letters."""


def fields_of(text: bytes) -> list[bytes]:
    """Return the fields of a stat file at their numbers; an empty list for an empty text.

    The fields of the process id and of the command are left empty.
    """
    # The second field, the command in parentheses, may contain anything.
    return [b"", b"", b"", *text[text.rindex(b")") + 2 :].split()] if text else []


def state_of(pid: int) -> str:
    """Return the state letter of a process, or an empty string if it cannot be read."""
    fields = stat_of(pid)
    return fields[STATE].decode() if fields else ""


def with_letter(state: str) -> str:
    """Return the words for a state letter, with the letter."""
    return f"{STATES.get(state, 'not to be seen in /proc here')} (state {state or 'unknown'})"


def stat_of(pid: int) -> list[bytes]:
    """Return the fields of a process at their numbers; none if they cannot be read."""
    try:
        return fields_of(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return []


def signal_name(number: int) -> str:
    """Return a signal's name, such as `SIGKILL`, or `signal 40` where Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_of(status: int) -> str:
    """Return in words what ended a process: `exit code 1`, `SIGKILL`.

    `status` is the exit code, or minus the number of the signal.
    """
    return signal_name(-status) if status < 0 else f"exit code {status}"
