"""Which deaths are charged to the microbatch that was computed (INV-9): those that the computation caused, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.cluster.agent import End
from megatron_recover.cluster.out_of_memory import OomKills
from megatron_recover.cluster.watch import explaining_first
from megatron_recover.core.values import ExitCode, LossKind
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.cluster.jobs import ROOT, Spec, run

pytestmark = pytest.mark.timeout(90)


def strikes(kind: FaultKind) -> tuple[Fault, ...]:
    """Microbatch 0 of step 1 ends whoever computes it: replica 0 has it first, then one of the others."""
    points = (FaultPoint.RECOMPUTE, FaultPoint.FORWARD)  # whoever has it next may not have begun the step yet
    again = tuple(
        Fault(replica=replica, rank=0, point=point, step=1, microbatch=0, kind=kind) for replica in (1, 2) for point in points
    )
    return (Fault(replica=0, rank=0, point=FaultPoint.FORWARD, step=1, microbatch=0, kind=kind), *again)


@pytest.mark.parametrize("kind", [FaultKind.BUS, FaultKind.ABORT])
def test_a_microbatch_that_ends_two_replicas_by_a_signal_of_its_own_stops_the_job(tmp_path: Path, kind: FaultKind) -> None:
    outcome = run(Spec(run_dir=str(tmp_path / "run"), faults=strikes(kind)))
    assert outcome.exit_code == ExitCode.POISONED_MICROBATCH, outcome.output
    assert "computing microbatch 0 of train 2 ended replicas 0 and" in outcome.output
    assert len(outcome.of(trace.Fault)) == 2, "it was dealt a third time"
    assert {lost.kind for event in outcome.of(trace.Generation) for lost in event.losses} == {LossKind.CRASHED}
    outcome.assert_exactly_once()


def test_a_file_that_is_cut_under_its_memory_map_stops_the_job_and_the_microbatch_is_named(tmp_path: Path) -> None:
    outcome = run(Spec(run_dir=str(tmp_path / "run"), script=str(ROOT / "tests" / "cluster" / "mapped_toy.py")))
    assert outcome.exit_code == ExitCode.POISONED_MICROBATCH, outcome.output
    assert "computing microbatch 0 of train 2" in outcome.output and "SIGBUS" in outcome.output
    assert len(outcome.of(trace.Failure)) == 2


def test_a_microbatch_in_which_two_replicas_are_killed_does_not_stop_the_job(tmp_path: Path) -> None:
    faults = tuple(fault for fault in strikes(FaultKind.KILL) if fault.replica != 2)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=4, faults=faults))
    assert outcome.exit_code == ExitCode.OK, outcome.output
    outcome.assert_finished(outcome.roster)
    assert 0 not in outcome.roster


def ends(*statuses: int) -> list[End]:
    return [End(3, rank, status) for rank, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("statuses", "first"),
    [
        ((1, -signal.SIGBUS), 1),  # the other one found its link broken
        ((-signal.SIGABRT, 1), 1),  # NCCL's watchdog aborts those that are left
        ((-signal.SIGABRT, -signal.SIGSEGV), 1),
        ((-signal.SIGSEGV, -signal.SIGKILL), 1),  # whoever kills one from outside may have killed more
        ((1, 14), 0),
    ],
)
def test_of_ends_seen_together_the_one_that_explains_the_others_comes_first(statuses: tuple[int, ...], first: int) -> None:
    others = [End(4, 0, -signal.SIGKILL)]
    ordered = [end for end in explaining_first([*ends(*statuses), *others]) if end.replica == 3]
    assert ordered[0].rank == first and len(ordered) == len(statuses)


class Files:
    """A fake of /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        path = "/job/step 1"
        group = self.cgroups / "job" / "step 1" if version == 2 else self.cgroups / "memory" / "job" / "step 1"
        lines = [f"0::{path}"] if version == 2 else ["9:cpu,cpuacct:/", f"4:memory:{path}", "0::/"]
        self.counter = group / ("memory.events" if version == 2 else "memory.oom_control")
        group.mkdir(parents=True)
        (self.proc / "17").mkdir(parents=True)
        (self.proc / "17" / "cgroup").write_text("\n".join(lines) + "\n")

    def count(self, number: int) -> None:
        self.counter.write_text(f"low 0\noom 9\noom_kill {number}\noom_group_kill 0\n")


@pytest.mark.parametrize("version", [1, 2])
def test_only_a_fresh_rise_of_the_kernels_counter_is_a_want_of_memory(tmp_path: Path, version: int) -> None:
    files = Files(tmp_path, version)
    files.count(3)
    kills = OomKills(proc=files.proc, cgroups=files.cgroups)
    kills.watch(17, 0.0)
    assert not kills.rose(17), "what was killed before the rank started is none of its business"
    files.count(4)
    assert kills.rose(17)
    assert not kills.rose(17), "one kill explains one death"
    files.count(5)  # of a process that was no rank
    for now in range(1, 20):
        kills.look(float(now))
    assert not kills.rose(17), "a kill long ago explains no death now"


def test_without_a_counter_nothing_is_a_want_of_memory(tmp_path: Path) -> None:
    kills = OomKills(proc=tmp_path, cgroups=tmp_path)
    kills.watch(17, 0.0)
    kills.look(10.0)
    assert not kills.rose(17)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of this machine that allows 64 MiB; the test is skipped where none can be made."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = [path.lstrip("/") for _, controllers, path in lines if "memory" in controllers.split(",")]
    root = Path("/sys/fs/cgroup/memory") / own[0] if own else Path("/sys/fs/cgroup") / lines[-1][2].lstrip("/")
    group = root / f"test-{uuid.uuid4().hex}"
    limit = "memory.limit_in_bytes" if own else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made in {root}: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip(f"{group} does not limit memory")
        (group / limit).write_text(str(64 * 2**20))
        yield group
    finally:
        group.rmdir()


EATER = """
import sys
input()
eaten = [bytearray(2**20) for _ in range(512)]
"""


def test_a_real_want_of_memory_is_told_from_a_kill(small_group: Path) -> None:
    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE)
        (small_group / "cgroup.procs").write_text(str(process.pid))
        return process

    kills = OomKills()
    killed, eater = start(), start()
    try:
        for each in (killed, eater):
            kills.watch(each.pid, 0.0)
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait(20) == -signal.SIGKILL and not kills.rose(killed.pid)
        assert eater.stdin is not None
        eater.stdin.write(b"\n")
        eater.stdin.flush()
        assert eater.wait(20) == -signal.SIGKILL and kills.rose(eater.pid)
    finally:
        for each in (killed, eater):
            each.kill()
            each.wait()
