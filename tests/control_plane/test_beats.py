"""Beats: who is silent is said once, a request that is repeated counts once, and nobody waits longer than the deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import typing
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.control_plane.beats import CoordinatorWatch, LeaderWatch
from megatron_recover.control_plane.coordinator_driver import CoordinatorDriver
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.leader_messages import Announcement, Beat, LeaderBeat, LeaderHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import Message
from megatron_recover.core.coordinator import MembershipSettings
from megatron_recover.core.coordinator_state import Setting
from megatron_recover.core.membership_messages import Hello, Loss, ReplicaBlocked
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import host_name
from megatron_recover.host.process_stat import state_of
from tests.control_plane.partners import PATIENCE_S, call, connected, gate_of

pytestmark = pytest.mark.timeout(150)
DEADLINES = Deadlines.of()
BEAT_S, SILENT_S = DEADLINES.beat_s, DEADLINES.silence_s


class Clocked:
    """A loop whose time the test moves; its thread works all the time, so no time counts as standing still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loop = Loop(clock=lambda: self.now, cpu_clock=lambda: self.now)
        self.events: list[trace.Event] = []
        self.loop.run_once(0.0)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            self.loop.run_once(0.0)

    def told(self) -> list[tuple[str, float, str]]:
        """What was recorded since the last call: phase, seconds of silence, what was waited for."""
        told = [(each.phase, each.seconds, getattr(each, "waits", "")) for each in self.events]
        self.events.clear()
        return told


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked()
    yield made
    made.loop.close()


class Watched(Clocked):
    """A leader that watches its coordinator."""

    def __init__(self, deadline_s: float = 20.0) -> None:
        super().__init__()
        self.waits, self.given_up, self.lost, self.step, self.is_bound = "", list[str](), list[bool](), 7, False
        self.generation = 1
        self.watch = CoordinatorWatch(
            0, loop=self.loop, deadlines=replace(DEADLINES, deadline_s=deadline_s),
            answer=lambda: LeaderBeat(0, self.generation, self.step, (2,)), waits=lambda: self.waits, lost=self.lost.append,
            is_bound=lambda: self.is_bound,
            record=self.events.append, give_up=self.given_up.append,
        )  # fmt: skip

    def close(self) -> None:
        """Close the loop when everything said is written: what comes later another test would find on its stderr."""
        assert self.watch.speaker.wait(60.0)
        self.loop.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


def test_silence_is_said_once_and_again_when_a_wait_begins_and_when_it_is_over(watched: Watched) -> None:
    watched.run(SILENT_S - BEAT_S)
    assert watched.told() == []
    watched.run(10.0)
    assert watched.told() == [("began", SILENT_S, "")], "nothing fails: training goes on"
    watched.waits = "a new generation"
    watched.run(5.0)
    assert watched.told() == [("began", SILENT_S + 10.0, "a new generation")]
    watched.watch.heard()
    assert watched.told() == [("over", SILENT_S + 14.0, "a new generation")]
    watched.run(SILENT_S)
    assert watched.told() == [("began", SILENT_S, "a new generation")], "another silence"


def test_inv_8_a_silent_coordinator_is_waited_for_until_the_deadline(watched: Watched) -> None:
    watched.run(100.0)
    assert watched.given_up == [], "as long as nothing is needed of it, it may be silent"
    watched.waits = "a new generation"
    watched.run(20.0)
    assert watched.given_up == []
    watched.run(1.0)
    [reason] = watched.given_up
    assert reason.startswith("waited 20 s for a new generation, and the coordinator (not heard since the start)")
    watched.run(50.0)
    assert len(watched.given_up) == 1


NOWHERE = 2**22 + 1
"""No process has this id: Linux gives lower ones."""


def test_a_silent_coordinator_that_is_not_seen_to_live_here_counts_as_lost_until_it_is_heard(watched: Watched) -> None:
    watched.run(2 * DEADLINES.node_s)
    assert watched.lost == [], "no beat has come yet"
    watched.watch.heard(Beat(host_name(), NOWHERE, 1, 7, ()))
    watched.run(DEADLINES.node_s - BEAT_S)
    assert watched.lost == []
    watched.run(5 * BEAT_S)
    assert watched.lost == [True]
    assert [each for each in watched.events if isinstance(each, trace.CoordinatorLost)] == [
        trace.CoordinatorLost(replica=0, generation=1, step=7, reason="it was silent for 10 s")
    ]
    watched.watch.heard()
    assert watched.lost == [True, False]


@pytest.mark.parametrize("generation", [0, 1])
def test_a_leader_that_loses_its_coordinator_before_training_promises_none(
    watched: Watched, generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(watched.watch.speaker, "say", said.append)
    watched.generation, watched.waits = generation, "the first generation" if not generation else ""
    watched.watch.heard(Beat(host_name(), NOWHERE, 0, 7, ()))
    watched.run(DEADLINES.node_s + 5 * BEAT_S)
    assert ("training goes on" in said[-1]) == bool(generation)
    assert ("before training began" in said[-1] and "for 10 s, and then ends with code 13" in said[-1]) == (not generation)


def test_inv_8_who_has_voted_without_a_coordinator_waits_briefly_though_it_is_heard_again(watched: Watched) -> None:
    """It enters no newer generation, so the coordinator has nothing for it; beats go on to come."""
    watched.watch.heard(Beat(host_name(), NOWHERE, 1, 7, ()))
    watched.run(DEADLINES.node_s + 5 * BEAT_S)
    watched.is_bound = True
    watched.waits = "a new generation"
    for _ in range(round(DEADLINES.node_s / BEAT_S) + 2):
        watched.watch.heard(Beat(host_name(), NOWHERE, 2, 7, ()))
        watched.run(BEAT_S)
    assert watched.lost == [True]
    [reason] = watched.given_up
    assert "was lost" in reason


def test_a_stopped_coordinator_of_this_host_is_not_lost(watched: Watched) -> None:
    watched.watch.heard(Beat(host_name(), os.getpid(), 1, 7, ()))  # a process that is seen to live
    watched.run(10 * DEADLINES.node_s)
    assert watched.lost == []


def test_inv_8_what_only_a_lost_coordinator_could_give_is_awaited_for_a_short_time_without_progress(watched: Watched) -> None:
    watched.watch.link_lost("closed by the other end")
    watched.watch.link_lost("a second time")
    assert watched.lost == [True]
    watched.run(100.0)
    assert watched.given_up == [], "training goes on"
    watched.waits = "a new generation"
    for _ in range(10):
        watched.run(DEADLINES.node_s - 2 * BEAT_S)
        watched.step += 1
    assert watched.given_up == [], "steps are committed"
    watched.run(DEADLINES.node_s + 2 * BEAT_S)
    [reason] = watched.given_up
    assert reason.startswith("waited 10 s for a new generation, and the coordinator")


def test_a_coordinator_that_is_heard_is_waited_for_by_its_own_deadlines(watched: Watched) -> None:
    watched.waits = "a new generation"
    for _ in range(100):
        watched.run(2 * BEAT_S)
        watched.watch.heard(Beat("h", 1, 1, 0, ()))
    assert watched.given_up == [] and watched.told() == []


def test_a_leader_that_stood_still_itself_does_not_call_the_coordinator_silent() -> None:
    watched = Watched()
    watched.loop._cpu_clock = lambda: 0.0
    watched.waits = "a new generation"
    watched.loop.run_once(0.0)
    watched.now += 1000.0
    watched.loop.run_once(0.0)
    watched.watch.heard()  # what had arrived meanwhile
    watched.loop.run_once(0.0)
    assert watched.told() == [] and watched.given_up == []
    watched.close()


def test_a_stopped_launcher_is_named_with_its_remedy(watched: Watched, capfd: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        watched.watch.heard(Beat(host_name(), process.pid, 1, 0, ()))
        watched.waits = "a new generation"
        watched.run(SILENT_S)
        pid = process.pid
        assert watched.watch.speaker.wait(60.0) and capfd.readouterr().err == (
            f"megatron-recover: the coordinator (pid {pid}, stopped: continue it with `kill -CONT "
            f"{pid}`) has sent nothing for 3 s; replica 0 waits for a new generation, at most 20 s\n"
        )
        [event] = watched.events
        assert (event.pid, event.state, event.waiting_for) == (pid, "T", (2,))
    finally:
        process.kill()
        process.wait()
    assert state_of(process.pid) == ""


def test_a_leader_that_does_not_answer_has_one_beat_waiting_and_is_named_once(clocked: Clocked) -> None:
    beat = Beat("h", 1, 4, 9, (1,))
    watch = LeaderWatch(loop=clocked.loop, deadlines=DEADLINES, beat=lambda: beat, record=clocked.events.append)
    link, leader = connected()
    clocked.loop.watch(link, lambda link, message: None, lambda link, why: None)
    watch.watch(1, link)
    assert list(leader.receive()) == [Beat("h", 1, 4, 9, (1,))]
    clocked.run(100.0)
    assert clocked.told() == [("began", SILENT_S, "")]
    assert list(leader.receive()) == [], "a stopped leader would have to read them all"
    watch.answered(LeaderBeat(1, 4, 8, (0,)))
    assert clocked.told() == [("over", 100.0, "")]
    clocked.run(1.0)
    assert list(leader.receive()) == [Beat("h", 1, 4, 9, (1,))]
    watch.forget(1)
    clocked.run(100.0)
    assert clocked.told() == [] and list(leader.receive()) == []
    leader.close()


class Leaders:
    """Two leaders, played by the test, of a real coordinator."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.events: list[trace.Event] = []
        timers_s = dict.fromkeys(typing.get_args(Setting), 1000.0)
        self.membership = CoordinatorDriver(
            MembershipSettings(num_replicas=2), loop=self.loop, timers_s={**timers_s, "grace_s": 0.0},
            record=self.events.append, fence=lambda replica: None, dismiss=lambda replica: None, form=lambda replica: None,
            on_end=lambda code, reason: None,
        )  # fmt: skip
        self.received: list[tuple[int, Message]] = []
        coordinator = Party(Role.COORDINATOR)
        self.gate, address = gate_of(self.membership, self.loop)
        self.links = [call(address, Party(Role.LEADER, replica), coordinator) for replica in range(2)]
        for replica, link in enumerate(self.links):
            self.loop.watch(
                link, lambda link, message, replica=replica: self.received.append((replica, message)), lambda link, why: None
            )  # fmt: skip
            self.loop.send(link, LeaderHello(Hello(replica, "same"), Peer(replica, "a", ("b",))))
        self.until(lambda: len(self.announced()) == 2)

    def announced(self) -> list[int]:
        return [message.new.generation for _, message in self.received if isinstance(message, Announcement)]

    def until(self, condition) -> None:  # noqa: ANN001
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"waited in vain; received so far: {self.received}"
            self.loop.run_once(0.01)

    def close(self) -> None:
        self.gate.close()
        self.loop.close()


@pytest.fixture
def leaders() -> Iterator[Leaders]:
    made = Leaders()
    with contextlib.closing(made):
        yield made


def test_the_coordinator_beats_to_its_leaders(leaders: Leaders) -> None:
    beats_of = [(replica, message) for replica, message in leaders.received if isinstance(message, Beat)]
    assert beats_of[0] == (0, Beat(host_name(), os.getpid(), 0, 0, (0, 1)))


def test_a_request_that_a_beat_repeats_counts_once_and_one_that_only_a_beat_has_counts(leaders: Leaders) -> None:
    request = ReplicaBlocked(0, 1, "a link broke", (1,))
    for message in (request, LeaderBeat(0, 1, 0, (), request), request, LeaderBeat(0, 1, 0, (), request)):
        leaders.loop.send(leaders.links[0], message)
    leaders.until(lambda: leaders.announced()[2:])
    assert leaders.membership._state.evidence.pairs == ((0, 1),), "one report, however often it was told"
    assert leaders.announced() == [1, 1, 2, 2]
    lost = ReplicaBlocked(1, 2, "a link broke", (0,))
    leaders.loop.send(leaders.links[1], LeaderBeat(1, 2, 0, (), lost))
    leaders.until(lambda: leaders.announced()[4:])
    assert leaders.membership._state.evidence.pairs == ((0, 1), (1, 0))


def test_a_beat_in_the_name_of_another_replica_is_what_no_leader_sends(leaders: Leaders) -> None:
    leaders.loop.send(leaders.links[0], LeaderBeat(1, 1, 0, ()))
    leaders.until(lambda: leaders.membership._state.losses)
    assert [loss.replica for loss in leaders.membership._state.losses] == [0]
    assert isinstance(leaders.membership._state.losses[0], Loss)
