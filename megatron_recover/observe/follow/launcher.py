"""Find out whether the launcher of a run still lives, from its process as `run.json` names it.

The launcher writes `run.json` at the start of a run. The system may reuse a process id after the
process has ended. So the file also holds the time at which the process was started.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from megatron_recover.host.addresses import host_name
from megatron_recover.host.process_stat import START_TIME, STATE, stat_of, state_of

RUN_FILE = "run.json"


class LauncherProcess(msgspec.Struct, frozen=True):
    """The process of a launcher."""

    host: str
    pid: int
    began: int
    """Start time in clock ticks after the start of the machine (proc(5), /proc/PID/stat)."""


class _Description(msgspec.Struct):
    launcher: LauncherProcess | None = None


def this_process() -> LauncherProcess:
    """Return the calling process."""
    return process_of(os.getpid())


def process_of(pid: int) -> LauncherProcess:
    """Return the process `pid` of this host."""
    found = _stat(pid)
    return LauncherProcess(host_name(), pid, found[1] if found is not None else 0)


def is_running(process: LauncherProcess) -> bool:
    """Return whether a process of this host runs; a stopped one counts too."""
    found = _stat(process.pid)
    return found is not None and found[1] == process.began and found[0] != "Z"


def about(run_dir: Path) -> str:
    """Return a sentence on the launcher of a run whose trace has had nothing new."""
    try:
        launcher = msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=_Description).launcher
    except (OSError, msgspec.MsgspecError):
        launcher = None
    if launcher is None or launcher.host != host_name():
        where = f"; look at process {launcher.pid} on {launcher.host}" if launcher is not None else ""
        return f"the run may hang, or its launcher was stopped or killed{where}"
    if not is_running(launcher):
        return f"its launcher (process {launcher.pid}) has ended: the run is over"
    if state_of(launcher.pid) == "T":
        return f"its launcher is stopped: kill -CONT {launcher.pid}"
    return f"its launcher (process {launcher.pid}) lives: the run waits for something, or its disk takes no trace"


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state and start time of a process; None if there is none."""
    fields = stat_of(pid)
    return (fields[STATE].decode(), int(fields[START_TIME])) if fields else None
