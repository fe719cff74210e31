"""Decide which events of a run an operator is told at once, and in which words.

`run --on-event` gives notices to a command, as JSON. The same trace always gives the same
notices with the same numbers, so whoever has to begin anew knows by the number which were given.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.label import label_of
from megatron_recover.observe.follow.members import Members

MAX_LOSSES = 32
"""Largest number of lost replicas that one notice describes; `num_lost` counts all of them."""
MAX_TEXT = 1000
"""Characters of a reason, a detail or a path that a notice has."""
KILLED = "the launcher ended without a word, as after SIGKILL; nothing of the run is left"


class Notice(msgspec.Struct, kw_only=True, tag_field="event"):
    """The fields that every notice has. `event` names its kind."""

    v: int = 1
    """Version of the format."""
    number: int = 0
    """Number of the notice in its run, from 1."""
    time: str = ""
    """Time of the event, as ISO 8601 in UTC."""
    host: str = ""
    run_dir: str = ""
    dropped: int = 0
    """Number of notices so far that were not given to the command, as too many were waiting."""


class LostReplica(msgspec.Struct):
    """One lost replica, and why it was lost."""

    replica: int
    kind: str
    """Value of `core.membership_messages.LossKind`."""
    detail: str


class Lost(Notice, kw_only=True, tag="lost"):
    """Replicas were lost; the others are about to finish the step."""

    generation: int
    """The generation without them."""
    num_lost: int
    losses: list[LostReplica]
    replicas_live: int
    replicas_configured: int


class Degraded(Notice, kw_only=True, tag="degraded"):
    """The step in which replicas were lost is committed: the run trains on with fewer."""

    generation: int
    replicas_live: int
    replicas_configured: int
    replicas_min: int
    last_committed_iteration: int | None


class Joined(Notice, kw_only=True, tag="joined"):
    """Newcomers became members: the first step with their votes is committed."""

    generation: int
    newcomers: list[int]
    """At most `MAX_LOSSES`."""
    replicas_live: int
    replicas_configured: int
    last_committed_iteration: int | None


class SaveFailed(Notice, kw_only=True, tag="save_failed"):
    """A checkpoint could not be written; the run tries again later, or at its end gives up."""

    iteration: int
    detail: str
    last_durable_iteration: int | None


class Ended(Notice, kw_only=True, tag="ended"):
    """The run is over, well or not."""

    exit_code: int | None
    """None: the launcher was killed."""
    name: str
    """Meaning of the exit code in a few words."""
    reason: str
    last_committed_iteration: int | None
    last_durable_iteration: int | None


AnyNotice = Lost | Degraded | Joined | SaveFailed | Ended


class Notices:
    """The notices of one run, made from its events one by one."""

    WANTED = Members.WANTED | {"run_started", "committed", "recovery", "checkpoint", "run_finished"}
    """Names of the events that have an effect here."""

    def __init__(self, *, run_dir: str, host: str, began_at: float) -> None:
        """`began_at`: zero of the trace's clock, in seconds since the epoch."""
        self._run_dir, self._host, self._began_at = run_dir[:MAX_TEXT], host, began_at
        self._number = 0
        self._configured = self._min = 0
        self._members = Members()
        self._newest: trace.Generation | None = None
        self._is_repairing = False
        self._iteration: int | None = None
        self._durable: int | None = None
        self.has_ended = False
        """True once the notice of the end was made."""

    def take(self, event: trace.AnyEvent) -> Iterator[AnyNotice]:
        """Take the next event of the run; yield the notices that follow from it."""
        self._members.take(event)
        match event:
            case trace.RunStarted():
                self._configured, self._min = event.replicas, event.min_replicas
            case trace.Generation():
                self._newest, self._is_repairing = event, self._is_repairing or bool(event.losses)
                if event.losses:
                    yield self._made(self._lost(event), event.t)
            case trace.Committed():
                if label_of(event.label).is_training:
                    self._iteration = max(self._iteration or 0, label_of(event.label).iteration)
                yield from self._goes_on(event.generation, event.t)
            case trace.Recovery(phase="commit"):  # as well, since `--trace-level faults` leaves commits out
                yield from self._goes_on(event.generation, event.t)
            case trace.Proven():
                joined = Joined(
                    generation=event.generation, newcomers=[*event.newcomers[:MAX_LOSSES]],
                    replicas_live=len(self._members.roster), replicas_configured=self._configured,
                    last_committed_iteration=self._iteration,
                )  # fmt: skip
                yield self._made(joined, event.t)
            case trace.Checkpoint(phase="finished"):
                self._durable = event.iteration
            case trace.Checkpoint(phase="loaded"):
                self._durable = event.iteration or None
            case trace.Checkpoint(phase="failed"):
                failed = SaveFailed(
                    iteration=event.iteration, detail=event.detail[:MAX_TEXT], last_durable_iteration=self._durable
                )
                yield self._made(failed, event.t)
            case trace.RunFinished():
                yield self.ended(event.exit_code, event.reason, event.t)

    def ended(self, exit_code: int | None, reason: str, seconds: float) -> Ended:
        """Return the notice of the end, `seconds` after the start of the run.

        `exit_code`: see `Ended`.
        """
        self.has_ended = True
        name = "killed" if exit_code is None else ExitCode.words(exit_code)
        ended = Ended(
            exit_code=exit_code, name=name, reason=reason[:MAX_TEXT], last_committed_iteration=self._iteration,
            last_durable_iteration=self._durable,
        )  # fmt: skip
        return self._made(ended, seconds)

    def _goes_on(self, generation: int, seconds: float) -> Iterator[Degraded]:
        """Yield that the run goes on, at the first commit without what was lost."""
        if self._is_repairing and self._newest is not None and generation >= self._newest.generation:
            self._is_repairing = False
            yield self._made(self._degraded(self._newest), seconds)

    def _lost(self, event: trace.Generation) -> Lost:
        losses = [LostReplica(one.replica, one.kind.value, one.detail[:MAX_TEXT]) for one in event.losses[:MAX_LOSSES]]
        return Lost(
            generation=event.generation, num_lost=len(event.losses), losses=losses, replicas_live=len(self._members.roster),
            replicas_configured=self._configured,
        )  # fmt: skip

    def _degraded(self, newest: trace.Generation) -> Degraded:
        return Degraded(
            generation=newest.generation, replicas_live=len(self._members.roster), replicas_configured=self._configured,
            replicas_min=self._min, last_committed_iteration=self._iteration,
        )  # fmt: skip

    def _made[N: Notice](self, notice: N, seconds: float) -> N:
        self._number += 1
        notice.number, notice.host, notice.run_dir = self._number, self._host, self._run_dir
        notice.time = datetime.fromtimestamp(self._began_at + seconds, UTC).isoformat(timespec="milliseconds")
        return notice
