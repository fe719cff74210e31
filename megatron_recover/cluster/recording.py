"""The launcher's side of the recorder: the rings of all processes, and a process that is started again if it dies.

No call waits for the recorder, but for `finish`, which has a deadline. What becomes of the recorder never changes what becomes
of the run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque

import msgspec

from megatron_recover import ring, trace
from megatron_recover.cluster import event_store, recorder
from megatron_recover.cluster.console import Missing
from megatron_recover.cluster.job import LOGS, Job
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.collectives.speaker import Speaker
from megatron_recover.core.values import ExitCode

_LAUNCHER = -1
"""What the trace calls the launcher where it names a replica."""
_MAX_STARTS = 5
"""So many recorders have a try; the fault is then not that of one of them."""
_MAX_WAITING = 10_000
"""Lines for the console that a recorder does not take; the oldest go."""
_MAX_TEXT = 8_000
"""Characters of such a line that are shown."""
TRACE_DEADLINE_S = 10.0
"""For the end of the trace to be written, when all ranks have ended."""
_TERMINAL_DEADLINE_S = 7.0
"""For the terminal to show how the run ended, after that."""
_ABANDONED_DEADLINE_S = 3.0
_COMPLAINT_S = 1.0
"""For a line of ours on stderr."""


class _Ring(msgspec.Struct):
    descriptor: int
    place: tuple[int, int]
    has_ended: bool = False


class Recording:
    """The trace and the console of one run, as the launcher sees them. Used by one thread."""

    def __init__(self, job: Job, started_at: float, *, quiet: bool = False) -> None:
        """Create the trace, empty, and start a recorder. Raises OSError where the folder takes no trace."""
        self._job, self._quiet = job, quiet
        self._settings = recorder.Settings(
            run_dir=str(job.run_dir), started_at=started_at, num_replicas=job.num_replicas, num_ranks=job.num_ranks,
            quiet=quiet, part_bytes=job.trace_file_bytes,
        )  # fmt: skip
        # Not by the recorder alone: a folder that takes nothing is refused before anything is started. A FIFO, behind which
        # somebody collects the trace, is there already.
        events = job.run_dir / trace.EVENTS_FILE
        if not events.is_fifo():
            os.close(os.open(events, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._ledger = event_store.create_ledger()
        self._rings: dict[int, _Ring] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._outbox: deque[recorder.Told] = deque()
        self._shown: recorder.Shown | None = None
        self._finish: recorder.Finish | None = None
        """What every recorder is told from the end of the run on: one that has heard it may die before it has done it."""
        self._speaker = Speaker()
        self._roster: tuple[int, ...] = ()
        self._num_starts, self._num_rings = 0, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._decode = msgspec.json.Decoder(recorder.Reply).decode
        self._log = ring.RingLog(self._add(_LAUNCHER, 0))
        self._start()

    def record(self, event: trace.Event) -> None:
        """Record an event of the launcher. It never waits."""
        if isinstance(event, trace.Generation):
            self._roster = event.roster
        self._log.record(event)

    def descriptors(self, replica: int, rank: int) -> dict[str, int]:
        """Return what a rank that is about to be started inherits: a new ring, by its name."""
        descriptor = self._add(replica, rank)
        self.poll()
        return {ring.DESCRIPTOR: descriptor}

    def ended(self, replica: int, rank: int) -> None:
        """Note that the process of a rank lives no more."""
        number = self._numbers.get((replica, rank))
        if number in self._rings:
            self._rings[number].has_ended = True
            self._outbox.append(recorder.Ended(number))

    def says(self, text: str) -> None:
        """Show one line of ours."""
        if len(self._outbox) >= _MAX_WAITING and isinstance(self._outbox[0], recorder.Says):
            self._outbox.popleft()
        self._outbox.append(recorder.Says(text[:_MAX_TEXT]))
        self.poll()

    def poll(self) -> None:
        """Exchange with the recorder what there is to exchange, and start another one if it has died."""
        self._send()
        self._receive()
        if self._process is not None and self._process.poll() is not None and self._shown is None:
            self._receive()
            status, self._process = self._process.returncode, None
            how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            if self._num_starts < _MAX_STARTS:
                self._outbox.append(recorder.Says(f"the recorder ended by {how}: another one goes on with the trace"))
                self._start()
            else:
                self._complain(f"the recorder has ended {_MAX_STARTS} times, now by {how}: no more of the trace is written")
                self._hang_up()

    def finish(self, exit_code: int, reason: str) -> bool:
        """Have the rest of the trace written and the end of the run shown, within a deadline. Return whether it is written."""
        self._finish = recorder.Finish(exit_code, reason[:_MAX_TEXT], TRACE_DEADLINE_S)
        self._outbox.append(self._finish)
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)  # somebody may have stopped it
        end = time.monotonic() + TRACE_DEADLINE_S + _TERMINAL_DEADLINE_S
        while self._shown is None and time.monotonic() < end:
            self.poll()
            if self._control is None:
                break
            if self._shown is None:
                is_readable(self._control, 0.05)
        missing = Missing.EVERYTHING if self._shown is None else self._shown.missing
        if missing is Missing.EVERYTHING and (exit_code != ExitCode.OK or not self._quiet):
            self._complain(f"exit code {exit_code} ({ExitCode.words(exit_code)}): {reason}")
        elif missing is Missing.LOGS:
            logs = self._job.run_dir / LOGS
            self._complain(f"the ends of the logs in {logs} could not be shown in time: the disk, or the terminal, is slow")
        if self._shown is None:
            self._complain(f"the end of the trace is missing in {self._job.run_dir}, as the recorder does not answer")
        elif self._shown.num_unwritten:
            self._complain(
                f"the end of the trace is missing in {self._job.run_dir}: {self._shown.why}. At least "
                f"{self._shown.num_unwritten} events could not be written. The run itself is not affected"
            )
        return self._shown is not None and not self._shown.num_unwritten

    def close(self) -> None:
        """End the recorder, which writes what there is first if it was not told to finish."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_ABANDONED_DEADLINE_S if self._shown is None else _TERMINAL_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # where the disk holds it, it ends when the disk lets it; nobody waits for that
            self._process = None
        for each in self._rings.values():
            os.close(each.descriptor)
        self._rings.clear()
        if self._ledger >= 0:
            os.close(self._ledger)
            self._ledger = -1

    # --- The recorder ------------------------------------------------------------------------------------------------

    def _add(self, replica: int, rank: int) -> int:
        """Create a ring and return its descriptor."""
        if self._num_rings == event_store.MAX_RINGS:
            raise RuntimeError(f"more than {event_store.MAX_RINGS} processes were started in this run")
        number, self._num_rings = self._num_rings, self._num_rings + 1
        descriptor = ring.create(level=self._job.trace_level, capacity=self._job.ring_bytes)
        self._rings[number] = _Ring(descriptor, (replica, rank))
        self._numbers[replica, rank] = number
        self._outbox.append(recorder.Ring(number, replica, rank))
        return descriptor

    def _start(self) -> None:
        """Start a recorder, and tell it all that the one before it knew."""
        self._hang_up()
        self._num_starts += 1
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        settings = msgspec.structs.replace(
            self._settings, num_rings=len(self._rings), again=self._num_starts > 1, roster=self._roster
        )
        command = [
            sys.executable, "-m", "megatron_recover.cluster.recorder", str(theirs.fileno()), str(self._ledger),
            msgspec.json.encode(settings).decode(),
        ]  # fmt: skip
        others = [each for each in self._outbox if isinstance(each, recorder.Says)]
        self._outbox.clear()
        for number, each in self._rings.items():
            self._outbox.append(recorder.Ring(number, *each.place))
            if each.has_ended:
                self._outbox.append(recorder.Ended(number))
        self._outbox.extend(others)
        if self._finish is not None:
            self._outbox.append(self._finish)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), self._ledger), start_new_session=True
                )
            except OSError as error:
                self._complain(f"no recorder can be started ({error.strerror}): no more of the trace is written")
                self._hang_up()

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _send(self) -> None:
        while self._outbox and self._control is not None:
            told = self._outbox[0]
            handed = [self._rings[told.number].descriptor] if isinstance(told, recorder.Ring) else []
            try:
                socket.send_fds(self._control, [msgspec.json.encode(told)], handed)
            except BlockingIOError:
                return  # it is busy, or stopped
            except OSError:
                return  # it has died: `poll` sees that
            self._outbox.popleft()

    def _receive(self) -> None:
        while self._control is not None:
            try:
                packet = self._control.recv(recorder.MAX_PACKET_BYTES)
            except OSError:  # nothing there, or nobody
                return
            if not packet:
                return
            match self._decode(packet):
                case recorder.Drained(number):
                    os.close(self._rings.pop(number).descriptor)
                case recorder.Shown() as shown:
                    self._shown = shown

    def _complain(self, text: str) -> None:
        """Say something on stderr, and wait only shortly for a terminal that takes nothing (Ctrl-S)."""
        self._speaker.say(f"megatron-recover run: {text}")
        self._speaker.wait(_COMPLAINT_S)
