"""Real processes that a tracer holds, as the agent and its watch see them."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.watch import Watch, exception_in
from megatron_recover.cluster.watched_process import WatchedProcess
from megatron_recover.core import detector
from megatron_recover.core.progress import Phase
from megatron_recover.core.verdict import Condemned, Named, Verdict
from megatron_recover.deadlines import Deadlines

pytestmark = pytest.mark.timeout(240)

_DETACH, _SEIZE, _INTERRUPT = 17, 0x4206, 0x4207
"""Requests of ptrace(2)."""
LIBC = ctypes.CDLL(None, use_errno=True)


def watch_of(agent: Agent, *, says: Callable[[str], None], record: Callable[[trace.Event], None]) -> Watch:
    return Watch(
        agent, deadlines=Deadlines.of(60.0), log_of=lambda *rank: Path("rank.log"), record=record, says=says,
        at_work=lambda replicas: None,
    )  # fmt: skip


def ptrace(request: int, pid: int) -> None:
    if LIBC.ptrace(request, pid, None, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 40
    while not holds():
        assert time.monotonic() < give_up, "too late"
        time.sleep(0.01)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.001)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def agent(child: subprocess.Popen[bytes]) -> Iterator[Agent]:
    """An agent that knows one process as rank 0 of replica 1, and no fork server."""
    agent = Agent.__new__(Agent)
    process = WatchedProcess(1, 0, child.pid, os.pidfd_open(child.pid))
    agent._processes = {(1, 0): process}
    yield agent
    os.close(process.pidfd)
    process.stat.close()


def test_a_rank_is_held_until_its_tracer_is_gone(child: subprocess.Popen[bytes], agent: Agent) -> None:
    """Under strace a process runs between its system calls: a look then must not take it for free."""
    try:
        ptrace(_SEIZE, child.pid)
    except PermissionError as error:
        pytest.skip(f"no process may be traced here: {error}")
    ptrace(_INTERRUPT, child.pid)
    until(lambda: agent.state(1, 0) == "t")
    assert agent.tracer(1, 0) == f"{Path('/proc/self/comm').read_text().strip()} (pid {os.getpid()})"
    assert agent.have_written_stacks(1), "what a tracer holds can write nothing"
    os.waitpid(child.pid, 0)
    ptrace(7, child.pid)  # PTRACE_CONT: it runs, and is still traced
    for _ in range(20):
        assert agent.state(1, 0) == "t"
        time.sleep(0.005)
    ptrace(_INTERRUPT, child.pid)
    os.waitpid(child.pid, 0)
    ptrace(_DETACH, child.pid)
    until(lambda: agent.state(1, 0) in ("R", "S"))
    assert agent.tracer(1, 0) == ""


def test_only_who_is_not_fenced_is_said_to_be_waited_for(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, bool] = {}
    watch = watch_of(agent, says=print, record=lambda event: None)
    monkeypatch.setattr(watch, "_name", lambda named, *, is_waited_for: told.update({named.replica: is_waited_for}))
    hung = [Named(replica, 0, Verdict.HUNG, Phase.FORWARD, 3.0, 2.0, "S", 20, "train 21", (3,)) for replica in range(2)]
    effects = (*hung, Condemned(hung[1], None))
    monkeypatch.setattr(detector, "step", lambda state, look: (state, effects))
    watch.look(1, ())
    assert told == {0: True, 1: False}


def test_an_exception_is_found_in_what_a_rank_printed() -> None:
    head = "Traceback (most recent call last):\n"
    text = f"{head}  File 'a', line 1\n    f()\nKeyError: 1\n\nDuring that:\n\n{head}  File 'b', line 2\nx.Y: said\nmore\nend\n"
    assert exception_in(text) == "x.Y: said"
    assert exception_in(f"{head}  File 'a', line 1\n") == exception_in("ValueError: of no traceback") == ""


def test_people_are_told_which_process_holds_a_rank_and_its_tracer_gets_no_signal(
    child: subprocess.Popen[bytes], agent: Agent
) -> None:
    said: list[str] = []
    events: list[trace.Event] = []
    watch = watch_of(agent, says=said.append, record=events.append)
    try:
        ptrace(_SEIZE, child.pid)
    except PermissionError as error:
        pytest.skip(f"no process may be traced here: {error}")
    ptrace(_INTERRUPT, child.pid)
    until(lambda: agent.state(1, 0) == "t")
    os.waitpid(child.pid, 0)
    watch._name(Named(1, 0, Verdict.TRACED, Phase.FORWARD, 0.6, 0.5, "t", 20, "train 21", (3,)), is_waited_for=True)
    [line] = said
    assert f"(pid {os.getpid()})" in line and "stacks" in line and "microbatch 3" in line and "(rank.log)" in line
    assert re.search(r"waited for until \d\d:\d\d:\d\d at the latest \(--recover-deadline-s 60\)", line)
    assert f"`kill -9 {child.pid}` ends its replica now" in line
    [event] = events
    assert isinstance(event, trace.RankSilent) and event.verdict == "traced"
    ptrace(_DETACH, child.pid)
    with pytest.raises(subprocess.TimeoutExpired):  # the stacks' signal would end this child
        child.wait(0.3)
    child.send_signal(signal.SIGKILL)
