"""The state of a job gets to its file whatever the size of the job, and whatever becomes of the recorder."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.cluster import recorder_messages as messages
from megatron_recover.cluster.status import Answer, NodeStatus, Seen, Status, StatusKeeper, read, write
from tests.recording.runs import Run
from tests.recording.test_recorder import num_deaths

pytestmark = pytest.mark.timeout(150)


def status(step: int = 1, *, num_nodes: int = 1, exit_code: int | None = None, answers: int = 0) -> Status:
    """The state of a job with 8 replicas on each node."""
    nodes = tuple(
        NodeStatus(each, f"node-{each:05d}.cluster.example", "here", tuple(range(8 * each, 8 * each + 8)))
        for each in range(num_nodes)
    )  # fmt: skip
    return Status(
        at=1.0, replicas=8 * num_nodes, roster=tuple(range(8 * num_nodes)), generation=1, step=step, losses=0, saved=None,
        nodes=nodes, exit_code=exit_code, answers=tuple(Answer(str(each), "no" * 2048) for each in range(answers)),
    )  # fmt: skip


def told(run: Run) -> str:
    """The launcher's log."""
    return log.read_text() if (log := run.run_dir / "launcher.log").exists() else ""


def test_the_state_of_1024_nodes_is_written_and_everything_behind_it_arrives(record: Callable[..., Run]) -> None:
    run = record()
    large = status(num_nodes=1024, answers=16)
    assert len(msgspec.json.encode(large)) > 210_000, "more than a socket takes at once, as it is by default"
    run.recording.keep(large)
    log = run.rank(0)
    log.record(trace.Thawed(replica=0, rank=0))
    run.recording.says("a line behind it")
    run.until(lambda: (now := read(run.run_dir)) and (now.nodes, now.answers) == (large.nodes, large.answers), "the state")
    last = status(2, num_nodes=1024, exit_code=0)
    run.recording.keep(last)
    events = run.finish()
    assert isinstance(events[-1], trace.RunFinished) and any(isinstance(each, trace.Thawed) for each in events)
    assert (now := read(run.run_dir)) is not None and (now.exit_code, now.step, now.nodes) == (0, 2, last.nodes)
    assert "a line behind it" in told(run) and num_deaths(run.run_dir) == 0


def test_a_recorder_that_is_stopped_lets_one_state_wait_and_no_line_more_than_before(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_recover.cluster.recording._MAX_WAITING", 20)
    run = record()
    run.until_it_records()
    run.stop()
    for number in range(2000):
        run.recording.keep(status(number))
        run.recording.says(f"line {number}")
    assert len(run.recording._outbox) <= 20
    os.kill(run.pid, signal.SIGCONT)
    run.until(lambda: (now := read(run.run_dir)) and now.step == 1999, "the newest state")


def _trained(run: Run, iteration: int) -> None:
    """Have the run committed so many iterations, of 4000."""
    run.recording.record(
        trace.RunStarted(
            replicas=8, layout=trace.Layout(tp=1, pp=1), determinism="fast", seed=0,
            argv=("script.py", "--train-iters", "4000"),
        )
    )  # fmt: skip
    run.recording.record(trace.Generation(generation=1, roster=tuple(range(8)), reason="start"))
    log = run.rank(0)
    log.record(_committed(iteration))
    run.recording.keep(_now())
    run.until(lambda: (now := read(run.run_dir)) and now.iteration == iteration, "the iteration in the state")


def _now(step: int = 1, exit_code: int | None = None) -> Status:
    return msgspec.structs.replace(status(step, exit_code=exit_code), at=time.time())


def _committed(iteration: int) -> trace.Committed:
    return trace.Committed(
        replica=0, generation=1, step=iteration - 1, label=f"train {iteration}", digest="", adopted=False, versions=()
    )  # fmt: skip


def _follow(run: Run) -> None:
    """Kill the recorder, and return when another one has written a state."""
    former = run.pid
    os.kill(former, signal.SIGKILL)
    run.until(lambda: run.recording._process is not None and run.pid != former, "another recorder")
    run.recording.keep(_now(1000))
    run.until(lambda: (now := read(run.run_dir)) and now.step == 1000, "the state by the other recorder")


def test_the_iterations_of_a_run_are_known_to_the_recorder_that_follows_a_dead_one(record: Callable[..., Run]) -> None:
    run = record(num_replicas=8)
    _trained(run, 118)
    for _ in range(2):
        _follow(run)
        assert (now := read(run.run_dir)) is not None and (now.iteration, now.iterations) == (118, 4000)
    log = run.rank(1)
    log.record(_committed(120))
    run.until(lambda: (now := read(run.run_dir)) and now.iteration == 120, "the next iteration")
    run.finish()
    assert (now := read(run.run_dir)) is not None and (now.iteration, now.iterations) == (120, 4000)


def test_a_recorder_that_follows_at_the_end_keeps_the_iterations(record: Callable[..., Run]) -> None:
    """It has no time for a second look."""
    run = record(num_replicas=8)
    _trained(run, 118)
    os.kill(run.pid, signal.SIGKILL)
    run.recording.keep(_now(1000, exit_code=0))
    run.finish()
    now = read(run.run_dir)
    assert now is not None and (now.exit_code, now.iteration, now.iterations) == (0, 118, 4000)


def test_the_state_of_another_job_in_the_folder_says_nothing_of_this_one(tmp_path: Path) -> None:
    """Somebody has copied it there. Its time is before the start of this job."""
    seen = Seen(step=0, iteration=None, iterations=None, saved=None, checkpoint="")
    for since, sees, expected in ((0.5, True, 118), (1.5, True, None), (0.5, False, None)):
        write(tmp_path, msgspec.structs.replace(status(7), iteration=118))
        keeper = StatusKeeper(tmp_path, lambda request: None, since=since)
        keeper.see(msgspec.structs.replace(seen, sees_iterations=sees))
        keeper.take(status(1))
        keeper.finish(30)
        now = read(tmp_path)
        assert now is not None and now.iteration == expected


def test_a_new_recorder_gets_the_newest_state_also_the_one_with_the_exit_code(record: Callable[..., Run]) -> None:
    run = record()
    run.until_it_records()
    run.stop()
    run.recording.keep(status(exit_code=13))
    run.recording.poll()
    assert run.recording._is_status_sent
    os.kill(run.pid, signal.SIGKILL)
    run.finish()
    assert (now := read(run.run_dir)) is not None and now.exit_code == 13


def test_a_generation_of_a_large_job_gets_to_the_recorder_of_another_node(
    record: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = record(num_replicas=20_000)
    new = trace.Generation(generation=2, roster=tuple(range(20_000)), losses=(), reason="a reason of its own")
    run.recording._outbox.append(messages.Announced(new))
    run.until(lambda: "a reason of its own" in told(run), "the generation")
    assert num_deaths(run.run_dir) == 0
    capfd.readouterr()  # the line has 20,000 numbers


def test_a_message_that_no_socket_takes_holds_up_no_other(record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = record()
    run.until_it_records()
    assert run.recording._control is not None
    run.recording._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5000)
    monkeypatch.setattr(messages, "MAX_PACKET_BYTES", 2**20)
    run.recording.says("x" * 8000 * 2)
    run.recording._outbox.append(messages.Says("y" * 60_000, 0.0))
    run.recording.says("the next one")
    run.until(lambda: "the next one" in told(run), "the line behind it")
