"""The launcher's side of the recorder: rings and outputs of all processes, and the recorder itself.

A recorder that dies is started again. Only `finish` and `close` wait for the recorder, with a
deadline. The recorder's fate never changes the run's.

Note [Last words]. At the end of a run that has failed the console shows the last words of ranks,
which are in memory. A job may form newcomers for months, and each rank has one or two outputs. So
the outputs of the ranks that ended last are kept, at least as many as the node has ranks. Those
before are released as soon as the logs have them. A process that a rank has left behind, and
nothing has killed, gets EPERM if it prints then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections import deque
from pathlib import Path

import msgspec

from megatron_recover import trace
from megatron_recover.cluster import event_store, output, renewed
from megatron_recover.cluster import recorder_messages as messages
from megatron_recover.cluster.job import LAUNCHER_LOG, TRAIN_LOG, Job
from megatron_recover.cluster.output import Output, Reader, Who
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.cluster.renewed import Pauses
from megatron_recover.cluster.status import Request, Status
from megatron_recover.cluster.streams import Stream, Tee
from megatron_recover.core import hybrid_clock
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted, verb
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.host import memory_file
from megatron_recover.host.process_stat import cause_of
from megatron_recover.host.speaker import Speaker
from megatron_recover.observe.ending import Account
from megatron_recover.observe.files import LOGS, stdout_log_name
from megatron_recover.trace import ring
from megatron_recover.trace.node_clock import NodeClock

_LAUNCHER = -1
"""Replica number of the launcher, and of the coordinator, in the trace."""
_COORDINATOR = 1
"""Rank number of the coordinator there; that of the launcher is 0."""
_MAX_WAITING = 10_000
"""Number of messages waiting for a recorder at which a new line drops the oldest message, if that
is a line as well."""
_MAX_TEXT = 8_000
"""Characters of such a line that are shown."""
_KEPT_RANKS = 64
"""Ranks that have ended and whose last words are kept, beyond as many as the node has ranks."""
_LOOK_S = 0.05
"""Seconds between two looks at the recorder at the end of the run."""


class _Ring(msgspec.Struct):
    descriptor: int
    place: tuple[int, int]
    has_ended: bool = False


class Recording:
    """The trace and the console of one run, as the launcher sees them. One thread uses it."""

    def __init__(
        self,
        job: Job,
        started_at: float,
        clock: NodeClock,
        *,
        has_stamps: bool = False,
        coordinator: int | None = None,
        quiet: bool = False,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Create the trace, unless it is a FIFO, and start a recorder.

        `clock` is that of this node. `has_stamps`: the run may have several nodes, and so the
        trace has the clock's stamps, which count from `self.clock_base` (`NodeStarted.clock`).
        `coordinator`: the argument of `follow_coordinator`, if the coordinator records already. Its
        events are then older than all others, and would come too late behind them.
        A start that fails is tried again by `poll`. Raises OSError if the folder accepts no trace,
        or a ring, an output or a bookmark cannot be created.
        """
        self._job, self._quiet = job, quiet
        self._deadlines = deadlines or job.config.deadlines
        here = tuple(replica for replica in job.replicas_here if 0 in job.slots(replica)) if job.nodes else None
        self._account = Account(replicas=job.num_replicas, run_dir=str(job.run_dir), here=here)
        self._started_at = started_at
        self.clock_base = hybrid_clock.stamp_at(clock.now_ms)
        self._settings = messages.Settings(
            run_dir=str(job.run_dir), started_at=started_at, account=self._account, quiet=quiet,
            part_bytes=job.trace_file_bytes, output_bytes=output.WAITING_BYTES,
            deadlines=self._deadlines, ignored=job.signals, clock=self.clock_base if has_stamps else None,
            keeps_status=job.node == 0,
        )  # fmt: skip
        # The launcher creates the file, too: a folder that accepts no file is refused before
        # anything is started. A FIFO, behind which somebody collects the trace, exists already.
        events = job.run_dir / trace.EVENTS_FILE
        if not events.is_fifo():
            os.close(os.open(events, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._bookmark, self._output_bookmark = event_store.create_bookmark(), output.create_output_bookmark()
        self._copied = output.OutputBookmark(self._output_bookmark)
        self._outputs: dict[int, Output] = {}
        self._added: dict[int, messages.OutputAdded] = {}
        self._num_outputs = 0
        self._of_rank: dict[tuple[int, int], list[int]] = {}
        """The outputs of each rank that runs."""
        self._kept: deque[int] = deque()
        """Outputs of the ranks that ended last, the oldest first: see `Note [Last words]`."""
        self._num_kept = 2 * (_KEPT_RANKS + job.num_ranks_here)
        self._let_go: set[int] = set()
        """Outputs of ranks that ended before, which the recorder has not released yet."""
        self._rings: dict[int, _Ring] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._outbox: deque[messages.ToRecorder] = deque()
        self._untold: deque[messages.Says] = deque()
        """Lines that were sent and perhaps not shown; the next recorder gets them again."""
        self._status: messages.StatusNews | None = None
        """Newest state of the job. It is not in `_outbox`: a recorder that is stopped would let one
        wait there for each beat."""
        self._is_status_sent = True
        """False while this recorder has not got `_status`."""
        self._requests: list[Request] = []
        self._shown: messages.Shown | None = None
        self._finish: messages.FinishRecording | None = None
        """Message that every recorder gets from the end of the run on: a recorder that has received
        it may die before it has finished."""
        self._speaker = Speaker()
        self._roster: tuple[int, ...] = ()
        self._num_rings = 0
        self._pauses, self._began_at, self._start_at = Pauses(self._deadlines.renew_s), 0.0, float("inf")
        """The pauses, and two times of `time.monotonic()`: the start of the recorder, and the start
        that is planned for the next one."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._decode = msgspec.json.Decoder(messages.Reply).decode
        self._log = ring.RingLog(self._add(_LAUNCHER, 0), clock)
        if coordinator is not None:
            self.follow_coordinator(coordinator)
        self._add_shown_logs()
        self._start()

    def _add_shown_logs(self) -> None:
        """Add the logs of what the console shows."""
        job = self._job
        self.output(job.run_dir / TRAIN_LOG, shown_of=messages.TRAIN_LOG)
        self.output(job.run_dir / LAUNCHER_LOG, shown_of=messages.LAUNCHER_LOG)
        for stream in job.streams.filters:
            which = messages.FILTERED_STDOUT if stream is Stream.OUT else messages.FILTERED_STDERR
            self.output(job.filtered_log_of(stream), shown_of=which)

    @property
    def account(self) -> Account:
        """Return the facts about the run that are known until now."""
        return self._account

    def record(self, event: trace.Event) -> None:
        """Record an event of the launcher. This never waits."""
        self._account.take(event)
        self._log.record(event)

    def follow_coordinator(self, events: int) -> None:
        """Write the events that the coordinator records in the ring with the descriptor `events`.

        The descriptor is closed with the others.
        """
        self._adopt(events, _LAUNCHER, _COORDINATOR)

    def descriptors(self, replica: int, rank: int) -> dict[str, int]:
        """Return the descriptor of a new ring, by name, for a rank that is about to start."""
        descriptor = self._add(replica, rank)
        self.poll()
        return {ring.DESCRIPTOR: descriptor}

    def output(self, log: Path, *, shown_of: int | None = None, is_on_console: bool = True, tee: Tee | None = None) -> Output:
        """Return a new output for a process that is about to be started; it is copied to `log`.

        The other arguments are described at `OutputAdded`. Raises OSError.
        """
        made = output.create(log)
        number, self._num_outputs = self._num_outputs, self._num_outputs + 1
        self._outputs[number] = made
        self._added[number] = messages.OutputAdded(number, str(log), shown_of, is_on_console, tee)
        self._outbox.append(self._added[number])
        return made

    def has_room(self, num_ranks: int) -> bool:
        """Return whether so many more ranks can be recorded in this run."""
        return self._num_rings + num_ranks <= event_store.MAX_RINGS

    def output_of_rank(self, replica: int, rank: int, place: int) -> Output:
        """Return a new output for a rank that is about to be started. Raises OSError.

        `place`: the place among the ranks of the start whose logs and console lines it gets.
        If stdout and stderr of the rank have a log each, the output has another in its `stdout`.
        """
        job, streams = self._job, self._job.streams
        alike = [job.place_of(each, rank) for each in range(job.num_replicas)]
        # Megatron prints in the first and in the last rank of a replica.
        shown_of = replica if rank in (0, job.num_ranks - 1) else None

        def of(log: Path, stream: Stream) -> Output:
            is_on_console = streams.is_on_console(place, stream, alike)
            self._of_rank.setdefault((replica, rank), []).append(self._num_outputs)
            return self.output(log, shown_of=shown_of, is_on_console=is_on_console, tee=streams.tee_of(place, stream))

        if not streams.are_split(place):
            return of(job.log_of(replica, rank), Stream.OUT | Stream.ERR)
        out = of(job.run_dir / stdout_log_name(replica, rank), Stream.OUT)
        return msgspec.structs.replace(of(job.log_of(replica, rank), Stream.ERR), stdout=out)

    def keep(self, status: Status) -> None:
        """Have the state of the job written to its folder, on node 0.

        The recorder gets the newest state only, and every later recorder gets it again.
        """
        self._status, self._is_status_sent = messages.StatusNews(status), False

    def requests(self) -> list[Request]:
        """Return the requests for the job that were left in its folder since the last call."""
        found, self._requests = self._requests, []
        return found

    def coordinator_ended(self) -> None:
        """Note that the coordinator's process has ended."""
        self.ended(_LAUNCHER, _COORDINATOR)

    def announced(self, event: trace.Generation) -> None:
        """Note a generation that the coordinator has recorded, on node 0."""
        self._roster = event.roster
        self._account.take(event)
        if self._job.node:
            self._outbox.append(messages.Announced(event))

    def ended(self, replica: int, rank: int) -> None:
        """Note that the process of a rank has ended. A second call has no effect."""
        number = self._numbers.get((replica, rank))
        if number in self._rings:
            self._rings[number].has_ended = True
            self._outbox.append(messages.RingEnded(number))
        self._kept.extend(self._of_rank.pop((replica, rank), ()))
        while len(self._kept) > self._num_kept:
            self._let_go.add(self._kept[0])
            self._outbox.append(messages.OutputEnded(self._kept.popleft()))

    def says(self, text: str) -> None:
        """Have the recorder show one line of the launcher, and keep it in `launcher.log`.

        A line is cut to `_MAX_TEXT` characters. While `_MAX_WAITING` messages wait, lines may be
        lost.
        """
        if len(self._outbox) >= _MAX_WAITING and isinstance(self._outbox[0], messages.Says):
            self._outbox.popleft()
        self._outbox.append(self._line(text))
        self.poll()

    def _line(self, text: str) -> messages.Says:
        return messages.Says(text[:_MAX_TEXT], round(time.monotonic() - self._started_at, 6))

    def poll(self) -> None:
        """Exchange messages with the recorder, and start another one if it has died."""
        self._send()
        self._drop_output()
        self._receive()
        if self._process is not None and self._process.poll() is not None and self._shown is None:
            self._receive()
            status, self._process = self._process.returncode, None
            self._account.is_complete = False  # its last `CheckpointNews` may not have come
            self._start_later(f"the recorder ended by {cause_of(status)}")
        if time.monotonic() >= self._start_at:
            self._start()

    def finish(self, exit_code: int, reason: str) -> bool:
        """Have the rest of the trace written and the run's end shown, within a deadline.

        Returns whether the end of the trace is written. If the recorder could not show the run's
        end, that is printed on stderr. What the recorder could not write is reported there.
        """
        self._finish = messages.FinishRecording(exit_code, reason[:_MAX_TEXT])
        self._outbox.append(self._finish)
        self._pauses = Pauses(self._deadlines.renew_s)  # there is no time for long pauses any more
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)  # somebody may have stopped it
        else:
            self._start_at = 0.0
        end = time.monotonic() + self._deadlines.trace_s + self._deadlines.terminal_s
        while self._shown is None and time.monotonic() < end:
            self.poll()
            if self._control is None:
                time.sleep(_LOOK_S)
            elif self._shown is None:
                is_readable(self._control, _LOOK_S)
        if (self._shown is None or not self._shown.is_seen) and (exit_code != ExitCode.OK or not self._quiet):
            self._account.is_complete &= self._shown is not None
            for line in self._account.lines(exit_code, reason):
                self._complain(line)
        run_dir, shown = self._job.run_dir, self._shown
        if shown is None:
            self._complain(f"the end of the trace is missing in {run_dir}, and of the logs, as the recorder does not answer")
        elif shown.num_unwritten:
            self._complain(
                f"the end of the trace is missing in {run_dir}: {shown.why}. At least "
                f"{counted(shown.num_unwritten, 'event')} could not be written. The run itself is not affected"
            )
        if shown is not None and shown.num_missing:
            number, are = counted(shown.num_missing, "byte"), verb(shown.num_missing, "is", "are")
            self._complain(f"{number} that ranks have printed {are} missing in {run_dir / LOGS}: {shown.why}")
        return self._shown is not None and not self._shown.num_unwritten

    def close(self) -> None:
        """End the recorder, and close all rings and outputs.

        Without a call of `finish` before, the recorder first writes what there is.
        """
        if self._finish is None and self._bookmark >= 0:
            self._abandon()
        self._hang_up()
        if self._process is not None:
            # A recorder that has not shown the end has used up its time, and one that the disk
            # blocks cannot end.
            wait_s = self._deadlines.terminal_s if self._shown is not None and not self._shown.why else 0.0
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                self._process.kill()  # one that the disk blocks ends only later; nobody waits for that
            self._process = None
        for each in self._rings.values():
            os.close(each.descriptor)
        self._rings.clear()
        for made in self._outputs.values():
            _give_back(made)
        self._outputs.clear()
        if self._bookmark >= 0:
            os.close(self._bookmark)
            os.close(self._output_bookmark)
            self._bookmark = -1

    def _abandon(self) -> None:
        """Have a recorder write what there is after an exception, as if it had no launcher."""
        end = time.monotonic() + self._deadlines.abandoned_s
        if self._process is None or self._process.poll() is not None:
            self._process = None
            self._start()
        while self._process is not None and self._process.poll() is None and time.monotonic() < end:
            if self._control is not None:
                self._send()  # a new recorder has no messages yet
                if self._next is None:
                    self._hang_up()
            time.sleep(_LOOK_S)
        if self._process is None or self._process.returncode != 0:
            self._complain(f"trace and logs may miss their end in {self._job.run_dir}: no recorder has written all of it")

    # --- The recorder -----------------------------------------------------------------------------

    def _add(self, replica: int, rank: int) -> int:
        """Create a ring and return its descriptor."""
        return self._adopt(ring.create(level=self._job.trace_level, capacity=self._job.ring_bytes), replica, rank)

    def _adopt(self, descriptor: int, replica: int, rank: int) -> int:
        """Have the recorder read a ring; return its descriptor, which is ours to close."""
        if self._num_rings == event_store.MAX_RINGS:
            raise RuntimeError(f"more than {event_store.MAX_RINGS} processes were started in this run")
        number, self._num_rings = self._num_rings, self._num_rings + 1
        self._rings[number] = _Ring(descriptor, (replica, rank))
        self._numbers[replica, rank] = number
        self._outbox.append(messages.Ring(number, replica, rank))
        return descriptor

    def _start(self) -> None:
        """Start a recorder, and queue all messages that it needs.

        If none can be started, try again later.
        """
        self._hang_up()
        self._began_at, self._start_at = time.monotonic(), float("inf")
        others = [*self._untold, *(each for each in self._outbox if isinstance(each, messages.Says))]
        self._untold.clear()
        self._outbox.clear()
        self._is_status_sent = self._status is None
        for number, each in self._rings.items():
            self._outbox.append(messages.Ring(number, *each.place))
            if each.has_ended:
                self._outbox.append(messages.RingEnded(number))
        for number in self._outputs:
            self._outbox.append(self._added[number])
            if number in self._let_go:
                self._outbox.append(messages.OutputEnded(number))
        self._outbox.extend(others)
        if self._finish is not None:
            self._outbox.append(self._finish)
        settings = msgspec.structs.replace(self._settings, num_rings=len(self._rings), roster=self._roster)
        inherited = (self._bookmark, self._output_bookmark)
        try:
            self._process, self._control = renewed.start("megatron_recover.cluster.recorder", inherited, settings)
        except OSError as error:  # no process or no descriptor is available
            self._start_later(f"no recorder can be started ({error.strerror})")

    def _start_later(self, why: str) -> None:
        """Plan the start of another recorder, and report `why`; `poll` starts it after a pause.

        The pause grows while recorders die in a row.
        """
        self._hang_up()
        now = time.monotonic()
        pause_s = self._pauses.after(now - self._began_at)
        self._start_at = now + pause_s
        if pause_s:
            why += f", as did those before; in {figure(pause_s)} s a new one continues the trace. Until then events and "
            why += "output wait in memory, and what does not fit there is lost"
            self._speaker.say(_ours(why))  # without a wait: this runs in the coordinator's loop
        else:
            why += ": a new one continues the trace"
        self._outbox.append(self._line(why))

    def _drop_output(self) -> None:
        """Drop output that has no room in memory, as the recorder may be stopped or gone."""
        read = {
            Reader.SHOWN: {number for number, each in self._added.items() if each.shown_of is not None and each.shown_of >= 0},
            Reader.TEED: {number for number, each in self._added.items() if each.tee is not None},
        }
        why = self._copied.cause(time.monotonic_ns(), self._deadlines.still_s)
        self._copied.drop(self._outputs, self._settings.output_bytes, Who.LAUNCHER, why=why, read=read)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    @property
    def _next(self) -> messages.ToRecorder | None:
        """Return the next message for the recorder; None if there is none.

        The state comes first: the recorder reads nothing behind `FinishRecording`.
        """
        if not self._is_status_sent:
            return self._status
        return self._outbox[0] if self._outbox else None

    def _send(self) -> None:
        while self._control is not None and (told := self._next) is not None:
            try:
                self._hand_over(self._control, told)
            except OSError as error:
                # EMSGSIZE: no later try would send this message, and all others would wait behind
                # it. Otherwise the recorder is busy, stopped or dead (`poll` sees that), or there
                # is no memory or descriptor for a file.
                if error.errno != errno.EMSGSIZE:
                    return
            if told is self._status:
                self._is_status_sent = True
                continue
            self._outbox.popleft()
            if isinstance(told, messages.Says):
                self._untold.append(told)

    def _hand_over(self, control: socket.socket, told: messages.ToRecorder) -> None:
        """Send one message, in a file if it is too long for a packet.

        Raises BlockingIOError while the recorder takes nothing, and other OSError if it is dead, if
        the message is too long for the socket, or if no file can be created.
        """
        packet = msgspec.json.encode(told)
        match told:
            case messages.Ring(number):
                socket.send_fds(control, [packet], [self._rings[number].descriptor])
            case messages.OutputAdded(number):
                socket.send_fds(control, [packet], [self._outputs[number].descriptor])
            case _ if len(packet) > messages.MAX_PACKET_BYTES:
                descriptor = memory_file.create_with("message", packet)
                try:
                    socket.send_fds(control, [msgspec.json.encode(messages.InFile())], [descriptor])
                finally:
                    os.close(descriptor)
            case _:
                control.send(packet)

    def _receive(self) -> None:
        while self._control is not None:
            try:
                packet, _ = receive(self._control, messages.MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if not packet:
                return
            match self._decode(packet):
                case messages.Drained(number):
                    os.close(self._rings.pop(number).descriptor)
                case messages.Released(number):
                    self._let_go.discard(number)
                    self._added.pop(number)
                    _give_back(self._outputs.pop(number))
                case messages.CheckpointNews(loaded, saved):
                    self._account.loaded, self._account.saved = loaded, saved
                case messages.LinesTold(num_lines):
                    for _ in range(num_lines):
                        self._untold.popleft()
                case messages.Requested(request):
                    self._requests.append(request)
                case messages.Shown() as shown:
                    self._shown = shown

    def _complain(self, text: str) -> None:
        """Show a line on stderr; wait only briefly for a terminal that accepts nothing (Ctrl-S)."""
        self._speaker.say(_ours(text))
        self._speaker.wait(self._deadlines.notice_s)


def _give_back(made: Output) -> None:
    """Release the memory of an output, and close its descriptor."""
    with contextlib.suppress(OSError):
        made.seal()
    made.close()


def _ours(text: str) -> str:
    return f"megatron-recover run: {text}"
