"""Find out how a run has ended, from the last event of its trace, without reading the rest of it.

A batch script decides by this, and not by the status of any process: a process may have died
although the run went on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from megatron_recover import trace
from megatron_recover.observe import ending
from megatron_recover.trace import event_files

_LAST_BYTES = 2**20
"""Bytes at the end of the trace that are searched. The end of the run is the last event; only lines
of processes that were late may follow."""
_END = b'{"event":"run_finished"'


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run, and what a batch system is to do."""

    verdict: Literal[ending.Word, "unknown"]
    """`unknown`: the trace has no end. The run goes on, or it was killed, or it never began."""
    exit_code: int | None = None
    reason: str
    """Reason of the end; of an unknown one, what was found instead."""


def outcome(run_dir: Path) -> Outcome:
    """Return the outcome of the run with this folder. Raises `TraceError` if it cannot be read."""
    with event_files.reading(run_dir):
        if not run_dir.is_dir():
            return Outcome(verdict="unknown", reason=f"there is no folder {run_dir}: nothing was trained")
    if not event_files.exists(run_dir):
        return Outcome(verdict="unknown", reason=f"there is no trace in {run_dir}: nothing was trained")
    finished = _end(run_dir)
    if finished is None:
        return Outcome(verdict="unknown", reason="the trace has no end: the run still goes on, or was killed")
    return Outcome(verdict=ending.word(finished.exit_code), exit_code=finished.exit_code, reason=finished.reason)


def _end(run_dir: Path) -> trace.RunFinished | None:
    """Return the end of the run from the newest part of the trace that has a line."""
    newest = run_dir / trace.EVENTS_FILE
    last = max(event_files.numbers(run_dir), default=0)
    if (not newest.is_file() or not newest.stat().st_size) and last:
        opened = event_files.open_part(run_dir, last)
        assert opened is not None  # it was listed, and parts are never removed
        with opened[0] as file, event_files.reading(opened[1]):
            lines = file.read().splitlines(keepends=True)  # compressed, so it has no end to jump to
    else:
        with event_files.reading(newest), open(newest, "rb") as file:
            file.seek(max(0, newest.stat().st_size - _LAST_BYTES))
            lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        if line.startswith(_END):
            try:
                event, _ = trace.parse(line)
            except ValueError as error:
                raise trace.TraceError(f"{newest}: {error}") from error
            if isinstance(event, trace.RunFinished):
                return event
    return None
