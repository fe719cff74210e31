"""The monitor: the process that serves the metrics of a run, and gives its notices to a command.

It follows the trace as `top` does, so nothing in the run waits for it, and it costs the launcher
one look at a process. A monitor that dies is started again (`cluster/monitoring.py`). The next one
reads the trace from its beginning, and so has the same counts. It ends soon after the run, or after
its launcher.

Threads: the main one listens to the launcher, one reads the trace, and one each writes the text
file, runs the command and accepts connections. A disk, a command or a client that stalls holds up
its own thread only.

`cluster.monitoring.Monitoring` runs it as ``python -m megatron_recover.cluster.monitor FD MEMORY
LISTENER SETTINGS``:

- FD: a SOCK_SEQPACKET socket, on which each packet is one JSON message;
- MEMORY: the descriptor of `event_command.Memory`;
- LISTENER: the descriptor of the socket on which metrics are served, or -1;
- SETTINGS: `MonitorSettings` as JSON.

It imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from megatron_recover import trace
from megatron_recover.cluster.event_command import EventCommand, Memory
from megatron_recover.cluster.monitor_messages import MAX_LINE, MAX_PACKET_BYTES, MonitorSays, MonitorSettings, RunEnds
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.rank_process import TOLD_TO_ALL, set_parent_death_signal, set_process_name
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.host.addresses import host_name
from megatron_recover.host.whole_file import replacing
from megatron_recover.observe.follow.metrics import RunMetrics
from megatron_recover.observe.follow.notices import KILLED, Notices
from megatron_recover.observe.follow.tails import Tails

_INTERVAL_S = 0.25
"""Seconds between two reads of the trace."""
_TEXTFILE_S = 5.0
"""Seconds between two versions of the text file."""
_LOOK_S = 1.0
"""Seconds between two looks at the launcher while it sends nothing."""
_NICENESS = 10
"""Priority of this process and of the command: ranks come first."""
_WANTED = RunMetrics.WANTED | Notices.WANTED


class Monitor:
    """The monitor of one run."""

    def __init__(
        self, control: socket.socket, memory: Memory, listener: socket.socket | None, settings: MonitorSettings
    ) -> None:
        """`control` is the socket to the launcher. Reading begins at once."""
        self._control, self._settings, self._deadlines = control, settings, settings.deadlines
        control.setblocking(False)
        began_at = time.time() - time.monotonic() + settings.started_at
        self._lock = threading.Lock()
        """Held for every use of `_metrics` and `_notices`."""
        self._metrics = RunMetrics(began_at)
        self._notices = Notices(run_dir=settings.run_dir, host=host_name(), began_at=began_at)
        self._has_read_end = threading.Event()
        self._is_over = threading.Event()
        self._command: EventCommand | None = None
        if memory.end_command() and memory.has_end:
            self._says("--on-event: the monitor ended with the command for the end of the run, which is not given again")
        if settings.on_event:
            self._command = EventCommand(settings.on_event, memory, command_s=self._deadlines.command_s, says=self._says)
        self._listener = listener
        self._writer: threading.Thread | None = None
        threading.Thread(target=self._read, name="trace", daemon=True).start()

    def run(self) -> None:
        """Serve until the launcher sends `RunEnds`, or is gone; then give the end, and return."""
        ends, is_gone = None, False
        while ends is None and not is_gone:
            is_readable(self._control, _LOOK_S)
            with contextlib.suppress(BlockingIOError):
                packet, _ = receive(self._control, MAX_PACKET_BYTES)
                is_gone = not packet
                ends = msgspec.json.decode(packet, type=RunEnds) if packet else None
        self._has_read_end.wait(self._deadlines.last_events_s)
        with self._lock:
            if not self._notices.has_ended:  # the trace lacks its end
                exit_code, reason = (None, KILLED) if ends is None else (ends.exit_code, ends.reason)
                self._metrics.ended(exit_code)
                notice = self._notices.ended(exit_code, reason, time.monotonic() - self._settings.started_at)
                if self._command is not None:
                    self._command.give(notice)
        self._is_over.set()
        if self._writer is not None:
            self._writer.join(self._deadlines.store_s)
        if self._command is not None:
            self._command.finish()

    def _serve(self) -> None:
        """Serve metrics on the port and in the text file, as far as these are wanted."""
        from megatron_recover.cluster.exposition import MetricsServer, RunCollector

        collector = RunCollector(self._metrics, self._lock, Path(self._settings.run_dir).name)
        if self._listener is not None:
            MetricsServer(self._listener, collector, scrape_s=self._deadlines.scrape_s)
        if self._settings.textfile is not None:
            told = Path(self._settings.textfile), collector.text, self._is_over, self._says
            self._writer = threading.Thread(target=keep_textfile, args=told, name="textfile", daemon=True)
            self._writer.start()

    def _says(self, text: str) -> None:
        """Send one line for the console, or drop it if the launcher does not read."""
        with contextlib.suppress(OSError):
            self._control.send(msgspec.json.encode(MonitorSays(text[:MAX_LINE])))

    # --- The thread that reads the trace ----------------------------------------------------------

    def _read(self) -> None:
        """Read the trace until its end, and serve metrics once all that is there was read.

        Served earlier, the counters of a monitor that begins anew would go back, and Prometheus
        would count everything twice. Requests wait meanwhile.
        """
        tail, trouble = Tails(Path(self._settings.run_dir) / trace.EVENTS_FILE), ""
        is_served = not self._settings.has_metrics
        while not (self._has_read_end.is_set() or self._is_over.is_set()):
            try:
                for line in tail.lines():
                    self._take(line)
                trouble = ""
                if not is_served:
                    self._serve()
                    is_served = True
            except trace.TraceError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    self._says(f"WARNING: metrics and events of this run stand still: {error}")
            self._is_over.wait(_INTERVAL_S)

    def _take(self, line: bytes) -> None:
        """Take a line of the trace. Lines without an effect here are not decoded."""
        if trace.name_in(line) not in _WANTED:
            return
        try:
            event, _ = trace.parse(line)
        except ValueError:  # `check` names it
            return
        with self._lock:
            if event is None or self._notices.has_ended:
                return
            self._metrics.take(event)
            for notice in self._notices.take(event):
                if self._command is not None:
                    self._command.give(notice)
        if isinstance(event, trace.RunFinished):
            self._has_read_end.set()


def keep_textfile(
    path: Path,
    text: Callable[[], bytes],
    is_over: threading.Event,
    says: Callable[[str], None],
    interval_s: float = _TEXTFILE_S,
) -> None:
    """Write the text to a file again and again, and a last time when `is_over` is set.

    The file is whole at every instant. Trouble with it is one line, and so is its end.
    """
    is_in_trouble, pause_s, is_last = False, 0.0, False
    while not is_last:
        is_last, pause_s = is_over.wait(pause_s), interval_s
        try:
            with replacing(path, partial=path.with_name(f".{path.name}.{os.getpid()}")) as file:  # follows no link
                file.write(text())
        except OSError as error:
            if not is_in_trouble:
                says(f"WARNING: --metrics-textfile {path} cannot be written ({error.strerror}); the run goes on without it")
            is_in_trouble = True
        else:
            if is_in_trouble:
                says(f"--metrics-textfile {path} is written again")
            is_in_trouble = False


def _end(raised: threading.ExceptHookArgs) -> None:
    """End this process for the error of one of its threads: the launcher starts another one."""
    threading.__excepthook__(raised)
    os._exit(1)


def main() -> None:
    """Monitor the run that the command line describes, then end this process with exit code 0.

    An error in a side thread ends the process with exit code 1 at once.
    """
    threading.excepthook = _end
    settings = msgspec.json.decode(sys.argv[4], type=MonitorSettings)
    # As for the recorder. Handlers, since a command would inherit SIG_IGN.
    for number in {*TOLD_TO_ALL, *settings.signals}:
        signal.signal(number, lambda *_: None)
    set_parent_death_signal(signal.SIGCONT)  # somebody may have stopped this process
    set_process_name("monitor")
    os.nice(_NICENESS)
    control, memory = socket.socket(fileno=int(sys.argv[1])), Memory(int(sys.argv[2]))
    listener = socket.socket(fileno=int(sys.argv[3])) if int(sys.argv[3]) >= 0 else None
    Monitor(control, memory, listener, settings).run()
    os._exit(0)  # do not wait for threads that a disk or a client blocks


if __name__ == "__main__":
    main()
