"""The recorder: the process that writes the trace of a run from the rings of all its processes, and runs the console.

Nothing waits for it: a disk that stalls or is full, a slow terminal and the death of this process cost at most events, which
are counted and told, never a step. The launcher starts it, tells it what it has to know (`Told`), and starts another one if it
dies. It ends when it is told to, or when the launcher is gone.

Run by `cluster.recording.Recording` as ``python -m megatron_recover.cluster.recorder FD LEDGER SETTINGS``: a SOCK_SEQPACKET
socket on which each packet is one JSON message, the descriptor of the ledger, and `Settings` as JSON. It imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from megatron_recover import trace
from megatron_recover.cluster.console import Console, Missing
from megatron_recover.cluster.event_store import Batch, EventStore, Keeper, Ledger
from megatron_recover.cluster.forkserver import TOLD_TO_ALL, set_parent_death_signal, set_process_name
from megatron_recover.cluster.readiness import is_readable, is_writable
from megatron_recover.ring import Dropped, Item, Merge, RingReader

MAX_PACKET_BYTES = 2**16
_INTERVAL_S = 0.03
"""Between two drains: how old the newest line of the file is while the disk takes it."""
_BATCH_BYTES = 2**20
_AHEAD_BYTES = 16 * 2**20
"""Events that are taken out of the rings and not written: the console shows them while the disk stalls. They stay in the rings
until they are written."""
STALL_S = 5.0
"""A disk that has not taken a batch for so long is told of."""
_REFUSED_S = 2.5
"""At the end of the run: so long a disk that refuses is tried again, once a second."""
_TELL_LOSSES_S = 10.0
_ORPHAN_S = 1.0
"""The ranks of a launcher that is gone are being killed: so long their last events are waited for."""
_ORPHAN_DEADLINE_S = 10.0
_LAST_REPLIES_S = 2.0
"""At the end of the run: so long the launcher is waited for to take what it is told."""
_STOPPED = b"T"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorder has to know from the start."""

    run_dir: str
    started_at: float
    """`time.monotonic()` of the launcher at the start of the run: zero of the trace's clock."""
    num_replicas: int
    num_ranks: int
    quiet: bool
    part_bytes: int
    num_rings: int = 0
    """Rings that are on their way: it drains none before it has them, since the order is that of all."""
    again: bool = False
    """Another recorder has written and shown the run until now."""
    roster: tuple[int, ...] = ()
    """The newest, if there was one."""


class Ring(msgspec.Struct, frozen=True, tag=True):
    """To the recorder, with one descriptor: a process will record in this ring. Sent before the process is started."""

    number: int
    replica: int
    """-1: the launcher."""
    rank: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """To the recorder: the process of this ring lives no more."""

    number: int


class Says(msgspec.Struct, frozen=True, tag=True):
    """To the recorder: one line for the console."""

    text: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """To the recorder: nobody records any more. Write what there is, show how the run ended, and end."""

    exit_code: int
    reason: str
    deadline_s: float
    """For the trace; the terminal has its own."""


Told = Ring | Ended | Says | Finish


class Drained(msgspec.Struct, frozen=True, tag=True):
    """From the recorder: everything of this ring is in the file, and its process has ended."""

    number: int


class Shown(msgspec.Struct, frozen=True, tag=True):
    """From the recorder, its last word: how the run ended was shown, but for what is `missing`."""

    num_unwritten: int
    """Events that are not in the file."""
    why: str
    """Empty if there are none."""
    missing: Missing = Missing.NOTHING
    """What of the end of the run could not be shown."""


Reply = Drained | Shown


class Recorder:
    """Everything but the disk and the terminal, which have threads of their own."""

    def __init__(self, control: socket.socket, ledger: Ledger, settings: Settings, store: EventStore, console: Console) -> None:
        """`control` leads to the launcher."""
        self._control, self._ledger, self._settings, self._console = control, ledger, settings, console
        control.setblocking(False)
        self._decode = msgspec.json.Decoder(Told).decode
        self._decode_event = msgspec.json.Decoder(trace.AnyEvent).decode
        self._keeper = Keeper(store)
        self._merge = Merge(after=ledger.last)
        self._places: dict[int, tuple[int, int]] = {}
        self._lines: deque[tuple[bytes, Item]] = deque()
        self._ahead = 0
        self._unsent: deque[bytes] = deque()
        """Replies for which the socket had no room."""
        self._finish: Finish | None = None
        self._is_orphan = False
        self._num_lost, self._losses_told_at, self._was_told = 0, 0.0, 0
        self._trouble = ""

    def run(self) -> None:
        """Record until the launcher says `Finish`, or is gone."""
        while self._finish is None and not self._is_orphan:
            is_readable(self._control, _INTERVAL_S)
            if self._turn():
                # A message ends the wait, and there may be thousands: drains keep their pace.
                time.sleep(_INTERVAL_S / 10)
        deadline_s = self._finish.deadline_s if self._finish is not None else _ORPHAN_DEADLINE_S
        if self._is_orphan:
            end = time.monotonic() + _ORPHAN_S
            while time.monotonic() < end:
                time.sleep(_INTERVAL_S)
                self._turn()
        for number in self._merge.sources:
            self._merge.ended(number)
        shown = self._write_all(time.monotonic() + deadline_s)
        self._tell(time.monotonic(), at_the_end=True)
        if self._finish is not None:
            missing = self._console.finished(self._finish.exit_code, self._finish.reason)
            self._send(msgspec.structs.replace(shown, missing=missing))
            end = time.monotonic() + _LAST_REPLIES_S
            while self._unsent and (left_s := end - time.monotonic()) > 0:
                is_writable(self._control, left_s)
                self._send_unsent()
        else:
            self._console.close()

    def _turn(self) -> bool:
        """Do what there is to do. Return whether the launcher had something to say."""
        now = time.monotonic_ns()
        has_heard = self._receive()
        self._send_unsent()
        if len(self._places) >= self._settings.num_rings:
            self._drain(now)
        self._write()
        self._tell(time.monotonic())
        return has_heard

    # --- From the launcher -------------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        has_heard = False
        while self._finish is None and not self._is_orphan:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
            except BlockingIOError:
                break
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                self._is_orphan = True
                break
            has_heard = True
            self._heard(self._decode(packet), descriptors)
        return has_heard

    def _heard(self, told: Told, descriptors: list[int]) -> None:
        match told:
            case Ring(number, replica, rank):
                [descriptor] = descriptors
                position, dropped = self._ledger.position(number)
                self._merge.add(number, RingReader(descriptor, position=position, told=dropped))
                os.close(descriptor)
                self._places[number] = replica, rank
                if replica >= 0:
                    self._console.follow(replica, rank)
            case Ended(number):
                self._merge.ended(number)
            case Says(text):
                self._console.says(text)
            case Finish():
                self._finish = told

    def _send(self, reply: Reply) -> None:
        self._unsent.append(msgspec.json.encode(reply))
        self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                self._control.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return  # the launcher is busy, or stopped; there is one for each ring at most
        except OSError:
            self._unsent.clear()  # the launcher is gone

    # --- From the rings ----------------------------------------------------------------------------------------------

    def _drain(self, now: int) -> None:
        if self._ahead >= _AHEAD_BYTES:
            return
        for item in self._merge.drain(now, _AHEAD_BYTES - self._ahead):
            line = self._line(item)
            self._lines.append((line, item))
            self._ahead += len(line)

    def _line(self, item: Item) -> bytes:
        """Return the line of an event, and give the event to the console."""
        seconds = item.stamp / 1e9 - self._settings.started_at
        if isinstance(item.what, Dropped):
            self._num_lost += item.what.num_events
            replica, rank = self._places[item.source]
            since = round(item.what.since / 1e9 - self._settings.started_at, 6)
            gap = trace.Gap(t=round(seconds, 6), replica=replica, rank=rank, num_events=item.what.num_events, since=since)
            return msgspec.json.encode(gap) + b"\n"
        # The writer leaves the time open, as the stamp has it: `{"event":"voted","v":1,"t":0.0,...`.
        line = item.what.replace(b'"t":0.0', b'"t":%.6f' % seconds, 1) + b"\n"
        name = line[10 : line.index(b'"', 10)].decode()
        if name in Console.WANTED:
            with contextlib.suppress(msgspec.DecodeError):  # check will name the line; here it is only not shown
                self._console.take(self._decode_event(line))
        return line

    # --- To the disk -------------------------------------------------------------------------------------------------

    def _write(self, wait_s: float = 0.0) -> None:
        """Note what was written, and give the next batch to the thread that writes."""
        if (batch := self._keeper.done(wait_s)) is not None:
            for number, (position, told) in batch.positions.items():
                self._merge.sources[number].release(position, told)
            self._ahead -= len(batch.lines)
        if self._keeper.busy_since is not None:
            return
        if self._lines:
            self._keeper.give(self._next_batch())
            return
        for number in self._merge.exhausted():
            self._merge.remove(number)
            self._send(Drained(number))

    def _next_batch(self) -> Batch:
        lines: list[bytes] = []
        positions: dict[int, tuple[int, int]] = {}
        room, last = _BATCH_BYTES, 0
        while self._lines and room > 0:
            line, item = self._lines.popleft()
            lines.append(line)
            positions[item.source] = item.position, item.told
            room, last = room - len(line), item.stamp
        return Batch(b"".join(lines), len(lines), positions, last)

    def _write_all(self, until: float) -> Shown:
        """Write everything that is recorded; what the disk has not taken at the instant `until`, or refuses, is given up."""
        refused_until = min(until, time.monotonic() + _REFUSED_S)
        left = True
        while left and time.monotonic() < (until if self._keeper.error is None else refused_until):
            self._drain(time.monotonic_ns())
            self._write(wait_s=0.05)
            left = bool(self._lines) or self._keeper.busy_since is not None or self._merge.has_more
        num_unwritten, why = self._keeper.num_events + len(self._lines), self._keeper.error
        self._keeper.close(0.5 if left else 5.0)
        if not left:
            return Shown(0, "")
        return Shown(max(1, num_unwritten), "the disk does not answer" if why is None else why.strerror or str(why))

    # --- To people ---------------------------------------------------------------------------------------------------

    def _tell(self, now: float, *, at_the_end: bool = False) -> None:
        """Say once that there is trouble with the disk, and once that it is over; and how much was lost, now and then."""
        error, busy_since = self._keeper.error, self._keeper.busy_since
        trouble = ""
        if error is not None:
            trouble = error.strerror or str(error)
        elif busy_since is not None and now - busy_since > STALL_S:
            trouble = f"the disk has not answered for {STALL_S:.0f} s"
        if trouble and not self._trouble:
            self._console.says(
                f"WARNING: the trace cannot be written to {self._settings.run_dir} ({trouble}). The run goes on. Events wait "
                "in memory, and what finds no room there is lost; make room, or see to the disk"
            )
        elif self._trouble and not trouble:
            self._console.says("the trace is written again")
        self._trouble = trouble
        if self._num_lost > self._was_told and (at_the_end or now - self._losses_told_at > _TELL_LOSSES_S):
            self._console.says(
                f"WARNING: {self._num_lost} events of this run are lost so far; the trace says where, and check does not vouch "
                "for those steps"
            )
            self._was_told, self._losses_told_at = self._num_lost, now


def _is_stopped(pid: int) -> bool:
    """Return whether somebody has stopped a process (Ctrl-Z)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return text[text.rindex(b")") + 2 :][:1] == _STOPPED


def main() -> None:
    """Record a run."""
    for number in TOLD_TO_ALL:  # what a signal to all processes of a job means is the launcher's business
        signal.signal(number, signal.SIG_IGN)
    # One that somebody has stopped wakes up when the launcher dies, writes what there is, and ends.
    set_parent_death_signal(signal.SIGCONT)
    set_process_name("recorder")
    control, ledger = socket.socket(fileno=int(sys.argv[1])), Ledger(int(sys.argv[2]))
    settings = msgspec.json.decode(sys.argv[3], type=Settings)
    launcher = os.getppid()
    console = Console(
        Path(settings.run_dir), num_replicas=settings.num_replicas, num_ranks=settings.num_ranks, quiet=settings.quiet,
        again=settings.again, roster=settings.roster, is_held=lambda: _is_stopped(launcher),
    )  # fmt: skip
    console.start()
    store = EventStore(Path(settings.run_dir), ledger, part_bytes=settings.part_bytes)
    Recorder(control, ledger, settings, store, console).run()
    os._exit(0)  # threads that a disk or a terminal holds up are left behind


if __name__ == "__main__":
    main()
