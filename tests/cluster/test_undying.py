"""A rank that SIGKILL does not end (state D): survivors finish the step, nothing waits for it, the job's end reports it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster import agent as agent_module
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.fences import Fences
from megatron_recover.cluster.node import Undying
from megatron_recover.cluster.output import create
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import SUMS, Spec
from tests.cluster.running import FOR_EVER, Start
from tests.cluster.waiting import until_ended, until_readable

pytestmark = pytest.mark.timeout(180)


class Freezer:
    """A cgroup (version 1) whose processes stand still in state D, and take SIGKILL only when they are thawed."""

    def __init__(self, mount: Path) -> None:
        self._mount, self._group = mount, mount / f"megatron-recover-{os.getpid()}"
        mount.mkdir()
        subprocess.run(["mount", "-t", "cgroup", "-o", "freezer", "none", str(mount)], check=True, capture_output=True)
        self._group.mkdir()
        self.frozen: list[psutil.Process] = []

    def freeze(self, process: psutil.Process) -> None:
        (self._group / "tasks").write_text(str(process.pid))
        (self._group / "cgroup.procs").write_text(str(process.pid))
        (self._group / "freezer.state").write_text("FROZEN")
        while (self._group / "freezer.state").read_text().strip() != "FROZEN":
            (self._group / "freezer.state").write_text("FROZEN")
        self.frozen.append(process)

    def thaw(self) -> None:
        (self._group / "freezer.state").write_text("THAWED")

    def close(self) -> None:
        self.thaw()
        until_ended(self.frozen)
        self._group.rmdir()
        subprocess.run(["umount", str(self._mount)], check=True)


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Freezer]:
    try:
        made = Freezer(tmp_path / "freezer")
    except (subprocess.CalledProcessError, OSError):
        pytest.skip("this machine lets nobody mount the cgroup v1 freezer")
    yield made
    made.close()


def test_a_rank_that_sigkill_does_not_end_costs_its_replica_and_nothing_else(
    freezer: Freezer, start: Start, tmp_path: Path
) -> None:
    deadlines = {**dict.fromkeys((*SUMS, "stall_s", "finish_s"), 5.0), "follow_s": 4.0, "sigkill_s": 1.0}
    job = start(Spec(run_dir=str(tmp_path / "run"), steps=FOR_EVER, deadlines=deadlines))
    victim = next(each for each in job.processes if each.name() == "replica-1.1")
    freezer.freeze(victim)
    events = Path(job.spec.run_dir) / "events.jsonl"
    # Where it stands decides who notices: members whose sum or vote does not end, or the detector, if it computes.
    job.until(lambda: '"roster":[0,2]' in events.read_text(), "the loss of the replica")
    reached = job.num_applied()
    job.until(lambda: job.num_applied() > reached + 20, "training to go on without it")
    job.launcher.send_signal(signal.SIGTERM)
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    assert f"replica 1 rank 1 (pid {victim.pid}, state D" in outcome.output, outcome.output
    assert "does not end although it was killed" in outcome.output
    outcome.assert_exactly_once()
    assert [(each.replica, each.rank, each.pid, each.state) for each in outcome.of(trace.SetAside)] == [(1, 1, victim.pid, "D")]
    assert [(each.replica, each.ranks) for each in outcome.of(trace.Fenced)] == [(1, (0,))]
    verdict = check(job.spec.run_dir)
    assert verdict.holds, describe(verdict)
    until_ended([each for each in job.processes if each != victim])


def test_closing_an_agent_reports_what_does_not_end_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere, without a freezer: SIGKILL is said to have no effect."""
    script = tmp_path / "script.py"
    script.write_text("import signal\nwhile True: signal.pause()\n")
    agent = Agent(preload=(), environment=dict(os.environ), output=create(tmp_path / "log"))
    until_readable(agent.fileno(), agent.is_ready, "the fork server")
    agent.spawn(3, 0, argv=(str(script),), environment={}, output=create(tmp_path / "rank.log"))
    monkeypatch.setattr(agent_module, "ends_by", lambda pidfd, until: False)
    pid = agent._processes[3, 0].pid
    assert agent.undying() == []
    [left] = agent.close()
    assert left == Undying(3, 0, pid, left.state, left.wchan)
    assert str(left).startswith(f"replica 3 rank 0 (pid {pid}, state ")


def test_a_process_that_does_not_end_is_reported_once_and_with_what_to_look_at() -> None:
    said: list[str] = []
    fences = Fences.__new__(Fences)
    fences.set_aside = set()
    fences._recording = SimpleNamespace(says=said.append, ended=lambda *rank: None, record=lambda event: None)
    for _ in range(2):
        fences.give_up(Undying(1, 0, 17, "D", "nfs_wait"))
    assert said == [
        "replica 1 rank 0 (pid 17, state D in nfs_wait) does not end although it was killed; the run does not wait for it. "
        "It keeps its memory and devices: see `dmesg` for the disk or device that hangs"
    ]
