"""A small event loop for links, timers and calls that other threads post.

One thread runs the loop. The loop delivers messages without knowing their meaning, and holds no
state of the protocol. asyncio was not used: its transports buffer without telling the caller, and
its loop cannot run for one step at a time.

Note [Standing still]. A process that is stopped (SIGSTOP, Ctrl-Z, a suspended machine) reads
nothing meanwhile. When the process is continued, all its timers have expired, although messages
that would have cancelled them wait unread in its sockets. So timers run on the loop's own clock,
which leaves out the time in which the loop did not run. That time is measured since the loop ran
last. The wait that the loop asked for is subtracted, and so is the CPU time of its thread, because
a long handler is work. A gap of `STILL_S` or more shifts every timer.
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

from megatron_recover.control_plane.wire import CannotDial, Link, LinkClosed, Message, QueueFull, encode
from megatron_recover.deadlines import STILL_S

OnMessage = Callable[[Link, Message], None]
OnClosed = Callable[[Link, str], None]


@runtime_checkable
class Owner(Protocol):
    """An object that owns a descriptor, such as a socket."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


Readable = Owner | int
"""Argument of `watch_readable`. Give a socket as the object that owns its descriptor; see
`Loop.close_in_child`."""
_LONGEST_WAIT_S = 1.0
"""Longest wait in seconds while a timer is set. The loop cannot notice a stop that is shorter than
the wait that it asked for."""


class Loop:
    """An event loop over links, listeners, readable descriptors, timers and posted calls.

    One thread serves them by `run_once`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """Make a loop that serves nothing yet.

        `clock` returns the machine's time in seconds; `cpu_clock` the CPU seconds that the loop's
        thread has used.
        """
        self.stood_still_s = 0.0
        """Seconds in which the loop did not run although it had something to do or a timer set. See
        Note [Standing still]."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._ran_at: tuple[float, float] | None = None
        """Both clocks when the loop ran last; None before the first time."""
        self._selector = selectors.DefaultSelector()
        self._links: dict[Link, tuple[OnMessage, OnClosed]] = {}
        self._redialling: set[Link] = set()
        """Links that have no socket at present."""
        self._paused: dict[Readable, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_order = itertools.count()
        self._posted: deque[Callable[[], None]] = deque()
        self._waker, self._wake_here = socket.socketpair()
        self._waker.setblocking(False)
        self._wake_here.setblocking(False)
        self._selector.register(self._wake_here, selectors.EVENT_READ, self._drain_wakes)

    # --- From any thread -------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop's thread make `call` soon, in the order of the posts.

        Any thread may post.
        """
        self._posted.append(call)
        # Suppressed: the waker is full already, or a signal handler posts to a closed loop.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # --- From the loop's thread ------------------------------------------------------------------

    def watch(self, link: Link, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Serve a link, or replace the callbacks of a link that is served already.

        The loop calls `on_closed(link, why)` once, after the last message. The link is dropped
        before that call.
        """
        is_new = link not in self._links
        self._links[link] = (on_message, on_closed)
        if is_new and link.fileno() < 0:  # it could not dial yet (`CannotDial`)
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
        """Stop watching a socket or descriptor of `watch_readable` for `seconds`.

        Has no effect on one that is paused already.
        """
        if readable in self._paused:
            return
        call = self._paused[readable] = self._selector.unregister(readable).data

        def resume() -> None:
            if self._paused.get(readable) is call:
                self.watch_readable(readable, self._paused.pop(readable))

        self.after(seconds, resume)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make `call` once, `seconds` from now on the loop's own clock (`time`)."""
        heapq.heappush(self._timers, (self.time() + seconds, next(self._timer_order), call))

    def time(self) -> float:
        """Return the seconds of the loop's own clock, which leaves out standstills."""
        return self._clock() - self.stood_still_s

    def waited_elsewhere(self) -> None:
        """Count no standstill since the loop ran last: its thread waited elsewhere."""
        self._ran_at = (self._clock(), self._cpu_clock())

    def send(self, link: Link, message: Message) -> None:
        """Send a message without waiting.

        If the link breaks and cannot dial again, or its queue is full, `on_closed` is called soon.
        On a link that was dropped nothing happens. Raises ValueError for a message that is too
        large (`encode`).
        """
        self.put(link, encode(message))

    def put(self, link: Link, body: bytes) -> None:
        """Send an encoded message, like `send`."""
        if link not in self._links:
            return
        try:
            link.put(body)
        except QueueFull as full:
            why = str(full)
            self.post(lambda: self._over(link, why))
        except LinkClosed as closed:
            why, meant = str(closed), link.connection
            # Select may report this connection first, and the link may have redialled by then.
            self.post(lambda: self._closed(link, why) if link.connection is meant else None)
        else:
            self._update(link)

    def drop(self, link: Link) -> None:
        """Close a link without calling its `on_closed`. A link may be dropped twice."""
        if self._links.pop(link, None) is not None:
            if link in self._redialling:
                self._redialling.discard(link)
            else:
                self._selector.unregister(link)
            link.close()

    def has(self, link: Link) -> bool:
        """Return whether the loop serves a link: nobody has dropped it, and it is not over."""
        return link in self._links

    def run_once(self, max_wait_s: float | None = None) -> None:
        """Wait until something is due, for at most `max_wait_s`, and serve it.

        The call may also return although nothing was due.
        """
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
            if self._notice_gap(0.0):  # stopped since the links were read: first read them again
                return
            heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Close every link and the loop's own descriptors.

        The descriptors of `watch_readable` belong to the caller.
        """
        for link in list(self._links):
            self.drop(link)
        self._selector.close()
        self._waker.close()
        self._wake_here.close()

    def close_in_child(self) -> None:
        """Close a forked child's copies of the loop's descriptors.

        Without this call the connections of a dead parent would stay open as long as its child
        lives. Has no effect if the descriptors are closed already: in a child of that child, and
        after `close`. Sockets are closed through the objects that own them. Otherwise such an
        object would later close an unrelated descriptor with the same number.
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

    # --- Inside ----------------------------------------------------------------------------------

    def _notice_gap(self, asked_s: float | None) -> bool:
        """Leave a gap of `STILL_S` or more out of the loop's clock; return whether there was one.

        In a gap the loop did not run (Note [Standing still]). `asked_s` is the wait in seconds that
        the loop has just asked for; None if it had no limit.
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
                self._update(link)  # a link that dialled may have messages to send once it is proven
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
