"""Whether the kernel has killed a process of a rank's control group for want of memory.

A SIGKILL says nothing of its sender. What tells the kernel's out-of-memory killer from an operator is the counter `oom_kill` of
the process's memory control group, which rises with each of its kills, whichever limit was hit (cgroups(7): `memory.events` of
version 2, `memory.oom_control` of version 1). Without such a file nothing is ever put down to a want of memory. The kernel
makes these files up: reading them waits for no disk.
"""

from __future__ import annotations

from pathlib import Path

_RECENT_S = 5.0
"""A rise counts for a death that is seen at most so long after it: dying takes time, other deaths come later."""
_LOOK_S = 1.0


class OomKills:
    """Follows the counters of all ranks' control groups. Used by one thread."""

    def __init__(self, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._files: dict[int, Path] = {}
        self._known: dict[Path, list[tuple[float, int]]] = {}
        """(time, count) of each file, the oldest first; the first is the newest that is older than `_RECENT_S`."""

    def watch(self, pid: int, now_s: float) -> None:
        """Follow the control group of a process that has started."""
        file = self._file(pid)
        if file is not None and (count := _count(file)) is not None:
            self._files[pid] = file
            self._known.setdefault(file, [(now_s, count)])

    def look(self, now_s: float) -> None:
        """Note the counts. Call it often: it reads at most once in `_LOOK_S`."""
        for file, known in self._known.items():
            if now_s - known[-1][0] >= _LOOK_S and (count := _count(file)) is not None:
                known.append((now_s, count))
                while len(known) > 1 and now_s - known[1][0] >= _RECENT_S:
                    known.pop(0)

    def rose(self, pid: int) -> bool:
        """Return whether a process of this one's control group was killed for want of memory lately; each kill counts once."""
        file = self._files.get(pid)
        count = _count(file) if file is not None else None
        if file is None or count is None:
            return False
        known = self._known[file]
        if count <= known[0][1]:
            return False
        self._known[file] = [(at, before + 1) for at, before in known]
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
            places += [self._cgroups / each / "memory.events" for each in (paths[""], "")]
        # A container may show the path that its host knows it by, with its own group mounted at the top.
        return next((place for place in places if _count(place) is not None), None)


def _count(file: Path) -> int | None:
    """Return the counter of a file, or None if there is none."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
