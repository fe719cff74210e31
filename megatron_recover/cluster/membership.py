"""The coordinator's driver: sockets, timers and addresses around the machine of `core.coordinator`.

The machine decides who is in the job; this module only knows how to reach the leaders. It keeps the two things that the core
does not know: the addresses of every replica's ranks, and since when something has been wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megatron_recover import trace
from megatron_recover.collectives.loop import Loop
from megatron_recover.collectives.wire import Announcement, LeaderHello, Link, Message, Peer, address_of, listen
from megatron_recover.core import coordinator as machine
from megatron_recover.core import values


class Membership:
    """Drives the one coordinator of a run. Everything runs in the loop's thread."""

    def __init__(
        self,
        policy: machine.Policy,
        *,
        loop: Loop,
        timers_s: Mapping[machine.Setting, float],
        record: Callable[[trace.Event], None],
        fence: Callable[[int], None],
        on_end: Callable[[int, str], None],
    ) -> None:
        """Listen for leaders on a free port of the loopback interface.

        `timers_s` has the seconds of every `core.coordinator.Setting`. `fence(replica)` starts killing it;
        `on_end(exit_code, reason)` comes once, when the leaders have been told to stop.
        """
        self._loop, self._timers_s, self._record, self._fence, self._on_end = loop, timers_s, record, fence, on_end
        self._state = machine.CoordinatorState(policy)
        self._peers: dict[int, Peer] = {}
        self._links: dict[int, Link] = {}
        self._noticed: float | None = None
        self._listener = listen("127.0.0.1:0")
        self.address = address_of(self._listener)
        """Where leaders find the coordinator."""
        loop.accept(self._listener, lambda link: loop.watch(link, self._introduced, lambda link, why: None))

    @property
    def generation(self) -> int:
        """The newest; 0 before the first."""
        return self._state.generation

    def lost(self, loss: values.Loss) -> None:
        """A replica is gone; losing it twice is fine."""
        self._notice()
        self._step(machine.Lost(loss))

    def ask_exit(self, reason: str) -> None:
        """Have all replicas save and end at a common step."""
        self._notice()
        self._step(machine.ExitAsked(reason))

    def launched(self) -> None:
        """The processes of all replicas were started."""
        self._step(machine.Launched())

    def close(self) -> None:
        """Stop listening. The links belong to the loop."""
        self._loop.forget_readable(self._listener.fileno())
        self._listener.close()

    # --- From the leaders --------------------------------------------------------------------------------------------

    def _introduced(self, link: Link, message: Message) -> None:
        if not isinstance(message, LeaderHello) or message.hello.replica in self._links:
            self._loop.drop(link)
            return
        replica = message.hello.replica
        self._peers[replica], self._links[replica] = message.peer, link
        # A link that breaks says nothing: the agent sees whether the process lives.
        self._loop.watch(link, lambda link, message: self._from_leader(replica, link, message), lambda link, why: None)
        self._step(message.hello)

    def _from_leader(self, replica: int, link: Link, message: Message) -> None:
        match message:
            case values.Requested() | values.Diverged() | values.Miscounted() if message.replica == replica:
                self._notice()
                self._step(message)
            case values.Entered() | values.Busy() | values.Failing() | values.Finished() if message.replica == replica:
                self._step(message)
            case _:
                self._loop.drop(link)
                kind = type(message).__name__
                self.lost(values.Loss(replica, values.LossKind.SUSPECTED, f"its leader sent a {kind} to the coordinator"))

    # --- The machine -------------------------------------------------------------------------------------------------

    def _notice(self) -> None:
        if self._noticed is None:
            self._noticed = time.monotonic()

    def _step(self, event: machine.Input) -> None:
        self._state, effects = machine.step(self._state, event)
        for effect in effects:
            match effect:
                case machine.Announce(new):
                    self._announce(new)
                case machine.Fence(replica):
                    self._fence(replica)
                case machine.Arm(timer, setting):
                    self._arm(timer, self._timers_s[setting])
                case machine.Waits(replicas, reason):
                    self._record(trace.Waiting(replicas=replicas, reason=reason))
                case machine.EndJob(exit_code, reason):
                    self._end(exit_code, reason)

    def _announce(self, new: values.NewGeneration) -> None:
        noticed_s = time.monotonic() - self._noticed if self._noticed is not None else 0.0
        self._noticed = None
        message = Announcement(new, tuple(self._peers[replica] for replica in new.roster), noticed_s)
        losses = tuple(trace.Lost(replica=loss.replica, kind=loss.kind, detail=loss.detail) for loss in new.losses)
        void = (new.void.step, new.void.since) if new.void is not None else None
        self._record(
            trace.Generation(generation=new.generation, roster=new.roster, losses=losses, reason=new.reason, void=void)
        )
        for replica in new.roster:
            self._loop.send(self._links[replica], message)

    def _arm(self, timer: str, seconds: float) -> None:
        self._loop.after(seconds, lambda: self._step(machine.TimerFired(timer)))

    def _end(self, exit_code: int, reason: str) -> None:
        if exit_code != values.ExitCode.OK:
            self._record(trace.Stopping(exit_code=exit_code, reason=reason))
        for link in self._links.values():
            self._loop.send(link, values.Stop(exit_code, reason))
        self._on_end(exit_code, reason)
