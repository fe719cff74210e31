"""The state of a job gets to its file whatever the size of the job, and whatever becomes of the recorder."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.cluster import recorder_messages as messages
from megatron_recover.cluster.status import Answer, NodeStatus, Status, read
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
