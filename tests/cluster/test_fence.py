"""A fence strikes the whole process group of a rank at once, whoever is busy or stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.fences import Fences
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.output import create
from megatron_recover.cluster.seats import Seats
from megatron_recover.cluster.starting import Starting
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane.node_messages import FenceDone, FenceReplica, Launch, NodeLaunched
from megatron_recover.control_plane.wire import Message
from tests.cluster.waiting import until_ended, until_files, until_readable

pytestmark = pytest.mark.timeout(150)


def test_a_fence_kills_the_children_of_a_rank_while_the_fork_server_stands_still(tmp_path: Path) -> None:
    """A19: the group was killed by the fork server, after it had reaped the rank."""
    script, child_file = tmp_path / "script.py", tmp_path / "child"
    script.write_text(
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        f"pathlib.Path({str(child_file)!r}).write_text(f'{{child.pid}}.')\n"
        "child.wait()\n"
    )
    agent = Agent(preload=(), environment=dict(os.environ), output=create(tmp_path / "log"))
    try:
        until_readable(agent.fileno(), agent.is_ready, "the fork server")
        agent.spawn(0, 0, argv=(str(script),), environment={}, output=create(tmp_path / "rank.log"))
        until_files(lambda: child_file.exists() and child_file.read_text().endswith("."), "the child", tmp_path)
        child = psutil.Process(int(child_file.read_text()[:-1]))
        os.kill(agent._server.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, agent._server.pid, os.WSTOPPED | os.WNOWAIT)
        agent.fence(0)
        until_ended([child])
        assert not agent.is_fenced(0), "the server cannot have confirmed it"
        assert agent.wake_server()
        until_readable(agent.fileno(), lambda: (agent.poll(), agent.is_fenced(0))[1], "the fence")
    finally:
        agent.close()


def test_a_replica_that_is_fenced_together_with_the_launch_is_never_started(tmp_path: Path) -> None:
    """Another node with ranks of it was lost meanwhile. A fence that finds no process kills nothing."""
    job = Job(argv=("train.py",), num_replicas=2, layout=trace.Layout(tp=1, pp=2), config=RecoverConfig(), run_dir=tmp_path)
    started: list[int] = []
    sent: list[Message] = []
    recorded: list[trace.Event] = []
    node: Any = SimpleNamespace(
        spawn=lambda replica, rank, **_: started.append(replica), fence=lambda replica: None, undying=list,
        is_fenced=lambda replica, but: replica not in started,
    )  # fmt: skip
    recording: Any = SimpleNamespace(
        descriptors=lambda replica, rank: {}, output_of_rank=lambda replica, rank, place: None, record=recorded.append
    )
    unused: Any = None
    launcher: Any = Launcher.__new__(Launcher)
    launcher._loop = SimpleNamespace(waited_elsewhere=lambda: None)
    launcher._joined = SimpleNamespace(membership=SimpleNamespace(send=sent.append))
    launcher._fences = Fences(job, Seats(job), node, recording, loop=unused, deadlines=unused, send=sent.append)
    launcher._starting = Starting(
        job, Seats(job), node, recording, coordinator=lambda: "", handed_down={}, started=lambda replica, rank: None,
        started_at=0.0, patience_s=1.0,
    )  # fmt: skip
    leaders = launcher._starting.listen().leaders
    for message in (Launch(leaders), FenceReplica(1)):
        launcher._from_coordinator(message)
    launcher._spawn_all()
    launcher._fences.follow()
    assert started == [0, 0] and sent == [NodeLaunched(), FenceDone(1)]
    assert recorded == [trace.Fenced(replica=1, ranks=(0, 1))]
    assert not launcher._starting._listeners, "its leader's port would answer"
