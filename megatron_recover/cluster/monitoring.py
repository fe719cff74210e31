"""The launcher's side of the monitor: what is wanted of it, and the process itself.

A monitor that dies is started again. Only `finish` waits for the monitor, with a deadline. The
monitor's fate never changes the run's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from megatron_recover.cluster import event_command, renewed
from megatron_recover.cluster.monitor_messages import MAX_PACKET_BYTES, MonitorSays, MonitorSettings, RunEnds
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.renewed import Pauses
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.host.process_stat import cause_of
from megatron_recover.host.speaker import Speaker

BACKLOG = 128
"""Connections that the kernel keeps while the monitor accepts none. With a shorter queue many
strangers at once would make Prometheus wait for a second."""
_LOOK_S = 0.05
"""Seconds between two looks at the monitor at the end of the run."""
_MAX_LINES = 20
"""Lines of the monitor that one `poll` shows at most."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics and events that a user asks for."""

    listener: socket.socket | None = None
    """Socket that listens for requests of metrics."""
    textfile: Path | None = None
    on_event: tuple[str, ...] = ()

    @property
    def address(self) -> str | None:
        """Return where metrics are served, as a URL, or None."""
        if self.listener is None:
            return None
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


class Monitoring:
    """The monitor of one run, as the launcher sees it. One thread uses it."""

    def __init__(
        self, wanted: Wanted, run_dir: Path, started_at: float, deadlines: Deadlines, *,
        signals: tuple[int, ...], says: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Start a monitor, which outlives `signals`, those that the launcher handles.

        `says(line)` shows a line until `finish` is called. A start that fails is tried again by
        `poll`. Raises OSError if the shared memory of monitors cannot be created.
        """
        self._wanted, self._deadlines, self._says = wanted, deadlines, says
        self._settings = MonitorSettings(
            run_dir=str(run_dir), started_at=started_at, has_metrics=bool(wanted.listener or wanted.textfile),
            textfile=str(wanted.textfile) if wanted.textfile is not None else None, on_event=wanted.on_event,
            deadlines=deadlines, signals=signals,
        )  # fmt: skip
        self._memory = event_command.create_memory()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ends: RunEnds | None = None
        """Message that every monitor gets from the end of the run on: a monitor that has received
        it may die before it has given the end."""
        self._pauses, self._began_at, self._start_at = Pauses(deadlines.renew_s), 0.0, float("inf")
        if wanted.address is not None:
            says(f"metrics are at {wanted.address}")
        self._start()

    def poll(self) -> None:
        """Show what the monitor has said, and start another one if it has died.

        This never waits.
        """
        status = self._process.poll() if self._process is not None else None
        self._receive()
        if status is not None and not self._has_given_end():
            self._process = None
            self._start_later(f"the monitor ended by {cause_of(status)}")
        if time.monotonic() >= self._start_at:
            self._start()

    def finish(self, exit_code: int, reason: str, is_hurried: Callable[[], bool]) -> None:
        """Have the end of the run given to whoever wants it, and wait for that, within a deadline.

        A monitor that dies meanwhile is started again, too. While `is_hurried()` is true nobody
        waits: the monitor then ends by itself a little later.
        """
        speaker = Speaker()
        self._says = lambda text: speaker.say(f"megatron-recover run: {text}")  # the recorder has ended
        self.poll()
        self._ends, wait_s = RunEnds(exit_code, reason[: MAX_PACKET_BYTES // 8]), self._deadlines.monitor_s
        self._pauses = Pauses(self._deadlines.renew_s)  # there is no time for long pauses any more
        if self._process is None:
            self._start()
        else:
            self._send_end()
        if exit_code not in list(ExitCode):  # killed on request: the user does not wait
            wait_s = self._deadlines.notice_s
        end = time.monotonic() + wait_s
        while not self._has_given_end() and not is_hurried():
            if time.monotonic() > end:
                if exit_code in list(ExitCode):
                    self._give_up()
                break
            self.poll()
            time.sleep(_LOOK_S)
        self._receive()
        speaker.wait(self._deadlines.notice_s)
        self.close()

    def close(self) -> None:
        """Hang up. A monitor that still runs then ends by itself soon."""
        self._hang_up()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
        if self._wanted.listener is not None:
            self._wanted.listener.close()

    def _give_up(self) -> None:
        why = "the monitor does not end, and is killed" if self._process is not None else "no monitor runs"
        self._says(f"{why}; the end of the run may not have been told")
        if self._process is not None:
            self._process.kill()

    # --- The monitor ------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start a monitor. If none can be started, plan another try, which `poll` makes."""
        self._hang_up()
        self._began_at, self._start_at = time.monotonic(), float("inf")
        listener = self._wanted.listener.fileno() if self._wanted.listener is not None else -1
        inherited = (self._memory, listener)
        try:
            self._process, self._control = renewed.start("megatron_recover.cluster.monitor", inherited, self._settings)
        except OSError as error:  # no process or no descriptor is available
            self._start_later(f"no monitor can be started ({error.strerror})")
        self._send_end()

    def _start_later(self, why: str) -> None:
        """Plan the start of another monitor, and report `why`; `poll` starts it after a pause."""
        self._hang_up()
        now = time.monotonic()
        pause_s = self._pauses.after(now - self._began_at)
        self._start_at = now + pause_s
        when = f"in {figure(pause_s)} s a new one" if pause_s else "a new one"
        self._says(f"{why}: {when} reads the trace again, and serves metrics and events")

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _send_end(self) -> None:
        """Send the monitor the end of the run, if that has come."""
        if self._ends is not None and self._control is not None and self._process is not None:
            self._process.send_signal(signal.SIGCONT)  # somebody may have stopped it
            try:
                self._control.send(msgspec.json.encode(self._ends))
            except OSError:
                self._hang_up()  # it has died, and `poll` sees that

    def _has_given_end(self) -> bool:
        """Return whether a monitor has ended as it does once the end of the run was given."""
        return self._ends is not None and self._process is not None and self._process.poll() == 0

    def _receive(self) -> None:
        for _ in range(_MAX_LINES):
            if self._control is None:
                return
            try:
                packet, _ = receive(self._control, MAX_PACKET_BYTES)
            except OSError:
                return
            if not packet:
                return
            self._says(msgspec.json.decode(packet, type=MonitorSays).text)
