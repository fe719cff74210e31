"""Names of files inside a run directory."""

from __future__ import annotations

LOGS = "logs"
"""Folder of a run directory that holds the logs of its ranks."""


def log_name(replica: int, rank: int) -> str:
    """Return the path of a rank's log inside its run directory."""
    return f"{LOGS}/replica-{replica}-rank-{rank}.log"
