"""How toy jobs end: exit codes, signals, and that nothing is ever left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.output import create
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import ROOT, SUMS, Spec, command, run
from tests.cluster.running import FOR_EVER, Start
from tests.cluster.waiting import until_ended, until_files, until_readable

pytestmark = pytest.mark.timeout(180)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def spec(tmp_path: Path, **fields) -> Spec:  # noqa: ANN003
    return Spec(run_dir=str(tmp_path / "run"), **fields)


def raises(replica: int, microbatch: int, point: FaultPoint = FaultPoint.FORWARD) -> Fault:
    return Fault(replica=replica, rank=0, point=point, step=1, microbatch=microbatch, kind=FaultKind.RAISE)


def test_an_exception_costs_one_replica(tmp_path: Path) -> None:
    run(spec(tmp_path, faults=(raises(0, 0),))).assert_finished([1, 2])


@pytest.mark.parametrize("num_arguments", [141, 229, 1000])
def test_a_long_command_line_reaches_the_ranks(tmp_path: Path, num_arguments: int) -> None:
    """With 141 KB of it the fork server died of a message that was cut, with 229 KB the launcher could not send it."""
    outcome = run(spec(tmp_path, num_arguments=num_arguments, replicas=2, ranks=1, steps=2))
    outcome.assert_finished([0, 1])


def test_a_microbatch_that_raises_twice_stops_the_job_and_is_named(tmp_path: Path) -> None:
    points = (FaultPoint.RECOMPUTE, FaultPoint.FORWARD)  # whoever has it next may not have begun the step yet
    again = tuple(raises(replica, 0, point) for replica in (1, 2) for point in points)
    outcome = run(spec(tmp_path, faults=(raises(0, 0), *again)))
    assert outcome.exit_code == ExitCode.POISONED_MICROBATCH
    assert "computing microbatch 0 of train 2" in outcome.output
    assert len(outcome.of(trace.Fault)) == 2, "it was dealt a third time"
    # The third one was told to stop, perhaps before it came to apply the step before.
    struck = {event.replica for event in outcome.of(trace.Fault)}
    assert all(len(outcome.sums(replica, 0)) in ((1,) if replica in struck else (0, 1)) for replica in range(3))
    outcome.assert_exactly_once()


def test_below_min_replicas_the_step_is_finished_and_the_job_ends(tmp_path: Path) -> None:
    config = RecoverConfig(min_replicas=3)
    kill = Fault(replica=1, rank=1, point=FaultPoint.BACKWARD, step=2)
    outcome = run(spec(tmp_path, steps=1000, config=config, faults=(kill,)))
    assert outcome.exit_code == ExitCode.TOO_FEW_REPLICAS
    outcome.assert_exactly_once()
    lines = [outcome.sums(replica, rank) for replica in (0, 2) for rank in range(2)]
    assert len({len(each) for each in lines}) == 1 and len(lines[0]) >= 3, "the survivors did not end at the same step"


def test_all_replicas_die(tmp_path: Path) -> None:
    faults = tuple(Fault(replica=replica, rank=0, point=FaultPoint.BACKWARD, step=1) for replica in range(3))
    outcome = run(spec(tmp_path, faults=faults))
    assert outcome.exit_code == ExitCode.NO_REPLICA_LEFT
    assert "no replica is left" in outcome.output


@pytest.mark.parametrize(("line", "code"), [("raise RuntimeError('a defect')", 1), ("import sys; sys.exit(2)", 2)])
def test_a_script_that_fails_everywhere_at_start_up(tmp_path: Path, line: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('why')\n{line}\n")
    outcome = run(spec(tmp_path, script=str(script)))
    assert outcome.exit_code == code
    assert ("a defect" if code == 1 else "why") in outcome.output


def test_a_script_that_never_joins_is_told_what_it_should_call(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('trained alone')\n")
    outcome = run(spec(tmp_path, script=str(script)))
    assert outcome.exit_code == ExitCode.BAD_INPUT
    remedy = "call parse_and_validate_args and pretrain of megatron.training, as upstream's pretrain_gpt.py does"
    assert f"{script} never called Megatron's pretrain; {remedy}" in outcome.output
    assert not list((tmp_path / "run" / "logs").glob("replica-*")), "a rank was started"


def test_what_the_dry_run_refuses_starts_no_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print('noise\\nbad arguments: the first is wrong\\nbad arguments: the second too\\nmore noise')\n"
        "sys.exit(2 if '\"dry_run\":true' in os.environ['MEGATRON_RECOVER_CONTEXT'] else 1)\n"
    )
    outcome = run(spec(tmp_path, script=str(script)))
    assert outcome.exit_code == ExitCode.BAD_INPUT
    assert [line for line in outcome.output.splitlines() if line.startswith("megatron-recover run: ")] == [
        "megatron-recover run: the first is wrong",
        "megatron-recover run: the second too",
    ]
    assert [path.name for path in (tmp_path / "run" / "logs").glob("*.log") if path.name.startswith("replica")] == []


def test_what_the_dry_run_has_for_the_console_is_shown_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print('noise\\nfor the console: training on the moon\\nmore noise')\n"
        "sys.exit(100 if '\"dry_run\":true' in os.environ['MEGATRON_RECOVER_CONTEXT'] else 2)\n"
    )
    outcome = run(spec(tmp_path, script=str(script)))
    assert outcome.exit_code == ExitCode.BAD_INPUT
    assert len([line for line in outcome.output.splitlines() if line.endswith("] megatron-recover: training on the moon")]) == 1
    assert "noise" not in outcome.output.replace("more noise", ""), "only that line is shown, and the last as the refusal"


def test_a_signal_ends_a_dry_run(tmp_path: Path) -> None:
    script, begun = tmp_path / "script.py", tmp_path / "begun"
    script.write_text(f"import signal\nopen({str(begun)!r}, 'w').close()\nwhile True: signal.pause()\n")
    with open(tmp_path / "output", "wb") as output:
        launcher = subprocess.Popen(command(spec(tmp_path, script=str(script))), cwd=ROOT, stdout=output, stderr=output)
    try:
        until_files(begun.exists, "the dry run", tmp_path)
        launcher.terminate()
        assert launcher.wait(90) == ExitCode.INTERRUPTED
    finally:
        launcher.kill()


def test_a_rank_that_ends_too_early_with_exit_code_0_is_a_loss(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    toy = str(ROOT / "tests" / "cluster" / "toy.py")
    script.write_text(
        "import os, runpy, sys\n"
        "if '\"replica\":1,\"rank\":1' in os.environ['MEGATRON_RECOVER_CONTEXT']: sys.exit(0)\n"
        f"runpy.run_path({toy!r}, run_name='__main__')\n"
    )
    run(spec(tmp_path, script=str(script))).assert_finished([0, 2])


@pytest.mark.parametrize("rank", [0, 1])
def test_inv_8_a_rank_that_is_stopped_after_the_last_commit_does_not_hang_the_job(tmp_path: Path, rank: int) -> None:
    stop = Fault(replica=1, rank=rank, point=FaultPoint.OPTIMIZER, step=3, kind=FaultKind.STOP)
    job = spec(tmp_path, deadlines=dict.fromkeys((*SUMS, "stall_s", "finish_s", "follow_s"), 5.0), faults=(stop,))
    outcome = run(job)
    assert outcome.exit_code == 0, outcome.output
    outcome.assert_exactly_once()
    assert [event.replica for event in outcome.of(trace.Fenced)] == [1]
    verdict = check(job.run_dir)
    assert verdict.holds, describe(verdict)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_ends_all_replicas_at_the_same_step(start: Start, tmp_path: Path, number: int) -> None:
    job = start(spec(tmp_path, steps=FOR_EVER))
    job.launcher.send_signal(number)
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    outcome.assert_exactly_once()
    lengths = {len(outcome.sums(replica, rank)) for replica in range(3) for rank in range(2)}
    assert len(lengths) == 1, f"the ranks ended at different steps: {lengths}"
    job.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_every_process_of_the_job_is_one_to_the_launcher(start: Start, tmp_path: Path, number: int) -> None:
    """As Slurm and systemd send it."""
    job = start(spec(tmp_path, steps=FOR_EVER))
    for each in job.processes:
        each.send_signal(number)
    job.launcher.send_signal(number)
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    assert len({len(outcome.sums(replica, rank)) for replica in range(3) for rank in range(2)}) == 1
    job.assert_nothing_left()


def test_a_job_whose_hangup_is_ignored_goes_on(start: Start, tmp_path: Path) -> None:
    """As nohup starts it."""
    job = start(spec(tmp_path, steps=FOR_EVER), hangup=signal.SIG_IGN)
    job.launcher.send_signal(signal.SIGHUP)
    num = job.num_applied()
    job.until(lambda: job.num_applied() > num + 20, "more steps")
    assert "SIGHUP" not in job.output.read_text()
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end().exit_code == ExitCode.INTERRUPTED


def test_a_fork_server_that_is_stopped_is_continued_and_holds_nothing_up(start: Start, tmp_path: Path) -> None:
    job = start(spec(tmp_path, steps=FOR_EVER))
    os.kill(job.server.pid, signal.SIGSTOP)
    job.until(lambda: "somebody stopped the fork server" in job.output.read_text(), "a word about it")
    job.ranks[0].kill()
    job.until(lambda: '"fenced"' in (Path(job.spec.run_dir) / "events.jsonl").read_text(), "the fence")
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end().exit_code == ExitCode.INTERRUPTED
    job.assert_nothing_left()


@pytest.mark.parametrize("whom", ["launcher", "fork server", "both", "launcher of a stopped fork server"])
def test_nothing_is_left_when_a_parent_is_killed(start: Start, tmp_path: Path, whom: str) -> None:
    job = start(spec(tmp_path, steps=FOR_EVER))
    if whom in ("both", "launcher of a stopped fork server"):
        os.kill(job.launcher.pid, signal.SIGSTOP)  # it must not see what happens to the other
    if whom in ("fork server", "both"):
        os.kill(job.server.pid, signal.SIGKILL)
    elif whom == "launcher of a stopped fork server":
        os.kill(job.server.pid, signal.SIGSTOP)
    if whom != "fork server":
        os.kill(job.launcher.pid, signal.SIGKILL)
    code = job.launcher.wait(90)
    job.assert_nothing_left()
    if whom == "fork server":
        assert code == ExitCode.FAILED and "the fork server has ended" in job.output.read_text()


def test_a_rank_killed_from_outside_is_seen_and_fenced(start: Start, tmp_path: Path) -> None:
    # The rest of a broken replica ends by itself after the follow timeout, so that is put off: here it has to be killed.
    job = start(spec(tmp_path, steps=FOR_EVER, deadlines={"follow_s": 300.0}))
    ranks = job.ranks
    names = {each.name(): each for each in ranks}
    assert sorted(names) == [f"replica-{replica}.{rank}" for replica in range(3) for rank in range(2)], "told apart in ps"
    names["replica-1.1"].kill()
    job.until(lambda: '"fenced"' in (Path(job.spec.run_dir) / "events.jsonl").read_text(), "the fence")
    reached = job.num_applied()
    job.until(lambda: job.num_applied() > reached, "training to go on")
    assert sum(map(is_alive, ranks)) == 4
    job.launcher.send_signal(signal.SIGTERM)
    outcome = job.end()
    [failure] = outcome.of(trace.Failure)
    assert (failure.replica, failure.rank, failure.cause) == (1, 1, "SIGKILL")
    outcome.assert_exactly_once()


def test_a_recorder_that_is_killed_costs_nothing(start: Start, tmp_path: Path) -> None:
    # At this pace the rings have room for what happens until the next recorder is there, however long its start takes.
    job = start(spec(tmp_path, steps=FOR_EVER, trace_file_bytes=50_000, pace_s=0.01))
    job.recorder.kill()
    job.until(lambda: "the recorder ended by SIGKILL: a new one continues the trace" in job.output.read_text(), "a word")
    job.ranks[-1].kill()  # what happens now is recorded
    reached = job.num_applied()
    job.until(lambda: job.num_applied() > reached + 20, "training to go on")
    job.launcher.send_signal(signal.SIGTERM)
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED and len(outcome.of(trace.Failure)) == 1
    assert outcome.of(trace.Gap) == [] and list(Path(job.spec.run_dir).glob("events.0001.jsonl*"))
    verdict = check(job.spec.run_dir)
    assert verdict.holds, describe(verdict)
    job.assert_nothing_left()


@pytest.mark.parametrize("level", ["steps", "faults"])
def test_a_level_is_that_of_all_processes_and_is_told(level: trace.Level, tmp_path: Path) -> None:
    kill = Fault(replica=1, rank=1, point=FaultPoint.BACKWARD, step=2)
    outcome = run(spec(tmp_path, faults=(kill,), trace_level=level))
    assert outcome.exit_code == 0 and outcome.of(trace.RunStarted)[0].level == level
    outcome.assert_exactly_once()
    assert not {type(event) for event in outcome.events} & trace.LEFT_OUT[level]
    assert len(outcome.of(trace.Committed)) == (0 if level == "faults" else 2 * outcome.spec.steps + 2)
    assert len(outcome.of(trace.Fault)) == len(outcome.of(trace.Failure)) == len(outcome.of(trace.Fenced)) == 1
    assert len(outcome.of(trace.Status)) >= 2 and len(outcome.of(trace.Recovery)) > 0


def test_children_of_a_rank_die_with_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"print(child.pid, file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    agent = Agent(preload=(), environment=dict(os.environ), output=create(tmp_path / "log"))
    try:
        until_readable(agent.fileno(), agent.is_ready, "the fork server")
        agent.spawn(0, 0, argv=(str(script),), environment={}, output=create(tmp_path / "rank.log"))
        ends = []
        until_readable(
            agent.fileno(), lambda: ends.extend(agent.poll()) or (ends and agent.is_fenced(0)), "the end of the rank"
        )
        assert [(end.replica, end.rank, end.cause) for end in ends] == [(0, 0, "SIGKILL")]
        child = int((tmp_path / "pid").read_text())
        with contextlib.suppress(psutil.NoSuchProcess):
            until_ended([psutil.Process(child)])
    finally:
        agent.close()


def test_what_stands_still_is_told_from_what_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal\n"
        f"open({str(gate)!r}).read()\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        f"pathlib.Path({str(tmp_path / 'went-on')!r}).touch()\n"
        f"open({str(gate)!r}).read()\n"
    )
    agent = Agent(preload=(), environment=dict(os.environ), output=create(tmp_path / "log"))
    try:
        until_readable(agent.fileno(), agent.is_ready, "the fork server")
        assert not agent.wake_server()
        os.kill(agent._server.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, agent._server.pid, os.WSTOPPED | os.WNOWAIT)
        assert agent.wake_server()
        os.waitid(os.P_PID, agent._server.pid, os.WCONTINUED | os.WNOWAIT)
        assert not agent.wake_server()

        agent.spawn(0, 0, argv=(str(script),), environment={}, output=create(tmp_path / "rank.log"))
        with open(gate, "w"):  # it has got there
            assert not agent.is_stopped(0, 0)
        end = time.monotonic() + 40
        while not agent.is_stopped(0, 0):
            assert time.monotonic() < end
        agent.thaw(0, 0)
        until_files((tmp_path / "went-on").exists, "the rank to go on", tmp_path)
        assert not agent.is_stopped(0, 0)
    finally:
        agent.close()


def test_a_rank_inherits_what_is_handed_down_to_it_and_its_children_do_not(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "from megatron_recover.config import inherited_descriptor\n"
        "key = inherited_descriptor('key')\n"
        "os.write(inherited_descriptor('answer'), os.pread(key, 100, 0))\n"
        "sys.exit(subprocess.call(['test', '-e', f'/proc/self/fd/{key}'], close_fds=False) == 0)\n"
    )
    key, answer = os.memfd_create("key"), os.memfd_create("answer")
    os.write(key, b"secret")
    output = create(tmp_path / "rank.log")
    agent = Agent(preload=(), environment=dict(os.environ), output=create(tmp_path / "log"))
    try:
        until_readable(agent.fileno(), agent.is_ready, "the fork server")
        handed_down = {"key": key, "answer": answer}
        agent.spawn(0, 0, argv=(str(script),), environment={}, output=output, descriptors=handed_down)
        ends = []
        until_readable(agent.fileno(), lambda: ends.extend(agent.poll()) or ends, "the end of the rank")
        assert [end.cause for end in ends] == ["exit code 0"], output.end()
        assert os.pread(answer, 100, 0) == b"secret"
    finally:
        agent.close()
        os.close(key)
        os.close(answer)


def test_a_rank_that_a_signal_without_a_name_ends_costs_its_replica_alone(start: Start, tmp_path: Path) -> None:
    """Python has no name for most real-time signals: the launcher ended by a ValueError, and all with it."""
    job = start(spec(tmp_path, steps=FOR_EVER, replicas=2, ranks=1))
    number = signal.SIGRTMIN + 6
    [victim] = [each for each in job.ranks if each.name() == "replica-1.0"]
    victim.send_signal(number)
    events = tmp_path / "run" / trace.EVENTS_FILE
    job.until(lambda: f'"cause":"signal {number}"'.encode() in events.read_bytes(), "the end of the rank in the trace")
    applied = job.num_applied()
    job.until(lambda: job.num_applied() > applied + 5, "steps of the replica that is left")
    job.launcher.send_signal(signal.SIGTERM)
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    [lost] = [lost for event in outcome.of(trace.Generation) for lost in event.losses]
    assert (lost.replica, lost.kind, lost.detail) == (1, LossKind.PROCESS_ENDED, f"rank 0: signal {number}")
