"""Launcher or coordinator are stopped (SIGSTOP, Ctrl-Z) and a replica dies: who goes on, who waits, and for how long."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.seats import Seats
from megatron_recover.cluster.starting import Starting
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import Launch
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import SHORTEST_S, Deadlines
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import Outcome, Spec, sums
from tests.cluster.running import FOR_EVER, AtTerminal, Running, Start
from tests.cluster.waiting import until_ended, until_files

pytestmark = pytest.mark.timeout(180)
SOON = {"beat_s": 0.25, "silence_s": 1.0}
"""A silent launcher is noticed in a second, which is shorter than the default's three."""
SILENCE_S = 5.0


def kill_a_rank(job: Running) -> None:
    """Kill rank 1 of replica 1."""
    next(each for each in job.processes if each.name() == "replica-1.1").kill()


def until_said(job: Running, text: str, replicas: tuple[int, ...] = (0, 2)) -> None:
    """Return when the leaders of `replicas` have said so in their logs."""
    logs = [Path(job.spec.run_dir) / "logs" / f"replica-{replica}-rank-0.log" for replica in replicas]
    until_files(lambda: all(text in log.read_text() for log in logs), text, logs[0].parent)


def test_the_start_of_ranks_is_not_told_as_a_standstill_and_each_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher waits for the fork server meanwhile, and not in its loop."""
    now, said, beats = [0.0], list[str](), list[float]()

    def spawn(replica: int, rank: int, **_: object) -> None:
        now[0] += 2.0

    launcher = Launcher.__new__(Launcher)
    launcher._job = SimpleNamespace(
        replicas_here=(0, 1), slots=lambda replica: {0: 0, 1: 1}, command=(), num_replicas=2, place_of=lambda *rank: 0
    )
    launcher._loop = Loop(clock=lambda: now[0], cpu_clock=lambda: 0.0)
    launcher._recording = SimpleNamespace(
        descriptors=lambda replica, rank: {}, output_of_rank=lambda replica, rank, place: None, says=said.append
    )
    launcher._starting = Starting(
        launcher._job, Seats(launcher._job), SimpleNamespace(spawn=spawn), launcher._recording, coordinator=lambda: "",
        handed_down={}, started=launcher._rank_started, started_at=0.0, patience_s=1.0,
    )  # fmt: skip
    launcher._ranks = SimpleNamespace(watches=lambda replica, rank: None)
    launcher._starting.may_start(Launch(((0, "127.0.0.1:1"), (1, "127.0.0.1:2"))))
    membership = SimpleNamespace(send=lambda message: None, beat=lambda: beats.append(now[0]))
    launcher._joined = SimpleNamespace(membership=membership)
    launcher._fences = SimpleNamespace(gone=set())
    launcher._stood_still_s, launcher._deadlines = 0.0, Deadlines.of()
    monkeypatch.setattr(Starting, "_environment", lambda self, replica, rank, **others: {})
    launcher._loop.run_once(0.0)
    launcher._spawn_all()
    launcher._loop.run_once(0.0)
    launcher._say_if_it_stood_still()
    assert said == [] and now[0] == 8.0
    assert beats == [2.0, 4.0, 6.0, 8.0], "a node whose ranks start slowly is not taken for lost"
    now[0] += 60.0
    launcher._loop.run_once(0.0)
    launcher._say_if_it_stood_still()
    assert len(said) == 1 and said[0].startswith("the launcher stood still for 60 s"), "a real stop is told"
    launcher._loop.close()


def test_a_death_while_the_coordinator_is_stopped_is_recovered_from_when_it_goes_on(start: Start, tmp_path: Path) -> None:
    deadlines = {"follow_s": 4.0, "beat_s": 0.25, "silence_s": SILENCE_S}
    job = start(Spec(run_dir=str(tmp_path / "run"), steps=FOR_EVER, deadlines=deadlines))
    pid = job.coordinator.pid
    job.coordinator.send_signal(signal.SIGSTOP)
    stopped_at, reached = time.monotonic(), job.num_applied()
    job.until(lambda: job.num_applied() > reached + 20, "training to go on without the coordinator")
    kill_a_rank(job)
    until_said(job, f"(pid {pid}, stopped: continue it with `kill -CONT {pid}`) has sent nothing for")
    until_said(job, "waits for a new generation (")
    reached = job.num_applied()
    # Nothing moves: for longer than the follow timeout, too, which must not have run out when it goes on.
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED and job.num_applied() == reached
    # Replicas count from the last beat, which was sent before the stop.
    time.sleep(max(0.0, stopped_at + SILENCE_S + 0.5 - time.monotonic()))
    job.coordinator.send_signal(signal.SIGCONT)
    job.until(lambda: job.num_applied() > reached + 20, "training to go on with the coordinator")
    job.launcher.send_signal(signal.SIGTERM)
    outcome = job.end()
    assert_only_replica_1_is_lost(outcome)
    silences = [(event.replica, event.phase) for event in outcome.of(trace.CoordinatorSilent)]
    assert {(replica, phase) for replica in (0, 2) for phase in ("began", "over")} <= set(silences)
    job.assert_nothing_left()


@pytest.mark.parametrize("how", ["SIGSTOP", "Ctrl-Z"])
def test_a_death_while_the_launcher_is_stopped_is_recovered_from_without_it(start: Start, tmp_path: Path, how: str) -> None:
    deadlines = {"follow_s": 1.0, **SOON}
    job = start(Spec(run_dir=str(tmp_path / "run"), steps=FOR_EVER, deadlines=deadlines), at_terminal=how == "Ctrl-Z")
    if isinstance(job, AtTerminal):
        job.type("\x1a")
        job.until(lambda: "Stopped" in job.output.read_text(), "the shell's word that the job is stopped")
    else:
        job.launcher.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    kill_a_rank(job)
    time.sleep(0.5)  # the step in which it died
    reached = job.num_applied()
    job.until(lambda: job.num_applied() > reached + 20, "training to go on without the launcher")
    time.sleep(max(0.0, stopped_at + SOON["silence_s"] + 0.5 - time.monotonic()))  # it tells only of a stop that was so long
    assert psutil.Process(job.launcher.pid).status() == psutil.STATUS_STOPPED
    if isinstance(job, AtTerminal):
        job.type("fg\n")
    else:
        job.launcher.send_signal(signal.SIGCONT)
    job.until(lambda: "the launcher stood still for" in job.output.read_text(), "its word that it was stopped")
    job.launcher.send_signal(signal.SIGTERM)
    outcome = job.end()
    assert_only_replica_1_is_lost(outcome)
    *_, began, over = outcome.of(trace.NodeSilent)
    assert (began.node, began.phase, over.node, over.phase) == (0, "began", 0, "over") and over.seconds > SOON["silence_s"]
    job.assert_nothing_left()


def assert_only_replica_1_is_lost(outcome: Outcome) -> None:
    """The job was ended by a signal, and the others have all that was computed."""
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    outcome.assert_exactly_once()
    assert [loss.replica for event in outcome.of(trace.Generation) for loss in event.losses] == [1], "nobody else is lost"
    sums = {rank: [outcome.sums(replica, rank) for replica in (0, 2)] for rank in range(2)}
    assert all(one == other for one, other in sums.values())
    verdict = check(outcome.spec.run_dir)
    assert verdict.holds, describe(verdict)


def test_inv_8_a_coordinator_that_stays_stopped_is_waited_for_until_the_deadline(start: Start, tmp_path: Path) -> None:
    deadlines = {**sums(5.0), "stall_s": 5.0, "follow_s": 1.0, "deadline_s": 1.0, **SOON}
    job = start(Spec(run_dir=str(tmp_path / "run"), steps=FOR_EVER, deadlines=deadlines))
    job.coordinator.send_signal(signal.SIGSTOP)
    kill_a_rank(job)
    until_ended(job.ranks, deadline_s=30.0)
    until_said(job, "and the coordinator (pid")
    job.coordinator.send_signal(signal.SIGCONT)
    outcome = job.end()
    assert outcome.exit_code == ExitCode.NO_REPLICA_LEFT, outcome.output
    assert "no checkpoint: --save was not set" in outcome.output
    outcome.assert_exactly_once()
    verdict = check(outcome.spec.run_dir)
    assert verdict.holds, describe(verdict)
    job.assert_nothing_left()


def test_inv_8_a_launcher_whose_coordinator_is_stopped_for_good_ends_after_the_last_rank(start: Start, tmp_path: Path) -> None:
    deadlines = {**sums(5.0), "stall_s": 5.0, "follow_s": 1.0, "deadline_s": 3.0, **SOON}
    shortest = RecoverConfig(deadline_s=SHORTEST_S)  # the launcher's
    job = start(Spec(run_dir=str(tmp_path / "run"), steps=FOR_EVER, deadlines=deadlines, config=shortest))
    job.coordinator.send_signal(signal.SIGSTOP)
    kill_a_rank(job)
    until_ended(job.ranks, deadline_s=30.0)
    outcome = job.end()
    assert outcome.exit_code == ExitCode.NO_REPLICA_LEFT, outcome.output
    assert "nothing was heard of the coordinator for " in outcome.output
    outcome.assert_exactly_once()
    verdict = check(outcome.spec.run_dir)
    assert verdict.holds, describe(verdict)
    job.assert_nothing_left()


@pytest.mark.parametrize("who", ["launcher", "coordinator"])
def test_a_job_that_ends_while_one_of_them_is_stopped_ends_well_when_it_goes_on(start: Start, tmp_path: Path, who: str) -> None:
    # At this pace it goes on for seconds after it was seen to train.
    job = start(Spec(run_dir=str(tmp_path / "run"), steps=400, deadlines=SOON, pace_s=0.005))
    stopped = getattr(job, who)
    stopped.send_signal(signal.SIGSTOP)
    if who == "coordinator":
        until_said(job, "waits for the end of the job", (0, 1, 2))
    else:
        until_ended(job.ranks, deadline_s=60.0)
    stopped.send_signal(signal.SIGCONT)
    job.end().assert_finished([0, 1, 2])
    job.assert_nothing_left()
