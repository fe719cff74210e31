"""Kills by the kernel's out-of-memory killer in the control groups of ranks.

A SIGKILL carries no sender. The counter `oom_kill` of the process's memory control group
distinguishes the out-of-memory killer from an operator. It rises with each kill by that killer,
whichever limit was hit (cgroups(7): `memory.events` of version 2, `memory.oom_control` of version
1).

In version 2 a group has that file only if its parent enables the memory controller. The nearest
group above that has the file counts the kills of all groups below it, so that file is read instead.
In version 1 each group counts for itself. Without such a file no death is ever charged to a lack of
memory. The kernel generates these files: reading them waits for no disk.
"""

from __future__ import annotations

from pathlib import Path

from megatron_recover.deadlines import OOM_S
from megatron_recover.host.control_group import groups_of

_LOOK_S = 0.1


class _Counter:
    """The counter of one file."""

    def __init__(self, now_s: float, count: int) -> None:
        self.looked_s, self.count = now_s, count
        self.kills: list[float] = []
        """Times at which kills were seen that explain no death yet, in seconds, oldest first."""

    def update(self, now_s: float, count: int) -> None:
        """Record the count of one look, and forget kills that are too old to explain a death."""
        self.kills += [now_s] * (count - self.count)
        self.kills = [at for at in self.kills if now_s - at < OOM_S]
        self.looked_s, self.count = now_s, count


class OomKills:
    """The counters of all ranks' control groups. One thread uses this.

    The kernel does not report which process it killed, and the ranks of a node mostly share one
    group. So a kill is charged to one rank only: the one whose death is seen within `OOM_S` after
    the kill was seen. Two errors remain:

    - The kernel kills another process of the group, such as a data loader's worker. Less than
      `OOM_S` later an operator kills a rank with SIGKILL. Then the operator's kill looks like the
      kernel's.
    - The kernel kills a rank that takes longer than `OOM_S` to end. Then its death is not charged
      to a lack of memory.
    """

    def __init__(self, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._files: dict[int, Path] = {}
        self._counters: dict[Path, _Counter] = {}

    def watch(self, pid: int, now_s: float) -> None:
        """Follow the control group of a process that has started."""
        file = self._file(pid)
        if file is not None and (count := _count(file)) is not None:
            self._files[pid] = file
            self._counters.setdefault(file, _Counter(now_s, count))

    def look(self, now_s: float) -> None:
        """Read the counts. Call this often: it reads each file at most once in `_LOOK_S`."""
        for file, counter in self._counters.items():
            if now_s - counter.looked_s >= _LOOK_S and (count := _count(file)) is not None:
                counter.update(now_s, count)

    def rose(self, pid: int, now_s: float) -> bool:
        """Return whether an out-of-memory kill explains a process's death that is seen now.

        Each kill explains one death.
        """
        file = self._files.get(pid)
        count = _count(file) if file is not None else None
        if file is None or count is None:
            return False
        counter = self._counters[file]
        counter.update(now_s, count)
        if not counter.kills:
            return False
        counter.kills.pop(0)
        return True

    def _file(self, pid: int) -> Path | None:
        try:
            groups = groups_of(pid, "memory", proc=self._proc, cgroups=self._cgroups)
        except OSError:
            return None
        # In version 1 a group counts for itself, and the one at the top of a container is its own.
        places = [each / "memory.oom_control" for each in (*groups.first[:1], *groups.first[-1:])]
        places += [each / "memory.events" for each in groups.second]
        return next((place for place in places if _count(place) is not None), None)


def _count(file: Path) -> int | None:
    """Return the counter of a file, or None if there is none."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
