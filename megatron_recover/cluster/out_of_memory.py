"""Whether the kernel has killed a process of a rank's control group for want of memory.

A SIGKILL says nothing of its sender. What tells the kernel's out-of-memory killer from an operator is the counter `oom_kill` of
the process's memory control group, which rises with each of its kills, whichever limit was hit (cgroups(7): `memory.events` of
version 2, `memory.oom_control` of version 1). In version 2 a group has that file only where its parent enables the memory
controller. The nearest group above that has the file counts the kills of all groups below it, so it is read instead. In version
1 each group counts for itself. Without such a file nothing is ever put down to a want of memory. The kernel
makes these files up: reading them waits for no disk.
"""

from __future__ import annotations

from pathlib import Path

from megatron_recover.deadlines import OOM_S

_LOOK_S = 0.1


class _Counter:
    """What is known of one file."""

    def __init__(self, now_s: float, count: int) -> None:
        self.looked_s, self.count = now_s, count
        self.kills: list[float] = []
        """When each kill was seen that has explained no death yet, the oldest first."""

    def update(self, now_s: float, count: int) -> None:
        """Note the count of one look, and forget kills that are too old to explain a death."""
        self.kills += [now_s] * (count - self.count)
        self.kills = [at for at in self.kills if now_s - at < OOM_S]
        self.looked_s, self.count = now_s, count


class OomKills:
    """Follows the counters of all ranks' control groups. Used by one thread.

    The kernel does not say whom it killed, and the ranks of a node mostly share one group. So a kill is laid on the rank whose
    death is seen within `OOM_S` after the kill was seen, and on one rank only. What remains: another process of the group
    (a data loader's worker) that is killed for want of memory less than that before an operator kills a rank with SIGKILL
    makes the operator's kill look like the kernel's. A rank that the kernel has killed and that takes longer to end is not
    charged.
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
        """Note the counts. Call it often: it reads at most once in `_LOOK_S`."""
        for file, counter in self._counters.items():
            if now_s - counter.looked_s >= _LOOK_S and (count := _count(file)) is not None:
                counter.update(now_s, count)

    def rose(self, pid: int, now_s: float) -> bool:
        """Return whether a kill for want of memory explains the death of a process that is seen now; each does once."""
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
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        paths = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
        places = []
        for controllers, path in paths.items():
            if "memory" in controllers.split(","):
                places += [self._cgroups / "memory" / each / "memory.oom_control" for each in (path, "")]
        if "" in paths:
            places += [group / "memory.events" for group in self._groups(Path(paths[""]))]
        return next((place for place in places if _count(place) is not None), None)

    def _groups(self, path: Path) -> list[Path]:
        """Return a process's group of version 2 and the groups that contain it, the nearest first.

        A container may show the path that its host knows it by, with its own group mounted at the top. A group inside that has
        the name of one of the host's is another group. So only a path that is there whole is followed upwards.
        """
        if ".." in path.parts or not (self._cgroups / path).is_dir():
            return [self._cgroups]
        return [self._cgroups / each for each in (path, *path.parents)]


def _count(file: Path) -> int | None:
    """Return the counter of a file, or None if there is none."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
