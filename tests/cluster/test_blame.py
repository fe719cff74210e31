"""Which deaths are charged to the microbatch that was computed (INV-9): those that the computation caused, and no others."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_recover import trace
from megatron_recover.cluster.environment import HEARTBEAT as HEARTBEAT_VARIABLE
from megatron_recover.cluster.node import ProcessEnd
from megatron_recover.cluster.out_of_memory import OomKills
from megatron_recover.cluster.watch import Watch, explaining_first
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import Loss, LossKind, ReplicaFailing
from megatron_recover.core.progress import Phase
from megatron_recover.deadlines import Deadlines
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.cluster.aborting_toy import HEARTBEAT, WATCHDOG
from tests.cluster.jobs import ROOT, Spec, run

pytestmark = pytest.mark.timeout(180)


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
    named = "microbatch 0 of train 2 (sample 7 in the order of training, from 0)"
    assert f"computing {named} ended replicas 0 and" in outcome.output
    assert len(outcome.of(trace.Fault)) == 2, "it was dealt a third time"
    assert {lost.kind for event in outcome.of(trace.Generation) for lost in event.losses} == {LossKind.CRASHED}
    outcome.assert_exactly_once()


def test_a_file_that_is_cut_under_its_memory_map_stops_the_job_and_the_microbatch_is_named(tmp_path: Path) -> None:
    """The guilty one is read ahead: the first death comes while another is computed, which is not accused."""
    script = str(ROOT / "tests" / "cluster" / "mapped_toy.py")
    outcome = run(Spec(run_dir=str(tmp_path / "run"), script=script, ranks=1, pace_s=0.3))
    assert outcome.exit_code == ExitCode.POISONED_MICROBATCH, outcome.output
    assert "computing microbatch 6 of train 2" in outcome.output and "SIGBUS" in outcome.output
    [first] = [lost.detail for event in outcome.of(trace.Generation) for lost in event.losses]
    assert "while it read the samples of microbatch 6 of train 2" in first and "microbatch 6 of train 2 in work" not in first
    assert "a third time: rank 0: SIGBUS, with microbatch 6 of train 2 in work (data)\n" in outcome.output
    assert len(outcome.of(trace.Failure)) == 2


def test_links_that_break_inside_two_replicas_while_they_compute_one_microbatch_do_not_stop_the_job(tmp_path: Path) -> None:
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=4, script=str(ROOT / "tests" / "cluster" / "aborting_toy.py")))
    outcome.assert_finished(outcome.roster)
    assert len(outcome.roster) == 2 and 0 not in outcome.roster
    assert {event.cause for event in outcome.of(trace.Failure)} == {"SIGABRT"}
    details = {lost.detail for event in outcome.of(trace.Generation) for lost in event.losses}
    assert details == {"rank 0: SIGABRT, as communication inside its replica failed"}


@pytest.mark.parametrize(
    ("number", "phase", "said", "is_charged"),
    [
        (signal.SIGABRT, Phase.FORWARD, WATCHDOG, False),
        (signal.SIGABRT, Phase.PIPELINE, WATCHDOG, False),
        (signal.SIGABRT, Phase.FORWARD, HEARTBEAT.splitlines()[0], False),
        (signal.SIGABRT, Phase.FORWARD, HEARTBEAT.splitlines()[1], False),
        (signal.SIGABRT, Phase.FORWARD, f"CUDA error: device-side assert triggered\n{HEARTBEAT}", True),
        (signal.SIGSEGV, Phase.FORWARD, WATCHDOG, True),
        (signal.SIGABRT, Phase.BACKWARD, "free(): invalid pointer", True),
        # An index out of range in a kernel: the watchdog finds it first, and it is the microbatch's.
        (signal.SIGABRT, Phase.PIPELINE, f"CUDA error: device-side assert triggered\n{WATCHDOG}", True),
        # A device that fails strikes whatever is computed, and a peer's death over NVLink can make it fail.
        (signal.SIGABRT, Phase.PIPELINE, f"CUDA error: an illegal memory access was encountered\n{WATCHDOG}", False),
        (signal.SIGBUS, Phase.DATA, "", True),
        (signal.SIGSEGV, Phase.PIPELINE, "", True),  # a device that runs behind
        (signal.SIGSEGV, Phase.REDUCTION, "", False),
        (signal.SIGSEGV, Phase.ORDERS, "", False),
        (signal.SIGSEGV, Phase.SAVE, "", False),
    ],
)
def test_a_crash_is_charged_only_inside_a_microbatch_and_not_where_communication_failed(
    number: int, phase: Phase, said: str, is_charged: bool
) -> None:
    loss, failing = loss_with(number, phase, said)
    assert loss.kind is LossKind.CRASHED
    assert (failing is not None and failing.microbatches == (3,)) if is_charged else failing is None


DEVICE = """\
[rank0]:[E1123 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with \
exception: CUDA error: {}
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
terminate called after throwing an instance of 'c10::DistBackendError'
"""
"""What torch prints where its watchdog finds that the device has failed, with SIGABRT behind it."""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (WATCHDOG, "rank 0: SIGABRT, as communication inside its replica failed"),
        (HEARTBEAT, "rank 0: SIGABRT, as communication inside its replica failed"),
        (
            DEVICE.format("uncorrectable ECC error encountered"),
            "rank 0: SIGABRT, as its device failed (CUDA error: uncorrectable ECC error encountered)",
        ),
        (
            f"CUDA error: an illegal memory access was encountered\n{WATCHDOG}",
            "rank 0: SIGABRT, as its device failed (CUDA error: an illegal memory access was encountered)",
        ),
    ],
)
def test_a_failed_device_is_told_from_failed_communication_and_neither_is_charged(said: str, expected: str) -> None:
    loss, failing = loss_with(signal.SIGABRT, Phase.FORWARD, said)
    assert loss.detail == expected and failing is None


def test_an_assertion_that_the_watchdog_finds_is_charged() -> None:
    loss, failing = loss_with(signal.SIGABRT, Phase.PIPELINE, DEVICE.format("device-side assert triggered"))
    assert failing is not None and " failed" not in loss.detail


def test_the_installed_torch_ends_a_process_with_these_words() -> None:
    """Other words would not be recognised, and the microbatch in work would be charged."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not library.exists():
        pytest.skip("a torch without CUDA has no watchdog")
    words = [b"ProcessGroupNCCL's watchdog got stuck for ", b"Terminating the process after attempting to dump debug info"]
    words += [b"ProcessGroupNCCL watchdog hang", b"Watchdog caught collective operation timeout", HEARTBEAT_VARIABLE.encode()]
    words += [b"watchdog thread terminated with exception: "]
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
        assert [word for word in words if text.find(word) < 0] == []


@pytest.mark.parametrize(
    ("number", "phase", "said", "ahead", "charged"),
    [
        (signal.SIGBUS, Phase.FORWARD, "", 5, (3, 5)),
        (signal.SIGBUS, Phase.DATA, "", 5, (3, 5)),
        (signal.SIGBUS, Phase.DATA, "", 3, (3,)),
        (signal.SIGBUS, Phase.ORDERS, "", 5, (5,)),
        (signal.SIGABRT, Phase.FORWARD, WATCHDOG, 5, ()),
        (signal.SIGTERM, Phase.FORWARD, "", 5, ()),
    ],
)
def test_a_crash_is_charged_also_to_what_is_read_ahead(
    number: int, phase: Phase, said: str, ahead: int, charged: tuple[int, ...]
) -> None:
    _, failing = loss_with(number, phase, said, ahead)
    assert (() if failing is None else failing.microbatches) == charged


def loss_with(number: int, phase: Phase, said: str, ahead: int | None = None) -> tuple[Loss, ReplicaFailing | None]:
    """How the agent judges a rank that died by a signal while its page said that microbatch 3 is in work."""
    progress = SimpleNamespace(microbatches=(3,), phase=phase, label="train 2", ahead=ahead)
    agent = SimpleNamespace(pid=lambda replica, rank: os.getpid(), page=lambda replica, rank: progress)
    watch = Watch(
        agent, deadlines=Deadlines.of(60.0), log_of=lambda *rank: Path("rank.log"), record=lambda event: None,
        says=lambda line: None, at_work=lambda replicas: None,
    )  # type: ignore[arg-type]  # fmt: skip
    return watch.loss(ProcessEnd(1, 0, -number), started=True, said=lambda: said)


def test_a_microbatch_in_which_two_replicas_are_killed_does_not_stop_the_job(tmp_path: Path) -> None:
    faults = tuple(fault for fault in strikes(FaultKind.KILL) if fault.replica != 2)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=4, faults=faults))
    assert outcome.exit_code == ExitCode.OK, outcome.output
    outcome.assert_finished(outcome.roster)
    assert 0 not in outcome.roster


def ends(*statuses: int) -> list[ProcessEnd]:
    return [ProcessEnd(3, rank, status) for rank, status in enumerate(statuses)]


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
    others = [ProcessEnd(4, 0, -signal.SIGKILL)]
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
    assert not kills.rose(17, 0.1), "what was killed before the rank started is none of its business"
    files.count(4)
    assert kills.rose(17, 0.2)
    assert not kills.rose(17, 0.2), "one kill explains one death"
    files.count(5)  # of a process that was no rank
    for now in range(1, 20):
        kills.look(float(now))
    assert not kills.rose(17, 20.0), "a kill long ago explains no death now"


def followed(tmp_path: Path, *pids: int) -> tuple[Files, OomKills]:
    """Ranks that share one control group, as those of a container do; nothing was killed yet."""
    files = Files(tmp_path, 2)
    files.count(0)
    kills = OomKills(proc=files.proc, cgroups=files.cgroups)
    for pid in pids:
        (files.proc / str(pid)).mkdir(exist_ok=True)
        (files.proc / str(pid) / "cgroup").write_text((files.proc / "17" / "cgroup").read_text())
        kills.watch(pid, 0.0)
    return files, kills


def test_a_kill_of_a_data_loaders_worker_does_not_explain_that_an_operator_kills_a_rank_two_seconds_later(
    tmp_path: Path,
) -> None:
    files, kills = followed(tmp_path, 17)
    for tick in range(1, 100):
        if tick == 60:
            files.count(1)
        kills.look(tick * 0.05)
    assert not kills.rose(17, 5.0)


@pytest.mark.parametrize("late_s", [0.0, 0.2, 0.7])
def test_dying_may_take_a_moment(tmp_path: Path, late_s: float) -> None:
    files, kills = followed(tmp_path, 17)
    for tick in range(1, 60):
        kills.look(tick * 0.05)
    files.count(1)
    for tick in range(60, 60 + round(late_s / 0.05)):
        kills.look(tick * 0.05)
    assert kills.rose(17, 3.0 + late_s)


def test_an_agent_that_was_held_up_counts_from_when_it_saw_the_rise(tmp_path: Path) -> None:
    files, kills = followed(tmp_path, 17)
    files.count(1)
    kills.look(30.0)
    assert kills.rose(17, 30.0)


def test_each_kill_explains_one_death(tmp_path: Path) -> None:
    files, kills = followed(tmp_path, 17, 18, 19)
    files.count(1)
    kills.look(1.0)
    assert [kills.rose(pid, 1.1) for pid in (17, 18, 19)] == [True, False, False]
    files.count(3)
    assert [kills.rose(pid, 1.3) for pid in (17, 18, 19)] == [True, True, False]


def test_a_kill_that_has_explained_a_death_hides_no_later_one(tmp_path: Path) -> None:
    files, kills = followed(tmp_path, 17, 18)
    files.count(1)
    kills.look(1.0)
    assert kills.rose(17, 1.1)
    for tick in range(2, 30):
        kills.look(float(tick))
    files.count(2)
    assert kills.rose(18, 30.0)


@pytest.mark.parametrize("controller_at", ["", "job", "job/step 1"])
def test_the_counter_is_that_of_the_nearest_group_that_has_the_memory_controller(tmp_path: Path, controller_at: str) -> None:
    """Version 2: a group has the file only if its parent enables the controller for it, and counts what is killed below it."""
    files = Files(tmp_path, 2)
    for each in ("", "job", "job/step 1")[: 1 + ("", "job", "job/step 1").index(controller_at)]:
        (files.cgroups / each / "memory.events").write_text("oom_kill 3\n")
    kills = OomKills(proc=files.proc, cgroups=files.cgroups)
    kills.watch(17, 0.0)
    (files.cgroups / controller_at / "memory.events").write_text("oom_kill 4\n")
    assert kills.rose(17, 0.1)


@pytest.mark.parametrize("path", ["/system.slice/container 9.scope", "/../other"])
def test_in_a_container_that_shows_its_hosts_path_the_counter_is_that_of_the_mount(tmp_path: Path, path: str) -> None:
    """Groups inside may have the names of the host's: `system.slice` here is another one."""
    files = Files(tmp_path / "top", 2)
    (files.proc / "17" / "cgroup").write_text(f"0::{path}\n")
    (tmp_path / "top" / "other").mkdir()
    (files.cgroups / "system.slice").mkdir()
    for folder in (files.cgroups, files.cgroups / "system.slice", tmp_path / "top" / "other"):
        (folder / "memory.events").write_text("oom_kill 3\n")
    kills = OomKills(proc=files.proc, cgroups=files.cgroups)
    kills.watch(17, 0.0)
    (files.cgroups / "memory.events").write_text("oom_kill 4\n")
    assert kills.rose(17, 0.1)


def test_without_a_counter_nothing_is_a_want_of_memory(tmp_path: Path) -> None:
    kills = OomKills(proc=tmp_path, cgroups=tmp_path)
    kills.watch(17, 0.0)
    kills.look(10.0)
    assert not kills.rose(17, 10.0)


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
        assert killed.wait(60) == -signal.SIGKILL and not kills.rose(killed.pid, 0.1)
        assert eater.stdin is not None
        eater.stdin.write(b"\n")
        eater.stdin.flush()
        assert eater.wait(60) == -signal.SIGKILL and kills.rose(eater.pid, 0.2)
    finally:
        for each in (killed, eater):
            each.kill()
            each.wait()
