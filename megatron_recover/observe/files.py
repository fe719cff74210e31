"""Where the files of a run are."""

from __future__ import annotations

LOGS = "logs"
"""The folder of a run directory that has the logs of its ranks."""


def log_name(replica: int, rank: int) -> str:
    """Return the path of a rank's log inside its run directory."""
    return f"{LOGS}/replica-{replica}-rank-{rank}.log"
