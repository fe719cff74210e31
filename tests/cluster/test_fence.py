"""A fence strikes the whole process group of a rank at once, whoever is busy or stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.output import create
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
