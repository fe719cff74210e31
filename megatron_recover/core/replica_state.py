"""State, inputs and effects of the machine of one replica (`core/replica.py`)."""

from __future__ import annotations

import enum

from megatron_recover.core.membership_messages import AddRequests, JoinRefused, LeaderMessage, NewGeneration, Void
from megatron_recover.core.rank_messages import Order, Plan, Report, Stop
from megatron_recover.core.speed import Speeds
from megatron_recover.core.tree import TREE_ABOVE
from megatron_recover.core.values import (
    Ballot,
    BucketId,
    Claim,
    Commitment,
    Contribution,
    Generation,
    Held,
    Journal,
    MicrobatchId,
    Record,
    ReplicaId,
    Shape,
    Status,
    Statuses,
    Value,
    Version,
    Vote,
    Votes,
    Work,
)


class ReplicaPhase(enum.Enum):
    """The place of a replica in its generation."""

    JOINING = "joining"
    """The replica is in no generation: yet, or, as a newcomer, again."""
    PROMISING = "promising"
    """The leader waits for all ranks of its replica to promise the generation."""
    EXCHANGING = "exchanging"
    """The replica has sent its status and waits for the status of every older member.

    A newcomer waits for its `Admission` instead."""
    IDLE = "idle"
    """All statuses have arrived; the training loop has not begun the step."""
    WORKING = "working"
    """The ranks compute and reduce."""
    VOTED = "voted"
    """All ranks hold all results; the replica waits for the vote of every member."""
    STOPPED = "stopped"
    """The replica was ordered to stop, and ignores every input."""


class Admission(Value, frozen=True):
    """The common plan, from the older member with the lowest id to a newcomer that it admits."""

    replica: ReplicaId
    """The sender."""
    generation: Generation
    plan: Plan
    """The newcomer's own plan."""
    committed: Commitment | None
    """The record of the step before; None before the first."""
    speeds: Speeds
    """The speeds that all members have learned from the committed records."""


class HoldAsked(Value, frozen=True):
    """A newcomer asks a member to keep the pass of the training step `label` open.

    It is sent before that step begins (`core/holding.py`).
    """

    replica: ReplicaId
    """The newcomer."""
    label: str


class Hold(Value, frozen=True):
    """A member keeps the pass of a training step open for newcomers (`core/holding.py`)."""

    label: str
    """Label of the step, which may be one that has not begun."""
    generation: Generation
    """The generation in which the hold began. It ends with it."""
    newcomers: tuple[ReplicaId, ...]
    """The newcomers for which the pass is or was kept open, ascending."""
    is_asked: bool
    """True if a newcomer asked for it (`HoldAsked`); False if it came with a claim."""
    released: tuple[ReplicaId, ...] = ()
    """Those of them that do not need it any more, ascending."""


class ReplicaState(Value, frozen=True):
    """The state of a replica's machine; the first one is `ReplicaState(replica, shape)`."""

    replica: ReplicaId
    shape: Shape
    tree_above: int = TREE_ABOVE
    """Largest roster whose members send status and vote to each other directly; larger: a tree.

    All replicas have the same value.
    """
    min_replicas: int = 1
    """Least number of members that stay where others leave. All replicas have the same value."""
    phase: ReplicaPhase = ReplicaPhase.JOINING
    generation: Generation = 0
    roster: tuple[ReplicaId, ...] = ()
    """The roster as announced; from the common plan on the working roster (`core/joining.py`)."""
    joins: tuple[Claim, ...] = ()
    """Claims of the unproven newcomers in `roster`, by replica."""
    step: int = 0
    """The step that this replica has not committed yet."""
    work: Work | None = None
    """Work of `step`; None until the training loop has begun the step."""
    stays: bool = False
    """`Begun.stays` of the newest step that rank 0 has begun."""
    requests: tuple[str, ...] = ()
    """Requests that all votes carry from now on.

    Sources: ranks (`Begun`), the coordinator (`NewGeneration`, `AddRequests`), and every record
    that was committed.
    """
    promised: tuple[int, ...] = ()
    """Ranks that have promised `generation`, ascending."""
    contributions: tuple[Contribution, ...] = ()
    """Microbatch ids that this replica's local gradients of `step` hold or will hold."""
    held: tuple[tuple[Held, ...], ...] = ()
    """Results of `step` that each rank holds complete, by rank and bucket; empty before a plan."""
    digests: tuple[tuple[int, int], ...] = ()
    """(rank, digest of its state as `step` begins), by rank; only of steps with `Work.digests`."""
    plan: Plan | None = None
    """The plan that the ranks carry out or, in phase IDLE, that waits for the step to begin."""
    statuses: tuple[Status, ...] = ()
    """Newest status of each member, this replica's own included, by replica. Those of a generation
    are dropped once its common plan is made."""
    votes: tuple[Ballot, ...] = ()
    """Votes for `step` in `generation`, equal votes in one ballot."""
    committed: Record | None = None
    """Record of `step - 1`; None before the first commit."""
    committed_digest: bytes = b""
    """Digest of that record, for a newcomer that has it without its versions; else empty."""
    blocked: bool = False
    """True once this replica has requested a newer generation, or reported what leads to one, in
    `generation`."""
    waited_for: tuple[ReplicaId, ...] = ()
    """Members that the replica waited for when it left a generation, until `Entered` names them."""
    trusted_from: Generation = 0
    """`NewGeneration.trusted_from` of `generation`."""
    void: Void | None = None
    """`NewGeneration.void` of the newest generation that had one."""
    must_void: bool = False
    """True while the ranks hold something of the void step that no plan has voided yet."""
    is_alone: bool = False
    """True while the coordinator counts as lost (`CoordinatorLost`)."""
    is_last: bool = False
    """True once a vote of this replica has said that it `is_alone`. It then enters no newer
    generation (`core/grants.py`, Note [Last generation])."""
    ended: tuple[int, ...] = ()
    """Ranks whose training loop has ended, ascending."""
    pace_ns: int = 0
    """Nanoseconds per microbatch in the last pass that was measured; 0 before the first."""
    speeds: Speeds = Speeds()
    """Speeds that all committed records give."""
    journal: Journal = Journal()
    """Journal of `step`, as rank 0 sent it with its last promise."""
    served_label: str = ""
    """Label of the training step that `served` is about; empty before the first digest."""
    served: tuple[tuple[int, int], ...] = ()
    """(rank, digest of the state with which the step `served_label` begins), by rank. Digests of
    what a member serves, and of what a newcomer has read."""
    is_closed: bool = False
    """True once `Close` was ordered in `step`: newcomers are too late for it."""
    hold: Hold | None = None
    """The pass that this member keeps open, or will keep open; None: none."""
    was_held: bool = False
    """True once a hold of `step` has ended. There is no second one in a step."""
    close_waits: bool = False
    """True while `Close` is due and the hold keeps it back."""
    claim: Claim | None = None
    """The newest claim of this replica; None if it never was a newcomer, or gave the claim up."""
    admitted_in: Generation = 0
    """Newest generation in which this replica, as a newcomer, was admitted or went on without older
    members; 0: none, so its training has not begun."""
    admission: Admission | None = None
    """The newest `Admission` that came before this replica could use it."""


# --- Inputs: NewGeneration, AddRequests, Stop (coordinator), Report, PeerMessage, and: ------------


class LinkLost(Value, frozen=True):
    """The link to another leader broke; messages on it may be lost."""

    peer: ReplicaId
    detail: str = ""


class WaitExpired(Value, frozen=True):
    """A wait has lasted `stall_s`; ignored unless the wait is of this generation and step."""

    generation: Generation
    step: int


class CoordinatorLost(Value, frozen=True):
    """The link to the coordinator broke, or the coordinator is silent for too long."""

    is_over: bool = False
    """True if the coordinator is heard again, after a silence."""


class SendClaim(Value, frozen=True):
    """The newcomer's driver has it ask a member to vouch for it."""

    member: ReplicaId


class AskHold(Value, frozen=True):
    """The newcomer's driver has it ask a member to keep the pass of the step `label` open."""

    member: ReplicaId
    label: str


class HoldExpired(Value, frozen=True):
    """A hold has kept `Close` back for `hold_s`. Ignored unless the step that runs is `label`."""

    label: str


Input = (
    CoordinatorLost | NewGeneration | AddRequests | Stop | Report | Status | Statuses | Vote | Votes | LinkLost | WaitExpired
    | Claim | JoinRefused | Admission | SendClaim | HoldAsked | AskHold | HoldExpired
)  # fmt: skip


# --- Effects --------------------------------------------------------------------------------------


class ToRanks(Value, frozen=True):
    """An order to send to every rank of this replica."""

    order: Order


PeerMessage = Status | Statuses | Vote | Votes | Claim | JoinRefused | Admission | HoldAsked
"""A message between leaders."""


class ToPeers(Value, frozen=True):
    """A message to send to the leaders of `peers`.

    `peers` is empty in a roster of one. `peers` is also empty for a replica's own status or vote in
    a tree, where neighbours receive it in forwarded `Statuses` or `Votes`. The trace needs the
    effect.
    """

    peers: tuple[ReplicaId, ...]
    message: PeerMessage


class ToCoordinator(Value, frozen=True):
    """A message to send to the coordinator."""

    message: LeaderMessage


class Decided(Value, frozen=True):
    """The decisions of a status exchange, and why; the plan follows once the step begins."""

    step: int
    generation: Generation
    decided: tuple[tuple[BucketId, Version, ReplicaId], ...]
    """(bucket, version, member that holds the result and sends it to those without it)."""
    dealt: tuple[tuple[ReplicaId, MicrobatchId, tuple[BucketId, ...]], ...]
    """(member that computes, microbatch, buckets that miss it), as in `core.recovery.Recovery`."""
    reason: str


class Voted(Value, frozen=True):
    """This replica votes for `record`; the vote, with the digest, follows in `ToPeers`."""

    record: Record
    generation: Generation


class Committed(Value, frozen=True):
    """This replica has committed a step."""

    record: Record
    generation: Generation
    adopted: bool
    """True if the record came with a member's status instead of from votes."""


Effect = ToRanks | ToPeers | ToCoordinator | Decided | Voted | Committed

Step = tuple[ReplicaState, tuple[Effect, ...]]
"""The next state and the effects."""
