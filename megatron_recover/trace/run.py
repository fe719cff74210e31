"""The events of a run as a whole: membership, beginning and end, checkpoints, gaps of the trace."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.request import RequestKind, details
from megatron_recover.trace.event import Event, Part

Level = Literal["microbatches", "steps", "faults"]
"""Level of detail of a trace: every microbatch, every step, or faults and recoveries only. Each
level shows a part of what the level before shows."""
Size = Annotated[int, msgspec.Meta(ge=1)]


class Layout(Part, frozen=True, kw_only=True):
    """The layout of one replica's model over its ranks."""

    tp: Size
    pp: Size
    cp: Size = 1
    lanes: Size = 1
    """Data-parallel size inside the replica."""
    vpp: Size = 1
    """Model chunks per pipeline stage."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of one replica."""
        return self.tp * self.pp * self.cp * self.lanes


class Loss(Part, frozen=True, kw_only=True):
    """A replica that left the roster, and the reason."""

    replica: int
    kind: LossKind
    detail: str = ""


class RunStarted(Event, frozen=True, kw_only=True):
    """Launcher: the first event of a run."""

    replicas: int
    """Number of replicas at the start; their ids are 0..replicas-1."""
    layout: Layout
    determinism: str
    seed: int
    argv: tuple[str, ...]
    min_replicas: int = 1
    num_microbatches: int | None = None
    """M of every training step by the command line; None if it changes from step to step."""
    level: Level = "microbatches"
    """Level of the trace, which lacks the events in `LEFT_OUT` of this level."""


class NodeStarted(Event, frozen=True, kw_only=True):
    """Agent, in a run of several nodes: once, when it knows the number of its node."""

    node: int
    """Number of the node, as in `run.json`; node 0 has the coordinator."""
    name: str
    clock: int
    """Stamp of the node's clock from which the stamps `h` in its file count."""


class ClockRefused(Event, frozen=True, kw_only=True):
    """Rank, coordinator or agent: the stamp of a frame was too far ahead of this node's clock.

    The node's clock was not moved. So the order of the events of this node and of the sender's is
    unknown.
    """

    replica: int
    """Replica of the rank; -1: the agent or the coordinator."""
    rank: int
    ahead_s: float


class Joined(Event, frozen=True, kw_only=True):
    """Leader: its replica is ready for the first generation."""

    replica: int
    fingerprint: str
    """Digest of everything that must be equal on all replicas."""
    bucket_ranks: tuple[tuple[int, ...], ...]
    """Ranks inside the replica that hold each bucket, by bucket; the last bucket is the ledger."""


class Generation(Event, frozen=True, kw_only=True):
    """Coordinator: it announces a generation; from now on these replicas are the job."""

    generation: int
    roster: tuple[int, ...]
    losses: tuple[Loss, ...] = ()
    """Losses since the previous generation."""
    left: tuple[int, ...] = ()
    """Replicas that have left as requested since the previous generation. They are no losses."""
    reason: str = ""
    void: tuple[int, int] | None = None
    """(step, generation): contributions and results of that step from generations before this one
    are void. Later announcements repeat the newest. None if no step was made void."""
    gives_up: bool = False
    """True if that step was miscounted twice: it is committed without a result, and the run
    ends."""
    newcomers: tuple[int, ...] = ()
    """Members of `roster` that are unproven: no step was committed with their vote yet. The common
    plan may turn them away (`TurnedAway`)."""

    @property
    def request(self) -> str | None:
        """Return why the run is to end, or None if the generation has another purpose."""
        return None if self.losses else next(iter(details((self.reason,), RequestKind.EXIT)), None)

    @property
    def is_recovery(self) -> bool:
        """Return whether the generation follows from a fault.

        The first one does not, nor one that only carries a request, lets replicas leave or lets
        newcomers join.
        """
        return self.generation > 1 and self.request is None and not self.left and not self.is_join

    @property
    def is_join(self) -> bool:
        """Return whether newcomers join in the generation, and nothing was lost before it."""
        return bool(self.newcomers) and not self.losses


class Refused(Part, frozen=True, kw_only=True):
    """A replica that does not leave although that was requested."""

    replica: int
    why: str


class LeaveAsked(Event, frozen=True, kw_only=True):
    """Coordinator: it has judged a request that replicas leave the job, or judged one again."""

    replicas: tuple[int, ...]
    """Replicas that will leave; a later generation names them in `left`. They stay if a loss makes
    them indispensable, which another event of this kind reports, or if the run ends before."""
    reason: str
    """Name of what requested it, or of the loss since which a replica is indispensable."""
    refused: tuple[Refused, ...] = ()


class Granted(Event, frozen=True, kw_only=True):
    """Coordinator: it permits the writer to name a checkpoint (`core/grants.py`)."""

    number: int
    """Number of the grant in the run, from 1."""
    generation: int
    writer: int
    """The only replica that may use the grant."""


class Entered(Event, frozen=True, kw_only=True):
    """Leader: all ranks of its replica have promised to take part in no older generation."""

    replica: int
    generation: int
    seconds: float
    """Seconds since the generation was announced to this leader."""


class Stopping(Event, frozen=True, kw_only=True):
    """Coordinator: it ends the run with another exit code than 0."""

    exit_code: int
    reason: str


class RunFinished(Event, frozen=True, kw_only=True):
    """Launcher: the last event of a run, on each node. It shows that the node's trace is whole.

    A node that has ended and does not know how the job does records none.
    """

    exit_code: int
    reason: str = ""


class Checkpoint(Event, frozen=True, kw_only=True):
    """Writer: progress of a durable checkpoint. Rank 0 of every replica records `loaded`."""

    replica: int
    rank: int
    iteration: int
    phase: Literal["loaded", "started", "unnamed", "finished", "failed", "removed_partial"]
    """Phase of a save of `iteration`. `unnamed`: all is written, and the name waits for a grant of
    the coordinator. `removed_partial`: an incomplete checkpoint of `iteration`
    was removed. `loaded`, with `--load` and without `--finetune`: training begins after
    `iteration`, which is 0 if nothing was loaded."""
    detail: str = ""
    """Reason, folder and remedy of a failed save; the reason of `unnamed`; the folder of
    `loaded`."""
    grant: int | None = None
    """Number of the grant (`Granted`) under which the checkpoint got its name (`finished`)."""


class Gap(Event, frozen=True, kw_only=True):
    """Recorder: events of a rank were lost before this line.

    The rank's ring was full or damaged, an event could not be encoded, or the rank was stopped
    while it recorded one. `check` vouches for none of the steps that a gap touches.
    """

    replica: int
    """Replica of the rank; -1: the launcher."""
    rank: int
    """Rank; 0 for the launcher. In a merged trace, -k for the agent of node k."""
    num_events: int
    """Number of lost events; all events of a damaged part of a ring count as one. 0: unknown, since
    the trace of the node is absent or cut short (`trace/merging.py`)."""
    since: float
    """No lost event is older than this time, in seconds as `Event.t`. All may be younger, if an
    earlier gap of the rank was not yet stored when the first of them was lost."""
