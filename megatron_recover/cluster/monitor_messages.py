"""The messages between launcher and monitor, each one packet of JSON.

`cluster/monitoring.py` is the launcher's side, and `cluster/monitor.py` the monitor's.
"""

from __future__ import annotations

import msgspec

from megatron_recover.deadlines import Deadlines

MAX_PACKET_BYTES = 2**14
MAX_LINE = 2000
"""Characters of one line for the console."""


class MonitorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a monitor needs from its start."""

    run_dir: str
    started_at: float
    """`time.monotonic()` of the launcher at the start of the run: zero of the trace's clock."""
    has_metrics: bool
    """True if anybody wants metrics, on a port or in a file."""
    textfile: str | None
    on_event: tuple[str, ...]
    """Words of the command that gets notices; empty: there is none."""
    signals: tuple[int, ...]
    """Signals that the launcher handles."""
    deadlines: Deadlines


class RunEnds(msgspec.Struct, frozen=True, tag=True):
    """A message to the monitor: the run has ended, and its trace is as whole as it will be."""

    exit_code: int
    reason: str


class MonitorSays(msgspec.Struct, frozen=True, tag=True):
    """A message from the monitor: one line for the console."""

    text: str
