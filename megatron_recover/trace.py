"""The event log of a run: the type of every event, how one is written and how a log is read.

A trace is one `events.jsonl`, one JSON object a line, that the recorder (`cluster.recorder`) writes from what all processes
of a run record (`ring`). This module decides what an event looks like and nothing else: it never judges a history
(`observe.check` does) and never formats one for people.

Cause comes before effect: an event is recorded before its effect can be seen outside the thread that records it (before the
vote is sent, before the result is held, before the fault strikes). So the order of the lines is an order in which the run can
have happened, and the checker may rely on it.

Event names are the class names in snake case, so use the module as the namespace: ``log.record(trace.Committed(...))``.
docs/architecture.md, section Trace, lists who writes which event.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, Protocol, get_args

import msgspec

from megatron_recover import event_files
from megatron_recover.core.policy import EXIT
from megatron_recover.core.values import LossKind

EVENTS_FILE = event_files.EVENTS_FILE
"""Name of the log inside a run directory."""

Level = Literal["microbatches", "steps", "faults"]
"""What a trace shows: every microbatch, every step, or faults and recoveries only. Each level is a part of the one before."""
Size = Annotated[int, msgspec.Meta(ge=1)]
_START_OF_EVENT = b'{"event":"'


def _snake_case(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_snake_case, forbid_unknown_fields=True):
    """What every event carries."""

    v: Literal[1] = 1
    """Version of the format. Any other is refused: a field of the same name may mean something else there."""
    t: float = 0.0
    """Seconds since the start of the run (CLOCK_MONOTONIC of the launcher's host); set by `EventLog.record`."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objects inside events."""


class Layout(Part, frozen=True, kw_only=True):
    """How the model of one replica is spread over its ranks."""

    tp: Size
    pp: Size
    cp: Size = 1
    lanes: Size = 1
    """Data-parallel size inside the replica."""
    vpp: Size = 1
    """Model chunks per pipeline stage."""

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp * self.cp * self.lanes


class Lost(Part, frozen=True, kw_only=True):
    """A replica that left the roster, and why."""

    replica: int
    kind: LossKind
    detail: str = ""


class Result(Part, frozen=True, kw_only=True):
    """The version of a bucket that a step commits."""

    bucket: int
    version: int
    checksums: tuple[int, ...]
    """One per rank of the bucket, in the order of `Joined.bucket_ranks`."""


class Decided(Part, frozen=True, kw_only=True):
    """A bucket that needs no reduction any more because `source` holds it complete."""

    bucket: int
    version: int
    source: int


class Transfer(Part, frozen=True, kw_only=True):
    """A decided bucket goes from `source` to `targets` (replicas)."""

    bucket: int
    version: int
    source: int
    targets: tuple[int, ...]


class Compute(Part, frozen=True, kw_only=True):
    """Microbatches to compute, their gradient kept for these buckets only."""

    microbatches: tuple[int, ...]
    into: tuple[int, ...]


# --- The run and its membership ------------------------------------------------------------------------------------------


class RunStarted(Event, frozen=True, kw_only=True):
    """Launcher: the first event of a run."""

    replicas: int
    """Number of replicas at the start; they are 0..replicas-1."""
    layout: Layout
    determinism: str
    seed: int
    argv: tuple[str, ...]
    min_replicas: int = 1
    num_microbatches: int | None = None
    """M of every training step as the command line asks for it; None where it changes from step to step."""
    level: Level = "microbatches"
    """What the trace shows: everything, or nothing of what `LEFT_OUT` names for this level."""


class Joined(Event, frozen=True, kw_only=True):
    """Leader: its replica is ready for the first generation."""

    replica: int
    fingerprint: str
    """Of everything that must be equal on all replicas."""
    bucket_ranks: tuple[tuple[int, ...], ...]
    """For each bucket the ranks inside the replica that hold it; the last bucket is the ledger."""


class Generation(Event, frozen=True, kw_only=True):
    """Coordinator: from now on these replicas are the job."""

    generation: int
    roster: tuple[int, ...]
    losses: tuple[Lost, ...] = ()
    """Since the previous generation."""
    reason: str = ""
    void: tuple[int, int] | None = None
    """(step, generation): what members had of that step in older generations counts no more."""

    @property
    def request(self) -> str | None:
        """Why the run is to end, where the generation was made for nothing but to carry that: it is no recovery."""
        return None if self.losses or not self.reason.startswith(EXIT) else self.reason.removeprefix(EXIT)


class Entered(Event, frozen=True, kw_only=True):
    """Leader: all ranks of its replica have promised never to commit in an older generation."""

    replica: int
    generation: int
    seconds: float
    """Since the generation was announced to this leader."""


class CoordinatorSilent(Event, frozen=True, kw_only=True):
    """Leader: its coordinator sends nothing, not even beats; or it does again. Training needs it only where something fails."""

    replica: int
    generation: int
    phase: Literal["began", "over"]
    seconds: float
    """How long the silence has lasted."""
    waits: str
    """What this replica needs the coordinator for, in words; empty: nothing yet."""
    waiting_for: tuple[int, ...]
    """Members whose message this replica waits for."""
    pid: int
    """Of the coordinator's process; 0 where it was never heard."""
    state: str
    """Of that process, as /proc has it (`T`: stopped); empty where it cannot be read."""


class LeaderSilent(Event, frozen=True, kw_only=True):
    """Coordinator: a leader does not answer its beats; or it does again. Nobody is judged by that."""

    member: int
    """The leader's replica."""
    generation: int
    phase: Literal["began", "over"]
    seconds: float
    """How long the silence has lasted."""
    waiting_for: tuple[int, ...]
    """Members that the leader waited for when it answered last."""


class Stopping(Event, frozen=True, kw_only=True):
    """Coordinator: the run cannot go on."""

    exit_code: int
    reason: str


class Waiting(Event, frozen=True, kw_only=True):
    """Coordinator: the run waits until one of these replicas answers or ends."""

    replicas: tuple[int, ...]
    reason: str


class RunFinished(Event, frozen=True, kw_only=True):
    """Launcher: the last event of a run."""

    exit_code: int


# --- The protocol of a step ----------------------------------------------------------------------------------------------


class Status(Event, frozen=True, kw_only=True):
    """Leader: what its replica told all members on entering a generation."""

    replica: int
    generation: int
    step: int
    """The step that it has not committed yet."""
    work: bool
    """Whether it has begun that step."""
    contributions: tuple[tuple[int, ...], ...]
    """Per bucket the microbatches that its local gradient holds or will hold."""
    complete: tuple[tuple[int, int], ...]
    """(bucket, version) that it holds complete."""
    committed: int | None
    """The last step that it has committed."""
    finished: tuple[int, ...] = ()
    """Microbatches of the step that its first stage has finished, in that order: its journal."""
    computing: tuple[int, ...] = ()
    """Those that it has begun and not finished."""


class Plan(Event, frozen=True, kw_only=True):
    """Leader: what its replica does next for a step."""

    replica: int
    generation: int
    step: int
    label: str
    """Megatron's name for the step, e.g. ``train 17`` or ``evaluate 20/3``."""
    num_microbatches: int
    """M: the step's microbatches are 0..M-1."""
    roster: tuple[int, ...]
    quotas: tuple[int, ...]
    """Microbatches held by or dealt to each member, in the order of `roster`."""
    transfers: tuple[Transfer, ...] = ()
    computes: tuple[Compute, ...] = ()
    """Of this replica."""
    reduces: tuple[int, ...] = ()
    """Buckets to reduce in this generation."""
    decided: tuple[Decided, ...] = ()


class MicrobatchStarted(Event, frozen=True, kw_only=True):
    """Rank: a forward begins."""

    replica: int
    rank: int
    generation: int
    """Of the plan that dealt the microbatch."""
    step: int
    microbatch: int
    chunk: int = 0
    """Model chunk of this stage (0 without virtual pipelining)."""


class MicrobatchFinished(Event, frozen=True, kw_only=True):
    """Rank: a backward is done (in evaluation the forward), its gradient is in the local gradient of the buckets `into`."""

    replica: int
    rank: int
    generation: int
    step: int
    microbatch: int
    chunk: int = 0
    seconds: float
    """Forward and backward together, on this rank."""
    backward_s: float = 0.0
    """The backward alone, which has just ended."""
    into: tuple[int, ...]
    """Buckets of this rank and chunk that took the gradient, the ledger included; that of the others went to a dump."""


class BucketPassed(Event, frozen=True, kw_only=True):
    """Rank: the last backward of a pass still goes on, but all its gradient is in the local gradient of this bucket.

    Written before anyone gets a part of the bucket: a rank that dies before `MicrobatchFinished` may have contributed.
    """

    replica: int
    rank: int
    generation: int
    step: int
    microbatch: int
    chunk: int = 0
    bucket: int


class Extended(Event, frozen=True, kw_only=True):
    """Rank 0: the pass that runs takes in what a newer plan has dealt to its replica; otherwise it gets a pass of its own."""

    replica: int
    rank: int
    generation: int
    """Of that plan."""
    step: int
    microbatches: tuple[int, ...]


class Reduced(Event, frozen=True, kw_only=True):
    """Rank: the sum over the replicas of a bucket is complete here, and is about to be held."""

    replica: int
    rank: int
    generation: int
    step: int
    bucket: int
    version: int
    """The generation that produced it."""
    checksum: int
    """Of the result's bytes on this rank."""
    provenance: Literal["ones"] | tuple[int, ...]
    """How often each microbatch 0..M-1 is in the sum: "ones", or the counts where they are not all one."""
    seconds: float = 0.0
    """Since the sum began on this rank."""


class Transferred(Event, frozen=True, kw_only=True):
    """Rank: a decided bucket has arrived from the same-position rank of `source`."""

    replica: int
    rank: int
    generation: int
    step: int
    bucket: int
    version: int
    source: int
    checksum: int


class Miscounted(Event, frozen=True, kw_only=True):
    """Rank: a sum does not count every microbatch once. It is not held, and the step is computed anew, once."""

    replica: int
    rank: int
    generation: int
    step: int
    bucket: int
    microbatches: tuple[int, ...]
    """Those that it does not count exactly once."""
    own_counts: tuple[int, ...]
    """How often this rank has each microbatch in its local gradient of the bucket."""


class ReductionFailed(Event, frozen=True, kw_only=True):
    """Rank: a sum or transfer over the replicas did not complete; no gradient changed."""

    replica: int
    rank: int
    generation: int
    step: int
    reason: str
    bucket: int | None = None


class StateDigested(Event, frozen=True, kw_only=True):
    """Rank: a step begins whose record carries the state digest, and this is the rank's part of it."""

    replica: int
    rank: int
    step: int
    label: str
    digest: str
    """Of all state of this rank."""


class Voted(Event, frozen=True, kw_only=True):
    """Leader: its replica is ready to commit a record."""

    replica: int
    generation: int
    step: int
    digest: str
    """Of the record without what voters say of themselves (requests, paces): all in which equal votes differ."""


class Disagreed(Event, frozen=True, kw_only=True):
    """Leader: members voted for different records; this is that of its own replica, so that they can be compared."""

    replica: int
    generation: int
    step: int
    label: str
    digest: str
    """As in `voted`."""
    versions: tuple[Result, ...]
    state_digest: str | None = None
    """As in `committed`."""
    reason: str
    """Who voted for what, and in which fields and buckets the records differ from this one."""


class Committed(Event, frozen=True, kw_only=True):
    """Leader: the step is committed."""

    replica: int
    generation: int
    """In which this replica committed it."""
    step: int
    label: str
    digest: str
    """Of the record without what voters said of themselves: equal to that of the votes."""
    adopted: bool
    """True: taken over from a member that had committed it in an older generation; False: by a full set of votes."""
    versions: tuple[Result, ...]
    requests: tuple[str, ...] = ()
    paces: tuple[tuple[int, int], ...] = ()
    """(voter, nanoseconds that one of its microbatches took; 0: it computed none): what quotas follow."""
    state_digest: str | None = None
    """Of the state that the step began with, over all ranks in rank order; None where no digest was due."""


class Applied(Event, frozen=True, kw_only=True):
    """Rank: the optimizer has run on the committed gradient."""

    replica: int
    rank: int
    generation: int
    step: int
    label: str
    parameter_digest: str | None = None
    """Of all parameters of this rank; None where not due (`--recover-digest-interval`) or nothing was trained."""
    lane_digest: str | None = None
    """Of those parameters that every lane must hold alike, where that is not all of them: experts are spread over lanes."""
    replicated_digest: str | None = None
    """Of those parameters that every tensor-parallel rank of the stage must hold alike; None where `parameter_digest` is."""
    loss: float | None = None
    """Mean over the step's microbatches, on the last stage; None elsewhere."""


# --- Faults and recovery -------------------------------------------------------------------------------------------------


class Fault(Event, frozen=True, kw_only=True):
    """Rank, just before it carries an injected fault out."""

    replica: int
    rank: int
    point: str
    kind: str
    """As in `faults.FaultKind`."""
    step: int | None = None
    generation: int | None = None
    microbatch: int | None = None
    bucket: int | None = None
    until: str | None = None
    """Of a freeze: the name of the event that ends it."""


class Thawed(Event, frozen=True, kw_only=True):
    """Launcher: a rank that a fault had frozen goes on."""

    replica: int
    rank: int


class Failure(Event, frozen=True, kw_only=True):
    """Agent: a rank's process has ended or does not answer."""

    replica: int
    rank: int
    cause: str
    """Signal name or exit code."""


class RankSilent(Event, frozen=True, kw_only=True):
    """Agent: a rank is slow, hangs, is stopped or is held by a tracer.

    Whether its replica is lost by that is said by the next `Generation`.
    """

    replica: int
    rank: int
    verdict: Literal["slow", "hung", "stopped", "traced"]
    phase: str
    """What its training thread does (`core/detector.py`)."""
    seconds: float
    """For so long."""
    step: int
    label: str
    microbatches: tuple[int, ...] = ()
    """In work."""
    state: str = ""
    """Of the process, as in /proc/PID/stat."""


class Fenced(Event, frozen=True, kw_only=True):
    """Agent: these ranks of a broken replica are confirmed dead."""

    replica: int
    ranks: tuple[int, ...]


class SetAside(Event, frozen=True, kw_only=True):
    """Agent: a rank does not end although it was killed. Nobody waits for it, and its slot is not used again.

    Whatever it still does has no effect: its replica is in no roster, and it ends before it runs another instruction.
    """

    replica: int
    rank: int
    pid: int
    state: str
    """As /proc/PID/stat has it (`D`: in an uninterruptible wait); empty where it cannot be read."""
    wchan: str
    """The kernel function in which it waits; empty where it cannot be read."""


Phase = Literal["detect", "agree", "redeal", "recompute", "reduce", "commit"]
"""Phases of a recovery, in their order."""


class Recovery(Event, frozen=True, kw_only=True):
    """Leader: one phase of a recovery has ended."""

    replica: int
    generation: int
    step: int
    phase: Phase
    seconds: float


class Gap(Event, frozen=True, kw_only=True):
    """Whoever writes the file: events of this rank were lost before this line, because its ring was full or gone.

    `check` vouches for none of the steps that a gap touches.
    """

    replica: int
    """-1: the launcher."""
    rank: int
    num_events: int
    """How many were lost."""
    since: float
    """When the first of them happened, as `Event.t`."""


class Checkpoint(Event, frozen=True, kw_only=True):
    """Writer: progress of a durable checkpoint."""

    replica: int
    rank: int
    iteration: int
    phase: Literal["started", "finished", "failed", "removed_partial"]
    detail: str = ""
    """Why it failed, where, and what to do."""


AnyEvent = (
    RunStarted | Joined | Generation | Entered | CoordinatorSilent | LeaderSilent | Stopping | Waiting | RunFinished | Status
    | Plan | MicrobatchStarted | MicrobatchFinished | BucketPassed | Extended | Reduced | Transferred | Miscounted
    | ReductionFailed | StateDigested | Voted | Disagreed | Committed | Applied | Fault | Thawed | Failure | RankSilent
    | Fenced | SetAside | Recovery | Gap | Checkpoint
)  # fmt: skip


def name_of(event: AnyEvent) -> str:
    """What an event is called in a log."""
    return _snake_case(type(event).__name__)


NAMES = tuple(_snake_case(kind.__name__) for kind in get_args(AnyEvent))
"""What all events are called in a log."""


LEVELS: tuple[Level, ...] = get_args(Level)
_OF_MICROBATCHES = frozenset({MicrobatchStarted, MicrobatchFinished, BucketPassed, Extended})
_OF_STEPS = frozenset({Plan, Reduced, Transferred, Voted, Committed, Applied})
LEFT_OUT: dict[Level, frozenset[type]] = {
    "microbatches": frozenset(),
    "steps": _OF_MICROBATCHES,
    "faults": _OF_MICROBATCHES | _OF_STEPS,
}
"""The events that a trace of each level does not have."""


class Log(Protocol):
    """Where a process records its events."""

    def record(self, event: Event) -> None:
        """Stamp the event with the time and keep it."""


class EventLog:
    """Appends events to a file that other processes append to at the same time, where there is no recorder (`ring`).

    Each event is one `write` of a whole line to a descriptor opened with O_APPEND: lines of several threads and processes
    never mix, and an event that was recorded survives the end of its process, SIGKILL included. Nothing is synced to disk: a
    power failure may lose the newest events, never a running job's.
    """

    def __init__(self, path: str | Path, started_at: float) -> None:
        """`started_at`: `time.monotonic()` of the launcher at the start of the run, zero of the log's clock."""
        self._path = str(path)
        self._started_at = started_at
        self._encode = msgspec.json.Encoder().encode
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def record(self, event: Event) -> None:
        """Stamp the event with the time and append it. Raises OSError when it cannot be written in full."""
        seconds = round(time.monotonic() - self._started_at, 6)
        line = self._encode(msgspec.structs.replace(event, t=seconds)) + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(errno.ENOSPC, "the event log took only a part of a line; is the disk full?", self._path)

    def close(self) -> None:
        """Release the descriptor; the log cannot be used after it."""
        os.close(self._file)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Recorder:
    """Records the events of one rank: each carries the rank's place. Without a log it records nothing."""

    def __init__(self, log: Log | None, *, replica: int, rank: int) -> None:
        self._log, self._replica, self._rank = log, replica, rank

    def __call__(self, event: Callable[..., Event], **fields: object) -> None:
        """Make the event of this rank with `fields`, and append it."""
        if self._log is not None:
            self._log.record(event(replica=self._replica, rank=self._rank, **fields))


class TraceError(ValueError):
    """A log that cannot be read; the message names file, line and field."""


_decode = msgspec.json.Decoder(AnyEvent).decode


def parse(line: bytes) -> tuple[AnyEvent | None, str]:
    """The event of one line of a log (with its newline, if it has one), and the fragment that stands before it or in its place.

    A process that is killed while it writes can leave the beginning of a line: at the end of the file, or with the next
    process's event right behind it. Such a fragment is no event and no error. Everything else that is not an event of this
    version raises ValueError.
    """
    whole = line.endswith(b"\n")
    if whole and line.startswith(_START_OF_EVENT):
        try:
            return _decode(line), ""
        except msgspec.DecodeError:  # a fragment stands before the event, or it is none: that is told below
            pass
    start = line.rfind(_START_OF_EVENT)
    fragment = line[: max(start, 0)] if whole else line
    if not fragment.startswith(_START_OF_EVENT[: len(fragment)]):
        raise ValueError(f"not an event: {line[:60]!r}")
    try:
        event = _decode(line[max(start, 0) :]) if whole else None
    except msgspec.DecodeError as error:  # ValidationError included; its message names the field
        raise ValueError(str(error)) from error
    return event, fragment.decode(errors="replace")


def read(path: str | Path, on_cut: Callable[[int, str], None] | None = None) -> Iterator[tuple[int, AnyEvent]]:
    """Yield (line number from 1, event) of a log in its order, one by one; numbers go on from one part of it to the next.

    `path` is a run directory, or its `events.jsonl`, for all parts (`event_files`); or one file, compressed or not.
    `on_cut(line, fragment)` is told of every fragment (see `parse`). Raises `TraceError` for what is no event, and
    FileNotFoundError.
    """
    number, place = 0, Path(path)
    try:
        for number, (place, line_of_file, line) in enumerate(event_files.lines(Path(path)), start=1):
            try:
                event, fragment = parse(line)
            except ValueError as error:
                raise TraceError(f"{place}:{line_of_file}: {error}") from error
            if fragment and on_cut is not None:
                on_cut(number, fragment)
            if event is not None:
                yield number, event
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{place}, after line {number} of the trace: {error}; the compressed file is damaged") from error
