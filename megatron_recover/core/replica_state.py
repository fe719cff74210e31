"""What the machine of one replica (`core/replica.py`) knows, takes in and gives out."""

from __future__ import annotations

import enum

from megatron_recover.core.speed import Speeds
from megatron_recover.core.tree import TREE_ABOVE
from megatron_recover.core.values import (
    Ballot,
    BucketId,
    Contribution,
    Generation,
    Held,
    Journal,
    LeaderMessage,
    MicrobatchId,
    NewGeneration,
    Order,
    Plan,
    Record,
    ReplicaId,
    Report,
    Shape,
    Status,
    Statuses,
    Stop,
    Value,
    Version,
    Void,
    Vote,
    Votes,
    Work,
)


class Phase(enum.Enum):
    """Where a replica is in its generation."""

    JOINING = "joining"
    """No generation yet."""
    PROMISING = "promising"
    """Waits for its own ranks to promise."""
    EXCHANGING = "exchanging"
    """Has sent its status; waits for the status of every member."""
    IDLE = "idle"
    """All statuses are there; its training loop has not begun the step."""
    WORKING = "working"
    """Its ranks compute and reduce."""
    VOTED = "voted"
    """All its ranks hold all results; waits for the vote of every member."""
    STOPPED = "stopped"
    """Told to stop. Nothing follows."""


class ReplicaState(Value, frozen=True):
    """What a leader knows. Start with `ReplicaState(replica, shape)`."""

    replica: ReplicaId
    shape: Shape
    tree_above: int = TREE_ABOVE
    """Above so many members status and vote go over a tree; the same in all replicas."""
    phase: Phase = Phase.JOINING
    generation: Generation = 0
    roster: tuple[ReplicaId, ...] = ()
    step: int = 0
    """The step that is not committed yet."""
    work: Work | None = None
    """The step's work once the training loop has begun it."""
    requests: tuple[str, ...] = ()
    """What all its votes ask for from now on: requests of its ranks (`Begun`), of generations (`NewGeneration`), and all that a
    record has carried."""
    promised: tuple[int, ...] = ()
    """Ranks that promised `generation`."""
    contributions: tuple[Contribution, ...] = ()
    """The ids that this replica's local gradients hold or will hold."""
    held: tuple[tuple[Held, ...], ...] = ()
    """Per rank its complete results of this step, by bucket."""
    digests: tuple[tuple[int, int], ...] = ()
    """(rank, digest of its state as this step begins), by rank; empty unless the step's record carries the state digest."""
    plan: Plan | None = None
    """The plan that the ranks obey, or (phase IDLE) that waits for the training loop to begin the step."""
    statuses: tuple[Status, ...] = ()
    """Newest status of each member, own included, by replica."""
    votes: tuple[Ballot, ...] = ()
    """Votes for this step."""
    committed: Record | None = None
    """Record of `step - 1`."""
    blocked: bool = False
    """A newer generation was asked for."""
    waited_for: tuple[ReplicaId, ...] = ()
    """Until `Entered` says it: whom this replica waited for when it left a generation."""
    trusted_from: Generation = 0
    """Of `generation` (`NewGeneration.trusted_from`)."""
    void: Void | None = None
    """Of `generation` (`NewGeneration.void`)."""
    must_void: bool = False
    """The ranks have something of the step that is void, and no plan has told them so."""
    ended: tuple[int, ...] = ()
    """Ranks whose training loop is over."""
    pace_ns: int = 0
    """What a microbatch took in the last pass that was measured."""
    speeds: Speeds = Speeds()
    """As of all steps that are committed."""
    journal: Journal = Journal()
    """Of this step, as rank 0 promised."""


# --- Inputs: NewGeneration and Stop (coordinator), Report (ranks), Status and Vote (other leaders), and: -------------------


class LinkLost(Value, frozen=True):
    """The link to another leader broke; messages may be lost."""

    peer: ReplicaId
    detail: str = ""


class WaitExpired(Value, frozen=True):
    """A wait took too long. Dropped unless the replica still waits in this generation and step."""

    generation: Generation
    step: int


Input = NewGeneration | Stop | Report | Status | Statuses | Vote | Votes | LinkLost | WaitExpired


# --- Effects -------------------------------------------------------------------------------------------------------------


class ToRanks(Value, frozen=True):
    """Send to every rank of this replica."""

    order: Order


Word = Status | Statuses | Vote | Votes
"""What leaders say to each other."""


class ToPeers(Value, frozen=True):
    """Send to these leaders. A roster of one has no peers, and in a tree others hear of a status or vote only from what is
    handed on: the effect still comes, when this replica says it."""

    peers: tuple[ReplicaId, ...]
    message: Word


class ToCoordinator(Value, frozen=True):
    """Send to the coordinator."""

    message: LeaderMessage


class Decided(Value, frozen=True):
    """A recovery plan was made: what was decided and why (the plan itself follows in `ToRanks`)."""

    step: int
    generation: Generation
    decided: tuple[tuple[BucketId, Version, ReplicaId], ...]
    """(bucket, version, a member that holds it)."""
    dealt: tuple[tuple[ReplicaId, MicrobatchId, tuple[BucketId, ...]], ...]
    """Who recomputes what, as `core.recovery.Recovery` has it."""
    reason: str


class Voted(Value, frozen=True):
    """This replica votes for `record`, in full; the vote itself, which has its digest, follows in `ToPeers`."""

    record: Record
    generation: Generation


class Committed(Value, frozen=True):
    """The step is committed here."""

    record: Record
    generation: Generation
    adopted: bool
    """The record came with a member's status instead of from votes."""


Effect = ToRanks | ToPeers | ToCoordinator | Decided | Voted | Committed
