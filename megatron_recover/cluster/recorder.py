"""The recorder: the process that writes a run's trace and logs and runs the console.

It reads events and output from memory that it shares with the run's processes. No rank waits for
the recorder. A disk that stalls or is full, a slow terminal and the recorder's own death cost at
most events and output, never a step. Lost events and output are counted and reported. The launcher
starts the recorder, sends it what it has to know (`ToRecorder`), and starts another one if it dies.
The recorder ends on `FinishRecording`, or when the launcher is gone. `narrator.py` puts the run
into words.

`cluster.recording.Recording` runs it as ``python -P -m megatron_recover.cluster.recorder FD
BOOKMARK OUTPUTS SETTINGS``:

- FD: a SOCK_SEQPACKET socket, on which each packet is one JSON message;
- BOOKMARK, OUTPUTS: the descriptors of the bookmarks of events and of outputs;
- SETTINGS: `Settings` as JSON.

It imports no torch.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from megatron_recover.cluster.console import Console
from megatron_recover.cluster.event_store import Bookmark, EventStore, Keeper
from megatron_recover.cluster.events import Events
from megatron_recover.cluster.logs import LogWriter, Outputs
from megatron_recover.cluster.narrator import HOLD_S, Narrator
from megatron_recover.cluster.output import Output, OutputBookmark
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.rank_process import TOLD_TO_ALL, set_parent_death_signal, set_process_name
from megatron_recover.cluster.readiness import is_readable, is_writable
from megatron_recover.cluster.recorder_messages import (
    FILTERED_STDERR,
    FILTERED_STDOUT,
    LAUNCHER_LOG,
    MAX_PACKET_BYTES,
    TRAIN_LOG,
    Announced,
    CheckpointNews,
    Drained,
    FinishRecording,
    InFile,
    LinesTold,
    OutputAdded,
    OutputEnded,
    Released,
    Reply,
    Requested,
    Ring,
    RingEnded,
    Says,
    Settings,
    Shown,
    StatusNews,
    ToRecorder,
)
from megatron_recover.cluster.status import Request, StatusKeeper
from megatron_recover.cluster.streams import Tee
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.host import memory_file
from megatron_recover.host.process_stat import state_of
from megatron_recover.observe.files import LOGS, log_name, stdout_log_name

_INTERVAL_S = 0.2
"""Seconds between two turns: the age of the file's newest line while the disk keeps up."""
_SOON_S = 0.003
"""Seconds between two turns when every moment counts, and the time that a turn waits for a
batch."""
_TELL_LOSSES_S = 10.0
_STOPPED = "T"


class Recorder:
    """The main thread of the recorder. Disk and terminal have threads of their own."""

    def __init__(
        self, control: socket.socket, bookmark: Bookmark, outputs: OutputBookmark, settings: Settings, store: EventStore
    ) -> None:
        """Start the thread that writes the trace and the one that writes logs.

        `control` is the socket to the launcher and becomes non-blocking. The parent of this process
        is taken for the launcher.
        """
        self._control, self._settings, self._deadlines = control, settings, settings.deadlines
        self._outputs = Outputs(
            outputs, limit_bytes=settings.output_bytes, slow_disk_s=self._deadlines.slow_disk_s,
            speaks=lambda replica: self._narrator.is_writer(replica), keep=lambda lines: self._keep(TRAIN_LOG, lines),
        )  # fmt: skip
        self._own_logs: dict[int, Output] = {}
        launcher = os.getppid()
        self._console = Console(quiet=settings.quiet, is_held=lambda: _is_stopped(launcher), deadlines=self._deadlines)
        began_at = time.time() - time.monotonic() + settings.started_at
        self._narrator = Narrator(
            settings.account, began_at=began_at, show=self._console.show,
            show_error=self._console.show_error,
            log=lambda line: self._keep(LAUNCHER_LOG, f"{line}\n".encode()), roster=settings.roster,
            of_several=settings.clock is not None,
        )  # fmt: skip
        self._noted = CheckpointNews(settings.account.loaded, settings.account.saved)
        control.setblocking(False)
        self._decode = msgspec.json.Decoder(ToRecorder).decode
        self._events = Events(bookmark, store, settings, wanted=Narrator.WANTED, take=self._narrator.take)
        self._unsent: deque[bytes] = deque()
        """Encoded replies for which the socket had no room."""
        self._untold: deque[float] = deque()
        """Times of the launcher's lines that are not shown yet, in seconds of the trace's clock."""
        self._finish: FinishRecording | None = None
        self._requests: deque[Request] = deque()
        """Requests that the thread `status` has found and the launcher was not sent."""
        self._status: StatusKeeper | None = None
        if settings.keeps_status:
            self._status = StatusKeeper(Path(settings.run_dir), self._requests.append, since=began_at)
        self._is_orphan = False
        self._losses_told_at, self._was_told = 0.0, (0, 0, 0, 0)
        self._troubles = dict.fromkeys(_WHAT, "")

    def run(self) -> None:
        """Record until the launcher sends `FinishRecording`, or is gone.

        Then write and show what is left, within deadlines, and seal all outputs.
        """
        self._console.start()
        while self._finish is None and not self._is_orphan:
            is_readable(self._control, self._pause_s())
            if self._turn():
                # A message ends the wait, and there may be thousands: without this pause each would
                # cost a drain.
                time.sleep(_SOON_S)
        if self._is_orphan:
            end = time.monotonic() + self._deadlines.orphan_s
            while time.monotonic() < end:
                time.sleep(self._pause_s())
                self._turn()
        self._outputs.writer.hurry()
        self._events.all_ended()
        until = time.monotonic() + self._deadlines.trace_s
        left = self._write_events(until)
        self._tell(time.monotonic(), at_the_end=True)
        self._show_end()
        shown = self._write_logs(until, left)
        is_seen = self._console.close()
        if self._status is not None:
            self._status.finish(self._deadlines.store_s)
        if self._finish is not None:
            self._send(msgspec.structs.replace(shown, is_seen=is_seen))
            end = time.monotonic() + self._deadlines.replies_s
            while self._unsent and (left_s := end - time.monotonic()) > 0:
                is_writable(self._control, left_s)
                self._send_unsent()
        self._outputs.seal()

    def _turn(self) -> bool:
        """Do one turn. Return whether the launcher has sent a message."""
        has_heard = self._receive()
        while self._requests:
            self._send(Requested(self._requests.popleft()))
        self._send_unsent()
        self._outputs.make_room()
        now = time.monotonic_ns()
        # Events up to `now` may name another writer. The lines that the former writer printed
        # before are there by now, so they are shown first.
        self._take_lines()
        if self._events.num_rings >= self._settings.num_rings:
            self._drain(now)
        self._write()
        for number in self._outputs.released():
            self._send(Released(number))
        self._tell(time.monotonic())
        self._narrate(self._seconds() - HOLD_S)
        if self._console.is_live:
            self._console.now = self._narrator.progress.line()
        return has_heard

    def _pause_s(self) -> float:
        """Return the seconds until the next turn."""
        since = self._events.keeper.busy_since
        is_written_soon = since is None or time.monotonic() - since < _INTERVAL_S
        is_behind = self._outputs.has_more or (self._events.is_ahead and is_written_soon)
        return _SOON_S if self._outputs.is_filling or is_behind else _INTERVAL_S

    def _seconds(self) -> float:
        """Return the time of the trace's clock, in seconds."""
        return time.monotonic() - self._settings.started_at

    def _narrate(self, until: float) -> None:
        """Show what happened until that time, in seconds of the trace's clock.

        The launcher keeps its lines until they are shown, for the next recorder. Where too many
        wait to be sent it drops the oldest.
        """
        self._narrator.tell(until)
        if self._status is not None:
            self._status.see(self._narrator.seen)
        num_lines = 0
        while self._untold and self._untold[0] <= until:
            self._untold.popleft()
            num_lines += 1
        if num_lines:
            self._send(LinesTold(num_lines))

    def _note(self) -> None:
        """Send the launcher any news of checkpoints, which the next recorder needs."""
        account = self._narrator.account
        if (noted := CheckpointNews(account.loaded, account.saved)) != self._noted:
            self._noted = noted
            self._send(noted)

    # --- From the launcher ------------------------------------------------------------------------

    def _receive(self) -> bool:
        has_heard = False
        while self._finish is None and not self._is_orphan:
            try:
                packet, descriptors = receive(self._control, MAX_PACKET_BYTES, 1)
            except BlockingIOError:
                break
            if not packet:
                self._is_orphan = True
                break
            has_heard = True
            self._heard(self._decode(packet), descriptors)
        return has_heard

    def _heard(self, told: ToRecorder, descriptors: list[int]) -> None:
        match told:
            case Ring(number, replica, rank):
                [descriptor] = descriptors
                self._events.add(number, descriptor, replica=replica, rank=rank)
                os.close(descriptor)
            case OutputAdded(number, log, shown_of, is_on_console, tee):
                output = Output(descriptors[0], Path(log))
                if shown_of is not None and shown_of < 0:
                    self._own_logs[shown_of], shown_of = output, None
                self._outputs.add(number, output, shown_of=shown_of, is_on_console=is_on_console, tee=tee)
            case OutputEnded(number):
                self._outputs.ended(number)
            case RingEnded(number):
                self._events.ended(number)
            case Announced(generation):
                self._narrator.take(generation)
            case Says(text, seconds):
                self._narrator.says(text, seconds)
                self._untold.append(seconds)
            case StatusNews(status):
                if self._status is not None:
                    self._status.take(status)
            case FinishRecording():
                self._finish = told
            case InFile():
                [descriptor] = descriptors
                content = memory_file.read(descriptor)
                os.close(descriptor)
                self._heard(self._decode(content), [])

    def _send(self, reply: Reply) -> None:
        self._unsent.append(msgspec.json.encode(reply))
        self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                self._control.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return  # the launcher is busy or stopped; at most one reply per ring, output, line and checkpoint waits
        except OSError:
            self._unsent.clear()  # the launcher is gone

    # --- From the outputs -------------------------------------------------------------------------

    def _take_lines(self, until: float = float("inf"), *, at_end: bool = False) -> None:
        """Have the narrator take new lines of the outputs, until `time.monotonic()` is `until`."""

        def in_time[Line](lines: Iterable[Line]) -> Iterator[Line]:
            return itertools.takewhile(lambda _: time.monotonic() < until, lines)

        self._narrator.take_lines(in_time(self._outputs.look(at_end=at_end)), self._seconds())
        self._narrator.take_teed(map(self._filtered, in_time(self._outputs.teed(at_end=at_end))), self._seconds())

    def _filtered(self, teed: tuple[Tee, str]) -> tuple[Tee, str]:
        """Return a teed line unchanged.

        If the line contains one of the texts in `Tee.filters`, also write it to the log of such
        lines.
        """
        tee, line = teed
        if any(text in line for text in tee.filters):
            self._keep(FILTERED_STDERR if tee.is_error else FILTERED_STDOUT, f"{tee.prefix}{line}\n".encode())
        return teed

    def _keep(self, which: int, lines: bytes) -> None:
        """Write lines into the output of a log of our own, such as `TRAIN_LOG`."""
        if which in self._own_logs:
            os.write(self._own_logs[which].descriptor, lines)

    # --- From the rings to the disk ---------------------------------------------------------------

    def _drain(self, now: int) -> None:
        self._events.read(now)
        self._note()  # before any of these events is written: the next recorder continues after written events

    def _write(self) -> None:
        """Have events written, and send the launcher `Drained` for exhausted rings."""
        for number in self._events.write(wait_s=_SOON_S):
            self._send(Drained(number))

    # --- The end ----------------------------------------------------------------------------------

    def _write_events(self, until: float) -> bool:
        """Write every recorded event. Return whether some are left.

        Events that the disk has not taken by `until`, or that it refuses for too long, are given
        up.
        """
        refused_until = min(until, time.monotonic() + self._deadlines.refused_s)
        left = True
        half = (time.monotonic() + until) / 2  # hundreds of megabytes of lines must leave time for events
        self._look_for_the_last_time(half)
        while left and time.monotonic() < (until if self._error is None else refused_until):
            self._drain(time.monotonic_ns())
            self._write()
            left = self._events.has_more
        self._look_for_the_last_time(half)  # the last events may have named another writer
        return left

    def _look_for_the_last_time(self, until: float) -> None:
        self._outputs.make_room()
        self._take_lines(until, at_end=True)

    def _show_end(self) -> None:
        """Show the rest, and how the run ended if the launcher has sent that.

        On the console the end comes after the last lines of the logs of what failed. After bad
        input stderr gets the reason instead. A quiet console shows no end with exit code 0.
        """
        finish, narrator = self._finish, self._narrator
        self._narrate(float("inf"))
        if finish is None:
            return
        lines = narrator.end(finish.exit_code, finish.reason, self._seconds())
        if finish.exit_code == ExitCode.BAD_INPUT:  # the format of the preflight; no logs are left to read
            for line in finish.reason.splitlines():
                print(f"megatron-recover run: {line}", file=sys.stderr)
        elif finish.exit_code != ExitCode.OK or not self._settings.quiet:
            is_failure = finish.exit_code not in (ExitCode.OK, ExitCode.INTERRUPTED)
            ours = {output.log for output in self._own_logs.values()}
            ends = [(log, text) for log, text in self._outputs.ends() if log not in ours] if is_failure else []
            self._console.end([*_telling(ends, self._order_of_failures()), *lines])

    def _order_of_failures(self) -> dict[Path, int]:
        """Return the logs of failed ranks, with the number of the failure, from 0."""
        run_dir, failed = Path(self._settings.run_dir), dict.fromkeys(self._narrator.account.failed)
        return {
            run_dir / name(*rank): number for number, rank in enumerate(failed) for name in (log_name, stdout_log_name)
        }  # fmt: skip

    def _write_logs(self, until: float, left: bool) -> Shown:
        """Write all output, with the same limits as events, and end the threads that write.

        Return what is not written. `left`: some events are not written.
        """
        refused_until = min(until, time.monotonic() + self._deadlines.refused_s)
        events, writer = self._events, self._outputs.writer
        while (num_missing := writer.num_left) and time.monotonic() < (until if self._error is None else refused_until):
            time.sleep(_SOON_S)
            self._outputs.make_room()
        num_unwritten, why = events.num_unwritten, self._error
        events.keeper.close(self._deadlines.store_s)
        writer.close(self._deadlines.store_s)
        is_refused = self._finish is not None and self._finish.exit_code in (ExitCode.BAD_INPUT, ExitCode.INTERRUPTED)
        if (not left and not num_missing) or (is_refused and self._may_be_discarded):
            return Shown(0, "")
        reason = "the disk does not answer" if why is None else why.strerror or str(why)
        return Shown(max(1, num_unwritten) if left else 0, reason, num_missing)

    @property
    def _error(self) -> OSError | None:
        return self._events.keeper.error or self._outputs.writer.error

    @property
    def _may_be_discarded(self) -> bool:
        """Return whether the folder is gone, and training has not begun.

        Node 0 removes the run directory as soon as the job is refused or interrupted before
        training, while other nodes that share it still end. If the folder is gone for another
        reason, that is told once training has begun, or at another end.
        """
        return isinstance(self._error, FileNotFoundError) and not self._narrator.account.has_begun

    # --- To people --------------------------------------------------------------------------------

    def _says(self, text: str) -> None:
        self._narrator.says(text, self._seconds())

    def _tell(self, now: float, *, at_the_end: bool = False) -> None:
        """Report trouble with the disk once, its end once, and now and then how much was lost."""
        for name, (what, waits, where) in _WHAT.items():
            writer = self._events.keeper if name == "trace" else self._outputs.writer
            trouble = "" if self._may_be_discarded else _trouble(writer, now, self._deadlines.slow_disk_s)
            if trouble and not self._troubles[name]:
                waits = waits.format(self._settings.output_bytes / 2**20)
                self._says(
                    f"WARNING: {what} cannot be written to {Path(self._settings.run_dir) / where} ({trouble}). The run "
                    f"continues. {waits}, and what does not fit there is lost; make room, or check the disk"
                )
            elif self._troubles[name] and not trouble:
                self._says(f"{what} is written again")
            self._troubles[name] = trouble
        lost = self._events.num_lost, self._outputs.num_lost, self._outputs.num_unshown, self._outputs.num_emptied
        if lost != self._was_told and (at_the_end or now - self._losses_told_at > _TELL_LOSSES_S):
            for number, before, text in zip(lost, self._was_told, _LOSSES, strict=True):
                if number > before:
                    self._says(f"WARNING: {text.format(number, self._settings.output_bytes / 2**20)}")
            self._was_told, self._losses_told_at = lost, now


_WHAT = {
    "trace": ("the trace", "Events wait in memory", ""),
    "logs": ("what ranks print", "Up to {:.0f} MiB of it wait in memory, of all ranks together", LOGS),
}
"""Name on the console, place where it waits, and folder inside that of the run."""
_LOSSES = (
    "{} events of this run are lost so far; the trace says where, and check does not vouch for those steps",
    "{} bytes that ranks have printed are lost so far, as no more than {:.0f} MiB of all ranks may wait in memory; the logs "
    "say where and why",
    "{} bytes that ranks have printed are missing in train.log and here, as no more than {:.0f} MiB of all ranks may wait in "
    "memory; train.log says where, and the logs of the ranks have what the disk took",
    "{} times so far a program of a rank opened /dev/stdout or /dev/stderr for writing, and so emptied the rank's output: "
    "what was printed in the instant before is missing; let it append (>>)",
)
"""Reports of loss: events, output, output on the console, and output that somebody has emptied."""
_TOLD_LINES = 12
"""Lines of a log that the console shows when the job has failed."""


def _telling(ends: Iterable[tuple[Path, str]], order: Mapping[Path, int]) -> Iterator[str]:
    """Yield the last lines of logs that explain a failure, so that nobody has to look for them.

    Those of failed ranks come first, in the `order` of their failures. The last lines of the rank
    that failed first are told whatever they are, all others if they have an error. A crash in
    native code leaves a stack that begins with the newest call, so its first lines are told.
    """
    for path, text in sorted(ends, key=lambda end: order.get(end[0], len(order))):
        lines = text.strip().splitlines()
        crashes = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
        has_error = bool(crashes) or any("Error" in line or "Traceback" in line or "Exception" in line for line in lines[-40:])
        if has_error or (lines and order.get(path) == 0):
            yield f"--- end of {path}"
            begin = max(0, crashes[-1] - 2) if crashes else -_TOLD_LINES
            yield from (f"    {line}" for line in lines[begin:][:_TOLD_LINES])


def _trouble(writer: Keeper | LogWriter, now: float, slow_disk_s: float) -> str:
    """Return the trouble that a thread has with writing to the disk; empty if there is none."""
    if writer.error is not None:
        return writer.error.strerror or str(writer.error)
    since = writer.busy_since
    return f"the disk has not answered for {slow_disk_s:.0f} s" if since is not None and now - since > slow_disk_s else ""


def _is_stopped(pid: int) -> bool:
    """Return whether somebody has stopped a process (Ctrl-Z)."""
    return state_of(pid) == _STOPPED


def main() -> None:
    """Record a run, as the command line describes it."""
    for number in TOLD_TO_ALL:  # Slurm may send them to every process of a job; the recorder has to outlive them
        signal.signal(number, signal.SIG_IGN)
    # Somebody may have stopped the recorder. The launcher's death then continues it; it writes what
    # there is, and ends.
    set_parent_death_signal(signal.SIGCONT)
    set_process_name("recorder")
    control, bookmark, outputs = (
        socket.socket(fileno=int(sys.argv[1])),
        Bookmark(int(sys.argv[2])),
        OutputBookmark(int(sys.argv[3])),
    )
    settings = msgspec.json.decode(sys.argv[4], type=Settings)
    for each in settings.ignored:
        signal.signal(each, signal.SIG_IGN)
    store = EventStore(Path(settings.run_dir), bookmark, part_bytes=settings.part_bytes, close_s=settings.deadlines.store_s / 2)
    Recorder(control, bookmark, outputs, settings, store).run()
    os._exit(0)  # do not wait for threads that a disk or a terminal blocks


if __name__ == "__main__":
    main()
