"""The end of a run on one node: its exit code, the signals that request it, and the time for it.

Everything runs in the launcher's thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron_recover.cluster.job import KILLED, Job
from megatron_recover.cluster.signals import Answer, EndRequest, is_at_terminal
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import EndAsked, KillAsked, NodeFailed
from megatron_recover.core import policy
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines


class RunEnd:
    """Decides how long processes may take to end, and what a signal does."""

    def __init__(
        self, job: Job, *, loop: Loop, deadlines: Deadlines, says: Callable[[str], None],
        send: Callable[[EndAsked | KillAsked | NodeFailed], None], has_begun: Callable[[], bool], promise: Callable[[], str],
        is_alone: Callable[[], bool], request: EndRequest,
    ) -> None:  # fmt: skip
        """Prepare for the end of `job`, which signals request by `request`.

        `says(line)` shows a line to people. `send(message)` sends a message to the coordinator, if
        there is one. `has_begun()` returns whether training has begun, and then `promise()` what
        becomes of a request to end it, and `is_alone()` whether it ends this node alone.
        """
        self._job, self._loop, self._deadlines = job, loop, deadlines
        self._says, self._send, self._has_begun, self._promise = says, send, has_begun, promise
        self._is_alone = is_alone
        self._exit: tuple[int, str] | None = None
        """Exit code and reason; None while the run goes on."""
        self._until = 0.0
        """Time of the loop's clock until which processes may end by themselves."""
        self._request = request
        self.signal_name = ""
        """Name of the signal that has requested the end; empty: none has."""
        self.num_signals = 0
        """Number of signals that have come."""
        self._kill: tuple[float, int] | None = None
        """Time of the loop's clock at which everything is killed, and the signal that began it."""

    @property
    def has_come(self) -> bool:
        """Return whether the exit code is known: no process has to go on."""
        return self._exit is not None

    @property
    def exit_code(self) -> int:
        """Return the exit code. It is known."""
        assert self._exit is not None
        return self._exit[0]

    @property
    def reason(self) -> str:
        """Return why the run ends; empty while it goes on."""
        return self._exit[1] if self._exit is not None else ""

    @property
    def is_requested(self) -> bool:
        """Return whether a signal has requested the end."""
        return self._request.is_made

    @property
    def is_late(self) -> bool:
        """Return whether the time is over in which processes may end by themselves."""
        return self._loop.time() > self._until

    def begin(self, exit_code: int, reason: str, *, at_once: bool = False) -> None:
        """End the run, unless it ends already. `at_once`: no process gets time for that."""
        if self._exit is None:
            self._exit = (exit_code, reason)
            timeout_s = self._job.shutdown_s
            stop_s = self._deadlines.stop_s if timeout_s is None else timeout_s
            end_s = self._deadlines.end_s if timeout_s is None or exit_code == ExitCode.OK else timeout_s
            patience_s = end_s if exit_code in policy.ENDED_TOGETHER else stop_s
            self._until = self._loop.time() + patience_s * (self._has_begun() or exit_code == ExitCode.OK)
        if at_once:
            self._until = 0.0

    def fail(self, exit_code: int, reason: str) -> None:
        """End the run on this node, and report to the coordinator why it cannot take part."""
        if self._exit is None:
            self._send(NodeFailed(exit_code, reason))
        self.begin(exit_code, reason)

    def ask(self, why: str) -> None:
        """Request the end of the job after a common step, as a signal does. Any thread may ask."""

        def begin() -> None:
            if self._exit is None:
                self._says(f"{why}: {self._promise() if self._has_begun() else 'ending before training has begun'}")
                self._send(EndAsked(why))

        self._loop.post(begin)

    # --- Signals ----------------------------------------------------------------------------------

    def received(self) -> AbstractContextManager[None]:
        """Return a context in which signals are received, as `EndRequest.received` does it."""
        return self._request.received(lambda number: self._loop.post(lambda: self._signalled(number)))

    def release_signals(self) -> None:
        """Restore the signal handlers from before `received`.

        If the end was requested by a signal, only that of SIGINT is restored, and the other signals
        stay ignored. Between the end of `received` and this call, signals do not change the exit
        code.
        """
        self._request.release()

    def is_hurried(self) -> bool:
        """Return whether a signal came after the exit code was known.

        What is left to do then should end early. If the end was requested by a signal, only SIGINT
        counts.
        """
        return self._request.is_hurried

    def kill_if_late(self) -> None:
        """Kill everything if a signal has requested the end `--shutdown-timeout` ago."""
        if self._kill is None or self._loop.time() < self._kill[0]:
            return
        (_, number), self._kill = self._kill, None
        self._until = 0.0
        if self._exit is None:
            name = signal.Signals(number).name
            why = f"the job did not end within --shutdown-timeout ({self._job.shutdown_s} s) of {name}"
            self._says(f"{why}: killing everything")
            self._kill_all(KILLED + number, why)

    def _signalled(self, number: int) -> None:
        """React to one signal, which `cluster.signals` interprets (Note [One request])."""
        self.num_signals += 1
        name, at_terminal = signal.Signals(number).name, is_at_terminal()
        timeout_s = self._job.shutdown_s
        if timeout_s is not None and not self._request.is_made:
            self._kill = self._loop.time() + timeout_s, number
        is_alone = self._has_begun() and self._is_alone()
        others = ", and of the launcher on each other node," if len(self._job.nodes) > 1 and not is_alone else ""
        at_once = "a second Ctrl-C" if at_terminal else f"`kill -9 {os.getpid()}`{others}"
        self.signal_name = self.signal_name or name
        match self._request.take(number, at_terminal=at_terminal):
            case Answer.END if not self._has_begun():
                self._says(f"{name}: ending before training has begun")
                self._send(EndAsked(name))
            case Answer.END:
                does = "ends it at once" if is_alone else "kills everything at once, and nothing is saved"
                self._says(
                    f"{name}: {self._promise()}; {at_once} {does}"
                    + (f"; so does the end of --shutdown-timeout, in {timeout_s} s" if timeout_s is not None else "")
                )
                self._send(EndAsked(name))
            case Answer.KNOWN:
                self._says(f"{name}: the end was requested before; {at_once} kills everything at once")
            case Answer.KILL:
                self._says(f"{name} again: killing everything")
                self._kill_all(KILLED + number, f"killed on request ({name})")

    def _kill_all(self, exit_code: int, reason: str) -> None:
        """Kill everything at once, on all nodes, whatever the job does meanwhile."""
        self._exit, self._until = (exit_code, reason), 0.0
        self._send(KillAsked(exit_code, reason))
