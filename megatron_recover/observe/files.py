"""Names of files inside a run directory."""

from __future__ import annotations

LOGS = "logs"
"""Folder of a run directory that holds the logs of its ranks."""


def log_name(replica: int, rank: int) -> str:
    """Return the path of a rank's log inside its run directory.

    It has what the rank wrote to stderr, and to stdout if that has no log by itself.
    """
    return f"{LOGS}/replica-{replica}-rank-{rank}.log"


def stdout_log_name(replica: int, rank: int) -> str:
    """Return the path of the log of a rank's stdout, where stdout has one by itself."""
    return f"{LOGS}/replica-{replica}-rank-{rank}.stdout.log"


def filtered_log_name(stream: str) -> str:
    """Return the path of the log with the selected lines of all teed ranks.

    `stream`: stdout or stderr.
    """
    return f"{LOGS}/filtered_{stream}.log"
