"""What launcher and recorder tell each other: each message is one packet of JSON, some with a descriptor.

`cluster/recording.py` is the launcher's side, and `cluster/recorder.py` the other one.
"""

from __future__ import annotations

import msgspec

from megatron_recover.deadlines import Deadlines
from megatron_recover.observe.ending import Account

MAX_PACKET_BYTES = 2**16


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorder has to know from the start."""

    run_dir: str
    started_at: float
    """`time.monotonic()` of the launcher at the start of the run: zero of the trace's clock."""
    account: Account
    """What is known of the run until now."""
    quiet: bool
    part_bytes: int
    deadlines: Deadlines
    output_bytes: int
    """Of all outputs together that may wait for the disk."""
    num_rings: int = 0
    """Rings that are on their way: it drains none before it has them, since the order is that of all."""
    roster: tuple[int, ...] = ()
    """The newest, if another recorder has written and shown the run until now."""


class Ring(msgspec.Struct, frozen=True, tag=True):
    """To the recorder, with one descriptor: a process will record in this ring. Sent before the process is started."""

    number: int
    replica: int
    """-1: the launcher."""
    rank: int


class Prints(msgspec.Struct, frozen=True, tag=True):
    """To the recorder, with one descriptor: a process prints into this output."""

    number: int
    log: str
    shown_of: int | None
    """The replica whose lines these are, if they are for the console and `train.log`; `TRAIN_LOG` or `LAUNCHER_LOG`: this
    becomes that file."""


TRAIN_LOG, LAUNCHER_LOG = -1, -2
"""`Prints.shown_of` of the outputs into which the recorder itself writes: lines of the job's writer, and lines of ours."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """To the recorder: the process of this ring lives no more."""

    number: int


class Says(msgspec.Struct, frozen=True, tag=True):
    """To the recorder: one line for the console."""

    text: str
    seconds: float
    """When it was said, by the clock of the trace."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """To the recorder: nobody records any more. Write what there is, show how the run ended, and end."""

    exit_code: int
    reason: str


Told = Ring | Prints | Ended | Says | Finish


class Drained(msgspec.Struct, frozen=True, tag=True):
    """From the recorder: everything of this ring is in the file, and its process has ended."""

    number: int


class Noted(msgspec.Struct, frozen=True, tag=True):
    """From the recorder: what a run has loaded and saved, which the launcher does not see by itself (`Account`)."""

    loaded: int | None
    saved: int | None


class Shown(msgspec.Struct, frozen=True, tag=True):
    """From the recorder, its last word: how the run ended was shown."""

    num_unwritten: int
    """Events that are not in the file."""
    why: str
    """Empty if everything is on the disk."""
    num_missing: int = 0
    """Bytes that were printed and are not in the logs."""
    is_seen: bool = True
    """Whether the terminal has taken it."""


class LinesTold(msgspec.Struct, frozen=True, tag=True):
    """From the recorder: the next so many lines that the launcher has said are told."""

    num_lines: int


Reply = Drained | Noted | LinesTold | Shown
