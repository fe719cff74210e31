"""The loop's own clock: after a stop what has arrived is read before any timer fires, and every timer has its time left."""

from __future__ import annotations

import gc
import os
import socket
import traceback
from collections.abc import Callable, Iterator

import pytest

from megatron_recover.control_plane.leader_messages import PeerHello
from megatron_recover.control_plane.loop import STILL_S, Loop
from tests.control_plane.partners import connected

pytestmark = pytest.mark.timeout(150)


class Stopped:
    """A loop on a clock that the test moves, with a link on which something can arrive."""

    def __init__(self) -> None:
        self.now = self.cpu_s = 0.0
        self.loop = Loop(clock=lambda: self.now, cpu_clock=lambda: self.cpu_s)
        self.seen: list[object] = []
        link, self.other = connected()
        self.loop.watch(link, lambda link, message: self.seen.append(message), lambda link, why: None)
        self.loop.run_once(0.0)

    def stop(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.cpu_s += seconds

    def after(self, seconds: float, name: str) -> None:
        self.loop.after(seconds, lambda: self.seen.append(name))


@pytest.fixture
def stopped() -> Iterator[Stopped]:
    made = Stopped()
    yield made
    made.loop.close()
    made.other.close()


def test_what_its_thread_waited_for_elsewhere_is_no_stop(stopped: Stopped) -> None:
    stopped.after(20.0, "timer")
    stopped.stop(10.0)
    stopped.loop.waited_elsewhere()
    stopped.loop.run_once(0.0)
    assert stopped.loop.stood_still_s == 0.0 and stopped.loop.time() == 10.0
    stopped.stop(5.0)
    stopped.loop.run_once(0.0)
    assert stopped.loop.stood_still_s == 5.0, "a stop after that counts"


def test_a_signal_handler_may_post_to_a_loop_that_is_closed() -> None:
    """Between the end of the loop and that of its handlers a signal may come."""
    loop = Loop()
    loop.close()
    loop.post(lambda: None)


def test_a_timer_that_ran_out_in_a_stop_has_its_time_left_after_it(stopped: Stopped) -> None:
    stopped.after(5.0, "timer")
    stopped.stop(100.0)
    stopped.other.send(PeerHello(1))
    stopped.loop.run_once(0.0)
    assert stopped.seen == [PeerHello(1)]
    assert stopped.loop.stood_still_s == 100.0
    stopped.work(4.9)
    stopped.loop.run_once(0.0)
    assert stopped.seen == [PeerHello(1)]
    stopped.work(0.1)
    stopped.loop.run_once(0.0)
    assert stopped.seen == [PeerHello(1), "timer"]


def test_a_stop_between_reading_and_the_timers_lets_none_fire_before_the_next_reading(stopped: Stopped) -> None:
    stopped.after(0.0, "first")
    stopped.after(0.0, "second")

    def stop_here() -> None:
        stopped.stop(100.0)
        stopped.other.send(PeerHello(2))

    stopped.loop.post(stop_here)
    stopped.loop.run_once(0.0)
    assert stopped.seen == []
    stopped.loop.run_once(0.0)
    assert stopped.seen == [PeerHello(2), "first", "second"]


def test_a_stop_between_two_timers_is_noticed_too(stopped: Stopped) -> None:
    stopped.loop.after(0.0, lambda: (stopped.stop(100.0), stopped.other.send(PeerHello(3))))
    stopped.after(50.0, "later")
    stopped.loop.run_once(0.0)
    stopped.loop.run_once(0.0)
    assert stopped.seen == [PeerHello(3)]


def test_a_handler_that_works_long_is_no_stop_nor_is_a_short_gap(stopped: Stopped) -> None:
    """Else a loop whose handlers always take long would never fire a timer (INV-8)."""
    stopped.after(30.0, "timer")
    for _ in range(3):
        stopped.work(9.0)
        stopped.stop(STILL_S * 0.9)
        stopped.loop.run_once(0.0)
    assert stopped.seen == [] and stopped.loop.stood_still_s == 0.0
    stopped.work(2.0)
    stopped.loop.run_once(0.0)
    assert stopped.seen == ["timer"]


def test_a_wait_that_was_asked_for_is_no_stop() -> None:
    loop, seen = Loop(), []
    loop.after(3 * STILL_S, lambda: seen.append("timer"))
    while not seen:
        loop.run_once(None)  # were waiting taken for a stop, the timer would be put off for ever
    loop.close()


def outcome_in_child(check: Callable[[], None]) -> str:
    """Return what `check` raised in a forked child, empty if nothing; the child ends without the test's own exit."""
    gc.collect()  # what other tests have left: a communicator that the child collects would wait for threads that it lacks
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return text or (f"the child ended with wait status {status}" if status else "")


def test_a_child_that_forks_again_and_a_child_of_a_closed_loop_close_nothing_twice(stopped: Stopped) -> None:
    """A data loader's worker that forks printed a traceback of the hook that the interpreter runs after each fork."""

    def twice() -> None:
        stopped.loop.close_in_child()
        stopped.loop.close_in_child()

    assert outcome_in_child(twice) == ""
    stopped.loop.close()
    assert outcome_in_child(stopped.loop.close_in_child) == ""


def test_what_is_paused_twice_goes_on_once(stopped: Stopped) -> None:
    """A listener without descriptors is paused in its turn, and its deadlines turn it again: its thread ended by a KeyError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stopped.loop.watch_readable(ours, lambda: stopped.seen.append(ours.recv(1)))
        stopped.loop.pause_readable(ours, 1.0)
        stopped.loop.pause_readable(ours, 1.0)
        theirs.send(b"x")
        stopped.loop.run_once(0.0)
        assert stopped.seen == []
        stopped.work(1.5)
        stopped.loop.run_once(0.0)
        stopped.loop.run_once(0.0)
        assert stopped.seen == [b"x"]
        stopped.loop.forget_readable(ours)


def test_a_socket_that_was_closed_in_a_child_closes_no_other_descriptor_later(stopped: Stopped) -> None:
    """The numbers are used again at once. An object that still believed in its number would close a stranger's file."""
    loop = stopped.loop
    listener = socket.create_server(("127.0.0.1", 0))
    loop.watch_readable(listener, lambda: None)
    resting = socket.create_server(("127.0.0.1", 0))
    loop.watch_readable(resting, lambda: None)
    loop.pause_readable(resting, 60.0)
    raw = os.eventfd(0)
    loop.watch_readable(raw, lambda: None)

    def reuse() -> None:
        nonlocal listener, resting, loop
        links = list(loop._links)
        numbers = {raw, listener.fileno(), resting.fileno(), *(key.fd for key in loop._selector.get_map().values())}
        loop.close_in_child()
        assert not any(os.path.exists(f"/proc/self/fd/{number}") for number in numbers)
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1 + max(numbers))]  # the lowest free ones come first
        assert numbers <= set(files)
        for link in links:
            link.close()
        listener.close()
        resting.close()
        loop.close()
        del listener, resting, loop
        gc.collect()
        for each in files:
            os.fstat(each)

    try:
        assert outcome_in_child(reuse) == ""
    finally:
        listener.close()
        resting.close()
        os.close(raw)
