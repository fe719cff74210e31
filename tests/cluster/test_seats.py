"""Who sits in the slots of a node, and what a newcomer needs to sit there."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster import forkserver_messages as messages
from megatron_recover.cluster import slot_check
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.job import Job, link_logs_of_newcomer
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.newcomers import Newcomers
from megatron_recover.cluster.node import NodeLost
from megatron_recover.cluster.seats import Seats
from megatron_recover.cluster.slot_check import Wanted
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import FormReplica, NotAdmitted, SlotsReady, SlotsUnfit, StartReplica
from megatron_recover.core.placement import place
from megatron_recover.deadlines import Deadlines
from megatron_recover.host import gpus
from tests.cluster.test_agent import Served
from tests.cluster.waiting import until_ended

pytestmark = pytest.mark.timeout(60)
LAYOUT = trace.Layout(tp=1, pp=2)


def job(tmp_path: Path, **fields: object) -> Job:
    return Job(argv=("train.py",), num_replicas=2, layout=LAYOUT, config=RecoverConfig(), run_dir=tmp_path, **fields)  # type: ignore[arg-type]


def nobody(replica: int, rank: int) -> bool:
    return False


def test_a_newcomer_sits_where_former_users_have_ended_and_takes_over_their_place_in_the_logs(tmp_path: Path) -> None:
    seats = Seats(job(tmp_path))
    assert seats.slots(1) == {0: 2, 1: 3} and seats.replicas_here == (0, 1) and seats.slots(2) == {}
    seats.take(2, {0: 2, 1: 3}, nobody)
    seats.take(3, {0: 3, 1: 7}, nobody)
    assert seats.replicas_here == (0, 1, 2, 3) and seats.newcomers == (2, 3)
    assert [seats.stands_for(2, rank) for rank in (0, 1)] == [2, 3]
    assert [seats.stands_for(3, rank) for rank in (0, 1)] == [3, 7], "slot 7 had no rank at the start"
    assert seats.users(3) == ((1, 1), (2, 1), (3, 0))


@pytest.mark.parametrize("living", [(1, 1), (2, 0)])
def test_nobody_sits_where_a_process_of_any_former_user_may_live(tmp_path: Path, living: tuple[int, int]) -> None:
    seats = Seats(job(tmp_path))
    seats.take(2, {0: 2, 1: 3}, nobody)
    with pytest.raises(ValueError, match=f"replica {living[0]} rank {living[1]} has not ended"):
        seats.take(3, {0: 2, 1: 3}, lambda *user: user == living)
    assert seats.slots(3) == {} and seats.newcomers == (2,)


def test_slots_without_a_rank_are_the_spares_of_their_node(tmp_path: Path) -> None:
    placement = place([3, 2, 2], num_replicas=2, num_ranks=2)
    spares = [job(tmp_path, placement=placement, node=node).spares for node in range(3)]
    assert spares == [(2,), (), (0, 1)]
    assert job(tmp_path).spares == ()


def test_a_disk_that_hangs_at_the_links_to_a_newcomers_logs_does_not_hold_up_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, links = threading.Event(), tmp_path / "links"
    make = Path.mkdir

    def hang(folder: Path, *how: Any, **named: Any) -> None:
        answers.wait(20)
        make(folder, *how, **named)

    monkeypatch.setattr(Path, "mkdir", hang)
    since = time.monotonic()
    link_logs_of_newcomer(job(tmp_path, log_links=links), 2, 0, tmp_path / "stdout")
    assert time.monotonic() - since < 10
    [thread] = [each for each in threading.enumerate() if each.name == "links-2.0"]
    answers.set()
    thread.join(20)
    assert (links / "attempt_0" / "4" / "stderr.log").is_symlink()


class Node:
    """A node of which the test says who lives."""

    def __init__(self, tmp_path: Path, check: slot_check.Check = lambda wanted: "", *, fails: Exception | None = None) -> None:
        self.living, self.sent, self.started = set[tuple[int, int]](), list[object](), list[int]()
        self.fences: Any = SimpleNamespace(gone=set(), fence=lambda replica: self.fences.gone.add(replica))
        node: Any = SimpleNamespace(lives=lambda *user: user in self.living, former_groups=lambda users: ())
        starting: Any = SimpleNamespace(listen_for=lambda replica, spans_nodes: (f"a:{replica}", ""), newcomer=self.start)
        recording: Any = SimpleNamespace(has_room=lambda num: True)
        self.loop, self.seats, self.fails = Loop(), Seats(job(tmp_path)), fails
        self.newcomers = Newcomers(
            job(tmp_path), node, self.seats, recording=recording, starting=starting, fences=self.fences, loop=self.loop,
            deadlines=msgspec.structs.replace(Deadlines.of(20.0), slots_s=0.3), send=self.sent.append, check=check,
        )  # fmt: skip

    def start(self, told: StartReplica) -> None:
        self.started.append(told.replica)
        if self.fails is not None:
            raise self.fails

    def until_sent(self, num: int = 1) -> list[object]:
        end = time.monotonic() + 20
        while len(self.sent) < num and time.monotonic() < end:
            self.loop.run_once(0.02)
        return self.sent

    def turn(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.loop.run_once(0.02)


FORM = FormReplica(2, ((0, 2), (1, 3)))


def test_a_slot_whose_former_process_lives_is_refused_whatever_the_coordinator_believes(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.living.add((1, 1))
    node.newcomers.handle(FORM)
    assert node.sent == [SlotsUnfit(2, (2, 3), "replica 1 rank 1 has not ended")] and node.seats.newcomers == ()
    node.living.clear()
    node.newcomers.handle(FormReplica(3, FORM.seats))
    assert node.until_sent(2)[1] == SlotsReady(3, "a:3")
    node.newcomers.handle(StartReplica(3, "a:3"))
    assert node.started == [3]


def test_a_check_that_raises_is_one_that_fails_and_one_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    def broken(wanted: Wanted) -> str:
        raise RuntimeError("no such tool")

    node = Node(tmp_path, broken)
    node.newcomers.handle(FORM)
    assert node.until_sent() == [SlotsUnfit(2, (2, 3), "its check failed (RuntimeError: no such tool)")]
    node = Node(tmp_path, lambda wanted: time.sleep(5) or "")
    node.newcomers.handle(FORM)
    assert node.until_sent() == [SlotsUnfit(2, (2, 3), "its check has not ended within 0.3 s")]
    node.turn(0.5)
    assert len(node.sent) == 1


def test_a_check_for_which_the_system_has_no_thread_fails_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    node = Node(tmp_path)
    node.newcomers.handle(FORM)
    node.turn(0.5)
    assert node.sent == [SlotsUnfit(2, (2, 3), "its check cannot be started (can't start new thread); raise `ulimit -u`")]


def test_a_newcomer_that_is_fenced_while_its_slots_are_checked_is_not_started(tmp_path: Path) -> None:
    node = Node(tmp_path, lambda wanted: time.sleep(0.1) or "")
    node.newcomers.handle(FORM)
    node.fences.fence(2)
    node.turn(0.4)
    node.newcomers.handle(StartReplica(2, "a:2"))
    assert node.sent == [] and node.started == []


@pytest.mark.parametrize("kind", [NodeLost, OSError, RuntimeError])
def test_a_newcomer_of_which_a_rank_cannot_be_started_is_ended_and_not_the_run(kind: type[Exception], tmp_path: Path) -> None:
    """Another newcomer may have taken the last ring meanwhile (`RuntimeError`)."""
    node = Node(tmp_path, fails=kind("raise `ulimit -u`"))
    node.newcomers.handle(FORM)
    node.until_sent()
    node.newcomers.handle(StartReplica(2, "a:2"))
    assert node.sent[1:] == [SlotsUnfit(2, (2, 3), "raise `ulimit -u`")] and node.fences.gone == {2}


def test_at_the_end_newcomers_that_are_no_members_are_killed_and_none_is_formed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.newcomers.handle(FORM)
    node.until_sent()
    assert node.newcomers.forming((0, 1)) == {2} and node.newcomers.forming((0, 2)) == set()
    node.newcomers.end((0, 2))
    assert not node.fences.gone, "a member ends by itself"
    node.newcomers.end((0, 1))
    node.newcomers.handle(FormReplica(3, FORM.seats))
    assert node.fences.gone == {2} and len(node.sent) == 1


# --- The usual check ------------------------------------------------------------------------------


def wanted(tmp_path: Path, **fields: Any) -> Wanted:
    given = {"run_dir": tmp_path, "num_ranks": 2, "gpus": (), "former_groups": (), "until_s": time.monotonic() + 0.3}
    return Wanted(**{**given, **fields})


def test_slots_of_a_healthy_machine_are_fit(tmp_path: Path) -> None:
    assert slot_check.check(wanted(tmp_path)) == "" and not list(tmp_path.iterdir())


def test_a_run_directory_that_is_gone_or_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "takes no file (No such file or directory)" in slot_check.check(wanted(tmp_path / "gone"))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=2**20))
    assert slot_check.check(wanted(tmp_path)) == f"{tmp_path} has 10 MiB of room left"


def test_a_check_leaves_no_file_in_a_run_directory_that_takes_no_byte(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # files can be made, as on a full disk
    try:
        found = slot_check.check(wanted(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "takes no file (File too large)" in found and not list(tmp_path.iterdir())


def test_memory_that_is_too_little_for_the_ranks_is_named(tmp_path: Path) -> None:
    assert "MiB of memory available for 1000000 ranks" in slot_check.check(wanted(tmp_path, num_ranks=1_000_000))


CHECKED = """
import sys, time
from pathlib import Path
from megatron_recover.cluster import slot_check
input()
wanted = slot_check.Wanted(run_dir=Path(sys.argv[1]), num_ranks=1, gpus=(), former_groups=(), until_s=time.monotonic())
print(slot_check.check(wanted))
"""


def test_memory_that_the_control_group_does_not_have_is_named(tmp_path: Path, small_group: Path) -> None:
    checked = subprocess.Popen(
        [sys.executable, "-c", CHECKED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        (small_group / "cgroup.procs").write_text(str(checked.pid))
        said, _ = checked.communicate("\n", timeout=120)
    finally:
        checked.kill()
        checked.wait()
    assert re.fullmatch(rf"{small_group}/memory\.\S+ leaves \d\d? MiB of memory for 1 rank\n", said), said


def test_what_a_former_rank_has_started_has_to_end(tmp_path: Path) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    try:
        ended_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        found = slot_check.check(wanted(tmp_path, former_groups=((left.pid, ended_s),)))
        assert found == f"process {left.pid}, which a former rank started, does not end"
        before = ((left.pid, ended_s - 1000.0),)
        assert slot_check.check(wanted(tmp_path, former_groups=before)) == "", "a group with the same number, made later"
        left.send_signal(signal.SIGKILL)
        until_ended([psutil.Process(left.pid)])  # a zombie, which nobody has reaped
        assert slot_check.check(wanted(tmp_path, former_groups=((left.pid, ended_s),))) == ""
    finally:
        left.kill()
        left.wait()


@pytest.mark.parametrize(("used_mib", "said"), [((10, 10), ""), ((10, 500), "GPU 1 has 500 of 1000 MiB in use")])
def test_a_device_has_to_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_mib: tuple[int, ...], said: str) -> None:
    found = [gpus.Gpu(number, f"u{number}", "H", 1000, used, False) for number, used in enumerate(used_mib)]
    monkeypatch.setattr(gpus, "start_query", lambda: object())
    monkeypatch.setattr(gpus, "answered", lambda query, timeout_s: found)
    monkeypatch.setattr(slot_check, "visible_gpus", lambda: None)
    assert slot_check.check(wanted(tmp_path, gpus=(0, 1))) == said
    assert slot_check.check(wanted(tmp_path, gpus=(0, 2))) == "the driver does not show GPU 2"


def test_a_device_that_stays_in_use_is_named_also_where_the_last_question_has_no_time_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(query: object, timeout_s: float) -> list[gpus.Gpu]:
        time.sleep(min(0.1, max(0.0, timeout_s)))
        if timeout_s < 0.1:
            raise OSError("nvidia-smi does not answer")
        return [gpus.Gpu(0, "u0", "H", 1000, 500, False)]

    monkeypatch.setattr(gpus, "start_query", lambda: object())
    monkeypatch.setattr(gpus, "answered", answered)
    monkeypatch.setattr(slot_check, "visible_gpus", lambda: None)
    assert slot_check.check(wanted(tmp_path, gpus=(0,))) == "GPU 0 has 500 of 1000 MiB in use"
    assert slot_check.check(wanted(tmp_path, gpus=(0,), until_s=time.monotonic())) == "nvidia-smi does not answer"


def test_a_rank_whose_start_is_answered_after_its_fence_is_killed_and_its_replica_not_gone_before(tmp_path: Path) -> None:
    served, process = Served(tmp_path), subprocess.Popen(["sleep", "1000"], start_new_session=True)
    agent: Agent = served.agent
    agent._asked, agent._pending = deque([(2, 0)]), deque()
    agent.fence(2)
    assert not agent.is_fenced(2) and agent.lives(2, 0)
    pidfd = os.pidfd_open(process.pid)
    socket.send_fds(served.server, [msgspec.json.encode(messages.Started(replica=2, rank=0, pid=process.pid))], [pidfd])
    agent.poll()
    until_ended([psutil.Process(process.pid)])
    assert not agent.is_fenced(2), "its end is not confirmed"
    served.server.send(msgspec.json.encode(messages.Exited(replica=2, rank=0, status=-9)))
    agent.poll()
    assert agent.is_fenced(2) and not agent.lives(2, 0)
    assert agent.former_groups([(2, 0), (9, 9)])[0][0] == process.pid
    process.wait()
    os.close(pidfd)
    for each in (served.server, agent._control):
        each.close()


def test_a_newcomer_that_was_turned_away_is_killed_with_the_coordinator(tmp_path: Path) -> None:
    """It would wait for another generation for ever, and the run with it."""
    node = Node(tmp_path)
    node.newcomers.handle(FORM)
    node.until_sent()
    launcher: Any = Launcher.__new__(Launcher)
    launcher._roster, launcher._newcomers, launcher._others = (0, 1, 2), node.newcomers, None
    launcher._end, launcher._why_lost = SimpleNamespace(has_come=True), ""
    launcher._from_coordinator(NotAdmitted(2))
    launcher._coordinator_gone("its process has ended")
    assert node.fences.gone == {2}
