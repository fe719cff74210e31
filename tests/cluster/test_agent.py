"""Agent and fork server that run out of descriptors end the run with the remedy, not by an error of their own."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_recover.cluster import forkserver
from megatron_recover.cluster.agent import Agent, AgentLost

pytestmark = pytest.mark.timeout(30)


class Served:
    """An agent whose fork server the test plays."""

    def __init__(self, tmp_path: Path) -> None:
        self.agent = Agent.__new__(Agent)
        self.agent._control, self.server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.agent._log, self.agent._processes = tmp_path / "log", {}
        self.agent._decode = msgspec.json.Decoder(forkserver.Reply).decode


@contextlib.contextmanager
def descriptors_left(num_left: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gaps = []
    try:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        while not gaps or gaps[-1] < highest:
            gaps.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1] + 1 + num_left, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in gaps:
            os.close(each)


@pytest.mark.parametrize("num_left", [0, 1], ids=["for the pidfd", "for the stat of the process"])
def test_a_launcher_without_a_descriptor_for_a_rank_says_so(tmp_path: Path, num_left: int) -> None:
    """The kernel cuts the descriptor off, and says nothing but so in a flag; the launcher ended by a ValueError."""
    served, pid = Served(tmp_path), os.getpid()
    pidfd = os.pidfd_open(pid)
    started = forkserver.Started(replica=1, rank=2, pid=pid)
    socket.send_fds(served.server, [msgspec.json.encode(started)], [pidfd])
    with descriptors_left(num_left), pytest.raises(AgentLost, match="ulimit -n"):
        served.agent._receive(deadline_s=5.0)
    assert served.agent._processes == {}
    for each in (served.server, served.agent._control):
        each.close()
    os.close(pidfd)


def test_a_rank_whose_log_finds_no_descriptor_is_not_started_and_it_is_said(tmp_path: Path) -> None:
    served = Served(tmp_path)
    with descriptors_left(0), pytest.raises(AgentLost, match="ulimit -n"):
        served.agent.spawn(0, 0, argv=("train.py",), environment={}, log=tmp_path / "rank.log")
    for each in (served.server, served.agent._control):
        each.close()


def test_a_fork_server_without_descriptors_for_a_rank_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = forkserver._Server(theirs, 1.0)
    spawn = forkserver.Spawn(replica=0, rank=0, argv=("train.py",), environment={}, descriptors=("key",))
    with open(os.devnull) as null, ours, theirs:
        socket.send_fds(ours, [msgspec.json.encode(spawn)], [null.fileno(), null.fileno()])
        with descriptors_left(1):
            assert not server._serve()
    assert "ulimit -n" in capfd.readouterr().err
    server._selector.close()
