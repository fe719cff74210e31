"""The events of a run as a whole: its membership, its beginning and end, what it saves, what its trace lacks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from megatron_recover.core.request import RequestKind, details
from megatron_recover.core.values import LossKind
from megatron_recover.trace.event import Event, Part

Level = Literal["microbatches", "steps", "faults"]
"""What a trace shows: every microbatch, every step, or faults and recoveries only. Each level is a part of the one before."""
Size = Annotated[int, msgspec.Meta(ge=1)]


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
    gives_up: bool = False
    """That step was miscounted twice: it is committed without a result, and the run ends."""

    @property
    def request(self) -> str | None:
        """Why the run is to end, where the generation was made for nothing but to carry that: it is no recovery."""
        return None if self.losses else next(iter(details((self.reason,), RequestKind.EXIT)), None)


class Entered(Event, frozen=True, kw_only=True):
    """Leader: all ranks of its replica have promised never to commit in an older generation."""

    replica: int
    generation: int
    seconds: float
    """Since the generation was announced to this leader."""


class Stopping(Event, frozen=True, kw_only=True):
    """Coordinator: the run cannot go on."""

    exit_code: int
    reason: str


class RunFinished(Event, frozen=True, kw_only=True):
    """Launcher: the last event of a run."""

    exit_code: int
    reason: str = ""


class Checkpoint(Event, frozen=True, kw_only=True):
    """Writer: progress of a durable checkpoint; or where a replica begins."""

    replica: int
    rank: int
    iteration: int
    phase: Literal["loaded", "started", "finished", "failed", "removed_partial"]
    """`loaded`, from rank 0 of every replica of a job with `--load`: training begins behind `iteration`; 0 where nothing was
    loaded."""
    detail: str = ""
    """Why it failed, where, and what to do; of `loaded` the folder."""


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
