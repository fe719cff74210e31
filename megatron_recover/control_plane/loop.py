"""A small event loop for links: who has sent something, which timer ran out, what other threads asked for.

One thread runs it. It knows how messages arrive, not what they mean, and has no state of the protocol. (asyncio would do the
same with more: its transports buffer without telling, and its loop cannot be handed to `select`-style callers in slices.)

Note [Standing still]. A process that is stopped (SIGSTOP, Ctrl-Z, a suspended machine) reads nothing meanwhile. When it goes
on, all its timers have run out, and what would have met them lies unread in its sockets. So timers run on the loop's own clock,
which leaves out the time in which the loop did not run: the time since it ran last, without what it asked to wait for and
without the CPU time that its thread has used (a long handler is work). From `STILL_S` on such a gap shifts every timer.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from megatron_recover.control_plane.wire import CannotDial, Link, LinkClosed, Message, QueueFull, frame
from megatron_recover.deadlines import STILL_S

OnMessage = Callable[[Link, Message], None]
OnClosed = Callable[[Link, str], None]


@runtime_checkable
class Owner(Protocol):
    """An object that owns a descriptor, such as a socket."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


Readable = Owner | int
"""A socket is watched as the object that owns its descriptor: see `Loop.close_in_child`."""
_LONGEST_WAIT_S = 1.0
"""While a timer is set. In a longer wait the loop could not tell how long it stood still."""


class Loop:
    """Links, listeners, readable descriptors, timers and posted calls, served by `run_once` in one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """`clock` and `cpu_clock` return seconds: of the machine, and of CPU that the loop's thread has used."""
        self.stood_still_s = 0.0
        """How long the loop did not run although it had something to do or a timer set. See Note [Standing still]."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._ran_at: tuple[float, float] | None = None
        """Both clocks when the loop ran last; None before the first time."""
        self._selector = selectors.DefaultSelector()
        self._links: dict[Link, tuple[OnMessage, OnClosed]] = {}
        self._redialling: set[Link] = set()
        """Links without a socket at present."""
        self._paused: dict[Readable, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_order = itertools.count()
        self._posted: deque[Callable[[], None]] = deque()
        self._waker, self._wake_here = socket.socketpair()
        self._waker.setblocking(False)
        self._wake_here.setblocking(False)
        self._selector.register(self._wake_here, selectors.EVENT_READ, self._drain_wakes)

    # --- From any thread ---------------------------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop's thread make `call` soon; calls are made in the order in which they were posted."""
        self._posted.append(call)
        # The pipe is full of wakes already, or a signal handler posts to a loop that was closed.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # --- From the loop's thread --------------------------------------------------------------------------------------

    def watch(self, link: Link, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Serve a link, or serve it otherwise from now on.

        `on_closed(link, why)` comes once, after the last message; the link is dropped by then.
        """
        is_new = link not in self._links
        self._links[link] = (on_message, on_closed)
        if is_new and link.fileno() < 0:  # there was no descriptor for its connection
            self._redialling.add(link)
            self._redial(link)
        elif is_new:
            self._selector.register(link, self._interest(link), link)

    def watch_readable(self, readable: Readable, call: Callable[[], None]) -> None:
        """Make `call` whenever a socket or descriptor is readable."""
        self._selector.register(readable, selectors.EVENT_READ, call)

    def forget_readable(self, readable: Readable) -> None:
        """Undo `watch_readable`, before the socket or descriptor is closed."""
        if self._paused.pop(readable, None) is None:
            self._selector.unregister(readable)

    def pause_readable(self, readable: Readable, seconds: float) -> None:
        """Leave a socket or descriptor of `watch_readable` alone for a while; one that is left alone already stays so."""
        if readable in self._paused:
            return
        call = self._paused[readable] = self._selector.unregister(readable).data

        def resume() -> None:
            if self._paused.get(readable) is call:
                self.watch_readable(readable, self._paused.pop(readable))

        self.after(seconds, resume)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make `call` once, `seconds` from now, by the loop's own clock (`time`)."""
        heapq.heappush(self._timers, (self.time() + seconds, next(self._timer_order), call))

    def time(self) -> float:
        """Return the seconds of the loop's own clock, which leaves out the time in which the loop stood still."""
        return self._clock() - self.stood_still_s

    def waited_elsewhere(self) -> None:
        """Note that the loop's thread has waited for something else since the loop ran last: that was no standstill."""
        self._ran_at = (self._clock(), self._cpu_clock())

    def send(self, link: Link, message: Message) -> None:
        """Send without waiting. On a link that broke `on_closed` is called soon; on one that was dropped nothing happens."""
        self.put(link, frame(message))

    def put(self, link: Link, framed: bytes) -> None:
        """`send` of what is framed already."""
        if link not in self._links:
            return
        try:
            link.put(framed)
        except QueueFull as full:
            why = str(full)
            self.post(lambda: self._over(link, why))
        except LinkClosed as closed:
            why, meant = str(closed), link.connection
            # Select may report the same connection first, and the link may have another one by then.
            self.post(lambda: self._closed(link, why) if link.connection is meant else None)
        else:
            self._update(link)

    def drop(self, link: Link) -> None:
        """Close a link without calling its `on_closed`. Dropping it twice is fine."""
        if self._links.pop(link, None) is not None:
            if link in self._redialling:
                self._redialling.discard(link)
            else:
                self._selector.unregister(link)
            link.close()

    def run_once(self, max_wait_s: float | None = None) -> None:
        """Wait until something is due, at most `max_wait_s`, and serve it. It may return without anything having been due."""
        self._notice_gap(0.0)
        wait = max_wait_s
        if self._timers:
            until_timer = max(0.0, self._timers[0][0] - self.time())
            wait = min(until_timer, _LONGEST_WAIT_S) if wait is None else min(wait, until_timer, _LONGEST_WAIT_S)
        if self._posted:
            wait = 0.0
        ready = self._selector.select(wait)
        self._notice_gap(wait)
        for key, events in ready:
            if isinstance(key.data, Link):
                self._serve(key.data, events)
            else:
                key.data()
        for _ in range(len(self._posted)):
            self._posted.popleft()()
        while self._timers and self._timers[0][0] <= self.time():
            if self._notice_gap(0.0):  # stopped since the links were read: read them first
                return
            heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Close every link and the loop's own descriptors (not those of `accept` and `watch_readable`)."""
        for link in list(self._links):
            self.drop(link)
        self._selector.close()
        self._waker.close()
        self._wake_here.close()

    def close_in_child(self) -> None:
        """In a forked child: close the copies of our descriptors, so that a dead parent's connections end at once.

        Does nothing where they are closed: in a child of that child, and after `close`. Sockets are closed through their
        objects. An object that did not know would later close a descriptor that has got the same number.
        """
        keys = self._selector.get_map()
        if keys is None:
            return
        for each in [*(key.fileobj for key in keys.values()), *self._paused, self._waker]:
            if isinstance(each, int):
                os.close(each)
            else:
                assert isinstance(each, Owner)
                each.close()
        self._selector.close()
        self._links.clear()
        self._redialling.clear()
        self._paused.clear()

    # --- Inside ------------------------------------------------------------------------------------------------------

    def _notice_gap(self, asked_s: float | None) -> bool:
        """Leave out of the loop's clock the time in which it did not run; whether there was any.

        `asked_s`: how long the loop has just asked to wait; None: until something came.
        """
        now, cpu_s = self._clock(), self._cpu_clock()
        if self._ran_at is None or asked_s is None:
            self._ran_at = (now, cpu_s)
            return False
        gap_s = now - self._ran_at[0] - asked_s - (cpu_s - self._ran_at[1])
        self._ran_at = (now, cpu_s)
        if gap_s < STILL_S:
            return False
        self.stood_still_s += gap_s
        return True

    @staticmethod
    def _interest(link: Link) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_here.recv(4096):
                continue

    def _serve(self, link: Link, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE and link in self._links:
                link.flush()
                self._update(link)
            if events & selectors.EVENT_READ and link in self._links:
                for message in link.receive():
                    if link not in self._links:  # dropped while its messages were served
                        return
                    self._links[link][0](link, message)
                self._update(link)  # one that dialled has something to send once it is welcome
        except LinkClosed as closed:
            self._closed(link, str(closed))

    def _update(self, link: Link) -> None:
        if link in self._links and link not in self._redialling:
            self._selector.modify(link, self._interest(link), link)

    def _redial(self, link: Link) -> None:
        if link not in self._redialling:  # dropped meanwhile
            return
        try:
            link.redial()
        except CannotDial as error:
            why, pause_s = str(error), link.retry_s()
            if pause_s is None:
                self.post(lambda: self._over(link, why))
            else:
                self.after(pause_s, lambda: self._redial(link))
        except LinkClosed as closed:
            why = str(closed)
            self.post(lambda: self._over(link, why))
        else:
            self._redialling.discard(link)
            self._selector.register(link, self._interest(link), link)

    def _closed(self, link: Link, why: str) -> None:
        if link in self._redialling:
            return
        pause_s = link.retry_s() if link in self._links else None
        if pause_s is None:
            self._over(link, why)
            return
        self._redialling.add(link)
        self._selector.unregister(link)
        link.close()
        self.after(pause_s, lambda: self._redial(link))

    def _over(self, link: Link, why: str) -> None:
        if link in self._links:
            on_closed = self._links[link][1]
            self.drop(link)
            on_closed(link, why)
