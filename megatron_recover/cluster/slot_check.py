"""The check of slots before a newcomer is started in them: disk, memory, device, old processes.

A check runs in a thread of its own, since a disk or a driver may hang. It is a function that
returns what is wrong, or nothing; the launcher takes any such function.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from megatron_recover.config import visible_gpus
from megatron_recover.core.wording import counted
from megatron_recover.host import gpus
from megatron_recover.host.control_group import groups_of, memory_left
from megatron_recover.host.process_stat import START_TIME, STATE, stat_of

_LEAST_DISK_BYTES = 64 * 2**20
_LEAST_MEMORY_BYTES = 256 * 2**20
"""Bytes for each rank, below which no rank could even import."""
_MOST_USED = 0.1
"""Part of a device's memory that may be in use before its only rank starts."""
_GROUP = 5
"""Number of the field with the process group in /proc/PID/stat (proc(5))."""
_LOOK_S = 0.02
"""Seconds between two looks at what has to end."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The slots to check, and what they need."""

    run_dir: Path
    num_ranks: int
    gpus: tuple[int, ...]
    """Numbers of the GPUs that the ranks have alone; empty: they have none, or share theirs."""
    former_groups: tuple[tuple[int, float], ...]
    """(group, end) of the ranks that sat there before: the process group, and the seconds since
    boot at which its leader had ended."""
    until_s: float
    """Time of `time.monotonic` until which an old process may end, and a driver answer."""


Check = Callable[[Wanted], str]
"""Returns why the slots cannot be used; empty: they can."""


def check(wanted: Wanted) -> str:
    """Check the slots as well as this machine lets us see."""
    for find in (_disk, _memory, _former_processes, _devices):
        if why := find(wanted):
            return why
    return ""


def _disk(wanted: Wanted) -> str:
    try:
        usage = os.statvfs(wanted.run_dir)
        with tempfile.TemporaryFile(dir=wanted.run_dir) as file:  # a full disk keeps no file of a check
            file.write(b"1")
    except OSError as error:
        return f"the run directory {wanted.run_dir} takes no file ({error.strerror})"
    free = usage.f_bavail * usage.f_frsize
    return f"{wanted.run_dir} has {free >> 20} MiB of room left" if free < _LEAST_DISK_BYTES else ""


def _memory(wanted: Wanted) -> str:
    """Compare what the host and the control groups of this process, and so of ranks, have left."""
    needed, ranks = _LEAST_MEMORY_BYTES * wanted.num_ranks, counted(wanted.num_ranks, "rank")
    with contextlib.suppress(OSError):
        left = memory_left(groups_of("self", "memory"))
        if left is not None and left.amount < needed:
            return f"{left.file} leaves {int(left.amount) >> 20} MiB of memory for {ranks}"
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return ""
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    if available is None or available >= needed:
        return ""
    return f"the host has {available >> 20} MiB of memory available for {ranks}"


def _former_processes(wanted: Wanted) -> str:
    """Wait for the end of what former ranks have started, which was killed with them."""
    while left := list(_members(dict(wanted.former_groups))):
        if time.monotonic() >= wanted.until_s:
            return f"process {left[0]}, which a former rank started, does not end"
        time.sleep(_LOOK_S)
    return ""


def _members(groups: Mapping[int, float]) -> Iterator[int]:
    """Yield the processes of groups that have not ended.

    A process that was started after the end of the group's leader is of another group, which has
    the same number.
    """
    if not groups:
        return
    ticks = os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        fields = stat_of(int(name)) if name.isdecimal() else []
        if not fields or fields[STATE] in (b"Z", b"X"):
            continue
        if (ended_s := groups.get(int(fields[_GROUP]))) is not None and int(fields[START_TIME]) / ticks <= ended_s:
            yield int(name)


def _devices(wanted: Wanted) -> str:
    """Wait for the memory of devices that former ranks have used to be free."""
    if not wanted.gpus:
        return ""
    in_use = ""
    while True:
        if (query := gpus.start_query()) is None:
            return ""  # no tool that could ask
        try:
            found = gpus.visible(gpus.answered(query, wanted.until_s - time.monotonic()), visible_gpus())
        except OSError as error:
            return in_use or str(error)  # the last question may have had no time for an answer
        missing = [number for number in wanted.gpus if number >= len(found)]
        if missing:
            return f"the driver does not show GPU {missing[0]}"
        used = [found[number] for number in wanted.gpus if found[number].used_mib > _MOST_USED * found[number].total_mib]
        if not used:
            return ""
        in_use = f"GPU {used[0].number} has {used[0].used_mib} of {used[0].total_mib} MiB in use"
        if time.monotonic() >= wanted.until_s:
            return in_use
        time.sleep(_LOOK_S)
