"""Agent and fork server that run out of descriptors, or lose each other, end the run as they should, not by an error."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster import agent, forkserver
from megatron_recover.cluster import forkserver_messages as messages
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.node import NodeLost, ProcessEnd
from megatron_recover.cluster.output import create
from megatron_recover.cluster.starting import Starting
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane import wire
from megatron_recover.deadlines import Deadlines
from tests.cluster.waiting import until_ended, until_readable

pytestmark = pytest.mark.timeout(240)


class Served:
    """An agent whose fork server the test plays."""

    def __init__(self, tmp_path: Path) -> None:
        self.agent = Agent.__new__(Agent)
        self.agent._control, self.server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.agent._output, self.agent._processes = create(tmp_path / "log"), {}
        self.agent._asked, self.agent._fenced = deque([(1, 2)]), set()
        self.agent._answered, self.agent._unwatched, self.agent._pending = None, set(), deque()
        self.agent._pages, self.agent._deadlines = {}, Deadlines.of()
        self.agent._waits = lambda: None
        self.agent._decode = msgspec.json.Decoder(messages.Reply).decode


@contextlib.contextmanager
def descriptors_left(num_left: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gaps = []
    gc.collect()  # what a test before has left behind closes its descriptors now, and not meanwhile
    gc.disable()
    try:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        while not gaps or gaps[-1] < highest:
            gaps.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1] + 1 + num_left, hard))
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in gaps:
            os.close(each)


@pytest.mark.parametrize("num_left", [0, 1], ids=["for the pidfd", "for the stat of the process"])
def test_a_launcher_without_a_descriptor_for_a_rank_says_so(tmp_path: Path, num_left: int) -> None:
    """The kernel cuts the descriptor off, and says nothing but so in a flag; the launcher ended by a ValueError."""
    served, pid = Served(tmp_path), os.getpid()
    pidfd = os.pidfd_open(pid)
    started = messages.Started(replica=1, rank=2, pid=pid)
    socket.send_fds(served.server, [msgspec.json.encode(started)], [pidfd])
    with descriptors_left(num_left), pytest.raises(NodeLost, match="ulimit -n"):
        served.agent._receive(deadline_s=5.0)
    assert served.agent._processes == {}
    assert served.agent.lives(1, 2) and not served.agent.is_fenced(1), "its slot is not free"
    served.server.send(msgspec.json.encode(messages.Exited(replica=1, rank=2, status=0)))
    assert served.agent.poll() == [] and not served.agent.lives(1, 2) and served.agent.is_fenced(1)
    for each in (served.server, served.agent._control):
        each.close()
    os.close(pidfd)


def test_a_rank_whose_end_is_confirmed_leaves_no_descriptor_however_many_there_were(tmp_path: Path) -> None:
    """Newcomers start and end for days; the launcher had two descriptors for each of their ranks until the end of the run."""
    served, pid, before = Served(tmp_path), os.getpid(), len(os.listdir("/proc/self/fd"))
    for replica in range(20):
        served.agent._asked.append((replica, 0))
        pidfd = os.pidfd_open(pid)
        socket.send_fds(served.server, [msgspec.json.encode(messages.Started(replica=replica, rank=0, pid=pid))], [pidfd])
        os.close(pidfd)
        served.server.send(msgspec.json.encode(messages.Exited(replica=replica, rank=0, status=0)))
        assert [(end.replica, end.status) for end in served.agent.poll()] == [(replica, 0)]
        assert served.agent.state(replica, 0) == "" and served.agent.has_ended(replica, 0)
    assert len(os.listdir("/proc/self/fd")) == before and served.agent.poll() == []
    for each in (served.server, served.agent._control):
        each.close()


def test_a_launcher_shows_that_it_lives_while_the_fork_server_is_slow_to_start_a_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node has healthy members, and is removed after `node_s` of silence: a fork may wait for a disk, or for memory."""
    served, beats = Served(tmp_path), list[float]()
    served.agent._deadlines = msgspec.structs.replace(Deadlines.of(), fork_s=3.5)
    served.agent._waits = lambda: beats.append(time.monotonic())
    monkeypatch.setattr(served.agent, "_request", lambda spawn, descriptors: None)
    monkeypatch.setattr(served.agent, "wake_server", lambda: False)
    with pytest.raises(NodeLost, match="did not start a rank within 3.5 s"):
        served.agent.spawn(4, 0, argv=(), environment={}, output=served.agent._output)
    assert len(beats) >= 2
    for each in (served.server, served.agent._control):
        each.close()


def test_a_late_answer_about_another_rank_is_not_taken_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that took too long was given up; then another rank is started, and both are answered."""
    served, pid = Served(tmp_path), os.getpid()
    monkeypatch.setattr(served.agent, "_request", lambda spawn, descriptors: None)
    for rank in (2, 0):
        pidfd = os.pidfd_open(pid)
        started = messages.Started(replica=1 if rank else 4, rank=rank, pid=pid)
        socket.send_fds(served.server, [msgspec.json.encode(started)], [pidfd])
        os.close(pidfd)
    served.agent.spawn(4, 0, argv=(), environment={}, output=served.agent._output)
    assert set(served.agent._processes) == {(1, 2), (4, 0)} and served.agent.pid(4, 0) == pid
    for process in served.agent._processes.values():
        process.close()
    for each in (served.server, served.agent._control):
        each.close()


def test_the_recorder_inherits_all_descriptors_that_the_system_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has two for each rank, and was started before the limit was raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen: list[tuple[int, int]] = []

    def start(*arguments: object, **named: object) -> None:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        raise InterruptedError

    monkeypatch.setattr("megatron_recover.cluster.launcher.Recording", start)
    job = Job(argv=("train.py",), num_replicas=1, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(), run_dir=tmp_path)
    launcher = Launcher(job)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        with pytest.raises(InterruptedError):
            launcher.run()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        launcher._loop.close()
        os.close(launcher._sealed_key)
    assert seen == [(hard, hard)]


@pytest.mark.parametrize("num_left", [0, 1], ids=["for the store", "for the output"])
def test_a_replica_that_finds_no_descriptor_is_not_started_and_it_is_said(tmp_path: Path, num_left: int) -> None:
    starting = Starting.__new__(Starting)
    starting._job = SimpleNamespace(argv=("train.py",))
    starting._seats = SimpleNamespace(slots=lambda replica: {0: 0}, stands_for=lambda replica, rank: 0)
    starting._leaders, starting._stores, starting.outputs = {0: "127.0.0.1:1"}, {}, {}
    starting._recording = SimpleNamespace(
        descriptors=lambda replica, rank: {}, output_of_rank=lambda replica, rank, place: create(tmp_path / "rank.log")
    )
    starting._handed_down = {}
    starting._node = SimpleNamespace(spawn=lambda *arguments, **others: pytest.fail("it was started"))
    starting._environment = lambda replica, rank, **others: {}
    with wire.listen("127.0.0.1:0") as listening, descriptors_left(num_left), pytest.raises(NodeLost, match="ulimit -n"):
        starting._spawn_replica(0, {"leader": listening})


@pytest.mark.parametrize("num_left", [0, 1, 2])
def test_a_fork_server_without_descriptors_for_a_rank_says_so(num_left: int, capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = forkserver._Server(theirs, 1.0)
    spawn = messages.Spawn(replica=0, rank=0, argv=("train.py",), environment={}, descriptors=("key",))
    request = messages.write_request(spawn)
    with open(os.devnull) as null, ours, theirs:
        socket.send_fds(ours, [messages.REQUEST], [request, null.fileno(), null.fileno()])
        with descriptors_left(num_left):
            assert not server._serve()
    os.close(request)
    assert "ulimit -n" in capfd.readouterr().err
    server._selector.close()


def open_files() -> set[tuple[str, str]]:
    """Descriptors of this process, each with what it is open on. What other tests have left may be closed at any time."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EAGAIN, "the fork server could not start a rank (Resource temporarily unavailable); raise `ulimit -u`"),
        (errno.EMFILE, "the fork server could not start a rank (Too many open files); raise `ulimit -n`"),
        (errno.ENOMEM, "the fork server could not start a rank (Cannot allocate memory); free memory"),
    ],
)
@pytest.mark.parametrize("how", ["fork", "warm"])
def test_a_rank_for_which_no_process_can_be_started_is_named_and_the_server_stays(
    how: str, number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path)
    served.agent._pages, served.agent._pending, served.agent._deadlines = {}, deque(), Deadlines.of()
    served.agent._asked.clear()
    server = forkserver._Server(served.server, 1.0)
    if how == "warm":
        server._source = forkserver._WarmProcesses(server._selector, 0, [])
    gc.collect()
    before = open_files()

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    def send(sock: socket.socket, packets: list[bytes], descriptors: list[int]) -> None:
        original(sock, packets, descriptors)
        if packets == [messages.REQUEST]:
            assert server._serve(), "the server ends"

    original = socket.send_fds
    monkeypatch.setattr(os, "fork" if how == "fork" else "posix_spawn", fail)
    monkeypatch.setattr(socket, "send_fds", send)
    with pytest.raises(NodeLost) as lost:
        served.agent.spawn(0, 1, argv=("train.py",), environment={}, output=served.agent._output)
    assert str(lost.value).startswith(message)
    del lost
    served.agent._pages.popitem()[1].close()
    gc.collect()
    assert not open_files() - before, "a descriptor is left open"
    server._selector.close()
    for each in (served.server, served.agent._control):
        each.close()


def test_a_process_that_cannot_be_watched_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", fail)
    pid = os.posix_spawnp("sleep", ["sleep", "1000"], dict(os.environ))
    with pytest.raises(OSError, match="Too many open files"):
        forkserver._Child(pid)
    is_reaped = not Path(f"/proc/{pid}").exists()
    if not is_reaped:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert is_reaped


@pytest.mark.parametrize(
    ("status", "cause"),
    [(-signal.SIGKILL, "SIGKILL"), (-signal.SIGRTMIN - 6, f"signal {signal.SIGRTMIN + 6}"), (3, "exit code 3")],
)
def test_every_end_has_a_cause_also_by_a_signal_without_a_name(status: int, cause: str) -> None:
    assert ProcessEnd(0, 0, status).cause == cause


LAUNCHER = """
import os, pathlib, select, signal, sys
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.output import create
folder = pathlib.Path(sys.argv[1])
agent = Agent(preload=(), environment=dict(os.environ), output=create(folder / "server.log"))
while not agent.is_ready():
    select.select([agent.fileno()], [], [])
for rank, script in enumerate(sys.argv[2:]):
    agent.spawn(0, rank, argv=(script,), environment={}, output=create(folder / f"{rank}.log"))
select.select([agent.fileno()], [], [])
print(agent._server.pid, agent.pid(0, 0), flush=True)
signal.pause()
"""
CHILD = """
import subprocess
subprocess.run(["sleep", "100"])
"""


def test_nothing_outlives_a_launcher_that_is_killed_while_a_reply_lies_unread(tmp_path: Path) -> None:
    """The kernel reports an error before the end of the stream then: the fork server ended by it, and killed no group."""
    scripts = [tmp_path / "lives.py", tmp_path / "ends.py"]
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    scripts[0].write_text(CHILD)
    scripts[1].write_text("")
    command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path), *map(str, scripts)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert launcher.stdout is not None
    server, rank = map(psutil.Process, map(int, launcher.stdout.readline().split()))
    said = os.open(f"/proc/{server.pid}/fd/2", os.O_RDONLY)
    while not (children := rank.children()):
        assert rank.is_running()
    try:
        launcher.kill()
        until_ended([server, rank, *children])
        assert b"Traceback" not in os.pread(said, 2**16, 0)
    finally:
        for each in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        launcher.wait()
        launcher.stdout.close()
        os.close(said)


@pytest.mark.parametrize("when", ["before the request", "with the request unread"])
def test_a_fork_server_that_is_killed_around_a_start_is_lost(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_LOOK_S", 0.05)
    made = Agent(preload=(), environment=dict(os.environ), output=create(tmp_path / "server.log"))
    try:
        until_readable(made.fileno(), made.is_ready, "the fork server")
        if when == "before the request":
            made._server.kill()
            os.waitid(os.P_PID, made._server.pid, os.WEXITED | os.WNOWAIT)
        else:
            made._server.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, made._server.pid, os.WSTOPPED | os.WNOWAIT)
            monkeypatch.setattr(made, "wake_server", lambda: made._server.kill() or True)
        with pytest.raises(NodeLost, match="the fork server has ended"):
            made.spawn(0, 0, argv=("train.py",), environment={}, output=create(tmp_path / "rank.log"))
    finally:
        monkeypatch.undo()
        made.close()


def test_a_fork_that_cannot_begin_is_no_second_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("prctl(1) failed")

    forks = forkserver._Forks(selectors.DefaultSelector())
    monkeypatch.setattr(forks, "_begin", fail)
    spawn = messages.Spawn(replica=0, rank=0, argv=("train.py",), environment={})
    with open(os.devnull) as null:
        child = forks.take(spawn, [null.fileno(), null.fileno()])
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pidfd)
    assert os.waitstatus_to_exitcode(status) == 1
