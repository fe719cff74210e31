"""Real ranks hang and are stopped: found in seconds by their progress pages, with all ranks' stacks in their logs first."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from megatron_recover.observe.verify.check import check
from tests import forks
from tests.cluster.jobs import ROOT, Outcome, Spec, command, run
from tests.cluster.running import FOR_EVER, Start
from tests.cluster.waiting import until_files

pytestmark = pytest.mark.timeout(180)

PATIENT = RecoverConfig(deadline_s=4500.0)
"""Nothing but the detector ends a rank."""
AT_LEISURE = {"stacks_s": 9.0}
"""However busy the machine is, whoever can write stacks has written them before the replica is killed."""
STEP = 100
"""Late enough for the detector to know how long steps take, which last some milliseconds here."""


def strike(kind: FaultKind, replica: int, rank: int, point: FaultPoint, **where: int) -> Fault:
    return Fault(replica=replica, rank=rank, point=point, kind=kind, **({"step": STEP} | where))


def job(tmp_path: Path, *faults: Fault, **settings: object) -> Outcome:
    return run(
        Spec(run_dir=str(tmp_path / "run"), steps=STEP + 8, **({"config": PATIENT, "deadlines": {}} | settings), faults=faults)
    )  # type: ignore[arg-type]


def log_of(tmp_path: Path, replica: int, rank: int) -> str:
    return (tmp_path / "run" / "logs" / f"replica-{replica}-rank-{rank}.log").read_text()


@pytest.mark.parametrize(
    ("rank", "point"), [(0, FaultPoint.BACKWARD), (1, FaultPoint.REDUCE), (0, FaultPoint.IN_VOTE), (1, FaultPoint.OPTIMIZER)]
)
def test_a_rank_that_is_stopped_costs_its_replica_and_no_timeout(tmp_path: Path, rank: int, point: FaultPoint) -> None:
    outcome = job(tmp_path, strike(FaultKind.STOP, 1, rank, point), deadlines=AT_LEISURE)
    outcome.assert_finished([0, 2])
    [silent] = [event for event in outcome.of(trace.RankSilent) if event.verdict != "slow"]
    assert (silent.replica, silent.rank, silent.verdict, silent.state) == (1, rank, "stopped", "T")
    [lost] = [lost for event in outcome.of(trace.Generation) for lost in event.losses]
    assert lost.kind is LossKind.HUNG and "stopped" in lost.detail
    waiting = {(each.replica, each.rank) for each in silent.waiting}
    assert waiting and (1, rank) not in waiting, "the others wait for it, in phases whose length it decides"
    assert {each.phase for each in silent.waiting} <= {"orders", "pipeline", "reduction"}
    [still] = [one for one in check(tmp_path / "run").summary.standstills if one.verdict == "stopped"]
    assert (still.replica, still.rank, still.lost_in) == (1, rank, 2)
    [fault] = outcome.of(trace.Fault)
    own = [each.t for each in outcome.of(trace.MicrobatchStarted) if (each.replica, each.rank) == (1, rank)]
    # By two looks at the clock, between which the agent may have been put off.
    assert own[-1] <= still.last_progress + 0.001 <= (fault.t + silent.t) / 2, "the newest operation that its page shows"
    # Its sibling runs, and writes where it waits; what is stopped can write nothing, and people are told so.
    assert "most recent call first" in log_of(tmp_path, 1, 1 - rank)
    assert "most recent call first" not in log_of(tmp_path, 1, rank)
    assert "its log has no stacks of it" in outcome.output


def test_an_endless_loop_is_fenced_with_its_stacks_in_the_log(tmp_path: Path) -> None:
    outcome = job(tmp_path, strike(FaultKind.LOOP, 1, 0, FaultPoint.BACKWARD, occurrence=1), deadlines=AT_LEISURE)
    outcome.assert_finished([0, 2])
    hung = [event for event in outcome.of(trace.RankSilent) if event.verdict == "hung"]
    assert [(event.replica, event.rank, event.phase, event.label) for event in hung] == [
        (1, 0, "backward", f"train {STEP + 1}")
    ]
    [lost] = [lost for event in outcome.of(trace.Generation) for lost in event.losses]
    assert lost.kind is LossKind.HUNG and "not all of its ranks wrote" not in lost.detail
    stacks = log_of(tmp_path, 1, 0)
    assert 'faults.py", line' in stacks and 'toy.py", line' in stacks and "recover-control" not in stacks.split("Thread")[0]
    assert stacks.count("most recent call first") >= 2, "the control thread's stack is missing"


def test_a_microbatch_that_hangs_two_replicas_stops_the_job_and_is_named(tmp_path: Path) -> None:
    faults = [strike(FaultKind.LOOP, 0, 0, FaultPoint.FORWARD, microbatch=0)]
    for replica in (1, 2):  # whoever has it next may not have begun the step yet
        for point in (FaultPoint.RECOMPUTE, FaultPoint.FORWARD):
            faults.append(strike(FaultKind.LOOP, replica, 0, point, microbatch=0))
    outcome = job(tmp_path, *faults)
    assert outcome.exit_code == ExitCode.POISONED_MICROBATCH, outcome.output
    assert f"computing microbatch 0 of train {STEP + 1}" in outcome.output
    outcome.assert_exactly_once()


def test_the_last_replica_is_named_when_it_hangs_and_is_not_ended(tmp_path: Path) -> None:
    """That it is ended after the deadline is shown on a virtual clock (`tests/core/test_detector.py`)."""
    loop = strike(FaultKind.LOOP, 0, 0, FaultPoint.FORWARD, occurrence=1)
    spec = Spec(run_dir=str(tmp_path / "run"), steps=STEP + 8, replicas=1, config=PATIENT, deadlines={}, faults=(loop,))
    events = tmp_path / "run" / trace.EVENTS_FILE
    with open(tmp_path / "output", "wb") as output:
        launcher = forks.start(command(spec), cwd=ROOT, environment=os.environ, output=output.fileno())
    try:

        def is_named() -> bool:
            return events.exists() and b'"verdict":"hung"' in events.read_bytes()

        until_files(is_named, "the hang in the trace", tmp_path / "run")
        until_files(lambda: "most recent call first" in log_of(tmp_path, 0, 0), "stacks", tmp_path / "run" / "logs")
        log = tmp_path / "run" / "launcher.log"
        until_files(lambda: "hung for" in log.read_text(), "the line about it", tmp_path / "run")
        assert f"({tmp_path / 'run' / 'logs' / 'replica-0-rank-0.log'})" in log.read_text()
        assert re.search(r"waited for until \d\d:\d\d:\d\d at the latest \(--recover-deadline-s ", log.read_text())
        assert launcher.poll() is None
        names = {trace.name_of(event) for _, event in trace.read(events)}
        assert "rank_silent" in names and not names & {"fenced", "failure", "stopping"}
    finally:
        launcher.kill()
        launcher.wait()


def test_a_rank_that_goes_on_after_it_was_stopped_is_recorded_as_such(start: Start, tmp_path: Path) -> None:
    """With one replica left nobody is fenced, so the rank may go on."""
    job = start(Spec(run_dir=str(tmp_path / "run"), steps=FOR_EVER, replicas=1, config=PATIENT, deadlines={}))
    events = tmp_path / "run" / trace.EVENTS_FILE
    victim = job.ranks[-1]
    victim.send_signal(signal.SIGSTOP)
    job.until(lambda: b'"verdict":"stopped"' in events.read_bytes(), "the stop in the trace")
    assert b'"event":"rank_moved"' not in events.read_bytes()
    victim.send_signal(signal.SIGCONT)
    job.until(lambda: b'"event":"rank_moved"' in events.read_bytes(), "the end of the stop in the trace")
    job.launcher.send_signal(signal.SIGTERM)
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    [still] = [one for one in check(tmp_path / "run").summary.standstills if one.verdict == "stopped"]
    [silent] = [event for event in outcome.of(trace.RankSilent) if event.verdict == "stopped"]
    [moved] = [event for event in outcome.of(trace.RankMoved) if (event.replica, event.rank) == (still.replica, still.rank)]
    assert still.outcome == "went on by itself" and silent.t < (still.end or 0.0) <= moved.t
