"""What is said on stderr from threads that everything waits for: a disk or terminal that stalls holds none of them up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from megatron_recover.authentication.admission import Reserve
from megatron_recover.control_plane.beats import CoordinatorWatch
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.leader_messages import LeaderBeat, LeaderHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import listen
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import Hello
from megatron_recover.core.rank_messages import Stop
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import address_of
from megatron_recover.host.speaker import Speaker
from tests.control_plane.partners import Partner
from tests.control_plane.test_rank_driver import Follower
from tests.stderr import StalledStderr

Stall = Callable[[], StalledStderr]
pytestmark = pytest.mark.timeout(150)


def returns(call: Callable[[], object]) -> bool:
    """Return whether a call returns although nothing is written meanwhile."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20.0)
    return not thread.is_alive()


def test_lines_that_wait_are_written_in_order_later_and_more_than_there_is_room_for_are_dropped(
    stalled_stderr: Stall,
) -> None:
    stalled, speaker = stalled_stderr(), Speaker()
    assert returns(lambda: [speaker.say(f"line {number}") for number in range(1000)])
    assert not speaker.wait(0.05)
    lines = stalled.release(lambda text: text.count("\n") >= 100 and speaker.wait(20.0)).splitlines()
    assert 100 <= len(lines) <= 101 and lines == [f"line {number}" for number in range(len(lines))]


def test_a_leader_that_tells_of_its_silent_coordinator_goes_on(stalled_stderr: Stall) -> None:
    stalled, loop = stalled_stderr(), Loop()
    watch = CoordinatorWatch(
        0, loop=loop, deadlines=Deadlines.of(), answer=lambda: LeaderBeat(0, 1, 7, (2,)), waits=lambda: "",
        lost=lambda is_lost: None, is_bound=lambda: False,
        record=lambda event: None, give_up=lambda reason: None,
    )  # fmt: skip
    assert returns(lambda: watch._tell("began", 3.0))
    assert stalled.release(lambda text: "the coordinator" in text)
    loop.close()


def test_a_listener_without_descriptors_goes_on(stalled_stderr: Stall) -> None:
    stalled, reserve, listener = stalled_stderr(), Reserve(), listen("127.0.0.1:0")
    listener.setblocking(False)
    assert returns(lambda: reserve.turn_away(listener, OSError(24, "Too many open files")))
    assert stalled.release(lambda text: "raise `ulimit -n`" in text)
    assert address_of(listener)
    reserve.close()
    listener.close()


@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_cannot_go_on_ends_in_time(partner: Partner, stalled_stderr: Stall, raises: bool) -> None:
    follower = Follower(partner, follow_s=0.05).joined()

    def deliver(message: object) -> None:
        raise OSError(5, "made up")

    if raises:
        follower.member._link._deliver = deliver  # type: ignore[union-attr]
    stalled = stalled_stderr()
    partner.send(LeaderHello(Hello(1, "print"), Peer(1, "", "")) if not raises else Stop(0, "over"))
    partner.wait(lambda: follower.ended)
    assert follower.ended == [ExitCode.FAILED]
    text = stalled.release(lambda text: "replica 1 rank 1 ends: " in text and text.endswith("\n"))
    assert ("Traceback" in text) is raises
    if not raises:
        follower.close()
