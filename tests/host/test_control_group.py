"""What control groups leave of the memory, in files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover.host.control_group import groups_of, memory_left

MIB = 2**20
UNLIMITED = {1: str(2**63 - 4096), 2: "max"}
FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}


class Machine:
    """A fake of /proc and /sys/fs/cgroup, with process 17 in the group `job/step`."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.cgroups, self.version = folder / "proc", folder / "cgroup", version
        self.top = self.cgroups / "memory" if version == 1 else self.cgroups
        (self.top / "job" / "step").mkdir(parents=True)
        (self.proc / "17").mkdir(parents=True)
        (self.proc / "17" / "cgroup").write_text("4:memory:/job/step\n" if version == 1 else "0::/job/step\n")

    def group(self, name: str, most: str, used_mib: int, of_files_mib: int = 0) -> None:
        """Write the files of a group."""
        limit, usage, prefix = FILES[self.version]
        (self.top / name / limit).write_text(most + "\n")
        (self.top / name / usage).write_text(f"{used_mib * MIB}\n")
        half = of_files_mib * MIB // 2
        lines = (f"active_file {half}", f"inactive_file {half}", f"{prefix}active_file {half}", f"{prefix}inactive_file {half}")
        (self.top / name / "memory.stat").write_text("\n".join(("anon 1", *lines)) + "\n")

    def left(self) -> tuple[int, str] | None:
        """What the process may still use, in MiB, and the group that says so."""
        found = memory_left(groups_of(17, "memory", proc=self.proc, cgroups=self.cgroups))
        return None if found is None else (int(found.amount) // MIB, found.file.parent.name)


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_that_leaves_least_counts(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version)
    assert machine.left() is None, "no files"
    machine.group("job/step", UNLIMITED[version], 900)
    machine.group("job", UNLIMITED[version], 900)
    assert machine.left() is None, "no limit"
    machine.group("job", str(1000 * MIB), 900)
    assert machine.left() == (100, "job"), "a group above limits, too"
    machine.group("job/step", str(500 * MIB), 450)
    assert machine.left() == (50, "step")
    machine.group("job/step", str(500 * MIB), 600)
    assert machine.left() == (0, "step"), "the limit was lowered"


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_are_given_back_before_a_process_is_killed(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version)
    machine.group("job", str(1000 * MIB), 990, of_files_mib=600)
    assert machine.left() == (610, "job")
    (machine.top / "job" / "memory.stat").unlink()
    assert machine.left() == (10, "job")
