"""The messages between launcher and recorder, each one packet of JSON, some with a descriptor.

`cluster/recording.py` is the launcher's side, and `cluster/recorder.py` the recorder's.
"""

from __future__ import annotations

import msgspec

from megatron_recover import trace
from megatron_recover.cluster.status import Request, Status
from megatron_recover.cluster.streams import Tee
from megatron_recover.deadlines import Deadlines
from megatron_recover.observe.ending import Account

MAX_PACKET_BYTES = 2**16
"""A longer message to the recorder travels in a file (`InFile`)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a recorder needs from its start."""

    run_dir: str
    started_at: float
    """`time.monotonic()` of the launcher at the start of the run: zero of the trace's clock."""
    account: Account
    """Account of the run until now."""
    quiet: bool
    part_bytes: int
    deadlines: Deadlines
    output_bytes: int
    """Bytes of all outputs together that may wait for the disk."""
    ignored: tuple[int, ...] = ()
    """Signals that the launcher handles."""
    num_rings: int = 0
    """Number of rings that the launcher is about to send. The recorder drains no ring before it has
    all of these, since the events of all rings have one order."""
    clock: int | None = None
    """Stamp of the node's clock from which the stamps in the trace count (`NodeStarted.clock`);
    None: the trace has no stamps, since the run has one node."""
    keeps_status: bool = False
    """True on node 0: the recorder writes the state of the job to its folder."""
    roster: tuple[int, ...] = ()
    """Newest roster, if another recorder has written and shown the run until now; else empty."""


class Ring(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder, with the descriptor of a ring in which a process will record.

    The launcher creates the ring, and puts this message into its queue, before it starts the
    process. Every later recorder gets the message again, until the ring is `Drained`.
    """

    number: int
    replica: int
    """Replica of the process; -1: the launcher."""
    rank: int


class OutputAdded(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder, with the descriptor of an output into which a process prints."""

    number: int
    log: str
    shown_of: int | None
    """Replica that prints these lines, if they are for the console and `train.log`; else None. A
    negative value, such as `TRAIN_LOG`: the recorder itself writes the lines into the output."""
    is_on_console: bool = True
    """False: these lines are for `train.log` only."""
    tee: Tee | None = None
    """The way in which the console shows all lines of the output; None: it does not."""


TRAIN_LOG, LAUNCHER_LOG, FILTERED_STDOUT, FILTERED_STDERR = -1, -2, -3, -4
"""Values of `OutputAdded.shown_of` for the outputs into which the recorder itself writes: the lines
of the job's writer, those of megatron-recover itself, and those that `Tee.filters` selects."""


class RingEnded(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder: the process that records in this ring has ended."""

    number: int


class OutputEnded(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder: the process that printed into this output has ended long ago.

    The recorder releases the output once all of it is in its log, and shown. Every later recorder
    gets the message again, until the output is `Released`.
    """

    number: int


class Says(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder: one line of the launcher for the console."""

    text: str
    seconds: float
    """Time at which the launcher made the line, in seconds of the trace's clock."""


class Announced(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder of a node other than 0: a generation, which node 0 records."""

    generation: trace.Generation


class StatusNews(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder of node 0: the state of the job, for its file.

    Every later recorder gets the newest one again.
    """

    status: Status


class FinishRecording(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder: no process records any more.

    The recorder then writes what is left, shows how the run ended, and ends.
    """

    exit_code: int
    reason: str


class InFile(msgspec.Struct, frozen=True, tag=True):
    """A message to the recorder, with the descriptor of a file in memory that has the real message.

    The state of a job and a generation grow with the job, and a packet has a limit.
    """


ToRecorder = Ring | OutputAdded | RingEnded | OutputEnded | Says | Announced | StatusNews | FinishRecording | InFile


class Drained(msgspec.Struct, frozen=True, tag=True):
    """A message from the recorder: a ring's process has ended, and the file has all its events."""

    number: int


class Released(msgspec.Struct, frozen=True, tag=True):
    """A message from the recorder: nobody needs an output any more, of which `OutputEnded` told."""

    number: int


class CheckpointNews(msgspec.Struct, frozen=True, tag=True):
    """A message from the recorder: `Account.loaded` and `Account.saved`, which mean the same there.

    The launcher does not see these by itself.
    """

    loaded: int | None
    saved: int | None


class Requested(msgspec.Struct, frozen=True, tag=True):
    """A message from the recorder of node 0: a request that somebody has left for the job."""

    request: Request


class Shown(msgspec.Struct, frozen=True, tag=True):
    """The last message from the recorder: it has written and shown all that it could."""

    num_unwritten: int
    """Least number of events at the end of the trace that are not in the file; 0: none."""
    why: str
    """Reason why something is left unwritten; empty if nothing is."""
    num_missing: int = 0
    """Bytes at the end of the outputs that are not in the logs."""
    is_seen: bool = True
    """True if no line for the terminal is left to write, as also where the terminal is gone."""


class LinesTold(msgspec.Struct, frozen=True, tag=True):
    """A message from the recorder: the launcher's next `num_lines` lines have been shown."""

    num_lines: int


Reply = Drained | Released | CheckpointNews | LinesTold | Requested | Shown
