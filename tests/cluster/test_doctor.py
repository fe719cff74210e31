"""The checks of one node: each mistake is planted, and seen as what it is, in bounded time."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from megatron_recover.cli import doctor, node_checks, run_flags
from megatron_recover.cluster import doctor as package
from megatron_recover.cluster.doctor import gpus as gpu_check
from megatron_recover.cluster.doctor import machine, slurm
from megatron_recover.cluster.doctor.findings import Check, Finding, Folder, Need
from megatron_recover.cluster.doctor.folders import DEEDS, Tried, judged
from megatron_recover.cluster.doctor.node import examine, software
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.host import control_group, gpus
from tests.disk import mounted

ROOT = Path(__file__).resolve().parents[2]
EXAMINE = """
import sys, msgspec
from megatron_recover.cluster.doctor.findings import Need
from megatron_recover.cluster.doctor.node import examine
sys.stdout.buffer.write(msgspec.json.encode(examine(msgspec.json.decode(sys.argv[1], type=Need))))
"""


def examined_in_a_namespace(setup: str, need: Need) -> dict[Check, Finding]:
    """The findings of a process whose mounts and limits `setup`, lines of a shell, has changed for it alone."""
    words = [sys.executable, "-c", EXAMINE, msgspec.json.encode(need).decode()]
    command = ["unshare", "--mount", "sh", "-ec", f'{setup}\nexec "$@"', "sh", *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no unshare, which makes a mount namespace")
    if b"unshare failed" in done.stderr or b"permission denied" in done.stderr:
        pytest.skip(f"this user may not change mounts: {done.stderr.decode()}")
    assert done.returncode == 0, done.stderr.decode()
    return {each.check: each for each in msgspec.json.decode(done.stdout, type=list[Finding])}


def test_what_is_wrong_with_a_machine_is_seen_and_answered_with_the_remedy(tmp_path: Path) -> None:
    name = socket.gethostname()
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    setup = (
        f"mount --bind {tmp_path}/hosts /etc/hosts; mount -t tmpfs -o size=4m none /dev/shm\n"
        f"mkdir {tmp_path}/full {tmp_path}/fixed; mount -t tmpfs -o size=64k none {tmp_path}/full\n"
        f"mount -t tmpfs -o ro none {tmp_path}/fixed\n"
        f"head -c 65536 /dev/zero >{tmp_path}/full/x || true; ulimit -n 256"
    )
    folders = (Folder(Check.SAVE, f"{tmp_path}/fixed/new"), Folder(Check.TENSORBOARD, f"{tmp_path}/full"))
    found = examined_in_a_namespace(setup, Need(num_ranks=16, num_nodes=2, address="127.0.0.1", folders=folders))
    lines = {check: finding.line("n1") for check, finding in found.items()}
    assert lines[Check.HOST_NAME].startswith(f"warn  n1  host name: {name} is 127.0.1.1: other nodes cannot reach that; take")
    named = examined_in_a_namespace(setup.partition(";")[0], Need(num_nodes=2, address="10.0.0.3"))[Check.HOST_NAME]
    assert named.value.endswith("other nodes cannot reach that, so 10.0.0.3 is used") and "--interface" in named.remedy
    assert lines[Check.SHARED_MEMORY].startswith("warn  n1  /dev/shm: 4 MiB free of 4: a data loader or NCCL")
    assert lines[Check.OPEN_FILES].startswith("fail  n1  open files: 256 (hard limit); 16 ranks need 288; `ulimit -n 1024`")
    assert lines[Check.ADDRESS] == (
        "fail  n1  address: 127.0.0.1 is reached from this node only; give --interface or --local-addr"
    )  # fmt: skip
    assert lines[Check.SAVE] == (
        f"fail  n1  --save: {tmp_path}/fixed/new: in {tmp_path}/fixed nothing can be written (Read-only file system); "
        "make it writable, or give another folder"
    )  # fmt: skip
    assert lines[Check.TENSORBOARD].startswith(f"warn  n1  --tensorboard-dir: {tmp_path}/full is there, 0 MiB free; make room")


def test_what_is_right_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    folders = tuple(Folder(check, str(tmp_path / "a" / "b")) for check in DEEDS)
    found = {each.check: each for each in examine(Need(num_ranks=2, folders=folders))}
    assert {each.level for each in found.values()} == {"ok"}, found
    assert found[Check.LOAD].value == f"{tmp_path}/a/b is not there: training begins without a checkpoint"
    assert re.fullmatch(rf"{tmp_path}/a/b is to be made in {tmp_path}, \d+ MiB free", found[Check.SAVE].value)
    assert [*tmp_path.iterdir()] == []
    assert [*found] == [each for each in Check if each in found], "not in the order of the page"


def test_a_machine_without_a_free_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    [found] = [each for each in examine(Need(folders=(Folder(Check.SAVE, str(tmp_path)),))) if each.check is Check.SAVE]
    assert found.level == "fail" and found.value.endswith("no process can be started (Resource temporarily unavailable)")


def test_a_small_limit_of_open_files_is_told_where_it_suffices_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (64, 256))
    assert machine.open_files(Need(num_ranks=2)).level == "warn"
    in_slurm = machine.open_files(Need(num_ranks=50, environment={"SLURM_JOB_ID": "7"}))
    assert in_slurm.level == "fail" and "srun --propagate=NONE" in in_slurm.remedy


def test_memory_that_cannot_be_locked_is_told_where_infiniband_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr(machine, "_INFINIBAND", tmp_path)
    assert machine.locked_memory(Need()) is None
    (tmp_path / "mlx5_0").mkdir()
    found = machine.locked_memory(Need())
    assert found is not None and found.level == "warn" and found.value.startswith("8192 KiB: NCCL cannot register")


@pytest.mark.parametrize(("on_gpus", "allowed", "level"), [
    (False, 2, "warn"), (True, 2, "warn"), (True, 4, "ok"), (False, 8, "ok"),
])  # fmt: skip
def test_fewer_cores_than_ranks_are_told_where_something_holds_them_back(
    on_gpus: bool, allowed: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    ranks = 4 if on_gpus else 4 * allowed // 2
    assert machine.cores(Need(num_ranks=ranks, on_gpus=on_gpus)).level == level
    quota = control_group.Limit(1.5, Path("/sys/fs/cgroup/cpu.max"))
    monkeypatch.setattr(machine, "_core_quota", lambda: quota)
    found = machine.cores(Need(num_ranks=2))
    assert found.level == "warn" and "/sys/fs/cgroup/cpu.max allows the time of 1.5, for 2 ranks" in found.value


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_all_groups_above_a_process_counts(version: int, tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("4:cpu,cpuacct:/a/b\n3:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    for controller in ("memory", "cpu,cpuacct") if version == 1 else ("",):
        (cgroups / controller / "a" / "b").mkdir(parents=True)
    memory, name = (cgroups / "memory", "memory.limit_in_bytes") if version == 1 else (cgroups, "memory.max")
    (memory / "a" / "b" / name).write_text("9223372036854771712\n" if version == 1 else "max\n")
    groups = control_group.groups_of(7, "memory", proc=proc, cgroups=cgroups)
    assert control_group.memory_limit(groups) is None
    (memory / "a" / name).write_text("4096\n")
    assert control_group.memory_limit(groups) == (4096, memory / "a" / name)
    cpu = cgroups / "cpu,cpuacct" if version == 1 else cgroups
    for file, text in {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000", "cpu.max": "150000 100000"}.items():
        if (file == "cpu.max") == (version == 2):
            (cpu / "a" / file).write_text(text)
    (cpu / "a" / "b" / ("cpu.cfs_quota_us" if version == 1 else "cpu.max")).write_text("-1" if version == 1 else "max 100000")
    limit = control_group.core_limit(control_group.groups_of(7, "cpu", proc=proc, cgroups=cgroups))
    assert limit is not None and limit.amount == 1.5 and limit.file.parent == cpu / "a"
    # A container sees the path of its host, and its own group at the top.
    (proc / "7" / "cgroup").write_text("3:memory:/docker/x\n" if version == 1 else "0::/docker/x\n")
    (memory / name).write_text("8192\n")
    assert control_group.memory_limit(control_group.groups_of(7, "memory", proc=proc, cgroups=cgroups)) == (8192, memory / name)


def test_a_limit_below_what_the_imports_take_is_told_and_not_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = control_group.Limit(2**30, Path("/sys/fs/cgroup/memory.max"))
    monkeypatch.setattr(control_group, "memory_limit", lambda groups: limit)
    found = machine.memory(Need(num_ranks=2))
    assert found.level == "warn"
    assert found.value == "1.0 GiB (/sys/fs/cgroup/memory.max); 2 ranks take 1.3 GiB before there is a model"


@pytest.mark.parametrize(
    ("memory", "files", "on_gpus", "expected"),
    [
        (2**40, 1024, False, (106, "1024 open files (hard limit)")),
        (4 * 2**30, 1024, False, (6, "4.0 GiB of memory")),
        (4 * 2**30, 1024, True, (2, "4.0 GiB of memory")),
        (2**30, 1024, True, (0, "1.0 GiB of memory")),
        (2**36, resource.RLIM_INFINITY, False, (156, "64.0 GiB of memory")),
    ],
)
def test_the_largest_number_of_spares_is_known_with_what_limits_it(
    memory: int, files: int, on_gpus: bool, expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_memory_here", lambda: (memory, "that of the machine"))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (files, files))
    assert machine.most_spares(Need(num_ranks=7, num_spares=5, on_gpus=on_gpus)) == expected


@pytest.mark.parametrize(
    ("spares", "said"),
    [
        (8, "10 ranks need 10; give --spares 2 or fewer, or correct CUDA_VISIBLE_DEVICES"),
        (5, "10 ranks need 10; leave out --spares, and start fewer ranks on this node, or correct"),
    ],
)
def test_spares_beyond_the_gpus_are_answered_with_the_largest_number(spares: int, said: str) -> None:
    there = [gpus.Gpu(number, f"GPU-{number}", "NVIDIA H100", 80000, 0, False) for number in range(4)]
    found = gpu_check.judged(Need(num_ranks=10, num_spares=spares, on_gpus=True), there)
    assert found.level == "fail" and said in found.line("n")


@pytest.mark.parametrize(("seconds", "unsynchronised", "num_nodes", "level"), [
    (1e9, False, 1, "warn"), (1.8e9, True, 1, "ok"), (1.8e9, True, 2, "warn"), (1.8e9, False, 2, "ok"),
])  # fmt: skip
def test_a_clock_that_nobody_has_set_or_keeps_is_told(
    seconds: float, unsynchronised: bool, num_nodes: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        def __init__(self, *_: object, **__: object) -> None: ...

        def adjtimex(self, timex: object) -> int:
            timex._obj.status = 0x40 if unsynchronised else 0  # type: ignore[attr-defined]
            return 5 if unsynchronised else 0

    monkeypatch.setattr(machine.time, "time", lambda: seconds)
    monkeypatch.setattr(machine.ctypes, "CDLL", Libc)
    assert machine.clock(Need(num_nodes=num_nodes)).level == level


def test_a_name_server_that_does_not_answer_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(30) and [])
    begin = time.monotonic()
    found = next(each for each in examine(Need(), timeout_s=0.3) if each.check is Check.HOST_NAME)
    assert (found.level, "does not answer" in found.value, time.monotonic() - begin < 5) == ("warn", True, True)
    released.set()


def test_a_disk_that_does_not_answer_holds_neither_the_verb_nor_another_folder(tmp_path: Path) -> None:
    with mounted(tmp_path / "image") as disk:
        folders = (Folder(Check.SAVE, str(disk.place)), Folder(Check.TENSORBOARD, str(tmp_path)))
        disk.stall(on=True)
        begin = time.monotonic()
        found = {each.check: each for each in examine(Need(folders=folders), timeout_s=3)}
        seconds = time.monotonic() - begin
        disk.stall(on=False)
    assert found[Check.SAVE].line("n") == (
        f"warn  n  --save: {disk.place} does not answer; see to its disk, or give another folder"
    )  # fmt: skip
    assert found[Check.TENSORBOARD].level == "ok" and seconds < 8


@pytest.mark.parametrize(("tried", "level", "text"), [
    (Tried("/a", True, 2**40, 2**40), "ok", "/a/b is to be made in /a, 1048576 MiB free"),
    (Tried("/a/b", True, 2**40, 2**40, exchanges=False), "ok", "; its file system cannot exchange two names"),
    (Tried("/a", False), "fail", "/a/b: /a is no folder; give another"),
    (Tried("/a/b", failed=("rename", "No such device")), "fail", "/a/b nothing can be renamed (No such device); give a folder"),
    (Tried("/a/b", failed=("lock", "Function not implemented")), "fail", "have no locks (Function not implemented); mount it"),
    (Tried("/a/b", True, 2**40, 2**40, files=3), "warn", "and 3 files can be added; remove files"),
    (Tried("/a/b", True, 2**20, 2**40), "warn", "1 MiB free; make room"),
    (Tried(error="Stale file handle"), "fail", "cannot be looked at (Stale file handle)"),
])  # fmt: skip
def test_what_a_folder_lacks_is_told(tried: Tried, level: str, text: str) -> None:
    found = judged(Folder(Check.SAVE, "/a/b"), tried)
    assert found.level == level and text in found.line("n")


# --- GPUs -----------------------------------------------------------------------------------------


def _smi(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program that answers for the driver in front of all others."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "has_nvidia_gpu", lambda: True)


@pytest.mark.parametrize(("program", "expected"), [
    ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
     "nvidia-smi ended with exit code 18: Failed to initialize NVML: Driver/library version mismatch"),
    ("kill -SEGV $$", "nvidia-smi ended with SIGSEGV: nothing"),
    ("echo No devices were found", "nvidia-smi wrote no list of GPUs: No devices were found"),
    ("echo '0, GPU-a, H100, many, 3, Default'", "nvidia-smi wrote no list of GPUs: 0, GPU-a, H100, many, 3, Default"),
    ("exec sleep 60", "nvidia-smi does not answer"),
])  # fmt: skip
def test_a_driver_that_fails_or_hangs_is_told(
    program: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _smi(tmp_path, program, monkeypatch)
    begin = time.monotonic()
    found = next(each for each in examine(Need(num_ranks=1, is_rank_per_gpu=True), timeout_s=1) if each.check is Check.GPUS)
    assert (found.level, found.value) == ("warn", expected) and time.monotonic() - begin < 6


def test_without_the_driver_s_program_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "has_nvidia_gpu", lambda: True)
    monkeypatch.setenv("PATH", "/nowhere")
    found = gpu_check.Query().answer(1)
    assert isinstance(found, Finding) and (found.level, found.value) == ("warn", "not looked at: nvidia-smi cannot be started")


@pytest.mark.parametrize(("visible", "ranks", "used", "mode", "level", "text"), [
    (None, 4, 300, "Default", "ok", "4 seen, free (NVIDIA H100, 80000 MiB)"),
    (None, None, 300, "Default", "ok", "4 seen, free"),
    (None, 4, 30000, "Default", "warn", "4 seen, and in use by other processes: 0 (30000 MiB), 1 (30000 MiB), 2"),
    (None, 5, 300, "Default", "fail", "4 seen, and 5 ranks need 5; start fewer ranks on this node"),
    ("2,1", 2, 300, "Default", "ok", "2 of 4 seen, free"),
    ("GPU-3", 2, 300, "Default", "fail", "1 of 4 seen, and 2 ranks need 2"),
    ("0,-1,1", 2, 300, "Default", "fail", "1 of 4 seen"),
    ("", 2, 300, "Default", "ok", "CUDA_VISIBLE_DEVICES hides all 4: training on the CPU"),
    (None, 4, 300, "Prohibited", "fail", "compute mode Prohibited on 0, 1, 2, 3; nvidia-smi --compute-mode=0 as root"),
])  # fmt: skip
def test_gpus_are_counted_as_cuda_shows_them(
    visible: str | None, ranks: int | None, used: int, mode: str, level: str, text: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows = "".join(f"{number}, GPU-{number}0, NVIDIA H100, 80000, {used}, {mode}\n" for number in range(4))
    (tmp_path / "rows").write_text(rows)
    _smi(tmp_path, f"cat {tmp_path}/rows", monkeypatch)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    need = Need(num_ranks=ranks, is_rank_per_gpu=ranks is None, on_gpus=True, environment=environment)
    found = {each.check: each for each in examine(need)}
    assert found[Check.GPUS].level == level and text in found[Check.GPUS].line("n")
    if ranks is None:
        assert "for 4 ranks" in found[Check.CORES].value


# --- Slurm ----------------------------------------------------------------------------------------

JOB = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2,5]", "SLURMD_NODENAME": "n5", "SLURM_JOB_CPUS_PER_NODE": "64(x2),32",
    "SLURM_GPUS_PER_NODE": "4",
}  # fmt: skip
STEP = {"SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "1"}
"""The numbers of a step that does not ask for all that its job has on the node."""
LINE = (
    "srun --ntasks-per-node=1 --cpus-per-task=32 --cpu-bind=none --gpus-per-node=4 --mpi=none --no-kill --kill-on-bad-exit=0 "
    "--wait=0 megatron-recover run ..."
)


@pytest.mark.parametrize(("environment", "cores", "expected"), [
    ({}, 1, []),
    (JOB, 32, [("ok", "job 7")]),
    (JOB | {"SLURM_STEP_TASKS_PER_NODE": "1(x2),4", "SLURM_NODEID": "2"}, 32, [("fail", "4 tasks start on this node, and")]),
    (JOB | {"SLURM_STEP_TASKS_PER_NODE": "1(x2),4", "SLURM_NODEID": "1"}, 32, [("ok", "job 7")]),
    (JOB | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PTY_PORT": "1"}, 32, [("ok", "job 7")]),
    (JOB, 1, [("warn", "this task may use 1 of the 32 cores that the job has here")]),
    (JOB | STEP, 1, [("warn", "this task may use 1 of the 32 cores that the job has here")]),
    (JOB | STEP | {"CUDA_VISIBLE_DEVICES": "0"}, 32, [("warn", "this task sees 1 of the 4 GPUs that the job has here")]),
    (JOB | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, 32,
     [("warn", "this task sees 1 of the 4 GPUs that the job has here (SLURM_GPUS_PER_TASK is 1)")]),
    (JOB | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 32, [("ok", "job 7")]),
])  # fmt: skip
def test_settings_of_slurm_that_bite_are_answered_with_the_line(
    environment: dict[str, str], cores: int, expected: list[tuple[str, str]]
) -> None:
    found = slurm.settings(environment, cores)
    assert [(each.level, each.value.startswith(text)) for each, (_, text) in zip(found, expected, strict=True)] == [
        (level, True) for level, _ in expected
    ]
    assert all(each.remedy.endswith(LINE) for each in found if each.level != "ok")


@pytest.mark.parametrize(("environment", "numbers"), [
    (JOB | {"SLURMD_NODENAME": "n2", "SLURM_GPUS_PER_NODE": "h100:8"},
     "--cpus-per-task=64 --cpu-bind=none --gpus-per-node=h100:8"),
    ({"SLURM_JOB_ID": "7"} | STEP, "--cpu-bind=none"),
    (JOB | STEP | {"SLURMD_NODENAME": "other", "SLURM_GPUS_PER_NODE": "many"}, "--cpu-bind=none"),
    (JOB | STEP | {"SLURM_JOB_NODELIST": "n[1", "SLURM_GPUS_PER_NODE": ""}, "--cpu-bind=none"),
])  # fmt: skip
def test_a_number_that_only_the_step_gives_is_no_number_of_the_job(environment: dict[str, str], numbers: str) -> None:
    assert slurm.srun_line(environment).startswith(f"srun --ntasks-per-node=1 {numbers} --mpi=none ")
    assert slurm.settings(environment | {"CUDA_VISIBLE_DEVICES": "0"}, 64)[0].level == ("warn" if "gpus" in numbers else "ok")


# --- The verb, and `run` --------------------------------------------------------------------------


def test_the_verb_reads_the_line_of_run_and_prints_a_line_or_a_row_for_each_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.one_megatron, "choose", lambda *_, **__: None)
    script = tmp_path / "train.py"
    script.touch()
    line = ["--replicas", "2", "--run-dir", str(tmp_path / "run"), str(script), "--tensor-model-parallel-size", "2"]
    line += ["--save", str(tmp_path), "--load", "msc://x"]
    assert doctor.main(line) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(rf"(ok  |warn|fail)  {re.escape(socket.gethostname())}  [^:]+: .", each) for each in lines)
    assert any(each.endswith("for 4 ranks") for each in lines) and not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    assert doctor.main(["--json", *line, "--tensorboard-dir", str(tmp_path / "file")]) == ExitCode.BAD_INPUT
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["--tensorboard-dir"] == {
        "node": socket.gethostname(), "check": "--tensorboard-dir", "level": "fail",
        "value": f"{tmp_path}/file: {tmp_path}/file is no folder", "remedy": "give another",
    }  # fmt: skip
    assert {"--save", "--run-dir", "interpreter"} <= {*rows} and "--load" not in rows


def test_the_verb_finds_the_address_of_a_node_among_several_or_says_why_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.one_megatron, "choose", lambda *_, **__: None)
    line = ["--json", "--nnodes", "2", "--nproc-per-node", "2", "--master-port", "29400"]
    found = {}
    for host in ("", "127.0.0.1", "no.such.host.invalid"):
        doctor.main([*line, *(["--master-addr", host] if host else [])])
        found[host] = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert found[""]["address"] == {
        "node": socket.gethostname(), "check": "address", "level": "warn",
        "value": "the nodes meet at 127.0.0.1, which only this machine reaches",
        "remedy": "give --master-addr, the name or address of node 0",
    }  # fmt: skip
    assert found["127.0.0.1"]["address"] == found[""]["address"]
    row = found["no.such.host.invalid"]["address"]
    assert row["level"] == "fail" and row["value"].startswith("--master-addr: no.such.host.invalid does not resolve on node")
    assert row["remedy"].startswith("give an address, or enter the name in")
    assert "ports" not in found["127.0.0.1"]
    assert found["no.such.host.invalid"]["ports"] == {
        "node": socket.gethostname(), "check": "ports", "level": "warn",
        "value": "this command examines this node alone, and no connection to the other 1 of 2 nodes",
        "remedy": "give it on every node; `run` examines all nodes, and each pair of them, before it starts anything",
    }  # fmt: skip


def test_the_verb_judges_the_address_that_the_first_node_writes_into_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.one_megatron, "choose", lambda *_, **__: None)
    monkeypatch.setattr(doctor.reachable, "own_address", lambda **_: "192.0.2.7")
    line = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    doctor.main(["--json", *line, "--rdzv-endpoint", f"file:{tmp_path / 'endpoint'}"])
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert "192.0.2.7" in rows["address"]["value"] and "ports" in rows


def test_two_megatrons_and_missing_packages_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = software(["torch>=99"], "two Megatrons would be imported: a and b; put one first")
    assert [(each.check, each.level) for each in found] == [
        (Check.INTERPRETER, "ok"), (Check.PACKAGES, "fail"), (Check.MEGATRON, "fail"),
    ]  # fmt: skip
    assert found[2].remedy == "put one first" and found[1].remedy.endswith("'torch>=99'")


def test_run_is_refused_before_anything_starts_and_leaves_nothing(tmp_path: Path) -> None:
    flags = "--num-layers 2 --num-attention-heads 2 --hidden-size 8 --micro-batch-size 1 --global-batch-size 20 --train-iters 1"
    flags += " --eval-interval 9 --mock-data --save x --save-interval 1"
    words = [sys.executable, "-m", "megatron_recover", "run", "--replicas", "20", "--run-dir", "run", "train.py"]
    (tmp_path / "train.py").write_text("open('started', 'w')")
    command = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *words, *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    lines = done.stderr.splitlines()
    refusals = [each for each in lines if "  open files: 256 (hard limit); 20 ranks need 320; `ulimit -n" in each]
    assert (done.returncode, len(refusals)) == (ExitCode.BAD_INPUT, 1), done.stderr
    assert refusals[0].startswith("megatron-recover run: fail  ")
    assert not any(": ok " in each for each in lines) and sorted(each.name for each in tmp_path.iterdir()) == ["train.py"]


def test_too_many_spares_are_refused_with_the_largest_number(tmp_path: Path) -> None:
    flags = "--num-layers 2 --num-attention-heads 2 --hidden-size 8 --micro-batch-size 1 --global-batch-size 20 --train-iters 1"
    words = [
        sys.executable,
        "-m",
        "megatron_recover",
        "run",
        "--replicas",
        "2",
        "--spares",
        "100000",
        "--run-dir",
        "run",
        "train.py",
    ]
    (tmp_path / "train.py").write_text("open('started', 'w')")
    done = subprocess.run(
        [*words, *flags.split(), "--eval-interval", "9", "--mock-data"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == ExitCode.BAD_INPUT, done.stderr
    found = re.search(r"--spares is 100000, and this node has room for (\d+) beside its 2 ranks \(.+\); (.*)", done.stderr)
    assert found is not None, done.stderr
    assert found[2] == (f"give --spares {found[1]} or fewer" if int(found[1]) else "leave out --spares")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["train.py"]


def test_run_leaves_out_what_it_judges_by_itself() -> None:
    words = ["--save", "a", "--run-dir=b", "--load", "msc://c"]
    assert node_checks.folders_of(words, but=[Check.RUN_DIR]) == (Folder(Check.SAVE, os.path.abspath("a")),)
    assert {check.value for check in DEEDS} <= {flag for flag in Check if flag.startswith("--")}
    assert doctor._parser()._option_string_actions.keys() == {*run_flags.parser()._option_string_actions, "--json"}


# --- The page -------------------------------------------------------------------------------------


def _levels_in_the_code() -> dict[str, set[str]]:
    """The levels at which the code can report each check."""
    found: dict[str, set[str]] = {each.value: set() for each in Check}
    for file in (*Path(package.__path__[0]).glob("*.py"), ROOT / "megatron_recover" / "cli" / "doctor.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("ok", "warn", "fail"):
                subject = ast.unparse(call.args[0])
                named = [Check[subject.removeprefix("Check.")]] if subject.startswith("Check.") else [*DEEDS]
                for check in named:
                    found[check.value].add(call.func.id)
    return found


def test_the_page_has_a_row_for_each_check_with_its_levels() -> None:
    text = (ROOT / "docs" / "how_to" / "doctor.md").read_text()
    rows = re.findall(r"^\| `?([^|`]+?)`? \| .+ \| (.+?) \| .+ \|$", text, re.MULTILINE)
    listed = {name: {word for word in ("warn", "fail") if f"**{word}**" in level} for name, level in rows if name != "check"}
    found = {name: levels - {"ok"} for name, levels in _levels_in_the_code().items()}
    folders = set.union(*(found[check.value] for check in DEEDS))
    for check in DEEDS:  # one function judges all of them; the page says which can do what
        assert listed[check.value] <= folders
        found[check.value] = listed[check.value]
    assert listed == found
