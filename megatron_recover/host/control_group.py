"""The control groups of a process (cgroups(7)), versions 1 and 2, and what they limit.

A group is found by /proc/PID/cgroup, never by a name such as that of a Slurm job. The kernel
generates all these files: reading them waits for no disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 2**60
"""Version 1 writes the largest multiple of a page for no limit; no machine has this much memory."""


class Groups(NamedTuple):
    """The folders of the groups that a process is in, each list with the nearest group first."""

    first: list[Path]
    """Groups of version 1 that the controller has; empty if there is none."""
    second: list[Path]
    """Groups of version 2; empty if the process is in none."""


class Limit(NamedTuple):
    """The smallest limit of the groups of a process."""

    amount: float
    """Bytes, or cores."""
    file: Path
    """File with the limit."""


def groups_of(pid: int | str, controller: str, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Groups:
    """Return the groups of a process, and all groups that contain them. Raises OSError.

    A container may show the path by which its host knows it, with its own group mounted at the top.
    A group inside the container with the name of one of the host's groups is another group. So a
    path is followed upwards only if all of it exists; otherwise only the top is returned.
    """
    lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    paths = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    first: list[Path] = []
    for controllers, path in paths.items():
        if controller in controllers.split(","):
            mounts = [mount for name in (controllers, controller) if (mount := cgroups / name).is_dir()]
            first = _upwards(mounts[0], path) if mounts else []
    hybrid = cgroups / "unified"  # version 2, where the controllers are with version 1
    mount = hybrid if (hybrid / "cgroup.controllers").is_file() else cgroups
    return Groups(first, _upwards(mount, paths[""]) if "" in paths else [])


def _upwards(mount: Path, path: str) -> list[Path]:
    if ".." in Path(path).parts or not (mount / path).is_dir():
        return [mount]
    return [mount / each for each in (Path(path), *Path(path).parents)] if path else [mount]


def memory_limit(groups: Groups) -> Limit | None:
    """Return the limit on the memory of a process in bytes; None if no group has one."""
    files = [each / "memory.limit_in_bytes" for each in groups.first] + [each / "memory.max" for each in groups.second]
    found = [(_number(file), file) for file in files]
    return min((Limit(number, file) for number, file in found if number is not None and number < _UNLIMITED), default=None)


def memory_left(groups: Groups) -> Limit | None:
    """Return the memory in bytes that a process may still use; None if no group has a limit.

    The kernel reclaims pages of files before it kills anything, so they count as free. They are in
    `memory.usage_in_bytes` and `memory.current`.
    """
    kinds = [
        (groups.first, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        (groups.second, "memory.max", "memory.current", ""),
    ]
    found = []
    for folders, limit, usage, prefix in kinds:
        for group in folders:
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and most < _UNLIMITED and used is not None:
                free = most - used + _pages_of_files(group / "memory.stat", prefix)
                found.append(Limit(min(most, max(0, free)), group / limit))
    return min(found, default=None)


def _pages_of_files(statistics: Path, prefix: str) -> int:
    """Return the bytes of a group's pages that are backed by files on a disk, and not by memory."""
    try:
        words = dict(line.split(maxsplit=1) for line in statistics.read_text().splitlines())
        return sum(int(words[f"{prefix}{part}_file"]) for part in ("active", "inactive"))
    except (OSError, ValueError, KeyError):
        return 0


def core_limit(groups: Groups) -> Limit | None:
    """Return how many cores' time a process may use (the quota); None if no group limits it."""
    found = []
    for group in groups.first:
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            found.append(Limit(quota / period, group / "cpu.cfs_quota_us"))
    for group in groups.second:
        quota, period = _number(group / "cpu.max"), _number(group / "cpu.max", 1)
        if quota is not None and period:
            found.append(Limit(quota / period, group / "cpu.max"))
    return min(found, default=None)


def _number(file: Path, position: int = 0) -> int | None:
    """Return a number of a file, counted from 0; None without the file, and for the word `max`."""
    try:
        return int(file.read_text().split()[position])
    except (OSError, ValueError, IndexError):
        return None
